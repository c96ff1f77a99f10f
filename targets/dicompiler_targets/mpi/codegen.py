"""Generates main.cc, the program of all ranks: a function for each rank that lists its work for a frame.

    Program ──describe_program──► program.json ──generate_main──► main.cc

main.cc follows from program.json alone. An artifact is data, so main.cc is built only if it is exactly this text.
runtime/program.hpp documents the calls in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

from dicompiler.plugin_api import Program, Segment, TensorSpec
from dicompiler.plugin_api.artifacts import SENDABLE_TYPES, Json, describe_value
from dicompiler.plugin_api.onnx import dtype_name
from dicompiler_targets.artifact_files import find_device_inputs
from dicompiler_targets.copy_hoisting import HoistedSegment, make_copies

PROGRAM_FORMAT = "dicompiler.mpi-program/3"
MAX_LINE_CHARS = 120
NAME_PATTERN, SEGMENT_PATTERN, OUTPUT_PATTERN = (
    r"[A-Za-z0-9_][A-Za-z0-9_.-]*",
    r"segment\d{3,}\.onnx",
    r"[A-Za-z0-9_.-]{1,120}\.npy",
)
"""Patterns of the names of devices and hosts, and of files."""
CPP_TYPE_NAMES = {
    "FLOAT": "float32", "DOUBLE": "float64", "BOOL": "boolean", "FLOAT16": "float16", "BFLOAT16": "bfloat16",
}  # fmt: skip
"""The runtime's names of ONNX types, if they are not ONNX's names in lower case."""


@dataclass(frozen=True)
class RankPlacement:
    """The device, host and cores of a rank.

    Attributes:
        device: Name of the device.
        host: Name of its host.
        cores: Its cores on the host.
        threads: Threads for a segment.
        gpu: Whether the device is a GPU.
    """

    device: str
    host: str
    cores: tuple[int, ...]
    threads: int
    gpu: bool


@dataclass(frozen=True)
class ImagePreprocessing:
    """How images become inputs; see runtime/image.hpp."""

    order: str
    mean: tuple[float, ...]
    scale: tuple[float, ...]


def make_string_literal(value: str) -> str:
    """Return a C++ string literal. Bytes that are not plain ASCII, or could begin an escape or trigraph, are octal."""
    plain = "".join(
        chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\?' else f"\\{byte:03o}" for byte in value.encode()
    )
    return f'"{plain}"'


def make_shape_literal(dims: Iterable[int]) -> str:
    """Return a C++ list of extents. Raise ValueError for an invalid extent."""
    return "{" + ", ".join(map(make_count_literal, dims)) + "}"


def make_count_literal(value: Any) -> str:
    """Return a C++ literal of a non-negative integer. Raise ValueError for other values."""
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a count")
    return str(value)


def make_type_literal(name: str) -> str:
    """Return the runtime's name of an element type. Raise ValueError for an unknown type."""
    if name not in SENDABLE_TYPES:
        raise ValueError(f"{name!r} is not an element type")
    return f"Type::{CPP_TYPE_NAMES.get(name, name.lower())}"


def make_file_literal(name: str, pattern: str) -> str:
    """Return a C++ literal of a file name. Raise ValueError for a name that does not match the pattern."""
    if not re.fullmatch(pattern, name):
        raise ValueError(f"{name!r} is not a valid file name")
    return make_string_literal(name)


def assign_output_files(names: Sequence[str]) -> dict[str, str]:
    """Return the end of the file names of each output: its name with safe characters, made unique."""
    files: dict[str, str] = {}
    for index, name in enumerate(names):
        safe = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:100]
        files[name] = f"{safe}.npy" if f"{safe}.npy" not in files.values() else f"{safe}-{index}.npy"
    return files


@dataclass
class _Identifiers:
    """C++ identifiers of tensors: the letters and digits of their names, made unique."""

    identifiers: dict[str, str] = field(default_factory=dict)

    def add(self, tensor: str) -> str:
        # The prefix keeps identifiers apart from keywords and from other names in the functions.
        name = "t_" + re.sub(r"[^A-Za-z0-9]+", "_", tensor).strip("_")[:60]
        unique, count = name, 1
        while unique in self.identifiers.values():
            count += 1
            unique = f"{name}_{count}"
        self.identifiers[tensor] = unique
        return unique

    def make_list(self, tensors: Iterable[str]) -> str:
        return "{" + ", ".join(self.identifiers[tensor] for tensor in tensors) + "}"


def describe_program(
    program: Program,
    placements: Sequence[RankPlacement],
    files: Sequence[Sequence[Sequence[str]]],
    hoisted: Sequence[Sequence[Sequence[HoistedSegment]]],
    optimization: str,
    provider: str,
    preprocessing: ImagePreprocessing,
) -> Json:
    """Return the content of program.json.

    The types of sent tensors, inputs and outputs must be in SENDABLE_TYPES; sent tensors must have static shapes.

    Args:
        program: The program.
        placements: The placement of each rank.
        files: For each device and each role, the file of each segment.
        hoisted: For each device and each role, the segments.
        optimization: onnxruntime's optimization level.
        provider: onnxruntime's execution provider for GPUs.
        preprocessing: How images become inputs.
    """
    ranks = []
    for rank, placement in enumerate(placements):
        roles, first_transfer = [], 0
        for role, role_files, role_segments in zip(program.roles, files[rank], hoisted[rank], strict=True):
            segments = list(zip(role_files, role_segments, strict=True))
            roles.append(_describe_role(role, rank, segments, first_transfer))
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
    if len(program.replica_roles) < len(program.roles):
        document["failed"] = [list(role.failed) for role in program.roles]
    return document


def _describe_role(
    program: Program, rank: int, segments: Sequence[tuple[str, HoistedSegment]], first_transfer: int
) -> list[list[Any]]:
    """Return the calls of a rank's function for one role.

    Args:
        program: The role's program.
        rank: The rank.
        segments: File and hoisted form of each segment, in order.
        first_transfer: Number of the role's first transfer.
    """
    calls: list[list[Any]] = []
    device = program.devices[rank]
    ranks = {other.device: index for index, other in enumerate(program.devices)}
    transfers = {
        transfer.index: replace(transfer, index=first_transfer + transfer.index) for transfer in program.transfers
    }
    for index, value in find_device_inputs(program, device).items():
        calls.append(["input", index, value.name])
    state_names = [state.name for state in program.states]
    for state in device.states:
        tensor, start = describe_value(state.value), [begin for begin, _ in state.region]
        calls.append(["state", state_names.index(state.past), tensor["name"], tensor["dtype"], tensor["shape"], start])
    loaded = set[str]()
    for step in device.steps:
        if step.kind == "receive":
            tensor = describe_value(transfers[step.index].value)
            sender = ranks[transfers[step.index].sender]
            index = first_transfer + step.index
            calls.append(["receive", index, tensor["name"], tensor["dtype"], tensor["shape"], sender])
        elif step.kind == "send":
            transfer = transfers[step.index]
            calls.append(["send", transfer.index, transfer.value.name, ranks[transfer.receiver]])
        else:
            segment = device.segments[step.index]
            read = [s.value.name for s in device.states if s.value.name in {*segment.inputs} - loaded]
            loaded.update(read)
            calls += [["load_state", name] for name in read]
            calls += _describe_run(segment, *segments[step.index])
            written = [state for state in device.states if state.written_name in segment.outputs]
            calls += [["store_state", state.written_name, state.value.name] for state in written]
    files = assign_output_files([value.name for value in program.outputs])
    return [*calls, *(["output", tensor, files[output]] for tensor, output in device.sinks.items())]


def _describe_run(segment: Segment, file: str, hoisted: HoistedSegment) -> list[list[Any]]:
    """Return the declarations of a segment's tensors, its run, and the copies before and after it."""
    types = {value.name: value.type.tensor_type for value in segment.model.graph.output}
    assembled = hoisted.assembled_inputs.items()
    inner = [TensorSpec(name, assembly.dtype, assembly.shape) for name, assembly in assembled]
    inner += [hoisted.values[name] for name in hoisted.outputs if name not in types]
    documents = [describe_value(value) for value in inner]
    calls: list[list[Any]] = [["tensor", tensor["name"], tensor["dtype"], tensor["shape"]] for tensor in documents]
    for name in segment.outputs:
        tensor_type = types[name]
        dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor_type.shape.dim]
        dtype = dtype_name(tensor_type.elem_type)
        is_known = tensor_type.HasField("shape") and -1 not in dims and dtype in SENDABLE_TYPES
        calls.append(["tensor", name, *([dtype, dims] if is_known else [])])
    input_copies, output_copies = (
        [
            [call, *astuple(copy)]
            for name, assembly in assemblies.items()
            for copy in make_copies(name, assembly, hoisted.values)
        ]
        for call, assemblies in (
            ("copy_input", hoisted.assembled_inputs),
            ("copy_output", hoisted.assembled_outputs),
        )
    )
    return [*calls, *input_copies, ["run", file, list(hoisted.inputs), list(hoisted.outputs)], *output_copies]


def read_placements(document: Json) -> list[RankPlacement]:
    """Return the placement of each rank in a program.json. Raise ValueError for invalid entries."""
    placements = [
        RankPlacement(rank["device"], rank["host"], tuple(rank["cores"]), rank["threads"], rank["gpu"])
        for rank in document["ranks"]
    ]
    for placement in placements:
        for name in (placement.device, placement.host):
            make_file_literal(name, NAME_PATTERN)
        make_shape_literal((*placement.cores, placement.threads, int(placement.gpu)))
    return placements


def generate_main(document: Json) -> str:
    """Return main.cc for a program.json.

    Raise KeyError, TypeError or ValueError if the document is invalid. Its content only becomes names and literals.
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
    """Return the function of a rank's role."""
    identifiers, body = _Identifiers(), list[str]()
    for call, *arguments in calls:
        body += _CALL_GENERATORS[call](identifiers, *arguments)
    if not body:
        return [f"void {name}(Rank&) {{}}"]
    return [f"void {name}(Rank& rank) {{", *(f"    {line}" for line in body), "}"]


# The following functions take the arguments of a call in program.json and return the lines of its C++ code.


def _generate_input(identifiers: _Identifiers, index: int, tensor: str) -> list[str]:
    call = f"rank.input({make_count_literal(index)}, {make_string_literal(tensor)});"
    return [f"const auto {identifiers.add(tensor)} = {call}"]


def _generate_receive(
    identifiers: _Identifiers, transfer: int, tensor: str, dtype: str, dims: Sequence[int], sender: int
) -> list[str]:
    arguments = f"{make_string_literal(tensor)}, {make_type_literal(dtype)}, {make_shape_literal(dims)}"
    call = f"rank.receive({make_count_literal(transfer)}, {arguments}, {make_count_literal(sender)});"
    return [f"const auto {identifiers.add(tensor)} = {call}"]


def _generate_state(
    identifiers: _Identifiers, index: int, tensor: str, dtype: str, dims: Sequence[int], start: Sequence[int]
) -> list[str]:
    shapes = f"{make_shape_literal(dims)}, {make_shape_literal(start)}"
    arguments = f"{make_count_literal(index)}, {make_string_literal(tensor)}, {make_type_literal(dtype)}, {shapes}"
    return [f"const auto {identifiers.add(tensor)} = rank.state({arguments});"]


def _generate_load_state(identifiers: _Identifiers, tensor: str) -> list[str]:
    return [f"rank.load_state({identifiers.identifiers[tensor]});"]


def _generate_store_state(identifiers: _Identifiers, tensor: str, state: str) -> list[str]:
    return [f"rank.store_state({identifiers.identifiers[tensor]}, {identifiers.identifiers[state]});"]


def _generate_tensor(identifiers: _Identifiers, tensor: str, dtype: str = "", dims: Sequence[int] = ()) -> list[str]:
    arguments = make_string_literal(tensor)
    if dtype:
        arguments += f", {make_type_literal(dtype)}, {make_shape_literal(dims)}"
    return [f"const auto {identifiers.add(tensor)} = rank.tensor({arguments});"]


def _generate_run(identifiers: _Identifiers, file: str, inputs: Sequence[str], outputs: Sequence[str]) -> list[str]:
    file_literal = make_file_literal(file, SEGMENT_PATTERN) if file else make_string_literal("")
    arguments = [file_literal, identifiers.make_list(inputs), identifiers.make_list(outputs)]
    call = f"rank.run({', '.join(arguments)});"
    if len(call) > MAX_LINE_CHARS - 4:
        return [f"rank.run({arguments[0]},", f"         {arguments[1]},", f"         {arguments[2]});"]
    return [call]


def _generate_copy_input(identifiers: _Identifiers, *copy: Any) -> list[str]:
    return [f"rank.copy_input({_make_copy_literal(identifiers, *copy)});"]


def _generate_copy_output(identifiers: _Identifiers, *copy: Any) -> list[str]:
    return [f"rank.copy_output({_make_copy_literal(identifiers, *copy)});"]


def _make_copy_literal(
    identifiers: _Identifiers,
    source: str,
    target: str,
    source_offset: int,
    target_offset: int,
    run_bytes: int,
    loops: Sequence[Sequence[int]],
) -> str:
    names = f"{identifiers.identifiers[source]}, {identifiers.identifiers[target]}"
    counts = ", ".join(map(make_count_literal, (source_offset, target_offset, run_bytes)))
    return f"{{{names}, {counts}, {{{', '.join(map(make_shape_literal, loops))}}}}}"


def _generate_send(identifiers: _Identifiers, transfer: int, tensor: str, receiver: int) -> list[str]:
    transfer_literal, receiver_literal = make_count_literal(transfer), make_count_literal(receiver)
    return [f"rank.send({transfer_literal}, {identifiers.identifiers[tensor]}, {receiver_literal});"]


def _generate_output(identifiers: _Identifiers, tensor: str, file: str) -> list[str]:
    return [f"rank.output({identifiers.identifiers[tensor]}, {make_file_literal(file, OUTPUT_PATTERN)});"]


_CALL_GENERATORS: Mapping[str, Callable[..., list[str]]] = {
    "input": _generate_input,
    "state": _generate_state,
    "load_state": _generate_load_state,
    "store_state": _generate_store_state,
    "receive": _generate_receive,
    "tensor": _generate_tensor,
    "copy_input": _generate_copy_input,
    "run": _generate_run,
    "copy_output": _generate_copy_output,
    "send": _generate_send,
    "output": _generate_output,
}
"""Generators of C++ code by the name of a call in program.json."""


def _generate_main_function(document: Json, placements: Sequence[RankPlacement]) -> list[str]:
    devices = []
    for rank, placement in enumerate(placements):
        names = f"{make_string_literal(placement.device)}, {make_string_literal(placement.host)}"
        is_gpu = str(placement.gpu).lower()
        devices.append(f"{{{names}, {placement.threads}, {is_gpu}, {_list_functions(document, rank)}}},")
    inputs, states = ([_make_input_literal(value) for value in document.get(key, ())] for key in ("inputs", "states"))
    images = document["preprocessing"]
    mean, scale = (", ".join(map(_make_float_literal, images[key])) for key in ("mean", "scale"))
    state_lines = ["        // The inputs that are states.", "        {", *(f"            {line}" for line in states)]
    return [
        "int main(int argc, char** argv) {",
        "    const dicompiler::Program program{",
        "        // Device, host, threads, whether it is a GPU, its functions (frame i uses function i mod n).",
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
        *_generate_role_count(document),
        "    };",
        "    return dicompiler::run_program(program, argc, argv);",
        "}",
    ]


def _generate_role_count(document: Json) -> list[str]:
    """Return the lines for the number of regular functions, if there are further ones for failures."""
    failed = document.get("failed", ())
    if not failed:
        return []
    return [
        "        // No states; the number of functions that are used while no device has failed.",
        f"        {{}}, {failed.count([])},",
    ]


def _make_input_literal(value: Json) -> str:
    is_known = str(value["shape"] is not None).lower()
    name, dtype = make_string_literal(value["name"]), make_type_literal(value["dtype"])
    return f"{{{name}, {dtype}, {is_known}, {make_shape_literal(value['shape'] or ())}}},"


def _list_functions(document: Json, rank: int) -> str:
    count = len(document["ranks"][rank]["roles"])
    return "{" + ", ".join(_name_function(document, rank, role) for role in range(count)) + "}"


def _make_float_literal(value: float) -> str:
    digits = repr(float(value))
    return digits + "F" if "." in digits or "e" in digits else digits + ".0F"
