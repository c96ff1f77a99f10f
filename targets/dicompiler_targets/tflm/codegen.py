"""Generation of those C++ sources of a microcontroller's firmware that differ between devices.

These are the models as arrays, the resolver (which registers the operators with TFLite-micro), the size of the memory,
and the tables of the program, which list the device's work for a frame (inference request).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dicompiler.plugin_api import DeviceProgram, Program, Transfer
from dicompiler_targets.artifact_files import StridedCopy, find_device_inputs
from dicompiler_targets.tflm.lowering import MAX_COPY_LOOPS
from dicompiler_targets.tflm.memory_layout import MemoryLayout, list_received

GENERATED_NOTE = "// Written by dicompiler; compile the network again to change it.\n"
_RESOLVER_METHODS = {"PADV2": "PadV2", "BATCH_MATMUL": "BatchMatMul"}
_BYTES_PER_LINE = 16


@dataclass(frozen=True)
class DeviceModels:
    """The distinct models of a device. Segments (ONNX submodels) with equal content share a model.

    Attributes:
        names: Names of the models.
        model_of_segment: For each segment, the index of its model; None if the segment only copies data.
        arena_bytes: Bytes of each model's arena (the working memory of TFLite-micro for the model).
    """

    names: tuple[str, ...]
    model_of_segment: tuple[int | None, ...]
    arena_bytes: tuple[int, ...]


@dataclass(frozen=True)
class SegmentCopies:
    """The copies that a device makes for one segment (an ONNX submodel of the device).

    Attributes:
        input_copies: Copies from tensors of the device to the model's inputs.
        output_copies: Copies from the model's outputs to tensors of the device.
        tensor_copies: Copies between tensors of the device.
    """

    input_copies: tuple[StridedCopy, ...]
    output_copies: tuple[StridedCopy, ...]
    tensor_copies: tuple[StridedCopy, ...]


def make_data_header(name: str, data: bytes) -> str:
    return (
        f"{GENERATED_NOTE}#pragma once\n\n#include <cstddef>\n\n"
        f"constexpr std::size_t k_model_{name}_bytes = {len(data)};\n"
        f"alignas(16) extern const unsigned char k_model_{name}[k_model_{name}_bytes];\n"
    )


def make_data_source(name: str, data: bytes) -> str:
    lines = [
        "    " + ", ".join(f"0x{byte:02x}" for byte in data[start : start + _BYTES_PER_LINE]) + ",\n"
        for start in range(0, len(data), _BYTES_PER_LINE)
    ]
    head = f'{GENERATED_NOTE}#include "model_{name}_data.h"\n\n'
    return f"{head}alignas(16) const unsigned char k_model_{name}[k_model_{name}_bytes] = {{\n{''.join(lines)}}};\n"


def get_resolver_method(code: str) -> str:
    """Return the method of TFLite-micro's resolver that registers an operator: CONV_2D → AddConv2D."""
    words = "".join(word.capitalize() for word in code.split("_")).replace("2d", "2D")
    return f"Add{_RESOLVER_METHODS.get(code, words)}"


def make_resolver(codes: Sequence[str]) -> str:
    adds = "".join(f"    if (operators.{get_resolver_method(code)}() != kTfLiteOk) return nullptr;\n" for code in codes)
    # A device that only forwards tensors has no operators, but the C++ template needs at least 1.
    count = max(1, len(codes))
    return (
        f'{GENERATED_NOTE}#include "resolver.h"\n\n#include "tensorflow/lite/micro/micro_mutable_op_resolver.h"\n\n'
        "namespace dicompiler {\n\nconst tflite::MicroOpResolver* GetResolver() {\n"
        f"  static tflite::MicroMutableOpResolver<{count}> operators;\n"
        "  static bool ready = false;\n  if (!ready) {\n"
        f"{adds}    ready = true;\n  }}\n  return &operators;\n}}\n\n}}  // namespace dicompiler\n"
    )


def make_arena_header(layout: MemoryLayout, peers: int, incoming: int) -> str:
    """Return the text of arena.h, with the size of a device's memory and the lengths of two tables.

    Args:
        layout: The device's memory.
        peers: Number of devices that this device exchanges tensors with.
        incoming: Number of tensors that it receives for a frame (inference request).
    """
    sizes = {"kMemoryBytes": layout.size_bytes, "kPeerSlots": peers, "kIncomingSlots": incoming}
    lines = "".join(f"constexpr std::size_t {key} = {max(value, 1)};\n" for key, value in sizes.items())
    return (
        f"{GENERATED_NOTE}#pragma once\n\n#include <cstddef>\n\n"
        f"namespace dicompiler {{\n\n{lines}\n}}  // namespace dicompiler\n"
    )


def make_program_source(
    program: Program,
    device: DeviceProgram,
    layout: MemoryLayout,
    models: DeviceModels,
    peers: Sequence[str],
    segment_copies: Sequence[SegmentCopies],
) -> str:
    """Return the text of program.cc with the tables that program.h declares.

    Args:
        program: Program of all devices.
        device: The device's part of the program.
        layout: Memory layout of the device: the offsets of tensors and arenas.
        models: The distinct models of the device.
        peers: The devices that this device exchanges tensors with.
        segment_copies: For each segment, the copies of tensor regions before and after its model runs.
    """
    numbers = {other.device: number for number, other in enumerate(program.devices)}
    tensors = {name: i for i, name in enumerate(layout.buffers)}
    incoming = [program.transfers[i] for i in list_received(device)]
    outgoing = [step.index for step in device.steps if step.kind == "send"]
    arenas = zip(models.names, models.arena_bytes, strict=True)
    tables = [
        f"const int kDevice = {numbers[device.device]};",
        _make_table("int kPeerDevices", [str(numbers[name]) for name in peers], "0"),
        _make_table("char* const kPeerNames", [json.dumps(name) for name in peers], "nullptr"),
        f"const int kPeerCount = {len(peers)};",
        _make_table(
            "Tensor kTensors",
            [f"{{{buffer.offset}, {buffer.tensor.nbytes}}}" for buffer in layout.buffers.values()],
            "{0, 0}",
        ),
        _make_table("Model kModels", [f"{{k_model_{name}, {n}}}" for name, n in arenas], "{nullptr, 0}"),
        _make_segment_tables(device, models, layout, segment_copies, tensors),
        _make_transfer_table("Incoming", [(transfer, transfer.sender) for transfer in incoming], peers, tensors),
        f"const int kIncomingCount = {len(incoming)};",
        _make_transfer_table(
            "Outgoing", [(program.transfers[i], program.transfers[i].receiver) for i in outgoing], peers, tensors
        ),
        _make_step_table(device, outgoing),
        f"const int kStepCount = {len(device.segments) + len(outgoing)};",
        *_make_input_output_tables(program, device, tensors),
    ]
    includes = "".join(f'#include "model_{name}_data.h"\n' for name in models.names)
    body = "\n".join(tables)
    return (
        f'{GENERATED_NOTE}#include "program.h"\n\n{includes}\n'
        f"namespace dicompiler {{\n\n{body}\n\n}}  // namespace dicompiler\n"
    )


def _make_table(head: str, entries: Sequence[str], none: str) -> str:
    """Return the text of a constant C++ array; `head` is its type and name.

    C++ has no arrays of length 0, so an array without entries gets the unused entry `none`.
    """
    lines = "".join(f"    {entry},\n" for entry in entries or [none])
    return f"const {head}[] = {{\n{lines}}};"


def _make_segment_tables(
    device: DeviceProgram,
    models: DeviceModels,
    layout: MemoryLayout,
    segment_copies: Sequence[SegmentCopies],
    tensors: Mapping[str, int],
) -> str:
    lists, entries = [], []
    for i, (segment, segment_copy) in enumerate(zip(device.segments, segment_copies, strict=True)):
        numbers = ", ".join(str(tensors[name]) for name in segment.inputs) or "0"
        lists.append(f"static const int k_inputs_{i}[] = {{{numbers}}};\n")
        ends = [f"k_inputs_{i}, {len(segment.inputs)}"]
        for kind, copies in (
            ("input_copies", segment_copy.input_copies),
            ("output_copies", segment_copy.output_copies),
            ("tensor_copies", segment_copy.tensor_copies),
        ):
            if copies:
                body = _make_table(f"Copy k_{kind}_{i}", [_make_copy_literal(copy, tensors) for copy in copies], "")
                lists.append(f"static {body}\n")
            ends.append(f"k_{kind}_{i}, {len(copies)}" if copies else "nullptr, 0")
        model, arena = (
            models.model_of_segment[i],
            f"{layout.arena_offsets[i] or 0}, {str(layout.frees_arena[i]).lower()}",
        )
        entries.append(f"{{{-1 if model is None else model}, {arena}, {', '.join(ends)}}}")
    return "".join(lists) + _make_table(
        "Segment kSegments", entries, "{-1, 0, false, nullptr, 0, nullptr, 0, nullptr, 0, nullptr, 0}"
    )


def _make_copy_literal(copy: StridedCopy, tensors: Mapping[str, int]) -> str:
    ends = [end if isinstance(end, int) else tensors[end] for end in (copy.source, copy.target)]
    loops = (*[(1, 0, 0)] * (MAX_COPY_LOOPS - len(copy.loops)), *copy.loops)
    columns = ", ".join(f"{{{', '.join(map(str, column))}}}" for column in zip(*loops, strict=True))
    return f"{{{ends[0]}, {ends[1]}, {copy.source_offset}, {copy.target_offset}, {copy.run_bytes}, {columns}}}"


def _make_transfer_table(
    kind: str, transfers: Sequence[tuple[Transfer, str]], peers: Sequence[str], tensors: Mapping[str, int]
) -> str:
    """Return the C++ table of a device's transfers: the indices of each transfer, of its peer and of its tensor.

    `kind` is "Incoming" or "Outgoing". `transfers` are pairs of a transfer and its peer, the device at its other end.
    """
    entries = [
        f"{{{transfer.index}, {peers.index(peer)}, {tensors[transfer.value.name]}}}" for transfer, peer in transfers
    ]
    return _make_table(f"Transfer k{kind}", entries, "{0, 0, 0}")


def _make_step_table(device: DeviceProgram, outgoing: Sequence[int]) -> str:
    entries = []
    for step in device.steps:
        if step.kind == "run":
            entries.append(f"{{StepKind::kRun, {step.index}}}")
        elif step.kind == "send":
            entries.append(f"{{StepKind::kSend, {outgoing.index(step.index)}}}")
    return _make_table("Step kSteps", entries, "{StepKind::kRun, 0}")


def _make_input_output_tables(program: Program, device: DeviceProgram, tensors: Mapping[str, int]) -> list[str]:
    outputs = [value.name for value in program.outputs]
    inputs = [f"{{{i}, {tensors[value.name]}}}" for i, value in find_device_inputs(program, device).items()]
    delivered = [f"{{{outputs.index(output)}, {tensors[name]}}}" for name, output in device.model_outputs.items()]
    return [
        _make_table("NetworkTensor kInputs", inputs, "{0, 0}"),
        f"const int kInputCount = {len(inputs)};",
        _make_table("NetworkTensor kOutputs", delivered, "{0, 0}"),
        f"const int kOutputCount = {len(delivered)};",
    ]
