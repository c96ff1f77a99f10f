"""Passes for tests of the pass manager: an annotating one, a rewriting one, and one that fails."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import onnx

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Part, Plan
from dicompiler.plugin.pass_base import Pass

TEXT = """<ir_version: 8, opset_import: ["": 17]>
          g (float[2, 3] x) => (float[2, 3] y) { h = Relu (x)  y = Neg (h) }"""


def compilation() -> PipelineState:
    return PipelineState(Model.load(onnx.parser.parse_model(TEXT)))


@dataclass(frozen=True)
class Annotate(Pass):
    """A pass that adds a plan and does not change the model."""

    name: ClassVar[str] = "annotate"
    provides: ClassVar[tuple[str, ...]] = ("plan",)
    device: str = "d0"

    def run(self, compilation: PipelineState) -> PipelineState:
        return replace(compilation, plan=Plan({"h": (Part(self.device),)}, ("d0",), ("d0",)))


@dataclass(frozen=True)
class Rename(Pass):
    """A pass that changes the operator type of every node."""

    name: ClassVar[str] = "rename"
    op: str = "Abs"

    def run(self, compilation: PipelineState) -> PipelineState:
        proto = onnx.ModelProto()
        proto.CopyFrom(compilation.model.proto)
        for node in proto.graph.node:
            node.op_type = self.op
        return replace(compilation, model=replace(compilation.model, proto=proto))


@dataclass(frozen=True)
class Breaks(Pass):
    """A pass that raises KeyError ("inside") or DicompilerError ("input"), or else returns a value of a wrong type."""

    name: ClassVar[str] = "breaks"
    how: str = "inside"

    def run(self, compilation: PipelineState) -> PipelineState:
        if self.how == "inside":
            raise KeyError("lost")
        if self.how == "input":
            raise DicompilerError("breaks: layer 'h' cannot be cut")
        return compilation.model  # type: ignore[return-value]
