"""The choice of the engine of each device, and its effects on programs and tolerances.

An engine is the library that computes segments (ONNX submodels) on a device: onnxruntime by default, or ncnn.

PipelineState with layers + option `engine` + CostModel ⇒ Platform with an engine for each device
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import cast, get_args

from dicompiler.base.errors import DicompilerError, UsageError, did_you_mean
from dicompiler.cost.cost_model import CostModel
from dicompiler.cost.layer_kinds import rate_kinds
from dicompiler.cost.op_counts import count_flops
from dicompiler.ir.cluster import DEFAULT_ENGINE, OTHER_KINDS, Device, engine_name
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import LayerShare
from dicompiler.ir.platform import Platform
from dicompiler.plugin.registry import registry
from dicompiler.target.engine import FULL_PRECISION, Engine, Precision
from dicompiler.target.engine_check import allowed_difference
from dicompiler.target.engine_split import split_by_engine
from dicompiler.target.target_base import Target
from dicompiler.verify.tolerances import RELATIVE_TOLERANCES, Tolerance

log = logging.getLogger("dicompiler")

AUTO_ENGINE = "auto"
"""Value of the option `engine` for which the fastest engine of each device is chosen."""
MIN_STATED_SHARE = 0.5
"""Smallest share of a network's operations for which "auto" chooses an engine by its rates for some kinds of layers.

A platform may state rates of an engine for certain kinds of layers only, such as convolutions. The engine is chosen if
layers of these kinds have at least this share of the operations.
"""


def check_engine(engine: str | None, target: Target | None, place: str = "engine") -> None:
    """Raise UsageError if the option `engine` is not valid, or if the target cannot use the engine.

    Args:
        engine: Name of an engine, possibly with options, or "auto", or None.
        target: The target; None if there is none.
        place: The option or the key of a plan that names the engine, for the error message.
    """
    if engine in (None, AUTO_ENGINE, DEFAULT_ENGINE):
        return
    assert engine is not None
    try:
        made = make_engine(engine)
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from None
    _check_precision(made, place)
    if target is not None and not _can_use(target, engine):
        usable = (DEFAULT_ENGINE, *target.usable_engines)
        raise UsageError(
            f"{place}: target {target.name!r} computes with {' and '.join(usable)} only, not with {engine}: use "
            f"--engine {' or '.join(usable)}, or --target sockets"
        )


def check_precision(precision: str | None, engine: str | None) -> None:
    """Raise UsageError if the option `precision` is unknown, or if the engine cannot compute with it.

    Args:
        precision: A precision, or None.
        engine: The option `engine`.
    """
    known = get_args(Precision)
    if precision is not None and precision not in known:
        raise UsageError(f"precision: unknown precision {precision!r}{did_you_mean(precision, known)}")
    if precision is not None and engine not in (None, AUTO_ENGINE):
        assert engine is not None
        _check_precision(replace(make_engine(engine), precision=cast("Precision", precision)), "precision")


def _check_precision(engine: Engine, place: str) -> None:
    """Raise UsageError if the engine cannot compute with its precision."""
    if engine.precision not in (FULL_PRECISION, *engine.precisions):
        able = [name for name in registry().engines if engine.precision in make_engine(name).precisions]
        remedy = f"use --engine {' or '.join(able)}, or " if able else "use "
        computed = " and ".join((FULL_PRECISION, *engine.precisions))
        raise UsageError(
            f"{place}: {engine.name} computes in {computed} only, not in {engine.precision}: {remedy}"
            f"--precision {FULL_PRECISION}"
        )


def _can_use(target: Target | None, engine: str) -> bool:
    if target is None:
        return True
    return target.can_use_engines and (not target.usable_engines or engine_name(engine) in target.usable_engines)


def choose_engines(
    layers: LayerGraph,
    platform: Platform,
    cost: CostModel,
    target: Target | None = None,
    engine: str | None = None,
    given: Mapping[str, str] | None = None,
    precision: str | None = None,
) -> Platform:
    """Return the platform with the engine of each device.

    Args:
        layers: The layers of the network, by which "auto" chooses.
        platform: The platform.
        cost: The cost model, by which "auto" chooses.
        target: The target; None if there is none.
        engine: Name of an engine for all devices with CPU cores, or "auto". None: the engines of `given` and of the
            platform.
        given: Engines by device name, from a plan.
        precision: The precision of all engines that can compute with it. None: the precisions that the engines state.

    Returns:
        The platform.

    Raises:
        UsageError: An engine is unknown, the target cannot use it, or no engine can compute with the precision.
        DicompilerError: `given` names an unknown device.
    """
    check_engine(engine, target)
    check_precision(precision, engine)
    if engine == AUTO_ENGINE:
        chosen = {device.name: _choose_engine(layers, device, cost, target) for device in _cpu_devices(platform)}
    elif engine is not None:
        chosen = {device.name: engine for device in _cpu_devices(platform)}
    else:
        chosen = {platform.device(name).name: value for name, value in (given or {}).items()}
    result = platform.with_engines(chosen)
    for name in sorted(set(result.engines.values())):
        check_engine(name, target)
    result = _with_precision(result, precision)
    _warn_unknown(result, cost)
    return result


def _with_precision(platform: Platform, precision: str | None) -> Platform:
    """Return the platform with engines that compute with this precision, if they can. Others stay with fp32.

    The engines get their canonical text: "ncnn{precision=fp32}" ⇒ "ncnn". Log a warning for devices that stay with
    fp32. Raise UsageError if these are all devices.
    """
    engines = {device.name: make_engine(device.engine) for device in platform.computing_devices}
    if precision is not None:
        chosen = cast("Precision", precision)
        able = {
            name: replace(engine, precision=chosen)
            for name, engine in engines.items()
            if precision in (FULL_PRECISION, *engine.precisions)
        }
        if engines and not able:
            _check_precision(replace(next(iter(engines.values())), precision=chosen), "precision")
        if others := sorted(engines.keys() - able.keys()):
            log.warning("precision %s: the engine of device %s computes in fp32 only", precision, ", ".join(others))
        engines |= able
    if reduced := {str(engine.spec) for engine in engines.values() if engine.precision != FULL_PRECISION}:
        log.warning("engine %s: the prediction uses the times of fp32", ", ".join(sorted(reduced)))
    return platform.with_engines({name: str(engine.spec) for name, engine in engines.items()})


def _cpu_devices(platform: Platform) -> list[Device]:
    return [device for device in platform.computing_devices if not device.gpu]


def _warn_unknown(platform: Platform, cost: CostModel) -> None:
    """Log a warning if the cost model predicts the times of onnxruntime for a device with another engine."""
    unknown = [device for device in platform.computing_devices if not cost.knows_engine(device, device.engine)]
    if unknown:
        log.warning(
            "engine %s: cost model %s has no times of this engine for device %s, and predicts those of onnxruntime: "
            "measure the device with 'dicompiler profile', or state engine_rates in the platform",
            unknown[0].engine,
            cost.name,
            ", ".join(device.name for device in unknown),
        )


def _choose_engine(layers: LayerGraph, device: Device, cost: CostModel, target: Target | None) -> str:
    """Return the engine with which a device computes the network fastest; onnxruntime if no engine is faster."""
    usable = [name for name in registry().engines if name != DEFAULT_ENGINE and _can_use(target, name)]
    others = [name for name in usable if cost.knows_engine(device, name)]
    seconds = {DEFAULT_ENGINE: _network_seconds(layers, replace(device, engine=DEFAULT_ENGINE), cost)}
    for name in others:
        with_engine = replace(device, engine=name)
        if cost.is_measured or _has_only_one_rate(with_engine):
            seconds[name] = _network_seconds(layers, with_engine, cost)
        elif _stated_share(layers, with_engine) >= MIN_STATED_SHARE:
            # The platform states rates of this engine for each kind of layer. The engine is preferred (0 s) without a
            # comparison with onnxruntime, for which platforms state one rate for all kinds of layers. This rate can be
            # wrong by a factor of 4.
            seconds[name] = 0.0
    best = min(seconds, key=lambda name: seconds[name])
    try:
        make_engine(best).check_installed()
    except DicompilerError as error:
        log.warning("device %s: %s; until then, onnxruntime computes there", device.name, error)
        return DEFAULT_ENGINE
    return best


def _network_seconds(layers: LayerGraph, device: Device, cost: CostModel) -> float:
    return sum(cost.seconds(layers, layer, LayerShare(), device) for layer in layers.layers)


def _has_only_one_rate(device: Device) -> bool:
    """Return True if the platform states no rates of the device's engine for single kinds of layers."""
    return {entry.kind for entry in device.engine_rates if entry.engine == device.engine} <= {OTHER_KINDS}


def _stated_share(layers: LayerGraph, device: Device) -> float:
    """Return the share of a network's operations that belong to certain kinds of layers.

    These are the kinds for which the platform states a rate of the device's engine.
    """
    kinds = {entry.kind for entry in device.engine_rates if entry.engine == device.engine}
    flops = {layer.name: count_flops(layers, layer) for layer in layers.layers}
    stated = sum(flops[layer.name] for layer in layers.layers if kinds.intersection(rate_kinds(layers, layer)))
    return stated / max(1, sum(flops.values()))


def make_engine(name: str) -> Engine:
    """Return the engine with this name; raise UsageError with the nearest name if there is none."""
    engine: Engine = registry().make("engines", name)
    return engine


def split_program(compilation: PipelineState) -> PipelineState:
    """Return the compilation with segments split at the operators that the engine of their device does not support.

    Segments are ONNX submodels. Those with unsupported operators are computed by onnxruntime.
    """
    assert compilation.program is not None and compilation.platform is not None
    used = {device.device: device.engine for device in compilation.program.devices if device.engine != DEFAULT_ENGINE}
    engines = {name: make_engine(engine) for name, engine in used.items()}
    return replace(compilation, program=split_by_engine(compilation.program, engines))


def engine_tolerances(model: Model, engines: Mapping[str, str]) -> dict[str, Tolerance]:
    """Return the tolerances that engines need for outputs of type float32, by output name.

    Args:
        model: The reference model.
        engines: Engines other than onnxruntime by device name.

    Returns:
        The tolerances; empty if the usual tolerance suffices for all engines.
    """
    import onnx

    limit = max((allowed_difference(make_engine(name)) for name in set(engines.values())), default=0.0)
    if limit <= RELATIVE_TOLERANCES["float32"]:
        return {}
    outputs = model.proto.graph.output
    floats = [value.name for value in outputs if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    return dict.fromkeys(floats, Tolerance(limit))
