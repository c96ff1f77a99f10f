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
SPARE = 16
"""How much more of what was said is kept than can count."""
MESSAGES = 64
"""How many of them of a device that can wait here, as they do until somebody asks for outputs."""


class Once:
    """What a device may say once: of all that it is, and of each frame on its way."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._said: set[tuple[Kind, int]] = set()

    def admit(self, kind: Kind, frame: int = 0) -> None:
        """ProtocolError for what was said before."""
        if (kind, frame) in self._said:
            raise ProtocolError(f"{kind.name} came twice" + f" for frame {frame}" * (kind is not Kind.READY))
        if len(self._said) > 2 * len(self._window) + SPARE:
            # What is said of frames before is not taken for long.
            self._said = {one for one in self._said if one[0] is Kind.READY or one[1] >= self._window.oldest}
        self._said.add((kind, frame))


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
        gate, once = Gate(expected, self._window, others, self._schedule), Once(self._window)
        process.connection().start(
            lines,
            lambda header: self._admit(process, gate, once, header),
            lambda header, payload: self._deliver(name, header, payload),
            lambda error: self.events.append(Event(name, None, error)),
        )

    def forget(self, name: str) -> None:
        """What a device said counts no more."""
        for _ in range(len(self.events)):
            if (event := self.events.popleft()).device != name:
                self.events.append(event)
        self.ready.discard(name)

    def _admit(self, process: Process, gate: Gate, once: Once, header: Header) -> None:
        if header.kind is Kind.OUTPUT:
            gate.admit(header)
        elif header.kind is Kind.DONE:
            check_empty(header)
            if not self._late(header):
                self._window.check(header.frame, "DONE")
                if process.device not in self._roles[self._schedule.role(header.frame)].players:
                    raise ProtocolError(f"DONE came for frame {header.frame}, in which it has no part")
                once.admit(Kind.DONE, header.frame)
        elif header.kind is Kind.READY:
            check_empty(header)
            if not self._awaits_ready(process.device):
                raise ProtocolError("READY came before PEERS")
            once.admit(Kind.READY)
        elif header.kind is Kind.CHANGED and self._schedule.survives:
            check_empty(header)
            if header.frame > self._schedule.since:
                raise ProtocolError(f"CHANGED came for frame {header.frame}, from which on nothing changes")
            if not self._late(header):
                once.admit(Kind.CHANGED, header.frame)
        elif header.kind in MESSAGE_KINDS and (header.kind not in (Kind.LOST, Kind.LATE) or self._schedule.survives):
            check_message(header)
            process.messages += 1
            if process.messages > MESSAGES:
                raise ProtocolError(f"more than {MESSAGES} messages came at once")
        else:
            raise ProtocolError(f"{header.kind.name} came, which no device sends")

    def _late(self, header: Header) -> bool:
        """Whether it counts no more, and is not kept: of a frame that was given again; an answer to a change after
        which another came."""
        if header.kind is Kind.CHANGED:
            return header.frame < self._schedule.since
        return header.kind in (Kind.OUTPUT, Kind.DONE) and header.frame < self._window.first

    def _deliver(self, name: str, header: Header, payload: Any) -> None:
        if self._late(header):
            return
        if header.kind is Kind.REPORT:
            payload = read_report(name, decode(payload))
        elif header.kind in MESSAGE_KINDS:
            payload = decode(payload)
        self.events.append(Event(name, header, payload, time.perf_counter()))
