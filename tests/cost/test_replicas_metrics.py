"""What is predicted of a plan with replicas, by hand; that it is limited, chosen and verified by all of its roles."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.planning import FREE
from support.planning import cluster as rated

from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.cli import main
from dicompiler.driver.artifact import compare_run, run, verify
from dicompiler.driver.compiler import compile
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.devices import Host
from dicompiler.ir.metrics import Metrics
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Part, Plan, dumps
from dicompiler.ir.platform import Platform
from dicompiler.plugin.registry import registry
from dicompiler.search.constraints import check
from dicompiler.search.problem import Problem
from dicompiler.verify.comparison import transfers
from dicompiler_strategies.auto import Auto

IMAGE, CLASSES = 4 * 32 * 32, 4 * 10  # LeNet's bytes in and out
THREE: tuple[dict[str, str], ...] = ({}, {"d0": "d1"}, {"d0": "d2"})


@pytest.fixture(scope="module")
def lenet() -> onnx.ModelProto:
    return networks.build("lenet", 0)


def posed(lenet: onnx.ModelProto, platform: Platform, objective: str = "throughput") -> Problem:
    return load_problem(Model.load(lenet), platform, objective=objective, cost=FREE)


def alone(problem: Problem, replicas: tuple[dict[str, str], ...] = ()) -> Plan:
    """All on d0."""
    plan = problem.plan({layer.name: (Part("d0"),) for layer in problem.layers.layers})
    return replace(plan, replicas=replicas)


@pytest.mark.parametrize("bandwidth", [1e9, 1e6])
@pytest.mark.parametrize("how", ["estimate", "evaluate"])
def test_whole_networks_in_turn_by_hand(how: str, bandwidth: float, lenet: onnx.ModelProto) -> None:
    problem = posed(lenet, rated("switch", 1, 1, 1, bandwidth=bandwidth, power=(3, 1)))
    seconds = problem.estimate(alone(problem)).latency_s
    metrics: Metrics = getattr(problem, how)(alone(problem, THREE))
    # Two frames of three travel to and fro; the busiest line is that out of d0.
    there, back = 8 * IMAGE / bandwidth, 8 * CLASSES / bandwidth
    assert metrics.latency_s == pytest.approx(seconds + 2 * (there + back) / 3)
    assert metrics.period_s == pytest.approx(max(seconds / 3, 2 * there / 3))
    assert [entry.compute_s for entry in metrics.devices] == pytest.approx([seconds / 3] * 3)
    assert [entry.sent for entry in metrics.devices] == [-(-2 * IMAGE // 3), -(-CLASSES // 3), -(-CLASSES // 3)]
    assert metrics.total_bytes == -(-2 * (IMAGE + CLASSES) // 3)
    lines = 2 * 2 * (there + back) / 3 if how == "evaluate" else 0.0
    assert sum(entry.line_s for entry in metrics.devices) == pytest.approx(lines)
    assert metrics.energy_j == pytest.approx(3 * seconds + (3 * metrics.latency_s - seconds))


@pytest.mark.parametrize("replicas", [THREE, (*THREE, {}), ({"d0": "d1"}, {"d0": "d2"})])
@pytest.mark.parametrize("kind", ["switch", "shared"])
def test_a_stream_comes_to_the_predicted_period(replicas: Any, kind: Any, lenet: onnx.ModelProto) -> None:
    problem = posed(lenet, rated(kind, 1, 1, 1, bandwidth=1e8))
    plan = alone(problem, replicas)
    stream = problem.simulate(plan, frames=120, in_flight=12)
    assert stream.period_s == pytest.approx(problem.evaluate(plan).period_s, rel=0.03)


def test_one_renaming_of_nothing_is_predicted_as_none(lenet: onnx.ModelProto) -> None:
    problem = posed(lenet, rated("switch", 1, 1))
    assert problem.evaluate(alone(problem, ({},))) == problem.evaluate(alone(problem))
    assert problem.estimate(alone(problem, ({},))) == problem.estimate(alone(problem))


def test_memory_counts_the_weights_of_all_roles(lenet: onnx.ModelProto) -> None:
    """d0 and d1 each hold the half that the other computes in the next frame."""
    problem = posed(lenet, rated("switch", 1, 1))
    names = [layer.name for layer in problem.layers.layers]
    plan = problem.plan({name: (Part("d0" if i < len(names) - 2 else "d1"),) for i, name in enumerate(names)})
    crossed = replace(plan, replicas=({}, {"d0": "d1", "d1": "d0"}))
    halves, both = problem.evaluate(plan), problem.evaluate(crossed)
    total = sum(entry.weights for entry in halves.devices)
    assert [entry.weights for entry in both.devices] == [total, total]
    limit = both.memory - 1
    assert halves.memory < limit
    tight = replace(problem.platform, hosts=tuple(Host(host.name, limit) for host in problem.platform.hosts))
    check(replace(problem, platform=tight), plan)
    with pytest.raises(DicompilerError, match=r"host d0 needs .* for weights and activations and has"):
        check(replace(problem, platform=tight), crossed)


def test_the_strategy_takes_what_gives_most_frames(lenet: onnx.ModelProto) -> None:
    # Fast lines: each device by itself; at 1 Mbit/s every way to another device costs more than it gives.
    fast = posed(lenet, rated("switch", 1, 1, 1, 1, bandwidth=1e10))
    plan = registry().make("strategies", "replicate").plan(fast)
    assert len(plan.replicas) == 4
    assert fast.evaluate(plan).period_s == pytest.approx(fast.evaluate(alone(fast)).period_s / 4)
    # What holds half of the network needs groups of two.
    half = fast.evaluate(registry().make("strategies", "pipeline{devices=d0,d1}").plan(fast)).memory
    tight = replace(fast, platform=replace(fast.platform, hosts=tuple(Host(f"d{i}", half) for i in range(4))))
    pairs = registry().make("strategies", "replicate").plan(tight)
    assert len(pairs.replicas) == 2
    check(tight, pairs)


def test_its_options_are_checked() -> None:
    with pytest.raises(DicompilerError, match="size must be 0 or more"):
        registry().make("strategies", "replicate{size=-1}")


def test_rates_count(lenet: onnx.ModelProto) -> None:
    problem = posed(lenet, rated("switch", 2, 1, bandwidth=1e10))
    plan = registry().make("strategies", "replicate").plan(problem)
    assert problem.evaluate(plan).period_s == pytest.approx(problem.evaluate(alone(problem)).period_s * 2 / 3)


def test_auto_takes_its_plan_where_that_is_best(lenet: onnx.ModelProto) -> None:
    problem = posed(lenet, rated("switch", 1, 1, bandwidth=1e10))
    plan = Auto(strategies=("single", "pipeline", "replicate"), tries=2).plan(problem)
    assert len(plan.replicas) == 2
    latency = Auto(strategies=("single", "replicate"), tries=0).plan(replace(problem, objective="latency"))
    assert not latency.replicas


@pytest.fixture(scope="module")
def compiled(lenet: onnx.ModelProto, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LeNet in two groups of two."""
    problem = load_problem(Model.load(lenet), "rpi4x4", objective="throughput")
    plan = registry().make("strategies", "replicate{size=2}").plan(problem)
    directory = tmp_path_factory.mktemp("replicas")
    (directory / "plan.json").write_text(dumps(plan), encoding="utf-8")
    compile(lenet, "rpi4x4", plan=directory / "plan.json", output=directory / "a")
    Model.load(lenet).save(directory / "lenet.onnx")
    return directory


def test_verification_looks_at_every_role(compiled: Path) -> None:
    checks = {check.name: check for check in verify(compiled / "a").checks}
    assert list(checks) == ["exact", "output on pi01, replica 0", "output on pi01, replica 1", "bytes"]
    assert all(check.passed for check in checks.values())
    assert checks["exact"].detail.endswith("each in 2 replicas")
    assert checks["bytes"].detail.endswith("in a frame of each of 2 replicas: as predicted")


def test_a_wrong_output_of_one_role_is_found(compiled: Path) -> None:
    result = run(compiled / "a", frames=2)
    spoilt = [{device: dict(outputs) for device, outputs in frame.items()} for frame in result.delivered]
    (name,) = spoilt[1]["pi01"]
    spoilt[1]["pi01"][name] = spoilt[1]["pi01"][name] + np.float32(1)
    good, bad = (compare_run(compiled / "a", given) for given in (result, replace(result, delivered=tuple(spoilt))))
    assert good.passed and [check.passed for check in bad.checks] == [True, False]


def test_bytes_missing_in_one_role_are_found(compiled: Path, lenet: onnx.ModelProto) -> None:
    program = compile(lenet, "rpi4x4", plan=compiled / "plan.json").program
    assert program is not None
    sent = {t.index: t.value.nbytes for t in program.all_transfers}
    assert transfers(program.all_transfers, sent, 1, 2).passed
    for index in sent:
        assert not transfers(program.all_transfers, {k: v for k, v in sent.items() if k != index}, 1, 2).passed


def test_the_commands_take_such_a_plan(compiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*words: str) -> Any:
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    files = [str(compiled / "lenet.onnx"), "--platform", "rpi4x4", "--plan", str(compiled / "plan.json")]
    made = printed("compile", *files, "-o", str(compiled / "b"))
    weights = [record["weights"] for record in made["devices"]]
    assert all(record["segments"] and record["sent"] for record in made["devices"]) and weights[0] == weights[1]
    stream = printed("simulate", *files, "--frames", "12")
    assert len(stream["stream"]["frames"]) == 12
    assert len({(link["from"], link["to"]) for link in stream["links"]}) >= 4
    ran = printed("run", str(compiled / "b"), "--frames", "5")
    assert all(device["compute_s"] > 0 for device in ran["devices"])
