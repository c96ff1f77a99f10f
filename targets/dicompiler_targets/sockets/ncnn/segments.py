"""The choice of the segments of a program that ncnn computes.

A segment is converted if ncnn supports all of its operators and computes nearly the same outputs as onnxruntime. The
comparison uses the tensors that the segment reads when the program runs on random inputs.
"""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto

from dicompiler.plugin_api import DicompilerError, Model, Program
from dicompiler.plugin_api.artifacts import Json
from dicompiler.plugin_api.onnx import ProgramExecutor, Tolerance, Weight, random_inputs, run_model
from dicompiler_targets.artifact_files import NcnnFiles, serialize_model
from dicompiler_targets.copy_hoisting import HoistedSegment
from dicompiler_targets.segment_io import make_input_arrays
from dicompiler_targets.sockets.ncnn.converter import UnsupportedByNcnn, convert_to_ncnn
from dicompiler_targets.sockets.runtime.ncnn_session import NcnnSession

log = logging.getLogger("dicompiler")

TOLERANCE = 1e-4
"""Largest allowed difference to onnxruntime, as a share of max|output|.

ncnn computes 3×3 convolutions by Winograd's algorithm. It adds and subtracts values that nearly cancel, so it rounds
more coarsely than a sum of products.
"""
INSTALL_HINT = "the engine ncnn is not installed: run 'pip install ncnn'"


def convert_segments(program: Program, hoisted: Sequence[Sequence[Sequence[HoistedSegment]]]) -> dict[bytes, NcnnFiles]:
    """Convert the segments of a program that ncnn can compute; the others stay with onnxruntime.

    Warnings are logged for each segment that ncnn computes differently, and for the number of segments that stay with
    onnxruntime, with the causes.

    Args:
        program: The program.
        hoisted: For each role (the plan, a replica or a failure plan), each device and each segment: the segment
            without the copies at its inputs and outputs.

    Returns:
        The ncnn networks by the serialized models of their segments.

    Raises:
        DicompilerError: The package ncnn is not installed.
    """
    try:
        import ncnn  # noqa: F401
    except ImportError:
        raise DicompilerError(INSTALL_HINT) from None
    converted: dict[bytes, NcnnFiles] = {}
    seen, causes = set[bytes](), Counter[str]()
    for role, devices in zip(program.roles, hoisted, strict=True):
        tensors = ProgramExecutor(role).run(random_inputs(role.inputs), keep_values=True).values
        for device, segments in zip(role.devices, devices, strict=True):
            for entry in segments:
                if entry.segment is None or (key := serialize_model(entry.segment)) in seen:
                    continue
                seen.add(key)
                try:
                    converted[key] = _convert_segment(entry, role.weights, tensors[device.device])
                except UnsupportedByNcnn as error:
                    causes[str(error)] += 1
    reasons = ", ".join(f"{cause} ({count}×)" for cause, count in sorted(causes.items()))
    if reasons:
        log.warning(
            "ncnn computes %d of %d segments, onnxruntime the others, because of %s", len(converted), len(seen), reasons
        )
    return converted


def _convert_segment(
    hoisted: HoistedSegment, weights: Mapping[str, Weight], tensors: Mapping[str, NDArray[Any]]
) -> NcnnFiles:
    """Return the ncnn network of a segment, after comparing it with onnxruntime.

    `tensors` has the tensors of the device. Raise UnsupportedByNcnn if ncnn cannot compute the segment, or if its
    results differ by more than the tolerance.
    """
    assert hoisted.segment is not None
    files = convert_to_ncnn(hoisted.segment.model, weights)
    model = Model(hoisted.segment.model, weights)
    difference = measure_difference(model, files, make_input_arrays(hoisted, tensors))
    if difference > TOLERANCE:
        log.warning(
            "segment %r: ncnn differs from onnxruntime by %.2g of the largest output: onnxruntime computes it",
            hoisted.segment.name,
            difference,
        )
        raise UnsupportedByNcnn("other results than onnxruntime's")
    return files


def find_tolerances(model: Model) -> dict[str, Tolerance]:
    """Return the allowed difference of each output of type float, for `Target.tolerances`."""
    outputs = model.proto.graph.output
    floats = [value.name for value in outputs if value.type.tensor_type.elem_type == TensorProto.FLOAT]
    return dict.fromkeys(floats, Tolerance(TOLERANCE))


def describe_network(graph: onnx.GraphProto, weights_file: str) -> Json:
    """Return the entry of a segment's manifest for its ncnn network: the file of weights, inputs and outputs."""
    inputs, outputs = (
        [{"name": v.name, "shape": [d.dim_value for d in v.type.tensor_type.shape.dim]} for v in values]
        for values in (graph.input, graph.output)
    )
    return {"weights": weights_file, "inputs": inputs, "outputs": outputs}


def measure_difference(model: Model, files: NcnnFiles, inputs: Mapping[str, NDArray[Any]]) -> float:
    """Return the largest difference between ncnn and onnxruntime, as a share of the largest value of the output.

    A network that ncnn cannot load or run differs infinitely.
    """
    expected = run_model(model, inputs)
    try:
        found = run_network(model.proto.graph, files, inputs)
    except ValueError as error:
        log.info("ncnn: %s", error)
        return float("inf")
    return max(_relative_difference(expected[name], found[name]) for name in expected)


def run_network(
    graph: onnx.GraphProto, files: NcnnFiles, inputs: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Return the outputs that ncnn computes by name. `graph` is the graph from which the network was converted."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "layers").write_bytes(files.layers)
        Path(folder, "weights").write_bytes(files.weights)
        segment = {"file": "layers", "ncnn": describe_network(graph, "weights")}
        session = NcnnSession(Path(folder), segment, threads=1, is_spinning=False)
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)))
    for value in session.get_outputs():
        binding.bind_output(value.name)
    session.run_with_iobinding(binding)
    # Copies, because the arrays use memory of the values, which are freed with the binding.
    return {name: value.numpy().copy() for name, value in binding.outputs.items()}


def _relative_difference(expected: NDArray[Any], found: NDArray[Any]) -> float:
    if not np.all(np.isfinite(found) == np.isfinite(expected)):
        return float("inf")
    finite = np.isfinite(expected)
    largest = float(np.abs(expected[finite]).max(initial=0.0))
    difference = float(np.abs(expected[finite] - found[finite]).max(initial=0.0))
    return difference / largest if largest else difference
