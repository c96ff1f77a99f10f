"""Conversion of a segment (ONNX submodel of a device) to an engine's format, and comparison with onnxruntime."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.ir.onnx.model import Model
from dicompiler.target.engine import Engine, EngineFiles, LoadedNetwork, UnsupportedByEngine, excluded_nodes
from dicompiler.verify.executor import run_model
from dicompiler.verify.tolerances import RELATIVE_TOLERANCES


class DeviatingResults(UnsupportedByEngine):
    """Error if an engine cannot run a converted submodel, or computes other results than onnxruntime."""


def convert_checked(engine: Engine, model: Model, inputs: Mapping[str, NDArray[Any]]) -> EngineFiles | None:
    """Convert a submodel, and compare the engine's outputs with those of onnxruntime.

    Args:
        engine: The engine.
        model: The submodel. Its outputs are of type float.
        inputs: Arrays by input name.

    Returns:
        The submodel in the format of the engine; None if the engine, or its option `layers`, leaves the submodel to
        onnxruntime.

    Raises:
        DeviatingResults: The engine cannot run the submodel, or its results differ by more than the tolerance.
        UnsupportedByEngine: The engine cannot compute the submodel.
    """
    if excluded_nodes(engine, model.proto.graph):
        return None
    files = engine.convert(model.proto, model.weights)
    if files is None:
        return None
    difference, reason = measure_difference(engine, model, files, inputs)
    if difference > allowed_difference(engine):
        raise DeviatingResults(
            f"cannot run it ({reason})" if reason else f"differs by {difference:.2g} of the largest output"
        )
    return files


def measure_difference(
    engine: Engine, model: Model, files: EngineFiles, inputs: Mapping[str, NDArray[Any]]
) -> tuple[float, str]:
    """Return the largest difference between an engine and onnxruntime, as a share of max|output|.

    Args:
        engine: The engine.
        model: The submodel. Its outputs are of type float.
        files: The submodel in the format of the engine.
        inputs: Arrays by input name.

    Returns:
        (difference, ""). If the engine cannot load or run the files: (infinity, the engine's error message).
    """
    expected = run_model(model, inputs)
    try:
        found = run_network(engine, model.proto.graph, files, inputs)
    except ValueError as error:
        return math.inf, str(error)
    return max(_relative_difference(expected[name], found[name]) for name in expected), ""


def run_network(
    engine: Engine, graph: onnx.GraphProto, files: EngineFiles, inputs: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Return the outputs that an engine computes for a converted submodel, by name.

    `graph` is the submodel from which the files were converted. `inputs` are arrays by input name.

    Raises:
        ValueError: The engine cannot load or run the files.
    """
    network = load_files(engine, files)
    arrays = network.run([np.ascontiguousarray(inputs[value.name]) for value in graph.input], output_shapes(graph))
    # The outputs are copied, because the network may overwrite their memory in its next call.
    return {value.name: np.array(array) for value, array in zip(graph.output, arrays, strict=True)}


def output_shapes(graph: onnx.GraphProto) -> list[list[int]]:
    return [[dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in graph.output]


def load_files(engine: Engine, files: EngineFiles) -> LoadedNetwork:
    """Load a converted submodel on one thread of this host; raise ValueError if the engine cannot load it."""
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder, "network"), Path(folder, "weights")
        for path, content in zip(paths, (files.network, files.weights), strict=True):
            path.write_bytes(content)
        return engine.load_network(*paths, threads=1)


def allowed_difference(engine: Engine) -> float:
    """Return the largest allowed difference from onnxruntime, which depends on the engine's precision.

    Args:
        engine: The engine.

    Returns:
        The difference as a share of max|output|.
    """
    if engine.precision in engine.precisions:
        return engine.precisions[engine.precision]
    return RELATIVE_TOLERANCES["float32"] if engine.tolerance is None else engine.tolerance


def _relative_difference(expected: NDArray[Any], found: NDArray[Any]) -> float:
    if expected.shape != found.shape or not np.all(np.isfinite(found) == np.isfinite(expected)):
        return math.inf
    finite = np.isfinite(expected)
    largest = float(np.abs(expected[finite]).max(initial=0.0))
    difference = float(np.abs(expected[finite] - found[finite]).max(initial=0.0))
    return difference / largest if largest else difference
