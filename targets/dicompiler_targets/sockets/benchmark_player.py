"""A program that runs artifacts on one host and prints the times of their frames, to measure the runtime's costs.

It is copied to boards together with the runtime, and needs only Python, numpy and onnxruntime.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

from dicompiler_targets.sockets.runtime.channel import EventLoop, MessageChannel
from dicompiler_targets.sockets.runtime.handshake import COORDINATOR_NAME, RunCredentials
from dicompiler_targets.sockets.runtime.integrity import read_manifest
from dicompiler_targets.sockets.runtime.protocol import MessageHeader, MessageType, decode_json
from dicompiler_targets.sockets.runtime.transport import open_connection

TIMEOUT_S = 120.0
HEARTBEAT_S = 2.0
EXIT_WAIT_S = 1.0
MIN_FRAMES = 5


class BenchmarkRun:
    """A run of an artifact on this host, with one process for each device.

    Attributes:
        received: Number of received messages of each type.
        reports: The measurements that devices have sent at the end of the run.
        error: Message of the first error; '' if there is none.
    """

    def __init__(self, artifact: Path) -> None:
        manifests = map(read_manifest, artifact.glob("*/manifest.json"))
        self.manifests = sorted(manifests, key=itemgetter("index"))
        self.artifact, self.deadline = artifact, time.monotonic() + TIMEOUT_S
        self.credentials = RunCredentials(secrets.token_hex(8), secrets.token_hex(16))
        self.loop, self.channels = EventLoop(HEARTBEAT_S), dict[str, MessageChannel]()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.received: dict[MessageType, int] = dict.fromkeys(MessageType, 0)
        self.reports: list[dict[str, Any]] = []
        self.error = ""
        self.log = tempfile.TemporaryFile()  # noqa: SIM115

    def run(self, seconds: float) -> dict[str, Any]:
        """Run frames for at least `seconds` seconds.

        Return {"frames": seconds of each frame, "send": shortest time of sending a tensor to another device, in
        seconds}. "send" is None if nothing was sent.
        """
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
        timelines = [entry for report in self.reports for entry in report["timeline"]]
        sends = [end - start for kind, *_, start, end in timelines if kind == "send"]
        return {"frames": frames, "send": min(sends, default=None)}

    def _join(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(TIMEOUT_S)
            coordinator = f"127.0.0.1:{listener.getsockname()[1]}"
            for manifest in self.manifests:
                self._start(manifest["device"], coordinator)
            addresses: dict[str, Any] = {}
            while len(addresses) < len(self.manifests):
                channel = MessageChannel(open_connection(listener.accept()[0], None, True, self.deadline))
                hello = channel.receive_greeting(self.deadline)
                self.credentials.check(hello, hello["device"], COORDINATOR_NAME)
                addresses[hello["device"]], self.channels[hello["device"]] = hello["address"], channel
        for name, channel in self.channels.items():
            channel.start(self.loop, lambda _: None, self._deliver, self._handle_end)
            proof = self.credentials.make_proof(COORDINATOR_NAME, name)
            channel.send_json(MessageType.PEERS, {"addresses": addresses, "in_flight": 1, **proof})
        self._await(MessageType.READY, len(self.manifests))

    def _start(self, device: str, coordinator: str) -> None:
        arguments = ["--end-with-stdin", "--coordinator", coordinator, "--run", self.credentials.run_id]
        arguments += ["--heartbeat", str(HEARTBEAT_S), "--threads", "1"]
        process = subprocess.Popen(
            [sys.executable, "-m", "runtime", *arguments],
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
        expected_outputs = self.received[MessageType.OUTPUT] + outputs
        for manifest in self.manifests:
            channel = self.channels[manifest["device"]]
            channel.post(MessageType.BEGIN_FRAME, index=int(1000 * TIMEOUT_S), frame=number)
            for value in manifest["inputs"]:
                channel.post(MessageType.INPUT, bytes(value["bytes"]), value["index"], number)
        self.loop.push()
        self._await(MessageType.OUTPUT, expected_outputs)
        seconds = time.perf_counter() - start
        self._await(MessageType.DONE, done + len(self.manifests))
        return seconds

    def _await(self, message_type: MessageType, count: int) -> None:
        self.loop.run_until(lambda: self.received[message_type] >= count or self.error, self.deadline)
        if self.received[message_type] < count:
            raise SystemExit(
                f"{self.artifact.name}: {self._first_error_line() or self.error or 'the run takes too long'}"
            )

    def _first_error_line(self) -> str:
        """Return the error message of the device that failed first.

        Other devices fail as a consequence. Their messages name the device to which they have lost the connection; the
        message of the first device names no other device.
        """
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

    def _handle_end(self, error: Exception) -> None:
        if len(self.reports) < len(self.manifests):
            self.error = self.error or f"a device has ended: {error}"


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(json.dumps(BenchmarkRun(Path(name)).run(float(sys.argv[1]))), flush=True)
