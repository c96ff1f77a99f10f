"""Layer graphs know producers, consumers and operations."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from support.layer_graphs import formed, stack

from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.operator_rule import OperatorRule, Piece, whole_tensor
from dicompiler.ir.regions import full_region

DIAMOND = """<ir_version: 8, opset_import: ["": 17]>
g (float[1, 4, 6, 6] x) => (float[1, 4, 6, 6] y, float[1, 8, 6, 6] z)
{ a = MaxPool <kernel_shape = [1, 1]> (x)
  b = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (a)
  c = MaxPool <kernel_shape = [1, 1]> (a)
  y = Add (b, c)
  z = Concat <axis = 1> (a, y) }"""


@pytest.fixture(scope="module")
def diamond() -> LayerGraph:
    return formed(DIAMOND)


def test_producer_is_the_layer_that_computes_the_tensor(diamond: LayerGraph) -> None:
    assert "x" not in diamond.producer
    for layer in diamond.layers:
        assert diamond.producer[layer.output] is layer is diamond.layer_by_name[layer.name]


def test_consumers_are_all_readers_in_layer_order(diamond: LayerGraph) -> None:
    for tensor in ("x", *diamond.producer):
        readers = tuple(layer for layer in diamond.layers if tensor in layer.inputs)
        assert diamond.consumers.get(tensor, ()) == readers
    assert len(diamond.consumers["a"]) == 3


def test_inputs_come_from_earlier_layers(diamond: LayerGraph) -> None:
    assert [diamond.position[layer.name] for layer in diamond.layers] == list(range(len(diamond.layers)))
    for layer in diamond.layers:
        for tensor in set(layer.inputs) - set(diamond.inputs):
            assert diamond.position[diamond.producer[tensor].name] < diamond.position[layer.name]


def test_operators_without_a_rule_are_computed_whole(diamond: LayerGraph) -> None:
    node = diamond.layers[0].nodes[0]
    assert diamond.rule_of(node).piece is not whole_tensor
    bare = LayerGraph(diamond.layers, diamond.tensors, diamond.inputs, diamond.outputs)
    assert bare.rule_of(node).piece is whole_tensor
    assert bare.rule_of(node).op == "MaxPool"
    assert bare.cut_output(node) == "a"


def test_full_output_is_computed_by_the_unchanged_node(diamond: LayerGraph) -> None:
    node = diamond.layers[0].nodes[0]
    everything, half = full_region((1, 4, 6, 6)), ((0, 1), (0, 4), (0, 3), (0, 6))
    rule = OperatorRule("MaxPool", lambda _, region, __: Piece(region, (region,), {"pads": [0, 0, 0, 0]}))
    layers = replace(diamond, rules={("", "MaxPool"): rule})
    assert layers.make_piece(node, everything) == Piece(everything, (everything,))
    assert layers.make_piece(node, half) == Piece(half, (half,), {"pads": [0, 0, 0, 0]})
    assert layers.make_piece(node, everything, (0, 2)).attributes


def test_omitted_inputs_of_an_operation_are_none() -> None:
    layers = formed(
        '<ir_version: 8, opset_import: ["": 17]> g (float[4] x) => (float[4] y) { y = Clip (x, , m) }', m=()
    )
    (layer,) = layers.layers
    operation = layers.operation_of(layer.nodes[0])
    assert operation.inputs == (layers.tensors["x"], None, layers.tensors["m"])
    assert operation.outputs == (layers.tensors["y"],)
    assert operation.out_shape == operation.input_shape(0) == (4,)
    assert [operation.has_input(index) for index in range(4)] == [True, False, True, False]


def test_pickled_graphs_have_no_stored_results() -> None:
    layers = stack((1, 3, 8, 8), [("conv", 4, 3, 1, 1, 1), ("pool", 2, 2, 0), ("flatten",), ("fc", 5)])
    before = pickle.dumps(layers)
    for layer in layers.layers:
        layers.operation_of(layer.nodes[0])
    assert layers.consumers and layers.producer and layers.layer_by_name
    assert pickle.dumps(layers) == before
    again = pickle.loads(before)
    assert [layer.name for layer in again.layers] == [layer.name for layer in layers.layers]
    assert again.tensors == layers.tensors
    assert again.rules.keys() == layers.rules.keys()
