"""Difficult cases of joining resident devices: a stopped device, unknown TLS clients, and two clients at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.failing_devices import DEVICES, kinds, survivor
from support.handmade import halo
from support.resident_devices import run_resident
from support.running import emit, pids
from support.unknown_clients import UnknownClients

import dicompiler
from dicompiler.base.errors import RunError
from dicompiler.target.remote.certificates import make_keys
from dicompiler.target.run_records import RunOptions
from dicompiler_targets.sockets.session import ClusterSession


@pytest.mark.slow
def test_stopped_resident_device_counts_as_failed(tmp_path: Path) -> None:
    """If a failure plan covers the device, frames start without it, and it takes part when it continues."""
    plain, covered = emit(halo(), tmp_path / "plain"), survivor(1, [(name,) for name in DEVICES], tmp_path / "net")
    with run_resident(plain), run_resident(covered.directory):
        stopped = [pids(plain)["b"], pids(covered.directory)["c"]]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(RunError, match=r"^device 'b' at 127\.0\.0\.1:\d+: the device .*cannot be reached"):
                dicompiler.connect(plain, timeout=4)
            with dicompiler.connect(covered.directory, RunOptions(in_flight=4), 16) as session:
                assert isinstance(session, ClusterSession)

                def plot() -> Iterator[None]:
                    yield from [None] * 10
                    os.kill(stopped[1], signal.SIGCONT)
                    while len(session.events) < 3:
                        yield

                covered.stream(session, plot())
            assert kinds(session) == [("failure", "c"), ("takeover", "c"), ("return", "c")]
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_tls_serves_one_of_two_clients_and_rejects_unknown_ones(tmp_path: Path) -> None:
    made = halo()
    directory = emit(made, tmp_path / "net")
    make_keys("abc", tmp_path / "keys")
    found: list[Any] = []

    def join(both: threading.Barrier) -> None:
        both.wait()
        try:
            with dicompiler.connect(directory, timeout=30) as session:
                found.append(session.infer(made[2])["out"])
                both.wait(20)
        except RunError as error:
            found.append(error)
            both.wait(20)

    with run_resident(directory, tmp_path / "keys") as cluster:
        crowds = [UnknownClients(60, directory, name, cluster.digest) for name in "ab"]
        for _ in range(2):
            both = threading.Barrier(2)
            clients = [threading.Thread(target=join, args=(both,)) for _ in range(2)]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
        for crowd in crowds:
            crowd.stop()
        errors = [str(one) for one in found if isinstance(one, RunError)]
        assert len(errors) == 2 and len(found) == 4
        assert all(
            "device 'a' at" in message and "the device serves another client, 127.0.0.1, since" in message
            for message in errors
        )
        right = [one for one in found if not isinstance(one, RunError)]
        assert np.array_equal(right[0], right[1])
