"""The engine MNN, and a prediction of the memory that it needs for weights.

MNN (https://github.com/alibaba/MNN) reads each weight when it creates a session, and keeps it in another layout. For
convolutions by Winograd's algorithm, it keeps transformed weights, which are up to 16 times as large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import onnx
from onnx import helper

from dicompiler.plugin_api import Engine, Segment
from dicompiler.plugin_api.artifacts import BoardPackage, EngineFiles
from dicompiler.plugin_api.costs import constant_sizes
from dicompiler_targets.engines.mnn_converter import convert_to_mnn
from dicompiler_targets.engines.mnn_operators import OPERATOR_CHECKS, SubmodelFacts, find_unsupported_nodes
from dicompiler_targets.sockets.runtime import engine_mnn

if TYPE_CHECKING:
    from dicompiler.plugin_api.artifacts import LoadedNetwork
    from dicompiler.plugin_api.onnx import Weight


@dataclass(frozen=True)
class MnnEngine(Engine):
    """MNN, which is fast for convolutions; it computes common operators of image networks, for target sockets only.

    The tolerance is larger than that of ncnn. Both compute convolutions by Winograd's algorithm F(6×6, 3×3), but MNN
    interpolates at the points 0, ±1, ±2 and ±3, which multiplies rounding errors by larger numbers than ncnn's points
    0, ±1/2, ±1 and ±2. The largest difference of a single convolution in seven networks was 1.1e-3 of max|output| (in
    VGG16), and that of a whole network 1.4e-3 (YOLO11n).
    """

    name: ClassVar[str] = "mnn"
    packages: ClassVar[tuple[BoardPackage, ...]] = (BoardPackage("MNN", (3, 6)),)
    operators: ClassVar[frozenset[str]] = frozenset(OPERATOR_CHECKS)
    tolerance: ClassVar[float | None] = 5e-3
    extra_call_s: ClassVar[float] = 12e-6

    accurate: bool = field(
        default=False,
        metadata={"help": "compute convolutions with about 100 times smaller rounding errors, but slower"},
    )

    def convert(self, model: onnx.ModelProto, weights: Mapping[str, Weight]) -> EngineFiles:
        files = convert_to_mnn(model, weights)
        return replace(files, network=files.network + engine_mnn.ACCURATE_MARK) if self.accurate else files

    def unsupported_nodes(self, model: onnx.ModelProto, weights: Mapping[str, Weight]) -> Mapping[int, str]:
        """Return, by index, the nodes that MNN does not compute as onnxruntime does, each with the reason."""
        return find_unsupported_nodes(SubmodelFacts(model, weights))

    def extra_memory(self, segments: Sequence[Segment]) -> int:
        return predict_mnn_bytes(segments)

    @property
    def network_source(self) -> bytes:
        return resources.files("dicompiler_targets.sockets.runtime").joinpath("engine_mnn.py").read_bytes()

    def load_network(self, network: Path, weights: Path, threads: int) -> LoadedNetwork:
        """Load the two files of a network, with the same Python module that boards use."""
        return engine_mnn.EngineNetwork(network, weights, threads, is_spinning=False)

    def check_installed(self) -> None:
        """Raise DicompilerError if MNN is missing or too old, without MNN's prints to stdout."""
        with engine_mnn.discard_native_prints():
            super().check_installed()


CHANNEL_MULTIPLE = 16
"""Multiple to which MNN rounds up numbers of channels. It depends on the processor, and this is the largest one."""
MAX_WINOGRAD_VALUES = 64
"""Largest number of transformed values that MNN keeps for each kernel of a convolution by Winograd's algorithm.

The algorithm F(m×m, r×r) stores (m + r − 1)² values, and MNN's largest m + r − 1 is 8.
"""


def predict_mnn_bytes(segments: Sequence[Segment]) -> int:
    """Return an upper bound of the bytes by which MNN's weights are larger than those of one device's segments."""
    grown: dict[tuple[str, str], int] = {}
    for segment in segments:
        sizes = constant_sizes(segment)
        shapes = {tensor.name: tuple(tensor.dims) for tensor in segment.model.graph.initializer}
        for node in segment.model.graph.node:
            name = node.input[1] if len(node.input) > 1 else ""
            if name in shapes and (count := _count_kept_values(node, shapes[name])):
                itemsize = sizes[name] // max(1, math.prod(shapes[name]))
                grown[segment.name, name] = max(0, itemsize * count - sizes[name])
    return sum(grown.values())


def _count_kept_values(node: onnx.NodeProto, shape: Sequence[int]) -> int:
    """Return an upper bound of the number of values in MNN's own copy of a node's weight.

    The result is 0 if MNN uses the weight as it is.
    """
    if node.op_type in ("Gemm", "MatMul") and len(shape) == 2:
        return math.prod(map(_round_up, shape))
    if node.op_type not in ("Conv", "ConvTranspose") or len(shape) != 4:
        return 0
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    groups, values = int(attributes.get("group", 1)), math.prod(shape[2:])
    if node.op_type == "Conv" and _is_winograd(shape, attributes):
        values = MAX_WINOGRAD_VALUES
    if shape[1] == 1 and shape[0] == groups:
        return _round_up(groups) * math.prod(shape[2:])
    return groups * _round_up(shape[0] // groups) * _round_up(shape[1]) * values


def _round_up(count: int) -> int:
    return -(-count // CHANNEL_MULTIPLE) * CHANNEL_MULTIPLE


def _is_winograd(shape: Sequence[int], attributes: Mapping[str, Any]) -> bool:
    is_plain = set(attributes.get("strides", (1,))) == set(attributes.get("dilations", (1,))) == {1}
    return is_plain and shape[2] == shape[3] > 1
