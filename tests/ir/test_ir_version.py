"""The lowest IR version of segments, which decides on which boards they load."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

import dicompiler
from dicompiler.partition.segmentation import lowest_ir_version

HEAD = '<ir_version: 13, opset_import: ["": 21, "local": 1]> g (float[2] x) => '


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (HEAD + "(float[2] y) { y = Relu (x) }", 4),
        (HEAD + "(bfloat16[2] y) { y = Cast <to = 16> (x) }", 4),
        (HEAD + "(seq(float[2]) y) { y = SequenceConstruct (x) }", 4),
        (HEAD + "(optional(float[2]) y) { y = Optional (x) }", 8),
        (HEAD + "(float[2] y) { z = Cast <to = 17> (x) y = Cast <to = 1> (z) }", 9),
        (HEAD + "(float[2] y) { z = Cast <to = 22> (x) y = Cast <to = 1> (z) }", 10),
        (HEAD + "(float[2] y) { z = Cast <to = 23> (x) y = Cast <to = 1> (z) }", 11),
        (HEAD + "(float[2] y) { y = local.f (x) } <domain: \"local\", opset_import: [\"\": 21]> f (x) => (y) {"
         " y = Relu (x) }", 8),
        (HEAD.replace("13", "7") + "(float[2] y) { z = Cast <to = 17> (x) y = Cast <to = 1> (z) }", 7),
    ],
)  # fmt: skip
def test_is_that_of_the_newest_construct(text: str, version: int) -> None:
    assert lowest_ir_version(onnx.parser.parse_model(text)) == version


def test_counts_initializers_and_bodies() -> None:
    model = onnx.parser.parse_model(
        HEAD + "(float[2] y) { c = Constant <value = bool {1}> () y = If (c) <then_branch = t () => (float[2] a) "
        "{ z = Cast <to = 17> (x) a = Cast <to = 1> (z) }, else_branch = e () => (float[2] b) { b = Relu (x) }> }"
    )
    assert lowest_ir_version(model) == 9
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.INT4, [2], [1, 2]))
    assert lowest_ir_version(model) == 10


def test_segments_need_no_newer_version_than_their_content(tmp_path: str) -> None:
    text = '<ir_version: 10, opset_import: ["": 17]> g (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y) { y = Relu (x) }'
    result = dicompiler.compile(onnx.parser.parse_model(text), platform="rpi4x2", strategy="modnn", output=tmp_path)
    assert {segment.model.ir_version for device in result.program.devices for segment in device.segments} == {4}
