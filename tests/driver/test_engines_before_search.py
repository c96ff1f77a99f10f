"""The choice of engines by layer before the search, so that strategies search with the times of these engines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.profiles_with_engines import fast_if_winograd, profile_with_engines, profile_with_ncnn

import dicompiler
from dicompiler import networks
from dicompiler.analysis.compare import compare
from dicompiler.analysis.explore import explore
from dicompiler.cost.layer_kinds import rate_kinds
from dicompiler.driver import compiler
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import EngineRate, computes_layer, engine_layers
from dicompiler.ir.platform import Platform
from dicompiler.networks.builder import NetworkBuilder

Rates = Mapping[str, Mapping[str, float]]
"""Rates in FLOP/s, by engine and kind of layer."""
WINOGRAD_RATES: Rates = {"onnxruntime": {"Conv3x3": 1e7, "Conv": 1e7}, "ncnn": {"Conv3x3": 1e8, "Conv": 1e6}}
SAME_RATES: Rates = {"onnxruntime": {"Conv3x3": 1e7, "Conv": 1e7}}


@cache
def small_then_large_kernels() -> onnx.ModelProto:
    """Return a chain of four convolutions with kernels of 3×3, and four with kernels of 5×5."""
    net = NetworkBuilder("kernels", (1, 8, 16, 16))
    tensor = "input"
    for i in range(8):
        tensor = net.conv(tensor, f"conv{i}", 8, 3 if i < 4 else 5)
    return net.to_model(tensor, 0)


def two_boards(*rates: Rates) -> Platform:
    """Return two boards with these rates, and a network that is much faster than they compute."""
    platform = Platform.load("rpi4x2")
    devices = [
        replace(device, engine_rates=engine_rates(own)) for device, own in zip(platform.devices, rates, strict=True)
    ]
    return replace(platform, devices=tuple(devices))


def engine_rates(rates: Rates) -> tuple[EngineRate, ...]:
    return tuple(EngineRate(engine, kind, rate) for engine, own in rates.items() for kind, rate in own.items())


def plan_kernels(platform: Platform, strategy: str, **options: Any) -> dicompiler.CompileResult:
    return dicompiler.plan(small_then_large_kernels(), platform, strategy, engine="auto", **options)


def plan_with_choice_after_search(*arguments: Any, **options: Any) -> dicompiler.CompileResult:
    """Return the result of `plan_kernels` if engines by layer are chosen only after the search."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "with_layer_engines", lambda problem, _: problem)
        return plan_kernels(*arguments, **options)


def layers_of(result: dicompiler.CompileResult, device: str) -> list[str]:
    return [name for name, parts in result.plan.layers.items() if parts[0].device == device]


def test_split_point_moves_towards_the_device_with_the_faster_layers() -> None:
    platform = two_boards(WINOGRAD_RATES, SAME_RATES)
    before, after = (
        call(platform, "pipeline{devices=pi01,pi02}", objective="throughput")
        for call in (plan_with_choice_after_search, plan_kernels)
    )
    assert after.metrics.objective_value("throughput") < 0.9 * before.metrics.objective_value("throughput")
    assert len(layers_of(after, "pi01")) > len(layers_of(before, "pi01"))
    assert after.plan.engines == {"pi01": "ncnn{layers=conv0,conv1,conv2,conv3}"}


@pytest.mark.parametrize("strategy", ["dp", "cpsat", "auto"])
def test_strategies_search_with_the_times_of_layers_in_their_engines(strategy: str) -> None:
    platform = two_boards(WINOGRAD_RATES, SAME_RATES)
    before, after = (call(platform, strategy) for call in (plan_with_choice_after_search, plan_kernels))
    assert after.metrics.latency_s < 0.95 * before.metrics.latency_s
    assert after.plan.engines["pi01"].startswith("ncnn{layers=")


RATE = st.sampled_from([2e6, 1e7, 2e7, 1e8])
DEVICE_RATES = st.fixed_dictionaries(
    {engine: st.fixed_dictionaries({"Conv3x3": RATE, "Conv": RATE}) for engine in ("onnxruntime", "ncnn")}
)


@given(rates=st.tuples(DEVICE_RATES, DEVICE_RATES), objective=st.sampled_from(["latency", "throughput"]))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.slow
def test_result_is_never_worse_than_with_choice_after_search(rates: tuple[Rates, Rates], objective: str) -> None:
    platform, strategy = two_boards(*rates), "dp" if objective == "latency" else "pipeline"
    before, after = (
        call(platform, strategy, objective=objective) for call in (plan_with_choice_after_search, plan_kernels)
    )
    assert after.metrics.objective_value(objective) <= before.metrics.objective_value(objective)
    for engine in after.plan.engines.values():
        assert set(engine_layers(engine)) <= set(after.layers.layer_by_name)
    again = dicompiler.plan(small_then_large_kernels(), platform, plan=after.plan, objective=objective)
    assert again.plan.engines == after.plan.engines and again.metrics == after.metrics


def test_second_search_is_omitted_if_layers_gain_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    run_strategy = compiler.run_strategy
    monkeypatch.setattr(
        compiler, "run_strategy", lambda *arguments: searched.append(arguments) or run_strategy(*arguments)
    )
    little: Rates = {"onnxruntime": {"Conv3x3": 1e7, "Conv": 1e7}, "ncnn": {"Conv3x3": 1.1e7, "Conv": 1e6}}
    for rates, count in ((little, 1), (SAME_RATES, 1), (WINOGRAD_RATES, 2)):
        searched.clear()
        plan_kernels(two_boards(rates, SAME_RATES), "pipeline")
        assert len(searched) == count


def test_network_that_fits_no_single_device_is_searched_with_engines_by_layer() -> None:
    platform = two_boards(WINOGRAD_RATES, SAME_RATES)
    result = plan_kernels(platform, "pipeline{devices=pi01,pi02}", objective="throughput")
    used = result.problem.program_memory_use(result)
    hosts = tuple(replace(host, memory=1 + max(entry.total for entry in used.values())) for host in platform.hosts)
    small = plan_kernels(replace(platform, hosts=hosts), "pipeline{devices=pi01,pi02}", objective="throughput")
    assert small.plan == result.plan


def test_compare_and_explore_search_with_the_same_engines() -> None:
    platform = two_boards(WINOGRAD_RATES, SAME_RATES)
    by_layer = {"pi01": "ncnn{layers=conv0,conv1,conv2,conv3}"}
    comparison = compare(small_then_large_kernels(), platform, "single,dp", engine="auto")
    assert comparison.document()["engines"] == by_layer
    planned = plan_kernels(platform, "dp")
    assert comparison.best is not None and comparison.best.metrics is not None
    assert comparison.best.metrics.latency_s == pytest.approx(planned.metrics.latency_s)
    front = explore(small_then_large_kernels(), platform, "dp", engine="auto")
    assert front.points[0].plan.engines == by_layer
    assert load_problem(small_then_large_kernels(), platform, engine="auto").platform.engines == by_layer


@pytest.mark.parametrize(
    ("factors", "chosen"), [((0.1, 0.5), "ncnn"), ((0.5, 0.1), "mnn"), ((0.1, None), "ncnn"), ((None, 0.1), "mnn")]
)
def test_best_of_two_other_engines_is_combined_with_onnxruntime(
    factors: tuple[float | None, float | None], chosen: str, tmp_path: Path
) -> None:
    """No engine but onnxruntime is fast for all layers, so one of the two computes the 3×3 convolutions only."""

    def on_convolutions(factor: float | None) -> Any:
        return lambda layers, layer: factor if rate_kinds(layers, layer)[0] == "Conv3x3" else 20.0

    engines = dict(zip(("ncnn", "mnn"), map(on_convolutions, factors), strict=True))
    cost = profile_with_engines(tmp_path, "resnet8", engines)
    result = dicompiler.plan(networks.build("resnet8", 0), "rpi4x2", "modnn", cost=cost, engine="auto")
    assert result.plan.engines.keys() == {"pi01", "pi02"}
    for engine in result.plan.engines.values():
        assert engine.startswith(f"{chosen}{{layers=")
        computed = [layer for layer in result.layers.layers if computes_layer(engine, layer.name)]
        assert {rate_kinds(result.layers, layer)[0] for layer in computed} == {"Conv3x3"}


def test_installed_engine_is_used_if_the_best_one_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slower = {"ncnn": fast_if_winograd, "mnn": lambda *entry: 2 * (fast_if_winograd(*entry) or 0.0)}
    cost = profile_with_engines(tmp_path, "resnet8", slower)
    monkeypatch.setitem(sys.modules, "ncnn", None)
    with caplog.at_level("WARNING", "dicompiler"):
        result = dicompiler.plan(networks.build("resnet8", 0), "rpi4x2", "single", cost=cost, engine="auto")
    assert result.plan.engines["pi01"].startswith("mnn{layers=")
    assert caplog.text.count("the engine ncnn is not installed: run 'pip install ncnn'; until then, mnn computes") == 1


def test_objectives_without_computing_keep_one_engine_per_device(tmp_path: Path) -> None:
    cost = profile_with_ncnn(tmp_path, "resnet8", fast_if_winograd)
    for objective in ("communication", "memory"):
        problem = load_problem(networks.build("resnet8", 0), "rpi4x2", objective=objective, cost=cost, engine="auto")
        assert problem.platform.engines == {}
