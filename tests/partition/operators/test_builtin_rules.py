"""Every rule has a test, and every element-wise operator of the standard has a rule."""

from __future__ import annotations

import onnx

from dicompiler.partition.operators import builtin_rules
from dicompiler.partition.operators.elementwise import BROADCASTING_OPERATORS, ORT_OPERATORS, UNARY_OPERATORS
from dicompiler.partition.operators.reductions import MERGE_OPERATORS, UNMERGEABLE_REDUCTIONS

TESTED = {
    *"Conv ConvTranspose MaxPool AveragePool LpPool GlobalAveragePool GlobalMaxPool GlobalLpPool Gemm MatMul".split(),
    *"Einsum Attention LRN Softmax LogSoftmax Hardmax BatchNormalization InstanceNormalization".split(),
    *"GroupNormalization LayerNormalization RMSNormalization MeanVarianceNormalization LpNormalization".split(),
    *"CumSum CumProd TopK ArgMax ArgMin Reshape Flatten Squeeze Unsqueeze Transpose Concat Slice Pad Trilu".split(),
    *"Expand Tile Gather GatherElements DepthToSpace SpaceToDepth Resize Upsample CastLike BitCast Dropout".split(),
    *"SimplifiedLayerNormalization RotaryEmbedding ScatterND ScatterElements GridSample RNN GRU LSTM".split(),
    *"QuantizeLinear DequantizeLinear ConvInteger QLinearConv MatMulInteger QLinearMatMul".split(),
}
"""By hand-written cases; the element-wise operators and the reductions are tested by enumeration."""
FUSED = {
    *"MultiHeadAttention GroupQueryAttention RotaryEmbedding MatMulNBits".split(),
    *"SkipLayerNormalization SkipSimplifiedLayerNormalization".split(),
}
"""Of onnxruntime's own domain."""
SAMPLES = {
    *"Scaler Imputer Normalizer Binarizer LabelEncoder LinearClassifier LinearRegressor".split(),
    *"TreeEnsembleClassifier TreeEnsembleRegressor".split(),
}
NOT_RUN = {"SwiGLU"}
"""Element-wise operators that are newer than onnxruntime."""


def test_every_rule_is_tested() -> None:
    rules = [rule for rule in builtin_rules() if rule.can_cut]
    assert {rule.op for rule in rules if not rule.domain} == {
        *TESTED,
        *UNARY_OPERATORS,
        *BROADCASTING_OPERATORS,
        *MERGE_OPERATORS,
        *UNMERGEABLE_REDUCTIONS,
    }
    assert {rule.op for rule in rules if rule.domain} == {*ORT_OPERATORS, *FUSED, *SAMPLES}


def test_operators_have_at_most_one_rule() -> None:
    keys = [(rule.domain, rule.op) for rule in builtin_rules()]
    assert len(keys) == len(set(keys))


def test_every_unary_function_has_a_rule() -> None:
    """Unary functions have one input and one output of the same type, and their shape inference copies the shape."""
    rules = {rule.op for rule in builtin_rules()}
    without = set()
    for schema in onnx.defs.get_all_schemas():
        if schema.domain == "" and not schema.deprecated and len(schema.inputs) == len(schema.outputs) == 1:
            same = schema.inputs[0].type_str == schema.outputs[0].type_str and not schema.attributes
            if same and schema.name not in rules:
                without.add(schema.name)
    assert without <= {"Det", "NonZero", "OptionalGetElement", *NOT_RUN}
