"""Routings: order of assembly leaves, and bytes of received boxes."""

from __future__ import annotations

from dataclasses import replace

from support.layer_graphs import stack

from dicompiler.ir.layers import TensorKey
from dicompiler.ir.regions import volume
from dicompiler.ir.routing import AssemblyConcat, AssemblyLeaf, Box, Routing, assembly_leaves

LAYERS = stack((1, 3, 8, 8), [("conv", 4, 3, 1, 1, 1)])


def box(start: int, stop: int) -> Box:
    """Return a box with a number of rows of the model's input."""
    return Box(TensorKey("input"), ((0, 1), (0, 3), (start, stop), (0, 8)), "b", 0)


def take(start: int, stop: int) -> AssemblyLeaf:
    whole = box(start, stop)
    assert whole.region is not None
    return AssemblyLeaf(whole, whole.region)


def test_assembly_leaves_are_in_order() -> None:
    first, second, third = take(0, 2), take(2, 3), take(3, 8)
    tree = AssemblyConcat(2, (first, AssemblyConcat(3, (second,)), AssemblyConcat(2, (third, first))))
    assert assembly_leaves(tree) == (first, second, third, first)
    assert assembly_leaves(second) == (second,)


def test_total_bytes_are_those_of_the_received_boxes() -> None:
    boxes = (box(0, 2), box(2, 3))
    routing = Routing(LAYERS, (), {}, (), boxes, (), {})
    assert [routing.nbytes(entry) for entry in boxes] == [4 * volume(entry.region or ()) for entry in boxes]
    assert routing.total_bytes == 4 * 3 * 3 * 8
    assert Routing(LAYERS, (), {}, (), (), (), {}).total_bytes == 0


def test_first_role_has_no_other_roles() -> None:
    other = Routing(LAYERS, (), {}, (), (box(0, 2),), (), {})
    whole = Routing(LAYERS, (), {}, (), (), (), {}, (other,))
    assert whole.roles == (replace(whole, other_roles=()), other)
