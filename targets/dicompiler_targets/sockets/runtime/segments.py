"""Segments in onnxruntime: sessions, tensors as bytes, copies at segment boundaries, and reused buffers.

A manifest ⇒ sessions, and for each role the copies and buffers of its segments. onnxruntime's own values are used
throughout, because numpy lacks some types (bfloat16, float8) and would need copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from .role_schedule import role_manifests
from .value_codec import UNSIZED_TYPES, decode_value, encode_value

TENSOR_TYPES = {
    "FLOAT": (1, 4), "UINT8": (2, 1), "INT8": (3, 1), "UINT16": (4, 2), "INT16": (5, 2), "INT32": (6, 4),
    "INT64": (7, 8), "BOOL": (9, 1), "FLOAT16": (10, 2), "DOUBLE": (11, 8), "UINT32": (12, 4), "UINT64": (13, 8),
    "BFLOAT16": (16, 2), "FLOAT8E4M3FN": (17, 1), "FLOAT8E4M3FNUZ": (18, 1), "FLOAT8E5M2": (19, 1),
    "FLOAT8E5M2FNUZ": (20, 1),
}  # fmt: skip
"""Types that can be sent: ONNX's number and the bytes per element."""
OPTIMIZATION_LEVELS = {
    "none": "DISABLE_ALL", "basic": "ENABLE_BASIC", "extended": "ENABLE_EXTENDED", "all": "ENABLE_ALL",
}  # fmt: skip
MAX_BUFFERED_BYTES = 1 << 14
"""Largest tensor that is kept in a buffer set."""
MAX_BUFFER_SETS = 8
"""Buffer sets of a role; further frames in flight do without."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # Parameters of glibc's mallopt.
_INITIAL_THRESHOLD_BYTES, _LARGE_THRESHOLD_BYTES = 128 << 10, 32 << 20

# -- tensors as bytes


def value_from_bytes(payload: Any, value: Mapping[str, Any]) -> Any:
    """Return the onnxruntime value on an array of bytes.

    If the manifest does not know the shape, the payload starts with rank and dimensions as 64-bit integers. For strings
    and non-tensors, of which no onnxruntime value can be made, the Python value is returned.

    Args:
        payload: The bytes; the value uses the same memory.
        value: The value's entry in the manifest.

    Raises:
        ValueError: The bytes do not have the type and shape of the entry.
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
            raise ValueError(f"{value['name']!r}: {len(payload)} bytes do not match their shape")
    return make_value(payload[start:], value["dtype"], shape)


def make_value(raw: Any, dtype: str, shape: Sequence[int]) -> Any:
    """Return an onnxruntime value that uses the memory of an array of bytes."""
    number, size = TENSOR_TYPES[dtype]
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw.view(f"u{size}").reshape(shape), number)


def value_to_bytes(tensor: Any, value: Mapping[str, Any]) -> Any:
    """Return the bytes of an onnxruntime value; arrays, which are bytes already, are returned as they are.

    Args:
        tensor: The value. It must stay alive as long as the bytes, which use its memory.
        value: The value's entry in the manifest.

    Raises:
        ValueError: The value does not have the type and shape of the entry.
    """
    if value["dtype"] in UNSIZED_TYPES:
        return encode_value(tensor)
    if isinstance(tensor, np.ndarray):
        return tensor
    number, shape = TENSOR_TYPES[value["dtype"]][0], value["shape"]
    if not tensor.is_tensor() or tensor.element_type() != number or shape not in (None, list(tensor.shape())):
        found = f"{tensor.data_type()} {list(tensor.shape())}" if tensor.is_tensor() else "a value that is not a tensor"
        raise ValueError(f"{value['name']!r}: computed {found}, expected {value['dtype']} {shape}")
    length = tensor.tensor_size_in_bytes()
    pointer = (ctypes.c_ubyte * length).from_address(tensor.data_ptr()) if length else b""
    raw = np.frombuffer(pointer, np.uint8)
    if shape is not None:
        return raw
    return np.concatenate([np.array([len(tensor.shape()), *tensor.shape()], np.int64).view(np.uint8), raw])


# -- sessions


def make_sessions(directory: Path, manifest: Mapping[str, Any], threads: int) -> list[Any]:
    """Return a session per segment of all roles, None for segments without a file.

    Segments with the same file share a session. Raise ValueError with the segment's name if it cannot be loaded.
    """
    # All sessions share one arena. Otherwise each would keep the most memory that it ever needed.
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
        except Exception as error:  # onnxruntime's errors have no other common base.
            raise ValueError(f"segment {segment['name']!r} cannot be loaded: {one_line(error)}") from error
    return [sessions[segment.get("file")] for segment in segments]


def _session_options(manifest: Mapping[str, Any], threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    level = OPTIMIZATION_LEVELS[manifest["optimization"]]
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{level}")
    if manifest["optimization"] != "all":  # Fused QDQ groups differ from segment to segment and round differently.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.add_session_config_entry("session.use_env_allocators", "1")
    if manifest["peers"]:  # Between two segments, the processor is needed for sending and receiving.
        options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def _make_session(path: str, manifest: Mapping[str, Any], threads: int) -> Any:
    """Return the session of a file; if onnxruntime refuses its QuantizeLinear, try again with int8 kept.

    On some processors, onnxruntime converts int8 to uint8 at levels from "extended" on, and then refuses its own
    QuantizeLinear of opset 21, whose type is given by an attribute (onnxruntime issue 25526).
    """
    options = _session_options(manifest, threads)
    try:
        return ort.InferenceSession(path, options, ["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no other common base.
        if "QuantizeLinear" not in str(error):
            raise
        options.add_session_config_entry("session.qdqisint8allowed", "1")
        return ort.InferenceSession(path, options, ["CPUExecutionProvider"])


def run_segment(
    session: Any,
    segment: Mapping[str, Any],
    values: Mapping[str, Any],
    places: Mapping[str, Any] | None = None,
    run_options: Any = None,
) -> dict[str, Any]:
    """Run a segment and return its outputs by name.

    Args:
        session: The segment's session.
        segment: Its entry in the manifest.
        values: Its inputs by name.
        places: Preallocated values for some of the outputs.
        run_options: onnxruntime's RunOptions, whose `terminate` ends the call.

    Raises:
        ValueError: onnxruntime failed; the message names the segment.
    """
    try:
        if segment.get("unsized"):
            return _run_non_tensor(session, segment, values, places or {}, run_options)
        # A binding takes a fifth of the time of run_with_ort_values, which checks, lists and copies.
        binding = session.io_binding()
        for name in segment["inputs"]:
            binding.bind_ortvalue_input(name, values[name])
        for name in segment["outputs"]:
            if places and name in places:
                binding.bind_ortvalue_output(name, places[name])
            else:
                binding.bind_output(name)
        session.run_with_iobinding(binding, run_options)
        return dict(zip(segment["outputs"], binding.get_outputs(), strict=True))
    except Exception as error:  # onnxruntime's errors have no other common base.
        raise _segment_error(segment, error) from error


def _run_non_tensor(
    session: Any, segment: Mapping[str, Any], values: Mapping[str, Any], places: Mapping[str, Any], run_options: Any
) -> dict[str, Any]:
    """Run a segment with string or non-tensor inputs or outputs, which cannot be bound."""
    outputs = session.run(segment["outputs"], {name: values[name] for name in segment["inputs"]}, run_options)
    found = dict(zip(segment["outputs"], outputs, strict=True))
    for name in found.keys() - set(segment["unsized"]):
        array = np.asarray(found[name], order="C")
        if name in places:
            places[name].update_inplace(array)
        found[name] = places[name] if name in places else ort.OrtValue.ortvalue_from_numpy(array)
    return found


def run_bound(session: Any, segment: Mapping[str, Any], binding: Any, run_options: Any = None) -> None:
    """Run a segment on its bound inputs and outputs; raise ValueError that names it if onnxruntime fails."""
    try:
        session.run_with_iobinding(binding, run_options)
    except Exception as error:  # onnxruntime's errors have no other common base.
        raise _segment_error(segment, error) from error


def _segment_error(segment: Mapping[str, Any], error: Exception) -> ValueError:
    return ValueError(f"segment {segment['name']!r}: onnxruntime cannot run it: {one_line(error)}")


def one_line(error: Exception) -> str:
    """Return the error's message without line breaks, at most 1000 characters."""
    return " ".join(str(error).split())[:1000]


# -- copies at segment boundaries

RegionOfShape = tuple[Sequence[int], Sequence[Sequence[int]]]
"""The shape of a tensor and a region of it."""
MemoryCopy = tuple[Any, Any]
"""Two array views: target and source of a copy."""


class RegionCopy:
    """Copies a region of one tensor to a region of another, in blocks that are contiguous in both tensors."""

    def __init__(self, source: RegionOfShape, target: RegionOfShape, element_bytes: int) -> None:
        counts = [end - begin for begin, end in source[1]]
        axis = max(_first_contiguous_axis(shape, counts) for shape, _ in (source, target))
        block = element_bytes * math.prod(counts[axis:])
        self._counts = tuple(counts[:axis])
        self._type = np.dtype(f"u{block}" if block in (1, 2, 4, 8) else f"V{block}")
        self._source_offset, self._source_strides = _offset_and_strides(*source, axis, element_bytes)
        self._target_offset, self._target_strides = _offset_and_strides(*target, axis, element_bytes)

    def views(self, source: Any, target: Any) -> MemoryCopy:
        """Return target and source of the copy as views of both tensors' memory."""
        target_view = np.ndarray(self._counts, self._type, target, self._target_offset, self._target_strides)
        return target_view, np.ndarray(self._counts, self._type, source, self._source_offset, self._source_strides)


def _first_contiguous_axis(shape: Sequence[int], counts: Sequence[int]) -> int:
    """Return the first axis from which on a region with these element counts is contiguous in memory."""
    axis = len(shape) - 1
    while axis > 0 and counts[axis] == shape[axis]:
        axis -= 1
    return axis


def _offset_and_strides(
    shape: Sequence[int], region: Sequence[Sequence[int]], axis: int, element_bytes: int
) -> tuple[int, tuple[int, ...]]:
    """Return the region's offset and its strides along the axes before `axis`, in bytes."""
    strides = tuple(element_bytes * math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return sum(begin * stride for (begin, _), stride in zip(region, strides, strict=True)), strides[:axis]


CopiedPiece = tuple[str, Mapping[str, Any], RegionCopy]
"""Name of a source tensor, its type and shape, and the copy of its piece."""
AssembledTensor = tuple[Mapping[str, Any], Sequence[CopiedPiece]]
"""A tensor of the manifest that is assembled from pieces, and the pieces."""


class SegmentIO:
    """Inputs and outputs of a segment that the runtime copies itself.

    Received pieces are copied directly to their place in the tensor that the segment reads. Pieces for other devices
    are copied directly from the memory of the tensor that the segment computes.

    Attributes:
        inner: The segment with the inputs and outputs of its session.
        copied_inputs: Inputs that are only copied.
        outputs: All outputs of the segment.
        names: All tensors that the segment reads and computes.
    """

    def __init__(self, segment: Mapping[str, Any], session: Any) -> None:
        """Describe the segment; `session` is None if it only copies."""
        self._joins, self._cuts = (
            [(tensor, [_make_piece(tensor, piece) for piece in tensor["pieces"]]) for tensor in segment.get(key, ())]
            for key in ("assembled_inputs", "assembled_outputs")
        )
        self.inner, self.outputs = segment, segment["outputs"]
        if self._joins or self._cuts:
            inputs, outputs = ([], []) if session is None else (session.get_inputs(), session.get_outputs())
            self.inner = {**segment, "inputs": [v.name for v in inputs], "outputs": [v.name for v in outputs]}
        self.copied_inputs = {*segment["inputs"]} - {*self.inner["inputs"]}
        self._internal = {*self.inner["outputs"]} - {*self.outputs}
        self.names = {*segment["inputs"], *segment["outputs"], *self.inner["inputs"], *self.inner["outputs"]}

    def join_inputs(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `values` with the assembled inputs added; raise ValueError if a piece has another type or shape."""
        if not self._joins:
            return values
        joined = dict(values)
        for tensor, raw in _assemble(self._joins, values.__getitem__):
            joined[tensor["name"]] = make_value(raw, tensor["dtype"], tensor["shape"])
        return joined

    def cut_outputs(self, computed: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the segment's outputs: computed tensors, and bytes of pieces of `computed` and `values`.

        Raise ValueError if the session computed a tensor of another type or shape than planned.
        """
        assembled = _assemble(self._cuts, lambda name: computed[name] if name in computed else values[name])
        computed |= {tensor["name"]: raw for tensor, raw in assembled}
        for name in self._internal:
            del computed[name]
        return computed

    def bind_copies(self, view: Callable[[str], Any]) -> tuple[list[MemoryCopy], list[MemoryCopy]]:
        """Return the copies before and after the segment, if each tensor has a fixed memory (`view` by name)."""
        before, after = (
            [copy.views(view(name), view(tensor["name"])) for tensor, pieces in tensors for name, _, copy in pieces]
            for tensors in (self._joins, self._cuts)
        )
        return before, after


def run_copies(copies: Sequence[MemoryCopy]) -> None:
    """Execute all copies."""
    for target, source in copies:
        np.copyto(target, source)


def _assemble(
    tensors: Sequence[AssembledTensor], find_tensor: Callable[[str], Any]
) -> list[tuple[Mapping[str, Any], Any]]:
    """Return each tensor's entry in the manifest and its bytes, copied from its pieces."""
    assembled, memories = list[tuple[Mapping[str, Any], Any]](), dict[str, Any]()
    for tensor, pieces in tensors:
        raw = np.empty(tensor["bytes"], np.uint8)
        for name, value, copy in pieces:
            if (memory := memories.get(name)) is None:
                memory = memories[name] = value_to_bytes(find_tensor(name), value)
            np.copyto(*copy.views(memory, raw))
        assembled.append((tensor, raw))
    return assembled


def _make_piece(tensor: Mapping[str, Any], piece: Mapping[str, Any]) -> CopiedPiece:
    source, target = (piece["shape"], piece["source_region"]), (tensor["shape"], piece["target_region"])
    copy = RegionCopy(source, target, TENSOR_TYPES[tensor["dtype"]][1])
    return piece["name"], {"name": piece["name"], "dtype": tensor["dtype"], "shape": piece["shape"]}, copy


# -- reused buffers


class BufferSet:
    """Memory for the small tensors of one frame, bound once to the segments that have only small tensors.

    Creating, looking up and binding a small tensor takes longer than computing it. Large tensors are allocated per
    frame, because the predicted memory counts them so.

    Attributes:
        values: onnxruntime's value of each small tensor by name.
        views: Their bytes.
        bindings: By segment: the binding (None: it only copies), its outputs, and the copies before and after it.
    """

    def __init__(
        self,
        small_tensors: Mapping[str, tuple[str, Sequence[int]]],
        segment_ios: Sequence[SegmentIO],
        sessions: Sequence[Any],
    ) -> None:
        self.values: dict[str, Any] = {}
        self.views: dict[str, memoryview] = {}
        for name, (dtype, shape) in small_tensors.items():
            raw: Any = np.zeros(math.prod(shape) * TENSOR_TYPES[dtype][1], np.uint8)
            self.values[name], self.views[name] = make_value(raw, dtype, shape), memoryview(raw)
        self.bindings: dict[int, tuple[Any, dict[str, Any], list[MemoryCopy], list[MemoryCopy]]] = {}
        for number, (segment_io, session) in enumerate(zip(segment_ios, sessions, strict=True)):
            if all(name in small_tensors for name in segment_io.names):
                binding = None if session is None else session.io_binding()
                outputs = {name: self.values[name] for name in segment_io.outputs}
                self.bindings[number] = binding, outputs, *segment_io.bind_copies(self.views.__getitem__)
                if binding is None:
                    continue
                for name in segment_io.inner["inputs"]:
                    binding.bind_ortvalue_input(name, self.values[name])
                for name in segment_io.inner["outputs"]:
                    binding.bind_ortvalue_output(name, self.values[name])


class BufferPool:
    """The buffer sets of a role, which its frames use one after another."""

    def __init__(self, manifest: Mapping[str, Any], sessions: Sequence[Any], segment_ios: Sequence[SegmentIO]) -> None:
        self._segment_ios, self._sessions = segment_ios, sessions
        small = _find_small_tensors(manifest, sessions)
        bound = {name for io in segment_ios if all(name in small for name in io.names) for name in io.names}
        self._small_tensors = {name: value for name, value in small.items() if name in bound}
        self._empty_set = BufferSet({}, (), ())
        # Created now, because a role that takes over after a failure has no time for it.
        self._free = [BufferSet(self._small_tensors, self._segment_ios, self._sessions)]
        self._set_count = 1

    def take(self) -> BufferSet:
        """Return a buffer set for a new frame, an empty one if MAX_BUFFER_SETS are in use."""
        if self._free:
            return self._free.pop()
        if self._set_count == MAX_BUFFER_SETS:
            return self._empty_set
        self._set_count += 1
        return BufferSet(self._small_tensors, self._segment_ios, self._sessions)

    def give_back(self, buffer_set: BufferSet, is_unused: bool) -> None:
        """Return the set of a finished frame.

        Args:
            buffer_set: The set.
            is_unused: No data of the set is still to be sent. Otherwise the set is discarded.
        """
        if buffer_set is not self._empty_set:
            self._free += [buffer_set] * is_unused
            self._set_count -= not is_unused


def _find_small_tensors(manifest: Mapping[str, Any], sessions: Sequence[Any]) -> dict[str, tuple[str, Sequence[int]]]:
    """Return type and shape of the small tensors of known shape in segments."""
    found: dict[str, tuple[str, Sequence[int]]] = {}
    known = [(v["name"], v["dtype"], v["shape"]) for v in (*manifest["inputs"], *manifest["transfers"])]
    known += [(value["tensor"], value["dtype"], value["shape"]) for value in manifest["outputs"]]
    for session in filter(None, sessions):
        for value in (*session.get_outputs(), *session.get_inputs()):
            known.append((value.name, value.type[7:-1].upper(), value.shape))  # The type is like tensor(float).
    excluded = {name for name, dtype, shape in known if not _is_small(dtype, shape)}
    for name, dtype, shape in known:
        if name not in excluded and found.setdefault(name, (dtype, list(shape))) != (dtype, list(shape)):
            excluded.add(name)  # The mismatch is reported when the tensor is computed.
    return {name: value for name, value in found.items() if name not in excluded}


def _is_small(dtype: str, shape: Sequence[Any] | None) -> bool:
    if dtype not in TENSOR_TYPES or shape is None or not all(isinstance(size, int) and size > 0 for size in shape):
        return False
    return bool(math.prod(shape) * TENSOR_TYPES[dtype][1] <= MAX_BUFFERED_BYTES)


# -- memory of the process


@contextlib.contextmanager
def freed_to_system() -> Iterator[None]:
    """Let glibc return each freed block of 128 KiB or more to the system within the context.

    When the first large block is freed, glibc learns to keep such blocks. onnxruntime creates and frees a copy of many
    weights while it makes a session, which would stay with the process: up to a quarter of its memory, and a different
    amount each time. Other C libraries are not affected.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _INITIAL_THRESHOLD_BYTES)
    try:
        yield
    finally:
        # Memory of frames is better kept for the next frame. glibc would learn this value by itself.
        mallopt(_MMAP_THRESHOLD, _LARGE_THRESHOLD_BYTES)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGE_THRESHOLD_BYTES)


def peak_memory_bytes() -> int:
    """Return the largest resident memory of this process in bytes."""
    try:
        # On Linux, getrusage also counts the memory that the parent process had when it started this one.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
