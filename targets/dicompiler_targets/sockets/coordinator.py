"""Runs an artifact on this host: starts a process per device, gives them frames, gathers outputs and reports.

Whatever goes wrong (a process ends, a device reports an error, time is up, an interrupt): all processes are ended
and waited for, and one RunError names the device and the cause.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.errors import RunError
from dicompiler.executor import check_inputs
from dicompiler.program import Value
from dicompiler.schema import load_json, validate
from dicompiler.target import DeviceReport, RunResult
from dicompiler_targets.sockets.processes import Manifest, Process, end, read_report, start
from dicompiler_targets.sockets.runtime.wire import (
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

TICK_S = 0.05
"""Seconds between two looks at the processes."""
SETTLE_S = 0.3
"""Seconds in which the cause of a failure can show: that a connection was lost is told before the death behind it."""
GRACE_S = 1.0
"""Seconds after the deadline in which devices can still say what they were waiting for."""


@dataclass(frozen=True)
class _Failure:
    """What was noticed of a failure: which `device` fails, who says so, and how much that tells: CAUSE (nothing else
    can be behind it), ENDING (how its process ended), LOSS (its connection ended) or RUMOUR (another device blames it).
    """

    device: str
    message: str
    says: str
    rank: int


CAUSE, ENDING, LOSS, RUMOUR = range(4)


@dataclass(frozen=True)
class _Event:
    """A frame that a device sent, with its payload (an object for messages); or the end of its connection."""

    device: str
    header: Header | None
    payload: Any


def run(directory: Path, frames: Sequence[Mapping[str, NDArray[Any]]], timeout: float) -> RunResult:
    """Runs the artifact in `directory` for `frames`, one after another: see Target.run."""
    artifact = _load(directory / "artifact.json", "artifact")
    manifests = [_load(directory / device / "manifest.json", "manifest") for device in artifact["devices"]]
    values = [_value(record) for record in artifact["inputs"]]
    given = [check_inputs(values, frame) for frame in frames]
    coordinator = _Coordinator(artifact["digest"], timeout)
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=len(manifests)) as listener:
            address = "{}:{}".format(*listener.getsockname())
            # The devices share this host's processors evenly.
            share = max(1, (os.cpu_count() or 1) // len(manifests))
            for manifest in manifests:
                threads = min(share, manifest["threads"])
                arguments = ["--control", address, "--threads", str(threads), "--timeout", str(timeout)]
                coordinator.processes[manifest["device"]] = start(directory, manifest, arguments)
            coordinator.join(listener)
        results = [coordinator.frame(number, frame) for number, frame in enumerate(given)]
        reports = coordinator.finish(len(given))
    finally:
        end(list(coordinator.processes.values()))
    names = [value["name"] for value in artifact["outputs"]]
    first = tuple(_first(delivered, names) for delivered, _ in results)
    return RunResult(first, reports, tuple(d for d, _ in results), tuple(seconds for _, seconds in results))


def _load(path: Path, schema: str) -> Manifest:
    document: Manifest = load_json(path)
    validate(document, schema, str(path))
    return document


def _value(record: Mapping[str, Any]) -> Value:
    shape = record["shape"]
    dtype = onnx.TensorProto.DataType.Value(record["dtype"])
    return Value(record["name"], dtype, None if shape is None else tuple(shape))


def _first(delivered: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Each output as the first device that has it delivered it."""
    return {name: next(outputs[name] for outputs in delivered.values() if name in outputs) for name in names}


class _Coordinator:
    """One run of the artifact with that digest. `deadline` (of time.monotonic) bounds every wait."""

    def __init__(self, digest: str, timeout: float) -> None:
        self.digest, self.timeout, self.deadline = digest, timeout, time.monotonic() + timeout
        self.processes: dict[str, Process] = {}
        self.events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self.heard: dict[Kind, set[str]] = {Kind.READY: set(), Kind.DONE: set()}
        self.number = 0

    def join(self, listener: socket.socket) -> None:
        """Waits until every device is connected to all its peers and has made its sessions."""
        listener.settimeout(TICK_S)
        while waiting := [p.device for p in self.processes.values() if p.channel is None]:
            with contextlib.suppress(TimeoutError):
                self._welcome(Channel(listener.accept()[0]))
            self._look()
            self._check_time(waiting)
        addresses = {name: process.address for name, process in self.processes.items()}
        for process in self.processes.values():
            process.connection().send_json(Kind.PEERS, addresses)
        self._wait_for(Kind.READY)

    def _welcome(self, channel: Channel) -> None:
        """Takes a device in, or refuses it in words; RunError if it is one of ours that must be refused."""
        process = None
        try:
            hello = channel.greeting(min(self.deadline, time.monotonic() + 1))
            process = self.processes.get(str(hello.get("device")))
            if process is None or process.channel is not None:
                raise ProtocolError(f"device {hello.get('device')!r} is not awaited")
            if hello.get("digest") != self.digest:
                raise ProtocolError("its directory belongs to another artifact: copy it again from this one")
        except (OSError, ProtocolError, Refused) as error:
            with contextlib.suppress(OSError):  # it may be gone already
                channel.greet(Kind.ERROR, {"message": str(error)}, time.monotonic() + 1)
            channel.close()
            if process is not None and process.channel is None:
                raise RunError(f"device {process.device!r}: {error}") from None
            return
        process.channel, process.address = channel, hello.get("address")
        name, expected = process.device, process.expected
        channel.start(
            lambda header: self._admit(expected, header),
            lambda header, payload: self._deliver(name, header, payload),
            lambda error: self.events.put(_Event(name, None, error)),
        )

    def _admit(self, expected: Mapping[int, Mapping[str, Any]], header: Header) -> None:
        if header.kind is Kind.OUTPUT:
            check_tensor(header, expected, self.number)
        elif header.kind in (Kind.READY, Kind.DONE, Kind.REPORT, Kind.ERROR):
            check_message(header)
        else:
            raise ProtocolError(f"{header.kind.name} came, which no device sends")

    def _deliver(self, name: str, header: Header, payload: Any) -> None:
        if header.kind is Kind.REPORT:
            payload = read_report(name, decode(payload))
        elif header.kind is Kind.ERROR:
            payload = decode(payload)
        self.events.put(_Event(name, header, payload))

    def frame(self, number: int, inputs: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], float]:
        """Runs one frame: outputs by sink device and name, and the seconds until the last of them was there."""
        self.number = number
        self.heard[Kind.DONE].clear()
        start = time.perf_counter()
        for process in self.processes.values():
            process.outputs.clear()
            process.connection().send(Kind.RUN, frame=number)
        for process in self.processes.values():
            for value in process.manifest["inputs"]:
                payload = _payload(inputs[value["name"]], value)
                process.connection().send(Kind.INPUT, payload, value["index"], number)
        sinks = [process for process in self.processes.values() if process.expected]
        self._wait(lambda: [p.device for p in sinks if len(p.outputs) < len(p.expected)])
        seconds = time.perf_counter() - start
        delivered = {
            p.device: {value["name"]: _array(p.outputs[i], value) for i, value in p.expected.items()} for p in sinks
        }
        self._wait_for(Kind.DONE)
        return delivered, seconds

    def finish(self, frames: int) -> tuple[DeviceReport, ...]:
        """Ends the run in good order; the devices' reports."""
        for process in self.processes.values():
            process.connection().send(Kind.FINISH, frame=frames)
        self._wait(lambda: [p.device for p in self.processes.values() if p.report is None])
        for process in self.processes.values():
            try:
                process.popen.wait(left(self.deadline))
            except subprocess.TimeoutExpired:
                raise RunError(f"device {process.device!r}: its process does not end") from None
        return tuple(process.report for process in self.processes.values() if process.report is not None)

    def _wait_for(self, kind: Kind) -> None:
        self._wait(lambda: [name for name in self.processes if name not in self.heard[kind]])

    def _wait(self, missing: Callable[[], list[str]]) -> None:
        """Handles events until `missing` names no device any more."""
        while waiting := missing():
            for event in self._next():
                self._handle(event)
            self._look()
            self._check_time(waiting)

    def _next(self) -> Iterator[_Event]:
        with contextlib.suppress(queue.Empty):
            yield self.events.get(timeout=TICK_S)
            while True:
                yield self.events.get_nowait()

    def _handle(self, event: _Event) -> None:
        process, header = self.processes[event.device], event.header
        failure = _failure(event, self.processes)
        if failure is not None:
            # After its report a device may end its connection.
            if process.report is None:
                self._blame(failure)
        elif header is not None and header.kind is Kind.OUTPUT:
            process.outputs[header.index] = event.payload
        elif header is not None and header.kind is Kind.REPORT:
            process.report = event.payload
        elif header is not None:
            self.heard[header.kind].add(event.device)

    def _look(self) -> None:
        """Raises RunError if a process has ended badly."""
        for process in self.processes.values():
            failure = _ending(process)
            if failure is not None and process.report is None:
                self._blame(failure)

    def _blame(self, first: _Failure) -> None:
        """Raises RunError for the failure that is behind the first one that was noticed."""
        found, until = [first], time.monotonic() + SETTLE_S
        while all(failure.rank > CAUSE for failure in found) and time.monotonic() < until:
            found += [failure for event in self._next() if (failure := _failure(event, self.processes)) is not None]
            found += [failure for process in self.processes.values() if (failure := _ending(process)) is not None]
        # Of devices that blame each other in a row the last one, which blames nobody, holds the others up.
        blaming = {failure.says for failure in found if failure.rank == RUMOUR}
        best = min(found, key=lambda failure: (failure.rank > CAUSE, failure.device in blaming, failure.rank))
        raise RunError(f"device {best.device!r}: {best.message}")

    def _check_time(self, waiting: Sequence[str]) -> None:
        if time.monotonic() > self.deadline + GRACE_S:
            others = f" (nor did {', '.join(map(repr, waiting[1:]))})" if len(waiting) > 1 else ""
            raise RunError(
                f"device {waiting[0]!r}: did not finish within {self.timeout:g} s{others}: allow more time (--timeout)"
            )


def _failure(event: _Event, devices: Mapping[str, Process]) -> _Failure | None:
    """What a device's error message, or the end of its connection, tells; None for all other frames."""
    name, error = event.device, event.payload
    if event.header is None and isinstance(error, ProtocolError):
        return _Failure(name, f"it sent what it must not: {error}", name, CAUSE)
    if event.header is None:
        return _Failure(name, f"its connection was lost: {error}", name, LOSS)
    if event.header.kind is not Kind.ERROR:
        return None
    message, peer = str(error.get("message")), error.get("peer")
    if peer in devices:
        return _Failure(peer, f"device {name!r} says: {message}", name, RUMOUR)
    return _Failure(name, message, name, CAUSE)


def _ending(process: Process) -> _Failure | None:
    """How a process ended that has ended badly. A signal is a cause: what ends by itself has told why, if it could."""
    code, ending = process.popen.poll(), process.ending()
    if not code or ending is None:
        return None
    return _Failure(process.device, ending, process.device, CAUSE if code < 0 else ENDING)


def _payload(array: NDArray[Any], value: Mapping[str, Any]) -> Any:
    """The bytes of an input; rank and dimensions stand before them where the manifest knows no shape."""
    raw = array.reshape(-1).view(np.uint8)
    if value["shape"] is not None:
        return raw
    return np.concatenate([np.array([array.ndim, *array.shape], np.int64).view(np.uint8), raw])


def _array(payload: Any, value: Mapping[str, Any]) -> NDArray[Any]:
    """The output on the bytes that came: the reverse of `_payload`."""
    shape, start = value["shape"], 0
    if shape is None:
        dims = payload[: len(payload) // 8 * 8].view(np.int64)
        shape, start = dims[1 : int(dims[0]) + 1].tolist(), 8 * (int(dims[0]) + 1)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.DataType.Value(value["dtype"]))
    array: NDArray[Any] = payload[start:].view(dtype).reshape(shape)
    return array
