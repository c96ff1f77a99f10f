"""The integer values of every constant that a network computes with: sparse filters, small shifts, signs, bounds.

In: a model's facts, a seed, a schedule. Out: for each place where a constant is read, the array to read there.
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
    """How large values may grow: `taps[d]` elements of ±1 in a filter that has d weighted layers before it (deeper: the
    last entry), or more where `seeds` seeds would not read everything otherwise; `shifts` different values of a shift,
    inputs of -inputs…inputs.
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
"""Tried in this order until every value is exact: the more a filter reads, the smaller a fault that shows."""

#: Where two computed tensors meet in one of these, values grow.
_ADD_OPS = ("Add", "Sub", "Sum")
#: What a layer's channels go through without losing their sign for good.
_SIGN_PRESERVING_OPS = ("Add", "BatchNormalization", "Dropout", "Identity", "Mul")


@dataclass(frozen=True)
class _FollowingNodes:
    """What follows a weighted layer alone: the `links` that may flip a channel's sign, and whether an addition of two
    computed tensors comes after them.
    """

    links: tuple[int, ...]
    leads_to_add: bool


def integer_constants(known: GraphFacts, seed: int, schedule: MagnitudeSchedule) -> dict[InputPlace, Array]:
    """The arrays of all constants that are replaced, in the constants' own shapes and types.

    The sign of a filter and those of a BatchNormalization or factor behind it cancel out, so that no ReLU makes a
    channel constant zero; only before an addition are they free, so that a sum of many branches stays small.
    """
    arrays: dict[InputPlace, Array] = {}
    paired: dict[int, Array] = {}
    depths = _weighted_depths(known)
    for index, depth in depths.items():
        taps = schedule.taps[min(depth, len(schedule.taps) - 1)]
        arrays |= _weighted_constants(known, index, seed, taps, schedule, paired)
    for index, node in enumerate(known.nodes):
        rule = known.rule(node)
        if rule is not None and rule.constant_stand_ins and index not in depths:
            arrays |= _other_constants(known, index, rule.constant_stand_ins.split(), seed, schedule.shifts, paired)
    return arrays


def integer_inputs(
    model_inputs: Mapping[str, tuple[int, tuple[int, ...]]], seed: int, schedule: MagnitudeSchedule
) -> dict[str, Array]:
    """Integers for inputs of (dtype, shape): -inputs…inputs as floats, 0…3 where the type is whole, or truth values."""
    feed = {}
    for name, (dtype, shape) in model_inputs.items():
        random, kind = named_generator(seed, f"{name}/input"), onnx.helper.tensor_dtype_to_np_dtype(dtype)
        low, high = (
            (-schedule.inputs, schedule.inputs + 1) if dtype in SIGNIFICAND_BITS else (0, 2 if kind == np.bool_ else 4)
        )
        feed[name] = random.integers(low, high, size=shape).astype(kind)
    return feed


def _weighted_depths(known: GraphFacts) -> dict[int, int]:
    """Index of each weighted node → the greatest number of weighted nodes before it on a path."""
    reached: dict[str, int] = {}
    depths = {}
    for index, node in enumerate(known.nodes):
        depth = max((reached.get(name, 0) for name in node.input), default=0)
        weighted = weight_index(known, node) is not None
        if weighted:
            depths[index] = depth
        reached |= dict.fromkeys(node.output, depth + weighted)
    return depths


def _find_following_nodes(known: GraphFacts, index: int) -> _FollowingNodes:
    """Follows the output of node `index` through BatchNormalization, constant factors and constant shifts."""
    links: list[int] = []
    readers = known.readers(known.nodes[index].output[0])
    while readers is not None and len(readers) == 1:
        follower, _ = readers[0]
        node = known.nodes[follower]
        if known.computed_input_count(node) != 1 or node.op_type not in _SIGN_PRESERVING_OPS:
            break
        if node.op_type in ("BatchNormalization", "Mul"):
            links.append(follower)
        readers = known.readers(node.output[0])
    ends = [known.nodes[follower] for follower, _ in readers or ()]
    return _FollowingNodes(
        tuple(links), any(end.op_type in _ADD_OPS and known.computed_input_count(end) > 1 for end in ends)
    )


def _weighted_constants(
    known: GraphFacts, index: int, seed: int, taps: int, schedule: MagnitudeSchedule, paired: dict[int, Array]
) -> dict[InputPlace, Array]:
    """Filters and bias of a weighted node; notes in `paired` the signs that the links behind it must have."""
    node = known.nodes[index]
    place = weight_index(known, node)
    assert place is not None
    dtype, shape = known.constants[node.input[place]]
    size = filter_extent(node, place, shape)
    channels = size.filters if node.op_type == "MatMul" else size.groups * size.filters
    chain = _find_following_nodes(known, index)
    signs = _random_signs(known, index, seed, channels) if chain.leads_to_add else np.ones(channels, np.int64)
    for link in chain.links:
        if _scale_size(known, link) == channels:
            paired[link] = _random_signs(known, link, seed, channels)
            signs = signs * paired[link]
    kind, taps = onnx.helper.tensor_dtype_to_np_dtype(dtype), max(taps, size.min_elements(schedule.seeds))
    signs = np.resize(signs, size.groups * size.filters)
    arrays = {(index, place): sparse_filters(node, place, shape, kind, seed, taps, signs)}
    if known.has_float_constant(node, 2):
        arrays[index, 2] = _shift_values(known, (index, 2), seed, schedule.shifts)
    return arrays


def _scale_size(known: GraphFacts, link: int) -> int:
    """The number of elements of a link's scale or factor."""
    node = known.nodes[link]
    places = (1,) if node.op_type == "BatchNormalization" else (0, 1)
    constant = next((node.input[place] for place in places if known.has_float_constant(node, place)), None)
    return 0 if constant is None else int(np.prod(known.constants[constant][1]))


def _other_constants(
    known: GraphFacts, index: int, words: list[str], seed: int, shifts: int, paired: Mapping[int, Array]
) -> dict[InputPlace, Array]:
    """The constants of a node that is not a weighted layer, by the words of its rule for what they become."""
    node = known.nodes[index]
    places = [place for place in range(len(node.input)) if known.has_float_constant(node, place)]
    if "variance" in words and places != [1, 2, 3, 4]:
        return {}
    makers: Mapping[str, Callable[[InputPlace], Array]] = {
        "factor": lambda use: _factor_values(known, use, paired),
        "gain": lambda use: _gain_values(known, use, seed),
        "max": lambda use: _bound_values(known, use, "max"),
        "min": lambda use: _bound_values(known, use, "min"),
        "rounded": lambda use: np.rint(known.model.array(node.input[use[1]])),
        "scale": lambda use: _factor_values(known, use, paired) * _deviation_values(known, use, seed),
        "shift": lambda use: _shift_values(known, use, seed, shifts),
        "step": lambda use: np.abs(_gain_values(known, use, seed)),
        "slope": lambda use: _slope_values(known, use, seed),
        "variance": lambda use: _deviation_values(known, use, seed) ** 2,
    }
    named = {place: words[min(place, len(words) - 1)] for place in places}
    return {(index, place): makers[word]((index, place)) for place, word in named.items() if word in makers}


def _random_signs(known: GraphFacts, index: int, seed: int, size: int) -> Array:
    return 1 - 2 * named_generator(seed, f"{known.nodes[index].name}/signs").integers(2, size=size)


def _fill_constant(known: GraphFacts, use: InputPlace, value: Array | int) -> Array:
    """An array in the shape and type of the constant that is read at `use`."""
    dtype, shape = known.constants[known.nodes[use[0]].input[use[1]]]
    kind = onnx.helper.tensor_dtype_to_np_dtype(dtype)
    return np.broadcast_to(np.asarray(value), int(np.prod(shape))).reshape(shape).astype(kind)


def _factor_values(known: GraphFacts, use: InputPlace, paired: Mapping[int, Array]) -> Array:
    return _fill_constant(known, use, paired.get(use[0], np.array(1)))


def _deviation_values(known: GraphFacts, use: InputPlace, seed: int) -> Array:
    """1, 2 or 4 for each channel: the scale is multiplied by it and its square is the variance, so that it cancels out
    where the two belong together."""
    size = int(np.prod(known.constants[known.nodes[use[0]].input[use[1]]][1]))
    random = named_generator(seed, f"{known.nodes[use[0]].name}/deviation")
    return _fill_constant(known, use, 2 ** random.integers(3, size=size))


def _gain_values(known: GraphFacts, use: InputPlace, seed: int) -> Array:
    """-3 to 4 without 0; elements differ unless 7 divides their distance."""
    random = named_generator(seed, f"{known.nodes[use[0]].name}/gain")
    step, start = random.integers(1, 7), random.integers(7)
    size = int(np.prod(known.constants[known.nodes[use[0]].input[use[1]]][1]))
    values = (start + step * np.arange(size)) % 7 - 3
    return _fill_constant(known, use, values + (values >= 0))


def _slope_values(known: GraphFacts, use: InputPlace, seed: int) -> Array:
    size = int(np.prod(known.constants[known.nodes[use[0]].input[use[1]]][1]))
    return _fill_constant(known, use, _random_signs(known, use[0], seed, size))


def _bound_values(known: GraphFacts, use: InputPlace, name: str) -> Array:
    constant = known.nodes[use[0]].input[use[1]]
    dtype, _ = known.constants[constant]
    return _fill_constant(known, use, np.array(widen_bound(name, float(known.model.array(constant).item()), dtype)))


def _shift_values(known: GraphFacts, use: InputPlace, seed: int, shifts: int) -> Array:
    """Small integers, a third of them below zero; elements differ unless `shifts`, a prime, divides their distance."""
    node = known.nodes[use[0]]
    random = named_generator(seed, f"{node.name}/shift{use[1]}")
    step, start = random.integers(1, shifts), random.integers(shifts)
    size = int(np.prod(known.constants[node.input[use[1]]][1]))
    return _fill_constant(known, use, (start + step * np.arange(size)) % shifts - shifts // 3)
