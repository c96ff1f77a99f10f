"""`dicompiler compare`: the table of strategies, the best strategy, and unknown names."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from dicompiler import networks
from dicompiler.cli import main


def test_compare_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "lenet.onnx")
    onnx.save(networks.build("lenet", 0), path)
    common = ["compare", path, "--platform", "rpi4x3", "--strategies"]
    assert main([*common, "single,modnn,pipeline{devices=pi02,pi01}"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].split()[:2] == ["strategy", "latency"]
    assert [line.split()[0] for line in lines[1:4]] == ["single", "modnn", "pipeline{devices=pi02,pi01}"]
    assert "no plan of these strategies is better than a single" in text and "no plan's latency is below" in text
    assert main([*common, "single,modnn", "--json"]) == 0
    given = json.loads(capsys.readouterr().out)
    assert given["best"] == "single" and [row["strategy"] for row in given["results"]] == ["single", "modnn"]
    assert main([*common, "single,modn"]) == 2
    assert "unknown strategy 'modn'" in capsys.readouterr().err


def test_speedup_uses_the_frame_period_for_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "squeezenet.onnx")
    onnx.save(networks.build("light/squeezenet", 0), path)
    common = ["compare", path, "--platform", "rpi4x2", "--strategies", "replicate", "--objective", "throughput"]
    assert main(common) == 0
    words = capsys.readouterr().out.splitlines()[1].split()
    assert main([*common, "--json"]) == 0
    given = json.loads(capsys.readouterr().out)
    plan, one = given["results"][0]["metrics"], given["single_device"]
    assert words[6] == f"{one['period_s'] / plan['period_s']:.2f}×" != f"{one['latency_s'] / plan['latency_s']:.2f}×"
