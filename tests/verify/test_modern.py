"""Modern kinds of networks: all layers pass the exact check in parts, faults are caught, and strategies work."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.modern_net import MS, Net
from support.modern_networks import MODERN
from support.planted_faults import KINDS, Fault, Placed
from support.splits import Case, cluster, splits

import dicompiler
from dicompiler.base.errors import DicompilerError
from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Plan
from dicompiler.ir.program import Program
from dicompiler.partition.segmentation import build_program
from dicompiler.verify.comparison import Check, check_exact
from dicompiler_passes.partition import PartitionPass


@cache
def case(name: str) -> Case:
    """Return the case without reference outputs: the exact check brings its own numbers."""
    return Case(replace(prepare(Model.load(MODERN[name]())), platform=cluster()), {}, {})


def checked(name: str, plan: Plan, fault: Fault | None = None, seeds: Sequence[int] | None = None) -> Check:
    """Run the exact check with faults in the placed models."""
    own = case(name)

    def program(variant: Model) -> Program:
        base = replace(prepare(variant), platform=own.compilation.platform, plan=plan)
        assert base.layers is not None
        layers = [(layer.name, layer.whole_reason) for layer in base.layers.layers]
        assert layers == [(layer.name, layer.whole_reason) for layer in own.layers.layers]
        whole = PartitionPass().run(base).model
        proto = onnx.ModelProto()
        proto.CopyFrom(whole.proto)
        if fault is not None:
            fault.change(proto)
        return build_program(Model(proto, whole.weights), plan.devices)

    return check_exact(own.compilation.model, program, seeds, layers=own.layers)


PARTS = {
    "height": "faster-rcnn gelus segformer speech-gru yolo-nms",
    "lop": "bert-float16 control durations dynamically-quantised genai gpt2-cache llama-fused quantised resizing vit",
    "lip": "bert genai-packed llama-cache speech-rnn t5 video wav2vec2 whisper",
    "pipeline": "bert-fused classification forest gpt2 llama regression speech-lstm",
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for kind, names in PARTS.items() for name in names.split()])
def test_parts_of_every_layer_are_exact(name: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)  # Hide the warnings about parts that nothing reads.
    layers = case(name).layers
    check = checked(name, case(name).plan(next(iter(splits(layers, [kind], 0)))), seeds=(0,))
    assert check.passed and check.applies, check.detail
    assert check.detail.endswith(f", {len(layers.layers)} of {len(layers.layers)} layers")


def test_covers_all_networks() -> None:
    assert MODERN.keys() - {"unsorted", "yolo"} == {*" ".join(PARTS.values()).split()}


FAULTY = [
    pytest.param("whisper", "lop", marks=pytest.mark.slow),
    ("resizing", "height"),
    ("speech-lstm", "lop"),
    ("quantised", "lop"),
    ("video", "grid"),
]


@pytest.mark.parametrize(("name", "kind"), FAULTY)
def test_catches_faults(name: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    own, tried = case(name), 0
    plan = own.plan(next(iter(splits(own.layers, [kind], 0))))
    placed = Placed(PartitionPass().run(replace(own.compilation, plan=plan)).model.proto)
    assert checked(name, plan).passed
    for number, (what, find) in enumerate(KINDS.items()):
        found = list(find(placed))
        if (name, what) == ("quantised", "wrong weights"):
            continue  # All zero points of this network are equal, so a wrong one changes nothing.
        for fault in Random(number).sample(found, min(1, len(found))):
            try:
                passed = checked(name, plan, fault).passed
            except DicompilerError:
                passed = False
            assert not passed, f"{what}: {fault.name}"
            tried += 1
    assert tried >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-fused", "forest", "gelus", "regression", "speech-lstm", "faster-rcnn"])
def test_default_strategy_compiles_network(name: str, tmp_path: Path) -> None:
    compiled = dicompiler.compile(MODERN[name](), "rpi4x4", output=tmp_path / "out")
    assert [check.detail for check in compiled.verify().checks if not check.passed] == []


def test_string_labels_become_indices(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Devices cannot send strings: a warning names the output and the label of each index."""
    with caplog.at_level("WARNING", "dicompiler"):
        compiled = dicompiler.compile(MODERN["classification"](), "rpi4x4", output=tmp_path / "out")
    assert "output 't1' holds strings, which devices cannot send: you get the indices, 0 to 2, of these" in caplog.text
    assert [check.detail for check in compiled.verify().checks if not (check.passed and check.applies)] == []


def test_sequence_of_maps_becomes_scores(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "dicompiler"):
        compilation = prepare(Model.load(MODERN["forest"]()))
    assert compilation.layers is not None
    assert compilation.layers.tensors["t2"].shape == (8, 3)
    assert "output 't2' is a sequence of maps, which devices cannot send" in caplog.text


def test_sorts_unordered_nodes() -> None:
    assert MODERN["unsorted"]().graph.node[0].name == MODERN["yolo"]().graph.node[-1].name
    sorted_, plain = (Model.load(MODERN[name]()).proto.graph for name in ("unsorted", "yolo"))
    made = {value.name for value in sorted_.input} | {tensor.name for tensor in sorted_.initializer}
    for node in sorted_.node:
        assert set(filter(None, node.input)) <= made
        made.update(node.output)
    assert {node.name for node in sorted_.node} == {node.name for node in plain.node}


def _mixed(form: str) -> onnx.ModelProto:
    """Return a network that calls rounding operators with different numbers and types of inputs."""
    net, width = Net(19), 32
    x = net.input("x", (1, 8, width))
    vectors = [net.weight(width) for _ in range(3)]
    if form == "inputs":
        for inputs in ((*vectors,), vectors[:2], (vectors[0], "", vectors[2])):
            y = net.op("SkipLayerNormalization", net.linear(x, width, width), x, *inputs, domain=MS)
            x = net.op("LayerNormalization", y, *vectors[: len(inputs) - 1])
    elif form == "types":
        for kind in (TensorProto.FLOAT16, TensorProto.FLOAT):
            y = net.op("Softmax", net.op("Cast", net.linear(x, width, width), to=kind))
            y = net.op("Sub", y, net.op("ReduceMean", y, net.ints(-1)))
            x = net.op("Cast", net.op("Sigmoid", y), to=TensorProto.FLOAT)
    else:  # This form has weights in an 8-bit floating-point type.
        values = net.random.standard_normal((width, width)).astype(helper.tensor_dtype_to_np_dtype(17))
        net.weights.append(numpy_helper.from_array(values, "eight"))
        for _ in range(2):
            weight = net.op("DequantizeLinear", "eight", net.const(0.5))
            x = net.op("MatMul", net.op("MatMul", x, weight), net.op("Softmax", weight))
    y = net.linear(x, width, 4)
    return net.model(types=[helper.make_tensor_value_info(y, TensorProto.FLOAT, (1, 8, 4))], ir=9)


@pytest.mark.parametrize("form", ["inputs", "types", "weights of eight bits"])
def test_different_calls_of_an_operator_are_exact(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODERN, form, lambda: _mixed(form))
    layers = case(form).layers
    check = checked(form, case(form).plan(next(iter(splits(layers, ["lop"], 0)))), seeds=(0,))
    assert check.passed and check.applies, check.detail
    assert check.detail.endswith(f", {len(layers.layers)} of {len(layers.layers)} layers")
