"""What devices say to the coordinator, and what they may say when: the rest is refused before memory is taken for it.

In: the connections of devices. Out: events, in the order in which they came.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from dicompiler_targets.sockets.artifact import RoleIO
from dicompiler_targets.sockets.device_process import DeviceProcess, read_report
from dicompiler_targets.sockets.failures import DeviceEvent
from dicompiler_targets.sockets.runtime.event_loop import EventLoop
from dicompiler_targets.sockets.runtime.protocol import (
    FrameWindow,
    MessageHeader,
    MessageType,
    ProtocolError,
    ReceiveFilter,
    check_json_length,
    check_no_payload,
    decode_json,
)
from dicompiler_targets.sockets.runtime.role_schedule import RoleSchedule

JSON_MESSAGE_TYPES = (MessageType.REPORT, MessageType.ERROR, MessageType.PEER_FAILED, MessageType.TENSOR_OVERDUE)
"""What is told in words."""
SPARE_ENTRIES = 16
"""How much more of what was said is kept than can count."""
MAX_QUEUED_MESSAGES = 64
"""How many of them of a device that can wait here, as they do until somebody asks for outputs."""


class OncePerFrame:
    """What a device may say once: of all that it is, and of each frame on its way."""

    def __init__(self, window: FrameWindow) -> None:
        self._window = window
        self._seen: set[tuple[MessageType, int]] = set()

    def admit(self, kind: MessageType, frame: int = 0) -> None:
        """ProtocolError for what was said before."""
        if (kind, frame) in self._seen:
            raise ProtocolError(f"{kind.name} came twice" + f" for frame {frame}" * (kind is not MessageType.READY))
        if len(self._seen) > 2 * len(self._window) + SPARE_ENTRIES:
            # What is said of frames before is not taken for long.
            self._seen = {one for one in self._seen if one[0] is MessageType.READY or one[1] >= self._window.oldest}
        self._seen.add((kind, frame))


class DeviceMessages:
    """`events`: what came and was not taken yet; `ready`: the devices that are. awaits_ready: whether a device may say
    that it is."""

    def __init__(
        self, roles: Sequence[RoleIO], window: FrameWindow, schedule: RoleSchedule, awaits_ready: Callable[[str], bool]
    ) -> None:
        self.events: deque[DeviceEvent] = deque()
        self.ready_devices: set[str] = set()
        self._roles, self._window, self._schedule = roles, window, schedule
        self._expects_ready = awaits_ready

    def listen(self, process: DeviceProcess, lines: EventLoop) -> None:
        """From now on what the device says becomes events, and that it says nothing any more."""
        name = process.device
        expected, *others = (role.outputs[name] for role in self._roles)
        gate, once = ReceiveFilter(expected, self._window, others, self._schedule), OncePerFrame(self._window)
        process.get_channel().start(
            lines,
            lambda header: self._check(process, gate, once, header),
            lambda header, payload: self._deliver(name, header, payload),
            lambda error: self.events.append(DeviceEvent(name, None, error)),
        )

    def forget(self, name: str) -> None:
        """What a device said counts no more."""
        for _ in range(len(self.events)):
            if (event := self.events.popleft()).device != name:
                self.events.append(event)
        self.ready_devices.discard(name)

    def _check(self, process: DeviceProcess, gate: ReceiveFilter, once: OncePerFrame, header: MessageHeader) -> None:
        if header.type is MessageType.OUTPUT:
            gate.check(header)
        elif header.type is MessageType.DONE:
            check_no_payload(header)
            if not self._is_late(header):
                self._window.check(header.frame, "DONE")
                if process.device not in self._roles[self._schedule.role_index(header.frame)].active_devices:
                    raise ProtocolError(f"DONE came for frame {header.frame}, in which it has no part")
                once.admit(MessageType.DONE, header.frame)
        elif header.type is MessageType.READY:
            check_no_payload(header)
            if not self._expects_ready(process.device):
                raise ProtocolError("READY came before PEERS")
            once.admit(MessageType.READY)
        elif header.type is MessageType.ROLES_CHANGED and self._schedule.tolerates_failures:
            check_no_payload(header)
            if header.frame > self._schedule.last_change:
                raise ProtocolError(f"CHANGED came for frame {header.frame}, from which on nothing changes")
            if not self._is_late(header):
                once.admit(MessageType.ROLES_CHANGED, header.frame)
        elif header.type in JSON_MESSAGE_TYPES and (
            header.type not in (MessageType.PEER_FAILED, MessageType.TENSOR_OVERDUE)
            or self._schedule.tolerates_failures
        ):
            check_json_length(header)
            process.queued_messages += 1
            if process.queued_messages > MAX_QUEUED_MESSAGES:
                raise ProtocolError(f"more than {MAX_QUEUED_MESSAGES} messages came at once")
        else:
            raise ProtocolError(f"{header.type.name} came, which no device sends")

    def _is_late(self, header: MessageHeader) -> bool:
        """Whether it counts no more, and is not kept: of a frame that was given again; an answer to a change after
        which another came."""
        if header.type is MessageType.ROLES_CHANGED:
            return header.frame < self._schedule.last_change
        return header.type in (MessageType.OUTPUT, MessageType.DONE) and header.frame < self._window.first

    def _deliver(self, name: str, header: MessageHeader, payload: Any) -> None:
        if self._is_late(header):
            return
        if header.type is MessageType.REPORT:
            payload = read_report(name, decode_json(payload))
        elif header.type in JSON_MESSAGE_TYPES:
            payload = decode_json(payload)
        self.events.append(DeviceEvent(name, header, payload, time.perf_counter()))
