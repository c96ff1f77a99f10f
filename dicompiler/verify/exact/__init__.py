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
from dicompiler.ir.drawing import draws
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import LARGE, Weight, hollow, is_hollow, sized
from dicompiler.verify.deadline import Late
from dicompiler.verify.exact import left
from dicompiler.verify.exact.covering import Coverage, Reads, coverage, seeds_needed
from dicompiler.verify.exact.facts import (
    Facts,
    Rules,
    Treatment,
    Use,
    control_bodies,
    gather,
    of_model,
    own_domain,
)
from dicompiler.verify.exact.magnitudes import Peak, inexact, peak
from dicompiler.verify.exact.patterns import weight_index
from dicompiler.verify.exact.standins import DOMAIN, chosen, declare, prepare
from dicompiler.verify.exact.values import SCHEDULES, constants, inputs
from dicompiler.verify.ranges import limits, ranged
from dicompiler.verify.unsized import seeded

__all__ = [
    "DOMAIN", "CheckModel", "Coverage", "NotExact", "Reads", "Treatment", "check_model", "coverage", "made",
    "measure", "seeds_needed",
]  # fmt: skip


class NotExact(DicompilerError):
    """A network that no integers take through exactly: an operator rounds, or sums grow too large."""


PLAIN = Treatment()


@dataclass(frozen=True)
class CheckModel:
    """A check model and inputs for it. treatment: what it took; `left`: name of a node → why it is left out."""

    model: Model
    inputs: Mapping[str, NDArray[Any]]
    treatment: Treatment

    @property
    def left(self) -> Mapping[str, str]:
        return self.treatment.left


def check_model(model: Model, seed: int, rules: Rules | None = None) -> tuple[Model, dict[str, NDArray[Any]]]:
    """The check model of `model` and inputs for it; see `made`."""
    found = made(model, seed, rules)
    return found.model, dict(found.inputs)


def made(
    model: Model,
    seed: int,
    rules: Rules | None = None,
    treatment: Treatment = PLAIN,
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
    known = replace(gather(model, rules, layers), treatment=_with_drawing(treatment, model.proto))
    makers = {name: index for index, node in enumerate(known.nodes) for name in node.output}
    arrays, of, check = dict[Use, NDArray[Any]](), -1, None
    while True:
        schedule = SCHEDULES[known.treatment.schedule]
        if of != known.treatment.schedule:
            arrays, of, check = {}, known.treatment.schedule, None  # given back before the next are made
            arrays = constants(known, seed, schedule)
        check = _with_constants(known, arrays, left.numbers(known, seed, schedule.inputs))
        feed = ranged(inputs(_open_inputs(model), seed, schedule), limits(model), seed)
        feed |= seeded(model, seed, whole=True)
        try:
            found = [(makers[one.tensor.removesuffix(left.MADE)], one) for one in inexact(of_model(known, check), feed)]
        except Late:
            raise
        except DicompilerError as error:
            found = [_refused(known, error)]
        if not found:
            return CheckModel(check, feed, known.treatment)
        after = _further(known, found)
        if after == known.treatment:
            raise NotExact(_why(known, *found[0]))
        known = replace(known, treatment=after)


def _with_drawing(treatment: Treatment, model: onnx.ModelProto) -> Treatment:
    """The treatment with all nodes left out that draw random numbers, but for control flow."""
    nodes = [node for node in model.graph.node if draws(node, model) and not list(control_bodies(node))]
    left = {node.name: f"{node.op_type} {node.name!r} draws random numbers" for node in nodes}
    return replace(treatment, left={**left, **treatment.left})


def _refused(known: Facts, error: DicompilerError) -> tuple[int, Peak]:
    """The node at which onnxruntime stops. NotExact where it names none that can be treated."""
    named = re.search(r"Name:'([^']*)'", str(error))
    for index, node in enumerate(known.nodes):
        treated = (own_domain(node), node.op_type) in known.treatment.replaced
        if named and node.name == named[1] and not treated:
            return index, Peak(node.output[0], math.inf, math.inf)
    raise NotExact(f"exact check: {error}; only real weights can verify this network") from error


def _further(known: Facts, found: Sequence[tuple[int, Peak]]) -> Treatment:
    """The treatment with one more step against each of these nodes: their inputs are bounded; weights are sparser;
    something general stands in for the operator; the node is left out."""
    before = after = known.treatment
    for index, worst in found:
        node = known.nodes[index]
        kind, grows = (own_domain(node), node.op_type), math.isfinite(worst.magnitude)
        if grows and not before.bounded:
            after = replace(after, bounded=True)
        elif grows and weight_index(known, node) is not None and before.schedule + 1 < len(SCHEDULES):
            after = replace(after, schedule=before.schedule + 1)
        elif kind not in before.replaced:
            after = replace(after, replaced=after.replaced | {kind})
        elif node.name not in before.left and not list(control_bodies(node)):
            why = _why(known, index, worst) + left.unseen(node, known)
            after = replace(after, left={**after.left, node.name: why})
    return after


def measure(model: Model, feed: Mapping[str, NDArray[Any]]) -> Peak:
    """The sum that comes nearest to what its type holds exactly, when the check model `model` runs on `feed`."""
    return peak(gather(model), feed)


def _why(known: Facts, index: int, worst: Peak) -> str:
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
        if value.name in constants_of_model or not sized(tensor.dtype):
            continue
        if tensor.shape is None:
            raise DicompilerError(
                f"exact check: input {value.name!r} has no static shape: give one (--shape {value.name}=1x3x224x224)"
            )
        open_inputs[value.name] = (tensor.dtype, tensor.shape)
    return open_inputs


def _with_constants(known: Facts, arrays: Mapping[Use, NDArray[Any]], new: Mapping[str, NDArray[Any]]) -> Model:
    """The model with prepared nodes that read `arrays`; a constant that is read in two ways becomes two. new: what
    takes the place of layers that are left out, by their tensors."""
    proto = onnx.ModelProto()
    proto.CopyFrom(known.model.proto)
    stand_ins = chosen(known)
    for index, node in enumerate(proto.graph.node):
        prepare(node, known, stand_ins.get(index))
    replaced: dict[str, NDArray[Any]] = {}
    for name in known.constants:
        places = known.readers(name)
        whole = places is not None and all(place in arrays for place in places)
        for index, position in known.uses.get(name, ()):
            array = arrays.get((index, position))
            if array is None:
                continue
            fits = whole and (name not in replaced or _same(replaced[name], array))
            target = name if fits else f"{name}@{index}.{position}"
            replaced[target] = array
            proto.graph.node[index].input[position] = target
    weights = _store(proto, known.model, replaced | {f"{name}{left.NUMBERS}": array for name, array in new.items()})
    declare(proto, known, stand_ins)
    left.add(proto, new)
    return Model(proto, MappingProxyType(weights))


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return bool(a.shape == b.shape and (a == b).all())


def _store(proto: onnx.ModelProto, model: Model, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Weight]:
    """Puts `arrays` in the place of the initializers of `proto`, which is changed; its hollows' weights come back."""
    weights: dict[str, Weight] = {}

    def tensor(name: str) -> onnx.TensorProto:
        if arrays[name].nbytes < LARGE:
            return onnx.numpy_helper.from_array(arrays[name], name)
        weights[name] = Weight.of(arrays[name])
        return hollow(name, weights[name])

    graph = proto.graph
    kept = [entry for entry in graph.sparse_initializer if entry.values.name not in arrays]
    dense = [tensor(entry.name) if entry.name in arrays else entry for entry in model.proto.graph.initializer]
    present = {entry.name for entry in dense}
    dense += [tensor(name) for name in arrays if name not in present]
    for field, entries in ((graph.sparse_initializer, kept), (graph.initializer, dense)):
        del field[:]
        field.extend(entries)
    others = [entry.name for entry in dense if is_hollow(entry) and entry.name not in weights]
    return weights | {name: model.weights[name] for name in others}
