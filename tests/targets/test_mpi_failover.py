"""Ranks of the MPI target that fail, in real processes: they are started again, and each frame is delivered once."""

from __future__ import annotations

import os
import signal
import threading
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from support.failing_devices import Survivor, survivor
from support.mpi_runs import ranks
from support.running import wait_until

from dicompiler.base.errors import RunError, UsageError
from dicompiler.target.manifest import write_digests_and_checksum
from dicompiler.target.run_records import RunEvent, RunOptions
from dicompiler.verify.executor import run_model
from dicompiler_targets.mpi import MpiTarget, build, toolchain
from dicompiler_targets.mpi.artifact import MpiArtifact
from dicompiler_targets.mpi.mpirun import PEER_ENDED_MESSAGE, find_failed_rank


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Survivor, Path, str]:
    """An artifact in which b or d may fail, but not both; its directory, and the name of its program."""
    place = tmp_path_factory.mktemp("mpi")
    one, directory = survivor(1, [("b",), ("d",)], place / "sockets"), place / "mpi"
    directory.mkdir()
    MpiTarget().emit(one.compilation, directory)
    write_digests_and_checksum(directory)
    return (
        one,
        directory,
        build.build_program(MpiArtifact.load(directory).packages["a"], toolchain.find_toolchain()).name,
    )


def kill(program: str, rank: int) -> threading.Thread:
    """Start a thread that kills a rank after it has computed some frames; return the thread."""

    def written(pid: int) -> bool:
        return any(Path(f"/proc/{pid}/cwd/outputs").rglob("frame00001*"))

    def end() -> None:
        processes = wait_until(lambda: len(found := ranks(program)) == 5 and found)
        # Then `ranks` is not called again: it opens many files, which takes seconds while the main thread computes.
        wait_until(lambda: any(map(written, processes.values())))
        os.kill(processes[rank], signal.SIGKILL)

    thread = threading.Thread(target=end)
    thread.start()
    return thread


def test_suspect_that_prints_no_message_has_failed(tmp_path: Path) -> None:
    """Rank 2 is killed. Rank 1 notices it, and ends before rank 0 notices the end of rank 2."""
    artifact = MpiArtifact(tmp_path, {}, dict.fromkeys(("a", "b", "c"), tmp_path))
    messages = [
        f"dicompiler: rank {rank} (device …): {PEER_ENDED_MESSAGE}; the cause may be rank {suspect} (device …)"
        for rank, suspect in ((0, 1), (1, 2))
    ]
    for lines in permutations(messages):
        failed = find_failed_rank(artifact, "\n".join(lines))
        assert failed is not None and failed.devices == ("c",)


@pytest.mark.slow
def test_rank_that_is_lost_is_no_lost_frame(made: tuple[Survivor, Path, str]) -> None:
    one, directory, program = made
    frames, heard = one.frames(5) * 1000, list[RunEvent]()
    wanted = [run_model(one.model, given) for given in frames[:5]]
    thread = kill(program, 3)
    result = MpiTarget().run(directory, frames, RunOptions(in_flight=1, timeout_s=100, on_event=heard.append))
    thread.join()
    assert len(result.outputs) == len(frames)
    for number, outputs in enumerate(result.outputs):
        assert all(np.array_equal(outputs[name], due) for name, due in wanted[number % 5].items()), number
    loss, taken = heard
    assert (loss.kind, taken.kind, taken.down, result.events) == ("failure", "takeover", ("d",), tuple(heard))
    assert taken.at_s - loss.at_s == pytest.approx(taken.takeover_s)
    # mpirun ends the other ranks at once, so the failure is noticed when no more frames arrive.
    assert taken.takeover_s == taken.interruption_s
    # `at_s` is the time when the takeover ended, so all later frames finish between it and the end of the run.
    assert taken.at_s + sum(result.frames_s[1:]) <= result.total_s
    assert loss.reason == "its process was ended by signal 9 (SIGKILL)" and 10 < loss.finished_frames < len(frames)
    assert not any(result.reports[3].segments_s) and not ranks(program)


def test_failure_that_no_plan_covers_ends_the_run(made: tuple[Survivor, Path, str]) -> None:
    one, directory, program = made
    with pytest.raises(UsageError, match="the artifact has no plan for the failure of 'b' and 'd' together"):
        MpiTarget().run(directory, one.frames(1), RunOptions(start_without=("b", "d")))
    thread = kill(program, 2)
    cause = r"its process was ended by signal 9 \(SIGKILL\)"
    no_plan = "the artifact has no plan for the failure of 'b' and 'c' together: compile with"
    options = RunOptions(in_flight=1, timeout_s=100, start_without=("b",))
    with pytest.raises(RunError, match=rf"^rank 2 \(device 'c' on host 'c'\): {cause}; {no_plan}"):
        MpiTarget().run(directory, one.frames(5) * 2000, options)
    thread.join()
