"""The engine ncnn, https://github.com/Tencent/ncnn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dicompiler.plugin_api import Engine
from dicompiler.plugin_api.artifacts import BoardPackage
from dicompiler_targets.engines.ncnn_converter import CONVERTERS, convert_to_ncnn, find_unsupported_nodes
from dicompiler_targets.engines.ncnn_memory import predict_ncnn_bytes

if TYPE_CHECKING:
    import onnx

    from dicompiler.plugin_api import Segment
    from dicompiler.plugin_api.artifacts import EngineFiles, LoadedNetwork
    from dicompiler.plugin_api.onnx import Weight


@dataclass(frozen=True)
class NcnnEngine(Engine):
    """ncnn, which is faster than onnxruntime on many ARM boards; it computes common operators of image networks.

    The tolerance is larger than that of onnxruntime, because ncnn computes 3×3 convolutions by Winograd's algorithm.
    The algorithm adds and subtracts values that nearly cancel, so its results have larger rounding errors than a sum of
    products.
    """

    name: ClassVar[str] = "ncnn"
    packages: ClassVar[tuple[BoardPackage, ...]] = (BoardPackage("ncnn", (1, 0)),)
    operators: ClassVar[frozenset[str]] = frozenset(CONVERTERS)
    tolerance: ClassVar[float | None] = 1e-4
    extra_call_s: ClassVar[float] = 35e-6

    def convert(self, model: onnx.ModelProto, weights: Mapping[str, Weight]) -> EngineFiles:
        """Return the two files of an ncnn network."""
        return convert_to_ncnn(model, weights)

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
