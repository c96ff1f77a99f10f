"""The function behind `dicompiler opt`, which runs a pipeline of passes on a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dicompiler.base.errors import UsageError, check_type
from dicompiler.base.option_specs import Spec, parse_pipeline
from dicompiler.driver.compile_options import ModelSource, Shapes, check_instruments, format_shapes
from dicompiler.driver.prepare import (
    apply_wire_types,
    measure_wire_ranges,
    resolve_platform,
    resolve_wire_types,
    warn_not_narrowed,
)
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Plan, load_user_plan, plan_file_in_errors
from dicompiler.ir.platform import Platform
from dicompiler.ir.wire_dtype import WireFormat
from dicompiler.plugin.pass_base import Instrument, Pass
from dicompiler.plugin.pass_manager import PassManager
from dicompiler.plugin.registry import registry

NORMALISE_PASS, INFER_SHAPES_PASS, PARTITION_PASS = "normalise", "infer-shapes", "partition"


def opt(
    model: ModelSource,
    pipeline: str | Sequence[Pass],
    *,
    platform: str | Path | Platform | None = None,
    plan: str | Path | Plan | None = None,
    shape: Shapes = (),
    wire_dtype: str | Mapping[str, str] | WireFormat | None = None,
    wire_samples: str | Path | None = None,
    instruments: Sequence[Instrument] = (),
) -> PipelineState:
    """Run passes on a model.

    If there is a plan after the passes, `opt` applies it with the pass `partition`, unless the pipeline contains this
    pass. Write the result with `result.model.save("out.onnx")`.

    Args:
        model: The path of an ONNX file, its bytes, a ModelProto or a Model.
        pipeline: The passes, as text ("infer-shapes,form-layers,tile-height{parts=2}") or as objects. A text is
            preceded by the pass "normalise".
        platform: The cluster: a TOML file, the name of a built-in platform, or a Platform. Without it, devices are
            named d0, d1, ….
        plan: A plan to start with, as a file or a Plan.
        shape: Shapes of inputs with dynamic dimensions, for the pass "infer-shapes".
        wire_dtype: Element type in which tensors are sent, for all layers ("float16") or by layer. Default: the types
            in the plan, otherwise the tensors' own types.
        wire_samples: An .npz file of sample inputs, from which the value ranges for sending as int8 are measured.
        instruments: Objects with the methods of `Instrument`, which are called before and after each pass.

    Returns:
        The state after the last pass, with the model and the plan.

    Raises:
        DicompilerError: The model or the plan is not valid, or a pass cannot be applied.
        UsageError: A pass is unknown, or an option does not fit the pipeline.
    """
    check_instruments(instruments)
    check_type(pipeline, (str, Sequence), "opt: pipeline", "a text such as 'infer-shapes,form-layers', or passes")
    passes = make_passes(pipeline, format_shapes(shape)) if isinstance(pipeline, str) else tuple(pipeline)
    state = PipelineState(
        model=Model.load(model),
        platform=None if platform is None else resolve_platform(platform),
        plan=load_user_plan(plan) if isinstance(plan, str | Path) else plan,
    )
    state = PassManager(passes, instruments).run(state)
    sets_wire_types = wire_dtype is not None or wire_samples is not None
    if state.plan is None or state.routing is not None:
        if sets_wire_types:
            _refuse_wire_types(is_partitioned=state.routing is not None)
        return state
    if sets_wire_types:
        state = _set_wire_types(state, wire_dtype, wire_samples)
    partition = registry().make("passes", PARTITION_PASS)
    with plan_file_in_errors(plan):
        state = PassManager([partition], instruments, first_index=len(passes) + 1).run(state)
    warn_not_narrowed(state)
    return state


def make_passes(text: str, shapes: tuple[str, ...] = ()) -> tuple[Pass, ...]:
    """Return the passes of a pipeline's text, preceded by `normalise`.

    Args:
        text: The pipeline, such as "infer-shapes,form-layers".
        shapes: Shapes of inputs, such as "input=1x3x224x224", as options of the pass `infer-shapes`.

    Raises:
        UsageError: A pass is unknown, or there are shapes, but no pass `infer-shapes`.
    """
    specs = parse_pipeline(text)
    names = [spec.name for spec in specs]
    if shapes and INFER_SHAPES_PASS not in names:
        raise UsageError(f"opt: shape is an option of pass {INFER_SHAPES_PASS!r}, which is not in the pipeline")
    if NORMALISE_PASS not in names:
        specs = (Spec(NORMALISE_PASS), *specs)
    return tuple(registry().make("passes", _add_shapes(spec, shapes)) for spec in specs)


def _add_shapes(spec: Spec, shapes: tuple[str, ...]) -> Spec:
    if spec.name != INFER_SHAPES_PASS or not shapes:
        return spec
    options = dict(spec.options)
    return Spec.from_mapping(spec.name, {**options, "shape": (*options.get("shape", ()), *shapes)})


def _refuse_wire_types(is_partitioned: bool) -> None:
    """Raise UsageError: `wire_dtype` is given, but the pipeline makes no plan, or has already applied it.

    Args:
        is_partitioned: Whether the pipeline contains the pass `partition`.
    """
    if is_partitioned:
        raise UsageError(
            "opt: with wire_dtype, opt adds the pass 'partition' at the end: remove this pass from the pipeline"
        )
    raise UsageError("opt: wire_dtype: the pipeline makes no plan: add a pass that splits layers, or give a plan")


def _set_wire_types(
    state: PipelineState, wire_dtype: str | Mapping[str, str] | WireFormat | None, wire_samples: str | Path | None
) -> PipelineState:
    """Store in the plan the element types in which tensors are sent, and the value ranges for int8."""
    plan, wire = resolve_wire_types(state.plan, wire_dtype, wire_samples)
    state = replace(apply_wire_types(state, wire), plan=plan)
    if wire_samples is None:
        return state
    if state.platform is None:
        raise UsageError("opt: wire_samples: value ranges depend on the devices: give a platform")
    return replace(state, plan=measure_wire_ranges(state, Path(wire_samples)))
