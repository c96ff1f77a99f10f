"""Sparse filters: consecutive seeds read everything, and each filter makes one output channel."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper
from support.exact_models import from_text

from dicompiler.verify.exact import check_model
from dicompiler.verify.exact.sparse_filters import FilterExtent, sparse_filters, unified_view
from dicompiler.verify.executor import run_model


@given(
    groups=st.integers(1, 3),
    filters=st.integers(1, 6),
    channels=st.integers(1, 40),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    first=st.integers(0, 50),
    taps=st.lists(st.integers(1, 5), min_size=4, max_size=4),
)
def test_consecutive_seeds_read_everything(
    groups: int, filters: int, channels: int, kernel: tuple[int, int], first: int, taps: list[int]
) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], "conv", group=groups)
    shape = (groups * filters, channels, *kernel)
    size = FilterExtent(groups, filters, channels, kernel[0] * kernel[1])
    arrays = [
        sparse_filters(node, 1, shape, np.dtype(np.float32), first + number, taps[number], np.ones(groups * filters))
        for number in range(size.seeds_needed)
    ]
    read = np.any([unified_view(node, 1, array) != 0 for array in arrays], axis=0)
    assert read.any((0, 1, 2)).all()
    assert read.any((1, 3)).all()
    assert all((unified_view(node, 1, array) != 0).any((2, 3)).all() for array in arrays)


GROUPED = """<ir_version: 8, opset_import: ["": 17]>
    g (float[1, 4, 9, 9] x) => (float[1, 6, a, b] y) {{ y = {op} <group = 2> (x, w) }}"""


@pytest.mark.parametrize(("op", "shape"), [("Conv", (6, 2, 3, 3)), ("ConvTranspose", (4, 3, 3, 3))])
def test_filter_of_grouped_layer_makes_one_channel(op: str, shape: tuple[int, ...]) -> None:
    model = from_text(GROUPED.format(op=op), {"w": np.ones(shape, np.float32)})
    node, checked = model.proto.graph.node[0], check_model(model, 0)[0]
    x = np.arange(1, 325, dtype=np.float32).reshape(1, 4, 9, 9)
    for filter_ in range(6):
        weight = np.zeros(shape, np.float32)
        unified_view(node, 1, weight)[divmod(filter_, 3)] = unified_view(node, 1, checked.array("w"))[
            divmod(filter_, 3)
        ]
        y = run_model(from_text(GROUPED.format(op=op), {"w": weight}), {"x": x})["y"]
        assert [channel for channel in range(6) if y[0, channel].any()] == [filter_]
