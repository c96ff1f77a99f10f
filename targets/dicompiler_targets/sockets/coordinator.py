"""Runs an artifact on this host: starts a process per device, gives them frames, gathers outputs and reports.

Whatever goes wrong (a process ends, a device reports an error, time is up, an interrupt): all processes are ended
and waited for, and one RunError names the device and the cause.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.errors import DicompilerError, RunError
from dicompiler.executor import check_inputs
from dicompiler.program import Value
from dicompiler.schema import load_json, validate
from dicompiler.target import DeviceReport, RunResult
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
"""Seconds that are given to a first failure's cause to show: a lost connection is told before the death behind it."""
GRACE_S = 1.0
"""Seconds after the deadline in which devices can still say what they were waiting for."""

Manifest = Mapping[str, Any]


@dataclass
class _Process:
    """A device's process, its connection once it has greeted, and what was heard of it."""

    manifest: Manifest
    popen: subprocess.Popen[bytes]
    log: IO[bytes]
    channel: Channel | None = None
    address: Any = None
    report: Mapping[str, Any] | None = None
    outputs: dict[int, Any] = field(default_factory=dict)
    expected: dict[int, Any] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return str(self.manifest["device"])

    def last_words(self) -> str:
        """The last line that the process wrote, as the end of a message."""
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, self.log.tell() - 4096))
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1].strip()[:500]}" if lines else ""

    def ending(self) -> str | None:
        """How the process ended, in words, or None while it runs."""
        code = self.popen.poll()
        if code is None:
            return None
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"its process was ended by signal {-code} ({signal.Signals(-code).name}){self.last_words()}"
        return f"its process ended with exit code {code}{self.last_words()}"


@dataclass(frozen=True)
class _Failure:
    """What is known of a failure. `cause`: nothing else can be behind it."""

    device: str
    message: str
    cause: bool


Event = tuple[str, Header | None, Any]
"""A device, and a frame of it with its payload; or None and the exception with which its connection ended."""


def run(directory: Path, frames: Sequence[Mapping[str, NDArray[Any]]], timeout: float) -> RunResult:
    """Runs the artifact in `directory` for `frames`, one after another: see Target.run."""
    artifact = load_json(directory / "artifact.json")
    validate(artifact, "artifact", str(directory / "artifact.json"))
    manifests = [_load_manifest(directory, device) for device in artifact["devices"]]
    values = [_value(record) for record in artifact["inputs"]]
    given = [check_inputs(values, frame) for frame in frames]
    coordinator = _Coordinator(artifact, time.monotonic() + timeout)
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=len(manifests)) as listener:
            coordinator.start(directory, manifests, listener, timeout)
            coordinator.join(listener)
        results = [coordinator.frame(index, frame) for index, frame in enumerate(given)]
        reports = coordinator.finish(len(given))
    finally:
        coordinator.end()
    delivered = tuple(outputs for outputs, _ in results)
    first = tuple(_first(outputs, artifact) for outputs in delivered)
    return RunResult(first, reports, delivered, tuple(seconds for _, seconds in results))


def _load_manifest(directory: Path, device: str) -> Manifest:
    path = directory / device / "manifest.json"
    manifest: Manifest = load_json(path)
    validate(manifest, "manifest", str(path))
    return manifest


def _value(record: Mapping[str, Any]) -> Value:
    shape = record["shape"]
    return Value(record["name"], onnx.TensorProto.DataType.Value(record["dtype"]), shape and tuple(shape))


def _first(delivered: Mapping[str, Mapping[str, Any]], artifact: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: array for outputs in reversed(delivered.values()) for name, array in outputs.items()}
    return {value["name"]: found[value["name"]] for value in artifact["outputs"]}


def _environment() -> dict[str, str]:
    """Ours without what changes how Python runs, other than where it finds modules."""
    kept = ("PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE")
    found = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") or k in kept}
    # The working directory changes; and nothing may be added to the artifact.
    path = [os.path.abspath(entry) for entry in found.pop("PYTHONPATH", "").split(os.pathsep) if entry]
    return found | {"PYTHONDONTWRITEBYTECODE": "1"} | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


class _Coordinator:
    """One run. `deadline` (of time.monotonic) bounds every wait."""

    def __init__(self, artifact: Mapping[str, Any], deadline: float) -> None:
        self.artifact, self.deadline = artifact, deadline
        self.processes: dict[str, _Process] = {}
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.ready: set[str] = set()
        self.done: set[str] = set()
        self.number = 0

    def start(
        self, directory: Path, manifests: Sequence[Manifest], listener: socket.socket, timeout: float
    ) -> None:
        """Starts all processes. They share this host's processors evenly."""
        host, port = listener.getsockname()[:2]
        share = max(1, (os.cpu_count() or 1) // len(manifests))
        for manifest in manifests:
            command = [sys.executable, "-m", "runtime", "--control", f"{host}:{port}"]
            command += ["--threads", str(min(share, manifest["threads"])), "--timeout", str(timeout)]
            log = tempfile.TemporaryFile()
            # A session of its own: an interrupt from the terminal is for this process, which then ends the devices.
            popen = subprocess.Popen(
                command,
                cwd=directory / manifest["device"],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            expected = {value["index"]: value for value in manifest["outputs"]}
            self.processes[manifest["device"]] = _Process(manifest, popen, log, expected=expected)

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
            self._channel(process).send_json(Kind.PEERS, addresses)
        self._wait(lambda: [name for name in self.processes if name not in self.ready])

    def _welcome(self, channel: Channel) -> None:
        """Takes a device in, or refuses it in words."""
        process = None
        try:
            hello = channel.greeting(min(self.deadline, time.monotonic() + 1))
            process = self.processes.get(str(hello.get("device")))
            if process is None or process.channel is not None:
                raise ProtocolError(f"device {hello.get('device')!r} is not awaited")
            if hello.get("digest") != self.artifact["digest"]:
                raise ProtocolError("its directory belongs to another artifact: copy it again from this one")
        except (OSError, ProtocolError, Refused) as error:
            with contextlib.suppress(OSError):
                channel.greet(Kind.ERROR, {"message": str(error)}, time.monotonic() + 1)
            channel.close()
            if process is not None and process.channel is None:
                raise RunError(f"device {process.device!r}: {error}") from None
            return
        process.channel, process.address = channel, hello.get("address")
        name = process.device
        channel.start(
            lambda header: self._admit(name, header),
            lambda header, payload: self.events.put((name, header, payload)),
            lambda error: self.events.put((name, None, error)),
        )

    def _admit(self, name: str, header: Header) -> None:
        if header.kind is Kind.OUTPUT:
            check_tensor(header, self.processes[name].expected, self.number)
        elif header.kind in (Kind.READY, Kind.REPORT, Kind.ERROR, Kind.DONE):
            check_message(header)
        else:
            raise ProtocolError(f"{header.kind.name} came, which no device sends")

    def frame(self, number: int, inputs: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], float]:
        """Runs one frame: outputs by sink device and name, and the seconds until the last of them was there."""
        self.number = number
        self.done.clear()
        start = time.perf_counter()
        for process in self.processes.values():
            channel = self._channel(process)
            process.outputs.clear()
            channel.send(Kind.RUN, frame=number)
            for value in process.manifest["inputs"]:
                channel.send(Kind.INPUT, _payload(inputs[value["name"]], value), value["index"], number)
        sinks = [process for process in self.processes.values() if process.expected]
        self._wait(lambda: [p.device for p in sinks if len(p.outputs) < len(p.expected)])
        seconds = time.perf_counter() - start
        delivered = {
            p.device: {value["name"]: _array(p.outputs[i], value) for i, value in p.expected.items()} for p in sinks
        }
        self._wait(lambda: [name for name in self.processes if name not in self.done])
        return delivered, seconds

    def finish(self, frames: int) -> tuple[DeviceReport, ...]:
        """Ends the run in good order; the devices' reports."""
        for process in self.processes.values():
            self._channel(process).send(Kind.FINISH, frame=frames)
        self._wait(lambda: [p.device for p in self.processes.values() if p.report is None])
        for process in self.processes.values():
            try:
                process.popen.wait(left(self.deadline))
            except subprocess.TimeoutExpired:
                raise RunError(f"device {process.device!r}: its process does not end") from None
        return tuple(_report(process) for process in self.processes.values())

    def end(self) -> None:
        """Ends every process that is left, and waits for it."""
        for process in self.processes.values():
            process.popen.kill()
        for process in self.processes.values():
            process.popen.wait()
            process.log.close()
            if process.channel is not None:
                process.channel.flush(time.monotonic())
                process.channel.close()

    def _channel(self, process: _Process) -> Channel:
        assert process.channel is not None
        return process.channel

    def _wait(self, missing: Callable[[], list[str]]) -> None:
        """Handles events until `missing` names no device any more."""
        while waiting := missing():
            for event in self._next():
                self._handle(event)
            self._look()
            self._check_time(waiting)

    def _next(self) -> Iterator[Event]:
        with contextlib.suppress(queue.Empty):
            yield self.events.get(timeout=TICK_S)
            while True:
                yield self.events.get_nowait()

    def _handle(self, event: Event) -> None:
        name, header, payload = event
        process = self.processes[name]
        failure = self._failure(event)
        if failure is not None and process.report is None:
            self._blame(failure)
        elif header is None:
            return
        elif header.kind is Kind.READY:
            self.ready.add(name)
        elif header.kind is Kind.DONE:
            self.done.add(name)
        elif header.kind is Kind.OUTPUT:
            process.outputs[header.index] = payload
        elif header.kind is Kind.REPORT:
            process.report = decode(payload)

    def _failure(self, event: Event) -> _Failure | None:
        """What a device's error message or the end of its connection tells."""
        name, header, payload = event
        if header is None:
            return _Failure(name, f"sent what it must not: {payload}", True) if isinstance(
                payload, ProtocolError
            ) else _Failure(name, f"its connection was lost: {payload}", False)
        if header.kind is not Kind.ERROR:
            return None
        message = decode(payload)
        peer = message.get("peer")
        if peer not in self.processes:
            return _Failure(name, str(message.get("message")), True)
        return _Failure(peer, f"device {name!r} says: {message.get('message')}", False)

    def _look(self) -> None:
        """Raises RunError if a process has ended that has not reported."""
        for process in self.processes.values():
            ending = process.ending()
            if ending is not None and process.report is None:
                self._blame(_Failure(process.device, ending, False))

    def _blame(self, first: _Failure) -> None:
        """Raises RunError for the failure that is behind the first one that was noticed."""
        found, until = [first], time.monotonic() + SETTLE_S
        while not found[-1].cause and time.monotonic() < until:
            found += [failure for event in self._next() if (failure := self._failure(event)) is not None]
            # A process that ended by a signal could not say why itself; others that fail say so before they end.
            found += [
                _Failure(p.device, str(p.ending()), (p.popen.returncode or 0) < 0)
                for p in self.processes.values()
                if p.ending() is not None
            ]
        cause = next((failure for failure in found if failure.cause), None)
        cause = cause or next((f for f in found if self.processes[f.device].ending() is not None), found[0])
        raise RunError(f"device {cause.device!r}: {cause.message}")

    def _check_time(self, waiting: Sequence[str]) -> None:
        if time.monotonic() > self.deadline + GRACE_S:
            others = f" (nor did {', '.join(waiting[1:])})" if len(waiting) > 1 else ""
            raise RunError(f"device {waiting[0]!r}: did not finish in time{others}: allow more, or look at that device")


def _payload(array: NDArray[Any], value: Mapping[str, Any]) -> Any:
    """The bytes of an input; rank and dimensions stand before them where the manifest knows no shape."""
    raw = array.reshape(-1).view(np.uint8)
    if value["shape"] is not None:
        return raw
    return np.concatenate([np.array([array.ndim, *array.shape], np.int64).view(np.uint8), raw])


def _array(payload: Any, value: Mapping[str, Any]) -> NDArray[Any]:
    """The output on the bytes that came: the reverse of `_payload`."""
    dtype = onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.DataType.Value(value["dtype"]))
    shape, start = value["shape"], 0
    if shape is None:
        dims = payload[: len(payload) // 8 * 8].view(np.int64)
        shape, start = dims[1 : int(dims[0]) + 1].tolist(), 8 * (int(dims[0]) + 1)
    array: NDArray[Any] = payload[start:].view(dtype).reshape(shape)
    assert array.size == math.prod(shape)
    return array


def _report(process: _Process) -> DeviceReport:
    report = process.report
    assert report is not None
    try:
        return DeviceReport(
            process.device,
            float(report["compute_s"]),
            float(report["wait_s"]),
            float(report["send_s"]),
            {int(index): int(count) for index, count in report["sent"].items()},
            tuple(map(float, report["segments"])),
            int(report["memory_peak"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DicompilerError(f"device {process.device!r}: its report is not as agreed: {error!r}") from None
