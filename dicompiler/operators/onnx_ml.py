"""Rules of ai.onnx.ml operators: each row is a sample and can be split.

scikit-learn pipelines are converted to them.

Their weights are attributes. An operator with two outputs (labels and scores) is split only if just the labels are
read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

from dicompiler.ir.operator_rule import OpCost, Operation, OperatorRule, Piece, counted_rules, whole_tensor, zero_cost
from dicompiler.ir.regions import Interval, Region, Shape, full_region
from dicompiler.operators.elementwise import elementwise

ML_DOMAIN = "ai.onnx.ml"


def sample_rows(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Operators on samples: y[rows, :] ← x[rows, :]. A vector is a single sample and stays whole."""
    if len(operation.input_shape(0)) < 2:
        return whole_tensor(operation, region, reduce)
    return Piece(
        (region[0], *full_region(operation.out_shape[1:])), ((region[0], *full_region(operation.input_shape(0)[1:])),)
    )


def _sample_count(needs: Sequence[Shape]) -> int:
    return needs[0][0] if len(needs[0]) > 1 else 1


def total_tree_depth(operation: Operation) -> float:
    """Return the number of nodes that a sample visits in all trees, assuming balanced trees."""
    trees = Counter(operation.attribute("nodes_treeids") or ())
    roots = operation.attribute("tree_roots") or ()  # Since version 5, inner nodes and leaves are separate.
    if roots:
        inner = len(operation.attribute("nodes_featureids") or ()) / len(roots)
        return len(roots) * math.log2(inner + 1)
    return sum(math.log2(count + 1) for count in trees.values())


def tree_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:
    """Return the cost of trees: a comparison per visited node, and an addition per tree and target."""
    trees = len(operation.attribute("tree_roots") or set(operation.attribute("nodes_treeids") or ()))
    columns = (len(out) > 1 and out[1]) or 1
    return OpCost(other_flops=_sample_count(needs) * (math.ceil(total_tree_depth(operation)) + trees * columns))


def weighted_cost(operation: Operation, out: Shape, needs: Sequence[Shape], name: str) -> OpCost:  # noqa: ARG001
    """Return the cost of multiplying each sample by all weights in the attribute `name`."""
    return OpCost(_sample_count(needs) * len(operation.attribute(name) or ()))


def scaled_cost(operation: Operation, out: Shape, needs: Sequence[Shape], steps: int = 2) -> OpCost:  # noqa: ARG001
    """Return the cost of `steps` FLOP per element."""
    return OpCost(other_flops=steps * math.prod(out))


_LINEAR_COST = partial(weighted_cost, name="coefficients")
_SUPPORT_VECTOR_COST = partial(weighted_cost, name="support_vectors")
_LINEAR_STAND_INS = "coefficients=gain intercepts=shift post_transform=NONE"
_TREE_STAND_INS = "weights=gain base_values=shift post_transform=NONE aggregate_function=SUM"
RULES = (
    OperatorRule("Scaler", sample_rows, ML_DOMAIN, cost=scaled_cost, attribute_stand_ins="offset=shift scale=one"),
    OperatorRule("Imputer", sample_rows, ML_DOMAIN, attribute_stand_ins="imputed_value_floats=shift"),
    OperatorRule("Normalizer", sample_rows, ML_DOMAIN, cost=partial(scaled_cost, steps=3), stand_in="softmax"),
    OperatorRule("Binarizer", elementwise, ML_DOMAIN, is_elementwise=True),
    OperatorRule("LabelEncoder", elementwise, ML_DOMAIN, is_elementwise=True),
    *(
        OperatorRule(f"Linear{kind}", sample_rows, ML_DOMAIN, cost=_LINEAR_COST, attribute_stand_ins=_LINEAR_STAND_INS)
        for kind in ("Classifier", "Regressor")
    ),
    OperatorRule(
        "TreeEnsembleClassifier", sample_rows, ML_DOMAIN, cost=tree_cost, attribute_stand_ins=f"class_{_TREE_STAND_INS}"
    ),
    OperatorRule(
        "TreeEnsembleRegressor", sample_rows, ML_DOMAIN, cost=tree_cost, attribute_stand_ins=f"target_{_TREE_STAND_INS}"
    ),
    OperatorRule(
        "TreeEnsemble", whole_tensor, ML_DOMAIN, cost=tree_cost, stand_in="digest"
    ),  # its weights are tensor attributes
    *(
        OperatorRule(f"SVM{kind}", whole_tensor, ML_DOMAIN, cost=_SUPPORT_VECTOR_COST, stand_in="digest")
        for kind in ("Classifier", "Regressor")
    ),
    *counted_rules(
        zero_cost, "ArrayFeatureExtractor CastMap DictVectorizer FeatureVectorizer OneHotEncoder ZipMap", ML_DOMAIN
    ),
)
