"""The engine of each device: options, platforms, plans and the choice by `auto`."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

import dicompiler
from dicompiler import networks
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.cli.command_line import main
from dicompiler.cost.layer_kinds import rate_kinds
from dicompiler.driver.engines import choose_engines
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Device, EngineRate
from dicompiler.ir.plan import LayerShare, load_plan, plan_to_text
from dicompiler.ir.platform import Platform, platform_from_toml, platform_to_toml
from dicompiler.search.problem import Problem

NCNN = {"pi01": "ncnn", "pi02": "ncnn"}


def rpi4(*rates: EngineRate) -> Platform:
    """Return two Raspberry Pi 4 whose rates with ncnn are these."""
    platform = Platform.load("rpi4x2")
    return replace(platform, devices=tuple(replace(device, engine_rates=rates) for device in platform.devices))


def problem(network: str = "resnet8", platform: Platform | str = "rpi4x2", engine: str | None = None) -> Problem:
    return load_problem(networks.build(network, 0), platform, engine=engine)


def test_unknown_engines_are_named_with_the_nearest_one() -> None:
    for call in (dicompiler.compile, load_problem):
        with pytest.raises(UsageError, match=r"^engine: unknown engine 'ncn' \(did you mean 'ncnn'\?\)$"):
            call(networks.build("lenet", 0), "rpi4x2", engine="ncn")  # type: ignore[operator]
    with pytest.raises(UsageError, match=r"^engine: unknown engine 'ncm'"):
        problem(platform=rpi4().with_engines({"pi02": "ncm"}))


def test_targets_without_engines_refuse_them() -> None:
    target = "tflm"
    refused = f"^engine: target '{target}' computes with onnxruntime only, not with ncnn: use --engine onnxruntime, or "
    with pytest.raises(UsageError, match=refused):
        dicompiler.compile(networks.build("lenet", 0), "rpi4x2", "single", target=target, engine="ncnn")
    with pytest.raises(UsageError, match=refused):
        dicompiler.compile(networks.build("lenet", 0), rpi4().with_engines(NCNN), "single", target=target)
    result = dicompiler.compile(networks.build("lenet", 0), "rpi4x2", "modnn", target=target, engine="auto")
    assert result.plan.engines == {}


def test_engines_are_written_to_plans_and_read_from_them(tmp_path: Path) -> None:
    model = networks.build("lenet", 0)
    planned = dicompiler.compile(model, "rpi4x2", "modnn", engine="ncnn")
    (tmp_path / "plan.json").write_text(plan_to_text(planned.plan), encoding="utf-8")
    assert load_plan(tmp_path / "plan.json") == planned.plan and planned.plan.engines == NCNN
    again = dicompiler.compile(model, "rpi4x2", plan=tmp_path / "plan.json")
    assert again.plan == planned.plan and again.metrics == planned.metrics
    assert [device.engine for device in again.program.devices] == ["ncnn", "ncnn"]
    other = dicompiler.compile(model, "rpi4x2", plan=tmp_path / "plan.json", engine="onnxruntime")
    assert other.plan.engines == {} and "engines" not in plan_to_text(other.plan)
    with pytest.raises(DicompilerError, match=r"^plan: engines\.pi3: platform 'rpi4x2' has no device 'pi3'"):
        dicompiler.compile(model, "rpi4x2", plan=replace(planned.plan, engines={"pi3": "ncnn"}))


def test_engines_of_a_platform_survive_its_file_and_apply_without_the_option() -> None:
    platform = rpi4(EngineRate("ncnn", "Conv3x3", 5e10), EngineRate("ncnn", "*", 2e9)).with_engines({"pi02": "ncnn"})
    text = platform_to_toml(platform)
    assert (
        'engine = "ncnn"' in text and 'engine_rates = {"ncnn" = {"Conv3x3" = "50 GFLOP/s", "*" = "2 GFLOP/s"}}' in text
    )
    assert platform_from_toml(text) == platform
    assert dicompiler.compile(networks.build("lenet", 0), platform, "modnn").plan.engines == {"pi02": "ncnn"}
    with pytest.raises(DicompilerError, match=r"device\[0\]\.engine_rates\.ncnn\.Conv"):
        platform_from_toml(text.replace('"50 GFLOP/s"', '"50 apples"').replace("Conv3x3", "Conv"))


def test_predictions_use_the_rate_of_the_engine_and_kind() -> None:
    rates = EngineRate("ncnn", "Conv3x3", 136e9), EngineRate("ncnn", "Conv", 1.36e9)
    platform = rpi4(*rates)
    platform = replace(platform, devices=tuple(replace(device, memory_bandwidth=0.0) for device in platform.devices))
    plain, with_ncnn = (problem("resnet8", platform, engine) for engine in (None, "ncnn"))
    layers, factors = plain.layers, dict[str, float]()
    for layer in layers.layers:
        first, second = (
            given.cost_model.seconds_table(layers, layer, [LayerShare()], given.platform.devices)[0, 0]
            for given in (plain, with_ncnn)
        )
        if first:
            factors[rate_kinds(layers, layer)[0]] = second / first
    assert {kind: round(factors[kind], 6) for kind in ("Conv3x3", "Conv", "Gemm")} == {
        "Conv3x3": 0.1, "Conv": 10.0, "Gemm": 1.0
    }  # fmt: skip


def test_layers_of_other_engines_are_predicted_with_onnxruntime() -> None:
    platform = rpi4(EngineRate("ncnn", "*", 136e9))
    plain, both, convolution = (problem("lenet", platform, engine) for engine in (None, "ncnn", "ncnn{layers=conv*}"))
    for layer in plain.layers.layers:
        seconds = [
            given.cost_model.seconds(plain.layers, layer, LayerShare(), given.platform.devices[0])
            for given in (plain, both, convolution)
        ]
        assert seconds[2] == seconds[1 if layer.name.startswith("conv") else 0]


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("ncnn{layers=cnv1}", r"^engine ncnn\{layers=cnv1\}: layers: no layer 'cnv1' \(did you mean 'conv1'\?\)$"),
        ("ncnn{layers=x*}", r"^engine ncnn\{layers=x\*\}: layers: no layer 'x\*'"),
        ("onnxruntime{layers=conv1}", "^engine: option 'layers' is only for other engines, because onnxruntime comp"),
    ],
)
def test_layers_of_an_engine_must_exist(engine: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        problem("lenet", engine=engine)


def test_layer_rate_falls_back_to_the_general_kind_then_to_the_rate_of_onnxruntime() -> None:
    rates = EngineRate("ncnn", "Conv", 2.0), EngineRate("ncnn", "*", 3.0), EngineRate("other", "Gemm", 4.0)
    device = Device("d", "d", 1.0, engine="ncnn", engine_rates=rates)
    assert [device.layer_rate(kinds) for kinds in (("Conv3x3", "Conv"), ("Gemm",))] == [2.0, 3.0]
    assert replace(device, engine="other").layer_rate(("Conv",)) == 1.0
    assert replace(device, engine="onnxruntime").layer_rate(("Conv",)) == 1.0


@pytest.mark.parametrize(
    ("network", "rates", "chosen"),
    [
        ("resnet8", (EngineRate("ncnn", "Conv3x3", 5e10), EngineRate("ncnn", "Conv", 1e9)), NCNN),
        ("vit_tiny", (EngineRate("ncnn", "Conv3x3", 5e10), EngineRate("ncnn", "Conv", 1e9)), {}),
        ("resnet8", (EngineRate("ncnn", "*", 14e9),), NCNN),
        ("resnet8", (EngineRate("ncnn", "*", 13e9),), {}),
        ("resnet8", (), {}),
    ],
)
def test_auto_follows_the_stated_rates(network: str, rates: tuple[EngineRate, ...], chosen: dict[str, str]) -> None:
    assert problem(network, rpi4(*rates), "auto").platform.engines == chosen


@pytest.mark.parametrize("board", ["rpi3-gateway-x1", "rpi4-gateway-x1", "rpi4x1", "rpi5x1"])
def test_raspberry_pis_have_rates_with_ncnn(board: str) -> None:
    for network, engines in (("resnet8", {"pi01": "ncnn"}), ("vit_tiny", {})):
        assert problem(network, board, "auto").platform.engines == engines


def test_auto_keeps_onnxruntime_if_the_engine_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "ncnn", None)
    with caplog.at_level("WARNING", "dicompiler"):
        assert problem(engine="auto").platform.engines == {}
    assert "device pi01: the engine ncnn is not installed: run 'pip install ncnn'; until then" in caplog.text


def test_engine_without_rates_is_predicted_like_onnxruntime_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "dicompiler"):
        known = problem(platform=rpi4(), engine="ncnn")
    assert known.platform.engines == NCNN
    assert "engine ncnn: cost model analytic has no times of this engine for device pi01, pi02" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "ncnn", "precision": "fp61"}, r"^precision: unknown precision 'fp61' \(did you mean 'fp16'\?\)$"),
        ({"precision": "bf16"}, r"^precision: onnxruntime computes in fp32 only, not in bf16: use --engine ncnn, or "),
        ({"engine": "onnxruntime", "precision": "fp16"}, r"^precision: onnxruntime computes in fp32 only, not in fp16"),
        ({"engine": "onnxruntime{precision=fp16}"}, r"^engine: onnxruntime computes in fp32 only, not in fp16"),
        ({"engine": "ncnn{precision=bf61}"}, r"^engine: option 'precision' of 'ncnn': expected fp32\|fp16\|bf16"),
    ],
)
def test_precisions_that_are_unknown_or_impossible_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dicompiler.compile(networks.build("lenet", 0), "rpi4x2", "single", **options)
    with pytest.raises(UsageError, match=message):
        load_problem(networks.build("lenet", 0), "rpi4x2", **options)


def test_precision_applies_to_engines_that_can_use_it(caplog: pytest.LogCaptureFixture) -> None:
    half = "ncnn{precision=bf16}"
    platform = rpi4(EngineRate("ncnn", "*", 14e9)).with_engines({"pi02": "ncnn"})
    model = networks.build("lenet", 0)
    with caplog.at_level("WARNING", "dicompiler"):
        assert load_problem(model, platform, precision="bf16").platform.engines == {"pi02": half}
    assert "precision bf16: the engine of device pi01 computes in fp32 only" in caplog.text
    assert f"engine {half}: the prediction uses the times of fp32" in caplog.text
    assert load_problem(model, platform, engine="auto", precision="bf16").platform.engines == dict.fromkeys(NCNN, half)
    fixed = platform.with_engines({"pi01": "ncnn{precision=fp32}", "pi02": half})
    assert load_problem(model, fixed).platform.engines == {"pi01": "ncnn", "pi02": half}
    assert load_problem(model, fixed, precision="fp32").platform.engines == NCNN


def test_reduced_precision_is_predicted_like_fp32() -> None:
    rates = EngineRate("ncnn", "Conv", 2.0), EngineRate("ncnn", "*", 3.0)
    device = Device("d", "d", 1.0, engine="ncnn{precision=fp16}", engine_rates=rates)
    assert device.layer_rate(("Conv",)) == 2.0 and device.has_rates(device.engine)


def test_gpus_keep_onnxruntime() -> None:
    platform = Platform.load("jetson-nx1")
    chosen = choose_engines(problem().layers, platform, problem().cost_model, engine="ncnn")
    assert chosen.engines == {"nx01_cpu": "ncnn"}


def test_commands_show_engines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lenet.onnx"
    onnx.save(networks.build("lenet", 0), path)
    words = [str(path), "--platform", "rpi4x2", "--engine", "ncnn", "--precision", "bf16"]
    assert main(["compile", *words, "--strategy", "modnn", "-o", str(tmp_path / "a")]) == 0
    printed = capfd.readouterr().out
    assert "engines: ncnn{precision=bf16} on pi01, pi02" in " ".join(printed.split())
    assert re.search(r"^device +.*engine$", printed, re.MULTILINE)
    assert main(["compare", *words, "--strategies", "single", "--json"]) == 0
    half = dict.fromkeys(NCNN, "ncnn{precision=bf16}")
    assert json.loads(capfd.readouterr().out)["engines"] == half
    assert main(["plan", *words, "--strategy", "single", "--json", "-o", str(tmp_path / "p.json")]) == 0
    assert json.loads(capfd.readouterr().out)["summary"]["engines"] == {"pi01": half["pi01"]}
    provenance = json.loads((tmp_path / "a" / "reference" / "provenance.json").read_text())
    assert provenance["summary"]["engines"] == half
    assert main(["report", str(tmp_path / "a"), "-o", str(tmp_path / "r.html")]) == 0
    assert "ncnn{precision=bf16} on pi01, pi02" in (tmp_path / "r.html").read_text()
