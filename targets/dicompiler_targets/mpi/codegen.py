"""Generator of main.cc, the C++ program that all ranks (MPI processes) execute.

    Program ──describe_program──► program.json ──generate_main──► main.cc

Each rank runs one device. program.json lists the work of each rank as calls, and main.cc has a function with these
calls for each rank. An artifact may come from someone else, so its main.cc is built only if it is exactly the text that
this module generates from its program.json.

runtime/program.hpp documents the functions that main.cc calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import chain
from typing import Any

from dicompiler.plugin_api import Program, Segment, TensorSpec
from dicompiler.plugin_api.artifacts import SENDABLE_TYPES, Json, describe_value
from dicompiler.plugin_api.onnx import dtype_name
from dicompiler_targets.artifact_files import (
    NETWORK_SUFFIX,
    CopiedTensor,
    HoistedSegment,
    find_device_inputs,
    make_copies,
)

PROGRAM_FORMAT = "dicompiler.mpi-program/3"
MAX_LINE_CHARS = 120
NAME_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
"""Pattern of the names of devices and hosts."""
SEGMENT_PATTERN = r"segment\d{3,}\.(?:onnx|net)"
VERSION_PATTERN = r"[0-9.]{1,40}"
"""Pattern of the version of an engine."""
OUTPUT_PATTERN = r"[A-Za-z0-9_.-]{1,120}\.npy"
CPP_TYPE_NAMES = {
    "FLOAT": "float32", "DOUBLE": "float64", "BOOL": "boolean", "FLOAT16": "float16", "BFLOAT16": "bfloat16",
}  # fmt: skip
"""Names of element types in the C++ runtime, by ONNX name. Other types have their ONNX name in lower case."""
CALL_ARGUMENTS = {
    "input": ("count", "new_tensor"),
    "state": ("count", "new_tensor", "type", "shape", "shape"),
    "receive": ("count", "new_tensor", "type", "shape", "count"),
    "tensor": ("new_tensor", "type", "shape"),
    "load_state": ("tensor",),
    "store_state": ("tensor", "tensor"),
    "run": ("segment_file", "tensors", "tensors"),
    "copy_input": ("copy",),
    "copy_output": ("copy",),
    "send": ("count", "tensor", "count"),
    "output": ("tensor", "output_file"),
}
"""For each call that program.json can contain: the kinds of its arguments.

The class `Rank` in C++ has a function with the name of each call.
"""


@dataclass(frozen=True)
class RankPlacement:
    """The device, host and cores of a rank (an MPI process, which runs one device).

    Attributes:
        device: Name of the device.
        host: Name of the host.
        cores: Indices of the host's cores on which the rank runs.
        threads: Number of threads that compute a segment (an ONNX submodel).
        gpu: True if the device is a GPU.
    """

    device: str
    host: str
    cores: tuple[int, ...]
    threads: int
    gpu: bool


@dataclass(frozen=True)
class ImagePreprocessing:
    """How image files become input tensors: each channel becomes (pixel - mean) * scale, with pixels from 0 to 255.

    Attributes:
        order: Order of the channels: "RGB", "BGR" or "GRAY".
        mean: One number for all channels, or one for each channel.
        scale: One number for all channels, or one for each channel.
    """

    order: str
    mean: tuple[float, ...]
    scale: tuple[float, ...]


def make_string_literal(value: str) -> str:
    """Return a C++ string literal, in which bytes other than harmless ASCII characters are octal numbers."""
    plain = "".join(
        chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\?' else f"\\{byte:03o}" for byte in value.encode()
    )
    return f'"{plain}"'


def _make_list_literal(literals: Iterable[str]) -> str:
    return "{" + ", ".join(literals) + "}"


def _make_shape_literal(dims: Iterable[Any]) -> str:
    return _make_list_literal(map(_make_count_literal, dims))


def _make_count_literal(value: Any) -> str:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a non-negative integer")
    return str(value)


def _make_type_literal(name: str) -> str:
    if name not in SENDABLE_TYPES:
        raise ValueError(f"{name!r} is not an element type")
    return f"Type::{CPP_TYPE_NAMES.get(name, name.lower())}"


def _make_file_literal(name: str, pattern: str) -> str:
    if not re.fullmatch(pattern, name):
        raise ValueError(f"{name!r} is not a valid file name")
    return make_string_literal(name)


def assign_output_files(names: Sequence[str]) -> dict[str, str]:
    """Return a unique file name suffix for each network output: the output's name without unsafe characters."""
    files: dict[str, str] = {}
    for index, name in enumerate(names):
        safe = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:100]
        files[name] = f"{safe}.npy" if f"{safe}.npy" not in files.values() else f"{safe}-{index}.npy"
    return files


class _FunctionWriter:
    """Writes the C++ function with the work of a rank (MPI process), and names the rank's tensors in C++."""

    def __init__(self) -> None:
        self._identifiers: dict[str, str] = {}

    def write(self, call: str, *arguments: Any) -> list[str]:
        """Return the lines of the C++ statement for a call in program.json.

        The arguments are of the kinds that CALL_ARGUMENTS lists for the call.
        """
        kinds = CALL_ARGUMENTS[call]
        if call == "tensor" and len(arguments) == 1:
            # Type and shape of the tensor are unknown until the segment runs.
            kinds = kinds[:1]
        elif kinds == ("copy",):
            arguments = (arguments,)
        literals = [self._make_literal(kind, argument) for kind, argument in zip(kinds, arguments, strict=True)]
        start, indent = f"rank.{call}(", "\n" + " " * len(f"rank.{call}(")
        if "new_tensor" in kinds:
            name = arguments[kinds.index("new_tensor")]
            start = f"const auto {self._add_identifier(name)} = {start}"
        statement = f"{start}{', '.join(literals)});"
        if call == "run" and len(statement) > MAX_LINE_CHARS - 4:
            statement = f"{start}{f',{indent}'.join(literals)});"
        return statement.split("\n")

    def _make_literal(self, kind: str, value: Any) -> str:
        match kind:
            case "count":
                return _make_count_literal(value)
            case "shape":
                return _make_shape_literal(value)
            case "type":
                return _make_type_literal(value)
            case "new_tensor":
                return make_string_literal(value)
            case "tensor":
                return self._identifiers[value]
            case "tensors":
                return _make_list_literal(self._identifiers[name] for name in value)
            case "segment_file":
                return _make_file_literal(value, SEGMENT_PATTERN) if value else '""'
            case "output_file":
                return _make_file_literal(value, OUTPUT_PATTERN)
        source, target, source_offset, target_offset, run_bytes, loops = value
        counts = map(_make_count_literal, (source_offset, target_offset, run_bytes))
        loop_literals = _make_list_literal(map(_make_shape_literal, loops))
        return _make_list_literal([self._identifiers[source], self._identifiers[target], *counts, loop_literals])

    def _add_identifier(self, tensor: str) -> str:
        # Because of the prefix t_, an identifier differs from C++ keywords and from other names in the functions.
        name = "t_" + re.sub(r"[^A-Za-z0-9]+", "_", tensor).strip("_")[:60]
        unique, count = name, 1
        while unique in self._identifiers.values():
            count += 1
            unique = f"{name}_{count}"
        self._identifiers[tensor] = unique
        return unique


def describe_program(
    program: Program,
    placements: Sequence[RankPlacement],
    files: Sequence[Sequence[Sequence[str]]],
    hoisted: Sequence[Sequence[Sequence[HoistedSegment]]],
    optimization: str,
    provider: str,
    preprocessing: ImagePreprocessing,
    ncnn_version: str = "",
) -> Json:
    """Return the content of program.json, which describes the work of all ranks (MPI processes).

    Sent tensors must have static shapes, and sent tensors, inputs and outputs element types in SENDABLE_TYPES.

    Args:
        program: The program of all devices.
        placements: The device, host and cores of each rank.
        files: For each device, each role (the normal plan, a replica or a failure plan) and each segment (an ONNX
            submodel): the file name.
        hoisted: For each device and each role: the segments, and the copies before and after each.
        optimization: The optimization level of onnxruntime.
        provider: The execution provider of onnxruntime for devices that are GPUs.
        preprocessing: How images become inputs.
        ncnn_version: The version of ncnn for which segments were converted; empty if there are none.
    """
    ranks = []
    for rank, placement in enumerate(placements):
        roles, first_transfer = [], 0
        for role, role_files, role_segments in zip(program.roles, files[rank], hoisted[rank], strict=True):
            roles.append(_describe_role(role, rank, role_files, role_segments, first_transfer))
            first_transfer += len(role.transfers)
        ranks.append(asdict(placement) | {"cores": list(placement.cores), "roles": roles})
    images = asdict(preprocessing) | {"mean": list(preprocessing.mean), "scale": list(preprocessing.scale)}
    document = {
        "format": PROGRAM_FORMAT,
        "inputs": [describe_value(value) for value in program.inputs],
        "optimization": optimization,
        "preprocessing": images,
        "provider": provider,
        "ranks": ranks,
    }
    if program.states:
        document["states"] = [describe_value(value) for value in program.states]
    if ncnn_version:
        document["ncnn"] = ncnn_version
    if len(program.replica_roles) < len(program.roles):
        document["failed"] = [list(role.failed) for role in program.roles]
    return document


def _describe_role(
    program: Program, rank: int, files: Sequence[str], hoisted: Sequence[HoistedSegment], first_transfer: int
) -> list[list[Any]]:
    """Return the calls (lists in program.json) that a rank's function makes for one role.

    Args:
        program: The role (the normal plan, a replica or a failure plan).
        rank: Index of the rank.
        files: The file name of each segment of the rank's device.
        hoisted: The copies of each segment of the rank's device.
        first_transfer: Number of the role's first transfer, which differs from those of other roles.
    """
    calls: list[list[Any]] = []
    device = program.devices[rank]
    ranks = {other.device: index for index, other in enumerate(program.devices)}
    transfers = {transfer.index: transfer for transfer in program.transfers}
    for index, value in find_device_inputs(program, device).items():
        calls.append(["input", index, value.name])
    state_names = [state.name for state in program.states]
    for state in device.states:
        start = [begin for begin, _ in state.region]
        calls.append(["state", state_names.index(state.past), *_describe_tensor(state.value), start])
    loaded = set[str]()
    for step in device.steps:
        if step.kind == "run":
            segment = device.segments[step.index]
            read = [s.value.name for s in device.states if s.value.name in {*segment.inputs} - loaded]
            loaded.update(read)
            calls += [["load_state", name] for name in read]
            calls += _describe_run(segment, files[step.index], hoisted[step.index])
            written = [state for state in device.states if state.written_name in segment.outputs]
            calls += [["store_state", state.written_name, state.value.name] for state in written]
            continue
        transfer = transfers[step.index]
        index = first_transfer + step.index
        if step.kind == "receive":
            calls.append(["receive", index, *_describe_tensor(transfer.value), ranks[transfer.sender]])
        else:
            calls.append(["send", index, transfer.value.name, ranks[transfer.receiver]])
    output_files = assign_output_files([value.name for value in program.outputs])
    return [*calls, *(["output", tensor, output_files[output]] for tensor, output in device.model_outputs.items())]


def _describe_tensor(value: TensorSpec) -> list[Any]:
    document = describe_value(value)
    return [document["name"], document["dtype"], document["shape"]]


def _describe_run(segment: Segment, file: str, hoisted: HoistedSegment) -> list[list[Any]]:
    """Return a segment's calls in program.json: declare tensors, copy inputs, run the model, copy outputs."""
    types = {value.name: value.type.tensor_type for value in segment.model.graph.output}
    inner = [TensorSpec(name, entry.dtype, entry.shape) for name, entry in hoisted.copied_inputs.items()]
    inner += [hoisted.values[name] for name in hoisted.outputs if name not in types]
    calls: list[list[Any]] = [["tensor", *_describe_tensor(value)] for value in inner]
    for name in segment.outputs:
        tensor_type = types[name]
        dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor_type.shape.dim]
        dtype = dtype_name(tensor_type.elem_type)
        is_known = tensor_type.HasField("shape") and -1 not in dims and dtype in SENDABLE_TYPES
        calls.append(["tensor", name, *([dtype, dims] if is_known else [])])
    inputs, outputs = list(hoisted.inputs), list(hoisted.outputs)
    if file.endswith(NETWORK_SUFFIX) and hoisted.segment is not None:
        # Files for ncnn have no tensor names, so the order of the tensors in the model identifies them.
        graph = hoisted.segment.model.graph
        inputs, outputs = ([value.name for value in values] for values in (graph.input, graph.output))
    return [
        *calls,
        *_describe_copies("copy_input", hoisted.copied_inputs, hoisted),
        ["run", file, inputs, outputs],
        *_describe_copies("copy_output", hoisted.copied_outputs, hoisted),
    ]


def _describe_copies(call: str, tensors: Mapping[str, CopiedTensor], hoisted: HoistedSegment) -> list[list[Any]]:
    copies = [make_copies(name, copied, hoisted.values) for name, copied in tensors.items()]
    return [[call, *astuple(copy)] for copy in chain(*copies)]


def read_placements(document: Json) -> list[RankPlacement]:
    """Return the device, host and cores of each rank (MPI process) in the content of a program.json.

    Raises:
        ValueError: An entry is invalid.
    """
    placements = [
        RankPlacement(rank["device"], rank["host"], tuple(rank["cores"]), rank["threads"], rank["gpu"])
        for rank in document["ranks"]
    ]
    for placement in placements:
        for name in (placement.device, placement.host):
            _make_file_literal(name, NAME_PATTERN)
        _make_shape_literal((*placement.cores, placement.threads, int(placement.gpu)))
    return placements


def generate_main(document: Json) -> str:
    """Return the text of main.cc for the content of a program.json.

    The document cannot insert other code, because its strings become only C++ names and literals.

    Raises:
        KeyError, TypeError, ValueError: The document is invalid.
    """
    lines = [
        "// The program of a network that was split over several devices; each device is one MPI rank.",
        "// Every rank executes the function with its number for every frame: see runtime/program.hpp.",
        '#include "runtime/program.hpp"',
        "",
        "using dicompiler::Rank;",
        "using dicompiler::Type;",
        "",
        "namespace {",
    ]
    placements = read_placements(document)
    for rank, (placement, entry) in enumerate(zip(placements, document["ranks"], strict=True)):
        processor = "a GPU" if placement.gpu else f"threads: {placement.threads}"
        lines += ["", f"// Rank {rank}: device {placement.device} on host {placement.host}, {processor}."]
        for role, calls in enumerate(entry["roles"]):
            lines += [""] * (role > 0) + _generate_function(_name_function(document, rank, role), calls)
    lines += ["", "}  // namespace", "", *_generate_main_function(document, placements)]
    return "\n".join(lines) + "\n"


def _name_function(document: Json, rank: int, role: int) -> str:
    return f"rank{rank}_role{role}" if len(document["ranks"][rank]["roles"]) > 1 else f"rank{rank}"


def _generate_function(name: str, calls: Sequence[Sequence[Any]]) -> list[str]:
    if not calls:
        return [f"void {name}(Rank&) {{}}"]
    writer = _FunctionWriter()
    body = [line for call in calls for line in writer.write(*call)]
    return [f"void {name}(Rank& rank) {{", *(f"    {line}" for line in body), "}"]


def _generate_main_function(document: Json, placements: Sequence[RankPlacement]) -> list[str]:
    devices = []
    for rank, placement in enumerate(placements):
        names = f"{make_string_literal(placement.device)}, {make_string_literal(placement.host)}"
        roles = range(len(document["ranks"][rank]["roles"]))
        functions = _make_list_literal(_name_function(document, rank, role) for role in roles)
        devices.append(f"{{{names}, {placement.threads}, {str(placement.gpu).lower()}, {functions}}},")
    inputs, states = ([_make_input_literal(value) for value in document.get(key, ())] for key in ("inputs", "states"))
    failed = document.get("failed", ())
    images = document["preprocessing"]
    mean, scale = (", ".join(map(_make_float_literal, images[key])) for key in ("mean", "scale"))
    ncnn_version = document.get("ncnn", "")
    role_count_lines = [
        "        // The number of roles that are used while no device has failed; 0: all.",
        f"        {'' if states else '{}, '}{failed.count([])},",
    ]
    ncnn_lines = [
        "        // The version of ncnn.",
        f"        {_make_file_literal(ncnn_version or '0', VERSION_PATTERN)},",
    ]
    state_lines = ["        // The inputs that are states.", "        {", *(f"            {line}" for line in states)]
    return [
        "int main(int argc, char** argv) {",
        "    const dicompiler::Program program{",
        "        // Device, host, threads, whether it is a GPU, a function for each role (frame i uses role i mod n).",
        "        {",
        *(f"            {line}" for line in devices),
        "        },",
        "        // The network's inputs: name, type, whether the shape is known, shape.",
        "        {",
        *(f"            {line}" for line in inputs),
        "        },",
        f"        {make_string_literal(document['optimization'])},",
        f"        {make_string_literal(document['provider'])},",
        "        // Images: order of the channels, mean and scale.",
        f"        {{{make_string_literal(images['order'])}, {{{mean}}}, {{{scale}}}}},",
        *([*state_lines, "        },"] if states else []),
        *(role_count_lines if failed or ncnn_version else []),
        *(ncnn_lines if ncnn_version else []),
        "    };",
        "    return dicompiler::run_program(program, argc, argv);",
        "}",
    ]


def _make_input_literal(value: Json) -> str:
    is_known = str(value["shape"] is not None).lower()
    name, dtype = make_string_literal(value["name"]), _make_type_literal(value["dtype"])
    return f"{{{name}, {dtype}, {is_known}, {_make_shape_literal(value['shape'] or ())}}},"


def _make_float_literal(value: float) -> str:
    digits = repr(float(value))
    return digits + "F" if "." in digits or "e" in digits else digits + ".0F"
