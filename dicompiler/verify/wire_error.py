"""What narrowing does to the numbers that travel: their ranges on samples, what a type cannot hold, what may differ.

In: a program with `Wire.exact`, whose transfers carry what would be narrowed, as it is. Out: ranges; a Check; a share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.program import Program, Transfer
from dicompiler.ir.routing import Routing
from dicompiler.ir.wire_dtype import EXACT_STAND_IN, ValueRange, WireFormat, effective_wire_dtypes, range_name
from dicompiler.partition.annotations import read_annotation
from dicompiler.partition.wire_casts import max_narrowings_on_path
from dicompiler.verify.comparison import Check
from dicompiler.verify.executor import ProgramExecutor

ROUNDING_ERRORS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 1 / 255}
"""What one narrowing changes a number by at most, as a share: of itself by the rounding to 11 and 8 bits of mantissa,
of the largest of its tensor by half a step of int8, where the range is as far on both sides of 0."""
MAX_FLOAT16 = float(np.finfo(np.float16).max)


class SentTensor(NamedTuple):
    """What a transfer carries before it is narrowed; name: see `range_name`."""

    transfer: Transfer
    name: str
    values: NDArray[Any]


def iterate_sent_tensors(program: Program, frames: Iterable[Mapping[str, Any]]) -> Iterator[SentTensor]:
    """What would be narrowed when `program`, made with `Wire.exact`, is given these frames; of every role."""
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


def measure_ranges(program: Program, samples: Iterable[Mapping[str, Any]]) -> dict[str, ValueRange]:
    """The lowest and the highest number of each tensor that travels, over all samples, by `range_name`. DicompilerError
    for NaN and infinity."""
    ranges: dict[str, ValueRange] = {}
    for transfer, name, values in iterate_sent_tensors(program, list(samples)):
        if not np.isfinite(values).all():
            raise DicompilerError(
                f"wire: tensor {name!r}, from {transfer.sender!r} to {transfer.receiver!r}, holds NaN or infinity for "
                "these samples, and int8 has neither: let it travel as it is, or as float16"
            )
        low, high = ranges.get(name, (np.inf, -np.inf))
        ranges[name] = min(low, float(values.min(initial=low))), max(high, float(values.max(initial=high)))
    return {name: found for name, found in ranges.items() if found[0] <= found[1]}


def check_wire_range(program: Program, routing: Routing, wire: WireFormat, inputs: Mapping[str, Any]) -> Check:
    """Whether the types in which tensors travel can hold what they are for these inputs. program: with `Wire.exact`;
    routing, wire: the plan's own. It fails where a number becomes infinite that is not, and where int8 is NaN's."""
    keys = {box.key for role in routing.roles for box in role.received_boxes}
    known = {range_name(key): effective_wire_dtypes(routing.layers).get(key.tensor, "") for key in keys}
    count, beyond, odd, largest = 0, 0, 0, 0.0
    for transfer, name, values in iterate_sent_tensors(program, [inputs]):
        kind, finite = known[name], np.isfinite(values)
        top = float(np.abs(values[finite]).max(initial=0.0))
        place = f"{name!r}, from {transfer.sender!r} to {transfer.receiver!r},"
        count, largest, odd = count + 1, max(largest, top), odd + (not finite.all())
        if kind == "int8" and not finite.all():
            return Check("wire", False, f"{place} holds NaN or infinity, and int8 has neither: send it as float16")
        if kind == "float16" and np.isinf(_to_float16(values[finite])).any():
            detail = f"{place} holds {top:.3g}, which float16 cannot ({MAX_FLOAT16:g} at most): send it as bfloat16"
            return Check("wire", False, detail)
        if kind == "int8":
            low, high = wire.ranges[name]
            beyond += bool(((values < low) | (values > high)).any())
    more = f"; {odd} with NaN or infinity, which travel as such" if odd else ""
    more += f"; {beyond} with numbers beyond the range of the samples, which travel as its ends" if beyond else ""
    return Check("wire", True, f"{wire}: {count} transfers narrowed, the largest number {largest:.3g}{more}")


def _to_float16(values: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(over="ignore"):  # that is what is looked for
        return values.astype(np.float16)


def wire_error_bound(routing: Routing) -> float:
    """The share of max|reference| by which an output may differ for what is narrowed on the way to it: what each
    narrowing changes a number by, times how many there are in a row. A network that enlarges such errors may differ by
    more: then this type is not for it."""
    used = effective_wire_dtypes(routing.layers)
    sent = {used[box.key.tensor] for role in routing.roles for box in role.received_boxes if box.key.tensor in used}
    return max((ROUNDING_ERRORS.get(kind, 0.0) for kind in sent), default=0.0) * max_narrowings_on_path(routing)
