"""Memoized results are computed once per object, and freed with it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import dataclass, replace
from typing import assert_type

import pytest
from support.layer_graphs import vgg16

from dicompiler.base.memoize import Memoizing, memoized
from dicompiler.cost.op_counts import count_macs, count_operations, weight_regions
from dicompiler.cost.profile import layer_signature, network_digest
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.plan import LayerShare, Part
from dicompiler.ir.platform import Platform
from dicompiler.ir.regions import full_region, with_interval
from dicompiler.partition.bounds_inference import (
    cuttable_axes,
    make_share_task,
    make_tasks,
    output_shape,
    reduction_length,
)
from dicompiler.partition.tiling import named_axes, split_axis
from dicompiler.search.problem import Problem
from dicompiler_strategies.dp.row_maps import build_row_maps
from dicompiler_strategies.tables.choices import ChoiceSet
from dicompiler_strategies.tables.cost_tables import build_cost_tables


@dataclass(frozen=True)
class Number(Memoizing):
    value: int

    @memoized
    def times(self, other: int = 2) -> list[int]:
        return [self.value * other]


@memoized
def divided(number: Number, divisor: int) -> float | None:
    return number.value / divisor


def ask_everything(layers: LayerGraph) -> None:
    """Call all memoized functions of layers."""
    named_axes(layers)
    build_row_maps(layers)
    network_digest(layers)
    for layer in layers.layers:
        layer_signature(layers, layer)
        reduction_length(layers, layer)
        weight_regions(layers, make_share_task(layers, layer, LayerShare()))
        assert count_operations(layers, layer).flops >= count_macs(layers, layer)
        for axis in cuttable_axes(layers, layer):
            cut = split_axis(layers, layer, axis, (1.0, 2.0))[0]
            make_tasks(layers, layer, [Part("a", with_interval(full_region(output_shape(layers, layer)), axis, cut))])
    build_cost_tables(Problem(layers, Platform.load("rpi4x2")), ChoiceSet(extra_rows=1))


def test_computes_once_per_object_and_again_for_an_equal_object() -> None:
    number = Number(3)
    assert assert_type(number.times(4), list[int]) is number.times(4)
    assert number.times(4) == [12] != number.times(5)
    assert number.times(other=4) == [12] and number.times() == [6]
    assert Number(3).times(4) is not number.times(4)
    assert assert_type(divided(number, 2), float | None) == 1.5


def test_does_not_store_errors() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        divided(Number(3), 0)
    assert raised.value.__context__ is None


def test_stored_results_are_neither_pickled_nor_copied() -> None:
    layers = vgg16()
    before = len(pickle.dumps(layers))
    ask_everything(layers)
    assert len(pickle.dumps(layers)) == before
    for other in (copy.copy(layers), replace(layers), pickle.loads(pickle.dumps(layers))):
        assert "known" not in vars(other)
        assert network_digest(other) == network_digest(layers)


def test_unreferenced_layers_are_freed_despite_stored_results() -> None:
    layers = vgg16()
    ask_everything(layers)
    gone = weakref.ref(layers), weakref.ref(layers.layers[0])
    del layers
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
