"""The exact check: compare a split with the whole network on integers, bit by bit.

A split network sums the same products in another order than the whole network, so float results differ in their last
bits. A tolerance for these differences hides small mistakes: a halo that is one row short, or a channel read twice. The
exact check therefore runs a check model: the same graph with small integers as weights and inputs. Floating-point
arithmetic on integers below 2^24 (float32) is exact, so the order of sums does not matter. The check model and its
split version must give the same bits, and every difference is a mistake of the split.

The check model has the nodes, names, attributes and shapes of the network. It differs in three ways:

* Weights are sparse integer filters: each filter has one to sixteen elements of ±1 (`sparse_filters`,
  `integer_values`).
* A stand-in replaces an operator that rounds even small integers, such as Softmax. It is an ONNX function that computes
  integers from every element of the same inputs (`stand_ins`, `generic`, `attention`, `normalization`). The stand-in
  of Softmax, for example, subtracts from each element the sum of its axis modulo 16. A node with a stand-in is split
  like the original node; only its domain becomes `dicompiler.check`.
* A node without a possible stand-in is excluded: random integers replace its output (`excluded_layers`).

Exactness: `exactness_check` runs the check model with every tensor as output and computes upper bounds of all sums.
`build_check_model` starts with the densest filters and the original operators. It relaxes the model step by step
(`Relaxation`) until every sum is exact. The steps are: take the inputs of products modulo 15 (3 in 16-bit types),
use sparser filters, replace operators by generic stand-ins, and exclude nodes.

Coverage: a tap is one position of a convolution kernel. A sparse filter reads only some taps and input channels, so a
fault at another position would not be noticed. Consecutive seeds read consecutive taps and channels. `seeds_needed`
returns how many seeds read all of them (at most four), and `coverage` counts those that were read.

Fault detection: filters and inputs differ from channel to channel and from place to place, and stand-ins combine all
input elements. An element that is missing, read twice or read from a wrong place changes an integer. The tests plant
faults in splits (a shifted slice, a dropped row, swapped channels, a missing partial sum), and the check must fail.
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
from dicompiler.verify.exact import excluded_layers
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
    "DOMAIN", "CheckModel", "Coverage", "NotExactError", "ReadMasks", "Relaxation", "build_check_model", "check_model",
    "measure_coverage", "measure_peak", "seeds_needed",
]  # fmt: skip


class NotExactError(DicompilerError):
    """Error if no check model of the network is exact, or if onnxruntime cannot run one."""


NO_RELAXATION = Relaxation()


@dataclass(frozen=True)
class CheckModel:
    """A check model (the network's graph with small integers as weights) and inputs for it.

    Attributes:
        model: The check model.
        inputs: Integer inputs by name.
        relaxation: The changes to the network's graph that keep all numbers of the check model exact.
    """

    model: Model
    inputs: Mapping[str, NDArray[Any]]
    relaxation: Relaxation

    @property
    def excluded(self) -> Mapping[str, str]:
        return self.relaxation.excluded


def check_model(model: Model, seed: int, rules: Rules | None = None) -> tuple[Model, dict[str, NDArray[Any]]]:
    """Return the check model (the graph of `model` with small integers as weights), and integer inputs for it."""
    checked = build_check_model(model, seed, rules)
    return checked.model, dict(checked.inputs)


def build_check_model(
    model: Model,
    seed: int,
    rules: Rules | None = None,
    relaxation: Relaxation = NO_RELAXATION,
    layers: LayerGraph | None = None,
) -> CheckModel:
    """Build a check model: the network's graph with small integers, in which all numbers are exact.

    Each round runs the model, finds the first tensors with possibly rounded numbers, and changes the nodes that compute
    them: their numbers become smaller, or the nodes are replaced or excluded.

    Args:
        model: The network as normalised by the pass `normalise`, with weights as initializers.
        seed: Seed of filters and inputs, at least 0.
        rules: Operator rules by (domain, operator type). Default: the built-in rules.
        relaxation: Changes to start with, for example those that another seed needed.
        layers: The layers of `model`. With them, more operators in layers that no plan splits can be replaced.

    Raises:
        NotExactError: onnxruntime refuses the check model, or no change makes it exact.
        DicompilerError: An input has no static shape.
    """
    if seed < 0:
        raise UsageError(f"exact check: seed is {seed}: give a number of at least 0")
    facts = replace(gather_facts(model, rules, layers), relaxation=_exclude_random_nodes(relaxation, model.proto))
    makers = {name: index for index, node in enumerate(facts.nodes) for name in node.output}
    arrays, built_schedule, candidate = dict[InputPlace, NDArray[Any]](), -1, None
    while True:
        schedule = SCHEDULES[facts.relaxation.schedule]
        if built_schedule != facts.relaxation.schedule:
            # The previous arrays and model may be large, so they are freed before the new ones are built.
            arrays, candidate, built_schedule = {}, None, facts.relaxation.schedule
            arrays = integer_constants(facts, seed, schedule)
        candidate = _with_new_constants(facts, arrays, excluded_layers.replacement_values(facts, seed, schedule.inputs))
        inputs = limit_values(integer_inputs(_open_inputs(model), seed, schedule), find_value_limits(model), seed)
        inputs |= random_non_tensor_inputs(model, seed, integers_only=True)
        try:
            inexact = [
                (makers[peak.tensor.removesuffix(excluded_layers.ZEROS_SUFFIX)], peak)
                for peak in first_inexact_peaks(facts_for_model(facts, candidate), inputs)
            ]
        except DeadlineExceededError:
            raise
        except DicompilerError as error:
            inexact = [_find_rejected_node(facts, error)]
        if not inexact:
            return CheckModel(candidate, inputs, facts.relaxation)
        relaxed = _relax_further(facts, inexact)
        if relaxed == facts.relaxation:
            raise NotExactError(_describe_peak(facts, *inexact[0]))
        facts = replace(facts, relaxation=relaxed)


def _exclude_random_nodes(relaxation: Relaxation, model: onnx.ModelProto) -> Relaxation:
    """Exclude nodes that draw random numbers from the check. Nodes with control-flow bodies stay."""
    nodes = [node for node in model.graph.node if is_random(node, model) and not list(control_flow_bodies(node))]
    excluded = {node.name: f"{node.op_type} {node.name!r} draws random numbers" for node in nodes}
    return replace(relaxation, excluded={**excluded, **relaxation.excluded})


def _find_rejected_node(facts: GraphFacts, error: DicompilerError) -> tuple[int, Peak]:
    """Return the index of the node that onnxruntime's error names, with an infinite peak.

    The infinite peak lets `_relax_further` replace the node by an integer function, which onnxruntime may be able to
    run.

    Raises:
        NotExactError: The error names no node, or the node has been replaced already.
    """
    name_match = re.search(r"Name:'([^']*)'", str(error))
    for index, node in enumerate(facts.nodes):
        is_generic = (original_domain(node), node.op_type) in facts.relaxation.generic_ops
        if name_match and node.name == name_match[1] and not is_generic:
            return index, Peak(node.output[0], math.inf, math.inf)
    raise NotExactError(f"exact check: {error}; compare with the network's own weights only") from error


def _relax_further(facts: GraphFacts, inexact: Sequence[tuple[int, Peak]]) -> Relaxation:
    """Return the changes of the check model with one more step for each node in `inexact`.

    The steps of a node, in this order, are: take the inputs of products modulo 15 (3 in 16-bit types), use sparser
    filters, replace the operator by an integer function, exclude the node. An infinite peak skips the first two, which
    only reduce numbers.

    Args:
        facts: Facts about the network, with the changes so far.
        inexact: Pairs (node index, upper bound of the node's numbers).
    """
    current = relaxed = facts.relaxation
    for index, peak in inexact:
        node = facts.nodes[index]
        op_key, is_too_large = (original_domain(node), node.op_type), math.isfinite(peak.magnitude)
        if is_too_large and not current.bounds_inputs:
            relaxed = replace(relaxed, bounds_inputs=True)
        elif is_too_large and weight_index(facts, node) is not None and current.schedule + 1 < len(SCHEDULES):
            relaxed = replace(relaxed, schedule=current.schedule + 1)
        elif op_key not in current.generic_ops:
            relaxed = replace(relaxed, generic_ops=relaxed.generic_ops | {op_key})
        elif node.name not in current.excluded and not list(control_flow_bodies(node)):
            reason = _describe_peak(facts, index, peak) + excluded_layers.describe_unchecked(node, facts)
            relaxed = replace(relaxed, excluded={**relaxed.excluded, node.name: reason})
    return relaxed


def measure_peak(model: Model, inputs: Mapping[str, NDArray[Any]]) -> Peak:
    """Run a check model, and return the upper bound with the largest share of the limit of exact integers.

    Each tensor has an upper bound of its magnitudes, and a limit that depends on its type.
    """
    return largest_peak(gather_facts(model), inputs)


def _describe_peak(facts: GraphFacts, index: int, peak: Peak) -> str:
    place = f"tensor {peak.tensor!r}, made by {facts.nodes[index].op_type} {facts.nodes[index].name!r}"
    if peak.magnitude == math.inf:
        return f"{place}, is not an integer: the operator rounds and has no exact stand-in"
    return f"{place}, grows to {peak.magnitude:.3g}, too large to be exact"


def _open_inputs(model: Model) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return (ONNX type, shape) of the graph inputs without a default value, by name.

    Inputs of variable size (strings, sequences, …) are omitted.
    """
    tensors, constants = model.tensors(), model.initializers()
    open_inputs = {}
    for value in model.proto.graph.input:
        tensor = tensors[value.name]
        if value.name in constants or not is_fixed_size(tensor.dtype):
            continue
        if tensor.shape is None:
            raise DicompilerError(
                f"exact check: input {value.name!r} has no static shape: give one (--shape {value.name}=1x3x224x224)"
            )
        open_inputs[value.name] = (tensor.dtype, tensor.shape)
    return open_inputs


def _with_new_constants(
    facts: GraphFacts, arrays: Mapping[InputPlace, NDArray[Any]], replacements: Mapping[str, NDArray[Any]]
) -> Model:
    """Return the check model: the network with integer constants, and with functions in place of operators that round.

    Args:
        facts: Facts about the network.
        arrays: Integer constants by the (node index, input index) that reads them. If nodes read the same constant of
            the network, but need different integers, each gets a constant of its own.
        replacements: Integers that replace the outputs of excluded nodes, by tensor name.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(facts.model.proto)
    stand_ins = choose_stand_ins(facts)
    for index, node in enumerate(proto.graph.node):
        prepare_node(node, facts, stand_ins.get(index))
    replaced: dict[str, NDArray[Any]] = {}
    for name in facts.constants:
        places = facts.readers(name)
        replaces_all = places is not None and all(place in arrays for place in places)
        for index, position in facts.uses.get(name, ()):
            array = arrays.get((index, position))
            if array is None:
                continue
            keeps_name = replaces_all and (name not in replaced or _are_equal_arrays(replaced[name], array))
            target = name if keeps_name else f"{name}@{index}.{position}"
            replaced[target] = array
            proto.graph.node[index].input[position] = target
    weights = _store_initializers(
        proto,
        facts.model,
        replaced | {f"{name}{excluded_layers.NUMBERS_SUFFIX}": array for name, array in replacements.items()},
    )
    declare_functions(proto, facts, stand_ins)
    excluded_layers.add_replacements(proto, replacements)
    return Model(proto, MappingProxyType(weights))


def _are_equal_arrays(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return bool(a.shape == b.shape and (a == b).all())


def _store_initializers(proto: onnx.ModelProto, model: Model, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Weight]:
    """Replace initializers of `proto` by `arrays`, and return the data of the large ones by name.

    Large initializers become placeholders without data, because a protobuf message cannot exceed 2 GB.
    """
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
