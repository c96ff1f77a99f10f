"""What commands say of a plan and a run, and of what is given to the wrong one of them."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest
from support.commands import command

from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.cli import main
from dicompiler.driver.artifact import reopen
from dicompiler.driver.summary import load

UNPOWERED = """
[[host]]
name = "a"
memory = "1 GiB"
[[host]]
name = "b"
memory = "1 GiB"
[[device]]
name = "a"
host = "a"
rate = "1 GFLOP/s"
[[device]]
name = "b"
host = "b"
rate = "1 GFLOP/s"
[network]
kind = "switch"
bandwidth = "1 Gbit/s"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saying")
    onnx.save(networks.build("lenet"), directory / "lenet.onnx")
    (directory / "boards.toml").write_text(UNPOWERED)
    return directory


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_compile_and_run_tell_who_decided_the_prediction_and_what_to_try(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    words = ("compile", "lenet.onnx", "--platform", "boards.toml", "-o", "net")
    told = said(capsys, *words, "--strategy", "auto{strategies=single,modnn tries=0}")
    assert "\nplan: by auto, which chose " in told and "\nheld back: " in told and "\nto try: " in told
    assert "energy" not in told and max(map(len, told.splitlines())) <= 80
    summary = load(Path("net"))
    assert summary is not None and f"plan: by auto, which chose {summary.chosen}\n" in told
    decision = reopen("net")[0].decision
    assert decision is not None and decision.chosen == summary.chosen

    one = said(capsys, "run", "net")
    assert "\na frame: " in one and " measured on\n" in one.replace("measured on this", "measured on\nthis")
    assert "queueing" not in one
    many = said(capsys, "run", "net", "--frames", "9", "--in-flight", "3")
    assert "\nqueueing: 3 frames were on their way at once" in many and "\nbetween frames of a stream: " in many
    assert max(map(len, many.splitlines())) <= 80


def test_lists_fit_a_screen_and_show_options_with_help_and_platforms_with_their_rates() -> None:
    for kind in ("strategies", "targets", "platforms", "cost-models"):
        assert max(map(len, command("list", kind).stdout.splitlines())) <= 80
    assert re.search(
        r"^rpi4xN +13\.6 GFLOP/s, 6\.4 W, 4\.29 GB; gateway", command("list", "platforms").stdout, re.MULTILINE
    )
    options = command("list", "strategies", "cpsat").stdout
    assert "tries     200" in options and "plans to try around the best one" in options
    assert "pi07    pi07      4  13.6 GFLOP/s, 6.4 W\n" in command("list", "platforms", "rpi4x7").stdout
    assert "(did you mean 'cpsat'?)" in command("list", "strategies", "cpsta").stderr


def test_what_is_given_to_the_wrong_command_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = place / "net"
    main(["compile", str(place / "lenet.onnx"), "--platform", "rpi4x2", "--strategy", "modnn", "-o", str(net)])
    model = net / "reference" / "model.onnx"
    for words, line in (
        (
            ("compile", str(net), "--platform", "rpi4x2", "-o", "x"),
            f"it is an artifact of 'dicompiler compile' (its own is {model})",
        ),
        (("compile", str(model), "--platform", "rpi4x2", "--plan", str(net), "-o", "x"), "it is an artifact of"),
        (("run", str(net / "pi01")), f"it is part of the artifact {str(net)!r}: give that"),
        (("run", str(place / "lenet.onnx")), "no artifact of dicompiler: compile a model into it first"),
    ):
        assert main(words) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert line in error, error
    with pytest.raises(DicompilerError, match="no artifact"):
        reopen(place)
