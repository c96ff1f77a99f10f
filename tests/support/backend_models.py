"""The one-operator models of the ONNX backend tests, split in every way that their rules allow and verified.

benchmarks/backend.py uses all of them, and the tests a sample.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from support.generators import random_plan

from dicompiler.base.errors import DicompilerError
from dicompiler.driver.prepare import prepare
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.platform import uniform_platform
from dicompiler.ir.regions import full_region, split_proportionally, with_interval
from dicompiler.partition.bounds_inference import cuttable_axes, output_shape, reduction_length
from dicompiler.partition.lowering import lower
from dicompiler.verify.comparison import compare_value
from dicompiler.verify.executor import ProgramExecutor, run_model

KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted")
DEVICES = ("d0", "d1", "d2")
NEWEST_IR, NEWEST_OPSET = 13, 26
"""The newest that onnxruntime takes. A model of a later one is taken as one of this where it runs as such."""


@dataclass(frozen=True)
class Case:
    """A model of the backend tests with its inputs (None if one of them is not a tensor)."""

    name: str
    kind: str
    model: onnx.ModelProto
    inputs: Mapping[str, NDArray[Any]] | None

    @property
    def operator(self) -> str:
        """The operator type of the model; functions written as nodes go by the kind of their test."""
        found = dict.fromkeys(node.op_type for node in self.model.graph.node)
        if self.name.endswith("_expanded") or "_expanded_" in self.name:
            return "(function written out)"
        return next((op for op in found if op not in ("Constant", "Identity")), next(iter(found), "(none)"))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Attributes:
        kind: `split`, `whole` (nothing can be cut), `refused` (an error in one line), `skipped` (onnxruntime does not
            run it), `wrong` or `crash`.
        why: The reason for all but split ones.
        plans: Number of verified plans.
    """

    case: Case
    result: str
    why: str = ""
    plans: int = 0


def cases(kinds: Sequence[str] = KINDS) -> Iterator[Case]:
    """Yield all models, kind by kind, in a fixed order."""
    for kind in kinds:
        yield from _collected() if kind == "node" else _stored(kind)


def node_case(module: str, name: str) -> Case:
    """Return one node case of a module of `onnx.backend.test.case.node`.

    All modules together take 13 s, because they compute the outputs of large pools.
    """
    from onnx.backend.test.case import node

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(f"{node.__name__}.{module}")
    return next(_node(case) for case in node._NodeTestCases if case.name == name)


def _collected() -> Iterator[Case]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    # Without sorting, the order would depend on the modules that were imported before.
    yield from map(_node, sorted(found, key=lambda case: case.name))


def _node(case: Any) -> Case:
    model = case.model
    assert model is not None  # It is None only for tests with models in files.
    model.ir_version = min(model.ir_version, NEWEST_IR)
    for entry in model.opset_import:
        entry.version = min(entry.version, NEWEST_OPSET) if entry.domain in ("", "ai.onnx") else entry.version
    return Case(case.name, "node", model, _named(model, case.data_sets[0][0] if case.data_sets else ()))


def _stored(kind: str) -> Iterator[Case]:
    root = Path(onnx.__file__).parent / "backend" / "test" / "data" / kind
    for directory in sorted(path for path in root.iterdir() if (path / "model.onnx").is_file()):
        model, values = onnx.load(directory / "model.onnx"), []
        for index in range(len(list(directory.glob("test_data_set_0/input_*.pb")))):
            tensor = onnx.TensorProto.FromString((directory / f"test_data_set_0/input_{index}.pb").read_bytes())
            values.append(onnx.numpy_helper.to_array(tensor) if tensor.data_type else None)
        yield Case(directory.name, kind, model, _named(model, values))


def _named(model: onnx.ModelProto, values: Sequence[Any]) -> Mapping[str, NDArray[Any]] | None:
    """Return the model's inputs by name; None if one is missing or not a tensor."""
    initializers = {tensor.name for tensor in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in initializers]
    if len(values) < len(names) or not all(isinstance(v, (np.ndarray, np.generic)) for v in values):
        return None
    return {name: np.asarray(value) for name, value in zip(names, values, strict=False)}


def outcome(case: Case, randoms: int = 3) -> Outcome:
    """Compile a case for three devices under `randoms` random plans and every way to cut it, and compare each."""
    if case.inputs is None:
        return Outcome(case, "skipped", "an input is no tensor")
    try:
        reference = run_model(Model.load(case.model), case.inputs)
    except DicompilerError:
        return Outcome(case, "skipped", "onnxruntime does not run it")
    found = [_verified(variant, reference, randoms) for variant in (case, *_with_constants(case))]
    order = ("crash", "wrong", "refused", "split", "whole")
    worst = min(found, key=lambda item: order.index(item.result))
    return replace(worst, case=case, plans=sum(item.plans for item in found))


def _with_constants(case: Case) -> Iterator[Case]:
    """Return the model as exporters write it: all inputs but the first are constants."""
    first, *others = case.inputs or ("",)
    if len(case.model.graph.node) > 1 or not others or case.inputs is None:
        return
    if any(case.inputs[name].dtype.kind not in "biuf" for name in others):
        return
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    kept = [value for value in model.graph.input if value.name not in others]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(case.inputs[name], name) for name in others)
    model.ir_version = max(4, model.ir_version)
    yield Case(f"{case.name} (constants)", case.kind, model, {first: case.inputs[first]})


def _verified(case: Case, reference: Mapping[str, Any], randoms: int) -> Outcome:
    """Verify one variant of a case under all plans."""
    assert case.inputs is not None
    plans = 0
    try:
        compilation = prepare(Model.load(case.model), _shapes(case))
        layers = compilation.layers
        assert layers is not None
        for plan in (*(random_plan(Random(seed), layers, DEVICES) for seed in range(randoms)), *ways(layers)):
            fault = _fault(compilation, plan, case.inputs, reference)
            if fault:
                return Outcome(case, "wrong", fault, plans)
            plans += 1
    except DicompilerError as error:
        return Outcome(case, "refused", str(error), plans)
    except Exception as error:  # Unexpected errors count as crashes; the benchmark continues.
        return Outcome(case, "crash", f"{type(error).__name__}: {error}", plans)
    whole = _why_whole(layers)
    return Outcome(case, "whole" if whole else "split", whole, plans)


def _shapes(case: Case) -> list[str]:
    """Return the sizes of inputs that the model leaves open."""
    assert case.inputs is not None
    found = []
    for value in case.model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name in case.inputs and any(not dim.HasField("dim_value") for dim in dims):
            found.append(f"{value.name}={'x'.join(map(str, case.inputs[value.name].shape))}")
    return found


def _fault(
    compilation: PipelineState, plan: Plan, inputs: Mapping[str, NDArray[Any]], reference: Mapping[str, Any]
) -> str:
    """Return the difference from onnxruntime at a sink; '' if there is none."""
    result = lower(replace(compilation, plan=plan, platform=uniform_platform(len(DEVICES))))
    assert result.program is not None and result.routing is not None
    execution = ProgramExecutor(result.program).run(inputs)
    if sum(execution.sent) != result.routing.total_bytes:
        return f"{sum(execution.sent)} bytes sent, {result.routing.total_bytes} predicted"
    expected = _by_output(reference, execution.outputs)
    for (name, value), got in zip(expected, execution.outputs.values(), strict=True):
        check = compare_value(name, value, got)
        if not check.passed:
            return f"{name}: {check.detail}"
    return ""


def _by_output(reference: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the reference as pairs of name and value, with each tensor of a sequence by itself.

    The passes replace an output that is a sequence by its tensors. A sequence of unknown length stays in `outputs`.
    """
    return [
        (name, item)
        for name, value in reference.items()
        for item in (value if isinstance(value, list) and name not in outputs else [value])
    ]


def ways(layers: LayerGraph) -> Iterator[Plan]:
    """Return plans that together cut each layer in each allowed way: plan n has way n of every layer."""
    own = {layer.name: tuple(_ways(layers, layer)) for layer in layers.layers}
    for index in range(max((len(found) for found in own.values()), default=0)):
        parts = {}
        for number, layer in enumerate(layers.layers):
            found = own[layer.name]
            whole = (Part(DEVICES[number % len(DEVICES)]),)
            parts[layer.name] = found[index % len(found)] if found else whole
        yield Plan(parts, (DEVICES[0],), (DEVICES[-1],))


def _ways(layers: LayerGraph, layer: Layer) -> Iterator[tuple[Part, ...]]:
    """Return parts for one layer: each axis in three, and partial sums with both kinds of merging."""
    axes = cuttable_axes(layers, layer)
    tiles: list[Part] = []
    for axis in axes:
        whole = full_region(output_shape(layers, layer))
        cuts = [cut for cut in split_proportionally(whole[axis][1], [1.0] * len(DEVICES)) if cut[0] < cut[1]]
        tiles = [Part(DEVICES[i], with_interval(whole, axis, cut)) for i, cut in enumerate(cuts)]
        yield tuple(tiles)
    extent = reduction_length(layers, layer) or 0
    if extent > 1:
        cuts = [cut for cut in split_proportionally(extent, [1.0] * len(DEVICES)) if cut[0] < cut[1]]
        partials = [Part(DEVICES[i], None, cut) for i, cut in enumerate(cuts)]
        yield (*partials, Part(DEVICES[0]))
        if tiles:
            yield (*partials, *tiles)


def _why_whole(layers: LayerGraph) -> str:
    """Return why nothing can be cut; '' if something can."""
    if any(next(_ways(layers, layer), None) for layer in layers.layers):
        return ""
    reasons = dict.fromkeys(layer.whole_reason or _why_in_full(layers, layer) for layer in layers.layers)
    return "; ".join(reasons)


def _why_in_full(layers: LayerGraph, layer: Layer) -> str:
    """Return why a rule that can be cut computes all of its output for any part of it."""
    if max(output_shape(layers, layer), default=1) == 1:
        return "its output is one element"
    return "its rule needs all of its axes"
