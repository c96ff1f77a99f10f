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

from dicompiler.plugin_api import Program, Segment, Value, dtype_name
from dicompiler_targets.files import TYPES, Json, given_inputs, value_document
from dicompiler_targets.moves import Peeled, copies

PROGRAM_FORMAT = "dicompiler.mpi-program/2"
WIDTH = 120
NAME, SEGMENT, OUTPUT = r"[A-Za-z0-9_][A-Za-z0-9_.-]*", r"segment\d{3,}\.onnx", r"[A-Za-z0-9_.-]{1,120}\.npy"
"""Patterns: names of devices and hosts, and of files."""
KINDS = {
    "FLOAT": "float32", "DOUBLE": "float64", "BOOL": "boolean", "FLOAT16": "float16", "BFLOAT16": "bfloat16",
}  # fmt: skip
"""The runtime's names of ONNX's types where they are not those in small letters."""


@dataclass(frozen=True)
class Place:
    """A rank: its device, host and cores there; `threads` of a segment."""

    device: str
    host: str
    cores: tuple[int, ...]
    threads: int
    gpu: bool


@dataclass(frozen=True)
class Preprocessing:
    """How images become inputs: see runtime/image.hpp."""

    order: str
    mean: tuple[float, ...]
    scale: tuple[float, ...]


def text(value: str) -> str:
    """A C++ string literal. What is not plain ASCII, and what could begin an escape or a trigraph, is in octal."""
    plain = "".join(
        chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\?' else f"\\{byte:03o}" for byte in value.encode()
    )
    return f'"{plain}"'


def shape(dims: Iterable[int]) -> str:
    """A C++ list of extents. ValueError for what is none."""
    return "{" + ", ".join(map(number, dims)) + "}"


def number(value: Any) -> str:
    """A C++ literal of a count. ValueError for what is none."""
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is no count")
    return str(value)


def kind(name: str) -> str:
    """The runtime's name of an element type. ValueError for what is none."""
    if name not in TYPES:
        raise ValueError(f"{name!r} is no type")
    return f"Type::{KINDS.get(name, name.lower())}"


def file_name(name: str, pattern: str) -> str:
    """A C++ literal of a file's name. ValueError for one that may lie elsewhere."""
    if not re.fullmatch(pattern, name):
        raise ValueError(f"{name!r} is no name of such a file")
    return text(name)


def output_files(names: Sequence[str]) -> dict[str, str]:
    """The end of the file name of each output: its name, where that can be one, made unique."""
    files: dict[str, str] = {}
    for index, name in enumerate(names):
        safe = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:100]
        files[name] = f"{safe}.npy" if f"{safe}.npy" not in files.values() else f"{safe}-{index}.npy"
    return files


@dataclass
class _Names:
    """C++ names for tensors: what is left of their own, made unique."""

    identifiers: dict[str, str] = field(default_factory=dict)

    def new(self, tensor: str) -> str:
        # The first letter keeps it from words of the language and from names that the functions use.
        name = "t_" + re.sub(r"[^A-Za-z0-9]+", "_", tensor).strip("_")[:60]
        unique, count = name, 1
        while unique in self.identifiers.values():
            count += 1
            unique = f"{name}_{count}"
        self.identifiers[tensor] = unique
        return unique

    def list(self, tensors: Iterable[str]) -> str:
        return "{" + ", ".join(self.identifiers[tensor] for tensor in tensors) + "}"


def describe(
    program: Program,
    places: Sequence[Place],
    files: Sequence[Sequence[Sequence[str]]],
    ends: Sequence[Sequence[Sequence[Peeled]]],
    optimization: str,
    provider: str,
    preprocessing: Preprocessing,
) -> Json:
    """program.json. files, ends: of each device, for each role, those of its segments. The types of what is sent, and
    of inputs and outputs, must be in files.TYPES, with static shapes for what is sent."""
    ranks = []
    for rank, place in enumerate(places):
        roles, first = [], 0
        for role, *own in zip(program.roles, files[rank], ends[rank], strict=True):
            roles.append(_calls(role, rank, list(zip(*own, strict=True)), first))
            first += len(role.transfers)
        ranks.append(asdict(place) | {"cores": list(place.cores), "roles": roles})
    images = asdict(preprocessing) | {"mean": list(preprocessing.mean), "scale": list(preprocessing.scale)}
    states = {"states": [value_document(value) for value in program.states]} if program.states else {}
    survives = len(program.turns) < len(program.roles)
    lost = {"lost": [list(role.lost) for role in program.roles]} if survives else {}
    return (
        states
        | lost
        | {
            "format": PROGRAM_FORMAT,
            "inputs": [value_document(value) for value in program.inputs],
            "optimization": optimization,
            "preprocessing": images,
            "provider": provider,
            "ranks": ranks,
        }
    )


def _calls(program: Program, rank: int, segments: Sequence[tuple[str, Peeled]], first: int) -> list[list[Any]]:
    """What a rank does in one role: the calls of its function. segments: their files and ends, in order; first: the
    number of the role's first transfer."""
    calls: list[list[Any]] = []
    device = program.devices[rank]
    ranks = {device.device: rank for rank, device in enumerate(program.devices)}
    transfers = {t.index: replace(t, index=first + t.index) for t in program.transfers}
    for index, value in given_inputs(program, device).items():
        calls.append(["input", index, value.name])
    wholes = [whole.name for whole in program.states]
    for state in device.states:
        one, begin = value_document(state.value), [start for start, _ in state.region]
        calls.append(["state", wholes.index(state.past), one["name"], one["dtype"], one["shape"], begin])
    taken = set[str]()
    for step in device.steps:
        if step.kind == "receive":
            one = value_document(transfers[step.index].value)
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
            calls += _run(segment, *segments[step.index])
            made = [state for state in device.states if state.made in segment.outputs]
            calls += [["keep", state.made, state.value.name] for state in made]
    outputs = output_files([value.name for value in program.outputs])
    return [*calls, *(["output", tensor, outputs[output]] for tensor, output in device.sinks.items())]


def _run(segment: Segment, file: str, seam: Peeled) -> list[list[Any]]:
    """The tensors that are joined for a segment, and those that it makes; its run, with what is copied at its ends."""
    types = {value.name: value.type.tensor_type for value in segment.model.graph.output}
    inner = [Value(name, one.dtype, one.shape) for name, one in seam.joins.items()]
    inner += [seam.values[name] for name in seam.outputs if name not in types]
    documents = [value_document(value) for value in inner]
    calls: list[list[Any]] = [["tensor", one["name"], one["dtype"], one["shape"]] for one in documents]
    for name in segment.outputs:
        tensor = types[name]
        dims = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
        known = tensor.HasField("shape") and -1 not in dims and dtype_name(tensor.elem_type) in TYPES
        calls.append(["tensor", name, *([dtype_name(tensor.elem_type), dims] if known else [])])
    joins, cuts = (
        [[what, *astuple(copy)] for name, one in own.items() for copy in copies(name, one, seam.values)]
        for what, own in (("join", seam.joins), ("cut", seam.cuts))
    )
    return [*calls, *joins, ["run", file, list(seam.inputs), list(seam.outputs)], *cuts]


def places(document: Json) -> list[Place]:
    """The places of the ranks in a program.json. ValueError for what is none."""
    found = [Place(r["device"], r["host"], tuple(r["cores"]), r["threads"], r["gpu"]) for r in document["ranks"]]
    for place in found:
        for name in (place.device, place.host):
            file_name(name, NAME)
        shape((*place.cores, place.threads, int(place.gpu)))
    return found


def main_source(document: Json) -> str:
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
    ranks = places(document)
    for rank, (place, one) in enumerate(zip(ranks, document["ranks"], strict=True)):
        what = f"device {place.device} on host {place.host}, " + ("a GPU" if place.gpu else f"threads: {place.threads}")
        lines += ["", f"// Rank {rank}: {what}."]
        for role, calls in enumerate(one["roles"]):
            lines += [""] * (role > 0) + _function(_name(document, rank, role), calls)
    lines += ["", "}  // namespace", "", *_main(document, ranks)]
    return "\n".join(lines) + "\n"


def _name(document: Json, rank: int, role: int) -> str:
    """The function of a rank's role."""
    return f"rank{rank}_role{role}" if len(document["ranks"][rank]["roles"]) > 1 else f"rank{rank}"


def _function(name: str, calls: Sequence[Sequence[Any]]) -> list[str]:
    """What a rank does in one role."""
    names, body = _Names(), list[str]()
    for what, *arguments in calls:
        body += _CALLS[what](names, *arguments)
    if not body:
        return [f"void {name}(Rank&) {{}}"]
    return [f"void {name}(Rank& rank) {{", *(f"    {line}" for line in body), "}"]


def _input(names: _Names, index: int, tensor: str) -> list[str]:
    return [f"const auto {names.new(tensor)} = rank.input({number(index)}, {text(tensor)});"]


def _receive(names: _Names, transfer: int, tensor: str, dtype: str, dims: Sequence[int], sender: int) -> list[str]:
    arguments = f"{text(tensor)}, {kind(dtype)}, {shape(dims)}"
    call = f"rank.receive({number(transfer)}, {arguments}, {number(sender)});"
    return [f"const auto {names.new(tensor)} = {call}"]


def _state(names: _Names, index: int, tensor: str, dtype: str, dims: Sequence[int], begin: Sequence[int]) -> list[str]:
    arguments = f"{number(index)}, {text(tensor)}, {kind(dtype)}, {shape(dims)}, {shape(begin)}"
    return [f"const auto {names.new(tensor)} = rank.state({arguments});"]


def _take(names: _Names, tensor: str) -> list[str]:
    return [f"rank.take({names.identifiers[tensor]});"]


def _keep(names: _Names, tensor: str, state: str) -> list[str]:
    return [f"rank.keep({names.identifiers[tensor]}, {names.identifiers[state]});"]


def _tensor(names: _Names, tensor: str, dtype: str = "", dims: Sequence[int] = ()) -> list[str]:
    more = f", {kind(dtype)}, {shape(dims)}" if dtype else ""
    return [f"const auto {names.new(tensor)} = rank.tensor({text(tensor)}{more});"]


def _run_call(names: _Names, file: str, read: Sequence[str], made: Sequence[str]) -> list[str]:
    inputs, outputs, place = names.list(read), names.list(made), file_name(file, SEGMENT) if file else text("")
    call = f"rank.run({place}, {inputs}, {outputs});"
    if len(call) > WIDTH - 4:
        return [f"rank.run({place},", f"         {inputs},", f"         {outputs});"]
    return [call]


def _join(names: _Names, *copy: Any) -> list[str]:
    return [f"rank.join({_copy(names, *copy)});"]


def _cut(names: _Names, *copy: Any) -> list[str]:
    return [f"rank.cut({_copy(names, *copy)});"]


def _copy(
    names: _Names, source: str, target: str, start: int, to: int, run: int, loops: Sequence[Sequence[int]]
) -> str:
    ends = f"{names.identifiers[source]}, {names.identifiers[target]}"
    again = "{" + ", ".join(map(shape, loops)) + "}"
    return f"{{{ends}, {number(start)}, {number(to)}, {number(run)}, {again}}}"


def _send(names: _Names, transfer: int, tensor: str, receiver: int) -> list[str]:
    return [f"rank.send({number(transfer)}, {names.identifiers[tensor]}, {number(receiver)});"]


def _output(names: _Names, tensor: str, file: str) -> list[str]:
    return [f"rank.output({names.identifiers[tensor]}, {file_name(file, OUTPUT)});"]


_CALLS: Mapping[str, Callable[..., list[str]]] = {
    "input": _input,
    "state": _state,
    "take": _take,
    "keep": _keep,
    "receive": _receive,
    "tensor": _tensor,
    "join": _join,
    "run": _run_call,
    "cut": _cut,
    "send": _send,
    "output": _output,
}
"""What a function's lines are made of, by the first entry of a call in program.json."""


def _main(document: Json, ranks: Sequence[Place]) -> list[str]:
    devices = [
        f"{{{text(p.device)}, {text(p.host)}, {p.threads}, {str(p.gpu).lower()}, {_roles(document, i)}}},"
        for i, p in enumerate(ranks)
    ]
    inputs, states = ([_ends(value) for value in document.get(key, ())] for key in ("inputs", "states"))
    images = document["preprocessing"]
    mean, scale = (", ".join(map(_float, images[key])) for key in ("mean", "scale"))
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
        f"        {text(document['optimization'])},",
        f"        {text(document['provider'])},",
        "        // Images: order of channels, mean and scale.",
        f"        {{{text(images['order'])}, {{{mean}}}, {{{scale}}}}},",
        *(
            ["        // Inputs that are states.", "        {", *(f"            {one}" for one in states), "        },"]
            if states
            else []
        ),
        *_turns(document),
        "    };",
        "    return dicompiler::run(program, argc, argv);",
        "}",
    ]


def _turns(document: Json) -> list[str]:
    """How many of the functions are for when nothing is lost, where there are others."""
    lost = document.get("lost", ())
    return [
        "        // No states; how many functions are for when nothing is lost.",
        f"        {{}}, {lost.count([])},",
    ] * bool(lost)


def _ends(value: Json) -> str:
    """An input of the network."""
    known = str(value["shape"] is not None).lower()
    return f"{{{text(value['name'])}, {kind(value['dtype'])}, {known}, {shape(value['shape'] or ())}}},"


def _roles(document: Json, rank: int) -> str:
    return "{" + ", ".join(_name(document, rank, role) for role in range(len(document["ranks"][rank]["roles"]))) + "}"


def _float(value: float) -> str:
    """The number as C++ reads it back, of type float."""
    digits = repr(float(value))
    return digits + "F" if "." in digits or "e" in digits else digits + ".0F"
