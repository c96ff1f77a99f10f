"""Checks of operator rules with hypothesis, in addition to dicompiler.testing: stricter ones for built-in rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import assume, reject
from hypothesis import strategies as st
from support.layer_graphs import rules

from dicompiler.base.errors import DicompilerError
from dicompiler.driver.rule_check import IntegerChooser, choose_parts, run_split
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.regions import full_region
from dicompiler.partition.bounds_inference import output_shape
from dicompiler.plugin_api.onnx import run_model
from dicompiler.testing import rules as checks
from dicompiler.testing.rules import Array, RuleCase
from dicompiler.verify.exact import check_model
from dicompiler_passes.form_layers import form_layers
from dicompiler_passes.partition import PartitionPass

__all__ = [
    "OPSETS",
    "Array",
    "Draw",
    "RuleCase",
    "broadcastable",
    "check_cut",
    "check_stand_in",
    "check_whole",
    "drawn_computed",
    "integers",
    "run",
    "run_split",
]  # fmt: skip

OPSETS = (9, 11, 13, 17, 21)
Draw = Callable[..., Any]


def run(model: Model, feed: Mapping[str, Array]) -> Array | None:
    """Return the whole node's output; None if onnxruntime rejects the model, which then need not be split."""
    try:
        return np.asarray(run_model(model, feed, optimization="none")["y"])
    except DicompilerError:
        return None


def chooser(draw: Draw) -> IntegerChooser:
    """Return a function that draws numbers from hypothesis, which can shrink them."""

    def choose(low: int, high: int) -> int:
        return int(draw(st.integers(low, high)))

    return choose


def check_whole(layers: LayerGraph, model: Model) -> None:
    """Check that the full output is the unchanged node on its full inputs."""
    (layer,) = layers.layers
    (node,) = layer.nodes
    operation = layers.operation_of(node)
    piece = layers.make_piece(node, full_region(operation.out_shape))
    assert piece.out == full_region(operation.out_shape)
    assert piece.needs == operation.full_needs()
    assert (piece.attributes, piece.constants, piece.written_region, piece.op) == ({}, {}, None, None)
    placed = PartitionPass().run(PipelineState(model, layers, plan=Plan({"node": (Part("a"),)}, ("a",), ("a",))))
    (proto,) = placed.model.proto.graph.node
    del proto.metadata_props[:]
    # Outputs that nothing reads get other names on each device, so their names are not compared.
    proto.output[1:] = model.proto.graph.node[0].output[1:]
    assert proto == model.proto.graph.node[0]


def check_cut(case: RuleCase, draw: Draw) -> None:
    """Split the node into drawn regions, and compare with the whole; also partial sums if the rule has a reduction."""
    model = case.model()
    expected = run(model, case.inputs)
    layers = form_layers(model, rules())
    assume(layers.tensors["y"].shape is not None)
    shape = output_shape(layers, layers.layers[0])
    # onnxruntime ignores the dilations of pools with auto_pad, so its output has another shape.
    assume(expected is not None and expected.shape == shape)
    assert expected is not None
    check_whole(layers, model)
    checks.check_split(layers, model, case, expected, chooser(draw))


def check_stand_in(case: RuleCase, draw: Draw) -> None:
    """Run `check_cut` in the exact check, in which rounding operators are replaced: results must be bit-equal."""
    assume(run(case.model(), case.inputs) is not None)
    try:
        model, feed = check_model(case.model(), draw(st.integers(0, 9)))
    except DicompilerError:
        # onnxruntime rejects the check model. In types other than float32, a MaxPool with the same attributes replaces
        # an LpPool. However, onnxruntime's MaxPool does not accept all values of auto_pad that its LpPool accepts.
        reject()
    expected = run(model, feed)
    layers = form_layers(model, rules())
    assume(expected is not None and expected.shape == output_shape(layers, layers.layers[0]))
    np.testing.assert_array_equal(run_split(model, layers, choose_parts(chooser(draw), layers), feed), expected)


def integers(draw: Draw, *shape: int, most: int = 4, dtype: Any = np.float32) -> Array:
    """Draw small integers from one seed; their sums are exact in any order."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return random.integers(-most, most + 1, shape).astype(dtype)


def broadcastable(draw: Draw, shape: Sequence[int]) -> tuple[int, ...]:
    """Draw a shape that broadcasts to `shape`: some axes of extent 1, some leading axes omitted."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(draw(st.sampled_from((extent, extent, 1))) for extent in kept)


def drawn_computed(draw: Draw, count: int) -> tuple[int, ...]:
    """Draw which inputs are computed; at least one is."""
    return tuple(sorted(draw(st.sets(st.integers(0, count - 1), min_size=1))))
