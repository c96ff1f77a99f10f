"""Every operator has the cost of its closed form, and costs of parts add up to the whole."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from onnx import TensorProto, helper
from support.layer_graphs import rules

from dicompiler.base.errors import PluginError
from dicompiler.cost.layer_kinds import layer_kind
from dicompiler.cost.op_counts import count_flops, count_macs, count_operations
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.operator_rule import OpCost, Operation, OperatorRule, Piece, whole_tensor
from dicompiler.ir.regions import Interval, Region, Shape, full_region, with_interval
from dicompiler.partition.bounds_inference import cuttable_axes, output_shape, reduction_length
from dicompiler.partition.operators import builtin_rules
from dicompiler.plugin.registry import registry, temporarily_registered
from dicompiler_passes.form_layers import form_layers

ORT = "com.microsoft"


@dataclass(frozen=True)
class Node:
    """Node with these shapes of inputs and outputs (None: omitted), and its expected cost."""

    op: str
    inputs: Sequence[Shape | None]
    outputs: Sequence[Shape | None]
    cost: OpCost
    domain: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.domain}{'::' if self.domain else ''}{self.op}"

    def layers(self, known: Any = None) -> LayerGraph:
        """Return a graph with the node as its only layer, with the rules `known` or the built-in ones."""
        ins = {f"x{i}": shape for i, shape in enumerate(self.inputs) if shape is not None}
        outs = {f"y{i}": shape for i, shape in enumerate(self.outputs) if shape is not None}
        names = [f"x{i}" if f"x{i}" in ins else "" for i in range(len(self.inputs))]
        made = [f"y{i}" if f"y{i}" in outs else "" for i in range(len(self.outputs))]
        node = helper.make_node(self.op, names, made, "node", domain=self.domain, **self.attributes)
        values = [
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in named.items()]
            for named in (ins, outs)
        ]
        imports = [helper.make_opsetid("", 23), helper.make_opsetid(ORT, 1), helper.make_opsetid("com.example", 1)]
        proto = helper.make_model(helper.make_graph([node], "one", *values), opset_imports=imports, ir_version=10)
        return form_layers(Model.load(proto), rules() if known is None else known)


def effort(layers: LayerGraph, region: Region | None = None, reduce: Interval | None = None) -> OpCost:
    """Return (multiply-adds, pool FLOP, other FLOP) of a part of the only layer."""
    (layer,) = layers.layers
    counted = count_operations(layers, layer, region, reduce)
    assert counted.multiply_flops == 2 * count_macs(layers, layer, region, reduce)
    assert counted.flops == count_flops(layers, layer, region, reduce)
    return OpCost(counted.multiply_flops // 2, counted.pool_flops, counted.elementwise_flops)


# --- costs of convolutions ------------------------------------------------------------------------------------------

X, W, Y = (1, 64, 56, 56), (64, 64, 3, 3), (1, 64, 56, 56)
LAYER = 64 * 64 * 9 * 56 * 56
PADDED = {"pads": [1, 1, 1, 1]}
ABOUT = ((), ())
"""A scale and a zero point."""


def convolutions(x: Shape, w: Shape, y: Shape, most: int, **attributes: Any) -> list[Node]:
    """Return the same convolution as float and integer operators."""
    quantised = [x, *ABOUT, w, *ABOUT, *ABOUT]
    return [
        Node("Conv", [x, w], [y], OpCost(most), "", attributes),
        Node("ConvInteger", [x, w], [y], OpCost(most), "", attributes),
        Node("QLinearConv", quantised, [y], OpCost(most), "", attributes),
        Node("QLinearConv", quantised, [y], OpCost(most), ORT, attributes),
        Node("FusedConv", [x, w], [y], OpCost(most, 0, math.prod(y)), ORT, attributes | {"activation": "Relu"}),
        Node("FusedConv", [x, w, y[1:2], y], [y], OpCost(most, 0, math.prod(y)), ORT, attributes),
    ]


CONVOLUTIONS = [
    *convolutions(X, W, Y, LAYER, **PADDED),
    *convolutions(X, (64, 16, 3, 3), Y, LAYER // 4, group=4, **PADDED),
    *convolutions(X, (64, 1, 3, 3), Y, LAYER // 64, group=64, **PADDED),
    *convolutions((2, 3, 9), (5, 3, 4), (2, 5, 6), 2 * 5 * 6 * 3 * 4),
    Node("ConvTranspose", [(1, 3, 5, 5), (3, 4, 3, 3)], [(1, 4, 7, 7)], OpCost(3 * 25 * 4 * 9)),
    Node("ConvTransposeWithDynamicPads", [(1, 3, 5, 5), (3, 4, 3, 3)], [(1, 4, 7, 7)], OpCost(3 * 25 * 4 * 9), ORT),
    Node("DeformConv", [(1, 4, 8, 8), (6, 4, 3, 3), (1, 18, 6, 6)], [(1, 6, 6, 6)], OpCost(6 * 36 * 36, 0, 36 * 36)),
]

# --- costs of matrix products ---------------------------------------------------------------------------------------

A, B, C = (5, 7), (7, 3), (5, 3)
PRODUCT = OpCost(5 * 7 * 3)
PRODUCTS = [
    Node("Gemm", [A, B], [C], PRODUCT),
    Node("Gemm", [(7, 5), (3, 7)], [C], PRODUCT, "", {"transA": 1, "transB": 1}),
    Node("MatMul", [A, B], [C], PRODUCT),
    Node("MatMul", [(2, 5, 7), B], [(2, 5, 3)], OpCost(2 * 5 * 7 * 3)),
    Node("MatMulInteger", [A, B], [C], PRODUCT),
    Node("QLinearMatMul", [A, *ABOUT, B, *ABOUT, *ABOUT], [C], PRODUCT),
    Node("QGemm", [A, *ABOUT, B, *ABOUT], [C], PRODUCT, ORT),
    Node("QGemm", [(7, 5), *ABOUT, B, *ABOUT], [C], PRODUCT, ORT, {"transA": 1}),
    Node("DynamicQuantizeMatMul", [A, B, ()], [C], PRODUCT, ORT),
    Node("MatMulIntegerToFloat", [A, B, (), ()], [C], PRODUCT, ORT),
    Node("MatMulNBits", [A, (3, 1, 16), (3,)], [C], PRODUCT, ORT, {"K": 7, "N": 3, "bits": 4, "block_size": 32}),
    Node("FusedMatMul", [(2, 7, 5), (2, 7, 3)], [(2, 5, 3)], OpCost(2 * 5 * 7 * 3), ORT, {"transA": 1}),
    Node("FusedGemm", [A, B, (3,)], [C], PRODUCT._replace(other_flops=15), ORT, {"activation": "Relu"}),
    Node("CDist", [A, (3, 7)], [C], PRODUCT, ORT, {"metric": "euclidean"}),
    Node("Einsum", [A, B], [C], PRODUCT, "", {"equation": "ij,jk->ik"}),
    Node("Einsum", [(2, 4, 5, 8), (2, 6, 4, 8)], [(2, 4, 5, 6)], OpCost(2 * 4 * 5 * 6 * 8), "",
         {"equation": "bhqd,bkhd->bhqk"}),
    Node("Einsum", [(2, 5, 7), (1, 7, 3)], [(2, 5, 3)], OpCost(2 * 5 * 7 * 3), "", {"equation": "...ij,...jk->...ik"}),
    Node("Einsum", [(5,), (5, 7), (7,)], [()], OpCost(35), "", {"equation": "i,ij,j->"}),
    Node("Einsum", [A], [(7, 5)], OpCost(), "", {"equation": "ij->ji"}),
    Node("Einsum", [A], [(5,)], OpCost(pool_flops=35), "", {"equation": "ij->i"}),
    Node("Einsum", [A, A], [A], OpCost(other_flops=35), "", {"equation": "ij,ij->ij"}),
]  # fmt: skip

# --- costs of attention and recurrent operators ---------------------------------------------------------------------

BATCH, HEADS, ROWS, KEYS, SIZE, VALUE, PAST = 2, 4, 5, 6, 8, 3, 7
Q, K, V = (BATCH, HEADS, ROWS, SIZE), (BATCH, HEADS, KEYS, SIZE), (BATCH, HEADS, KEYS, VALUE)


def attended(rows: int, projected: int = 0, value: int = VALUE) -> OpCost:
    """Return the cost of Q Kᵀ, P V and the softmax over `rows` rows of k."""
    scores = BATCH * HEADS * ROWS * rows
    return OpCost(projected + scores * (SIZE + value), 0, scores)


def flat(rows: int, size: int = SIZE, heads: int = HEADS) -> Shape:
    """Return the shape with the heads in the last axis."""
    return (BATCH, rows, heads * size)


MASKS = (None, None, None)
HEADED = {"num_heads": HEADS}
PROJECTED = BATCH * ROWS * 10 * 3 * HEADS * SIZE
ATTENTIONS = [
    Node("Attention", [Q, K, V], [(*Q[:3], VALUE)], attended(KEYS)),
    Node("Attention", [Q, (BATCH, 2, KEYS, SIZE), (BATCH, 2, KEYS, VALUE)], [(*Q[:3], VALUE)], attended(KEYS)),
    Node("Attention", [flat(ROWS), flat(KEYS), flat(KEYS, VALUE)], [flat(ROWS, VALUE)], attended(KEYS), "",
         {"q_num_heads": HEADS, "kv_num_heads": HEADS}),
    Node("Attention", [Q, K, V, None, (BATCH, HEADS, PAST, SIZE), (BATCH, HEADS, PAST, VALUE)],
         [(*Q[:3], VALUE)], attended(KEYS + PAST)),
    Node("MultiHeadAttention", [flat(ROWS), flat(KEYS), flat(KEYS, VALUE)], [flat(ROWS, VALUE)], attended(KEYS), ORT,
         HEADED),
    Node("MultiHeadAttention", [flat(ROWS), K, V], [flat(ROWS, VALUE)], attended(KEYS), ORT, HEADED),
    Node("MultiHeadAttention", [(BATCH, ROWS, HEADS, 3, SIZE)], [flat(ROWS)], attended(ROWS, 0, SIZE), ORT, HEADED),
    Node("MultiHeadAttention", [flat(ROWS), (BATCH, KEYS, HEADS, 2, SIZE)], [flat(ROWS)], attended(KEYS, 0, SIZE), ORT,
         HEADED),
    Node("MultiHeadAttention", [flat(ROWS), flat(KEYS), flat(KEYS), *MASKS, *[(BATCH, HEADS, PAST, SIZE)] * 2],
         [flat(ROWS)], attended(KEYS + PAST, 0, SIZE), ORT, HEADED),
    Node("Attention", [(BATCH, ROWS, 10), (10, 3 * HEADS * SIZE), (3 * HEADS * SIZE,)], [flat(ROWS)],
         attended(ROWS, PROJECTED, SIZE), ORT, HEADED),
    Node("Attention", [(BATCH, ROWS, 10), (10, 76), (76,)], [flat(ROWS, VALUE)],
         attended(ROWS, BATCH * ROWS * 10 * 76), ORT, HEADED | {"qkv_hidden_sizes": [32, 32, 12]}),
    Node("Attention", [(BATCH, ROWS, 10), (10, 96), (96,), None, (2, BATCH, HEADS, PAST, SIZE)], [flat(ROWS)],
         attended(ROWS + PAST, PROJECTED, SIZE), ORT, HEADED),
    Node("QAttention", [(BATCH, ROWS, 10), (10, 96), (96,), (), (), *MASKS, (2, BATCH, HEADS, PAST, SIZE)],
         [flat(ROWS)], attended(ROWS + PAST, PROJECTED, SIZE), ORT, HEADED),
    Node("GroupQueryAttention", [flat(ROWS), flat(ROWS, heads=2), flat(ROWS, heads=2), *[(BATCH, 2, PAST, SIZE)] * 2],
         [flat(ROWS)], attended(ROWS + PAST, 0, SIZE), ORT, HEADED | {"kv_num_heads": 2}),
    Node("GroupQueryAttention", [flat(ROWS, heads=HEADS + 4)], [flat(ROWS)], attended(ROWS, 0, SIZE), ORT,
         HEADED | {"kv_num_heads": 2}),
]  # fmt: skip

STEPS, FEATURES, HIDDEN = 9, 11, 6


def recurrent(op: str, gates: int, directions: int, outputs: Sequence[Shape | None], **more: Any) -> Node:
    """Return the cost of a recurrent layer: each step multiplies the features and the hidden state, for each gate."""
    width, times = gates * HIDDEN, STEPS * BATCH * directions
    cost = OpCost(times * (FEATURES + HIDDEN) * width, 0, times * width)
    inputs = [(STEPS, BATCH, FEATURES), (directions, width, FEATURES), (directions, width, HIDDEN)]
    return Node(op, inputs, outputs, cost, "", {"hidden_size": HIDDEN, **more})


TWO_WAYS = {"direction": "bidirectional"}
RECURRENT = [
    recurrent("RNN", 1, 1, [(STEPS, 1, BATCH, HIDDEN)]),
    recurrent("GRU", 3, 1, [(STEPS, 1, BATCH, HIDDEN)]),
    recurrent("LSTM", 4, 1, [(STEPS, 1, BATCH, HIDDEN)]),
    recurrent("LSTM", 4, 2, [(STEPS, 2, BATCH, HIDDEN)], **TWO_WAYS),
    recurrent("LSTM", 4, 2, [None, (2, BATCH, HIDDEN)], **TWO_WAYS),
    Node("DynamicQuantizeLSTM", [(STEPS, BATCH, FEATURES), (1, FEATURES, 4 * HIDDEN), (1, HIDDEN, 4 * HIDDEN)],
         [(STEPS, 1, BATCH, HIDDEN)], recurrent("LSTM", 4, 1, []).cost, ORT, {"hidden_size": HIDDEN}),
]  # fmt: skip

# --- costs of pools, normalisations, and operators that only move data ----------------------------------------------

IMAGE, POOLED = (1, 4, 8, 8), (1, 4, 4, 4)
WINDOW = {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 0, 0]}
ONE = (1, 4, 1, 1)
EACH = OpCost(other_flops=256)
WINDOW_COST, MAP_COST = OpCost(pool_flops=64 * 6), OpCost(pool_flops=256)
OTHERS = [
    *(Node(op, [IMAGE], [POOLED], WINDOW_COST, "", WINDOW) for op in ("MaxPool", "AveragePool", "LpPool")),
    Node("QLinearAveragePool", [IMAGE, *ABOUT, *ABOUT], [POOLED], OpCost(pool_flops=64 * 6), ORT, WINDOW),
    Node("NhwcMaxPool", [(1, 8, 8, 4)], [(1, 4, 4, 4)], OpCost(pool_flops=64 * 6), ORT, WINDOW),
    *(Node(op, [IMAGE], [ONE], MAP_COST) for op in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")),
    Node("QLinearGlobalAveragePool", [IMAGE, *ABOUT, *ABOUT], [ONE], OpCost(pool_flops=256), ORT),
    Node("ReduceMax", [IMAGE], [(1, 1, 1, 1)], OpCost(pool_flops=256)),
    Node("ArgMax", [IMAGE], [(1, 1, 8, 8)], OpCost(pool_flops=256), "", {"axis": 1}),
    Node("TopK", [IMAGE, (1,)], [(1, 4, 8, 3), (1, 4, 8, 3)], OpCost(pool_flops=256)),
    Node("LRN", [IMAGE], [IMAGE], OpCost(other_flops=256 * 5), "", {"size": 5}),
    *(Node(op, [IMAGE], [IMAGE], EACH) for op in ("Relu", "Softmax", "LpNormalization")),
    Node("CumSum", [IMAGE, ()], [IMAGE], EACH),
    Node("Add", [IMAGE, ONE], [IMAGE], EACH),
    Node("LayerNormalization", [IMAGE, (8,), (8,)], [IMAGE], EACH),
    Node("SimplifiedLayerNormalization", [IMAGE, (8,)], [IMAGE], EACH),
    Node("BatchNormalization", [IMAGE, *[(4,)] * 4], [IMAGE], EACH),
    Node("GroupNormalization", [IMAGE, (4,), (4,)], [IMAGE], EACH, "", {"num_groups": 2}),
    *(Node(op, [IMAGE, *ABOUT, IMAGE, *ABOUT, *ABOUT], [IMAGE], EACH, ORT) for op in ("QLinearAdd", "QLinearMul")),
    *(Node(f"QLinear{op}", [IMAGE, *ABOUT, *ABOUT], [IMAGE], EACH, ORT) for op in ("Sigmoid", "LeakyRelu", "Softmax")),
    Node(
        "QLinearConcat",
        [*ABOUT, IMAGE, *ABOUT, IMAGE, *ABOUT],
        [(1, 8, 8, 8)],
        OpCost(other_flops=512),
        ORT,
        {"axis": 1},
    ),
    *(Node(op, [IMAGE, *ABOUT], [IMAGE], EACH) for op in ("QuantizeLinear", "DequantizeLinear")),
    Node("SkipLayerNormalization", [(2, 3, 8), (2, 3, 8), (8,), (8,)], [(2, 3, 8)], OpCost(other_flops=2 * 48), ORT),
    Node("SkipLayerNormalization", [(2, 3, 8), (2, 3, 8), *[(8,)] * 3], [(2, 3, 8)], OpCost(other_flops=3 * 48), ORT),
    Node(
        "SkipSimplifiedLayerNormalization", [(2, 3, 8), (2, 3, 8), (8,)], [(2, 3, 8)], OpCost(other_flops=2 * 48), ORT
    ),
    Node("EmbedLayerNormalization", [(2, 3), None, (30, 8), (9, 8), None, (8,), (8,)], [(2, 3, 8)],
         OpCost(other_flops=2 * 48), ORT),
    Node("EmbedLayerNormalization", [(2, 3), (2, 3), (30, 8), (9, 8), (2, 8), (8,), (8,)], [(2, 3, 8)],
         OpCost(other_flops=3 * 48), ORT),
    *(Node(op, [IMAGE, (2,)], [(1, 256)], OpCost()) for op in ("Reshape", "Squeeze", "Gather", "Slice")),
    Node("Expand", [(1, 1), (2,)], [(1, 256)], OpCost()),
    *(Node(op, [IMAGE], [IMAGE], OpCost()) for op in ("Identity", "Cast", "BitCast", "Dropout", "Transpose")),
    Node("ScatterND", [IMAGE, (2, 4), (2,)], [IMAGE], OpCost()),
    Node("Split", [IMAGE], [(1, 2, 8, 8), (1, 2, 8, 8)], OpCost(), "", {"axis": 1, "num_outputs": 2}),
]  # fmt: skip

MAP, LARGER = (1, 3, 8, 8), (1, 3, 16, 16)
RESAMPLED = [
    Node("Resize", [MAP, None, (4,)], [LARGER], OpCost(other_flops=3 * 16 * 16)),
    Node(
        "Resize", [MAP, None, (4,)], [LARGER], OpCost(other_flops=3 * 16 * 16 * 2 * 2**2), attributes={"mode": "linear"}
    ),
    Node(
        "Resize", [MAP, None, (4,)], [LARGER], OpCost(other_flops=3 * 16 * 16 * 2 * 4**2), attributes={"mode": "cubic"}
    ),
    Node(
        "Resize",
        [MAP, None, (4,)],
        [(1, 3, 8, 16)],
        OpCost(other_flops=3 * 8 * 16 * 2 * 2),
        attributes={"mode": "linear"},
    ),
    Node("GridSample", [MAP, (1, 5, 6, 2)], [(1, 3, 5, 6)], OpCost(other_flops=3 * 5 * 6 * 2 * 2**2)),
]
TRANSFORMED = [
    Node("DFT", [(2, 64, 1)], [(2, 64, 2)], OpCost(other_flops=2 * 64 * 5 * 6)),
    Node("STFT", [(1, 160, 1), (), None, ()], [(1, 4, 33, 2)], OpCost(other_flops=4 * 33 * 5 * 6)),
    Node("MoE", [(10, 16), (10, 4), (4, 16, 32), (4, 32), (4, 32, 16)], [(10, 16)], OpCost(10 * 2 * 2 * 16 * 32), ORT,
         {"k": 2}),
    Node("SparseAttention", [flat(ROWS), *[flat(ROWS, heads=2)] * 2, *[(BATCH, 2, PAST, SIZE)] * 2, (1, 3), (1, 4)],
         [flat(ROWS)], attended(ROWS + PAST, 0, SIZE), ORT, HEADED | {"kv_num_heads": 2}),
]  # fmt: skip

NODES = (*CONVOLUTIONS, *PRODUCTS, *ATTENTIONS, *RECURRENT, *OTHERS, *RESAMPLED, *TRANSFORMED)
ELSEWHERE = "dicompiler.partition.operators.onnx_ml"
"""tests/partition/operators/test_onnx_ml.py has the closed forms of these."""
COSTLY = [node for node in NODES if node.cost != OpCost()]


@pytest.mark.parametrize("node", NODES, ids=str)
def test_node_costs_match_closed_forms(node: Node) -> None:
    assert effort(node.layers()) == node.cost


def test_integer_layers_cost_as_much_as_float_layers() -> None:
    float_, *integers = CONVOLUTIONS[:3]
    assert effort(float_.layers()).multiply_adds == 115_605_504
    assert {effort(node.layers()).multiply_adds for node in integers} == {115_605_504}


def test_every_cost_function_is_tested() -> None:
    ways = {
        # If a rule's cost is a functools.partial, this is the function that the partial calls.
        (rule.domain, rule.op): getattr(rule.cost, "func", rule.cost)
        for rule in builtin_rules()
    }
    counted = {way for way in ways.values() if way.__module__ != ELSEWHERE}
    assert counted == {ways[node.domain, node.op] for node in NODES if (node.domain, node.op) in ways}


# --- costs of the parts of a layer ----------------------------------------------------------------------------------


def axes(node: Node) -> tuple[int, ...]:
    """Return the axes along which parts do not overlap; inputs of a transposed convolution overlap in space."""
    layers = node.layers()
    (layer,) = layers.layers
    return tuple(axis for axis in cuttable_axes(layers, layer) if node.op != "ConvTranspose" or axis < 2)


def halves(extent: int) -> list[Interval]:
    return [(0, extent // 2), (extent // 2, extent)]


def together(efforts: Sequence[OpCost]) -> OpCost:
    return OpCost(*map(sum, zip(*efforts, strict=True)))


@pytest.mark.parametrize(("node", "axis"), [(node, axis) for node in COSTLY for axis in axes(node)], ids=str)
def test_costs_of_tiles_add_up_to_the_whole(node: Node, axis: int) -> None:
    layers = node.layers()
    everything = full_region(output_shape(layers, layers.layers[0]))
    tiles = [with_interval(everything, axis, cut) for cut in halves(everything[axis][1])]
    assert together([effort(layers, tile) for tile in tiles]) == node.cost


def reduced(node: Node) -> int:
    """Return the length of the axis that LIP cuts; 0 if there is none."""
    layers = node.layers()
    return reduction_length(layers, layers.layers[0]) or 0


@pytest.mark.parametrize("node", [node for node in COSTLY if reduced(node)], ids=str)
def test_costs_of_reduction_ranges_add_up_to_the_whole(node: Node) -> None:
    layers = node.layers()
    assert together([effort(layers, None, cut) for cut in halves(reduced(node))]) == node.cost


@pytest.mark.parametrize(
    ("kernel", "stride", "share"), [((1, 1), (2, 2), 0.25), ((3, 3), (2, 2), 1.0), ((1, 3), (2, 4), 0.375)]
)
def test_integer_convolutions_have_the_same_read_share(
    kernel: tuple[int, int], stride: tuple[int, int], share: float
) -> None:
    nodes = convolutions((1, 4, 9, 9), (4, 4, *kernel), (1, 4, 4, 4), 0, strides=stride)[:3]
    nodes.append(
        Node("MaxPool", [(1, 4, 9, 9)], [(1, 4, 4, 4)], OpCost(), "", {"kernel_shape": kernel, "strides": stride})
    )
    for layers in (node.layers() for node in nodes):
        (node,) = layers.layers[0].nodes
        reads = layers.rule_of(node).read_share
        assert reads is not None and reads(layers.operation_of(node)) == share


def test_counted_operators_stay_whole() -> None:
    (layer,) = TRANSFORMED[0].layers().layers
    assert layer.whole_reason == "operator DFT has no rule"
    assert not any(rule.is_elementwise or rule.reduction_length for rule in builtin_rules() if not rule.can_cut)


def test_grouped_integer_convolutions_have_their_own_kind() -> None:
    kinds = [layer_kind(node.layers().layers[0]) for node in CONVOLUTIONS[:9]]
    assert kinds[:3] == ["Conv", "ConvInteger", "QLinearConv"]
    assert kinds[6:9] == ["GroupConv", "GroupConvInteger", "GroupQLinearConv"]


def test_rules_can_be_pickled() -> None:
    for rule in builtin_rules():
        assert pickle.loads(pickle.dumps(rule)).op == rule.op


# --- costs of a plugin's operator rule ------------------------------------------------------------------------------


def twice(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:  # noqa: ARG001
    """Return the cost of two multiplications per element that is read."""
    return OpCost(multiply_adds=2 * math.prod(needs[0]))


def rows(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    return Piece(region, (region,))


SCAN = Node("Acme", [(4, 6)], [(4, 6)], OpCost(48), "com.example")


def counted_by(rule: OperatorRule) -> LayerGraph:
    """Return the layers of SCAN with this rule."""
    with temporarily_registered(rule):
        provided = registry().operators.values()
        return SCAN.layers({(each.value.domain, each.value.op): each.value for each in provided})


def test_plugin_rules_define_costs() -> None:
    layers = counted_by(OperatorRule("Acme", rows, "com.example", cost=twice))
    assert effort(layers) == SCAN.cost
    assert effort(layers, ((0, 1), (0, 6))) == OpCost(12)


def test_plugin_rules_can_define_only_costs() -> None:
    layers = counted_by(OperatorRule("Acme", whole_tensor, "com.example", cost=twice))
    assert layers.layers[0].whole_reason == "operator com.example::Acme has no rule"
    assert effort(layers) == SCAN.cost


def test_default_cost_is_one_flop_per_element() -> None:
    assert effort(counted_by(OperatorRule("Acme", rows, "com.example"))) == OpCost(other_flops=24)


@pytest.mark.parametrize("wrong", [None, 7, OpCost(-1), OpCost(0.5)])  # type: ignore[arg-type]
def test_invalid_costs_are_plugin_errors(wrong: Any) -> None:
    layers = counted_by(OperatorRule("Acme", rows, "com.example", cost=lambda *_: wrong))
    with pytest.raises(PluginError, match=r"rule 'com.example::Acme' of plugin .*, for node 'node': its cost is"):
        effort(layers)
