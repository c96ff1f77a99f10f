"""ai.onnx.ml operators: rows of samples equal those of the whole operator, and trees cost the visited nodes."""

from __future__ import annotations

import pytest
from support.exact_models import from_text
from support.modern_networks import MODERN
from support.operator_cases import run_split

from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Part
from dicompiler.partition.bounds_inference import cuttable_axes, output_shape
from dicompiler.verify.exact import check_model
from dicompiler.verify.executor import run_model
from dicompiler.verify.run_inputs import prepare_inputs

BODIES = {
    "Scaler": "<offset = [1.0, 2.0, 3.0, 4.0], scale = [0.5, 0.25, 2.0, 1.0]>",
    "Normalizer": '<norm = "L1">',
    "Binarizer": "<threshold = 0.5>",
    "LinearRegressor": "<coefficients = [0.5, 1.0, 2.0, 0.25], intercepts = [0.5], targets = 1>",
    "Imputer": "<imputed_value_floats = [0.5], replaced_value_float = 2.0>",
}


@pytest.mark.parametrize("op", BODIES)
def test_samples_can_be_split_by_rows(op: str) -> None:
    columns = 1 if op == "LinearRegressor" else 4
    model = from_text(f"""<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3]>
        g (float[6, 4] x) => (float[6, {columns}] y) {{ ["node"] y = ai.onnx.ml.{op} {BODIES[op]} (x) }}""")
    checked, feed = check_model(model, 0)
    layers = prepare(checked).layers
    assert layers is not None
    (layer,) = layers.layers
    assert 0 in cuttable_axes(layers, layer) and output_shape(layers, layer) == (6, columns)
    parts = [Part(device, (rows, (0, columns))) for device, rows in (("a", (0, 2)), ("b", (2, 6)))]
    assert (run_split(checked, layers, parts, feed) == run_model(checked, feed)["y"]).all()


def test_forests_cost_the_visited_nodes() -> None:
    layers = prepare(Model.load(MODERN["regression"]())).layers
    assert layers is not None
    nodes = {layer.nodes[0].op: layer.nodes[0] for layer in layers.layers}

    def cost(op: str) -> tuple[int, ...]:
        operation, rule = layers.operation_of(nodes[op]), layers.rule_of(nodes[op])
        return tuple(rule.cost(operation, operation.out_shape, [operation.input_shape(0)]))

    # The input has 8 rows. The ensemble has five trees with three levels, and two targets.
    assert cost("TreeEnsembleRegressor") == (0, 0, 8 * (5 * 3 + 5 * 2))
    assert cost("LinearRegressor") == (8 * 12, 0, 0)
    assert cost("Scaler") == (0, 0, 2 * 48) and cost("Normalizer") == (0, 0, 3 * 48)


@pytest.mark.parametrize("index", ["5", "5, 1", "2, 3"])
@pytest.mark.parametrize("rows", ["", "4, "])
def test_array_feature_extractor_has_the_shape_of_onnxruntime(rows: str, index: str) -> None:
    """scikit-learn uses it to select labels by the column that ArgMax returns."""
    model = from_text(f"""<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3]>
        g (float[{rows}3] x, int64[{index}] i) => (y) {{ y = ai.onnx.ml.ArrayFeatureExtractor (x, i) }}""")
    layers = prepare(model).layers
    assert layers is not None
    assert layers.tensors["y"].shape == run_model(model, prepare_inputs(model))["y"].shape
