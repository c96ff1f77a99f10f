"""What devices say to the coordinator, and what they may say when: the rest is refused before memory is taken for it.

In: the connections of devices. Out: events, in the order in which they came.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from dicompiler_targets.sockets.artifact import Role
from dicompiler_targets.sockets.processes import Process, read_report
from dicompiler_targets.sockets.root_cause import Event
from dicompiler_targets.sockets.runtime.frames import (
    Gate,
    Header,
    Kind,
    ProtocolError,
    Window,
    check_empty,
    check_message,
    decode,
)
from dicompiler_targets.sockets.runtime.lines import Lines
from dicompiler_targets.sockets.runtime.roles import Schedule

MESSAGE_KINDS = (Kind.REPORT, Kind.ERROR, Kind.LOST, Kind.LATE)
"""What is told in words."""
MESSAGES = 64
"""How many of them of a device that can wait here, as they do until somebody asks for outputs."""


class Hearing:
    """`events`: what came and was not taken yet; `ready`: the devices that are. awaits_ready: whether a device may say
    that it is."""

    def __init__(
        self, roles: Sequence[Role], window: Window, schedule: Schedule, awaits_ready: Callable[[str], bool]
    ) -> None:
        self.events: deque[Event] = deque()
        self.ready: set[str] = set()
        self._roles, self._window, self._schedule = roles, window, schedule
        self._awaits_ready = awaits_ready

    def listen(self, process: Process, lines: Lines) -> None:
        """From now on what the device says becomes events, and that it says nothing any more."""
        name = process.device
        expected, *others = (role.outputs[name] for role in self._roles)
        gate = Gate(expected, self._window, others, self._schedule)
        process.connection().start(
            lines,
            lambda header: self._admit(process, gate, header),
            lambda header, payload: self._deliver(name, header, payload),
            lambda error: self.events.append(Event(name, None, error)),
        )

    def forget(self, name: str) -> None:
        """What a device said counts no more."""
        for _ in range(len(self.events)):
            if (event := self.events.popleft()).device != name:
                self.events.append(event)
        self.ready.discard(name)

    def _admit(self, process: Process, gate: Gate, header: Header) -> None:
        if header.kind is Kind.OUTPUT:
            gate.admit(header)
        elif header.kind is Kind.DONE:
            check_empty(header)
            if header.frame >= self._window.first:
                self._window.check(header.frame, "DONE")
                if process.device not in self._roles[self._schedule.role(header.frame)].players:
                    raise ProtocolError(f"DONE came for frame {header.frame}, in which it has no part")
        elif header.kind is Kind.READY:
            check_empty(header)
            if process.device in self.ready:
                raise ProtocolError("READY came twice")
            if not self._awaits_ready(process.device):
                raise ProtocolError("READY came before PEERS")
        elif header.kind is Kind.CHANGED and self._schedule.survives:
            check_empty(header)
        elif header.kind in MESSAGE_KINDS and (header.kind not in (Kind.LOST, Kind.LATE) or self._schedule.survives):
            check_message(header)
            process.messages += 1
            if process.messages > MESSAGES:
                raise ProtocolError(f"more than {MESSAGES} messages came at once")
        else:
            raise ProtocolError(f"{header.kind.name} came, which no device sends")

    def _deliver(self, name: str, header: Header, payload: Any) -> None:
        if header.kind is Kind.REPORT:
            payload = read_report(name, decode(payload))
        elif header.kind in MESSAGE_KINDS:
            payload = decode(payload)
        self.events.append(Event(name, header, payload, time.perf_counter()))
