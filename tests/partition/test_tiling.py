"""Tiling: cuts cover an axis, tiles contain the needs of readers, sets have one exit."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layer_graphs import formed, stack
from support.random_layers import cut_layers, random_layers, random_region
from support.splits import exits, largest_set

from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.driver.prepare import prepare
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import LayerShare
from dicompiler.ir.regions import bounding_region, contains, full_region, volume
from dicompiler.partition.bounds_inference import cuttable_axes, make_share_task, output_shape
from dicompiler.partition.tiling import (
    exit_layer,
    fused_regions,
    grid_tiles,
    labelled_axis,
    named_axes,
    single_device_plan,
    split_axis,
    tile_layer,
)  # fmt: skip

SEEDS = st.integers(0, 30)


@pytest.fixture(scope="module")
def tiny() -> LayerGraph:
    """Return a network with a residual, a pool, and two branches that join."""
    layers = prepare(Model.load(networks.build("tiny", 1))).layers
    assert layers is not None
    return layers


def test_sets_with_one_exit_are_accepted(tiny: LayerGraph) -> None:
    largest = {name: {layer.name for layer in chosen} for name, chosen in exits(tiny, "fused-height").items()}
    assert largest["concat"] == {"stem", "res1", "res2", "pool", "left", "right", "concat"}
    # Layer res2 contains the addition of the residual block, which reads stem.
    assert largest["res2"] == {"stem", "res1", "res2"}
    assert "res1" not in largest  # The addition in layer res2 also reads stem, so {stem, res1} would have two exits.


def test_sets_with_a_hole_have_two_exits(tiny: LayerGraph) -> None:
    with pytest.raises(DicompilerError, match="stem, res2 are read outside: choose other layers"):
        exit_layer(tiny, [tiny.layer_by_name["stem"], tiny.layer_by_name["res2"]])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SEEDS, st.lists(st.floats(0.1, 10), min_size=1, max_size=5))
def test_split_axis_covers_the_axis_exactly(seed: int, weights: list[float]) -> None:
    layers = random_layers(seed)
    for layer in cut_layers(layers):
        whole = full_region(output_shape(layers, layer))
        for axis in cuttable_axes(layers, layer):
            cuts = split_axis(layers, layer, axis, weights)
            assert len(cuts) == len(weights)
            assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
            assert cuts[-1][1] == whole[axis][1]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(SEEDS, st.integers(1, 5))
def test_tiles_cover_the_output_in_device_order(seed: int, count: int) -> None:
    layers = random_layers(seed)
    names = [f"d{index}" for index in range(count)]
    for layer in cut_layers(layers):
        for label in ("height", "width", "channel"):
            if named_axes(layers)[layer.output].get(label) not in cuttable_axes(layers, layer):
                with pytest.raises(DicompilerError, match=f"cannot be split along {label}: "):
                    labelled_axis(layers, layer, label)  # type: ignore[arg-type]
                continue
            parts = tile_layer(layers, layer, label, [1.0] * count, names)  # type: ignore[arg-type]
            assert [part.device for part in parts] == [name for name in names if name in {p.device for p in parts}]
            regions = [part.region for part in parts if part.region]
            whole = full_region(output_shape(layers, layer))
            assert bounding_region(regions) == whole
            assert sum(map(volume, regions)) == volume(whole)


def test_named_axes_pass_through_a_channel_shuffle() -> None:
    layers = formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1, 6, 8, 4] x) => (float[1, 6, 8, 4] y)
        <int64[5] five = {1, 2, 3, 8, 4}, int64[4] four = {1, 6, 8, 4}>
        { a = Reshape (x, five)  b = Transpose <perm = [0, 2, 1, 3, 4]> (a)  y = Reshape (b, four) }"""
    )
    assert [dict(named_axes(layers)[name])["height"] for name in "xaby"] == [2, 3, 3, 2]
    assert [dict(named_axes(layers)[name])["width"] for name in "xaby"] == [3, 4, 4, 3]


def test_grid_tiles_cover_the_output_row_by_row() -> None:
    layers = stack((1, 3, 9, 8), [("conv", 4, 3, 1, 1, 1)])
    (layer,) = layers.layers
    assert [region[2:] for region in grid_tiles(layers, layer, 2, 2)] == [
        ((0, 5), (0, 4)),
        ((0, 5), (4, 8)),
        ((5, 9), (0, 4)),
        ((5, 9), (4, 8)),
    ]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(SEEDS, st.randoms(use_true_random=False))
def test_fused_tiles_contain_all_intermediate_needs(seed: int, rng: Random) -> None:
    layers = random_layers(seed)
    allowed = {layer.name for layer in cut_layers(layers)}
    for last in cut_layers(layers):
        chosen = largest_set(layers, last, lambda layer: layer.name in allowed)
        assert exit_layer(layers, chosen) is last
        wanted = [random_region(rng, layers, last) for _ in range(2)]
        for region, held in zip(wanted, fused_regions(layers, chosen, wanted), strict=True):
            assert contains(held[last.name], region)
            for name, made in held.items():  # Layers without a region here are not needed for the tile.
                for key, need in make_share_task(layers, layers.layer_by_name[name], LayerShare(made)).needs.items():
                    maker = layers.producer.get(key.tensor)
                    if maker is not None and maker.name in held:
                        assert contains(held[maker.name], need)


def test_rejects_whole_layers_in_fused_tiles() -> None:
    layers = formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[2, 4] x) => (float[2, 4] y) <int64[2] n = {4, 4}>
        { y = ReverseSequence <batch_axis = 0, time_axis = 1> (x, n) }"""
    )
    with pytest.raises(
        DicompilerError, match=r"'reversesequence0' cannot be in a fused tile \(.* has no rule\): omit it"
    ):
        fused_regions(layers, layers.layers, [((0, 1), (0, 4))])


def test_single_device_plan_uses_one_device() -> None:
    layers = stack((1, 3, 8, 8), [("conv", 4, 3, 1, 1, 1), ("flatten",), ("fc", 5)])
    plan = single_device_plan(layers, "pi")
    assert list(plan.layers) == [layer.name for layer in layers.layers]
    assert plan.devices == plan.source == plan.sink == ("pi",)
