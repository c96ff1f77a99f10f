"""Bounds inference: needs grow with the region of a part, and follow from the rules."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layer_graphs import formed, stack
from support.random_layers import cut_layers, random_layers, random_region

from dicompiler.ir.layers import Layer, LayerGraph, TensorKey
from dicompiler.ir.plan import LayerShare, Part
from dicompiler.ir.regions import Region, bounding_region, contains, full_region, with_interval
from dicompiler.ir.routing import ShareTask
from dicompiler.partition.bounds_inference import (
    align_region,
    cuttable_axes,
    make_share_task,
    make_tasks,
    output_shape,
    reduction_length,
)

SEEDS = st.integers(0, 30)
CONVOLUTION = stack((1, 4, 9, 6), [("conv", 8, 3, 2, 1, 1)])


def plain(layers: LayerGraph, layer: Layer, region: Region) -> ShareTask:
    """Return the task of one part with this region."""
    return make_share_task(layers, layer, LayerShare(region))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SEEDS, st.randoms(use_true_random=False))
def test_aligned_regions_contain_the_request_and_are_stable(seed: int, rng: Random) -> None:
    layers = random_layers(seed)
    for layer in cut_layers(layers):
        region = random_region(rng, layers, layer)
        out = align_region(layers, layer, region)
        assert contains(out, region)
        assert align_region(layers, layer, out) == out
        assert plain(layers, layer, region).outputs == {TensorKey(layer.output): out}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SEEDS, st.randoms(use_true_random=False))
def test_needs_grow_with_the_region(seed: int, rng: Random) -> None:
    layers = random_layers(seed)
    for layer in cut_layers(layers):
        large = random_region(rng, layers, layer)
        small = random_region(rng, layers, layer, large)
        more, less = plain(layers, layer, large).needs, plain(layers, layer, small).needs
        assert set(less) <= set(more)
        assert all(contains(more[key], need) for key, need in less.items())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SEEDS, st.randoms(use_true_random=False))
def test_two_parts_together_need_at_least_what_a_piece_across_both_needs(seed: int, rng: Random) -> None:
    layers = random_layers(seed)
    for layer in cut_layers(layers):
        whole = full_region(output_shape(layers, layer))
        axis = rng.choice(cuttable_axes(layers, layer))
        at = rng.randrange(1, whole[axis][1])
        parts = [Part("a", with_interval(whole, axis, cut)) for cut in ((0, at), (at, whole[axis][1]))]
        tasks = make_tasks(layers, layer, parts)
        assert [task.kind for task in tasks] == ["plain", "plain"]
        assert bounding_region(task.outputs[TensorKey(layer.output)] for task in tasks) == whole
        # An axis of two elements has one element in each part. A piece with elements of both is the whole axis, which
        # may need more than its parts.
        if whole[axis][1] == 2:
            continue
        across = with_interval(whole, axis, rng.choice(((0, whole[axis][1] - 1), (1, whole[axis][1]))))
        for key, need in plain(layers, layer, across).needs.items():
            assert contains(bounding_region(task.needs.get(key) for task in tasks) or (), need)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(SEEDS)
def test_cuttable_axes_do_not_extend_to_full_length(seed: int) -> None:
    layers = random_layers(seed)
    for layer in layers.layers:
        if layer.whole_reason:
            assert cuttable_axes(layers, layer) == ()
            continue
        whole = full_region(output_shape(layers, layer))
        for axis, (_, extent) in enumerate(whole):
            alone = align_region(layers, layer, with_interval(whole, axis, (0, min(1, extent))))[axis]
            assert (axis in cuttable_axes(layers, layer)) == (extent > 1 and alone != (0, extent))


@pytest.mark.parametrize(("rows", "needed"), [((0, 1), (0, 2)), ((1, 3), (1, 6)), ((4, 5), (7, 9)), ((0, 5), (0, 9))])
def test_strided_convolutions_need_a_halo(rows: tuple[int, int], needed: tuple[int, int]) -> None:
    (layer,) = CONVOLUTION.layers
    task = plain(CONVOLUTION, layer, ((0, 1), (0, 8), rows, (0, 3)))
    assert task.needs == {TensorKey("input"): ((0, 1), (0, 4), needed, (0, 6))}


def test_partial_tasks_run_the_anchor_and_mergers_the_rest() -> None:
    layers = formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 5, 5] x, float[1, 6, 5, 5] z) => (float[1, 6, 5, 5] y)
        { c = Conv (x, w)  s = Add (c, z)  y = Relu (s) }""",
        w=(6, 4, 1, 1),
    )
    (layer,) = layers.layers
    assert reduction_length(layers, layer) == 4
    half = ((0, 1), (0, 3), (0, 5), (0, 5))
    first, second, merger = make_tasks(
        layers, layer, [Part("a", None, (0, 1)), Part("b", None, (1, 4)), Part("a", half)]
    )
    assert [task.kind for task in (first, second, merger)] == ["partial", "partial", "merger"]
    assert [[work.node.op for work in task.nodes] for task in (first, merger)] == [["Conv"], ["Add", "Relu"]]
    assert second.outputs == {TensorKey("c", (1, 4)): full_region((1, 6, 5, 5))}
    assert second.needs == {TensorKey("x"): ((0, 1), (1, 4), (0, 5), (0, 5))}
    assert merger.outputs == {TensorKey("y"): half}
    assert merger.needs == {TensorKey("z"): half}


def test_grouped_convolutions_have_no_reduction_axis() -> None:
    layers = stack((1, 4, 9, 6), [("conv", 8, 3, 2, 1, 2), ("pool", 2, 2, 0)])
    assert [reduction_length(layers, layer) for layer in layers.layers] == [None, None]


def test_whole_layers_need_all_inputs() -> None:
    layers = formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[2, 4] x) => (float[2, 4] y) <int64[2] n = {4, 4}>
        { y = ReverseSequence <batch_axis = 0, time_axis = 1> (x, n) }"""
    )
    (layer,) = layers.layers
    assert layer.whole_reason
    for part in (Part("a"), Part("b", ((0, 1), (0, 4)))):
        (task,) = make_tasks(layers, layer, [part])
        assert task.outputs == {TensorKey("y"): full_region((2, 4))}
        assert task.needs == {TensorKey("x"): full_region((2, 4))}
        assert [work.piece for work in task.nodes] == [None]
