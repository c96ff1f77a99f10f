"""Integer constants of check models: sparse weights, small additive constants, signs as factors, and clipping bounds.

A check model is a copy of the network with integer values. Splitting it must not change a bit of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.base.rng import named_generator
from dicompiler.verify.exact.graph_facts import SIGNIFICAND_BITS, GraphFacts, InputPlace
from dicompiler.verify.exact.sparse_filters import filter_extent, sparse_filters, weight_index
from dicompiler.verify.exact.stand_ins import widen_bound

Array = NDArray[Any]


@dataclass(frozen=True)
class MagnitudeSchedule:
    """Limits on the integers of a check model.

    Attributes:
        seeds: Number of check models, made with consecutive seeds. Together, their filters have a nonzero element at
            every kernel position and input channel.
        taps: Minimum number of elements of ±1 in each filter. Entry i is for filters after i other layers with weights;
            the last entry is also for all deeper ones.
        shifts: Number of different values of an additive constant, a prime.
        inputs: Inputs are integers from -inputs to inputs.
    """

    seeds: int
    taps: tuple[int, ...]
    shifts: int = 13
    inputs: int = 4


SCHEDULES = (
    MagnitudeSchedule(1, (16, 16, 8, 8, 4)),
    MagnitudeSchedule(1, (4, 4, 3, 3, 2)),
    MagnitudeSchedule(2, (4, 4, 3, 3, 2)),
    MagnitudeSchedule(4, (4, 4, 3, 3, 2)),
    MagnitudeSchedule(2, (3, 3, 2, 2, 1)),
    MagnitudeSchedule(4, (3, 3, 2, 2, 1)),
    MagnitudeSchedule(4, (2, 1)),
    MagnitudeSchedule(4, (1,), shifts=5, inputs=2),
)
"""Schedules from dense to sparse filters. The first one with which every value is exact is used.

Filters that read more elements reveal smaller faults.
"""

_ADD_OPS = ("Add", "Sub", "Sum")
"""Operators that add two computed tensors, so that their results grow."""
_SIGN_PRESERVING_OPS = ("Add", "BatchNormalization", "Dropout", "Identity", "Mul")
"""Operators that preserve the sign of a whole channel, or flip it by a constant factor."""


@dataclass(frozen=True)
class _FollowingNodes:
    """Nodes on the path after a node with weights, up to the first node that changes more than a channel's sign.

    Attributes:
        links: Indices of the nodes on the path that multiply by a constant, which may flip the sign of a channel.
        leads_to_add: True if an addition of two computed tensors follows.
    """

    links: tuple[int, ...]
    leads_to_add: bool


def integer_constants(facts: GraphFacts, seed: int, schedule: MagnitudeSchedule) -> dict[InputPlace, Array]:
    """Return integer arrays for all replaced constants, by the (node index, input index) that reads them.

    A filter and the constant factor after it have the same sign, so that a later ReLU does not make the whole channel
    zero. Before an addition of two computed tensors, signs are random, so that a sum of many branches stays small.
    """
    arrays: dict[InputPlace, Array] = {}
    factor_signs: dict[int, Array] = {}
    depths = _weighted_depths(facts)
    for index, depth in depths.items():
        taps = schedule.taps[min(depth, len(schedule.taps) - 1)]
        arrays |= _weighted_constants(facts, index, seed, taps, schedule, factor_signs)
    for index, node in enumerate(facts.nodes):
        rule = facts.rule(node)
        if rule is not None and rule.constant_stand_ins and index not in depths:
            arrays |= _other_constants(
                facts, index, rule.constant_stand_ins.split(), seed, schedule.shifts, factor_signs
            )
    return arrays


def integer_inputs(
    model_inputs: Mapping[str, tuple[int, tuple[int, ...]]], seed: int, schedule: MagnitudeSchedule
) -> dict[str, Array]:
    """Return random integer or bool inputs by name.

    Float inputs get -`schedule.inputs` … `schedule.inputs`, and integer inputs 0 … 3. `model_inputs` has (ONNX type,
    shape) by name.
    """
    feed = {}
    for name, (dtype, shape) in model_inputs.items():
        generator, numpy_dtype = named_generator(seed, f"{name}/input"), onnx.helper.tensor_dtype_to_np_dtype(dtype)
        low, high = (
            (-schedule.inputs, schedule.inputs + 1)
            if dtype in SIGNIFICAND_BITS
            else (0, 2 if numpy_dtype == np.bool_ else 4)
        )
        feed[name] = generator.integers(low, high, size=shape).astype(numpy_dtype)
    return feed


def _weighted_depths(facts: GraphFacts) -> dict[int, int]:
    """Return the depth of each node with weights, by node index.

    The depth is the largest number of nodes with weights on a path before the node.
    """
    reached: dict[str, int] = {}
    depths = {}
    for index, node in enumerate(facts.nodes):
        depth = max((reached.get(name, 0) for name in node.input), default=0)
        weighted = weight_index(facts, node) is not None
        if weighted:
            depths[index] = depth
        reached |= dict.fromkeys(node.output, depth + weighted)
    return depths


def _find_following_nodes(facts: GraphFacts, index: int) -> _FollowingNodes:
    """Follow the path after a node while each tensor has one reader, which preserves or flips channel signs."""
    links: list[int] = []
    readers = facts.readers(facts.nodes[index].output[0])
    while readers is not None and len(readers) == 1:
        follower, _ = readers[0]
        node = facts.nodes[follower]
        if facts.computed_input_count(node) != 1 or node.op_type not in _SIGN_PRESERVING_OPS:
            break
        if node.op_type in ("BatchNormalization", "Mul"):
            links.append(follower)
        readers = facts.readers(node.output[0])
    ends = [facts.nodes[follower] for follower, _ in readers or ()]
    return _FollowingNodes(
        tuple(links), any(end.op_type in _ADD_OPS and facts.computed_input_count(end) > 1 for end in ends)
    )


def _weighted_constants(
    facts: GraphFacts, index: int, seed: int, taps: int, schedule: MagnitudeSchedule, factor_signs: dict[int, Array]
) -> dict[InputPlace, Array]:
    """Return filters and bias of a node with weights, by the (node index, input index) that reads them.

    Args:
        facts: Facts about the network.
        index: Index of the node.
        seed: Seed of positions and signs.
        taps: Number of elements of ±1 in each filter.
        schedule: Limits on the values.
        factor_signs: By node index, the signs of the constant factors of nodes that follow filters. This function adds
            those of the nodes after `index`, which cancel out the signs of the filters.
    """
    node = facts.nodes[index]
    weight_input = weight_index(facts, node)
    assert weight_input is not None
    dtype, shape = facts.constants[node.input[weight_input]]
    extent = filter_extent(node, weight_input, shape)
    channels = extent.filters if node.op_type == "MatMul" else extent.groups * extent.filters
    chain = _find_following_nodes(facts, index)
    signs = _random_signs(facts, index, seed, channels) if chain.leads_to_add else np.ones(channels, np.int64)
    for link in chain.links:
        if _scale_size(facts, link) == channels:
            factor_signs[link] = _random_signs(facts, link, seed, channels)
            signs = signs * factor_signs[link]
    numpy_dtype, taps = onnx.helper.tensor_dtype_to_np_dtype(dtype), max(taps, extent.min_elements(schedule.seeds))
    signs = np.resize(signs, extent.groups * extent.filters)
    arrays = {(index, weight_input): sparse_filters(node, weight_input, shape, numpy_dtype, seed, taps, signs)}
    if facts.has_float_constant(node, 2):
        arrays[index, 2] = _shift_values(facts, (index, 2), seed, schedule.shifts)
    return arrays


def _scale_size(facts: GraphFacts, link: int) -> int:
    """Return the number of elements of the constant by which node `link` multiplies; 0 if it is not constant."""
    node = facts.nodes[link]
    indices = (1,) if node.op_type == "BatchNormalization" else (0, 1)
    constant = next((node.input[index] for index in indices if facts.has_float_constant(node, index)), None)
    return 0 if constant is None else int(np.prod(facts.constants[constant][1]))


def _other_constants(
    facts: GraphFacts, index: int, kinds: list[str], seed: int, shifts: int, factor_signs: Mapping[int, Array]
) -> dict[InputPlace, Array]:
    """Return the integer constants of a node without weights, by the (node index, input index) that reads them.

    Args:
        facts: Facts about the network.
        index: Index of the node.
        kinds: Kind of integers for each input, such as "gain" or "shift". The last kind applies to all further inputs.
        seed: Seed of the integers.
        shifts: Number of different values of an additive constant.
        factor_signs: By node index, the signs of the node's constant factors for the channels. The returned factors
            have these signs.
    """
    node = facts.nodes[index]
    indices = [input_index for input_index in range(len(node.input)) if facts.has_float_constant(node, input_index)]
    if "variance" in kinds and indices != [1, 2, 3, 4]:
        return {}
    makers: Mapping[str, Callable[[InputPlace], Array]] = {
        "factor": lambda use: _factor_values(facts, use, factor_signs),
        "gain": lambda use: _gain_values(facts, use, seed),
        "max": lambda use: _bound_values(facts, use, "max"),
        "min": lambda use: _bound_values(facts, use, "min"),
        "rounded": lambda use: np.rint(facts.model.array(node.input[use[1]])),
        "scale": lambda use: _factor_values(facts, use, factor_signs) * _deviation_values(facts, use, seed),
        "shift": lambda use: _shift_values(facts, use, seed, shifts),
        "step": lambda use: np.abs(_gain_values(facts, use, seed)),
        "slope": lambda use: _slope_values(facts, use, seed),
        "variance": lambda use: _deviation_values(facts, use, seed) ** 2,
    }
    kinds_by_input = {input_index: kinds[min(input_index, len(kinds) - 1)] for input_index in indices}
    return {
        (index, input_index): makers[kind]((index, input_index))
        for input_index, kind in kinds_by_input.items()
        if kind != "-"
    }


def _random_signs(facts: GraphFacts, index: int, seed: int, size: int) -> Array:
    return 1 - 2 * named_generator(seed, f"{facts.nodes[index].name}/signs").integers(2, size=size)


def _fill_constant(facts: GraphFacts, use: InputPlace, value: Array | int) -> Array:
    """Return the values in the shape and type of the constant that is read at `use`, a (node, input) index pair."""
    dtype, shape = facts.constants[facts.nodes[use[0]].input[use[1]]]
    numpy_dtype = onnx.helper.tensor_dtype_to_np_dtype(dtype)
    return np.broadcast_to(np.asarray(value), int(np.prod(shape))).reshape(shape).astype(numpy_dtype)


def _factor_values(facts: GraphFacts, use: InputPlace, factor_signs: Mapping[int, Array]) -> Array:
    return _fill_constant(facts, use, factor_signs.get(use[0], np.array(1)))


def _deviation_values(facts: GraphFacts, use: InputPlace, seed: int) -> Array:
    """Return a standard deviation (1, 2 or 4) for each channel of a BatchNormalization.

    The scale is multiplied by the deviation and the variance by its square, so that both cancel out in
    scale / √variance.
    """
    size = int(np.prod(facts.constants[facts.nodes[use[0]].input[use[1]]][1]))
    random = named_generator(seed, f"{facts.nodes[use[0]].name}/deviation")
    return _fill_constant(facts, use, 2 ** random.integers(3, size=size))


def _gain_values(facts: GraphFacts, use: InputPlace, seed: int) -> Array:
    """Return nonzero integers from -3 to 4 as the values of a constant.

    Elements fewer than seven positions apart differ, so a region that is shifted by fewer elements is noticed.
    """
    random = named_generator(seed, f"{facts.nodes[use[0]].name}/gain")
    step, start = random.integers(1, 7), random.integers(7)
    size = int(np.prod(facts.constants[facts.nodes[use[0]].input[use[1]]][1]))
    values = (start + step * np.arange(size)) % 7 - 3
    return _fill_constant(facts, use, values + (values >= 0))


def _slope_values(facts: GraphFacts, use: InputPlace, seed: int) -> Array:
    size = int(np.prod(facts.constants[facts.nodes[use[0]].input[use[1]]][1]))
    return _fill_constant(facts, use, _random_signs(facts, use[0], seed, size))


def _bound_values(facts: GraphFacts, use: InputPlace, name: str) -> Array:
    constant = facts.nodes[use[0]].input[use[1]]
    dtype, _ = facts.constants[constant]
    return _fill_constant(facts, use, np.array(widen_bound(name, float(facts.model.array(constant).item()), dtype)))


def _shift_values(facts: GraphFacts, use: InputPlace, seed: int, shifts: int) -> Array:
    """Return small integers, a third of them negative, as the values of an additive constant.

    `shifts` is the number of different values, a prime. Elements fewer than `shifts` positions apart differ, so a
    region that is shifted by fewer elements is noticed.
    """
    node = facts.nodes[use[0]]
    random = named_generator(seed, f"{node.name}/shift{use[1]}")
    step, start = random.integers(1, shifts), random.integers(shifts)
    size = int(np.prod(facts.constants[node.input[use[1]]][1]))
    return _fill_constant(facts, use, (start + step * np.arange(size)) % shifts - shifts // 3)
