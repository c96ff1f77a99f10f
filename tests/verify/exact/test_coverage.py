"""Coverage: the needed seeds read every tap and every input channel, and gaps show."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support.exact_models import SMALL, network
from support.modern_net import MS, Net

from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import Weight
from dicompiler.verify.exact import check_model, measure_coverage, seeds_needed
from dicompiler.verify.exact.coverage import Coverage
from dicompiler.verify.exact.sparse_filters import WEIGHTED_OPS, FilterExtent, sparse_filters, unified_view
from dicompiler.verify.executor import run_model


@pytest.mark.parametrize(("name", "first"), [(name, first) for name in SMALL for first in (0, 5)])
def test_needed_seeds_read_everything(name: str, first: int) -> None:
    model = network(name)
    needed = seeds_needed(model)
    assert 1 <= needed <= 4
    read = measure_coverage(check_model(model, seed)[0] for seed in range(first, first + needed))
    assert str(read) == f"{read.taps} of {read.taps} taps and {read.channels} of {read.channels} input channels read"


def test_coverage_shows_missing_seed() -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], "wide")
    size = FilterExtent(1, 16, 832, 1)
    assert (size.min_elements(), size.seeds_needed) == (13, 4)
    weights = [
        sparse_filters(node, 1, (16, 832, 1, 1), np.dtype(np.float32), seed, 1, np.ones(16)) for seed in range(4)
    ]
    read = [(np.stack(weights[:count]) != 0).any((0, 1)).mean() for count in (3, 4)]
    assert read[0] < 1
    assert read[1] == 1


@pytest.mark.parametrize("points", ["none", "packed", "floats"])
@pytest.mark.parametrize("bits", [4, 8])
def test_counts_unpacked_nbits_weights(bits: int, points: str) -> None:
    """Columns at their zero point in every row are not read. The last block is not full."""
    if (bits, points) == (8, "floats"):
        points = "packed"  # onnxruntime does not support 8-bit weights with floating-point zero points.
    random, net = np.random.default_rng(bits), Net()
    weight = random.choice([0, 0x88 if bits == 4 else 0x80, 0x19], (2, 5, 2 * bits))
    values = {"packed": random.choice([0, 0x88], (2, -(-5 * bits // 8))), "floats": random.choice([0, 8], (2, 5))}
    given = [net.const(values[points], np.uint8 if points == "packed" else np.float32)] if points in values else []
    scales = net.const(np.ones((2, 5)))
    attributes = {"K": 78, "N": 2, "bits": bits, "block_size": 16}
    y = net.op(
        "MatMulNBits", net.input("x", (78, 78)), net.const(weight, np.uint8), scales, *given, domain=MS, **attributes
    )
    model = Model.load(net.model(types=[helper.make_tensor_value_info(y, 1, (78, 2))], ir=10))
    read = run_model(model, {"x": np.eye(78, dtype=np.float32)})[y].any(1)
    assert 0 < read.sum() < 78
    assert measure_coverage([model]) == Coverage(1, 1, int(read.sum()), 78)


@pytest.mark.parametrize("name", ["tiny", "quirks"])
def test_missing_tap_or_channel_changes_output(name: str) -> None:
    model = network(name)
    runs = [check_model(model, seed) for seed in range(seeds_needed(model))]
    for node in model.proto.graph.node:
        if node.op_type in WEIGHTED_OPS:
            size = FilterExtent(*unified_view(node, 1, model.array(node.input[1])).shape)
            for place in [(slice(None), slice(None), slice(None), tap) for tap in range(size.taps)]:
                assert any(_without(*run, node, place) for run in runs)
            for group, channel in np.ndindex(size.groups, size.channels):
                assert any(_without(*run, node, (group, slice(None), channel)) for run in runs)


def _without(checked: Model, inputs: dict[str, Any], node: onnx.NodeProto, place: tuple[Any, ...]) -> bool:
    """Return True if the output changes when one element of the node's weight becomes zero."""
    name, array = node.input[1], checked.array(node.input[1]).copy()
    unified_view(node, 1, array)[place] = 0
    proto = onnx.ModelProto()
    proto.CopyFrom(checked.proto)
    weights = dict(checked.weights)
    if name in weights:
        weights[name] = Weight.from_array(array)
    for tensor in proto.graph.initializer:
        if tensor.name == name and name not in weights:
            tensor.CopyFrom(numpy_helper.from_array(array, name))
    changed = run_model(Model(proto, weights), inputs, optimization="none")["output"]
    return not np.array_equal(changed, run_model(checked, inputs, optimization="none")["output"])
