"""Every combination of window and resampling attributes computes what onnxruntime computes, whole and split."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.backend_models import outcome
from support.window_cases import DRAWS, make_case, window_case

import dicompiler
from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Part, Plan
from dicompiler.verify.executor import run_model

CASES = 60
"""Seeds of each operator. onnxruntime refuses about a third of the models."""


@pytest.mark.parametrize("op", DRAWS)
def test_drawn_attributes_compute_same_as_onnxruntime(op: str) -> None:
    found = [outcome(window_case(op, seed), randoms=1) for seed in range(CASES)]
    assert [(o.case.name, o.why) for o in found if o.result in ("wrong", "crash", "refused")] == []
    assert Counter(o.result for o in found)["split"] > CASES / 3


def test_device_can_slice_output_of_whole_node(tmp_path: Path) -> None:
    """Targets infer the shapes of a segment as ONNX does, to copy its inputs and outputs themselves."""
    values = (np.ones((1, 2, 13, 13), np.float32), np.ones((2, 2, 3, 3), np.float32))
    attributes = {"auto_pad": "SAME_UPPER", "strides": [2, 2], "output_padding": [1, 1]}
    model = make_case("", "ConvTranspose", values, attributes).model
    model.graph.node[2].CopyFrom(onnx.helper.make_node("MaxPool", ["b"], ["y"], "after", kernel_shape=[2, 2]))
    halves = (Part("pi01", ((0, 1), (0, 2), (0, 12), (0, 25))), Part("pi02", ((0, 1), (0, 2), (12, 25), (0, 25))))
    plan = Plan({"before": (Part("pi01"),), "node": (Part("pi01"),), "after": halves}, ("pi01",), ("pi01",))
    assert dicompiler.compile(model, "rpi4x2", plan=plan, output=tmp_path / "build").verify().passed


X, FILTER = np.ones((1, 2, 13, 13), np.float32), np.ones((2, 2, 3, 3), np.float32)


@pytest.mark.parametrize(
    ("op", "values", "attributes", "opset"),
    [
        ("ConvTranspose", (X, FILTER), {"auto_pad": "SAME_UPPER", "strides": [2, 2], "output_padding": [1, 1]}, 17),
        ("ConvTranspose", (X, FILTER), {"strides": [2, 2], "output_shape": [11, 20]}, 17),
        ("MaxPool", (X,), {"kernel_shape": [3, 3], "dilations": [2, 2], "auto_pad": "SAME_LOWER"}, 17),
        ("MaxPool", (X,), {"kernel_shape": [1, 1], "strides": [5, 5], "ceil_mode": 1}, 17),
        ("AveragePool", (X,), {"kernel_shape": [2, 2], "auto_pad": "VALID", "pads": [1, 1, 1, 1]}, 17),
        ("AveragePool", (X,), {"kernel_shape": [2, 2], "strides": [1, 4], "ceil_mode": 1}, 19),
        ("LpPool", (X,), {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER", "dilations": [2, 3]}, 18),
        (
            "Resize",
            (X, None, None, np.array([26, 39])),
            {"axes": [2, -1], "keep_aspect_ratio_policy": "not_larger"},
            18,
        ),
    ],
)
def test_infers_shape_that_onnxruntime_computes(op: str, values: Any, attributes: dict[str, Any], opset: int) -> None:
    case = make_case(op, op, values, attributes, opset)
    model = prepare(Model.load(case.model)).model
    assert case.inputs is not None
    assert model.tensors()["b"].shape == model.tensors()["y"].shape == run_model(model, case.inputs)["y"].shape
