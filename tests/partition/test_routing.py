"""Routing of small networks with known results."""

from __future__ import annotations

import pytest
from support.layer_graphs import formed

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.layers import TensorKey
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.routing import AssemblyConcat, AssemblyLeaf, assembly_leaves
from dicompiler.partition.routing import route

TWO = """
<ir_version: 8, opset_import: ["" : 13]>
two (float[1, 2, 8, 6] x) => (float[1, 4, 8, 6] y) {
   t = Conv <pads = [1, 1, 1, 1]> (x, w)
   y = Conv <pads = [1, 1, 1, 1]> (t, v)
}
"""
WEIGHTS = {"w": (4, 2, 3, 3), "v": (4, 4, 3, 3)}


def rows(device: str, start: int, stop: int, lane: int = 0) -> Part:
    return Part(device, ((0, 1), (0, 4), (start, stop), (0, 6)), lane=lane)


def channels(device: str, start: int, stop: int) -> Part:
    return Part(device, ((0, 1), (start, stop), (0, 8), (0, 6)))


def plan(first: tuple[Part, ...], second: tuple[Part, ...]) -> Plan:
    return Plan({"conv0": first, "conv1": second}, ("a",), ("a",))


def test_height_tiles_exchange_only_halo_rows() -> None:
    routing = route(
        formed(TWO, **WEIGHTS), plan((rows("a", 0, 4), rows("b", 4, 8)), (rows("a", 0, 4), rows("b", 4, 8)))
    )
    halos = [(box.device, box.region[2]) for box in routing.received_boxes if box.key == TensorKey("t") and box.region]
    assert halos == [("a", (4, 5)), ("b", (3, 4))]
    # These are five input rows that b needs, one halo row in each direction, and b's half of the output, in bytes.
    assert routing.total_bytes == 4 * (2 * 5 * 6 + 2 * 4 * 1 * 6 + 4 * 4 * 6)


def test_fused_tiles_exchange_nothing() -> None:
    routing = route(
        formed(TWO, **WEIGHTS), plan((rows("a", 0, 5), rows("b", 3, 8)), (rows("a", 0, 4), rows("b", 4, 8)))
    )
    assert not [box for box in routing.received_boxes if box.key == TensorKey("t")]


def test_boxes_are_taken_from_own_lane_then_device_then_host() -> None:
    layers = formed(TWO, **WEIGHTS)
    whole = rows("a", 0, 8), rows("b", 0, 8), rows("c", 0, 8, 1), rows("c", 0, 8)
    for reader, expected in ((rows("c", 0, 8), "c"), (rows("b", 0, 8), "b"), (rows("d", 0, 8), "a")):
        routing = route(layers, plan(whole, (reader,)))
        (tree,) = routing.reads["conv1", 0].values()
        assert isinstance(tree, AssemblyLeaf)
        assert (tree.box.origin or tree.box).device == expected
        assert (tree.box.origin or tree.box).lane == 0
    routing = route(layers, plan(whole, (rows("d", 0, 8),)), hosts={"b": "host", "d": "host"})
    assert [box.origin.device for box in routing.received_boxes if box.origin and box.key == TensorKey("t")] == ["b"]


def test_unread_parts_are_dropped() -> None:
    layers = formed(TWO, **WEIGHTS)
    lean = plan((rows("a", 0, 8),), (rows("a", 0, 8),))
    fat = plan((rows("a", 0, 8), rows("b", 2, 4)), (rows("a", 0, 8),))
    assert route(layers, fat).dropped_tasks == (("conv0", 1),)
    assert route(layers, fat).total_bytes == route(layers, lean).total_bytes == 0


def test_reports_regions_that_no_part_computes() -> None:
    with pytest.raises(
        DicompilerError, match=r"no part computes the region \[0:1, 0:4, 5:6, 0:6\] of 't', which 'conv1' on b"
    ):
        route(formed(TWO, **WEIGHTS), plan((rows("a", 0, 5), rows("b", 6, 8)), (rows("a", 0, 4), rows("b", 4, 8))))


def test_rows_skipped_by_strides_need_no_part() -> None:
    text = TWO.replace(
        "y = Conv <pads = [1, 1, 1, 1]> (t, v)", "y = MaxPool <kernel_shape = [1, 1], strides = [2, 1]> (t)"
    )
    text = text.replace("float[1, 4, 8, 6] y", "float[1, 4, 4, 6] y")
    layers = formed(text, w=(4, 2, 3, 3))
    pool = (Part("a", ((0, 1), (0, 4), (0, 2), (0, 6))), Part("b", ((0, 1), (0, 4), (2, 4), (0, 6))))
    own = Plan({"conv0": (rows("a", 0, 3), rows("b", 4, 8)), "maxpool1": pool}, ("a",), ("a",))
    assert not [box for box in route(layers, own).received_boxes if box.key == TensorKey("t")]


def test_mergers_read_partial_sums_range_by_range() -> None:
    first = channels("a", 0, 2), channels("b", 2, 4)
    second = (Part("a", reduce=(0, 2)), Part("b", reduce=(2, 4)), channels("a", 0, 2), channels("b", 2, 4))
    routing = route(formed(TWO, **WEIGHTS), plan(first, second))
    assert [key.reduce for key in routing.reads["conv1", 2]] == [(0, 2), (2, 4)]
    assert not [
        box for box in routing.received_boxes if box.key == TensorKey("t")
    ]  # Output channels of the first layer are input channels of the second on the same device, so nothing is sent.
    sums = [(box.device, box.key.reduce, box.region) for box in routing.received_boxes if box.key.reduce]
    assert sums == [
        ("b", (0, 2), ((0, 1), (2, 4), (0, 8), (0, 6))),
        ("a", (2, 4), ((0, 1), (0, 2), (0, 8), (0, 6))),
    ]


def test_assemblies_concatenate_axis_by_axis() -> None:
    corners = tuple(
        Part(device, ((0, 1), (0, 4), height, width))
        for device, height, width in (
            ("a", (0, 4), (0, 3)),
            ("b", (0, 4), (3, 6)),
            ("c", (4, 8), (0, 3)),
            ("d", (4, 8), (3, 6)),
        )
    )
    routing = route(formed(TWO, **WEIGHTS), plan(corners, (rows("a", 0, 8),)))
    (tree,) = routing.reads["conv1", 0].values()
    assert isinstance(tree, AssemblyConcat) and tree.axis == 2
    assert [leaf.region[2:] for leaf in assembly_leaves(tree)] == [
        ((0, 4), (0, 3)),
        ((0, 4), (3, 6)),
        ((4, 8), (0, 3)),
        ((4, 8), (3, 6)),
    ]
    assert sum(box.key == TensorKey("t") for box in routing.received_boxes) == 3


@pytest.mark.parametrize("extra", [0, 1])
def test_many_pieces_become_one_concatenation(extra: int) -> None:
    """Nested concatenations would be too deep; among overlapping pieces of equal size, the first device wins."""
    count = 1500
    graph = f"""
    <ir_version: 8, opset_import: ["" : 13]>
    tall (float[1, 1, {2 * count}, 2] x) => (float[1, 1, {2 * count}, 2] y) {{
       t = Relu (x)
       y = LRN <size = 1> (t)
    }}
    """
    whole = ((0, 1), (0, 1), (0, 2 * count), (0, 2))
    tiles = [
        Part(f"d{i}", (*whole[:2], (max(0, 2 * i - extra), min(2 * count, 2 * i + 2 + extra)), whole[3]))
        for i in range(count)
    ]
    layers = formed(graph)
    first, second = (layer.name for layer in layers.layers)
    routing = route(layers, Plan({first: tuple(tiles), second: (Part("d700"),)}, ("d0",), ("d700",)))
    (tree,) = routing.reads[second, 0].values()
    assert isinstance(tree, AssemblyConcat) and all(isinstance(child, AssemblyLeaf) for child in tree.children)
    rows = [leaf.region[2] for leaf in assembly_leaves(tree)]
    assert [start for start, _ in rows] == [0, *(stop for _, stop in rows[:-1])] and rows[-1][1] == 2 * count
    (own,) = (leaf for leaf in assembly_leaves(tree) if leaf.box.origin is None)
    assert own.region[2] == (1400 - extra, 1402 + extra)
    # Rows in both tiles come from the second tile, because it has more rows than the first.
    assert assembly_leaves(tree)[0].box.origin is not None and rows[0] == (0, 2 - extra)
    gone = Plan({first: tuple(tiles[:9] + tiles[10:]), second: (Part("d700"),)}, ("d0",), ("d700",))
    if not extra:
        with pytest.raises(DicompilerError, match=r"no part computes the region \[0:1, 0:1, 18:20, 0:2\] of 't'"):
            route(layers, gone)
