"""Tests of profiling over ssh, on boards that are namespaces with an sshd each."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from support.boards import NOWHERE, Cluster, cluster

from dicompiler import networks
from dicompiler.cli import main
from dicompiler.ir.cluster import Link, Network
from dicompiler.ir.platform import Platform

OPTIONS = ("--tiles", "1", "--repeat", "2", "--threads", "1", "--target", "none")


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("boards"), ("pi01", "pi02")) as made, made.inside():
        yield made


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("net") / "lenet.onnx"
    onnx.save(networks.build("lenet"), path)
    return path


def python(place: Path, line: str) -> str:
    """Write a script that runs this Python after a line of shell, and return its path."""
    place.write_text(f'#!/bin/sh\n{line}\nexec {sys.executable} "$@"\n')
    place.chmod(0o755)
    return str(place)


@pytest.mark.slow
def test_measures_boards_and_names_those_that_cannot_be_measured(
    boards: Cluster, net: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # With the option -S, this Python does not find any installed package.
    bare = python(tmp_path / "bare", 'set -- -S "$@"')
    more = f'[[host]]\nname = "pi03"\nssh = "root@{NOWHERE}"\n'
    more += f'[[host]]\nname = "pi04"\nssh = "root@{boards.boards["pi01"].address}"\npython = "{bare}"\n'
    hosts, output = boards.hosts(tmp_path / "hosts.toml", more), tmp_path / "measured.toml"
    compiled = ["compile", str(net), "--strategy", "modnn", "-o", str(tmp_path / "net")]
    assert main([*compiled, "--platform", "rpi4x2"]) == 0
    run = ["deploy", str(tmp_path / "net"), "--hosts", str(hosts), "--insecure", "--frames", "4", "--in-flight", "1"]
    assert main([*run, "--log", str(tmp_path / "run.json")]) == 0
    capfd.readouterr()

    words = ["profile", str(net), "--hosts", str(hosts), "-o", str(output), "--force", "--json", *OPTIONS]
    assert main([*words, "--platform", "rpi4x4", "--log", str(tmp_path / "run.json")]) == 0
    captured = capfd.readouterr()
    document = json.loads(captured.out)
    assert [one["used"] for one in document["boards"]] == [True, True, False, False]
    why = {one["host"]: one["reason"] for one in document["boards"]}
    assert why["pi03"].endswith(f"is it on, and does sshd run there? (ssh, port in {hosts})")
    assert "its Python has no numpy" in why["pi04"] and "install numpy onnxruntime' there" in why["pi04"]
    assert captured.err.count("dicompiler: warning: device 'pi03' on ") == 1

    found, published = Platform.load(output), Platform.load("rpi4x2").devices[0].rate
    assert [one.rate == published for one in found.devices] == [False, False, True, True]
    assert {one.power_active for one in found.devices} == {6.4}
    assert "corrected by 'dicompiler calibrate'" in found.description
    (link,) = document["links"]
    assert sorted(link["hosts"]) == ["pi01", "pi02"] and link["bandwidth"] > 1e6
    cost = f"profile{{file={','.join(document['profiles'])} others=true force=true}}"
    assert main([*compiled, "--platform", str(output), "--cost", cost]) == 0


@pytest.mark.slow
def test_omits_throttled_board_unless_forced(
    boards: Cluster, net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vcgencmd").write_text("#!/bin/sh\necho throttled=0x50005\n")
    (tmp_path / "vcgencmd").chmod(0o755)
    offers = 'onnxruntime.get_available_providers = lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]'
    (tmp_path / "sitecustomize.py").write_text(f"import onnxruntime\n{offers}\n")
    hot = python(tmp_path / "hot", f"PATH={tmp_path}:$PATH PYTHONPATH={tmp_path}; export PATH PYTHONPATH")
    (tmp_path / "hosts.toml").write_text(
        f'[[host]]\nname = "pi01"\nssh = "root@{boards.boards["pi01"].address}"\npython = "{hot}"\n'
    )
    output = tmp_path / "m.toml"
    words = ["profile", str(net), "--hosts", str(tmp_path / "hosts.toml"), "-o", str(output), *OPTIONS]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert "the board throttles (under-voltage, it is throttled): cool it" in error and error.count("\n") == 1
    assert not output.exists() and not (tmp_path / "m.profiles").exists()
    assert main([*words, "--force"]) == 0
    assert "its onnxruntime offers CUDAExecutionProvider, which is not measured" in capsys.readouterr().err
    (device,) = Platform.load(output).devices
    assert (device.name, device.host, device.rate > 1e6, device.cores > 0) == ("pi01", "pi01", True, True)


def test_options_of_boards_need_hosts(net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--force", "-o", "x"],
        ["--hosts", "h.toml", "--package", "x"],
        ["--hosts", "h", "-o", "x", "--device", "d"],
    ):
        assert main(["profile", str(net), *words]) == 2
        assert "--hosts" in capsys.readouterr().err
    assert main(["profile", str(net), "--hosts", str(tmp_path / "none.toml"), "-o", str(tmp_path / "x")]) == 1
    assert "no such file" in capsys.readouterr().err


def test_deviating_links_get_their_own_entries() -> None:
    from dicompiler.measure.remote_profiling import _merge_links

    links = [Link(("a", "b"), 1e8, 1e-3), Link(("a", "c"), 1.02e8, 1e-3), Link(("b", "c"), 1e7, 4e-3)]
    found = _merge_links(Network("switch", 1e9, links=(Link(("a", "d"), 5e6),)), links)
    assert (found.bandwidth, found.latency) == (1e8, 1e-3)
    assert [link.hosts for link in found.links] == [("a", "d"), ("b", "c")]
    assert _merge_links(Network("gateway", 1e9), links).links == ()
