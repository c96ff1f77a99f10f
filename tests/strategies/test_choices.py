"""Choices: valid by each layer's rule, without duplicates, with the fusion that extra rows allow."""

from __future__ import annotations

import pytest
from support.layer_graphs import formed, stack

from dicompiler.base.errors import UsageError
from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.platform import Platform
from dicompiler.partition.routing import check_plan, route
from dicompiler.search.problem import Problem
from dicompiler_strategies.tables.choices import SPLIT_KINDS, Choice, ChoiceSet, list_choices, next_smaller_extent


def boards(*rates: float, memory: tuple[int, ...] = ()) -> Platform:
    """Devices d0, d1, … with these rates (GFLOP/s), each on its own host."""
    hosts = tuple(Host(f"d{i}", memory[i] if memory else 2**30) for i in range(len(rates)))
    devices = tuple(Device(f"d{i}", f"d{i}", rate * 1e9) for i, rate in enumerate(rates))
    return Platform("test", hosts, devices, Network("shared", 1e8))


def small() -> LayerGraph:
    """Two convolutions, a pool, two more convolutions, a Flatten and two fully connected layers."""
    rows = [("conv", 8, 3, 1, 1, 1), ("conv", 8, 3, 1, 1, 1), ("pool", 2, 2, 0), ("conv", 8, 3, 1, 1, 2)]
    return stack((1, 4, 24, 24), [*rows, ("conv", 6, 3, 2, 1, 1), ("flatten",), ("fc", 16), ("fc", 10)])


def branched() -> LayerGraph:
    """A residual block, a Softmax, and an operator that stays whole."""
    return formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 12, 12] x) => (float[1, 5] y)
        {
          a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w)
          b = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (a, k)
          s = Add (b, a)  t = Softmax <axis = 1> (s)
          g = GlobalAveragePool (t)  f = Flatten (g)  y = Gemm (f, v)
        }""",
        w=(8, 4, 3, 3),
        k=(8, 8, 3, 3),
        v=(8, 5),
    )


def labelled(found: tuple[Choice, ...], label: str) -> Choice:
    return next(choice for choice in found if choice.label == label)


@pytest.mark.parametrize("make", [small, branched])
@pytest.mark.parametrize("rates", [(1, 1, 1, 1), (1, 4, 2, 0, 1)])
def test_every_choice_is_valid_routable_and_unique(make: object, rates: tuple[float, ...]) -> None:
    layers = make()  # type: ignore[operator]
    problem = Problem(layers, boards(*rates))
    found = [list_choices(problem, layer) for layer in layers.layers]
    for i in range(max(map(len, found))):
        plan = problem.build_plan(
            {layer.name: own[i % len(own)].parts for layer, own in zip(layers.layers, found, strict=True)}
        )
        check_plan(layers, plan)
        route(layers, plan)
    for own in found:
        assert len({choice.parts for choice in own}) == len(own)
        assert own[0].kind == "whole" and own[0].parts[0].device == problem.platform.fastest_device.name
        assert {part.device for choice in own for part in choice.parts} <= {
            d.name for d in problem.platform.computing_devices
        }


def test_all_kinds_appear_if_the_rules_allow_them() -> None:
    layers = small()
    problem = Problem(layers, boards(1, 1, 1, 1))
    kinds = [{choice.kind for choice in list_choices(problem, layer)} for layer in layers.layers]
    assert kinds[0] == set(SPLIT_KINDS)
    # Layers 2 and 3, a pool and a grouped convolution, have no reduction axis.
    assert "lip" not in kinds[2] and "lip" not in kinds[3]
    assert kinds[-1] == {"whole", "lop", "lip"}


def test_extra_rows_avoid_exchanges_between_layers() -> None:
    layers = small()
    problem = Problem(layers, boards(1, 1, 1, 1), source=("d0", "d1", "d2", "d3"))
    names = [layer.name for layer in layers.layers]
    labels = ["height 4 of 2 +3", "height 4 +2", "height 4 +1", "height 4"] + ["whole d0"] * 4
    found = {layer.name: list_choices(problem, layer) for layer in layers.layers}
    chosen = {}
    for name, label in zip(names, labels, strict=True):
        wanted = [c for c in found[name] if c.label in (label, label.replace(" of 2", ""))]
        chosen[name] = wanted[0].parts
    routing = route(layers, problem.build_plan(chosen))
    assert {box.key.tensor for box in routing.received_boxes} == {"conv4.y"}


def test_shares_follow_rates_and_memories_and_the_fastest_devices_come_first() -> None:
    layers = stack((1, 4, 24, 24), [("conv", 8, 3, 1, 1, 1)])
    problem = Problem(layers, boards(1, 2, 1, memory=(2**30, 2**30, 4 * 2**30)))
    found = list_choices(problem, layers.layers[0])

    def rows(label: str) -> list[tuple[str, tuple[int, int]]]:
        return [(p.device, p.region[2]) for p in labelled(found, label).parts if p.region is not None]

    assert rows("height 2") == [("d1", (0, 12)), ("d0", (12, 24))]
    assert rows("height 3 rate") == [("d1", (0, 12)), ("d0", (12, 18)), ("d2", (18, 24))]
    assert rows("height 3 memory") == [("d1", (0, 4)), ("d0", (4, 8)), ("d2", (8, 24))]


def test_partial_sums_use_the_ranges_of_the_previous_channels() -> None:
    """FUSE: LOP and then LIP without an exchange, even through a Flatten with uneven shares."""
    layers = stack((1, 4, 6, 6), [("conv", 7, 3, 1, 1, 1), ("flatten",), ("fc", 5)])
    problem = Problem(layers, boards(1, 1, 1), source=("d0", "d1", "d2"))
    found = [list_choices(problem, layer) for layer in layers.layers]
    picked = [
        labelled(found[0], "lop 3"),
        labelled(found[1], "lop 3"),
        labelled(found[2], "lip 3 > one"),
    ]
    routing = route(
        layers, problem.build_plan({layer.name: c.parts for layer, c in zip(layers.layers, picked, strict=True)})
    )
    assert [box.key.reduce for box in routing.received_boxes] == [(108, 180), (180, 252)]


def test_cuts_at_the_borders_of_the_next_smaller_layer() -> None:
    layers = stack((1, 3, 20, 20), [("conv", 4, 3, 1, 1, 1), ("pool", 2, 2, 0)])
    first, pool = layers.layers
    assert next_smaller_extent(layers, first, "height") == 10 and next_smaller_extent(layers, pool, "height") == 0
    found = list_choices(Problem(layers, boards(1, 1, 1, 1)), first)
    rows = [part.region[2] for part in labelled(found, "height 4 of 2").parts if part.region is not None]
    assert rows == [(0, 6), (6, 10), (10, 16), (16, 20)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kinds": ("whole", "hight")}, "unknown 'hight'.*height"),
        ({"shares": ("rates",)}, "did you mean 'rate'"),
        ({"extra_rows": -1}, "at least 0"),
        ({"device_counts": (1,)}, "at least 2"),
    ],
)
def test_rejects_invalid_choice_set(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ChoiceSet(**given)  # type: ignore[arg-type]


def test_sequence_that_becomes_a_small_image_has_few_choices() -> None:
    layers = stack((1, 2, 512, 1), [("pool", 1, 1, 0), ("pool", 64, 64, 0)])
    posed = Problem(layers, boards(1, 1))
    extras = [
        c
        for c in list_choices(posed, layers.layers[0], ChoiceSet(kinds=("height",), shares=("equal",)))
        if " of 64" in c.label
    ]
    assert 0 < len(extras) <= 4 * 4


def test_stride_on_one_axis_keeps_the_other_axis() -> None:
    layers = formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 12, 12] x) => (float[1, 4, 6, 12] y)
        {
          a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w)
          y = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 1]> (a, w)
        }""",
        w=(4, 4, 3, 3),
    )
    found = list_choices(Problem(layers, boards(1, 1, 1, 1)), layers.layers[0], ChoiceSet(kinds=("grid",)))
    assert any("grid" in choice.label for choice in found)
