"""A network of two convolutions, and its placed model under a plan."""

from __future__ import annotations

import numpy as np
import onnx
from support.layer_graphs import rules

from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Part, Plan
from dicompiler_passes.form_layers import form_layers
from dicompiler_passes.partition import PartitionPass

TEXT = """
<ir_version: 8, opset_import: ["" : %d]>
net (float[1, 4, 8, 6] x) => (float[1, 4, 8, 6] y) {
   [conv1] t = Conv <pads = [1, 1, 1, 1]> (x, w)
   [relu] u = Relu (t)
   [conv2] y = Conv (u, v)
}
"""
WHOLE = {"conv1": (Part("a"),), "conv2": (Part("a"),)}


def network(opset: int = 13) -> Model:
    """Return two convolutions with an activation between them, and small integers as weights."""
    proto = onnx.parser.parse_model(TEXT % opset)
    rng = np.random.default_rng(0)
    for name, shape in (("w", (4, 4, 3, 3)), ("v", (4, 4, 1, 1))):
        values = rng.integers(-2, 3, shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    proto.graph.node[0].doc_string = "the first"
    return Model.load(onnx.shape_inference.infer_shapes(proto))


def place(model: Model, plan: Plan) -> PipelineState:
    """Return the model, rewritten by the plan."""
    return PartitionPass().run(PipelineState(model=model, layers=form_layers(model, rules()), plan=plan))


def rows(device: str, start: int, stop: int) -> Part:
    """Return rows of a layer's output."""
    return Part(device, ((0, 1), (0, 4), (start, stop), (0, 6)))


def marks(node: onnx.NodeProto) -> dict[str, str]:
    """Return the node's metadata."""
    return {entry.key: entry.value for entry in node.metadata_props}
