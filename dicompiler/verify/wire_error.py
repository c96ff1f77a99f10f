"""Effects of narrow wire types (smaller element types for sent tensors): value ranges, overflows and the error bound.

Narrowing is the conversion of a tensor to its wire type. Here, a program must be compiled with
`WireFormat.with_exact_stand_ins`, which sends all values before narrowing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.program import Program, Transfer
from dicompiler.ir.routing import Routing
from dicompiler.ir.wire_dtype import (
    EXACT_STAND_IN,
    INT8_BLOCK,
    ValueRange,
    WireFormat,
    effective_wire_dtypes,
    range_name,
)
from dicompiler.partition.placed_model import read_annotation
from dicompiler.partition.wire_casts import MAX_INT8_BLOCK, MAX_ROUNDING_ERROR, max_narrowings_on_path
from dicompiler.verify.comparison import Check
from dicompiler.verify.executor import ProgramExecutor

ROUNDING_ERRORS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 1 / 255, INT8_BLOCK: MAX_ROUNDING_ERROR}
"""Largest relative error of narrowing a tensor once (converting it to the type in which it is sent), by wire type.

The error of int8 is half a quantization step, as a share of the tensor's largest value, if the range is symmetric
around 0. The error of int8-block is a share of the largest magnitude in a block of values.
"""
MAX_FLOAT16 = float(np.finfo(np.float16).max)
CLIPPING_HINT = "values outside the samples' range were clipped"
"""Text in the details of failed checks of outputs whose cause may be clipped values."""
_CLIPPED_NOTE = "with values outside the samples' range, which are clipped"


class SentTensor(NamedTuple):
    """A tensor that a transfer sends, before narrowing (conversion to a smaller element type).

    Attributes:
        transfer: The transfer.
        name: Key of the tensor in `WireFormat.ranges`: its name, and for a partial sum also the range of summed
            channels.
        values: The values before narrowing.
    """

    transfer: Transfer
    name: str
    values: NDArray[Any]


def iterate_sent_tensors(program: Program, frames: Sequence[Mapping[str, Any]]) -> Iterator[SentTensor]:
    """Run a program on `frames`, and yield the tensors that would be sent in a smaller element type.

    All replicas and failure plans of the program are run.
    """
    for role in program.roles:
        segments = [segment for device in role.devices for segment in device.segments]
        nodes = [node for segment in segments for node in segment.model.graph.node]
        origins = {name: read_annotation(node).origin for node in nodes for name in node.output}
        narrowed = [t for t in role.transfers if f"~{EXACT_STAND_IN}" in t.value.name]
        executor = ProgramExecutor(role)
        for frame in frames:
            values = executor.run(frame, keep_values=True).values
            for transfer in narrowed:
                name = transfer.value.name
                yield SentTensor(transfer, origins[name], values[transfer.receiver][name])


def measure_ranges(program: Program, samples: Sequence[Mapping[str, Any]]) -> dict[str, ValueRange]:
    """Return the lowest and the highest value of each sent tensor over all samples, by key of `WireFormat.ranges`.

    Raises:
        DicompilerError: A tensor contains NaN or infinity, which int8 cannot represent.
    """
    ranges: dict[str, ValueRange] = {}
    for transfer, name, values in iterate_sent_tensors(program, samples):
        # Only float32 tensors can be sent as int8, so other types need no range.
        if transfer.value.dtype != onnx.TensorProto.FLOAT:
            continue
        if not np.isfinite(values).all():
            raise DicompilerError(
                f"wire: tensor {name!r}, from {transfer.sender!r} to {transfer.receiver!r}, holds NaN or infinity for "
                "these samples, which int8 cannot represent: send it in its own type or as float16"
            )
        low, high = ranges.get(name, (np.inf, -np.inf))
        ranges[name] = min(low, float(values.min(initial=low))), max(high, float(values.max(initial=high)))
    return {name: (low, high) for name, (low, high) in ranges.items() if low <= high}


def check_wire_range(program: Program, routing: Routing, wire: WireFormat, inputs: Mapping[str, Any]) -> Check:
    """Check that the wire types (element types in which tensors are sent) can represent the values sent for one frame.

    The check fails if a finite value becomes infinite in float16, or if a tensor sent as int8 contains NaN or infinity.
    Tensors sent as int8-block are not checked, because NaN and infinity in them end the run with an error.

    Args:
        program: A program that sends values in their own types, compiled with `WireFormat.with_exact_stand_ins`.
        routing: Routing of the plan (all exchanged regions), with its wire types.
        wire: The plan's wire types.
        inputs: Arrays by input name.
    """
    keys = {box.key for role in routing.roles for box in role.received_boxes}
    wire_dtypes = {range_name(key): effective_wire_dtypes(routing.layers).get(key.tensor, "") for key in keys}
    transfer_count, clipped_count, beyond_count, non_finite_count, largest = 0, 0, 0, 0, 0.0
    for transfer, name, values in iterate_sent_tensors(program, [inputs]):
        wire_dtype, is_finite = wire_dtypes[name], np.isfinite(values)
        # `program` lists all float tensors. Without a wire type for its element type, the plan sends a tensor
        # unchanged.
        if not wire_dtype:
            continue
        largest_here = float(np.abs(values[is_finite]).max(initial=0.0))
        place = f"{name!r}, from {transfer.sender!r} to {transfer.receiver!r},"
        transfer_count, largest = transfer_count + 1, max(largest, largest_here)
        non_finite_count += not is_finite.all()
        if wire_dtype == "int8" and not is_finite.all():
            detail = f"{place} holds NaN or infinity, which int8 cannot represent: send it as float16"
            return Check("wire", False, detail)
        if wire_dtype == "float16" and np.isinf(_to_float16(values[is_finite])).any():
            detail = f"{place} holds {largest_here:.3g}, above float16's largest {MAX_FLOAT16:g}: send it as bfloat16"
            return Check("wire", False, detail)
        if wire_dtype == "int8":
            low, high = wire.ranges[name]
            clipped_count += bool(((values < low) | (values > high)).any())
        if wire_dtype == INT8_BLOCK:
            beyond_count += largest_here > MAX_INT8_BLOCK
    notes = f"; {non_finite_count} with NaN or infinity, which are sent as such" if non_finite_count else ""
    notes += f"; {clipped_count} {_CLIPPED_NOTE}" if clipped_count else ""
    notes += f"; {beyond_count} with values beyond {MAX_INT8_BLOCK:.3g}, which are clipped" if beyond_count else ""
    return Check("wire", True, f"{wire}: {transfer_count} transfers narrowed, largest value {largest:.3g}{notes}")


def hint_at_clipping(checks: Sequence[Check], wire_check: Check, random_inputs_remedy: str = "") -> list[Check]:
    """Add the remedy to failed checks of outputs if int8 clipped values outside the samples' range.

    Args:
        checks: The checks of the outputs.
        wire_check: The result of `check_wire_range` for the same inputs.
        random_inputs_remedy: Remedy if the inputs were random; empty if the user gave them.
    """
    if _CLIPPED_NOTE not in wire_check.detail:
        return list(checks)
    remedy = (
        f", because the inputs were random: {random_inputs_remedy}"
        if random_inputs_remedy
        else ": compile with samples that cover these inputs (--wire-samples)"
    )
    hint = f"; {CLIPPING_HINT}{remedy}"
    return [check if check.passed else replace(check, detail=check.detail + hint) for check in checks]


def _to_float16(values: NDArray[Any]) -> NDArray[Any]:
    # Values above float16's range become infinite. The caller checks this, so NumPy need not warn.
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def wire_error_bound(routing: Routing) -> float:
    """Return the largest difference that narrow wire types should cause in an output, as a share of max|reference|.

    It is the rounding error of one conversion, times the largest number of conversions on a path from an input to an
    output. A network that amplifies rounding errors may exceed it.
    """
    wire_dtypes = effective_wire_dtypes(routing.layers)
    sent = {wire_dtypes.get(box.key.tensor, "") for role in routing.roles for box in role.received_boxes}
    largest_error = max((ROUNDING_ERRORS.get(wire_dtype, 0.0) for wire_dtype in sent), default=0.0)
    return largest_error * max_narrowings_on_path(routing)
