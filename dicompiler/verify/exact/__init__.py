"""The exact check: a model with the graph of a network whose results are the same bits in whatever order it is summed.

In: a Model whose weights are initializers (as the pass `normalise` leaves it), a seed. Out: the check model and integer
inputs for it. Comparing a split network with the whole one bit by bit then proves the geometry of the split, once so
many seeds are run that every tap and every input channel is read (`seeds_needed`, `coverage`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import onnx
from numpy.typing import NDArray

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import MIN_WEIGHT_BYTES, Weight, is_fixed_size, is_placeholder, make_placeholder
from dicompiler.ir.random_ops import is_random
from dicompiler.verify.deadline import DeadlineExceededError
from dicompiler.verify.exact import excluded_layers as left
from dicompiler.verify.exact.coverage import Coverage, ReadMasks, measure_coverage, seeds_needed
from dicompiler.verify.exact.exactness_check import Peak, first_inexact_peaks, largest_peak
from dicompiler.verify.exact.graph_facts import (
    GraphFacts,
    InputPlace,
    Relaxation,
    Rules,
    control_flow_bodies,
    facts_for_model,
    gather_facts,
    original_domain,
)
from dicompiler.verify.exact.integer_values import SCHEDULES, integer_constants, integer_inputs
from dicompiler.verify.exact.sparse_filters import weight_index
from dicompiler.verify.exact.stand_ins import DOMAIN, choose_stand_ins, declare_functions, prepare_node
from dicompiler.verify.index_inputs import find_value_limits, limit_values
from dicompiler.verify.non_tensor_inputs import random_non_tensor_inputs

__all__ = [
    "DOMAIN",
    "CheckModel",
    "Coverage",
    "NotExactError",
    "ReadMasks",
    "Relaxation",
    "build_check_model",
    "check_model",
    "measure_coverage",
    "measure_peak",
    "seeds_needed",
]  # fmt: skip


class NotExactError(DicompilerError):
    """A network that no integers take through exactly: an operator rounds, or sums grow too large."""


NO_RELAXATION = Relaxation()


@dataclass(frozen=True)
class CheckModel:
    """A check model and inputs for it. treatment: what it took; `left`: name of a node → why it is left out."""

    model: Model
    inputs: Mapping[str, NDArray[Any]]
    relaxation: Relaxation

    @property
    def excluded(self) -> Mapping[str, str]:
        return self.relaxation.excluded


def check_model(model: Model, seed: int, rules: Rules | None = None) -> tuple[Model, dict[str, NDArray[Any]]]:
    """The check model of `model` and inputs for it; see `made`."""
    found = build_check_model(model, seed, rules)
    return found.model, dict(found.inputs)


def build_check_model(
    model: Model,
    seed: int,
    rules: Rules | None = None,
    relaxation: Relaxation = NO_RELAXATION,
    layers: LayerGraph | None = None,
) -> CheckModel:
    """The check model of `model` for `seed` (at least 0). rules: by (domain, operator type), what stands in for what
    (None: the built-in ones). treatment: what is known to be needed, from another seed. layers: those of `model`, by
    which more can stand in for what is never cut.

    It has the nodes, tensor names, attributes and shapes of `model`; only numbers differ, and operators that round
    move to domains under DOMAIN (see `standins`). Filters have one to three elements of ±1, or as many as it takes to
    read everything within few seeds. It is run until every sum in it is below what its type holds exactly (2^24 in
    float32): each time what is not exact although its inputs are is treated further. At last it is left out: a new
    input stands in its place (see `left`), by the one node that is added. NotExact where onnxruntime refuses the check
    model, DicompilerError for an input without a static shape.
    """
    if seed < 0:
        raise UsageError(f"exact check: seed is {seed}: take a number of at least 0")
    known = replace(gather_facts(model, rules, layers), relaxation=_exclude_random_nodes(relaxation, model.proto))
    makers = {name: index for index, node in enumerate(known.nodes) for name in node.output}
    arrays, of, check = dict[InputPlace, NDArray[Any]](), -1, None
    while True:
        schedule = SCHEDULES[known.relaxation.schedule]
        if of != known.relaxation.schedule:
            arrays, of, check = {}, known.relaxation.schedule, None  # given back before the next are made
            arrays = integer_constants(known, seed, schedule)
        check = _with_new_constants(known, arrays, left.replacement_values(known, seed, schedule.inputs))
        feed = limit_values(integer_inputs(_open_inputs(model), seed, schedule), find_value_limits(model), seed)
        feed |= random_non_tensor_inputs(model, seed, integers_only=True)
        try:
            found = [
                (makers[one.tensor.removesuffix(left.ZEROS_SUFFIX)], one)
                for one in first_inexact_peaks(facts_for_model(known, check), feed)
            ]
        except DeadlineExceededError:
            raise
        except DicompilerError as error:
            found = [_find_rejected_node(known, error)]
        if not found:
            return CheckModel(check, feed, known.relaxation)
        after = _relax_further(known, found)
        if after == known.relaxation:
            raise NotExactError(_describe_peak(known, *found[0]))
        known = replace(known, relaxation=after)


def _exclude_random_nodes(treatment: Relaxation, model: onnx.ModelProto) -> Relaxation:
    """The treatment with all nodes left out that draw random numbers, but for control flow."""
    nodes = [node for node in model.graph.node if is_random(node, model) and not list(control_flow_bodies(node))]
    left = {node.name: f"{node.op_type} {node.name!r} draws random numbers" for node in nodes}
    return replace(treatment, excluded={**left, **treatment.excluded})


def _find_rejected_node(known: GraphFacts, error: DicompilerError) -> tuple[int, Peak]:
    """The node at which onnxruntime stops. NotExact where it names none that can be treated."""
    named = re.search(r"Name:'([^']*)'", str(error))
    for index, node in enumerate(known.nodes):
        treated = (original_domain(node), node.op_type) in known.relaxation.generic_ops
        if named and node.name == named[1] and not treated:
            return index, Peak(node.output[0], math.inf, math.inf)
    raise NotExactError(f"exact check: {error}; only real weights can verify this network") from error


def _relax_further(known: GraphFacts, found: Sequence[tuple[int, Peak]]) -> Relaxation:
    """The treatment with one more step against each of these nodes: their inputs are bounded; weights are sparser;
    something general stands in for the operator; the node is left out."""
    before = after = known.relaxation
    for index, worst in found:
        node = known.nodes[index]
        kind, grows = (original_domain(node), node.op_type), math.isfinite(worst.magnitude)
        if grows and not before.bounds_inputs:
            after = replace(after, bounds_inputs=True)
        elif grows and weight_index(known, node) is not None and before.schedule + 1 < len(SCHEDULES):
            after = replace(after, schedule=before.schedule + 1)
        elif kind not in before.generic_ops:
            after = replace(after, generic_ops=after.generic_ops | {kind})
        elif node.name not in before.excluded and not list(control_flow_bodies(node)):
            why = _describe_peak(known, index, worst) + left.describe_unchecked(node, known)
            after = replace(after, excluded={**after.excluded, node.name: why})
    return after


def measure_peak(model: Model, inputs: Mapping[str, NDArray[Any]]) -> Peak:
    """The sum that comes nearest to what its type holds exactly, when the check model `model` runs on `feed`."""
    return largest_peak(gather_facts(model), inputs)


def _describe_peak(known: GraphFacts, index: int, worst: Peak) -> str:
    place = f"tensor {worst.tensor!r}, made by {known.nodes[index].op_type} {known.nodes[index].name!r}"
    if worst.magnitude == math.inf:
        return f"{place}, is no whole number: the operator rounds, and nothing exact can stand in for it"
    return f"{place}, grows to {worst.magnitude:.3g}, too large to be exact"


def _open_inputs(model: Model) -> dict[str, tuple[int, tuple[int, ...]]]:
    """(dtype, shape) of the graph's inputs that have no default, but of those whose bytes no shape tells."""
    tensors, constants_of_model = model.tensors(), model.initializers()
    open_inputs = {}
    for value in model.proto.graph.input:
        tensor = tensors[value.name]
        if value.name in constants_of_model or not is_fixed_size(tensor.dtype):
            continue
        if tensor.shape is None:
            raise DicompilerError(
                f"exact check: input {value.name!r} has no static shape: give one (--shape {value.name}=1x3x224x224)"
            )
        open_inputs[value.name] = (tensor.dtype, tensor.shape)
    return open_inputs


def _with_new_constants(
    known: GraphFacts, arrays: Mapping[InputPlace, NDArray[Any]], new: Mapping[str, NDArray[Any]]
) -> Model:
    """The model with prepared nodes that read `arrays`; a constant that is read in two ways becomes two. new: what
    takes the place of layers that are left out, by their tensors."""
    proto = onnx.ModelProto()
    proto.CopyFrom(known.model.proto)
    stand_ins = choose_stand_ins(known)
    for index, node in enumerate(proto.graph.node):
        prepare_node(node, known, stand_ins.get(index))
    replaced: dict[str, NDArray[Any]] = {}
    for name in known.constants:
        places = known.readers(name)
        whole = places is not None and all(place in arrays for place in places)
        for index, position in known.uses.get(name, ()):
            array = arrays.get((index, position))
            if array is None:
                continue
            fits = whole and (name not in replaced or _equal_arrays(replaced[name], array))
            target = name if fits else f"{name}@{index}.{position}"
            replaced[target] = array
            proto.graph.node[index].input[position] = target
    weights = _store_initializers(
        proto, known.model, replaced | {f"{name}{left.NUMBERS_SUFFIX}": array for name, array in new.items()}
    )
    declare_functions(proto, known, stand_ins)
    left.add_replacements(proto, new)
    return Model(proto, MappingProxyType(weights))


def _equal_arrays(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return bool(a.shape == b.shape and (a == b).all())


def _store_initializers(proto: onnx.ModelProto, model: Model, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Weight]:
    """Puts `arrays` in the place of the initializers of `proto`, which is changed; its hollows' weights come back."""
    weights: dict[str, Weight] = {}

    def tensor(name: str) -> onnx.TensorProto:
        if arrays[name].nbytes < MIN_WEIGHT_BYTES:
            return onnx.numpy_helper.from_array(arrays[name], name)
        weights[name] = Weight.from_array(arrays[name])
        return make_placeholder(name, weights[name])

    graph = proto.graph
    kept = [entry for entry in graph.sparse_initializer if entry.values.name not in arrays]
    dense = [tensor(entry.name) if entry.name in arrays else entry for entry in model.proto.graph.initializer]
    present = {entry.name for entry in dense}
    dense += [tensor(name) for name in arrays if name not in present]
    for field, entries in ((graph.sparse_initializer, kept), (graph.initializer, dense)):
        del field[:]
        field.extend(entries)
    others = [entry.name for entry in dense if is_placeholder(entry) and entry.name not in weights]
    return weights | {name: model.weights[name] for name in others}
