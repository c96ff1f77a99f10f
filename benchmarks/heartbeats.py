"""Measure the price of short heartbeats: false failures on a busy host, and processor time of an idle cluster.

For each heartbeat, a stream of frames runs on four devices on this host while other processes keep all processors busy.
No device fails, so each reported failure is false. Then the devices are idle, and their processor time is measured. The
script prints a row for each heartbeat. How to run it: see README.md.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from pathlib import Path

import click
import numpy as np
from busy_processes import busy_processes

import dicompiler
from dicompiler import networks
from dicompiler.target.run_records import RunOptions
from dicompiler_targets.sockets.artifact import SocketsArtifact
from dicompiler_targets.sockets.session import ClusterSession

HEARTBEATS_S = (2.0, 1.0, 0.5, 0.25, 0.1, 0.05)
IDLE_S = 10.0


def count_false_failures(directory: Path, heartbeat_s: float, seconds: float, processes: int) -> tuple[int, int]:
    """Return the numbers of frames and of reported failures of a stream that takes `seconds` seconds."""
    options = RunOptions(in_flight=4, heartbeat_s=heartbeat_s, timeout_s=600)
    frame, end = {"input": np.zeros((1, 3, 224, 224), np.float32)}, time.monotonic() + seconds
    with dicompiler.connect(directory, options) as session, busy_processes(processes):
        frames = itertools.takewhile(lambda _: time.monotonic() < end, itertools.repeat(frame))
        count = sum(1 for _ in session.stream(frames))
        return count, sum(event.kind == "failure" for event in session.events)


def measure_idle_processor_share(directory: Path, heartbeat_s: float) -> float:
    """Return the fraction of a processor that a device uses while it has no frames to compute."""
    with ClusterSession(SocketsArtifact.load(directory), RunOptions(in_flight=1, heartbeat_s=heartbeat_s)) as session:
        pids = [process.popen.pid for process in session.processes.values() if process.popen is not None]
        before = sum(map(_processor_s, pids))
        time.sleep(IDLE_S)
        return (sum(map(_processor_s, pids)) - before) / IDLE_S / len(pids)


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@click.command()
@click.option("--seconds", default=60.0, help="Seconds of the stream for each heartbeat.")
@click.option("--busy", default=6, help="Number of other processes.")
def command(seconds: float, busy: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch, "build")
        model = networks.build("mobilenet_v2", 0)
        dicompiler.compile(model, platform="rpi4-gateway-x4", strategy="modnn", tolerate_failures=1, output=directory)
        print("heartbeat s  frames  false failures  idle processor share")
        for heartbeat_s in HEARTBEATS_S:
            try:
                frames, failures = count_false_failures(directory, heartbeat_s, seconds, busy)
                text = f"{frames:6}  {failures:14}"
            except dicompiler.DicompilerError as error:
                text = f"the run ended: {error}"
            share = measure_idle_processor_share(directory, heartbeat_s)
            print(f"{heartbeat_s:11g}  {text}  {100 * share:19.2f} %", flush=True)


if __name__ == "__main__":
    command()
