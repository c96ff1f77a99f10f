"""Networks with strings, sequences, maps and optional values as inputs and outputs, each with a large product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

ML = "ai.onnx.ml"
VOCABULARY = ["the", "cat", "sat", "on", "mat", "a", "dog"]
tensor = helper.make_tensor_value_info
_FLOATS = helper.make_tensor_type_proto(TensorProto.FLOAT, [8, 3])


def _weight(name: str, *shape: int) -> onnx.TensorProto:
    array = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
    return numpy_helper.from_array(array, name)


def _words(name: str, words: Sequence[str]) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(words, object), name)


def _model(nodes: list[NodeProto], inputs: list[Any], outputs: list[Any], weights: list[Any]) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "wordy", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 19), helper.make_opsetid(ML, 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def sentences() -> onnx.ModelProto:
    """Strings → lower case → counts of words and pairs → two products → a string label."""
    nodes = [
        helper.make_node("StringNormalizer", ["text"], ["low"], case_change_action="LOWER", locale="C"),
        helper.make_node(
            "TfIdfVectorizer", ["low"], ["counts"], mode="TF", min_gram_length=1, max_gram_length=2, max_skip_count=0,
            ngram_counts=[0, 7], ngram_indexes=list(range(9)), pool_strings=[*VOCABULARY, "the", "cat", "cat", "sat"],
        ),
        helper.make_node("MatMul", ["counts", "w"], ["h"]),
        helper.make_node("MatMul", ["h", "u"], ["scores"]),
        helper.make_node("ArgMax", ["scores"], ["best"], axis=-1, keepdims=0),
        helper.make_node(
            "LabelEncoder", ["best"], ["label"], domain=ML, keys_int64s=[0, 1, 2, 3], values_strings=["ü", *"bcd"]
        ),
    ]  # fmt: skip
    outputs = [tensor("scores", TensorProto.FLOAT, [4]), tensor("label", TensorProto.STRING, None)]
    outputs.append(tensor("low", TensorProto.STRING, [6]))
    return _model(
        nodes, [tensor("text", TensorProto.STRING, [6])], outputs, [_weight("w", 9, 512), _weight("u", 512, 4)]
    )


def labels() -> onnx.ModelProto:
    """Numbers → a product → names of the largest values, from a table of strings."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("ArgMax", ["h"], ["best"], axis=-1, keepdims=0),
        helper.make_node("Gather", ["names", "best"], ["name"]),
    ]
    outputs = [tensor("name", TensorProto.STRING, [8]), tensor("h", TensorProto.FLOAT, [8, 3])]
    weights = [_weight("w", 64, 3), _words("names", ["a", "bé", ""])]
    return _model(nodes, [tensor("x", TensorProto.FLOAT, [8, 64])], outputs, weights)


def categories() -> onnx.ModelProto:
    """Categories as strings, and numbers → a classifier with string labels, compared with one."""
    colours = ["red", "green", "blue"]
    nodes = [
        helper.make_node("OneHotEncoder", ["text"], ["one"], domain=ML, cats_strings=colours, zeros=1),
        helper.make_node("CategoryMapper", ["text"], ["which"], domain=ML, cats_strings=colours, cats_int64s=[0, 1, 2]),
        helper.make_node("Cast", ["which"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["one"], ["flat"]),
        helper.make_node("Concat", ["x", "flat", "number"], ["all"], axis=1),
        helper.make_node(
            "LinearClassifier", ["all"], ["label", "scores"], domain=ML, classlabels_strings=["yes", "no"],
            coefficients=np.linspace(-1, 1, 18).tolist(), intercepts=[0.1, 0.2], multi_class=1,
        ),
        helper.make_node("Equal", ["label", "yes"], ["is"]),
    ]  # fmt: skip
    inputs = [tensor("text", TensorProto.STRING, [5, 1]), tensor("x", TensorProto.FLOAT, [5, 5])]
    outputs = [tensor("label", TensorProto.STRING, [5]), tensor("is", TensorProto.BOOL, [5])]
    return _model(nodes, inputs, outputs, [_words("yes", ["yes"])])


def pieces() -> onnx.ModelProto:
    """A sequence and an optional value in, a sequence of unknown length and an optional value out."""
    nodes = [
        helper.make_node("ConcatFromSequence", ["s"], ["rows"], axis=0),
        helper.make_node("MatMul", ["rows", "w"], ["h"]),
        helper.make_node("OptionalGetElement", ["o"], ["shift"]),
        helper.make_node("Add", ["h", "shift"], ["y"]),
        helper.make_node("SequenceLength", ["s"], ["n"]),
        helper.make_node("SplitToSequence", ["y", "n"], ["parts"], axis=0),
        helper.make_node("Optional", ["h"], ["maybe"]),
    ]
    inputs = [helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [2, 64])]
    inputs.append(
        helper.make_value_info(
            "o", helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [3]))
        )
    )
    many = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    outputs = [
        tensor("n", TensorProto.INT64, []),
        helper.make_value_info("parts", helper.make_sequence_type_proto(many)),
        helper.make_value_info("maybe", helper.make_optional_type_proto(many)),
    ]
    return _model(nodes, inputs, outputs, [_weight("w", 64, 3)])


def counts() -> onnx.ModelProto:
    """A map of strings to numbers → a product."""
    nodes = [
        helper.make_node("DictVectorizer", ["d"], ["x"], domain=ML, string_vocabulary=["a", "b", "c"]),
        helper.make_node("Reshape", ["x", "row"], ["r"]),
        helper.make_node("MatMul", ["r", "w"], ["y"]),
    ]
    number = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    inputs = [helper.make_value_info("d", helper.make_map_type_proto(TensorProto.STRING, number))]
    row = numpy_helper.from_array(np.array([1, 3]), "row")
    return _model(nodes, inputs, [tensor("y", TensorProto.FLOAT, [1, 5])], [_weight("w", 3, 5), row])


ALL: dict[str, Callable[[], onnx.ModelProto]] = {
    one.__name__: one for one in (sentences, labels, categories, pieces, counts)
}
