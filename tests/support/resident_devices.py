"""Resident devices of an artifact on this host, as `dicompiler deploy --resident` starts them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support.running import pids, wait_until

from dicompiler_targets.sockets.artifact import SocketsArtifact
from dicompiler_targets.sockets.daemon_client import ResidentCluster
from dicompiler_targets.sockets.runtime import STATE_DIRECTORY

TOKEN = "no stranger knows this"
"""The cluster's token."""


def start(directory: Path, device: str, listen: str = "127.0.0.1:0", keys: Path | None = None) -> tuple[str, int]:
    """Start a resident device as deploy does on its host; return its address."""
    secret = [] if keys is None else ["--keys", str(keys / "devices" / device)]
    words = [*secret, "--resident", "--detach", "--listen", listen, "--log", f"../{STATE_DIRECTORY}/{device}.log"]
    done = subprocess.run(
        [sys.executable, "-B", "-m", "runtime", *words],
        cwd=directory / device,
        input=f"{'' if keys else TOKEN}\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    host, port = json.loads(done.stdout.removeprefix("dicompiler: "))["address"]
    return host, port


@contextlib.contextmanager
def run_resident(directory: Path, keys: Path | None = None) -> Iterator[ResidentCluster]:
    """Run the artifact's devices as resident ones; they end at a signal and leave only logs."""
    artifact = SocketsArtifact.load(directory)
    try:
        addresses = {name: start(directory, name, keys=keys) for name in artifact.devices}
        found = ResidentCluster(
            directory, artifact.digest, addresses, "" if keys else TOKEN, str(keys) if keys else None
        )
        found.save()
        assert ResidentCluster.state_file(directory).stat().st_mode & 0o777 == 0o600
        yield found
    finally:
        for pid in pids(directory).values():
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not pids(directory))
        ResidentCluster.state_file(directory).unlink(missing_ok=True)
        assert {path.suffix for path in (directory / STATE_DIRECTORY).iterdir()} <= {".log", ".1"}
