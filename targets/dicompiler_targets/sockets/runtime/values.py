"""Segments in onnxruntime: sessions are made from a manifest, tensors go in and out of onnxruntime as raw bytes.

onnxruntime's own values are used throughout, because numpy lacks some types (bfloat16, float8) and would cost copies.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from .heap import freed_to_system
from .role_schedule import role_manifests
from .value_codec import UNSIZED_TYPES, decode_value, encode_value

TENSOR_TYPES = {
    "FLOAT": (1, 4), "UINT8": (2, 1), "INT8": (3, 1), "UINT16": (4, 2), "INT16": (5, 2), "INT32": (6, 4),
    "INT64": (7, 8), "BOOL": (9, 1), "FLOAT16": (10, 2), "DOUBLE": (11, 8), "UINT32": (12, 4), "UINT64": (13, 8),
    "BFLOAT16": (16, 2), "FLOAT8E4M3FN": (17, 1), "FLOAT8E4M3FNUZ": (18, 1), "FLOAT8E5M2": (19, 1),
    "FLOAT8E5M2FNUZ": (20, 1),
}  # fmt: skip
"""The types that can be sent: ONNX's number for each, and its bytes per element."""

OPTIMIZATION_LEVELS = {
    "none": "DISABLE_ALL",
    "basic": "ENABLE_BASIC",
    "extended": "ENABLE_EXTENDED",
    "all": "ENABLE_ALL",
}


def value_from_bytes(payload: Any, value: Mapping[str, Any]) -> Any:
    """The onnxruntime value on an array of bytes, of the type and shape that `value` of the manifest tells.

    Where the manifest knows no shape, rank and dimensions stand before the data, as 64-bit numbers. Words and what is
    no tensor, which no onnxruntime value can be made of, as Python has them.
    """
    if value["dtype"] in UNSIZED_TYPES:
        return decode_value(payload)
    size = TENSOR_TYPES[value["dtype"]][1]
    shape, start = value["shape"], 0
    if shape is None:
        dims = payload[: len(payload) // 8 * 8].view(np.int64)
        rank = int(dims[0]) if len(dims) and 0 <= dims[0] < len(dims) else -1
        shape, start = dims[1 : rank + 1].tolist(), 8 * (rank + 1)
        if rank < 0 or min(shape, default=0) < 0 or start + math.prod(shape) * size != len(payload):
            raise ValueError(f"{value['name']!r}: {len(payload)} bytes do not hold what their shape says")
    return make_value(payload[start:], value["dtype"], shape)


def make_value(raw: Any, dtype: str, shape: Sequence[int]) -> Any:
    """The onnxruntime value on an array of as many bytes as it has."""
    number, size = TENSOR_TYPES[dtype]
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw.view(f"u{size}").reshape(shape), number)


def value_to_bytes(tensor: Any, value: Mapping[str, Any]) -> Any:
    """The tensor's bytes, on its own memory: it must stay alive as long as they do; what is bytes already stays as it
    is. ValueError if they are not of the type and shape that `value` of the manifest tells.
    """
    if value["dtype"] in UNSIZED_TYPES:
        return encode_value(tensor)
    if isinstance(tensor, np.ndarray):
        return tensor
    number, shape = TENSOR_TYPES[value["dtype"]][0], value["shape"]
    if not tensor.is_tensor() or tensor.element_type() != number or shape not in (None, list(tensor.shape())):
        made = f"{tensor.data_type()} {list(tensor.shape())}" if tensor.is_tensor() else "no tensor"
        raise ValueError(f"{value['name']!r}: {made} was made, {value['dtype']} {shape} was planned")
    length = tensor.tensor_size_in_bytes()
    pointer = (ctypes.c_ubyte * length).from_address(tensor.data_ptr()) if length else b""
    raw = np.frombuffer(pointer, np.uint8)
    if shape is not None:
        return raw
    return np.concatenate([np.array([len(tensor.shape()), *tensor.shape()], np.int64).view(np.uint8), raw])


def make_sessions(directory: Path, manifest: Mapping[str, Any], threads: int) -> list[Any]:
    """One session per segment, of all roles one after another, None for those without a file; segments of one file
    share theirs. ValueError naming the segment that onnxruntime cannot load."""
    # All sessions of this process take memory from one arena; else each would keep the most that it ever needed.
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(memory, None)
    segments = [segment for role in role_manifests(manifest) for segment in role["segments"]]
    sessions: dict[str | None, Any] = {None: None}
    for segment in segments:
        if segment.get("file") in sessions:
            continue
        try:
            path = str(directory / segment["file"])
            with freed_to_system():
                sessions[segment["file"]] = _make_session(path, manifest, threads)
        except Exception as error:  # onnxruntime's errors share no other base
            raise ValueError(f"segment {segment['name']!r} cannot be loaded: {one_line(error)}") from error
    return [sessions[segment.get("file")] for segment in segments]


def _session_options(manifest: Mapping[str, Any], threads: int) -> Any:
    """How a file is loaded."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.graph_optimization_level = getattr(
        ort.GraphOptimizationLevel, f"ORT_{OPTIMIZATION_LEVELS[manifest['optimization']]}"
    )
    if manifest["optimization"] != "all":  # what is fused differs from segment to segment, and rounds otherwise
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.add_session_config_entry("session.use_env_allocators", "1")
    if manifest["peers"]:  # between two segments the processor belongs to the threads that send and receive
        options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def _make_session(path: str, manifest: Mapping[str, Any], threads: int) -> Any:
    """The session of a file. On some processors onnxruntime makes uint8 of int8 at levels from "extended" on, and then
    refuses its own QuantizeLinear of opset 21, whose type stands in an attribute (its issue 25526): a file that it
    refuses is loaded as on those that keep int8, and no other."""
    options = _session_options(manifest, threads)
    try:
        return ort.InferenceSession(path, options, ["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no other base
        if "QuantizeLinear" not in str(error):
            raise
        options.add_session_config_entry("session.qdqisint8allowed", "1")
        return ort.InferenceSession(path, options, ["CPUExecutionProvider"])


def run_segment(
    session: Any,
    segment: Mapping[str, Any],
    values: Mapping[str, Any],
    places: Mapping[str, Any] | None = None,
    halt: Any = None,
) -> dict[str, Any]:
    """The segment's outputs by name, those in `places` there. halt: onnxruntime's RunOptions, whose `terminate` ends
    it. ValueError naming the segment."""
    try:
        if segment.get("unsized"):
            return _run_non_tensor(session, segment, values, places or {}, halt)
        # A binding takes a fifth of the time of run_with_ort_values, which tests, lists and copies.
        binding = session.io_binding()
        for name in segment["inputs"]:
            binding.bind_ortvalue_input(name, values[name])
        for name in segment["outputs"]:
            if places and name in places:
                binding.bind_ortvalue_output(name, places[name])
            else:
                binding.bind_output(name)
        session.run_with_iobinding(binding, halt)
        return dict(zip(segment["outputs"], binding.get_outputs(), strict=True))
    except Exception as error:  # see run_bound
        raise _segment_error(segment, error) from error


def _run_non_tensor(
    session: Any, segment: Mapping[str, Any], values: Mapping[str, Any], places: Mapping[str, Any], halt: Any
) -> dict[str, Any]:
    """As run_segment, where words or what is no tensor come or go: they cannot be bound."""
    made = session.run(segment["outputs"], {name: values[name] for name in segment["inputs"]}, halt)
    found = dict(zip(segment["outputs"], made, strict=True))
    for name in found.keys() - set(segment["unsized"]):
        array = np.asarray(found[name], order="C")
        if name in places:
            places[name].update_inplace(array)
        found[name] = places[name] if name in places else ort.OrtValue.ortvalue_from_numpy(array)
    return found


def run_bound(session: Any, segment: Mapping[str, Any], binding: Any, halt: Any = None) -> None:
    """Runs the segment on what is bound to it, see `run_segment`. ValueError naming it."""
    try:
        session.run_with_iobinding(binding, halt)
    except Exception as error:  # onnxruntime's errors share no other base
        raise _segment_error(segment, error) from error


def _segment_error(segment: Mapping[str, Any], error: Exception) -> ValueError:
    return ValueError(f"segment {segment['name']!r} cannot be run by onnxruntime: {one_line(error)}")


def one_line(error: Exception) -> str:
    """The error's message without line breaks, at most 1000 characters."""
    return " ".join(str(error).split())[:1000]
