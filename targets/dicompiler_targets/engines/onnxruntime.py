"""The engine onnxruntime, which is the default and the reference of `verify`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dicompiler.plugin_api import Engine
from dicompiler.plugin_api.artifacts import BoardPackage

if TYPE_CHECKING:
    import onnx

    from dicompiler.plugin_api.onnx import Weight


@dataclass(frozen=True)
class OnnxruntimeEngine(Engine):
    """onnxruntime, which computes all operators: the default engine of all devices."""

    name: ClassVar[str] = "onnxruntime"
    packages: ClassVar[tuple[BoardPackage, ...]] = (BoardPackage("onnxruntime", (1, 21)),)

    def convert(self, model: onnx.ModelProto, weights: Mapping[str, Weight]) -> None:
        """Return None: onnxruntime runs ONNX files, so a submodel need not be converted."""
