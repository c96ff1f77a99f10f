"""Output of commands about plans and runs, and errors for a file that belongs to another command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import pytest
from support.commands import command

from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.cli import main
from dicompiler.cli.list import PLUGIN_KIND_NAMES
from dicompiler.cli.run_output import show_queueing, show_run
from dicompiler.cli.table import print_table
from dicompiler.driver.artifact import reopen_artifact
from dicompiler.driver.compile_result import CompileSummary, load_summary
from dicompiler.target.run_records import DeviceReport, RunResult

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
    directory = tmp_path_factory.mktemp("output")
    onnx.save(networks.build("lenet"), directory / "lenet.onnx")
    (directory / "boards.toml").write_text(UNPOWERED)
    return directory


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_compile_and_run_print_strategy_prediction_and_advice(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    arguments = ("compile", "lenet.onnx", "--platform", "boards.toml", "-o", "net")
    text = run_command(capsys, *arguments, "--strategy", "auto{strategies=single,modnn tries=0}")
    assert "\nplan: by auto, which chose " in text and "\nbottleneck: " in text and "\nadvice: " in text
    assert "energy" not in text and max(map(len, text.splitlines())) <= 80
    summary = load_summary(Path("net"))
    assert summary is not None and f"plan: by auto, which chose {summary.chosen_strategy}\n" in text
    decision = reopen_artifact("net")[0].decision
    assert decision is not None and decision.chosen_strategy == summary.chosen_strategy

    single_frame = run_command(capsys, "run", "net")
    assert "\npredicted: a frame takes " in single_frame and "\nmeasured: a frame took " in single_frame
    assert "queueing" not in single_frame
    stream = run_command(capsys, "run", "net", "--frames", "9", "--in-flight", "3")
    assert "\nqueueing: up to 3 frames were in flight" in stream and " before its start " in " ".join(stream.split())
    text = " ".join(run_command(capsys, "simulate", "lenet.onnx", "--platform", "boards.toml", "--frames", "9").split())
    assert " it waited " in text and "A frame without queueing takes " in text
    assert "\npredicted: one frame every " in stream and "\nmeasured: one frame every " in stream
    assert max(map(len, stream.splitlines())) <= 80


def test_parts_of_the_time_of_queueing_frames_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    show_queueing((1.0, 2.0, 6.0), (0.0, 0.0, 4.5), 3, alone_s=1.4)
    text = " ".join(capsys.readouterr().out.split())
    assert "a frame took 3.00 s: it waited 1.50 s before its start and finished 1.50 s later. A frame without" in text


def test_output_about_replicas_names_the_frames_that_bytes_are_for(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    arguments = ("lenet.onnx", "--platform", "boards.toml")
    search = ("--objective", "throughput", "--strategy", "replicate{group_size=1}")
    text = run_command(capsys, "compile", *arguments, *search, "-o", "replicas")
    assert "\nsends and bytes: totals of 2 frames, one for each replica\n" in text
    assert "\nweights and layer outputs, fullest host " in text and ", the largest share of all hosts: " in text
    assert main(("simulate", *arguments, "--plan", "replicas/plan.json", "--frames", "4")) == 0
    output = capsys.readouterr()
    assert "is worse than that of one device" not in output.err
    assert ", as a mean over 2 replicas" in " ".join(output.out.split())


def test_json_and_terminal_agree(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    arguments = ("lenet.onnx", "--platform", "rpi4x2", "--strategy", "auto{strategies=single,modnn tries=0}", "-o")
    for command_, written in (("compile", "out"), ("plan", "out.json")):
        document = json.loads(run_command(capsys, command_, *arguments, written, "--json"))
        terminal = " ".join(run_command(capsys, command_, *arguments, written).split())
        for line in CompileSummary(**document["summary"]).lines:
            assert line in terminal


@pytest.mark.slow
def test_energy_is_shown_only_if_the_platform_has_powers(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    for platform, powered in (("boards.toml", False), ("rpi4x2", True)):
        arguments = ("lenet.onnx", "--platform", platform)
        run_command(capsys, "compile", *arguments, "--strategy", "modnn", "-o", f"{powered}")
        (place / "rows.json").write_text(
            run_command(capsys, "compare", *arguments, "--strategies", "modnn,single", "--json")
        )
        few = ("--generations", "2", "--population", "8")
        front = run_command(capsys, "explore", *arguments, *few, "-o", f"front-{powered}")
        run_command(
            capsys, "report", f"{powered}", "--compare", "rows.json", "--front", f"front-{powered}", "-o", "report.html"
        )
        page = (place / "report.html").read_text()
        assert ("energy" in front, ">energy" in page) == (powered, powered)
        assert ("energy" in (place / f"front-{powered}" / "front.json").read_text()) is powered
    arguments = ("explore", "lenet.onnx", "--platform", "boards.toml", "--objectives", "energy", *few, "-o", "none")
    assert main(arguments) == 2 and "the platform does not state powers" in capsys.readouterr().err
    assert not (place / "none").exists()
    arguments = ("explore", "lenet.onnx", "--platform", "rpi4x2", "--strategy", "cpsat", *few, "-o", "none")
    expected = "dicompiler: error: explore: strategy 'cpsat' has no option 'generations': omit --generations\n"
    assert main(arguments) == 2 and capsys.readouterr().err == expected


def test_wide_table_continues_below_itself(capsys: pytest.CaptureFixture[str]) -> None:
    heads = ("strategy", *(f"a number of {i}" for i in range(9)))
    print_table(heads, [("a" * 20, *map(str, range(9))), ("b", *map(str, range(9)))], right=range(1, 10))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and lines.count("") == 2
    assert [line.split()[1:] for line in lines if line.startswith("b ")] == [list("0123"), list("4567"), ["8"]]


@pytest.mark.slow
def test_lists_fit_80_columns_and_show_options_and_rates(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for kind in (*PLUGIN_KIND_NAMES, "networks"):
        assert max(map(len, run_command(capsys, "list", kind).splitlines())) <= 80, kind
    assert re.search(
        r"^rpi4-gateway-xN +13\.6 GFLOP/s, 6\.4 W, 4\.29 GB; gateway", command("list", "platforms").stdout, re.MULTILINE
    )
    options = command("list", "strategies", "cpsat").stdout
    assert re.search(r"^tries +int +200 ", options, re.MULTILINE) and "plans to try around the" in options
    assert "pi07    pi07      4  13.6 GFLOP/s, 6.4 W\n" in command("list", "platforms", "rpi4x7").stdout
    assert "(did you mean 'cpsat'?)" in command("list", "strategies", "cpsta").stderr


def test_error_names_a_file_for_another_command(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = place / "net"
    main(["compile", str(place / "lenet.onnx"), "--platform", "rpi4x2", "--strategy", "modnn", "-o", str(net)])
    model = net / "reference" / "model.onnx"
    for arguments, line in (
        (
            ("compile", str(net), "--platform", "rpi4x2", "-o", "x"),
            f"it is an artifact of 'dicompiler compile' (did you mean {model}?)",
        ),
        (("compile", str(model), "--platform", "rpi4x2", "--plan", str(net), "-o", "x"), "it is an artifact of"),
        (("run", str(net / "pi01")), f"it is part of the artifact {str(net)!r}: give the path of "),
        (("report", str(net / "pi01"), "-o", "x"), f"it is part of the artifact {str(net)!r}: give the path of "),
        (
            ("run", str(place / "lenet.onnx")),
            f"not an artifact of dicompiler: it is a model: 'dicompiler compile {place / 'lenet.onnx'} --platform ",
        ),
        (
            ("simulate", str(net)),
            f"'dicompiler simulate {model} --platform {net / 'platform.toml'} --plan {net / 'plan.json'}'",
        ),
    ):
        assert main(arguments) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert line in error, error
    with pytest.raises(DicompilerError, match="not an artifact"):
        reopen_artifact(place)


def test_device_that_was_down_at_the_end_has_no_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    """Measurements of 0 would look as if the device had computed nothing."""
    measured = DeviceReport("pi01", 0.5, 0.25, 0.125, {0: 40}, (0.5,), 64_000_000)
    show_run(RunResult(({},), (measured, DeviceReport("pi02", 0.0, 0.0, 0.0, {}, (0.0,), 0)), (0.75,)))
    _, first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.split() == ["pi01", "0.5000", "0.2500", "0.1250", "40", "64.0"]
    assert second.split() == ["pi02", *["-"] * 5]
