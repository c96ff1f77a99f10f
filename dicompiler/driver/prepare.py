"""Preparation of a model: passes that form its layers, and the problem that a strategy solves.

Model ──normalise, infer-shapes, quantise?, keep-states?, form-layers, trim──► PipelineState with layers
PipelineState + Platform + CostModel ⇒ Problem

Passes with a question mark are optional.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.base.option_specs import Spec
from dicompiler.cost.cost_model import CostModel
from dicompiler.driver.compile_options import DEFAULT_COST_MODEL, ModelSource
from dicompiler.driver.engine_choice import with_layer_engines
from dicompiler.driver.engines import AUTO_ENGINE, choose_engines
from dicompiler.driver.problem_setup import make_problem
from dicompiler.ir import plan as plans
from dicompiler.ir.onnx.graph_structure import graph_and_bodies
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.sanity_checks import check_known_operators
from dicompiler.ir.onnx.weights import dtype_name
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.wire_dtype import (
    UNCHANGED,
    WireFormat,
    effective_wire_dtypes,
    parse_wire_format,
    requested_wire_dtypes,
    with_wire_dtypes,
)
from dicompiler.partition.lowering import lower_unchecked
from dicompiler.partition.placed_model import check_not_placed
from dicompiler.plugin.pass_base import Instrument
from dicompiler.plugin.pass_manager import PassManager
from dicompiler.plugin.registry import registry
from dicompiler.search.problem import Problem
from dicompiler.search.strategy import Strategy
from dicompiler.target.target_base import Target

log = logging.getLogger("dicompiler")

LOG_FATAL_ONLY = 4
"""Severity level of onnxruntime at which it logs only fatal errors."""

_MISSING_KERNEL = re.compile(r"Could not find an implementation for (\S+)\((\d+)\) node with name '(.*)'")


def prepare(
    model: Model,
    shape: Sequence[str] = (),
    instruments: Sequence[Instrument] = (),
    quantize_samples: str | Path | None = None,
    state: str | Sequence[str] = (),
) -> PipelineState:
    """Run the passes that prepare a model, and return the state with its shapes and layers.

    Args:
        model: The model to prepare.
        shape: Shapes of inputs with dynamic dimensions, such as "input=1x3x224x224".
        instruments: Objects that are called before and after each pass.
        quantize_samples: An .npz file of sample inputs. If it is given, the model is quantized.
        state: Graph inputs and outputs that devices keep between frames, such as "past*=present*", or "auto" to find
            them by common names. Default: those that the model declares.

    Raises:
        DicompilerError: The model is already split, onnxruntime does not know an operator, or a pass fails.
    """
    check_not_placed(model)
    check_known_operators(model.proto)
    specs = [Spec("normalise"), Spec.from_mapping("infer-shapes", {"shape": tuple(shape)})]
    if quantize_samples is not None:
        # `quantise` needs inferred shapes. It adds tensors without shapes, so `infer-shapes` runs again.
        specs += [Spec.from_mapping("quantise", {"samples": str(quantize_samples)}), Spec("infer-shapes")]
    if state:
        states = (state,) if isinstance(state, str) else tuple(state)
        specs.append(Spec.from_mapping("keep-states", {"state": states}))
    specs += [Spec("form-layers"), Spec("trim")]
    passes = [registry().make("passes", spec) for spec in specs]
    return PassManager(passes, instruments).run(PipelineState(model=model))


def check_loadable(model: Model) -> None:
    """Raise DicompilerError if the installed onnxruntime cannot load the model."""
    # onnxruntime is imported only here, because it loads slowly and many users of this module do not need it.
    from dicompiler.verify.executor import OrtSession

    place = model.display_name
    try:
        # Large models need no more time and memory than small ones if they are loaded without weights.
        OrtSession(model.without_weights(), {}, place, "none", is_single_use=True, log_severity=LOG_FATAL_ONLY)
    except DicompilerError:
        try:
            # Some operators accept only constants, so they need the weights. An optimization may replace an operator
            # without a kernel.
            OrtSession(model.proto, model.weights, place, "all", is_single_use=True, log_severity=LOG_FATAL_ONLY)
        except DicompilerError as error:
            missing = _MISSING_KERNEL.search(str(error))
            if missing is None:
                raise DicompilerError(f"{error}: correct the model, or export it again") from error
            raise DicompilerError(_describe_missing_kernel(model, *missing.groups())) from error


def _describe_missing_kernel(model: Model, op: str, opset: str, name: str) -> str:
    import onnxruntime

    tensors = model.tensors()
    types = dict.fromkeys(
        dtype_name(tensors[tensor].dtype).lower()
        for node in _nodes_named(model.proto, name)
        for tensor in node.input
        if tensor in tensors
    )
    inputs = f" with inputs of type {', '.join(types)}" if types else ""
    return (
        f"{model.display_name}: {op} {name!r}: onnxruntime {onnxruntime.__version__} has no kernel for {op} of opset "
        f"{opset}{inputs}: export the model with another type or opset"
    )


def _nodes_named(model: onnx.ModelProto, name: str) -> Iterator[onnx.NodeProto]:
    for graph in graph_and_bodies(model.graph):
        yield from (node for node in graph.node if node.name == name)


def load_problem(
    model: ModelSource,
    platform: str | Path | Platform | None,
    shape: Sequence[str] = (),
    objective: str = "latency",
    cost: str | CostModel = DEFAULT_COST_MODEL,
    wire_dtype: str | Mapping[str, str] | WireFormat | None = None,
    target: str | Target | None = None,
    state: str | Sequence[str] = "auto",
    engine: str | None = None,
    precision: str | None = None,
) -> Problem:
    """Return the problem of splitting a model over a platform, for callers that run strategies themselves.

    The arguments are those of `compile`. Without a `target`, messages and calls of engines cost no time.
    """
    cost_model: CostModel = registry().resolve("cost_models", cost)
    runtime: Target | None = None if target is None else registry().resolve("targets", target)
    prepared = prepare(Model.load(model), shape, state=resolve_states(state, runtime))
    prepared = apply_wire_types(prepared, parse_wire_format(wire_dtype) or WireFormat())
    assert prepared.layers is not None
    with_engines = choose_engines(
        prepared.layers, resolve_platform(platform), cost_model, runtime, engine, precision=precision
    )
    problem = make_problem(replace(prepared, platform=with_engines), objective, cost_model, runtime)
    return with_layer_engines(problem, precision) if engine == AUTO_ENGINE else problem


def resolve_states(state: str | Sequence[str], target: Target | None) -> tuple[str, ...]:
    """Return the option `state` of a compilation as a tuple; "auto" becomes "none" if the target cannot keep states.

    States are graph inputs and outputs that devices keep between frames.

    Raises:
        UsageError: States are named and the target cannot keep them.
    """
    states = (state,) if isinstance(state, str) else tuple(state)
    if target is None or target.can_keep_states or states == ("none",):
        return states
    if states == ("auto",):
        return ("none",)
    raise UsageError(
        f"state: target {target.name!r} cannot keep states between frames: use no states (--state none), or "
        "target 'sockets'"
    )


def resolve_platform(platform: str | Path | Platform | None, strategy: Strategy | None = None) -> Platform:
    """Return a platform, given as a Platform, a built-in platform's name or a TOML file.

    Args:
        platform: The platform. If None, the strategy supplies it: `manual` reads it from a file of AutoDiCE.
        strategy: The strategy; None if there is none.

    Raises:
        UsageError: `platform` is None, and there is no strategy that supplies one.
    """
    if platform is None:
        described = None if strategy is None else strategy.own_platform()
        if described is None:
            raise UsageError("compile: no platform: give a TOML file or a built-in one such as rpi4x4 (--platform)")
        return described
    with registry().naming_load_errors():
        return Platform.load(platform, [entry.value for entry in registry().platforms.values()])


def resolve_wire_types(
    plan: str | Path | Plan | None,
    wire_dtype: str | Mapping[str, str] | WireFormat | None,
    samples: str | Path | None,
) -> tuple[Plan | None, WireFormat]:
    """Return the loaded plan and the element types in which tensors are sent.

    Args:
        plan: A plan, as a file or a Plan.
        wire_dtype: The types, for all layers or by layer. Default: those of the plan.
        samples: An .npz file of sample inputs, from which value ranges for int8 are measured later.

    Raises:
        UsageError: A type is unknown, int8 has neither samples nor value ranges, or samples are given without int8.
    """
    loaded = plan if isinstance(plan, Plan) or plan is None else plans.load_user_plan(plan)
    wire_format = parse_wire_format(wire_dtype)
    if loaded is not None:
        planned = loaded.wire_format
        if wire_format is None:
            wire_format = planned
        wire_format = replace(wire_format, ranges=wire_format.ranges or planned.ranges)
        loaded = replace(loaded, wire_format=wire_format)
    wire_format = wire_format or WireFormat()
    has_int8 = any(dtype == "int8" for _, dtype in wire_format.dtypes)
    if has_int8 and samples is None and not wire_format.ranges:
        raise UsageError(
            "wire: int8 needs the value range of each tensor: give samples of the inputs (--wire-samples X.npz)"
        )
    if samples is not None and not has_int8:
        raise UsageError("wire: samples are used for int8 only: omit --wire-samples, or send tensors as int8")
    return loaded, wire_format


def apply_wire_types(compilation: PipelineState, wire_format: WireFormat, place: str = "wire") -> PipelineState:
    """Set the types in which tensors are sent, so that predictions use the bytes that are really sent.

    Args:
        compilation: A state with layers.
        wire_format: The types.
        place: The option or the key of a plan that states the types, for error messages.
    """
    assert compilation.layers is not None
    return replace(compilation, layers=with_wire_dtypes(compilation.layers, wire_format.dtypes, place))


def measure_wire_ranges(compilation: PipelineState, samples: Path) -> Plan:
    """Return the plan with the value range of each tensor sent as int8, measured with an .npz file of sample inputs."""
    from dicompiler.verify.calibration_samples import read_samples
    from dicompiler.verify.comparison import graph_inputs
    from dicompiler.verify.wire_error import measure_ranges

    plan = compilation.plan
    assert plan is not None
    inputs = read_samples(samples, graph_inputs(compilation.model))
    log.info("measuring the ranges of sent tensors over %d samples", len(inputs))
    int8_only = WireFormat(
        tuple((name, kind if kind == "int8" else UNCHANGED) for name, kind in plan.wire_format.dtypes)
    )
    exact_plan = replace(plan, wire_format=int8_only.with_exact_stand_ins)
    program = lower_unchecked(replace(compilation, plan=exact_plan)).program
    assert program is not None
    return replace(plan, wire_format=replace(plan.wire_format, ranges=measure_ranges(program, inputs)))


def warn_not_narrowed(compilation: PipelineState) -> None:
    """Log a warning if some of the sent tensors cannot be converted to the requested type."""
    routing = compilation.routing
    assert routing is not None
    sent = {box.key.tensor for role in routing.roles for box in role.received_boxes}
    requested, effective = requested_wire_dtypes(routing.layers), effective_wire_dtypes(routing.layers)
    unchanged = sorted(sent & requested.keys() - effective.keys())
    if unchanged:
        log.warning(
            "wire: %d of %d sent tensors (such as %r) cannot be converted to the requested type: "
            "they are sent unchanged",
            len(unchanged),
            len(sent),
            unchanged[0],
        )
