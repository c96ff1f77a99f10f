"""Every violation of a plan has its own error message."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.layer_graphs import formed

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.plan import FailurePlan, Part, Plan
from dicompiler.ir.platform import uniform_platform
from dicompiler.ir.regions import Interval
from dicompiler.partition.routing import check_plan, route, route_on_platform

TEXT = """
<ir_version: 8, opset_import: ["" : 13]>
net (float[1, 4, 8, 6] x) => (float[1, 4, 8, 6] y)
<int64[1] lengths = {4}>
{
   [conv] t = Conv <pads = [1, 1, 1, 1]> (x, w)
   [grouped] u = Conv <group = 2> (t, v)
   [whole] s = ReverseSequence <batch_axis = 0, time_axis = 1> (u, lengths)
   [softmax] y = Softmax <axis = 1> (s)
}
"""


@pytest.fixture(scope="module")
def layers() -> LayerGraph:
    return formed(TEXT, w=(4, 4, 3, 3), v=(4, 2, 1, 1))


def conv(*cuts: tuple[int, Interval], reduce: Interval | None = None, rank: int = 4) -> Part:
    region = [(0, 1), (0, 4), (0, 8), (0, 6)][:rank]
    for axis, interval in cuts:
        region[axis] = interval
    return Part("a", tuple(region), reduce)


def plan(**changed: tuple[Part, ...]) -> Plan:
    whole = {name: (Part("a"),) for name in ("conv", "grouped", "whole", "softmax")}
    return Plan({**whole, **changed}, ("a",), ("a",))


def test_accepts_a_valid_plan(layers: LayerGraph) -> None:
    check_plan(layers, plan())
    check_plan(layers, plan(conv=(conv((1, (0, 2))), conv((1, (2, 4))))))
    check_plan(
        layers, plan(conv=(Part("a", None, (0, 1)), Part("b", None, (1, 4)), conv((2, (0, 5))), conv((2, (5, 8)))))
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"conf": (Part("a"),)}, "layers.conf: the model has no such layer (did you mean 'conv'?)"),
        ({"conv": ()}, "layers.conv: missing"),
        ({"conv": (conv(rank=3),)}, "layers.conv[0].region: 3 intervals for an output of rank 4"),
        ({"conv": (conv((2, (0, 9))),)}, "outside the layer's output (1, 4, 8, 6)"),
        ({"conv": (conv((2, (5, 5))),)}, "is empty"),
        ({"conv": (Part("a"), conv((2, (-1, 4))))}, "layers.conv[1].region"),
        ({"softmax": (conv((1, (0, 2))),)}, "axis 1 of this layer cannot be cut: cut only the axes 2, 3"),
        ({"whole": (conv((2, (0, 4))),)}, "this layer cannot be split (operator ReverseSequence has no rule)"),
        ({"whole": (conv(reduce=(0, 2)),)}, "this layer cannot be split"),
        ({"grouped": (conv(reduce=(0, 2)), Part("a"))}, "this Conv has no input channels to sum over"),
        ({"conv": (conv(reduce=(0, 5)), Part("a"))}, "[0, 5] is empty or outside 0..4"),
        ({"conv": (conv(reduce=(0, 4)),)}, "all parts are partial sums, and no part merges them"),
        ({"conv": (conv(reduce=(0, 3)), conv(reduce=(2, 4)), Part("a"))}, "reduce ranges overlap at 2"),
        ({"conv": (conv(reduce=(0, 1)), conv(reduce=(2, 4)), Part("a"))}, "reduce ranges leave a gap at 1"),
        ({"conv": (conv(reduce=(0, 3)), Part("a"))}, "reduce ranges end at 3"),
    ],
)
def test_rejects_invalid_plans(layers: LayerGraph, changed: dict[str, tuple[Part, ...]], message: str) -> None:
    with pytest.raises(DicompilerError) as raised:
        check_plan(layers, plan(**changed))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_rejects_missing_source_or_sink(layers: LayerGraph) -> None:
    with pytest.raises(DicompilerError, match="source and sink"):
        check_plan(layers, Plan(plan().layers, (), ("a",)))


def test_rejects_missing_layers(layers: LayerGraph) -> None:
    some = {name: parts for name, parts in plan().layers.items() if name != "grouped"}
    with pytest.raises(DicompilerError, match=r"layers\.grouped: missing"):
        check_plan(layers, Plan(some, ("a",), ("a",)))


GOOD = Plan({name: (Part("b"),) for name in ("conv", "grouped", "whole", "softmax")}, ("b",), ("b",))


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ((FailurePlan(("b",), GOOD),), "plan: failures[0]: the plan uses 'b', which is one of the failed"),
        (
            (FailurePlan(("a",), GOOD), FailurePlan(("a",), GOOD)),
            "plan: failures[0]: two entries of the key 'failed' name the same devices",
        ),
        (
            (FailurePlan(("a", "c"), GOOD), FailurePlan(("c", "a"), GOOD)),
            "plan: failures[1]: two entries of the key 'failed' name the same",
        ),
        (
            (FailurePlan(("c",), GOOD), FailurePlan(("a",), replace(GOOD, layers={**GOOD.layers, "conv": ()}))),
            "plan: failures[1]: layers.conv: missing: give every layer at least one part",
        ),
        (
            (
                FailurePlan(
                    ("a",), replace(GOOD, layers={**GOOD.layers, "softmax": (replace(conv((2, (0, 5))), device="b"),)})
                ),
            ),
            "plan: failures[0]: no part computes the region [0:1, 0:4, 5:8, 0:6] of 'y'",
        ),
    ],
)
def test_rejects_incomplete_failure_plans(layers: LayerGraph, losses: tuple[FailurePlan, ...], message: str) -> None:
    with pytest.raises(DicompilerError) as caught:
        route(layers, replace(plan(), failures=losses))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_rejects_failures_of_unknown_devices(layers: LayerGraph) -> None:
    lost = replace(plan(), failures=(FailurePlan(("e",), replace(GOOD, source=("d1",), sink=("d1",))),))
    with pytest.raises(DicompilerError, match=r"failures\[0\]: uniform: unknown device '(d1|b|e)'"):
        route_on_platform(
            replace(uniform_platform(1), devices=(replace(uniform_platform(1).devices[0], name="a"),)), layers, lost
        )
