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

from dicompiler_targets.sockets.runtime.files import read_manifest
from dicompiler_targets.sockets.runtime.frames import Header, Kind, decode
from dicompiler_targets.sockets.runtime.greeting import CONTROL, Membership
from dicompiler_targets.sockets.runtime.line import secured
from dicompiler_targets.sockets.runtime.lines import Lines
from dicompiler_targets.sockets.runtime.wire import Channel

TIMEOUT_S = 120.0
HEARTBEAT_S = 2.0
SETTLE_S = 1.0
LEAST = 5
"""Frames that are played at least."""


class Play:
    """A run of an artifact's devices, each in a process of its own that is started in its directory."""

    def __init__(self, artifact: Path) -> None:
        self.manifests = sorted((read_manifest(path) for path in artifact.glob("*/manifest.json")), key=_index)
        self.artifact, self.deadline = artifact, time.monotonic() + TIMEOUT_S
        self.member = Membership(secrets.token_hex(8), secrets.token_hex(16))
        self.lines, self.channels = Lines(HEARTBEAT_S), dict[str, Channel]()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.came: dict[Kind, int] = dict.fromkeys(Kind, 0)
        self.reports: list[dict[str, Any]] = []
        self.fault = ""
        self.log = tempfile.TemporaryFile()  # noqa: SIM115

    def run(self, seconds: float) -> dict[str, Any]:
        """Plays frames for that long: the seconds of each, and of handing a message to the system (the median in the
        last one)."""
        try:
            self._join()
            outputs = sum(len(manifest["outputs"]) for manifest in self.manifests)
            frames: list[float] = []
            while len(frames) < LEAST or sum(frames) < seconds:
                frames.append(self._frame(len(frames), outputs))
            for channel in self.channels.values():
                channel.send(Kind.FINISH, frame=len(frames))
            self._await(Kind.REPORT, len(self.manifests))
        finally:
            self.lines.end()
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
                channel = Channel(secured(listener.accept()[0], None, True, self.deadline))
                hello = channel.greeting(self.deadline)
                self.member.check(hello, hello["device"], CONTROL)
                addresses[hello["device"]], self.channels[hello["device"]] = hello["address"], channel
        for name, channel in self.channels.items():
            channel.start(self.lines, lambda _: None, self._deliver, self._lost)
            peers = {"addresses": addresses, "in_flight": 1, **self.member.hello(CONTROL, name)}
            channel.send_json(Kind.PEERS, peers)
        self._await(Kind.READY, len(self.manifests))

    def _start(self, device: str, place: str) -> None:
        words = ["--tethered", "--control", place, "--run", self.member.run, "--heartbeat", str(HEARTBEAT_S)]
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
        process.stdin.write(f"{self.member.token}\n".encode())
        process.stdin.flush()

    def _frame(self, number: int, outputs: int) -> float:
        start, done = time.perf_counter(), self.came[Kind.DONE]
        wanted = self.came[Kind.OUTPUT] + outputs
        for manifest in self.manifests:
            channel = self.channels[manifest["device"]]
            channel.post(Kind.RUN, index=int(1000 * TIMEOUT_S), frame=number)
            for value in manifest["inputs"]:
                channel.post(Kind.INPUT, bytes(value["bytes"]), value["index"], number)
        self.lines.push()
        self._await(Kind.OUTPUT, wanted)
        seconds = time.perf_counter() - start
        self._await(Kind.DONE, done + len(self.manifests))
        return seconds

    def _await(self, kind: Kind, count: int) -> None:
        self.lines.drive(lambda: self.came[kind] >= count or self.fault, self.deadline)
        if self.came[kind] < count:
            raise SystemExit(f"{self.artifact.name}: {self._words() or self.fault or 'it takes too long'}")

    def _words(self) -> str:
        """What the device that failed first has written: the others fail after it, and name it, perhaps sooner."""
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SETTLE_S)
        self.log.seek(0)
        lines = [line.decode(errors="replace").strip() for line in self.log.readlines()]
        names = [repr(manifest["device"]) for manifest in self.manifests]
        return next((line for line in lines if not any(name in line for name in names)), "".join(lines[:1]))

    def _deliver(self, header: Header, payload: Any) -> None:
        if header.kind is Kind.REPORT:
            self.reports.append(decode(payload))
        if header.kind is Kind.ERROR:
            self.fault = self.fault or str(decode(payload).get("message"))
        self.came[header.kind] += 1

    def _lost(self, error: Exception) -> None:
        if len(self.reports) < len(self.manifests):
            self.fault = self.fault or f"a device is gone: {error}"


def _index(manifest: dict[str, Any]) -> int:
    return int(manifest["index"])


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(json.dumps(Play(Path(name)).run(float(sys.argv[1]))), flush=True)
