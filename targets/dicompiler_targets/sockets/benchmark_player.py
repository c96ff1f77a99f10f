"""Plays artifacts on this host and says how long frames took: see Target.player.

It stands beside a copy of the runtime, and needs Python, numpy and onnxruntime, nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dicompiler_targets.sockets.runtime.channel import MessageChannel
from dicompiler_targets.sockets.runtime.event_loop import EventLoop
from dicompiler_targets.sockets.runtime.handshake import COORDINATOR_NAME, RunCredentials
from dicompiler_targets.sockets.runtime.integrity import read_manifest
from dicompiler_targets.sockets.runtime.protocol import MessageHeader, MessageType, decode_json
from dicompiler_targets.sockets.runtime.transport import open_connection

TIMEOUT_S = 120.0
HEARTBEAT_S = 2.0
EXIT_WAIT_S = 1.0
MIN_FRAMES = 5
"""Frames that are played at least."""


class BenchmarkRun:
    """A run of an artifact's devices, each in a process of its own that is started in its directory."""

    def __init__(self, artifact: Path) -> None:
        self.manifests = sorted((read_manifest(path) for path in artifact.glob("*/manifest.json")), key=_device_index)
        self.artifact, self.deadline = artifact, time.monotonic() + TIMEOUT_S
        self.credentials = RunCredentials(secrets.token_hex(8), secrets.token_hex(16))
        self.loop, self.channels = EventLoop(HEARTBEAT_S), dict[str, MessageChannel]()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.received: dict[MessageType, int] = dict.fromkeys(MessageType, 0)
        self.reports: list[dict[str, Any]] = []
        self.error = ""
        self.log = tempfile.TemporaryFile()  # noqa: SIM115

    def run(self, seconds: float) -> dict[str, Any]:
        """Plays frames for that long: the seconds of each, and of handing a message to the system (the median in the
        last one)."""
        try:
            self._join()
            outputs = sum(len(manifest["outputs"]) for manifest in self.manifests)
            frames: list[float] = []
            while len(frames) < MIN_FRAMES or sum(frames) < seconds:
                frames.append(self._run_frame(len(frames), outputs))
            for channel in self.channels.values():
                channel.send(MessageType.FINISH, frame=len(frames))
            self._await(MessageType.REPORT, len(self.manifests))
        finally:
            self.loop.close()
            for process in self.processes:
                process.kill()
                process.communicate()
            self.log.close()
        spans = [
            end - start for report in self.reports for kind, *_, start, end in report["timeline"] if kind == "send"
        ]
        return {"frames": frames, "send": statistics.median(spans) if spans else None}

    def _join(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(TIMEOUT_S)
            place = f"127.0.0.1:{listener.getsockname()[1]}"
            for manifest in self.manifests:
                self._start(manifest["device"], place)
            addresses: dict[str, Any] = {}
            while len(addresses) < len(self.manifests):
                channel = MessageChannel(open_connection(listener.accept()[0], None, True, self.deadline))
                hello = channel.receive_greeting(self.deadline)
                self.credentials.check(hello, hello["device"], COORDINATOR_NAME)
                addresses[hello["device"]], self.channels[hello["device"]] = hello["address"], channel
        for name, channel in self.channels.items():
            channel.start(self.loop, lambda _: None, self._deliver, self._lost)
            peers = {"addresses": addresses, "in_flight": 1, **self.credentials.hello(COORDINATOR_NAME, name)}
            channel.send_json(MessageType.PEERS, peers)
        self._await(MessageType.READY, len(self.manifests))

    def _start(self, device: str, place: str) -> None:
        words = ["--tethered", "--control", place, "--run", self.credentials.run, "--heartbeat", str(HEARTBEAT_S)]
        process = subprocess.Popen(
            [sys.executable, "-m", "runtime", *words, "--threads", "1"],
            cwd=self.artifact / device,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=self.log,
        )
        self.processes.append(process)
        assert process.stdin is not None
        process.stdin.write(f"{self.credentials.token}\n".encode())
        process.stdin.flush()

    def _run_frame(self, number: int, outputs: int) -> float:
        start, done = time.perf_counter(), self.received[MessageType.DONE]
        wanted = self.received[MessageType.OUTPUT] + outputs
        for manifest in self.manifests:
            channel = self.channels[manifest["device"]]
            channel.post(MessageType.BEGIN_FRAME, index=int(1000 * TIMEOUT_S), frame=number)
            for value in manifest["inputs"]:
                channel.post(MessageType.INPUT, bytes(value["bytes"]), value["index"], number)
        self.loop.push()
        self._await(MessageType.OUTPUT, wanted)
        seconds = time.perf_counter() - start
        self._await(MessageType.DONE, done + len(self.manifests))
        return seconds

    def _await(self, kind: MessageType, count: int) -> None:
        self.loop.run_until(lambda: self.received[kind] >= count or self.error, self.deadline)
        if self.received[kind] < count:
            raise SystemExit(f"{self.artifact.name}: {self._first_error_line() or self.error or 'it takes too long'}")

    def _first_error_line(self) -> str:
        """What the device that failed first has written: the others fail after it, and name it, perhaps sooner."""
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_WAIT_S)
        self.log.seek(0)
        lines = [line.decode(errors="replace").strip() for line in self.log.readlines()]
        names = [repr(manifest["device"]) for manifest in self.manifests]
        return next((line for line in lines if not any(name in line for name in names)), "".join(lines[:1]))

    def _deliver(self, header: MessageHeader, payload: Any) -> None:
        if header.type is MessageType.REPORT:
            self.reports.append(decode_json(payload))
        if header.type is MessageType.ERROR:
            self.error = self.error or str(decode_json(payload).get("message"))
        self.received[header.type] += 1

    def _lost(self, error: Exception) -> None:
        if len(self.reports) < len(self.manifests):
            self.error = self.error or f"a device is gone: {error}"


def _device_index(manifest: dict[str, Any]) -> int:
    return int(manifest["index"])


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(json.dumps(BenchmarkRun(Path(name)).run(float(sys.argv[1]))), flush=True)
