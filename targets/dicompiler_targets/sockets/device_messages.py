"""Messages from devices to the coordinator. Each is checked before memory for its payload is allocated.

Message channels ⇒ events in the order of their arrival, which `ClusterState` and `ClusterSession` react to.
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
SPARE_ENTRIES = 16
"""Number of recorded messages of finished frames above which OncePerFrame removes these records."""
MAX_QUEUED_MESSAGES = 64
"""Maximum number of a device's queued JSON messages. They are handled only while the user waits for outputs."""


class OncePerFrame:
    """Checks that a device does not send the same kind of message twice for a frame."""

    def __init__(self, window: FrameWindow) -> None:
        self._window = window
        self._seen: set[tuple[MessageType, int]] = set()

    def admit(self, message_type: MessageType, frame: int = 0) -> None:
        """Record a message.

        Raise ProtocolError if the device has sent a message of this type for this frame before.
        """
        if (message_type, frame) in self._seen:
            suffix = f" for frame {frame}" * (message_type is not MessageType.READY)
            raise ProtocolError(f"received {message_type.name} twice{suffix}")
        if len(self._seen) > 2 * len(self._window) + SPARE_ENTRIES:
            oldest = self._window.oldest
            self._seen = {entry for entry in self._seen if entry[0] is MessageType.READY or entry[1] >= oldest}
        self._seen.add((message_type, frame))


class DeviceMessages:
    """Receives the messages of all devices, checks them, and queues them as events.

    `ClusterState` creates this object and calls `listen` for each device that connects. `failures.find_failure` tells
    which events report a failure.

    Attributes:
        events: The events in the order of arrival, until they are removed.
        ready_devices: The devices that have sent READY.
    """

    def __init__(
        self,
        roles: Sequence[RoleIO],
        window: FrameWindow,
        schedule: RoleSchedule,
        expects_ready: Callable[[str], bool],
    ) -> None:
        """Create an empty queue. `expects_ready` returns True if the device with the given name may send READY now."""
        self.events: deque[DeviceEvent] = deque()
        self.ready_devices: set[str] = set()
        self._roles, self._window, self._schedule = roles, window, schedule
        self._expects_ready = expects_ready

    def listen(self, process: DeviceProcess, loop: EventLoop) -> None:
        """Queue the further messages of a device, and the end of its connection, as events."""
        name = process.device
        outputs_by_role = [role.outputs[name] for role in self._roles]
        output_filter = ReceiveFilter(outputs_by_role, self._window, self._schedule)
        once = OncePerFrame(self._window)
        process.get_channel().start(
            loop,
            lambda header: self._check(process, output_filter, once, header),
            lambda header, payload: self._deliver(name, header, payload),
            lambda error: self.events.append(DeviceEvent(name, None, error)),
        )

    def forget(self, name: str) -> None:
        """Discard all queued events of a device."""
        for _ in range(len(self.events)):
            if (event := self.events.popleft()).device != name:
                self.events.append(event)
        self.ready_devices.discard(name)

    def _check(
        self, process: DeviceProcess, output_filter: ReceiveFilter, once: OncePerFrame, header: MessageHeader
    ) -> None:
        message_type, frame = header.type, header.frame
        tolerates_failures = self._schedule.tolerates_failures
        if message_type is MessageType.OUTPUT:
            output_filter.check(header)
        elif message_type is MessageType.DONE:
            check_no_payload(header)
            if not self._is_late(header):
                self._window.check(frame, "DONE")
                if process.device not in self._roles[self._schedule.role_index(frame)].active_devices:
                    raise ProtocolError(f"received DONE for frame {frame}, in which the device takes no part")
                once.admit(MessageType.DONE, frame)
        elif message_type is MessageType.READY:
            check_no_payload(header)
            if not self._expects_ready(process.device):
                raise ProtocolError("received READY before PEERS was sent")
            once.admit(MessageType.READY)
        elif message_type is MessageType.ROLES_CHANGED and tolerates_failures:
            check_no_payload(header)
            if frame > self._schedule.last_change:
                raise ProtocolError(f"received ROLES_CHANGED for frame {frame}, at which no roles change")
            if not self._is_late(header):
                once.admit(MessageType.ROLES_CHANGED, frame)
        elif message_type in (MessageType.REPORT, MessageType.ERROR) or (
            message_type in JSON_MESSAGE_TYPES and tolerates_failures
        ):
            check_json_length(header)
            process.queued_messages += 1
            if process.queued_messages > MAX_QUEUED_MESSAGES:
                raise ProtocolError(f"received more than {MAX_QUEUED_MESSAGES} messages at once")
        else:
            raise ProtocolError(f"received {message_type.name}, which devices do not send")

    def _is_late(self, header: MessageHeader) -> bool:
        """Return True if a message is about a frame that was sent again since, or about an earlier change of roles."""
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
