"""The engine ncnn, https://github.com/Tencent/ncnn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from dicompiler.plugin_api import Engine
from dicompiler.plugin_api.artifacts import FULL_PRECISION, BoardPackage, EngineFiles
from dicompiler_targets.engines.ncnn_converter import CONVERTERS, convert_to_ncnn, find_unsupported_nodes
from dicompiler_targets.engines.ncnn_memory import predict_ncnn_bytes

if TYPE_CHECKING:
    import onnx

    from dicompiler.plugin_api import Segment
    from dicompiler.plugin_api.artifacts import LoadedNetwork
    from dicompiler.plugin_api.onnx import Weight

PRECISION_KEY = "precision="
"""Begin of the last line of a .param file with reduced precision. ncnn ignores this line, and the runtimes read it."""


@dataclass(frozen=True)
class NcnnEngine(Engine):
    """ncnn, which is faster than onnxruntime on many ARM boards; it computes common operators of image networks.

    The tolerance is larger than that of onnxruntime, because ncnn computes 3×3 convolutions by Winograd's algorithm.
    The algorithm adds and subtracts values that nearly cancel, so its results have larger rounding errors than a sum of
    products. With bf16, ncnn stores tensors and weights with 8 significant bits, and computes sums in fp32. With fp16,
    it stores 11 significant bits, and ARM processors also compute sums in this type. Over five networks of images, the
    largest differences on x86 were 7.6e-3 with bf16 and 1.1e-3 with fp16 storage.
    """

    name: ClassVar[str] = "ncnn"
    packages: ClassVar[tuple[BoardPackage, ...]] = (BoardPackage("ncnn", (1, 0)),)
    operators: ClassVar[frozenset[str]] = frozenset(CONVERTERS)
    tolerance: ClassVar[float | None] = 1e-4
    extra_call_s: ClassVar[float] = 35e-6
    precisions: ClassVar[Mapping[str, float]] = MappingProxyType({"bf16": 2e-2, "fp16": 1e-2})

    def convert(self, model: onnx.ModelProto, weights: Mapping[str, Weight]) -> EngineFiles:
        """Return the two files of an ncnn network."""
        files = convert_to_ncnn(model, weights)
        if self.precision == FULL_PRECISION:
            return files
        return EngineFiles(files.network + f"{PRECISION_KEY}{self.precision}\n".encode(), files.weights)

    def unsupported_nodes(self, model: onnx.ModelProto, weights: Mapping[str, Weight]) -> Mapping[int, str]:
        """Return the nodes with operators, types or shapes for which ncnn has no exact counterpart."""
        return find_unsupported_nodes(model, weights)

    def extra_memory(self, segments: Sequence[Segment]) -> int:
        """Return an upper bound of the bytes that ncnn needs to keep the weights in its own form."""
        return predict_ncnn_bytes(segments)

    @property
    def network_source(self) -> bytes:
        """Source of the module that loads and runs networks."""
        return resources.files("dicompiler_targets.sockets.runtime").joinpath("engine_ncnn.py").read_bytes()

    def load_network(self, network: Path, weights: Path, threads: int) -> LoadedNetwork:
        """Load the files with the module of the runtime."""
        from dicompiler_targets.sockets.runtime import engine_ncnn

        return engine_ncnn.EngineNetwork(network, weights, threads, is_spinning=False)
