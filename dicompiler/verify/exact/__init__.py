"""The exact check: a model with the graph of a network whose results are the same bits in whatever order it is summed.

In: a Model whose weights are initializers (as the pass `normalise` leaves it), a seed. Out: the check model and integer
inputs for it. Comparing a split network with the whole one bit by bit then proves the geometry of the split, once so
many seeds are run that every tap and every input channel is read (`seeds_needed`, `coverage`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import onnx
from numpy.typing import NDArray

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import LARGE, Weight, hollow, is_hollow
from dicompiler.verify.deadline import Late
from dicompiler.verify.exact.covering import Coverage, coverage, seeds_needed
from dicompiler.verify.exact.facts import Facts, Rules, Use, gather, of_model
from dicompiler.verify.exact.magnitudes import Peak, peak
from dicompiler.verify.exact.standins import DOMAIN, declare, prepare
from dicompiler.verify.exact.values import SCHEDULES, constants, inputs
from dicompiler.verify.ranges import limits, ranged

__all__ = ["DOMAIN", "Coverage", "NotExact", "check_model", "coverage", "measure", "seeds_needed"]


class NotExact(DicompilerError):
    """A network that no integers take through exactly: an operator rounds, or sums grow too large."""


def check_model(model: Model, seed: int, rules: Rules | None = None) -> tuple[Model, dict[str, NDArray[Any]]]:
    """The check model of `model` for `seed` (at least 0), and inputs for it. rules: by (domain, operator type), what
    stands in for what (None: the built-in ones).

    It has the nodes, tensor names, attributes and shapes of `model`; only numbers differ, and operators that round
    move to the domain DOMAIN (see `standins`). Filters have one to three elements of ±1, or as many as it takes to
    read everything within few seeds. It is run once: every sum in it is below what its type holds exactly (2^24 in
    float32), if need be with a sparser schedule. NotExact where none is exact, DicompilerError for an input without a
    static shape.
    """
    if seed < 0:
        raise UsageError(f"exact check: seed is {seed}: take a number of at least 0")
    known = gather(model, rules)
    for schedule in SCHEDULES:
        check = _with_constants(known, constants(known, seed, schedule))
        feed = ranged(inputs(_open_inputs(model), seed, schedule), limits(model), seed)
        try:
            worst = peak(of_model(known, check), feed)
        except Late:
            raise
        except DicompilerError as error:  # an index that leaves its range, which depends on values
            raise NotExact(f"exact check: {error}; only real weights can verify this network") from error
        if worst.share < 1:
            return check, feed
    raise NotExact(_inexact(known, worst))


def measure(model: Model, feed: Mapping[str, NDArray[Any]]) -> Peak:
    """The sum that comes nearest to what its type holds exactly, when the check model `model` runs on `feed`."""
    return peak(gather(model), feed)


def _inexact(known: Facts, worst: Peak) -> str:
    node = next(node for node in known.nodes if worst.tensor in node.output)
    place = f"exact check: tensor {worst.tensor!r}, made by {node.op_type} {node.name!r}"
    if worst.magnitude == float("inf"):
        return f"{place}, is no whole number: the operator rounds; only real weights can verify this network"
    return f"{place}, grows to {worst.magnitude:.3g}, too large to be exact; only real weights can verify it"


def _open_inputs(model: Model) -> dict[str, tuple[int, tuple[int, ...]]]:
    """(dtype, shape) of the graph's inputs that have no default."""
    tensors, constants_of_model = model.tensors(), model.initializers()
    open_inputs = {}
    for value in model.proto.graph.input:
        tensor = tensors[value.name]
        if value.name in constants_of_model:
            continue
        if tensor.shape is None or tensor.dtype == 0:
            raise DicompilerError(
                f"exact check: input {value.name!r} has no static shape: give one (--shape {value.name}=1x3x224x224)"
            )
        open_inputs[value.name] = (tensor.dtype, tensor.shape)
    return open_inputs


def _with_constants(known: Facts, arrays: Mapping[Use, NDArray[Any]]) -> Model:
    """The model with prepared nodes that read `arrays`; a constant that is read in two ways becomes two."""
    proto = onnx.ModelProto()
    proto.CopyFrom(known.model.proto)
    for node in proto.graph.node:
        prepare(node, known)
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
    weights = _store(proto, known.model, replaced)
    declare(proto, known)
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
