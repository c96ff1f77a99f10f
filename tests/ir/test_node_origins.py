"""Names of nodes in the file lead to the right layers after any passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx
import pytest

from dicompiler.base.errors import UsageError
from dicompiler.driver.prepare import prepare
from dicompiler.ir.node_origins import NodeOrigins
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.plugin.pass_base import Pass
from dicompiler.plugin.pass_manager import PassManager, make_pipeline

TEXT = """
<ir_version: 8, opset_import: ["" : 13]>
net (float[1, 4, 8, 8] x) => (float[1, 6, 8, 8] y, float[1, 2] constant)
<float[6, 4, 3, 3] w, float[2] s1, float[2] s2>
{
   [const] c = Constant <value = float[6] {1.0, 2.0, 1.0, 1.0, 2.0, 1.0}> ()
   [axes] a = Constant <value = int64[2] {1, 2}> ()
   [unsqueeze] u = Unsqueeze (c, a)
   [split] l, r = Split <axis = 1> (x)
   [concat] j = Concat <axis = 1> (r, l)
   [conv] t = Conv <pads = [1, 1, 1, 1]> (j, w)
   [scale] m = Mul (t, u)
   [relu] y = Relu (m)
   [dead] d = Relu (t)
   [shape] z = Shape (t)
   [size] e = Size (z)
   [one] o = Constant <value = float[1, 2] {1.0, 2.0}> ()
   [constants] constant = Add (o, o)
}
"""


@pytest.fixture(scope="module")
def model() -> Model:
    proto = onnx.parser.parse_model(TEXT)
    weights = np.ones((6, 4, 3, 3), np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    return Model.load(proto)


@pytest.fixture(scope="module")
def lineage(model: Model) -> NodeOrigins:
    prepared = prepare(model)
    assert prepared.layers is not None
    return NodeOrigins(prepared.layers, prepared.loaded_graph)


def names(lineage: NodeOrigins, node: str) -> list[str]:
    return [layer.name for layer in lineage.layers_of(node)]


def test_nodes_are_found_in_their_layers(lineage: NodeOrigins) -> None:
    assert [names(lineage, node) for node in ("concat", "conv", "scale", "relu")] == [["concat"], *[["conv"]] * 3]


def test_folded_nodes_map_to_their_remaining_readers(lineage: NodeOrigins) -> None:
    assert [names(lineage, node) for node in ("const", "axes", "unsqueeze")] == [["conv"]] * 3


def test_split_maps_to_all_of_its_slices(lineage: NodeOrigins) -> None:
    assert names(lineage, "split") == ["split_0", "split_1"]
    assert lineage.origin_of["split_1"] == "split"
    assert list(lineage.added_nodes) == ["split_0", "split_1", "constant"]


def test_constant_output_maps_to_its_identity(lineage: NodeOrigins) -> None:
    assert names(lineage, "constants") == names(lineage, "one") == ["constant"]


def test_unread_nodes_are_in_the_file_but_in_no_layer(lineage: NodeOrigins) -> None:
    for node in ("dead", "shape", "size"):
        assert names(lineage, node) == [] and node in lineage.first_output_by_name
    assert names(lineage, "never") == [] and "never" not in lineage.first_output_by_name


def test_new_node_does_not_inherit_the_name_of_a_removed_one() -> None:
    text = TEXT.replace("[dead]", "[split_0]")
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((6, 4, 3, 3), np.float32), "w"))
    prepared = prepare(Model.load(proto))
    assert prepared.layers is not None
    found = NodeOrigins(prepared.layers, prepared.loaded_graph)
    assert names(found, "split") == ["split_0", "split_1"] and names(found, "split_0") == []


def test_without_a_file_each_node_is_its_own_origin(lineage: NodeOrigins) -> None:
    alone = NodeOrigins(lineage.layers)
    assert names(alone, "split_0") == ["split_0"] and names(alone, "relu") == ["conv"]
    assert alone.added_nodes == {} and names(alone, "unsqueeze") == []


@dataclass(frozen=True)
class Anew(Pass):
    """A third party's pass that renames every node, and makes a new PipelineState."""

    name: ClassVar[str] = "anew"

    def run(self, compilation: PipelineState) -> PipelineState:
        proto = compilation.model.to_proto()
        for node in proto.graph.node:
            node.name = f"renamed/{node.name}"
        return PipelineState(Model.load(proto))


def test_names_survive_passes_that_rename_all_nodes(model: Model) -> None:
    first, *rest = make_pipeline("normalise,infer-shapes,form-layers")
    state = PassManager([first, Anew(), *rest]).run(PipelineState(model))
    assert state.layers is not None
    found = NodeOrigins(state.layers, state.loaded_graph)
    assert names(found, "scale") == names(found, "unsqueeze") == ["renamed/conv"]
    assert names(found, "split") == ["renamed/split_0", "renamed/split_1"]


def test_pipelines_select_layers_by_any_node_of_the_file(model: Model) -> None:
    def plan(layers: str) -> object:
        text = f"normalise,infer-shapes,form-layers,place{{layers={layers} device=d1}}"
        return PassManager(make_pipeline(text)).run(PipelineState(model)).plan

    assert plan("unsqueeze") == plan("conv")
    assert plan("split..axes") == plan("split_0..conv")
    with pytest.raises(UsageError, match=r"^place: layers: node 'dead' is in no layer, because nothing reads it"):
        plan("dead")
    with pytest.raises(UsageError, match=r"^place: layers: no layer 'never'"):
        plan("never")
