"""Sessions that several threads use, and that a forked child inherits."""

from __future__ import annotations

import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.handmade import endless, halo, integers
from support.running import WAIT_S, emit, pids, wait_until

import dicompiler
from dicompiler import networks
from dicompiler.base.errors import RunError
from dicompiler.target.client import Session
from dicompiler.verify.executor import run_model

THREADS, CALLS = 6, 12


def numbered_frames(count: int) -> list[dict[str, Any]]:
    return [{name: integers(array.shape, number) for name, array in halo()[2].items()} for number in range(count)]


@pytest.fixture(scope="module")
def single_device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("single") / "artifact"
    dicompiler.compile(networks.build("lenet", 1), "rpi4x1", "single", output=directory)
    return directory


def check_calls_of_threads(session: Session, frames: list[dict[str, Any]], expected: list[Any], name: str) -> None:
    start = threading.Barrier(THREADS)

    def work(thread: int) -> None:
        start.wait()
        for call in range(CALLS):
            number = (7 * thread + call) % len(frames)
            assert np.array_equal(session.infer(frames[number])[name], expected[number])

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))


def test_each_thread_gets_its_outputs(tmp_path: Path) -> None:
    frames = numbered_frames(17)
    expected = [run_model(halo()[1], frame)["out"] for frame in frames]
    with dicompiler.connect(emit(halo(), tmp_path)) as session:
        check_calls_of_threads(session, frames, expected, "out")


def test_each_thread_gets_its_outputs_of_device_in_this_process(single_device: Path) -> None:
    rng = np.random.default_rng(0)
    frames = [{"input": rng.random((1, 1, 32, 32), "float32")} for _ in range(17)]
    with dicompiler.connect(single_device) as session:
        expected = [session.infer(frame)["output"] for frame in frames]
        check_calls_of_threads(session, frames, expected, "output")


def test_stream_that_waits_for_frame_lets_other_threads_work(tmp_path: Path) -> None:
    """The frames of the stream come from a thread that uses the session too."""
    frames, ready = numbered_frames(10), queue.SimpleQueue[Any]()
    with dicompiler.connect(emit(halo(), tmp_path)) as session:

        def produce() -> None:
            for frame in frames:
                ready.put((frame, session.infer(frame)["out"]))
            ready.put(None)

        threading.Thread(target=produce, daemon=True).start()
        expected = []

        def source() -> Iterator[dict[str, Any]]:
            while (made := ready.get()) is not None:
                expected.append(made[1])
                yield made[0]

        found = [outputs["out"] for outputs in session.stream(source())]
    assert len(found) == len(frames) and all(map(np.array_equal, found, expected))


def test_end_of_session_ends_calls_of_other_threads(tmp_path: Path) -> None:
    errors = list[str]()
    session = dicompiler.connect(emit(endless(), tmp_path), timeout=60)

    def call() -> None:
        try:
            session.infer(endless()[2])
        except RunError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(session._guard._turns._waiting) == 2)  # type: ignore[attr-defined]
    session.__exit__(KeyboardInterrupt, None, None)
    for thread in threads:
        thread.join(WAIT_S)
    assert errors == ["the session has ended: an error left its context"] * 3
    assert pids(tmp_path) == {}


FORK_SCRIPT = """
import sys; sys.path[:0] = sys.argv[4:]
import os, pickle, dicompiler
frame = pickle.loads(bytes.fromhex(sys.argv[2]))
child = None
try:
    with dicompiler.connect(sys.argv[1]) as session:
        before = session.infer(frame)
        stream = session.stream(iter([frame] * 3))
        next(stream)
        child = os.fork()
        if not child:
            if sys.argv[3] == "exits":
                sys.exit(7)
            getattr(session, sys.argv[3])(*[frame] * (sys.argv[3] == "infer"))
            sys.exit(8)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (7 if sys.argv[3] == "exits" else 9)
        assert len(list(stream)) == 2
        after = session.infer(frame)
        assert all((before[name] == after[name]).all() for name in before)
    assert session.reports
except dicompiler.RunError as error:
    assert not child and f"is a fork of it: open a session in each process" in str(error), error
    sys.exit(9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["infer", "reset", "close", "exits"])
@pytest.mark.parametrize("devices", [3, 1])
def test_forked_child_does_not_touch_session(devices: int, call: str, single_device: Path, tmp_path: Path) -> None:
    image = {"input": np.zeros((1, 1, 32, 32), np.float32)}
    directory, frame = (emit(halo(), tmp_path), halo()[2]) if devices > 1 else (single_device, image)
    command = [sys.executable, "-c", FORK_SCRIPT, str(directory), pickle.dumps(frame).hex(), call, *sys.path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert pids(directory) == {}
