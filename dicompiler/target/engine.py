"""The base class of engines, which compute segments (ONNX submodels) on devices.

    segment ⇒ Engine.convert ⇒ EngineFiles ⇒ LoadedNetwork, on a device

onnxruntime computes all segments that another engine does not support.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from dicompiler.base.errors import DicompilerError
from dicompiler.base.option_specs import Spec, spec_of
from dicompiler.base.version import parse_release
from dicompiler.ir.cluster import computes_layer
from dicompiler.partition.placed_model import read_part

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

    from dicompiler.ir.onnx.weights import Weight
    from dicompiler.ir.program import Segment

NETWORK_MODULE_PREFIX = "dicompiler_engine_"
"""Prefix of module names: the module dicompiler_engine_NAME has the class `EngineNetwork` of the engine NAME."""


Precision = Literal["fp32", "fp16", "bf16"]
"""Type in which an engine stores values, and computes if the board's processor can."""
FULL_PRECISION: Precision = "fp32"


class UnsupportedByEngine(DicompilerError):
    """Error if a submodel has an operator, a type or a shape that the engine cannot compute as onnxruntime does."""


@dataclass(frozen=True)
class BoardPackage:
    """A Python package that a board needs.

    Attributes:
        name: Name of the package for pip, and of its module.
        min_version: The oldest version that works.
    """

    name: str
    min_version: tuple[int, ...]


@dataclass(frozen=True)
class EngineFiles:
    """A segment (ONNX submodel of a device), converted to the format of an engine.

    Attributes:
        network: Content of the file with the operators. Inputs and outputs have the order of the segment's model.
        weights: Content of the file with the weights. `profile` replaces it by zeros of the same length.
    """

    network: bytes = field(repr=False)
    weights: bytes = field(repr=False)


class LoadedNetwork(Protocol):
    """A segment (ONNX submodel) that an engine has loaded on a device.

    The class `EngineNetwork` of the module `dicompiler_engine_NAME` has this form, for the engine NAME. The module must
    not import dicompiler, which boards do not have.
    """

    def __init__(self, network: Path, weights: Path, threads: int, is_spinning: bool) -> None:
        """Load a segment (submodel) that `Engine.convert` has converted.

        Args:
            network: File with `EngineFiles.network`.
            weights: File with `EngineFiles.weights`.
            threads: Number of threads that compute the segment.
            is_spinning: True if threads may wait actively for the next call. False if other devices need the processor.

        Raises:
            ValueError: The engine is not installed, or cannot load the files.
        """

    def run(self, inputs: Sequence[NDArray[Any]], shapes: Sequence[Sequence[int]]) -> Sequence[NDArray[Any]]:
        """Compute the outputs of the segment.

        Args:
            inputs: The inputs of the segment, of type float32. The network must not change them.
            shapes: Shape of each output.

        Returns:
            The outputs. They are valid until the next call.

        Raises:
            ValueError: The engine fails.
        """


@dataclass(frozen=True)
class Engine(ABC):
    """The base class of all engines. A subclass is a frozen dataclass.

    `dicompiler list engines` shows the first line of the subclass's docstring.

    Attributes:
        name: Name of the engine in `--engine NAME`: lower-case letters, digits and underscores.
        packages: Python packages that this host and the boards need.
        operators: ONNX operators that the engine can compute, if types and shapes allow it; empty: all.
        tolerance: Allowed difference from onnxruntime as a share of max|output|; None: the usual tolerance of `verify`.
        extra_call_s: Seconds by which a call takes longer than in onnxruntime, on a host with cores that compute
            REFERENCE_FLOPS_PER_S. Predictions scale it to each device's speed.
        precisions: The reduced precisions that the engine can use, each with its allowed difference from onnxruntime.
        precision: The precision with which the engine computes: fp32, or one of `precisions`.
        layers: Names or patterns (conv*) of the layers that the engine computes; empty: all. onnxruntime computes the
            other layers.
    """

    name: ClassVar[str]
    packages: ClassVar[tuple[BoardPackage, ...]] = ()
    operators: ClassVar[frozenset[str]] = frozenset()
    tolerance: ClassVar[float | None] = None
    extra_call_s: ClassVar[float] = 0.0
    precisions: ClassVar[Mapping[str, float]] = MappingProxyType({})

    precision: Precision = field(
        default=FULL_PRECISION,
        kw_only=True,
        metadata={"help": "type in which the engine stores values; only some engines support fp16 and bf16"},
    )
    layers: tuple[str, ...] = field(
        default=(),
        kw_only=True,
        metadata={"help": "names or patterns (conv*) of the layers that the engine computes; default: all"},
    )

    @abstractmethod
    def convert(self, model: onnx.ModelProto, weights: Mapping[str, Weight]) -> EngineFiles | None:
        """Convert a submodel. The same submodel must give the same bytes.

        onnxruntime computes the submodel instead if the caller finds that the engine's results differ, so the engine
        need not check this.

        Args:
            model: The submodel. Its large initializers are placeholders without data.
            weights: The data of the placeholders, by name.

        Returns:
            The files; None to leave the submodel to onnxruntime.

        Raises:
            UnsupportedByEngine: The engine does not compute the submodel. The message names the operator, the type or
                the shape.
        """

    def unsupported_nodes(self, model: onnx.ModelProto, weights: Mapping[str, Weight]) -> Mapping[int, str]:  # noqa: ARG002
        """Return the nodes of a submodel that the engine cannot compute, so that the others can be converted.

        By default, they are the nodes with an operator that is not in `operators`.

        Args:
            model: The submodel. Its large initializers are placeholders without data.
            weights: The data of the placeholders, by name.

        Returns:
            The reason for each of these nodes, by node index.
        """
        if not self.operators:
            return {}
        nodes = enumerate(model.graph.node)
        return {i: f"operator {node.op_type}" for i, node in nodes if node.op_type not in self.operators}

    def extra_memory(self, segments: Sequence[Segment]) -> int:  # noqa: ARG002
        """Return the bytes that the engine needs in addition to the weights and activations of segments.

        Args:
            segments: The segments of a device.

        Returns:
            An upper bound in bytes. Default: 0.
        """
        return 0

    @property
    def network_source(self) -> bytes:
        """Python source of the module with the class `EngineNetwork`, which `profile` copies to boards.

        It is empty by default: the boards already have the module.
        """
        return b""

    def load_network(self, network: Path, weights: Path, threads: int) -> LoadedNetwork:
        """Load the files of a converted segment (submodel) on this host, to compare its results with onnxruntime.

        Args:
            network: File with `EngineFiles.network`.
            weights: File with `EngineFiles.weights`.
            threads: Number of threads.

        Returns:
            The network.

        Raises:
            ValueError: The engine cannot load the files.
        """
        module = importlib.import_module(f"{NETWORK_MODULE_PREFIX}{self.name}")
        loaded: LoadedNetwork = module.EngineNetwork(network, weights, threads, False)
        return loaded

    def check_installed(self) -> None:
        """Raise DicompilerError if this host lacks a package of the engine, or has a version that is too old.

        Raises:
            DicompilerError: The message has the command that installs the package.
        """
        for package in self.packages:
            oldest = ".".join(map(str, package.min_version))
            try:
                found = metadata.version(package.name)
                importlib.import_module(package.name)
            except ImportError:
                raise DicompilerError(
                    f"the engine {self.name} is not installed: run 'pip install {package.name}'"
                ) from None
            if parse_release(found) < package.min_version:
                raise DicompilerError(
                    f"the engine {self.name}: {package.name} {found} is too old, {oldest} or newer is needed: run "
                    f"'pip install --upgrade {package.name}'"
                )

    @property
    def spec(self) -> Spec:
        """The engine as text: its name, and the options that differ from their defaults."""
        return spec_of(self)


def excluded_nodes(engine: Engine, graph: onnx.GraphProto) -> set[int]:
    """Return the nodes of layers that the engine's option `layers` leaves to onnxruntime.

    Args:
        engine: The engine.
        graph: Graph of a segment (submodel). Its nodes are annotated with their layers.

    Returns:
        Indices of the nodes.
    """
    parts = [read_part(node) for node in graph.node]
    text = str(engine.spec)
    return {i for i, part in enumerate(parts) if part is not None and not computes_layer(text, part[0])}
