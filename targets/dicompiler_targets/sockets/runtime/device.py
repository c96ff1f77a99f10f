"""One device of a run: joins the coordinator and its peers, then plays its steps for each frame that is announced.

In: a manifest, inputs and transfers from the connections. Out: transfers to peers, outputs and a report.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .values import from_bytes, make_sessions, one_line, run_segment, to_bytes
from .wire import (
    Channel,
    Header,
    Kind,
    ProtocolError,
    Refused,
    check_message,
    check_tensor,
    decode,
    left,
)

PATIENCE_S = 10.0
"""Seconds after the deadline in which the coordinator must have ended the run."""


class DeviceError(Exception):
    """Why this device cannot go on. `peer` names another device that seems to be the cause."""

    def __init__(self, message: str, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class Mailbox:
    """What the reading threads have received, by key, until the main thread takes it."""

    def __init__(self) -> None:
        self._items: dict[Any, Any] = {}
        self._changed = threading.Condition()
        self._failure: DeviceError | None = None

    def put(self, key: Any, item: Any) -> None:
        """ProtocolError if that key is there already."""
        with self._changed:
            if key in self._items:
                raise ProtocolError(f"a message came twice: {key}")
            self._items[key] = item
            self._changed.notify_all()

    def fail(self, error: DeviceError) -> None:
        """Ends all waiting with `error`; the first one counts."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def take(self, key: Any, deadline: float, what: str, peer: str | None = None) -> Any:
        """Waits for an item and removes it. DeviceError at the deadline, saying what did not come from which peer."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._items or self._failure, left(deadline))
            if self._failure is not None:
                raise self._failure
            if key not in self._items:
                raise DeviceError(f"{what} did not come in time", peer)
            return self._items.pop(key)


class Device:
    """The process's state. `deadline` (of time.monotonic) bounds every wait."""

    def __init__(self, directory: Path, manifest: Mapping[str, Any], control: socket.socket, deadline: float) -> None:
        self.directory, self.manifest, self.deadline = directory, manifest, deadline
        self.name: str = manifest["device"]
        self.control = Channel(control)
        self.listen = (control.getsockname()[0], control.family)
        self.peers: dict[str, Channel] = {}
        self.mailbox = Mailbox()
        self.frame = 0
        self.departed: set[str] = set()
        self.inputs = {value["index"]: value for value in manifest["inputs"]}
        self.transfers = {t["index"]: t for t in manifest["transfers"]}
        self.received = {t["name"]: t for t in manifest["transfers"] if t["receiver"] == self.name}
        self.received |= {value["name"]: value for value in manifest["inputs"]}
        self.unused = unused_after(manifest)
        self.wait_s = 0.0
        self.segments_s = [0.0] * len(manifest["segments"])

    def run(self, threads: int) -> None:
        """The whole run. DeviceError, or what the system raised, when it cannot go on."""
        address, family = self.listen
        with socket.create_server((address, 0), family=family, backlog=64) as listener:
            hello = {**self._hello(), "address": list(listener.getsockname()[:2])}
            self.control.greet(Kind.HELLO, hello, self.deadline)
            self.control.start(self._admit_control, self._deliver_control, self._lost_control)
            self._check_files()
            sessions = make_sessions(self.directory, self.manifest, threads)
            self._join(listener, self._await("addresses", "the list of devices"))
        self.control.send_json(Kind.READY, {})
        while self._await(("frame", self.frame), "the next frame") is Kind.RUN:
            self._play(sessions)
            self.frame += 1  # before DONE: the next frame's tensors can come at once
            self.control.send(Kind.DONE, frame=self.frame - 1)
        self._finish()

    def fail(self, error: Exception) -> None:
        """Tells the coordinator in words why this device ends, as far as that can still be reached."""
        self.control.send_json(Kind.ERROR, {"message": one_line(error), "peer": getattr(error, "peer", None)})
        self.control.flush(time.monotonic() + 1)

    def _await(self, key: Any, what: str) -> Any:
        """What the coordinator sends, which knows the deadline itself and better whom to blame."""
        return self.mailbox.take(key, self.deadline + PATIENCE_S, what)

    def _hello(self) -> dict[str, Any]:
        return {"device": self.name, "digest": self.manifest["digest"]}

    def _check_files(self) -> None:
        for name, record in self.manifest["files"].items():
            path = self.directory / name
            size = path.stat().st_size if path.is_file() else None
            if size != record["bytes"]:
                found = "is missing" if size is None else f"has {size} bytes instead of {record['bytes']}"
                raise DeviceError(f"file {name} {found}: copy the device's directory again")

    def _join(self, listener: socket.socket, addresses: Mapping[str, Any]) -> None:
        """Connects to the peers behind it in the order of devices and accepts those before it."""
        awaited = []
        for peer in self.manifest["peers"]:
            if peer["index"] < self.manifest["index"]:
                awaited.append(peer["device"])
                continue
            host, port = addresses[peer["device"]]
            try:
                channel = Channel(socket.create_connection((host, port), left(self.deadline)))
            except OSError as error:
                raise DeviceError(f"cannot connect to {peer['device']!r}: {error}", peer["device"]) from None
            channel.greet(Kind.HELLO, self._hello(), self.deadline)
            self._meet(channel, [peer["device"]])
        while awaited:
            listener.settimeout(left(self.deadline))
            try:
                channel = Channel(listener.accept()[0])
            except TimeoutError:
                raise DeviceError("did not connect in time", awaited[0]) from None
            awaited.remove(self._meet(channel, awaited))
            channel.greet(Kind.HELLO, self._hello(), self.deadline)
        for name, channel in self.peers.items():
            channel.start(*self._callbacks(name))

    def _meet(self, channel: Channel, expected: list[str]) -> str:
        """Reads who is at the other end; refuses, in words and at both ends, one that does not belong here."""
        try:
            hello = channel.greeting(self.deadline)
            name, digest = hello.get("device"), hello.get("digest")
            if name not in expected:
                raise ProtocolError(f"device {name!r} came, one of {expected} was expected")
            if digest != self.manifest["digest"]:
                raise ProtocolError(
                    f"devices {name!r} and {self.name!r} hold different artifacts: copy the same one to both"
                )
        except Refused as error:
            raise DeviceError(str(error)) from None
        except ProtocolError as error:
            channel.greet(Kind.ERROR, {"message": str(error)}, self.deadline)
            raise DeviceError(str(error)) from None
        except OSError as error:
            raise DeviceError(f"the greeting failed: {error}", expected[0]) from None
        self.peers[name] = channel
        return str(name)

    def _admit_control(self, header: Header) -> None:
        if header.kind is Kind.INPUT:
            check_tensor(header, self.inputs, self.frame)
        elif header.kind in (Kind.PEERS, Kind.ERROR):
            check_message(header)
        elif header.kind not in (Kind.RUN, Kind.FINISH) or header.length:
            raise ProtocolError(f"{header.kind.name} of {header.length} bytes came from the coordinator")

    def _deliver_control(self, header: Header, payload: Any) -> None:
        if header.kind is Kind.INPUT:
            self.mailbox.put((header.frame, self.inputs[header.index]["name"]), payload)
        elif header.kind is Kind.PEERS:
            self.mailbox.put("addresses", decode(payload))
        elif header.kind is Kind.ERROR:
            self.mailbox.fail(DeviceError(f"the coordinator refused: {decode(payload).get('message')}"))
        else:
            self.mailbox.put(("frame", header.frame), header.kind)

    def _lost_control(self, error: Exception) -> None:
        if isinstance(error, ProtocolError):
            self._fail_early(DeviceError(str(error)))
            return
        # Nobody is left to report to, and the main thread may be deep in a segment.
        print(f"{self.name}: the coordinator is gone", file=sys.stderr, flush=True)
        os._exit(1)

    def _callbacks(
        self, peer: str
    ) -> tuple[Callable[[Header], None], Callable[[Header, Any], None], Callable[[Exception], None]]:
        """What a peer's channel calls: see Channel.start."""
        expected = {i: t for i, t in self.transfers.items() if (t["sender"], t["receiver"]) == (peer, self.name)}

        def admit(header: Header) -> None:
            if header.kind is Kind.TENSOR:
                check_tensor(header, expected, self.frame)
            elif header.kind is not Kind.BYE or header.length:
                raise ProtocolError(f"{header.kind.name} of {header.length} bytes came")

        def deliver(header: Header, payload: Any) -> None:
            if header.kind is Kind.BYE:
                self.departed.add(peer)
                self.mailbox.put(("bye", peer), None)
            else:
                self.mailbox.put((header.frame, expected[header.index]["name"]), payload)

        def lost(error: Exception) -> None:
            if isinstance(error, ProtocolError):
                self._fail_early(DeviceError(f"from {peer!r}: {error}"))
            elif peer not in self.departed:
                self._fail_early(DeviceError(f"the connection to {peer!r} was lost: {error}", peer))

        return admit, deliver, lost

    def _fail_early(self, error: DeviceError) -> None:
        # The main thread may be in a segment for long: the coordinator learns of it from here already.
        self.control.send_json(Kind.ERROR, {"message": one_line(error), "peer": error.peer})
        self.mailbox.fail(error)

    def _play(self, sessions: list[Any]) -> None:
        """One frame: the steps in order, then the outputs."""
        values: dict[str, Any] = {}
        for (kind, index), unused in zip(self.manifest["steps"], self.unused, strict=True):
            if kind == "run":
                segment = self.manifest["segments"][index]
                for name in segment["inputs"]:
                    self._fetch(name, values)
                start = time.perf_counter()
                made = run_segment(sessions[index], segment, values)
                self.segments_s[index] += time.perf_counter() - start
                values.update(zip(segment["outputs"], made, strict=True))
            elif kind == "send":
                transfer = self.transfers[index]
                tensor = self._fetch(transfer["name"], values)
                payload = to_bytes(tensor, transfer)
                self.peers[transfer["receiver"]].send(Kind.TENSOR, payload, index, self.frame, tensor)
            for name in unused:
                values.pop(name, None)
        for output in self.manifest["outputs"]:
            tensor = self._fetch(output["tensor"], values)
            self.control.send(Kind.OUTPUT, to_bytes(tensor, output), output["index"], self.frame, tensor)

    def _fetch(self, name: str, values: dict[str, Any]) -> Any:
        """A tensor that was made here, or else received, which is waited for."""
        if name not in values:
            value = self.received[name]
            peer = value.get("sender")
            start = time.perf_counter()
            key, what = (self.frame, name), f"tensor {name!r}"
            payload = self.mailbox.take(key, self.deadline, what, peer) if peer else self._await(key, what)
            self.wait_s += time.perf_counter() - start
            values[name] = from_bytes(payload, value)
        return values[name]

    def _finish(self) -> None:
        """Says good-bye to the peers, hears theirs, and reports."""
        for channel in self.peers.values():
            channel.send(Kind.BYE)
            channel.flush(self.deadline)
        for peer in self.peers:
            self.mailbox.take(("bye", peer), self.deadline, f"the good-bye of {peer!r}", peer)
        sent = {index: count for channel in self.peers.values() for index, count in channel.sent.items()}
        report = {
            "compute_s": sum(self.segments_s),
            "wait_s": self.wait_s,
            "send_s": sum(channel.send_s for channel in self.peers.values()),
            "sent": {str(index): sent[index] for index in sorted(sent)},
            "segments": self.segments_s,
            "memory_peak": memory_peak(),
        }
        self.control.send_json(Kind.REPORT, report)
        self.control.flush(self.deadline)


def unused_after(manifest: Mapping[str, Any]) -> list[list[str]]:
    """For each step the tensors that no later step and no output needs, so that their memory can be given back."""
    names = {t["index"]: t["name"] for t in manifest["transfers"]}
    last: dict[str, int] = {}
    for position, (kind, index) in enumerate(manifest["steps"]):
        if kind == "run":
            segment = manifest["segments"][index]
            last |= dict.fromkeys([*segment["inputs"], *segment["outputs"]], position)
        elif kind == "send":
            last[names[index]] = position
    for output in manifest["outputs"]:
        last.pop(output["tensor"], None)
    return [[n for n, at in last.items() if at == position] for position in range(len(manifest["steps"]))]


def memory_peak() -> int:
    """The largest resident memory of this process in bytes."""
    try:
        # On Linux getrusage also counts what the parent process had when it started this one.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
