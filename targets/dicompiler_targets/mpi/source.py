"""Writes main.cc, the SPMD program of a Program: a function for each rank that lists what the rank does for a frame.

In: a Program and what each device is. Out: C++ text, the same for the same program; runtime/program.hpp says what the
calls in it do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dicompiler.plugin_api import DeviceProgram, Program, Transfer, dtype_name
from dicompiler_targets.files import TYPES, given_inputs

WIDTH = 120
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
    """A C++ list of extents."""
    return "{" + ", ".join(map(str, dims)) + "}"


def kind(dtype: int) -> str:
    """The runtime's name of an element type."""
    name = dtype_name(dtype)
    return f"Type::{KINDS.get(name, name.lower())}"


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


def main_source(
    program: Program,
    places: Sequence[Place],
    files: Sequence[Sequence[Sequence[str]]],
    optimization: str,
    provider: str,
    preprocessing: Preprocessing,
) -> str:
    """main.cc. files: of each device, for each role, those of its segments. The types of what is sent, and of inputs
    and outputs, must be in files.TYPES, with static shapes for what is sent."""
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
    for rank, place in enumerate(places):
        what = f"device {place.device} on host {place.host}, " + ("a GPU" if place.gpu else f"threads: {place.threads}")
        lines += ["", f"// Rank {rank}: {what}."]
        first = 0
        for number, role in enumerate(program.roles):
            lines += [""] * (number > 0) + _function(
                role, rank, _name(program, rank, number), files[rank][number], first
            )
            first += len(role.transfers)
    lines += ["", "}  // namespace", "", *_main(program, places, optimization, provider, preprocessing)]
    return "\n".join(lines) + "\n"


def _name(program: Program, rank: int, role: int) -> str:
    """The function of a rank's role."""
    return f"rank{rank}_role{role}" if program.others else f"rank{rank}"


def _function(program: Program, rank: int, name: str, segment_files: Sequence[str], first: int) -> list[str]:
    """What a rank does in one role. segment_files: in order; first: the number of the role's first transfer."""
    names, body, device = _Names(), [], program.devices[rank]
    ranks = {device.device: rank for rank, device in enumerate(program.devices)}
    transfers = {t.index: replace(t, index=first + t.index) for t in program.transfers}
    for index, value in given_inputs(program, device).items():
        body.append(f"const auto {names.new(value.name)} = rank.input({index}, {text(value.name)});")
    for step in device.steps:
        if step.kind == "receive":
            body += _receive(transfers[step.index], names, ranks)
        elif step.kind == "send":
            transfer = transfers[step.index]
            tensor = names.identifiers[transfer.value.name]
            body.append(f"rank.send({transfer.index}, {tensor}, {ranks[transfer.receiver]});")
        else:
            body += _run(device, step.index, segment_files[step.index], names)
    outputs = output_files([value.name for value in program.outputs])
    for tensor, output in device.sinks.items():
        body.append(f"rank.output({names.identifiers[tensor]}, {text(outputs[output])});")
    if not body:
        return [f"void {name}(Rank&) {{}}"]
    return [f"void {name}(Rank& rank) {{", *(f"    {line}" for line in body), "}"]


def _receive(transfer: Transfer, names: _Names, ranks: Mapping[str, int]) -> list[str]:
    value = transfer.value
    assert value.shape is not None
    arguments = f"{text(value.name)}, {kind(value.dtype)}, {shape(value.shape)}"
    call = f"rank.receive({transfer.index}, {arguments}, {ranks[transfer.sender]});"
    return [f"const auto {names.new(value.name)} = {call}"]


def _run(device: DeviceProgram, index: int, file: str, names: _Names) -> list[str]:
    """The tensors that a segment makes, and its run."""
    segment = device.segments[index]
    types = {value.name: value.type.tensor_type for value in segment.model.graph.output}
    lines = []
    for name in segment.outputs:
        tensor = types[name]
        dims = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
        known = tensor.HasField("shape") and -1 not in dims and dtype_name(tensor.elem_type) in TYPES
        more = f", {kind(tensor.elem_type)}, {shape(dims)}" if known else ""
        lines.append(f"const auto {names.new(name)} = rank.tensor({text(name)}{more});")
    inputs, outputs = names.list(segment.inputs), names.list(segment.outputs)
    call = f"rank.run({text(file)}, {inputs}, {outputs});"
    if len(call) > WIDTH - 4:
        return [*lines, f"rank.run({text(file)},", f"         {inputs},", f"         {outputs});"]
    return [*lines, call]


def _main(
    program: Program, places: Sequence[Place], optimization: str, provider: str, preprocessing: Preprocessing
) -> list[str]:
    devices = [
        f"{{{text(p.device)}, {text(p.host)}, {p.threads}, {str(p.gpu).lower()}, {_roles(program, i)}}},"
        for i, p in enumerate(places)
    ]
    inputs = [
        f"{{{text(v.name)}, {kind(v.dtype)}, {str(v.shape is not None).lower()}, {shape(v.shape or ())}}},"
        for v in program.inputs
    ]
    mean, scale = (", ".join(map(_float, values)) for values in (preprocessing.mean, preprocessing.scale))
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
        f"        {text(optimization)},",
        f"        {text(provider)},",
        "        // Images: order of channels, mean and scale.",
        f"        {{{text(preprocessing.order)}, {{{mean}}}, {{{scale}}}}},",
        "    };",
        "    return dicompiler::run(program, argc, argv);",
        "}",
    ]


def _roles(program: Program, rank: int) -> str:
    return "{" + ", ".join(_name(program, rank, role) for role in range(len(program.roles))) + "}"


def _float(value: float) -> str:
    """The number as C++ reads it back, of type float."""
    digits = repr(float(value))
    return digits + "F" if "." in digits or "e" in digits else digits + ".0F"
