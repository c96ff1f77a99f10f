"""Segments: sessions of an engine, tensors as bytes, copying of tensors before and after segments, and buffers.

A segment is an ONNX submodel that the device runs as soon as its inputs have arrived. Tensors are onnxruntime values,
because numpy lacks some types (bfloat16, float8).

For another engine than onnxruntime, a segment was converted at compile time. The engine's class `EngineNetwork` runs
it. It is in the module `engine_NAME` of this package, or in the installed module `dicompiler_engine_NAME`.
`NetworkSession` gives it the methods of an onnxruntime session.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import math
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from .protocol import role_manifests
from .value_codec import UNSIZED_TYPES, decode_value, encode_value

FLOAT_BYTES = 4


@dataclass(frozen=True)
class TensorDescription:
    """Name, shape and type of a session's input or output, like onnxruntime's NodeArg."""

    name: str
    shape: Sequence[int]
    type: str = "tensor(float)"


class NetworkBinding:
    """The inputs and outputs of one call of an engine, with methods like onnxruntime's IOBinding.

    Attributes:
        inputs: The onnxruntime value of each input, by name.
        outputs: By output name, the onnxruntime value into which the call writes; None if the call creates it.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self.inputs[name] = value

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        self.outputs[name] = value

    def bind_output(self, name: str) -> None:
        self.outputs[name] = None

    def get_outputs(self) -> list[Any]:
        return list(self.outputs.values())


class NetworkSession:
    """A session that computes a segment (an ONNX submodel) with another engine than onnxruntime.

    All its inputs and outputs have type float.
    """

    def __init__(self, directory: Path, segment: Mapping[str, Any], threads: int, is_spinning: bool) -> None:
        """Load the files of a segment; raise ValueError if the engine is missing or cannot load them.

        `segment` is the manifest's entry. If `is_spinning`, the engine's threads wait actively between two calls.
        """
        engine = segment["engine"]
        paths = directory / segment["file"], directory / engine["weights"]
        self._network = find_network_class(engine["name"])(*paths, threads, is_spinning)
        self._inputs = [TensorDescription(value["name"], value["shape"]) for value in engine["inputs"]]
        self._outputs = [TensorDescription(value["name"], value["shape"]) for value in engine["outputs"]]

    def get_inputs(self) -> list[TensorDescription]:
        return self._inputs

    def get_outputs(self) -> list[TensorDescription]:
        return self._outputs

    def io_binding(self) -> NetworkBinding:
        return NetworkBinding()

    def run(self, names: Sequence[str], inputs: Mapping[str, Any], _run_options: Any = None) -> list[Any]:
        """Return the outputs `names` as new arrays; `inputs` are arrays by name."""
        arrays = dict(self._compute([inputs[value.name] for value in self._inputs]))
        return [np.array(arrays[name], order="C") for name in names]

    def run_with_iobinding(self, binding: NetworkBinding, _run_options: Any = None) -> None:
        for name, array in self._compute([_float_view(binding.inputs[value.name]) for value in self._inputs]):
            if binding.outputs[name] is None:
                # The value is a copy of the array, because the engine reuses the array's memory in the next call.
                binding.outputs[name] = ort.OrtValue.ortvalue_from_numpy(np.array(array, order="C"))
            else:
                np.copyto(_float_view(binding.outputs[name]), array)

    def _compute(self, inputs: Sequence[Any]) -> Iterable[tuple[str, Any]]:
        """Return pairs of an output's name and its array, which is valid until the next call."""
        arrays = self._network.run(inputs, [value.shape for value in self._outputs])
        return zip((value.name for value in self._outputs), arrays, strict=True)


def find_network_class(engine: str) -> Any:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", engine):
        raise ValueError(f"{engine!r} is not a valid name of an engine")
    own, installed = f"{__package__}.engine_{engine}", f"dicompiler_engine_{engine}"
    name = own if importlib.util.find_spec(own) is not None else installed
    try:
        return importlib.import_module(name).EngineNetwork
    except ImportError as error:
        raise ValueError(f"the engine {engine} is not installed ({error}): install the module {installed}") from error


def check_packages(packages: Iterable[Mapping[str, str]]) -> None:
    """Raise ValueError with a pip command if a package that the manifest lists is missing or too old."""
    for package in packages:
        name, oldest = package["name"], package["min_version"]
        try:
            found = metadata.version(name)
            # The package is not imported, because MNN then prints to stdout. The engine's own module prevents this.
            if importlib.util.find_spec(name) is None:
                raise ImportError(f"No module named {name!r}")
        except ImportError as error:
            raise ValueError(f"the package {name} is not installed ({error}): run 'pip install {name}'") from error
        if _parse_release(found) < _parse_release(oldest):
            cause = f"{name} {found} is too old, {oldest} or newer is needed"
            raise ValueError(f"{cause}: run 'pip install --upgrade {name}'")


def _parse_release(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def _float_view(value: Any) -> np.ndarray[Any, Any]:
    shape = value.shape()
    if value.data_type() != "tensor(float)":
        raise ValueError(f"only tensors of type float can be computed, not {value.data_type()}")
    buffer = (ctypes.c_ubyte * (FLOAT_BYTES * math.prod(shape))).from_address(value.data_ptr())
    return np.frombuffer(buffer, np.float32).reshape(shape)


TENSOR_TYPES = {
    "FLOAT": (1, 4), "UINT8": (2, 1), "INT8": (3, 1), "UINT16": (4, 2), "INT16": (5, 2), "INT32": (6, 4),
    "INT64": (7, 8), "BOOL": (9, 1), "FLOAT16": (10, 2), "DOUBLE": (11, 8), "UINT32": (12, 4), "UINT64": (13, 8),
    "BFLOAT16": (16, 2), "FLOAT8E4M3FN": (17, 1), "FLOAT8E4M3FNUZ": (18, 1), "FLOAT8E5M2": (19, 1),
    "FLOAT8E5M2FNUZ": (20, 1),
}  # fmt: skip
"""Element types that can be sent, by name. Each has ONNX's number of the type and the bytes per element."""
OPTIMIZATION_LEVELS = {
    "none": "DISABLE_ALL", "basic": "ENABLE_BASIC", "extended": "ENABLE_EXTENDED", "all": "ENABLE_ALL",
}  # fmt: skip
ARRAY_TYPES = frozenset(name for name in TENSOR_TYPES if not name.startswith(("BFLOAT", "FLOAT8")))
"""Names of the element types that numpy has too."""
ONNXRUNTIME_PREFIX = re.compile(r"^(\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : |Error in execution: )")
"""The beginning of an onnxruntime error. It depends on the method that was called, and does not help users."""
MAX_BUFFERED_BYTES = 1 << 14
"""Largest size of a tensor whose memory is reused for later frames (in a buffer set)."""
MAX_BUFFER_SETS = 8
"""Maximum number of buffer sets (memory of a frame's small tensors that later frames reuse) for each plan.

Further frames in flight allocate memory for each tensor.
"""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # Parameters of glibc's mallopt: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD.
_INITIAL_THRESHOLD_BYTES, _LARGE_THRESHOLD_BYTES = 128 << 10, 32 << 20

# -- conversion between tensors and bytes


def value_from_bytes(payload: Any, entry: Mapping[str, Any]) -> Any:
    """Return the tensor in an array of bytes as an onnxruntime value that uses the same memory.

    Args:
        payload: The bytes. If `entry` has no shape, they begin with rank and dimensions as 64-bit integers.
        entry: The tensor's entry in the manifest. Strings and values that are not tensors become Python objects.

    Raises:
        ValueError: The bytes do not have the type and shape of the entry.
    """
    if entry["dtype"] in UNSIZED_TYPES:
        return decode_value(payload)
    size = TENSOR_TYPES[entry["dtype"]][1]
    shape, start = entry["shape"], 0
    if shape is None:
        dims = payload[: len(payload) // 8 * 8].view(np.int64)
        rank = int(dims[0]) if len(dims) and 0 <= dims[0] < len(dims) else -1
        shape, start = dims[1 : rank + 1].tolist(), 8 * (rank + 1)
        if rank < 0 or min(shape, default=0) < 0 or start + math.prod(shape) * size != len(payload):
            raise ValueError(
                f"{entry['name']!r}: the payload of {len(payload)} bytes does not match the shape at its beginning"
            )
    return make_value(payload[start:], entry["dtype"], shape)


def make_value(raw: Any, dtype: str, shape: Sequence[int]) -> Any:
    """Return an onnxruntime value of this type and shape that uses the memory of `raw`, an array of bytes."""
    number, size = TENSOR_TYPES[dtype]
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw.view(f"u{size}").reshape(shape), number)


def value_to_bytes(tensor: Any, entry: Mapping[str, Any]) -> Any:
    """Return the bytes of an onnxruntime value as a view of its memory, which is valid as long as the value.

    If `entry`, the tensor's entry in the manifest, has no shape, the result is a copy that begins with rank and
    dimensions. Raise ValueError if the tensor does not have the type and shape of the entry.
    """
    if entry["dtype"] in UNSIZED_TYPES:
        return encode_value(tensor)
    if isinstance(tensor, np.ndarray):
        return tensor
    number, shape = TENSOR_TYPES[entry["dtype"]][0], entry["shape"]
    if not tensor.is_tensor() or tensor.element_type() != number or shape not in (None, list(tensor.shape())):
        found = f"{tensor.data_type()} {list(tensor.shape())}" if tensor.is_tensor() else "a value that is not a tensor"
        raise ValueError(f"{entry['name']!r}: computed {found}, expected {entry['dtype']} {shape}")
    length = tensor.tensor_size_in_bytes()
    pointer = (ctypes.c_ubyte * length).from_address(tensor.data_ptr()) if length else b""
    raw = np.frombuffer(pointer, np.uint8)
    if shape is not None:
        return raw
    return np.concatenate([np.array([len(tensor.shape()), *tensor.shape()], np.int64).view(np.uint8), raw])


# -- sessions that compute segments


def make_sessions(directory: Path, manifest: Mapping[str, Any], threads: int) -> list[Any]:
    """Return the session of each segment of all plans; None for a segment without a file, which only copies.

    Segments with the same file share a session, which computes with `threads` threads. Raise ValueError with the
    segment's name if it cannot be loaded, or if a package of an engine is missing or too old.
    """
    check_packages(manifest.get("packages", ()))
    # All sessions share one arena. Separate arenas would each keep the most memory that their session ever needed.
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(memory, None)
    segments = [segment for role in role_manifests(manifest) for segment in role["segments"]]
    sessions: dict[str | None, Any] = {None: None}
    for segment in segments:
        if segment.get("file") in sessions:
            continue
        try:
            path = str(directory / segment["file"])
            with return_freed_memory():
                if "engine" in segment:
                    sessions[segment["file"]] = NetworkSession(directory, segment, threads, not manifest["peers"])
                else:
                    sessions[segment["file"]] = _make_session(path, manifest, threads)
        except Exception as error:  # Exception is the only class that all errors of onnxruntime have in common.
            raise ValueError(f"segment {segment['name']!r} cannot be loaded: {one_line(error)}") from error
    return [sessions[segment.get("file")] for segment in segments]


def _make_session(path: str, manifest: Mapping[str, Any], threads: int) -> Any:
    """Return an onnxruntime session for a file; if that fails for a QuantizeLinear, retry without int8 conversion.

    On some processors, onnxruntime converts int8 to uint8 and then refuses its own result (onnxruntime issue 25526).
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    level = OPTIMIZATION_LEVELS[manifest["optimization"]]
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{level}")
    if manifest["optimization"] != "all":
        # Fused QDQ nodes round differently than separate ones. The plan cuts the network into segments, and only nodes
        # in the same segment are fused, so the outputs would depend on the plan.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.add_session_config_entry("session.use_env_allocators", "1")
    if manifest["peers"]:
        # Between two segments, onnxruntime's threads must not spin: sending and receiving need the processor.
        options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return ort.InferenceSession(path, options, ["CPUExecutionProvider"])
    except Exception as error:  # Exception is the only class that all errors of onnxruntime have in common.
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
    """Run a segment and return its outputs by name; raise ValueError with its name if onnxruntime fails.

    `values` has the inputs by name. `places` has, for some outputs by name, existing onnxruntime values into which they
    are written. Setting `terminate` of `run_options` ends the call.
    """
    try:
        if segment.get("unsized"):
            return _run_non_tensor(session, segment, values, places or {}, run_options)
        # A binding is used, because run_with_ort_values checks and copies more and takes five times as long.
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
    except Exception as error:  # Exception is the only class that all errors of onnxruntime have in common.
        raise _segment_error(segment, error) from error


def _run_non_tensor(
    session: Any, segment: Mapping[str, Any], values: Mapping[str, Any], places: Mapping[str, Any], run_options: Any
) -> dict[str, Any]:
    """Run a segment with strings or values that are not tensors, which an IOBinding does not support."""
    outputs = session.run(segment["outputs"], {name: values[name] for name in segment["inputs"]}, run_options)
    found = dict(zip(segment["outputs"], outputs, strict=True))
    for name in found.keys() - set(segment["unsized"]):
        array = np.asarray(found[name], order="C")
        if name in places:
            places[name].update_inplace(array)
        found[name] = places[name] if name in places else ort.OrtValue.ortvalue_from_numpy(array)
    return found


def call_session(segment: Mapping[str, Any], method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method of the segment's session; raise ValueError with the segment's name if it fails."""
    try:
        return method(*arguments)
    except Exception as error:  # Exception is the only class that all errors of onnxruntime have in common.
        raise _segment_error(segment, error) from error


def _segment_error(segment: Mapping[str, Any], error: Exception) -> ValueError:
    engine = segment["engine"]["name"] if "engine" in segment else "onnxruntime"
    cause = ONNXRUNTIME_PREFIX.sub("", one_line(error))
    return ValueError(f"segment {segment['name']!r}: {engine} cannot run it: {cause}")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:1000]


# -- copies at segment boundaries

RegionOfShape = tuple[Sequence[int], Sequence[Sequence[int]]]
"""The shape of a tensor, and a region of the tensor: a pair (start, end) per axis."""
MemoryCopy = tuple[Any, Any]
"""Target and source of a copy: two arrays that are views of the tensors' memory."""


class RegionCopy:
    """A copy from a region of one tensor to a region of another, in blocks that are contiguous in both.

    The object has shapes and regions, but no memory.
    """

    def __init__(self, source: RegionOfShape, target: RegionOfShape, element_bytes: int) -> None:
        counts = [end - begin for begin, end in source[1]]
        axis = max(_first_contiguous_axis(shape, counts) for shape, _ in (source, target))
        block = element_bytes * math.prod(counts[axis:])
        self._counts = tuple(counts[:axis])
        self._type = np.dtype(f"u{block}" if block in (1, 2, 4, 8) else f"V{block}")
        self._source_offset, self._source_strides = _offset_and_strides(*source, axis, element_bytes)
        self._target_offset, self._target_strides = _offset_and_strides(*target, axis, element_bytes)

    def views(self, source: Any, target: Any) -> MemoryCopy:
        """Return views of the copied region in `target` and in `source`, the memory of the two tensors."""
        target_view = np.ndarray(self._counts, self._type, target, self._target_offset, self._target_strides)
        return target_view, np.ndarray(self._counts, self._type, source, self._source_offset, self._source_strides)


def _first_contiguous_axis(shape: Sequence[int], counts: Sequence[int]) -> int:
    """Return the first axis from which on the elements of a region are contiguous in a tensor's memory.

    `shape` is the shape of the tensor, and `counts` that of the region.
    """
    axis = len(shape) - 1
    while axis > 0 and counts[axis] == shape[axis]:
        axis -= 1
    return axis


def _offset_and_strides(
    shape: Sequence[int], region: Sequence[Sequence[int]], axis: int, element_bytes: int
) -> tuple[int, tuple[int, ...]]:
    """Return a region's offset in a tensor's memory, and its strides along the axes before `axis`, in bytes."""
    strides = tuple(element_bytes * math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return sum(begin * stride for (begin, _), stride in zip(region, strides, strict=True)), strides[:axis]


CopiedPiece = tuple[str, Mapping[str, Any], RegionCopy]
"""Name of the tensor that contains the piece, the manifest's entry of this tensor, and the copy of the piece."""
AssembledTensor = tuple[Mapping[str, Any], Sequence[CopiedPiece]]
"""The manifest's entry of a tensor that is assembled from pieces, and these pieces."""


class SegmentIO:
    """The copies that the runtime makes before and after a segment (ONNX submodel).

    Received pieces of tensors are copied into the tensors that the segment reads. Pieces for other devices are copied
    from the tensors that it computes.

    Attributes:
        session_entry: The segment's manifest entry, but with the inputs and outputs of its session (without the
            copies).
        copy_sources: Names of the segment's inputs that only the copies read, and not the session.
        outputs: Names of the segment's outputs, after the copies.
        names: Names of all tensors that the session or the copies read or write.
    """

    def __init__(self, segment: Mapping[str, Any], session: Any) -> None:
        """Prepare the copies of a segment from its manifest entry; `session` is None if it only copies."""
        self._joins, self._cuts = (
            [(tensor, [_make_piece(tensor, piece) for piece in tensor["pieces"]]) for tensor in segment.get(key, ())]
            for key in ("assembled_inputs", "assembled_outputs")
        )
        self.session_entry, self.outputs = segment, segment["outputs"]
        if self._joins or self._cuts:
            inputs, outputs = ([], []) if session is None else (session.get_inputs(), session.get_outputs())
            self.session_entry = {**segment, "inputs": [v.name for v in inputs], "outputs": [v.name for v in outputs]}
        self.copy_sources = {*segment["inputs"]} - {*self.session_entry["inputs"]}
        self._internal = {*self.session_entry["outputs"]} - {*self.outputs}
        self.names = {
            *segment["inputs"],
            *segment["outputs"],
            *self.session_entry["inputs"],
            *self.session_entry["outputs"],
        }

    def join_inputs(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `values` (tensors by name) and the session's inputs that are assembled from them.

        Raise ValueError if a value does not have the planned type or shape.
        """
        if not self._joins:
            return values
        joined = dict(values)
        for tensor, raw in _assemble(self._joins, values.__getitem__):
            joined[tensor["name"]] = make_value(raw, tensor["dtype"], tensor["shape"])
        return joined

    def cut_outputs(self, computed: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the segment's outputs by name: computed tensors, and bytes of pieces for other devices.

        Args:
            computed: The session's outputs, by name.
            values: The segment's inputs, by name.

        Raises:
            ValueError: A tensor does not have the planned type or shape.
        """
        assembled = _assemble(self._cuts, lambda name: computed[name] if name in computed else values[name])
        computed |= {tensor["name"]: raw for tensor, raw in assembled}
        for name in self._internal:
            del computed[name]
        return computed

    def bind_copies(self, view: Callable[[str], Any]) -> tuple[list[MemoryCopy], list[MemoryCopy]]:
        """Return the copies before and after the segment as pairs of views (target, source).

        `view` returns the memory of a tensor by name, which must exist as long as the copies are in use.
        """
        before, after = (
            [copy.views(view(name), view(tensor["name"])) for tensor, pieces in tensors for name, _, copy in pieces]
            for tensors in (self._joins, self._cuts)
        )
        return before, after


def run_copies(copies: Sequence[MemoryCopy]) -> None:
    for target, source in copies:
        np.copyto(target, source)


def _assemble(
    tensors: Sequence[AssembledTensor], find_tensor: Callable[[str], Any]
) -> list[tuple[Mapping[str, Any], Any]]:
    """Return the manifest's entry and the bytes of each assembled tensor, copied from its pieces.

    `find_tensor` returns the tensor with the given name, which contains a piece.
    """
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


# -- memory that is reused for small tensors


class BufferSet:
    """Memory for the small tensors of one frame, bound once to the segments that have only small tensors.

    Creating and binding a small tensor takes longer than computing it. Large tensors are allocated for each frame.

    Attributes:
        values: The onnxruntime value of each small tensor, by name.
        views: The bytes of each small tensor, by name.
        bindings: By index of the segment: its onnxruntime binding (None if it only copies), its outputs by name, the
            copies before it, and the copies after it.
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
                for name in segment_io.session_entry["inputs"]:
                    binding.bind_ortvalue_input(name, self.values[name])
                for name in segment_io.session_entry["outputs"]:
                    binding.bind_ortvalue_output(name, self.values[name])


class BufferPool:
    """The buffer sets (memory of a frame's small tensors, which later frames reuse) of one plan.

    Each set is used for one frame at a time.
    """

    def __init__(self, manifest: Mapping[str, Any], sessions: Sequence[Any], segment_ios: Sequence[SegmentIO]) -> None:
        self._segment_ios, self._sessions = segment_ios, sessions
        small = _find_small_tensors(manifest, sessions)
        bound = {name for io in segment_ios if all(name in small for name in io.names) for name in io.names}
        self._small_tensors = {name: value for name, value in small.items() if name in bound}
        self._empty_set = BufferSet({}, (), ())
        # The first set is created in advance. Otherwise the first frame of a failure plan would have to wait for it.
        self._free = [BufferSet(self._small_tensors, self._segment_ios, self._sessions)]
        self._set_count = 1

    def take(self) -> BufferSet:
        """Return a buffer set for a new frame; an empty one if MAX_BUFFER_SETS are in use."""
        if self._free:
            return self._free.pop()
        if self._set_count == MAX_BUFFER_SETS:
            return self._empty_set
        self._set_count += 1
        return BufferSet(self._small_tensors, self._segment_ios, self._sessions)

    def give_back(self, buffer_set: BufferSet, is_sent: bool) -> None:
        """Make the buffer set of a finished frame available again.

        If `is_sent` is false, some of its data still waits to be sent, so other frames must not use it.
        """
        if buffer_set is not self._empty_set:
            self._free += [buffer_set] * is_sent
            self._set_count -= not is_sent


def can_run_on_arrays(manifest: Mapping[str, Any], sessions: Sequence[Any]) -> bool:
    """Return True if one call of the only session computes the manifest's outputs from its inputs, as numpy arrays.

    All types and shapes must be known in advance, because the results of the call are not checked.
    """
    if len(sessions) != 1 or sessions[0] is None or manifest["transfers"] or manifest.get("states"):
        return False
    (session,), (segment,) = sessions, manifest["segments"]
    if any(segment.get(key) for key in ("assembled_inputs", "assembled_outputs", "unsized")):
        return False
    inputs = {value["name"]: (value["dtype"], value["shape"]) for value in manifest["inputs"]}
    outputs = {value["tensor"]: (value["dtype"], value["shape"]) for value in manifest["outputs"]}
    is_planned = [inputs, outputs] == [
        {value.name: (_type_name(value), list(value.shape)) for value in values}
        for values in (session.get_inputs(), session.get_outputs())
    ]
    return is_planned and all(dtype in ARRAY_TYPES for dtype, _ in (*inputs.values(), *outputs.values()))


def _type_name(value: Any) -> str:
    """Return the element type of a session's input or output: "FLOAT" for the type "tensor(float)"."""
    name: str = value.type[7:-1].upper()
    return name


def _find_small_tensors(manifest: Mapping[str, Any], sessions: Sequence[Any]) -> dict[str, tuple[str, Sequence[int]]]:
    """Return type and shape of each tensor of known shape with at most MAX_BUFFERED_BYTES, by name."""
    found: dict[str, tuple[str, Sequence[int]]] = {}
    candidates = [(v["name"], v["dtype"], v["shape"]) for v in (*manifest["inputs"], *manifest["transfers"])]
    candidates += [(value["tensor"], value["dtype"], value["shape"]) for value in manifest["outputs"]]
    for session in filter(None, sessions):
        for value in (*session.get_outputs(), *session.get_inputs()):
            candidates.append((value.name, _type_name(value), value.shape))
    excluded = {name for name, dtype, shape in candidates if not _is_small(dtype, shape)}
    for name, dtype, shape in candidates:
        if name not in excluded and found.setdefault(name, (dtype, list(shape))) != (dtype, list(shape)):
            # The session and the manifest disagree about the tensor's type or shape, so its size is unclear.
            # `value_to_bytes` reports the difference when the tensor is computed.
            excluded.add(name)
    return {name: value for name, value in found.items() if name not in excluded}


def _is_small(dtype: str, shape: Sequence[Any] | None) -> bool:
    if dtype not in TENSOR_TYPES or shape is None or not all(isinstance(size, int) and size > 0 for size in shape):
        return False
    return bool(math.prod(shape) * TENSOR_TYPES[dtype][1] <= MAX_BUFFERED_BYTES)


# -- memory of the process


@contextlib.contextmanager
def return_freed_memory() -> Iterator[None]:
    """Return a context manager in which glibc returns each freed block of 128 KiB or more to the system.

    By default, glibc keeps freed blocks for later use. The copies of weights that onnxruntime frees while it creates a
    session would be up to a quarter of the process's memory.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _INITIAL_THRESHOLD_BYTES)
    try:
        yield
    finally:
        # With these limits, glibc keeps the freed memory of a frame for the next frame. By default, glibc would raise
        # its limits up to the same values when it frees large blocks.
        mallopt(_MMAP_THRESHOLD, _LARGE_THRESHOLD_BYTES)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGE_THRESHOLD_BYTES)


def peak_memory_bytes() -> int:
    try:
        # On Linux, getrusage also counts memory that the parent process had when it started this one. Therefore, the
        # kernel's file about this process is read.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
