"""The engine ncnn, and a prediction of the memory that it needs for weights.

ncnn (https://github.com/Tencent/ncnn) copies all weights when it loads them. For 3×3 convolutions of stride 1, it keeps
transformed weights instead, which are up to WINOGRAD_GROWTH times as large. The prediction is an upper bound: ncnn
needed 3.9 times the weights of ResNet-18 on an x86-64 host, and 1.4 times those of VGG16 and MobileNetV2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import onnx
from onnx import helper

from dicompiler.plugin_api import Engine, Segment
from dicompiler.plugin_api.artifacts import FULL_PRECISION, BoardPackage, EngineFiles
from dicompiler.plugin_api.costs import constant_sizes
from dicompiler_targets.engines.ncnn_converter import CONVERTERS, convert_to_ncnn, find_unsupported_nodes

if TYPE_CHECKING:
    from dicompiler.plugin_api.artifacts import LoadedNetwork
    from dicompiler.plugin_api.onnx import Weight

PRECISION_KEY = "precision="
"""Start of the last line of a .param file with reduced precision. ncnn ignores this line; the runtimes read it."""


@dataclass(frozen=True)
class NcnnEngine(Engine):
    """ncnn, which is faster than onnxruntime on many ARM boards; it computes common operators of image networks.

    The tolerance is larger than that of onnxruntime, because ncnn computes 3×3 convolutions by Winograd's algorithm,
    which has larger rounding errors. With bf16, ncnn stores tensors and weights with 8 significant bits, and computes
    sums in fp32. With fp16, it stores 11 significant bits, and ARM processors also compute sums in this type. Over five
    networks of images, the largest differences on x86 were 7.6e-3 (bf16) and 1.1e-3 (fp16 storage) of max|output|.
    """

    name: ClassVar[str] = "ncnn"
    packages: ClassVar[tuple[BoardPackage, ...]] = (BoardPackage("ncnn", (1, 0)),)
    operators: ClassVar[frozenset[str]] = frozenset(CONVERTERS)
    tolerance: ClassVar[float | None] = 1e-4
    extra_call_s: ClassVar[float] = 35e-6
    precisions: ClassVar[Mapping[str, float]] = MappingProxyType({"bf16": 2e-2, "fp16": 1e-2})

    def convert(self, model: onnx.ModelProto, weights: Mapping[str, Weight]) -> EngineFiles:
        files = convert_to_ncnn(model, weights)
        if self.precision == FULL_PRECISION:
            return files
        return EngineFiles(files.network + f"{PRECISION_KEY}{self.precision}\n".encode(), files.weights)

    def unsupported_nodes(self, model: onnx.ModelProto, weights: Mapping[str, Weight]) -> Mapping[int, str]:
        """Return, by index, the nodes that ncnn cannot compute exactly, each with the reason."""
        return find_unsupported_nodes(model, weights)

    def extra_memory(self, segments: Sequence[Segment]) -> int:
        return predict_ncnn_bytes(segments)

    @property
    def network_source(self) -> bytes:
        return resources.files("dicompiler_targets.sockets.runtime").joinpath("engine_ncnn.py").read_bytes()

    def load_network(self, network: Path, weights: Path, threads: int) -> LoadedNetwork:
        """Load the two files of a network, with the same Python module that boards use."""
        from dicompiler_targets.sockets.runtime import engine_ncnn

        return engine_ncnn.EngineNetwork(network, weights, threads, is_spinning=False)


WINOGRAD_SHAPE = (3, 3)
WINOGRAD_GROWTH = 64 / 9
"""Largest growth of the weights of a 3×3 convolution.

The algorithm F(m×m, r×r) stores (m + r − 1)² values for each kernel of r×r (A. Lavin, S. Gray, "Fast Algorithms for
Convolutional Neural Networks", 2015). The largest m of ncnn is 6.
"""


def predict_ncnn_bytes(segments: Sequence[Segment]) -> int:
    """Return an upper bound of the bytes that ncnn needs to keep the weights of one device's segments."""
    kept: dict[tuple[str, str], int] = {}
    for segment in segments:
        kept |= _weight_bytes(segment)
    return sum(kept.values())


def _weight_bytes(segment: Segment) -> dict[tuple[str, str], int]:
    sizes = constant_sizes(segment)
    kept = {(segment.name, name): size for name, size in sizes.items()}
    for node in segment.model.graph.node:
        if node.op_type == "Conv" and node.input[1] in sizes and _is_winograd(node):
            kept[segment.name, node.input[1]] = int(WINOGRAD_GROWTH * sizes[node.input[1]])
    return kept


def _is_winograd(node: onnx.NodeProto) -> bool:
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    return (
        tuple(attributes.get("kernel_shape", WINOGRAD_SHAPE)) == WINOGRAD_SHAPE
        and set(attributes.get("strides", (1,))) == {1}
        and set(attributes.get("dilations", (1,))) == {1}
        and attributes.get("group", 1) == 1
    )
