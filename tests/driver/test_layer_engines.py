"""The choice of an engine for each layer by `auto`, from measured times."""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.profiles_with_engines import Factor, fast_if_winograd, profile_with_engines, profile_with_ncnn

import dicompiler
from dicompiler import networks
from dicompiler.base.schema import load_json
from dicompiler.cost.layer_kinds import rate_kinds
from dicompiler.driver.artifact import reopen_artifact, verify
from dicompiler.driver.compile_result import describe_engines
from dicompiler.driver.layer_engines import LayerTimes, find_cheapest_engines, sum_times
from dicompiler.ir.cluster import EngineRate, computes_layer
from dicompiler.ir.plan import plan_to_text
from dicompiler.ir.platform import Platform
from dicompiler.search.problem import plan_workload

SECONDS = st.sampled_from([0.0, 1.0, 1.5, 2.0, 4.0, math.inf])


@given(data=st.data(), engines=st.integers(1, 3), count=st.integers(0, 5))
def test_choice_is_as_cheap_as_the_best_of_all_choices(data: st.DataObject, engines: int, count: int) -> None:
    times = st.tuples(*[SECONDS] * engines)
    layers = [LayerTimes(data.draw(times), data.draw(times)) for _ in range(count)]
    found = find_cheapest_engines(layers)
    assert sum_times(layers, found) == min(
        sum_times(layers, choice) for choice in itertools.product(range(engines), repeat=count)
    )


def test_switch_is_chosen_only_if_it_saves_more_than_it_costs() -> None:
    def times(first: float, second: float, switch: float) -> LayerTimes:
        return LayerTimes((first, second), (first + switch, second + switch))

    assert find_cheapest_engines([times(1, 9, 2), times(6, 1, 2), times(1, 9, 2)]) == (0, 1, 0)
    assert find_cheapest_engines([times(1, 9, 3), times(6, 1, 3), times(1, 9, 3)]) == (0, 0, 0)


def compile_network(network: str, cost: str, output: Path | None = None, **options: Any) -> dicompiler.CompileResult:
    chosen: dict[str, Any] = {"platform": "rpi4x2", "strategy": "single", "engine": "auto"} | options
    return dicompiler.compile(networks.build(network, 0), cost=cost, output=output, **chosen)


def winograd_layers(result: dicompiler.CompileResult) -> list[str]:
    return [layer.name for layer in result.layers.layers if rate_kinds(result.layers, layer)[0] == "Conv3x3"]


@pytest.mark.parametrize("strategy", ["single", "modnn"])
def test_layers_that_ncnn_computes_faster_are_computed_by_ncnn(strategy: str, tmp_path: Path) -> None:
    cost = profile_with_ncnn(tmp_path, "resnet8", fast_if_winograd)
    result = compile_network("resnet8", cost, tmp_path / "a", strategy=strategy)
    by_device = min(
        compile_network("resnet8", cost, strategy=strategy, engine=engine).metrics.latency_s
        for engine in ("onnxruntime", "ncnn")
    )
    assert result.metrics.latency_s < by_device
    assert result.plan.engines.keys() == {part.device for parts in result.plan.layers.values() for part in parts}
    for engine in result.plan.engines.values():
        computed = [layer.name for layer in result.layers.layers if computes_layer(engine, layer.name)]
        assert engine.startswith("ncnn{layers=") and computed == winograd_layers(result)
    manifests = [load_json(path) for path in (tmp_path / "a").glob("pi*/manifest.json")]
    segments = [segment for manifest in manifests for segment in manifest["segments"] if "file" in segment]
    assert {segment.get("engine", {}).get("name") for segment in segments} == {"ncnn", None}
    found = verify(tmp_path / "a")
    assert found.passed and "allowed: 1e-04" in str(found.checks), found.checks
    reopened, _, problem = reopen_artifact(tmp_path / "a", cost=cost)
    assert reopened.metrics is not None and reopened.metrics.latency_s == result.metrics.latency_s
    assert problem.platform.engines == result.plan.engines


def test_same_choice_each_time_and_with_its_plan(tmp_path: Path) -> None:
    cost = profile_with_ncnn(tmp_path, "resnet8", fast_if_winograd)
    first, second = (compile_network("resnet8", cost) for _ in range(2))
    assert plan_to_text(first.plan) == plan_to_text(second.plan)
    again = compile_network("resnet8", cost, strategy=None, plan=first.plan, engine=None)
    assert again.plan.engines == first.plan.engines and again.metrics == first.metrics


def test_target_mpi_gets_the_same_choice(tmp_path: Path) -> None:
    cost = profile_with_ncnn(tmp_path, "resnet8", fast_if_winograd)
    engines = [compile_network("resnet8", cost, target=target).plan.engines for target in ("sockets", "mpi")]
    assert engines[0] == engines[1] and "layers=" in str(engines)


@pytest.mark.slow
def test_ranks_compute_the_chosen_layers_with_ncnn(tmp_path: Path) -> None:
    cost = profile_with_ncnn(tmp_path, "resnet8", fast_if_winograd)
    compile_network("resnet8", cost, tmp_path / "a", strategy="modnn", target="mpi")
    assert {".onnx", ".net"} <= {path.suffix for path in (tmp_path / "a").rglob("segment*")}
    assert verify(tmp_path / "a").passed


@pytest.mark.parametrize(
    ("factor", "engines"),
    [
        (lambda layers, layer: 0.9 if rate_kinds(layers, layer)[0] == "Conv3x3" else 1.1, ({}, {"pi01": "ncnn"})),
        (lambda *_: 1.2, ({},)),
        (lambda *_: 0.5, ({"pi01": "ncnn"},)),
        (lambda *_: None, ({},)),
    ],
)
def test_engine_of_the_device_is_kept_if_switches_do_not_pay(
    factor: Factor, engines: tuple[dict[str, str], ...], tmp_path: Path
) -> None:
    # Layers take about as long as a call, so a switch costs more than it saves.
    cost = profile_with_ncnn(tmp_path, "lenet", factor, unit_s=1e-3)
    result = compile_network("lenet", cost)
    assert result.plan.engines in engines
    by_device = [compile_network("lenet", cost, engine=engine).metrics for engine in ("onnxruntime", "ncnn")]
    assert result.metrics in by_device


@pytest.mark.parametrize(
    ("ncnn", "mnn", "target", "chosen"),
    [
        (0.5, 0.4, "sockets", "mnn"),
        (0.4, 0.5, "sockets", "ncnn"),
        (0.5, 0.4, "mpi", "ncnn"),  # Target mpi cannot use MNN.
        (1.2, 1.1, "sockets", None),
    ],
)
def test_fastest_of_several_engines_is_chosen(
    ncnn: float, mnn: float, target: str, chosen: str | None, tmp_path: Path
) -> None:
    cost = profile_with_engines(tmp_path, "lenet", {"ncnn": lambda *_: ncnn, "mnn": lambda *_: mnn})
    assert compile_network("lenet", cost, target=target).plan.engines == ({} if chosen is None else {"pi01": chosen})


def test_layers_without_measurements_stay_with_onnxruntime(tmp_path: Path) -> None:
    cost = profile_with_ncnn(
        tmp_path, "resnet8", lambda layers, layer: 0.1 if rate_kinds(layers, layer)[0] == "Conv3x3" else None
    )
    result = compile_network("resnet8", cost)
    for engine in result.plan.engines.values():
        assert engine == "ncnn" or {n for n in result.layers.layer_by_name if computes_layer(engine, n)} <= {
            *winograd_layers(result)
        }


def test_stated_rates_of_both_engines_are_compared() -> None:
    kinds = {"onnxruntime": {"Conv3x3": 1e9, "Conv": 1e9}, "ncnn": {"Conv3x3": 1e10, "Conv": 1e8}}
    rates = tuple(EngineRate(engine, kind, rate) for engine, own in kinds.items() for kind, rate in own.items())
    platform = Platform.load("rpi4x2")
    for known, is_by_layer in ((rates, True), (rates[2:], False)):
        stated = replace(platform, devices=tuple(replace(d, engine_rates=known) for d in platform.devices))
        result = compile_network("resnet8", "analytic", platform=stated)
        assert ("layers=" in str(result.plan.engines)) == is_by_layer


def test_other_engines_are_not_changed(tmp_path: Path) -> None:
    cost = profile_with_ncnn(tmp_path, "resnet8", fast_if_winograd)
    assert compile_network("resnet8", cost, engine="ncnn").plan.engines == {"pi01": "ncnn"}
    assert compile_network("resnet8", cost, engine="onnxruntime").plan.engines == {}
    assert compile_network("resnet8", cost, engine=None).plan.engines == {}


def test_onnxruntime_computes_everything_if_ncnn_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cost = profile_with_ncnn(tmp_path, "resnet8", fast_if_winograd)
    monkeypatch.setitem(sys.modules, "ncnn", None)
    with caplog.at_level("WARNING", "dicompiler"):
        assert compile_network("resnet8", cost).plan.engines == {}
    assert caplog.text.count("device pi01: the engine ncnn is not installed: run 'pip install ncnn'; until then") == 1


@pytest.mark.slow
def test_engines_that_exceed_the_memory_are_not_chosen(tmp_path: Path) -> None:
    cost = profile_with_ncnn(tmp_path, "resnet18", fast_if_winograd)
    by_layer, without = (compile_network("resnet18", cost, engine=engine) for engine in ("auto", "onnxruntime"))
    most, least = (result.problem.program_memory_use(result)["pi01"].total for result in (by_layer, without))
    platform = Platform.load("rpi4x2")
    small = replace(platform, hosts=tuple(replace(host, memory=(least + most) // 2) for host in platform.hosts))
    assert "layers=" in str(by_layer.plan.engines) and most > least
    assert compile_network("resnet18", cost, platform=small).plan.engines == {}


def test_failure_plans_have_a_choice_for_their_layers(tmp_path: Path) -> None:
    cost = profile_with_ncnn(tmp_path, "resnet8", fast_if_winograd)
    result = compile_network("resnet8", cost, strategy="pipeline", tolerate_failures=1)
    for engine in result.plan.engines.values():
        assert [n for n in result.layers.layer_by_name if computes_layer(engine, n)] == winograd_layers(result)


def test_searches_count_the_calls_of_switches(tmp_path: Path) -> None:
    cost = profile_with_ncnn(tmp_path, "lenet", fast_if_winograd)
    engine = "ncnn{layers=conv1,fc*}"
    result = compile_network("lenet", cost, engine=engine)
    _, work = plan_workload(result.problem, result.plan)
    assert [job.calls for device in work.devices for job in device.jobs] == [3]
    assert [len(device.segments) for device in result.program.devices] == [3]
    assert result.problem.evaluate(result.plan).latency_s == pytest.approx(result.metrics.latency_s)


def test_long_lists_of_layers_are_shortened_for_users() -> None:
    assert describe_engines({"a": "ncnn{layers=c1,c2}", "b": "ncnn"}) == "ncnn{layers=c1,c2} on a; ncnn on b"
    names = ",".join(f"c{i}" for i in range(9))
    assert describe_engines({"a": f"ncnn{{precision=bf16 layers={names}}}"}) == (
        "ncnn{precision=bf16 layers=c0,c1,c2 and 6 more} on a"
    )
