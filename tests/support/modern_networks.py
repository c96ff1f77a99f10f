"""Modern kinds of networks, tiny and with seeded weights, node by node as exporters write them.

MODERN: name → function that builds the network. Each can be compiled and verified in a second or two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from support import modern_transformers as tf
from support.modern_net import FLOAT, INT, ML, Net


def yolo(nms: bool = True) -> onnx.ModelProto:
    """C2f blocks, SPPF, a neck, heads with distributions of distances (DFL), and non-maximum suppression."""
    net = Net()

    def cbs(x: str, channels: int, out: int, size: int = 1, stride: int = 1) -> str:
        return net.silu(net.conv(x, channels, out, (size, size), strides=[stride] * 2, pads=[size // 2] * 4))

    def c2f(x: str, channels: int, out: int) -> str:
        net.op("Split", cbs(x, channels, out), net.ints(out // 2, out // 2), axis=1, outputs=2)
        left, right = net.nodes[-1].output
        y = net.op("Add", right, cbs(cbs(right, out // 2, out // 2, 3), out // 2, out // 2, 3))
        return cbs(net.op("Concat", left, right, y, axis=1), 3 * out // 2, out)

    x = c2f(cbs(net.input("images", (1, 3, 32, 32)), 3, 8, 3, 2), 8, 8)
    small = c2f(cbs(x, 8, 16, 3, 2), 16, 16)
    pools = [cbs(cbs(small, 16, 16, 3, 2), 16, 8)]
    for _ in range(3):
        pools.append(net.op("MaxPool", pools[-1], kernel_shape=[5, 5], pads=[2] * 4))
    deep = cbs(net.op("Concat", *pools, axis=1), 32, 16)
    up = net.op("Resize", deep, "", net.const([1, 1, 2, 2]), mode="nearest", nearest_mode="floor")
    up = c2f(net.op("Concat", up, small, axis=1), 32, 16)
    rows = []
    for head, side in ((up, 8), (deep, 4)):
        boxes = net.conv(cbs(head, 16, 16, 3), 16, 16, (1, 1))
        classes = net.conv(cbs(head, 16, 16, 3), 16, 3, (1, 1))
        both = net.op("Concat", boxes, classes, axis=1)
        rows.append(net.op("Reshape", both, net.ints(1, 19, side * side)))
    net.op("Split", net.op("Concat", *rows, axis=2), net.ints(16, 3), axis=1, outputs=2)
    boxes, scores = net.nodes[-1].output
    spread = net.op("Transpose", net.op("Reshape", boxes, net.ints(1, 4, 4, 80)), perm=[0, 2, 1, 3])
    spread = net.op("Softmax", spread, axis=1)
    far = net.op("Conv", spread, net.const(np.arange(4).reshape(1, 4, 1, 1)))
    far = net.op("Reshape", far, net.ints(1, 4, 80))
    low, high = (net.op("Slice", far, net.ints(a), net.ints(a + 2), net.ints(1)) for a in (0, 2))
    anchors = net.const(net.random.random((1, 2, 80)))
    low, high = net.op("Sub", anchors, low), net.op("Add", anchors, high)
    centre = net.op("Div", net.op("Add", low, high), net.const(2.0))
    found = net.op("Concat", centre, net.op("Sub", high, low), axis=1)
    found, scores = net.op("Mul", found, net.const(np.full((1, 80), 8.0))), net.op("Sigmoid", scores)
    if not nms:
        return net.model(net.op("Concat", found, scores, axis=1))
    found = net.op("Transpose", found, perm=[0, 2, 1])
    limits = net.ints(20), net.const([0.5], np.float32), net.const([0.25], np.float32)
    chosen = net.op("NonMaxSuppression", found, scores, *limits, center_point_box=1)
    places = net.op("Gather", chosen, net.const(2, np.int64), axis=1)
    return net.model(net.op("Gather", found, places, axis=1), chosen)


def speech(kind: str = "LSTM") -> onnx.ModelProto:
    """Convolutions with strides over frequencies only, then a recurrent layer in both directions."""
    net = Net()
    x = net.input("features", (1, 1, 32, 24))
    x = net.op("Relu", net.conv(x, 1, 8, (3, 3), strides=[2, 1], pads=[1] * 4))
    x = net.op("Relu", net.conv(x, 8, 8, (3, 3), strides=[2, 1], pads=[1] * 4))
    x = net.op("Reshape", net.op("Transpose", x, perm=[3, 0, 1, 2]), net.ints(24, 1, 64))
    gates, hidden = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], 12
    weights = [net.weight(2, gates * hidden, n) for n in (64, hidden)] + [net.weight(2, 2 * gates * hidden)]
    y = net.op(kind, x, *weights, direction="bidirectional", hidden_size=hidden, outputs=2)
    y = net.op("Reshape", net.op("Transpose", y, perm=[0, 2, 1, 3]), net.ints(24, 1, 24))
    return net.model(net.op("LogSoftmax", net.linear(y, 24, 11), axis=-1))


def faster_rcnn() -> onnx.ModelProto:
    """Reshape by an input shape, regions of interest, suppression, and a head on each region."""
    net = Net()
    x = net.op("Relu", net.conv(net.input("image", (1, 3, 32, 32)), 3, 8, (3, 3), strides=[4, 4], pads=[1] * 4))
    boxes = net.conv(x, 8, 4, (1, 1))
    shape = net.input("shape", (3,), INT)
    boxes = net.op("Reshape", boxes, shape)
    scores = net.op("Reshape", net.op("Sigmoid", net.conv(x, 8, 1, (1, 1))), net.ints(1, 1, 64))
    limits = net.ints(8), net.const([0.7], np.float32), net.const([0.0], np.float32)
    boxes = net.op("Reshape", boxes, net.ints(1, 64, 4))
    chosen = net.op("NonMaxSuppression", boxes, scores, *limits)
    places = net.op("Gather", chosen, net.const(2, np.int64), axis=1)
    rois = net.op("Gather", net.op("Reshape", boxes, net.ints(64, 4)), places, axis=0)
    first = net.op("Mul", places, net.const(0, np.int64))
    crops = net.op("RoiAlign", x, rois, first, output_height=3, output_width=3, sampling_ratio=2)
    return net.model(net.linear(net.op("Flatten", crops), 72, 5), net.op("Exp", net.conv(x, 8, 4, (3, 3))))


def quantised() -> onnx.ModelProto:
    """A network in QDQ form: integer weights with one scale for each filter."""
    net = Net()

    def qdq(x: str, scale: float) -> str:
        about = net.const(scale), net.const(128, np.uint8)
        return net.op("DequantizeLinear", net.op("QuantizeLinear", x, *about), *about)

    def weight(*shape: int) -> str:
        values = net.const(net.random.integers(-127, 128, shape), np.int8)
        about = net.const(net.random.random(shape[0]) / 200 + 1e-4), net.const(np.zeros(shape[0]), np.int8)
        return net.op("DequantizeLinear", values, *about, axis=0)

    x, channels = qdq(net.input("image", (1, 3, 16, 16)), 0.02), 3
    for out, stride in ((16, 2), (16, 1), (32, 2)):
        bias = net.op("DequantizeLinear", net.const(net.random.integers(-99, 99, out), np.int32), net.const(1e-3))
        y = net.op("Conv", x, weight(out, channels, 3, 3), bias, strides=[stride] * 2, pads=[1] * 4)
        y = qdq(net.op("Relu", y), 0.05)
        x = qdq(net.op("Add", x, y), 0.07) if out == channels else y
        channels = out
    x = qdq(net.op("Flatten", net.op("GlobalAveragePool", x)), 0.03)
    return net.model(net.op("Gemm", x, weight(10, 32), net.weight(10), transB=1))


def dynamically_quantised() -> onnx.ModelProto:
    net = Net()
    x = net.input("x", (6, 32))
    for _ in range(2):
        net.op("DynamicQuantizeLinear", x, outputs=3)
        q, scale, zero = net.nodes[-1].output
        w = net.const(net.random.integers(-127, 128, (32, 32)), np.int8)
        y = net.op("Cast", net.op("MatMulInteger", q, w, zero), to=FLOAT)
        x = net.op("Add", net.op("Mul", y, net.op("Mul", scale, net.const(0.01))), net.weight(32))
        x = net.op("Relu", x)
    return net.model(x)


def video() -> onnx.ModelProto:
    """Convolutions and pools over time, rows and columns."""
    net = Net()
    x = net.op("Relu", net.conv(net.input("clip", (1, 3, 8, 16, 16)), 3, 8, (3, 3, 3), pads=[1] * 6))
    x = net.op("MaxPool", x, kernel_shape=[2, 2, 2], strides=[2, 2, 2])
    x = net.op("Relu", net.conv(x, 8, 16, (3, 1, 1), pads=[1, 0, 0, 1, 0, 0], strides=[2, 1, 1]))
    x = net.op("AveragePool", x, kernel_shape=[1, 3, 3], pads=[0, 1, 1, 0, 1, 1])
    x = net.op("ConvTranspose", x, net.weight(16, 8, 1, 2, 2), strides=[1, 2, 2])
    return net.model(net.op("Gemm", net.op("Flatten", net.op("GlobalAveragePool", x)), net.weight(8, 5), net.weight(5)))


def durations() -> onnx.ModelProto:
    """1-D convolutions with dilation, and cumulative sums in both directions."""
    net = Net()
    x = net.input("phones", (1, 16, 20))
    for dilation in (1, 2, 4):
        y = net.conv(x, 16, 16, (3,), pads=[dilation] * 2, dilations=[dilation])
        x = net.op("Add", x, net.op("Mul", net.op("Tanh", y), net.op("Sigmoid", y)))
    y = net.op("Softplus", net.conv(x, 16, 1, (1,)))
    ends = net.op("CumSum", y, net.const(2, np.int64))
    back = net.op("CumSum", net.op("Exp", y), net.const(-1, np.int64), exclusive=1, reverse=1)
    return net.model(net.op("Mul", x, net.op("Sub", ends, back)))


def resizing() -> onnx.ModelProto:
    net = Net()
    x = net.conv(net.input("image", (1, 3, 12, 12)), 3, 8, (3, 3), pads=[1] * 4)
    for mode, factor in (("linear", 2), ("cubic", 2), ("linear", 3)):
        y = net.op("Resize", x, "", net.const([1, 1, factor, factor]), mode=mode)
        x = net.op("Relu", net.conv(y, 8, 8, (3, 3), pads=[1] * 4, strides=[factor] * 2))
    corners = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    y = net.op("Resize", x, "", "", net.ints(1, 8, 30, 30), **corners)
    return net.model(net.conv(y, 8, 2, (1, 1)))


def gelus() -> onnx.ModelProto:
    net = Net(20)
    x = net.input("x", (1, 6, 32))
    for form in ("erf", "tanh", "op"):
        x = net.op("Add", x, net.gelu(net.linear(net.layer_norm(x, 32, "op"), 32, 32), form))
    for op in ("Mish", "HardSwish", "Elu", "Selu", "Softsign"):
        x = net.op(op, net.linear(x, 32, 32))
    return net.model(x)


def control() -> onnx.ModelProto:
    """A branch and a loop between convolutions."""
    net = Net()
    x = net.conv(net.input("x", (1, 4, 8, 8)), 4, 4, (3, 3), pads=[1] * 4)
    result = helper.make_tensor_value_info("out", FLOAT, (1, 4, 8, 8))
    branch = [helper.make_graph([helper.make_node(op, [x], ["out"])], op, [], [result]) for op in ("Sigmoid", "Exp")]
    big = net.op("Greater", net.op("ReduceMax", x, keepdims=0), net.const(0.5))
    x = net.op("Add", net.op("If", big, then_branch=branch[0], else_branch=branch[1]), x)
    return net.model(net.conv(x, 4, 4, (3, 3), pads=[1] * 4))


# --- networks as converters of scikit-learn models write them -------------------------------------------------------


def _trees(count: int, classes: int, classifier: bool) -> dict[str, Any]:
    """Return `count` trees of three inner nodes and four leaves."""
    random, kind = np.random.default_rng(1), "class" if classifier else "target"
    modes = ["BRANCH_LEQ"] * 3 + ["LEAF"] * 4
    leaves = [(tree, leaf, c) for tree in range(count) for leaf in range(3, 7) for c in range(classes)]
    return {
        "nodes_treeids": [tree for tree in range(count) for _ in range(7)],
        "nodes_nodeids": list(range(7)) * count,
        "nodes_featureids": [int(i) for i in random.integers(0, 6, 7 * count)],
        "nodes_modes": modes * count,
        "nodes_values": [float(v) for v in random.standard_normal(7 * count)],
        "nodes_truenodeids": [1, 3, 5, 0, 0, 0, 0] * count,
        "nodes_falsenodeids": [2, 4, 6, 0, 0, 0, 0] * count,
        f"{kind}_treeids": [tree for tree, _, _ in leaves],
        f"{kind}_nodeids": [leaf for _, leaf, _ in leaves],
        f"{kind}_ids": [c for _, _, c in leaves],
        f"{kind}_weights": [float(v) for v in random.random(len(leaves)) / count],
    }


def forest(rows: int = 8) -> onnx.ModelProto:
    """A scaler, a classifying forest, and probabilities as a sequence of maps."""
    net = Net()
    x = net.input("x", (rows, 6))
    x = net.op("Scaler", x, domain=ML, offset=[0.1] * 6, scale=[1.7] * 6)
    trees = {**_trees(5, 3, True), "post_transform": "NONE", "classlabels_int64s": [0, 1, 2]}
    label = net.op("TreeEnsembleClassifier", x, domain=ML, outputs=2, **trees)
    maps = net.op("ZipMap", f"{label}_1", domain=ML, classlabels_int64s=[0, 1, 2])
    scores = helper.make_map_type_proto(INT, helper.make_tensor_type_proto(FLOAT, []))
    types = [helper.make_tensor_value_info(label, INT, (rows,))]
    types.append(helper.make_value_info(maps, helper.make_sequence_type_proto(scores)))
    return net.model(types=types)


def regression(rows: int = 8) -> onnx.ModelProto:
    """A scaler, a normalizer, and the sum of a forest and a linear model."""
    net = Net()
    x = net.op("Scaler", net.input("x", (rows, 6)), domain=ML, offset=[0.1] * 6, scale=[1.7] * 6)
    trees = net.op("TreeEnsembleRegressor", x, domain=ML, n_targets=2, **_trees(5, 2, False))
    unit = net.op("Normalizer", x, domain=ML, norm="L2")
    weights = {"coefficients": [0.3 * i for i in range(12)], "intercepts": [0.5, -0.25], "targets": 2}
    line = net.op("LinearRegressor", unit, domain=ML, **weights)
    y = net.op("Add", trees, line)
    return net.model(types=[helper.make_tensor_value_info(y, FLOAT, (rows, 2))])


def classification(rows: int = 8) -> onnx.ModelProto:
    """Imputed values and a linear classifier with string labels."""
    net = Net()
    x = net.input("x", (rows, 4))
    x = net.op("Imputer", x, domain=ML, imputed_value_floats=[0.5] * 4, replaced_value_float=float("nan"))
    weights = {"coefficients": [0.3 * i - 1 for i in range(12)], "intercepts": [0.5, -0.25, 0.1]}
    labels = {"classlabels_strings": ["a", "b", "c"], "post_transform": "SOFTMAX", "multi_class": 1}
    label = net.op("LinearClassifier", x, domain=ML, outputs=2, **weights, **labels)
    types = [helper.make_tensor_value_info(label, TensorProto.STRING, (rows,))]
    return net.model(types=[*types, helper.make_tensor_value_info(f"{label}_1", FLOAT, (rows, 3))])


def unsorted() -> onnx.ModelProto:
    """A network with its last nodes first, as some converters to float16 write it."""
    proto = yolo(False)
    nodes = list(proto.graph.node)[::-1]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto


MODERN: dict[str, Callable[[], onnx.ModelProto]] = {
    "bert": tf.bert,
    "bert-float16": lambda: tf.bert(np.float16),
    "bert-fused": tf.bert_fused,
    "classification": classification,
    "control": control,
    "durations": durations,
    "dynamically-quantised": dynamically_quantised,
    "faster-rcnn": faster_rcnn,
    "forest": forest,
    "gelus": gelus,
    "genai": tf.genai,
    "genai-packed": lambda: tf.genai(packed=True),
    "gpt2": tf.gpt2,
    "gpt2-cache": lambda: tf.gpt2(7),
    "llama": tf.llama,
    "llama-cache": lambda: tf.llama(7),
    "llama-fused": tf.llama_fused,
    "quantised": quantised,
    "regression": regression,
    "resizing": resizing,
    "segformer": tf.segformer,
    "speech-gru": lambda: speech("GRU"),
    "speech-lstm": speech,
    "speech-rnn": lambda: speech("RNN"),
    "t5": tf.t5,
    "unsorted": unsorted,
    "video": video,
    "vit": tf.vit,
    "wav2vec2": tf.wav2vec2,
    "whisper": tf.whisper,
    "yolo": lambda: yolo(False),
    "yolo-nms": yolo,
}
