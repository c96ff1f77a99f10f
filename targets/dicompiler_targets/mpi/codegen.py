"""Writes main.cc, the SPMD program of a Program: a function for each rank that lists what the rank does for a frame.

Program ──describe──► program.json ──main_source──► C++ text, the same for the same program. That text follows from the
JSON alone: an artifact is data, and whoever builds its main.cc can tell whether it says that and nothing else.
runtime/program.hpp says what the calls in it do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

from dicompiler.plugin_api import Program, Segment, TensorSpec
from dicompiler.plugin_api.onnx import dtype_name
from dicompiler_targets.artifact_files import SENDABLE_TYPES, Json, describe_value, find_device_inputs
from dicompiler_targets.copy_hoisting import HoistedSegment, make_copies

PROGRAM_FORMAT = "dicompiler.mpi-program/2"
MAX_LINE_CHARS = 120
NAME_PATTERN, SEGMENT_PATTERN, OUTPUT_PATTERN = (
    r"[A-Za-z0-9_][A-Za-z0-9_.-]*",
    r"segment\d{3,}\.onnx",
    r"[A-Za-z0-9_.-]{1,120}\.npy",
)
"""Patterns: names of devices and hosts, and of files."""
CPP_TYPE_NAMES = {
    "FLOAT": "float32", "DOUBLE": "float64", "BOOL": "boolean", "FLOAT16": "float16", "BFLOAT16": "bfloat16",
}  # fmt: skip
"""The runtime's names of ONNX's types where they are not those in small letters."""


@dataclass(frozen=True)
class RankPlacement:
    """A rank: its device, host and cores there; `threads` of a segment."""

    device: str
    host: str
    cores: tuple[int, ...]
    threads: int
    gpu: bool


@dataclass(frozen=True)
class ImagePreprocessing:
    """How images become inputs: see runtime/image.hpp."""

    order: str
    mean: tuple[float, ...]
    scale: tuple[float, ...]


def make_string_literal(value: str) -> str:
    """A C++ string literal. What is not plain ASCII, and what could begin an escape or a trigraph, is in octal."""
    plain = "".join(
        chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\?' else f"\\{byte:03o}" for byte in value.encode()
    )
    return f'"{plain}"'


def make_shape_literal(dims: Iterable[int]) -> str:
    """A C++ list of extents. ValueError for what is none."""
    return "{" + ", ".join(map(make_count_literal, dims)) + "}"


def make_count_literal(value: Any) -> str:
    """A C++ literal of a count. ValueError for what is none."""
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is no count")
    return str(value)


def make_type_literal(name: str) -> str:
    """The runtime's name of an element type. ValueError for what is none."""
    if name not in SENDABLE_TYPES:
        raise ValueError(f"{name!r} is no type")
    return f"Type::{CPP_TYPE_NAMES.get(name, name.lower())}"


def make_file_literal(name: str, pattern: str) -> str:
    """A C++ literal of a file's name. ValueError for one that may lie elsewhere."""
    if not re.fullmatch(pattern, name):
        raise ValueError(f"{name!r} is no name of such a file")
    return make_string_literal(name)


def assign_output_files(names: Sequence[str]) -> dict[str, str]:
    """The end of the file name of each output: its name, where that can be one, made unique."""
    files: dict[str, str] = {}
    for index, name in enumerate(names):
        safe = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:100]
        files[name] = f"{safe}.npy" if f"{safe}.npy" not in files.values() else f"{safe}-{index}.npy"
    return files


@dataclass
class _Identifiers:
    """C++ names for tensors: what is left of their own, made unique."""

    identifiers: dict[str, str] = field(default_factory=dict)

    def add(self, tensor: str) -> str:
        # The first letter keeps it from words of the language and from names that the functions use.
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
    places: Sequence[RankPlacement],
    files: Sequence[Sequence[Sequence[str]]],
    ends: Sequence[Sequence[Sequence[HoistedSegment]]],
    optimization: str,
    provider: str,
    preprocessing: ImagePreprocessing,
) -> Json:
    """program.json. files, ends: of each device, for each role, those of its segments. The types of what is sent, and
    of inputs and outputs, must be in files.TYPES, with static shapes for what is sent."""
    ranks = []
    for rank, place in enumerate(places):
        roles, first = [], 0
        for role, *own in zip(program.roles, files[rank], ends[rank], strict=True):
            roles.append(_describe_role(role, rank, list(zip(*own, strict=True)), first))
            first += len(role.transfers)
        ranks.append(asdict(place) | {"cores": list(place.cores), "roles": roles})
    images = asdict(preprocessing) | {"mean": list(preprocessing.mean), "scale": list(preprocessing.scale)}
    states = {"states": [describe_value(value) for value in program.states]} if program.states else {}
    survives = len(program.replica_roles) < len(program.roles)
    lost = {"lost": [list(role.failed) for role in program.roles]} if survives else {}
    return (
        states
        | lost
        | {
            "format": PROGRAM_FORMAT,
            "inputs": [describe_value(value) for value in program.inputs],
            "optimization": optimization,
            "preprocessing": images,
            "provider": provider,
            "ranks": ranks,
        }
    )


def _describe_role(
    program: Program, rank: int, segments: Sequence[tuple[str, HoistedSegment]], first: int
) -> list[list[Any]]:
    """What a rank does in one role: the calls of its function. segments: their files and ends, in order; first: the
    number of the role's first transfer."""
    calls: list[list[Any]] = []
    device = program.devices[rank]
    ranks = {device.device: rank for rank, device in enumerate(program.devices)}
    transfers = {t.index: replace(t, index=first + t.index) for t in program.transfers}
    for index, value in find_device_inputs(program, device).items():
        calls.append(["input", index, value.name])
    wholes = [whole.name for whole in program.states]
    for state in device.states:
        one, begin = describe_value(state.value), [start for start, _ in state.region]
        calls.append(["state", wholes.index(state.past), one["name"], one["dtype"], one["shape"], begin])
    taken = set[str]()
    for step in device.steps:
        if step.kind == "receive":
            one = describe_value(transfers[step.index].value)
            sender = ranks[transfers[step.index].sender]
            calls.append(["receive", first + step.index, one["name"], one["dtype"], one["shape"], sender])
        elif step.kind == "send":
            transfer = transfers[step.index]
            calls.append(["send", transfer.index, transfer.value.name, ranks[transfer.receiver]])
        else:
            segment = device.segments[step.index]
            read = [s.value.name for s in device.states if s.value.name in {*segment.inputs} - taken]
            taken.update(read)
            calls += [["take", name] for name in read]
            calls += _describe_run(segment, *segments[step.index])
            made = [state for state in device.states if state.written_name in segment.outputs]
            calls += [["keep", state.written_name, state.value.name] for state in made]
    outputs = assign_output_files([value.name for value in program.outputs])
    return [*calls, *(["output", tensor, outputs[output]] for tensor, output in device.sinks.items())]


def _describe_run(segment: Segment, file: str, seam: HoistedSegment) -> list[list[Any]]:
    """The tensors that are joined for a segment, and those that it makes; its run, with what is copied at its ends."""
    types = {value.name: value.type.tensor_type for value in segment.model.graph.output}
    inner = [TensorSpec(name, one.dtype, one.shape) for name, one in seam.assembled_inputs.items()]
    inner += [seam.values[name] for name in seam.outputs if name not in types]
    documents = [describe_value(value) for value in inner]
    calls: list[list[Any]] = [["tensor", one["name"], one["dtype"], one["shape"]] for one in documents]
    for name in segment.outputs:
        tensor = types[name]
        dims = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
        known = tensor.HasField("shape") and -1 not in dims and dtype_name(tensor.elem_type) in SENDABLE_TYPES
        calls.append(["tensor", name, *([dtype_name(tensor.elem_type), dims] if known else [])])
    joins, cuts = (
        [[what, *astuple(copy)] for name, one in own.items() for copy in make_copies(name, one, seam.values)]
        for what, own in (("join", seam.assembled_inputs), ("cut", seam.assembled_outputs))
    )
    return [*calls, *joins, ["run", file, list(seam.inputs), list(seam.outputs)], *cuts]


def read_placements(document: Json) -> list[RankPlacement]:
    """The places of the ranks in a program.json. ValueError for what is none."""
    found = [
        RankPlacement(r["device"], r["host"], tuple(r["cores"]), r["threads"], r["gpu"]) for r in document["ranks"]
    ]
    for place in found:
        for name in (place.device, place.host):
            make_file_literal(name, NAME_PATTERN)
        make_shape_literal((*place.cores, place.threads, int(place.gpu)))
    return found


def generate_main(document: Json) -> str:
    """main.cc of a program.json. KeyError, TypeError or ValueError where the document is none: nothing that it says
    becomes code but in the places of names and numbers."""
    lines = [
        "// The program of a network that was split over several devices; each is one MPI rank.",
        "// Every rank plays the function of its number for every frame: see runtime/program.hpp.",
        '#include "runtime/program.hpp"',
        "",
        "using dicompiler::Rank;",
        "using dicompiler::Type;",
        "",
        "namespace {",
    ]
    ranks = read_placements(document)
    for rank, (place, one) in enumerate(zip(ranks, document["ranks"], strict=True)):
        what = f"device {place.device} on host {place.host}, " + ("a GPU" if place.gpu else f"threads: {place.threads}")
        lines += ["", f"// Rank {rank}: {what}."]
        for role, calls in enumerate(one["roles"]):
            lines += [""] * (role > 0) + _generate_function(_name_function(document, rank, role), calls)
    lines += ["", "}  // namespace", "", *_generate_main_function(document, ranks)]
    return "\n".join(lines) + "\n"


def _name_function(document: Json, rank: int, role: int) -> str:
    """The function of a rank's role."""
    return f"rank{rank}_role{role}" if len(document["ranks"][rank]["roles"]) > 1 else f"rank{rank}"


def _generate_function(name: str, calls: Sequence[Sequence[Any]]) -> list[str]:
    """What a rank does in one role."""
    names, body = _Identifiers(), list[str]()
    for what, *arguments in calls:
        body += _CALL_GENERATORS[what](names, *arguments)
    if not body:
        return [f"void {name}(Rank&) {{}}"]
    return [f"void {name}(Rank& rank) {{", *(f"    {line}" for line in body), "}"]


def _generate_input(names: _Identifiers, index: int, tensor: str) -> list[str]:
    return [f"const auto {names.add(tensor)} = rank.input({make_count_literal(index)}, {make_string_literal(tensor)});"]


def _generate_receive(
    names: _Identifiers, transfer: int, tensor: str, dtype: str, dims: Sequence[int], sender: int
) -> list[str]:
    arguments = f"{make_string_literal(tensor)}, {make_type_literal(dtype)}, {make_shape_literal(dims)}"
    call = f"rank.receive({make_count_literal(transfer)}, {arguments}, {make_count_literal(sender)});"
    return [f"const auto {names.add(tensor)} = {call}"]


def _generate_state(
    names: _Identifiers, index: int, tensor: str, dtype: str, dims: Sequence[int], begin: Sequence[int]
) -> list[str]:
    arguments = f"{make_count_literal(index)}, {make_string_literal(tensor)}, {make_type_literal(dtype)}, {make_shape_literal(dims)}, {make_shape_literal(begin)}"
    return [f"const auto {names.add(tensor)} = rank.state({arguments});"]


def _generate_take(names: _Identifiers, tensor: str) -> list[str]:
    return [f"rank.take({names.identifiers[tensor]});"]


def _generate_keep(names: _Identifiers, tensor: str, state: str) -> list[str]:
    return [f"rank.keep({names.identifiers[tensor]}, {names.identifiers[state]});"]


def _generate_tensor(names: _Identifiers, tensor: str, dtype: str = "", dims: Sequence[int] = ()) -> list[str]:
    more = f", {make_type_literal(dtype)}, {make_shape_literal(dims)}" if dtype else ""
    return [f"const auto {names.add(tensor)} = rank.tensor({make_string_literal(tensor)}{more});"]


def _generate_run(names: _Identifiers, file: str, read: Sequence[str], made: Sequence[str]) -> list[str]:
    inputs, outputs, place = (
        names.make_list(read),
        names.make_list(made),
        make_file_literal(file, SEGMENT_PATTERN) if file else make_string_literal(""),
    )
    call = f"rank.run({place}, {inputs}, {outputs});"
    if len(call) > MAX_LINE_CHARS - 4:
        return [f"rank.run({place},", f"         {inputs},", f"         {outputs});"]
    return [call]


def _generate_join(names: _Identifiers, *copy: Any) -> list[str]:
    return [f"rank.join({_make_copy_literal(names, *copy)});"]


def _generate_cut(names: _Identifiers, *copy: Any) -> list[str]:
    return [f"rank.cut({_make_copy_literal(names, *copy)});"]


def _make_copy_literal(
    names: _Identifiers, source: str, target: str, start: int, to: int, run: int, loops: Sequence[Sequence[int]]
) -> str:
    ends = f"{names.identifiers[source]}, {names.identifiers[target]}"
    again = "{" + ", ".join(map(make_shape_literal, loops)) + "}"
    return f"{{{ends}, {make_count_literal(start)}, {make_count_literal(to)}, {make_count_literal(run)}, {again}}}"


def _generate_send(names: _Identifiers, transfer: int, tensor: str, receiver: int) -> list[str]:
    return [f"rank.send({make_count_literal(transfer)}, {names.identifiers[tensor]}, {make_count_literal(receiver)});"]


def _generate_output(names: _Identifiers, tensor: str, file: str) -> list[str]:
    return [f"rank.output({names.identifiers[tensor]}, {make_file_literal(file, OUTPUT_PATTERN)});"]


_CALL_GENERATORS: Mapping[str, Callable[..., list[str]]] = {
    "input": _generate_input,
    "state": _generate_state,
    "take": _generate_take,
    "keep": _generate_keep,
    "receive": _generate_receive,
    "tensor": _generate_tensor,
    "join": _generate_join,
    "run": _generate_run,
    "cut": _generate_cut,
    "send": _generate_send,
    "output": _generate_output,
}
"""What a function's lines are made of, by the first entry of a call in program.json."""


def _generate_main_function(document: Json, ranks: Sequence[RankPlacement]) -> list[str]:
    devices = [
        f"{{{make_string_literal(p.device)}, {make_string_literal(p.host)}, {p.threads}, {str(p.gpu).lower()}, {_list_functions(document, i)}}},"
        for i, p in enumerate(ranks)
    ]
    inputs, states = ([_make_input_literal(value) for value in document.get(key, ())] for key in ("inputs", "states"))
    images = document["preprocessing"]
    mean, scale = (", ".join(map(_make_float_literal, images[key])) for key in ("mean", "scale"))
    return [
        "int main(int argc, char** argv) {",
        "    const dicompiler::Program program{",
        "        // Device, host, threads, whether it is a GPU, its functions: frame i is for that of place i mod n.",
        "        {",
        *(f"            {line}" for line in devices),
        "        },",
        "        // The network's inputs: name, type, whether the shape is known, shape.",
        "        {",
        *(f"            {line}" for line in inputs),
        "        },",
        f"        {make_string_literal(document['optimization'])},",
        f"        {make_string_literal(document['provider'])},",
        "        // Images: order of channels, mean and scale.",
        f"        {{{make_string_literal(images['order'])}, {{{mean}}}, {{{scale}}}}},",
        *(
            ["        // Inputs that are states.", "        {", *(f"            {one}" for one in states), "        },"]
            if states
            else []
        ),
        *_generate_role_count(document),
        "    };",
        "    return dicompiler::run(program, argc, argv);",
        "}",
    ]


def _generate_role_count(document: Json) -> list[str]:
    """How many of the functions are for when nothing is lost, where there are others."""
    lost = document.get("lost", ())
    return [
        "        // No states; how many functions are for when nothing is lost.",
        f"        {{}}, {lost.count([])},",
    ] * bool(lost)


def _make_input_literal(value: Json) -> str:
    """An input of the network."""
    known = str(value["shape"] is not None).lower()
    return f"{{{make_string_literal(value['name'])}, {make_type_literal(value['dtype'])}, {known}, {make_shape_literal(value['shape'] or ())}}},"


def _list_functions(document: Json, rank: int) -> str:
    return (
        "{"
        + ", ".join(_name_function(document, rank, role) for role in range(len(document["ranks"][rank]["roles"])))
        + "}"
    )


def _make_float_literal(value: float) -> str:
    """The number as C++ reads it back, of type float."""
    digits = repr(float(value))
    return digits + "F" if "." in digits or "e" in digits else digits + ".0F"
