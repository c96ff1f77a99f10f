"""From a model to a problem: the passes that come before any decision, the platform.

Model ──normalise, quantise?, infer-shapes, form-layers, trim──► Compilation with layers
Compilation + Platform + CostModel → Problem
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from dicompiler.base.errors import UsageError
from dicompiler.base.option_specs import Spec
from dicompiler.cost.cost_model import AnalyticModel, CostModel
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.driver.wire_types import apply_wire_types
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.sanity_checks import check_known_operators
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.platform import Platform
from dicompiler.ir.wire_dtype import WireFormat, parse_wire_format
from dicompiler.plugin.pass_base import Instrument
from dicompiler.plugin.pass_manager import PassManager
from dicompiler.plugin.registry import registry
from dicompiler.search.problem import Problem
from dicompiler.search.strategy import Strategy
from dicompiler.target.target_base import Target

if TYPE_CHECKING:
    import onnx

log = logging.getLogger("dicompiler")

DEFAULT_COST_MODEL = "analytic"
DEFAULT_TARGET = "sockets"
PREPARE_PASSES = ("normalise", "infer-shapes", "form-layers", "trim")
QUANTISE_PASS, KEEP_STATES_PASS = "quantise", "keep-states"
_SHAPE_REMEDIES = {
    "": "it depends on values; compile the network without that part, or take the prediction for the rest",
    "com.microsoft": "compile the network as it was before onnxruntime optimised it, or add value_info to the model",
}
_DEFAULT_REMEDY = "add value_info to the model"


def prepare(
    model: Model,
    shape: Sequence[str] = (),
    instruments: Sequence[Instrument] = (),
    quantize_samples: str | Path | None = None,
    state: str | Sequence[str] = (),
) -> PipelineState:
    """Model → normalised, quantised where there are samples to calibrate it with, with shapes and layers, of which
    all is read. state: its states (see the pass `keep-states`); by default those that it says itself. DicompilerError
    for an operator that onnxruntime has not."""
    check_known_operators(model.proto)
    normalise, infer, *layers = PREPARE_PASSES
    shapes = Spec.from_mapping(infer, {"shape": tuple(shape)})
    specs = [Spec.from_mapping(normalise, {}), shapes, *(Spec.from_mapping(name, {}) for name in layers)]
    if quantize_samples is not None:  # what is quantised has static shapes before, and new tensors afterwards
        specs[1:2] = [
            shapes,
            Spec.from_mapping(QUANTISE_PASS, {"samples": str(quantize_samples)}),
            Spec.from_mapping(infer, {}),
        ]
    if state:
        specs[-len(layers) : -len(layers)] = [
            Spec.from_mapping(KEEP_STATES_PASS, {"state": (state,) if isinstance(state, str) else tuple(state)})
        ]
    make = registry().make
    passes = [make("passes", spec) for spec in specs]
    return PassManager(passes, instruments).run(PipelineState(model=model))


def load_problem(
    model: str | Path | bytes | onnx.ModelProto | Model,
    platform: str | Path | Platform | None,
    shape: Sequence[str] = (),
    objective: str = "latency",
    cost: str | CostModel = DEFAULT_COST_MODEL,
    wire_dtype: str | Mapping[str, str] | WireFormat | None = None,
    target: str | Target | None = None,
    state: str | Sequence[str] = "auto",
) -> Problem:
    """The problem of splitting `model` over `platform`, for those who call strategies themselves; see `compile`.

    target: whose runtime is to run the plan; without one messages and calls cost nothing.
    """
    costs: CostModel = registry().resolve("cost_models", cost)
    runs: Target | None = None if target is None else registry().resolve("targets", target)
    compilation = apply_wire_types(
        prepare(Model.load(model), shape, state=resolve_states(state, runs)),
        parse_wire_format(wire_dtype) or WireFormat(),
    )
    return make_problem(replace(compilation, platform=resolve_platform(platform)), objective, costs, runs)


def resolve_states(state: str | Sequence[str], target: Target | None) -> str | Sequence[str]:
    """The states that `target` is asked to keep: it may keep none, then the usual ones are not sought. UsageError where
    it is asked to."""
    if target is None or target.can_keep_states or state == "none" or tuple(state) == ("none",):
        return state
    if state == "auto" or tuple(state) == ("auto",):
        return "none"
    raise UsageError(
        f"state: target {target.name!r} keeps nothing from frame to frame: leave states out (--state none), or take "
        "target 'sockets'"
    )


def resolve_platform(given: str | Path | Platform | None, strategy: Strategy | None = None) -> Platform:
    """The platform given, else the one that the strategy's own input describes. UsageError where there is none."""
    families = [provided.value for provided in registry().platforms.values()]
    described = strategy.own_platform() if strategy is not None and given is None else None
    if given is None and described is None:
        raise UsageError("compile: no platform: give a TOML file or a built-in one such as rpi4x4 (--platform)")
    return described if described is not None else Platform.load(given, families)  # type: ignore[arg-type]


def make_problem(
    compilation: PipelineState, objective: str = "latency", cost: CostModel | None = None, target: Target | None = None
) -> Problem:
    """The problem that a prepared compilation on a platform is, with a warning for each layer that counts as no work.
    target: whose runtime's costs count. UsageError for an unknown objective."""
    layers, platform = compilation.layers, compilation.platform
    assert layers is not None and platform is not None
    for line in layers_without_cost(layers):
        log.warning(line)
    costs = cost or AnalyticModel()
    problem = Problem(layers, platform, costs, objective, model=compilation.model, file_graph=compilation.loaded_graph)
    if target is None:
        return problem
    return replace(problem, runtime_costs=runtime_costs(platform, costs, target))


def runtime_costs(platform: Platform, cost: CostModel, target: Target) -> dict[str, RuntimeCosts]:
    """Device → what the target's runtime costs there by the cost model; in TLS where there are several hosts: so
    they talk unless told otherwise."""
    own = {one.name: cost.runtime_costs(one, target.runtime_costs, target.name) for one in platform.devices}
    return {name: costs.with_tls for name, costs in own.items()} if len(platform.hosts) > 1 else own


def layers_without_cost(layers: LayerGraph) -> Iterator[str]:
    """A line for each layer in which tensors have no known shape: it cannot be cut, and predictions leave it out."""
    for layer in layers.layers:
        unknown = [(node, name) for node in layer.nodes for name in node.outputs if _has_unknown_shape(layers, name)]
        if unknown:
            node, name = unknown[0]
            left = f"layer {layer.name!r} ({len(layer.nodes)} nodes) stays whole, and predictions leave its work out"
            why = f"the shape of {name!r}, which {node.op} makes, is not known"
            yield f"{left}: {why}: {_SHAPE_REMEDIES.get(node.domain, _DEFAULT_REMEDY)}"


def _has_unknown_shape(layers: LayerGraph, name: str) -> bool:
    return bool(name) and layers.tensors[name].shape is None and layers.tensors[name].dtype != onnx.TensorProto.STRING
