"""The reports and the status that devices send: JSON objects ⇒ records with checked fields.

A device may be compromised. Therefore each field is checked, and an error names the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from dicompiler.plugin_api import DeviceReport
from dicompiler.plugin_api.artifacts import BoardState, DeviceStatus, ReceivedBytes, TimelineEntry
from dicompiler.plugin_api.utilities import one_line
from dicompiler_targets.sockets.runtime.board_sensors import UNKNOWN_FLAGS
from dicompiler_targets.sockets.runtime.protocol import DONE_FIELDS, RECEIVED_TENSORS, ProtocolError

MAX_NUMBER = 2**53
"""Upper limit of the numbers in reports, because a float represents all integers below it exactly."""
TIMELINE_KINDS = ("run", "wait", "send")


def read_report(device: str, report: Mapping[str, Any]) -> DeviceReport:
    """Return the report in the JSON message of a device. Raise ProtocolError with the name of an invalid field."""
    compute_s, wait_s, send_s = (_read_number(report, name) for name in ("compute_s", "wait_s", "send_s"))
    sent, segments, timeline = (
        _read_field(report, name, kind) for name, kind in (("sent", dict), ("segments", list), ("timeline", list))
    )
    if not all(str(index).isdecimal() and len(str(index)) < 10 for index in sent):
        raise ProtocolError("field 'sent' of the report has a key that is not the index of a transfer")
    return DeviceReport(
        device,
        compute_s,
        wait_s,
        send_s,
        {int(index): int(_check_number(f"sent[{index}]", count)) for index, count in sent.items()},
        tuple(_check_number(f"segments[{index}]", value) for index, value in enumerate(segments)),
        int(_read_number(report, "memory_peak")),
        tuple(_read_timeline_entry(f"timeline[{index}]", entry) for index, entry in enumerate(timeline)),
    )


@dataclass(frozen=True)
class DoneReport:
    """The content of a DONE message.

    Attributes:
        compute_s: Seconds in which the device computed the frame.
        received: Bytes of the tensors that the device received since its last DONE. The keys are (sender, this device),
            so that the reports of all devices can be merged into one mapping.
        board: The state of the device's board.
    """

    compute_s: float
    received: Mapping[tuple[str, str], ReceivedBytes]
    board: BoardState


def read_done(device: str, payload: Any, names: Sequence[str]) -> DoneReport:
    """Return the content of the DONE message of a device. `names` are the names of all devices by their index.

    Raise ProtocolError if a number is invalid.
    """
    raw, received = bytes(payload), dict[tuple[str, str], ReceivedBytes]()
    compute_s, temperature, flags = DONE_FIELDS.unpack_from(raw)
    board = BoardState(temperature if math.isfinite(temperature) else None, None if flags == UNKNOWN_FLAGS else flags)
    for index, nbytes, timed_bytes, timed_s in RECEIVED_TENSORS.iter_unpack(raw[DONE_FIELDS.size :]):
        if index >= len(names) or (names[index], device) in received:
            raise ProtocolError(f"field 'received' of the report has an invalid device index {index}")
        received[names[index], device] = ReceivedBytes(nbytes, timed_bytes, _check_number("timed_s", timed_s))
    return DoneReport(_check_number("compute_s", compute_s), received, board)


def read_status(address: str, status: Mapping[str, Any]) -> DeviceStatus:
    """Return the status in the answer of a resident device (a daemon).

    Raise ProtocolError with the name of an invalid field.
    """
    values: dict[str, Any] = {"address": address}
    for field in fields(DeviceStatus):
        if field.name != "address" and (field.name in status or field.default is MISSING):
            is_text = field.type == "str"
            values[field.name] = _read_field(status, field.name, str) if is_text else _read_number(status, field.name)
            if field.type == "int":
                values[field.name] = int(values[field.name])
    return DeviceStatus(**values)


def _read_field(report: Mapping[str, Any], name: str, kind: type) -> Any:
    value = report.get(name)
    if not isinstance(value, kind):
        raise ProtocolError(f"field {name!r} of the report is {_quote(value)}: expected a {kind.__name__}")
    return value


def _read_number(report: Mapping[str, Any], name: str) -> float:
    return _check_number(name, report.get(name))


def _check_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_NUMBER:
        raise ProtocolError(
            f"field {name!r} of the report is {_quote(value)}: expected a number of 0 or more, and less than 2^53"
        )
    return float(value)


def _read_timeline_entry(name: str, entry: Any) -> TimelineEntry:
    if not isinstance(entry, list) or len(entry) != 5 or entry[0] not in TIMELINE_KINDS:
        raise ProtocolError(
            f"field {name!r} of the report is {_quote(entry)}: expected [kind, index, frame, start, end]"
        )
    # The index -1 means that the device waited for an input of the network, and not for a transfer.
    index = -1 if entry[1] == -1 else int(_check_number(name, entry[1]))
    frame, start, end = (_check_number(name, value) for value in entry[2:])
    return TimelineEntry(entry[0], index, int(frame), start, end)


def _quote(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= MAX_NUMBER:
        return "a huge integer"  # Python refuses to print integers of many digits.
    return one_line(repr(value), 100)
