"""Tests of explanations: reasons for whole layers, and break-even bandwidths of splits."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from support.layer_graphs import formed
from support.printed import column

from dicompiler import networks
from dicompiler.analysis.compare import Comparison, compare_strategies
from dicompiler.analysis.explain import SplitReason, explain, explain_layers, suggest_split
from dicompiler.cli import compare as cli_compare
from dicompiler.cli import main
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Host, Network
from dicompiler.ir.platform import platform_to_toml, uniform_platform
from dicompiler.plugin.registry import registry
from dicompiler.search.problem import MIN_SPLIT_GAIN, Problem


def compared(posed: Problem, *names: str) -> Comparison:
    return compare_strategies(posed, {name: registry().make("strategies", name) for name in names})


def wider(posed: Problem, bandwidth: float) -> Problem:
    network = replace(posed.platform.network, bandwidth=bandwidth)
    return replace(posed, platform=replace(posed.platform, network=network))


@pytest.mark.slow
def test_split_pays_above_its_break_even_bandwidth_only() -> None:
    posed = load_problem(networks.build("squeezenet"), "rpi4x4")
    found = explain(compared(wider(posed, 1e6), "single", "modnn"))
    (split,) = found.splits
    assert split.strategy == "modnn" and split.break_even_bandwidth is not None and split.break_even_bandwidth > 1e6
    plan = registry().make("strategies", "modnn").plan(posed)
    for factor, pays in ((1.0, True), (0.9, False)):
        there = wider(posed, factor * split.break_even_bandwidth)
        assert (MIN_SPLIT_GAIN * there.evaluate(plan).latency_s <= there.best_single_device[1].latency_s) == pays
    near = explain(compared(wider(posed, 0.7 * split.break_even_bandwidth), "single", "modnn"))
    assert near.splits[0].wire_dtypes == ("float16", "int8")
    (shared,) = explain(compared(wider(posed, 1e6), "single")).splits
    assert shared.strategy == "shares of each layer" and shared.break_even_bandwidth is not None
    assert not explain(
        compared(wider(posed, 2 * split.break_even_bandwidth), "single", "modnn")
    ).splits  # Nothing is suggested if the best plan already splits the network.


def test_every_whole_layer_has_a_reason() -> None:
    layers = formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 64, 64] x) => (float[1, 8] y, int64[4, N] places)
        { c = Conv <kernel_shape = [3, 3]> (x, w)  f = Flatten (c)  p = Relu (c)
          g = GlobalAveragePool (p)  h = Flatten (g)  y = Gemm (h, v)  places = NonZero (f) }""",
        w=(8, 4, 3, 3),
        v=(8, 8),
    )
    posed = wider(Problem(layers, uniform_platform(2)), 5e8)
    reasons = {one.operator: one for one in explain_layers(posed, posed.single_device_plan("d0"))}
    assert "NonZero has no rule" in reasons["NonZero"].reason
    assert (
        "too little work for its bytes" in reasons["Conv"].reason and reasons["Conv"].break_even_bandwidth is not None
    )
    assert reasons["Flatten"].reason == "no work: it only moves data"
    rows = formed('<ir_version: 8, opset_import: ["": 17]> g (float[6, 4] x) => (float[6, 4] y) { y = Softmax (x) }')
    (reason,) = explain_layers(
        Problem(rows, uniform_platform(2)), Problem(rows, uniform_platform(2)).single_device_plan("d0")
    )
    # The rows of the input could be split, but the layer is too small for that to pay.
    assert "too little work" in reason.reason
    tight = replace(
        posed, platform=replace(posed.platform, hosts=tuple(Host(h.name, 64) for h in posed.platform.hosts))
    )
    assert (
        "memory" in {one.operator: one.reason for one in explain_layers(tight, tight.single_device_plan("d0"))}["Conv"]
    )


def test_best_hint_is_shown_without_a_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tmp_path / "squeezenet.onnx")
    onnx.save(networks.build("squeezenet"), model)
    slow = replace(uniform_platform(4), network=Network("switch", 5e6))
    (tmp_path / "slow.toml").write_text(platform_to_toml(slow))
    asked = ["compare", model, "--platform", str(tmp_path / "slow.toml"), "--strategies"]
    assert main([*asked, "single,modnn,pipeline"]) == 0
    prefix = "no plan of these strategies is better than a single device: "
    last = " ".join(capsys.readouterr().out.split()).rpartition(prefix)[2]
    assert re.fullmatch(r"modnn is 3 % better above [\d.]+ Mbit/s(, or with --wire-dtype \w+)?", last)
    assert main([*asked, "single"]) == 0
    assert "than a single device: a split of each layer is 3 % better above " in " ".join(
        capsys.readouterr().out.split()
    )
    assert main([*asked, "single", "--json"]) == 0
    assert "explanation" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("splits", "text"),
    [
        ([("a", None, ()), ("b", 5e8, ("int8",)), ("c", 9e8, ())], "b is 3 % better above 500 Mbit/s, or with --wire"),
        ([("a", None, ()), ("b", None, ())], "no tried split is better at any bandwidth"),
        ([("a", 5e8, ()), ("b", 5e8, ("int8",))], "b is 3 % better above 500 Mbit/s, or with --wire-dtype int8"),
    ],
)
def test_hint_names_the_split_that_needs_least_bandwidth(splits: list[tuple[str, Any, Any]], text: str) -> None:
    assert suggest_split([SplitReason(*split) for split in splits]).startswith(text)


def test_long_explanations_are_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tmp_path / "lenet.onnx")
    onnx.save(networks.build("lenet", 0), model)
    monkeypatch.setattr(cli_compare, "MAX_EXPLAINED_LAYERS", 3)
    assert main(["compare", model, "--platform", "rpi4x2", "--strategies", "single", "--explain"]) == 0
    printed = capsys.readouterr().out
    saved = [float(time.split()[0]) for time in column(printed, "saves").values()]
    assert len(saved) == 3 and saved == sorted(saved, reverse=True)
    assert re.search(r"\n… 5 further rows, which save at most [\d.]+ µs each: use --json to see all\n$", printed)


def test_command_and_report_show_the_explanations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, known = str(tmp_path / "lenet.onnx"), tmp_path / "compare.json"
    onnx.save(networks.build("lenet", 0), model)
    asked = ["compare", model, "--platform", "rpi4x2", "--strategies", "single,modnn", "--explain"]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert "\nlayers that are not split" in text and "too little work" in text
    assert main([*asked, "--json"]) == 0
    known.write_text(capsys.readouterr().out)
    document = json.loads(known.read_text())
    assert [one["layer"] for one in document["explanation"]["layers"]] == [
        *("conv1 pool1 conv2 pool2 flatten fc3 fc4 fc5".split())
    ]
    compiled = ["compile", model, "--platform", "rpi4x2", "--strategy", "single", "-o", str(tmp_path / "out")]
    assert main(compiled) == 0
    assert main(["report", str(tmp_path / "out"), "--compare", str(known), "-o", str(tmp_path / "page.html")]) == 0
    assert "Why layers are not split" in (tmp_path / "page.html").read_text()
