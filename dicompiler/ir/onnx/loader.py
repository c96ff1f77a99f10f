"""Model loading: from a file, bytes or a ModelProto to a valid ModelProto and its weights.

The ModelProto does not contain the data of large initializers, which is returned separately as weights.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from functools import lru_cache, partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.graph_structure import graph_and_bodies, tensors_read
from dicompiler.ir.onnx.names import rename_reserved_tensors, unique_name
from dicompiler.ir.onnx.protobuf_io import Views, make_skeleton, map_file, read_skeleton
from dicompiler.ir.onnx.sanity_checks import check_sanity
from dicompiler.ir.onnx.weights import (
    MIN_WEIGHT_BYTES,
    Weight,
    embed_data,
    is_placeholder,
    mark_placeholder,
    raw_nbytes,
)

KNOWN_IR_VERSION, KNOWN_OPSET = 10, 22
"""Newest IR version and newest opset that every supported onnxruntime accepts."""

_DOCUMENTATION = ("doc_string", "producer_name", "producer_version", "key", "value")


def load_model(source: str | Path | bytes | onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, Weight]]:
    """Load and check a model. Return it without the data of large initializers, and this data by initializer name."""
    if isinstance(source, onnx.ModelProto):
        place, path = "model", None
        skeleton, views = make_skeleton(source)
    elif isinstance(source, bytes):
        place, path = "model", None
        skeleton, views = read_skeleton(source, place)
    else:
        path = Path(source)
        place = str(path)
        skeleton, views = read_skeleton(map_file(path, "the model"), place)
    _check_utf8(skeleton, place)
    _check_versions(skeleton, place)
    weights = _load_weights(skeleton, views, path, place)
    _name_nodes(skeleton.graph)
    renamed = rename_reserved_tensors(skeleton.graph)
    _sort_nodes(skeleton.graph, place)
    check_sanity(skeleton, place)
    return skeleton, {renamed.get(name, name): weight for name, weight in weights.items()}


def _load_weights(skeleton: onnx.ModelProto, views: Views, path: Path | None, place: str) -> dict[str, Weight]:
    """Return the large data of the initializers by name, and turn these initializers into placeholders without data.

    Args:
        skeleton: The model without large data. It is changed.
        views: Large data that is in the model file, by index of the initializer.
        path: The model file. Files with external data are in the same directory.
        place: Beginning of error messages.
    """
    weights: dict[str, Weight] = {}
    files: dict[str, memoryview] = {}
    names: set[str] = set()
    for index, tensor in enumerate(skeleton.graph.initializer):
        if tensor.name in names:
            raise DicompilerError(f"{place}: two initializers have the name {tensor.name!r}: rename one of them")
        names.add(tensor.name)
        if index in views:
            data = views[index]
        elif tensor.data_location == onnx.TensorProto.EXTERNAL:
            data = _map_external_data(tensor, path, files, place)
            if len(data) >= MIN_WEIGHT_BYTES:
                mark_placeholder(tensor)
            else:
                embed_data(tensor, data)
        else:
            _check_embedded_data(tensor, place)
            continue
        _check_data_length(tensor, data, place)
        if is_placeholder(tensor):
            weights[tensor.name] = Weight(tensor.data_type, tuple(tensor.dims), data)
    for tensor in _inner_tensors(skeleton):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            data = _map_external_data(tensor, path, files, place)
            _check_data_length(tensor, data, place)
            embed_data(tensor, data)
        else:
            _check_embedded_data(tensor, place)
    return weights


def _check_data_length(tensor: onnx.TensorProto, data: memoryview, place: str) -> None:
    try:
        needed = raw_nbytes(tensor.data_type, tuple(tensor.dims))
    except KeyError:
        raise DicompilerError(
            f"{place}: tensor {tensor.name!r} has the unknown type {tensor.data_type}: export the model again"
        ) from None
    if len(data) != needed:
        shape = "x".join(map(str, tensor.dims))
        raise DicompilerError(
            f"{place}: tensor {tensor.name!r} has {len(data)} bytes of data, but its shape {shape} needs {needed}: "
            "export the model again"
        )


def _check_embedded_data(tensor: onnx.TensorProto, place: str) -> None:
    if tensor.data_type == onnx.TensorProto.STRING:
        return
    try:
        onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError) as error:
        cause = " ".join(str(error).split())
        raise DicompilerError(f"{place}: tensor {tensor.name!r} is damaged: {cause}: export the model again") from error


def _map_external_data(
    tensor: onnx.TensorProto, model: Path | None, files: dict[str, memoryview], place: str
) -> memoryview:
    """Return a view of a tensor's data in an external file, which must be in the directory of the file `model`.

    `files` caches the views of mapped files, by their location in the model.
    """
    data_place = f"{place}: external data of {tensor.name!r}"
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if model is None:
        raise DicompilerError(
            f"{data_place} is in the file {location!r}: give the path of the model file, not its content"
        )
    if location not in files:
        path = _resolve_external_file(model, location, data_place)
        files[location] = map_file(path, f"external data of {tensor.name!r}")
    data = files[location]
    try:
        offset = int(entries.get("offset", "0"))
        length = int(entries.get("length") or raw_nbytes(tensor.data_type, tuple(tensor.dims)))
    except (ValueError, KeyError):
        raise DicompilerError(f"{data_place} has an invalid offset, length or type: export the model again") from None
    if offset < 0 or length < 0 or offset + length > len(data):
        raise DicompilerError(
            f"{data_place}: bytes {offset} to {offset + length} are outside the {len(data)} bytes of {location!r}: "
            "the file is truncated, or belongs to another model: copy the right file"
        )
    return data[offset : offset + length]


def external_files(path: Path) -> tuple[Path, ...]:
    """Return the files with external data of a model, in the order in which the model names them.

    A pipe is not read, because it can be read only once, and it has no directory with external data.

    Raises:
        DicompilerError: The model cannot be read, or a file is missing or outside of the model's directory.
    """
    if path.is_fifo():
        return ()
    skeleton, _ = read_skeleton(map_file(path, "the model"), str(path))
    files: dict[Path, None] = {}
    for tensor in (*skeleton.graph.initializer, *_inner_tensors(skeleton)):
        if tensor.data_location == onnx.TensorProto.EXTERNAL and not is_placeholder(tensor):
            location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
            files[_resolve_external_file(path, location, f"{path}: external data of {tensor.name!r}")] = None
    return tuple(files)


def _resolve_external_file(model: Path, location: str, place: str) -> Path:
    """Return the path of an external file, which must be within the directory of the file `model`."""
    named = PurePosixPath(location)
    if not location or named.is_absolute() or PureWindowsPath(location).drive or ".." in named.parts:
        raise DicompilerError(f"{place}: {location!r} is not a file in the model's directory: export the model again")
    path = model.parent / location
    if not path.is_file():
        raise DicompilerError(f"{place}: there is no file {str(path)!r}: copy it next to the model")
    target = path.resolve()
    # A link to a file elsewhere is allowed if the model is a link to the same directory, as in the Hugging Face cache.
    if not target.is_relative_to(model.parent.resolve()) and target.parent != model.resolve().parent:
        raise DicompilerError(
            f"{place}: {location!r} is a link to a file outside of the model's directory: copy the file there"
        )
    return path


def _inner_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield all tensors except the dense initializers of the main graph."""
    for top in (model.graph, *model.functions):
        for graph in graph_and_bodies(top):
            if isinstance(graph, onnx.GraphProto):
                yield from () if graph is top else graph.initializer
                for sparse in graph.sparse_initializer:
                    yield from (sparse.values, sparse.indices)
            for attribute in (attribute for node in graph.node for attribute in node.attribute):
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors


def _name_nodes(graph: onnx.GraphProto) -> None:
    """Give every node of the main graph a unique name. An unnamed node gets the name of its first output."""
    taken = {node.name: 0 for node in graph.node if node.name}
    seen: set[str] = set()
    for node in graph.node:
        if not node.name:
            node.name = unique_name(next((name for name in node.output if name), node.op_type), taken)
        elif node.name in seen:
            node.name = unique_name(node.name, taken)
        seen.add(node.name)


def _sort_nodes(graph: onnx.GraphProto, place: str) -> None:
    """Sort the nodes topologically unless they are sorted. onnx requires sorted nodes, onnxruntime does not.

    Raises:
        DicompilerError: The nodes form a cycle.
    """
    producer_index = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    dependencies = [
        {producer_index[name] for name in tensors_read(node) if name in producer_index} for node in graph.node
    ]
    if all(i > max(producers, default=-1) for i, producers in enumerate(dependencies)):
        return
    sorter = TopologicalSorter(dict(enumerate(dependencies)))
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = ", ".join(f"{graph.node[i].op_type} {graph.node[i].name!r}" for i in error.args[1][1:])
        raise DicompilerError(
            f"{place}: not a valid ONNX model: these nodes form a cycle: {cycle}: export the model again"
        ) from None
    ready, nodes = sorted(sorter.get_ready()), list[onnx.NodeProto]()
    while ready:
        index = heapq.heappop(ready)
        nodes.append(graph.node[index])
        sorter.done(index)
        for reader in sorter.get_ready():
            heapq.heappush(ready, reader)
    del graph.node[:]
    graph.node.extend(nodes)


def _check_utf8(message: Message, place: str) -> None:
    """Raise DicompilerError for names that are not UTF-8, and replace invalid characters in documentation.

    The protobuf library does not check the encoding.
    """
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in (value,) if isinstance(value, Message) else value:
                _check_utf8(inner, place)
        elif field.type == FieldDescriptor.TYPE_STRING:
            texts = (value,) if isinstance(value, (str, bytes)) else value
            invalid = next((text for text in texts if isinstance(text, bytes)), None)
            if invalid is None:
                continue
            if field.name not in _DOCUMENTATION:
                raise DicompilerError(f"{place}: the name {invalid!r} is not UTF-8: rename it")
            setattr(message, field.name, invalid.decode("utf-8", "replace"))


def _check_versions(model: onnx.ModelProto, place: str) -> None:
    """Raise DicompilerError if the installed onnxruntime does not support the IR version or the opset."""
    for entry in model.opset_import:
        if not 0 <= entry.version < 2**31:
            raise DicompilerError(
                f"{place}: opset {entry.version} of domain {entry.domain!r} is not valid: export the model again"
            )
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=1)
    for kind, version, safe, is_accepted in (
        ("IR version", model.ir_version, KNOWN_IR_VERSION, partial(is_accepted_by_ort, opset=KNOWN_OPSET)),
        ("opset", opset, KNOWN_OPSET, partial(is_accepted_by_ort, KNOWN_IR_VERSION)),
    ):
        if version <= safe or is_accepted(version):
            continue
        import onnxruntime

        limit = next((v for v in range(min(version, safe + 64) - 1, safe, -1) if is_accepted(v)), safe)
        raise DicompilerError(
            f"{place}: {kind} {version} is too new: onnxruntime {onnxruntime.__version__} goes up to {limit}: "
            f"export the model for {kind} {limit}, or install a newer onnxruntime"
        )


@lru_cache
def is_accepted_by_ort(ir_version: int, opset: int) -> bool:
    """Return True if the installed onnxruntime accepts models with this IR version and this opset.

    The check loads a model of one node, which takes 4 ms.
    """
    import onnxruntime

    head = f'<ir_version: {ir_version}, opset_import: ["": {opset}]>'
    probe = onnx.parser.parse_model(head + " probe (float[1] x) => (float[1] y) { y = Identity (x) }")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(probe.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # `Exception` is the only common base class of onnxruntime's errors.
        return False
    return True
