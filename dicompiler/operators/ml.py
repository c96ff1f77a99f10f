"""The operators of ai.onnx.ml, which pipelines of scikit-learn become: each row is a sample of its own and passes.

Their weights are attributes. What has two outputs (labels and scores) is cut where only the labels are read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

from dicompiler.ir.regions import Interval, Region, Shape, full
from dicompiler.ir.rule import Effort, Operation, OperatorRule, Piece, counted, free, whole
from dicompiler.operators.elementwise import elementwise

DOMAIN = "ai.onnx.ml"


def rows(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """y[rows, :] ← x[rows, :]. A vector is one sample: whole."""
    if len(operation.shape(0)) < 2:
        return whole(operation, region, reduce)
    return Piece((region[0], *full(operation.out_shape[1:])), ((region[0], *full(operation.shape(0)[1:])),))


def _samples(needs: Sequence[Shape]) -> int:
    """How many samples are read: rows, or the one that a vector is."""
    return needs[0][0] if len(needs[0]) > 1 else 1


def depths(operation: Operation) -> float:
    """How many nodes a sample meets on its way through all trees, were they balanced: each node is a threshold for one
    feature, or a leaf."""
    trees = Counter(operation.attribute("nodes_treeids") or ())
    roots = operation.attribute("tree_roots") or ()  # since version 5, where inner nodes and leaves are apart
    if roots:
        inner = len(operation.attribute("nodes_featureids") or ()) / len(roots)
        return len(roots) * math.log2(inner + 1)
    return sum(math.log2(count + 1) for count in trees.values())


def grown(operation: Operation, out: Shape, needs: Sequence[Shape]) -> Effort:
    """Trees: a comparison for each node on the way, an addition for each tree and each target."""
    trees = len(operation.attribute("tree_roots") or set(operation.attribute("nodes_treeids") or ()))
    columns = (len(out) > 1 and out[1]) or 1
    return Effort(other=_samples(needs) * (math.ceil(depths(operation)) + trees * columns))


def weighted(operation: Operation, out: Shape, needs: Sequence[Shape], name: str) -> Effort:  # noqa: ARG001
    """Each sample meets all of the weights in the attribute `name`."""
    return Effort(_samples(needs) * len(operation.attribute(name) or ()))


def scaled(operation: Operation, out: Shape, needs: Sequence[Shape], steps: int = 2) -> Effort:  # noqa: ARG001
    """So many FLOP for each element."""
    return Effort(other=steps * math.prod(out))


_LINEAR = partial(weighted, name="coefficients")
_VECTORS = partial(weighted, name="support_vectors")
_LINES = "coefficients=gain intercepts=shift post_transform=NONE"
_LEAVES = "weights=gain base_values=shift post_transform=NONE aggregate_function=SUM"
RULES = (
    OperatorRule("Scaler", rows, DOMAIN, cost=scaled, numbers="offset=shift scale=one"),
    OperatorRule("Imputer", rows, DOMAIN, numbers="imputed_value_floats=shift"),
    OperatorRule("Normalizer", rows, DOMAIN, cost=partial(scaled, steps=3), stand_in="softmax"),
    OperatorRule("Binarizer", elementwise, DOMAIN, elementwise=True),
    OperatorRule("LabelEncoder", elementwise, DOMAIN, elementwise=True),
    *(
        OperatorRule(f"Linear{kind}", rows, DOMAIN, cost=_LINEAR, numbers=_LINES)
        for kind in ("Classifier", "Regressor")
    ),
    OperatorRule("TreeEnsembleClassifier", rows, DOMAIN, cost=grown, numbers=f"class_{_LEAVES}"),
    OperatorRule("TreeEnsembleRegressor", rows, DOMAIN, cost=grown, numbers=f"target_{_LEAVES}"),
    OperatorRule("TreeEnsemble", whole, DOMAIN, cost=grown, stand_in="digest"),  # its weights are tensors
    *(
        OperatorRule(f"SVM{kind}", whole, DOMAIN, cost=_VECTORS, stand_in="digest")
        for kind in ("Classifier", "Regressor")
    ),
    *counted(free, "ArrayFeatureExtractor CastMap DictVectorizer FeatureVectorizer OneHotEncoder ZipMap", DOMAIN),
)
