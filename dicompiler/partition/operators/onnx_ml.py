"""Rules of ai.onnx.ml operators, to which scikit-learn pipelines are converted: they can be split between samples.

Each row of a tensor is a sample. An operator with two outputs (labels and scores) is split only if nothing reads the
scores.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

from dicompiler.ir.operator_rule import OpCost, Operation, OperatorRule, Piece, cost_only_rules, whole_tensor, zero_cost
from dicompiler.ir.regions import Interval, Region, Shape, full_region
from dicompiler.partition.operators.elementwise import elementwise

ML_DOMAIN = "ai.onnx.ml"


def sample_rows(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split an operator between samples, which are rows: each part reads the input rows of its output rows.

    The operator stays whole if its input is a single sample without an axis for rows.
    """
    if len(operation.input_shape(0)) < 2:
        return whole_tensor(operation, region, reduce)
    need = (region[0], *full_region(operation.input_shape(0)[1:]))
    return Piece((region[0], *full_region(operation.out_shape[1:])), (need,))


def _sample_count(needs: Sequence[Shape]) -> int:
    return needs[0][0] if len(needs[0]) > 1 else 1


def total_tree_depth(operation: Operation) -> float:
    """Return the number of nodes that one sample visits in all trees together, if the trees are balanced."""
    trees = Counter(operation.attribute("nodes_treeids") or ())
    # Since version 5 of ai.onnx.ml, the roots of trees are an attribute, and leaves are not counted as nodes.
    roots = operation.attribute("tree_roots") or ()
    if roots:
        inner = len(operation.attribute("nodes_featureids") or ()) / len(roots)
        return len(roots) * math.log2(inner + 1)
    return sum(math.log2(count + 1) for count in trees.values())


def tree_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:
    """Return the cost of decision trees: a comparison per sample and visited node, an addition per tree and column."""
    trees = len(operation.attribute("tree_roots") or set(operation.attribute("nodes_treeids") or ()))
    columns = (len(out) > 1 and out[1]) or 1
    return OpCost(other_flops=_sample_count(needs) * (math.ceil(total_tree_depth(operation)) + trees * columns))


def weighted_cost(operation: Operation, out: Shape, needs: Sequence[Shape], name: str) -> OpCost:  # noqa: ARG001
    """Return the cost of an operator with one multiply-add per sample and weight.

    The weights are the operator's attribute `name`.
    """
    return OpCost(_sample_count(needs) * len(operation.attribute(name) or ()))


def scaled_cost(operation: Operation, out: Shape, needs: Sequence[Shape], flops: int = 2) -> OpCost:  # noqa: ARG001
    """Return the cost of an operator with two or three FLOP (`flops`) for each element of the output region."""
    return OpCost(other_flops=flops * math.prod(out))


_LINEAR_COST = partial(weighted_cost, name="coefficients")
_SUPPORT_VECTOR_COST = partial(weighted_cost, name="support_vectors")
_LINEAR_STAND_INS = "coefficients=gain intercepts=shift post_transform=NONE"
_TREE_STAND_INS = "weights=gain base_values=shift post_transform=NONE aggregate_function=SUM"
_UNCOUNTED_OPERATORS = "ArrayFeatureExtractor CastMap DictVectorizer FeatureVectorizer OneHotEncoder ZipMap"
_linear = partial(OperatorRule, piece=sample_rows, cost=_LINEAR_COST, attribute_stand_ins=_LINEAR_STAND_INS)
_trees = partial(OperatorRule, piece=sample_rows, cost=tree_cost)
_whole = partial(OperatorRule, piece=whole_tensor, stand_in="digest")
RULES = (
    OperatorRule("Scaler", sample_rows, ML_DOMAIN, cost=scaled_cost, attribute_stand_ins="offset=shift scale=one"),
    OperatorRule("Imputer", sample_rows, ML_DOMAIN, attribute_stand_ins="imputed_value_floats=shift"),
    OperatorRule("Normalizer", sample_rows, ML_DOMAIN, cost=partial(scaled_cost, flops=3), stand_in="softmax"),
    OperatorRule("Binarizer", elementwise, ML_DOMAIN, is_elementwise=True),
    OperatorRule("LabelEncoder", elementwise, ML_DOMAIN, is_elementwise=True),
    *(_linear(f"Linear{kind}", domain=ML_DOMAIN) for kind in ("Classifier", "Regressor")),
    _trees("TreeEnsembleClassifier", domain=ML_DOMAIN, attribute_stand_ins=f"class_{_TREE_STAND_INS}"),
    _trees("TreeEnsembleRegressor", domain=ML_DOMAIN, attribute_stand_ins=f"target_{_TREE_STAND_INS}"),
    # A TreeEnsemble is not split, because the exact check of `verify` could not check the split: it replaces weights by
    # integers, but cannot replace attributes that are tensors.
    _whole("TreeEnsemble", domain=ML_DOMAIN, cost=tree_cost),
    *(_whole(f"SVM{kind}", domain=ML_DOMAIN, cost=_SUPPORT_VECTOR_COST) for kind in ("Classifier", "Regressor")),
    *cost_only_rules(zero_cost, _UNCOUNTED_OPERATORS, ML_DOMAIN),
)
