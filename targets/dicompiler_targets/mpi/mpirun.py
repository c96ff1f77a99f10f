"""Starts mpirun and reads what it and the ranks say.

In: a command line. Out: the ranks' reports; or one line that names the rank and device behind a failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dicompiler.plugin_api import DeviceReport, RunError, RunOptions, RunResult, UsageError
from dicompiler.plugin_api.artifacts import TimelineEntry
from dicompiler.plugin_api.utilities import CapturedOutput, one_line
from dicompiler_targets.mpi.artifact import DeliveredFrames, MpiArtifact
from dicompiler_targets.mpi.host_monitor import FailedDevices

REPORT_GRACE_S = 5.0
"""Seconds beyond the time allowed in which the ranks themselves must have said who is late."""
RANK_MESSAGE_PREFIX = "dicompiler: "
MAX_FRAMES_IN_FLIGHT = 1024
MAX_REPORT_BYTES = 1 << 26
"""Bytes that are read of what rank 0 prints."""


FAILURE_DELAY_S = 1.0
"""Seconds in which it can show that a host is gone, after mpirun has ended."""
POLL_INTERVAL_S = 0.05
PEER_ENDED_MESSAGE = "its connection to another rank was closed, which has ended"
"""What a rank says of the end of another: see runtime/run.cc."""


class RankFailure(RunError):
    """Ranks are lost, and with them all others. gone: their devices, and why."""

    def __init__(self, artifact: MpiArtifact, gone: FailedDevices) -> None:
        super().__init__(f"{artifact.describe_rank(artifact.devices.index(gone.devices[0]))}: {gone.reason}")
        self.failed_devices = gone


def check_options(artifact: MpiArtifact, options: RunOptions) -> int:
    """How many frames may be on their way. UsageError for options that this target cannot take."""
    if options.keys is not None or options.start_manually:
        raise UsageError(
            "run: target 'mpi' starts all ranks itself, and MPI has no keys: leave out --elsewhere and --keys"
        )
    return options.resolve_in_flight(len(artifact.devices), MAX_FRAMES_IN_FLIGHT)


def make_arguments(artifact: MpiArtifact, frames: int, options: RunOptions, roles: tuple[int, int]) -> list[str]:
    """What a program is told of a run, wherever it runs. roles: see `Artifact.roles`."""
    flight = check_options(artifact, options)
    flags = {
        "frames": frames,
        "keep": count_kept_frames(frames, options),
        "timeout": f"{options.timeout_s:g}",
        "in-flight": flight,
    }
    if "lost" in artifact.program:
        flags["roles"] = "{},{}".format(*roles)
    partial = ["--partial"] if "roles" in flags else []
    return [*(word for name, value in flags.items() for word in (f"--{name}", str(value))), *partial]


def count_kept_frames(frames: int, options: RunOptions) -> int:
    """The outputs of how many frames are kept."""
    return frames if options.kept_frames is None else min(options.kept_frames, frames)


def run_mpirun(
    artifact: MpiArtifact,
    line: Sequence[str],
    scratch: Path,
    timeout: float,
    extra_environment: Mapping[str, str],
    find_failure: Callable[[], FailedDevices | None] = lambda: None,
) -> dict[str, Any]:
    """Runs mpirun to its end: what rank 0 printed. Nothing that it started is left behind. more: of the environment.
    lost: tells who is, where mpirun may not. Lost, or RunError for what is no loss."""
    with (scratch / "stdout").open("w+b") as output:
        variables = {**make_environment(), **extra_environment}
        try:
            # A session of its own: an interrupt from the terminal is for our process, which then ends the ranks.
            popen = subprocess.Popen(
                line, cwd=scratch, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise RunError(f"{line[0]}: cannot be started: {error.strerror or error}") from None
        assert popen.stderr is not None
        errors = CapturedOutput(popen.stderr)
        gone = None
        try:
            gone = _wait_for_end(popen, timeout + REPORT_GRACE_S, find_failure)
            late = popen.poll() is None
        finally:
            _stop_mpirun(popen, FAILURE_DELAY_S if gone else REPORT_GRACE_S)  # it would wait for a host that is gone
        output.seek(0)
        said, wrong = output.read(MAX_REPORT_BYTES).decode(errors="replace"), errors.read().decode(errors="replace")
    if popen.returncode or gone:
        gone = gone or find_failed_rank(artifact, wrong) or _wait_for_failure(find_failure)
        if gone:
            raise RankFailure(artifact, gone)
        if late and RANK_MESSAGE_PREFIX not in wrong:
            raise RunError(f"the ranks did not finish within {timeout:g} s: allow more time (--timeout)")
        raise RunError(one_line(find_cause(artifact, wrong, popen.returncode)))
    start = said.find("{")
    try:
        report: dict[str, Any] = json.loads(said[start:]) if start >= 0 else {}
    except ValueError:
        report = {}
    if not report:
        raise RunError("the ranks ended without a report: run them again, and look at what mpirun says")
    return report


def _wait_for_end(
    popen: subprocess.Popen[bytes], seconds: float, lost: Callable[[], FailedDevices | None]
) -> FailedDevices | None:
    """Until mpirun has ended, somebody is lost (who is told), or time is up."""
    until = time.monotonic() + seconds
    while (gone := lost()) is None and (now := time.monotonic()) < until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(min(POLL_INTERVAL_S, until - now))
            return None
    return gone


def _wait_for_failure(lost: Callable[[], FailedDevices | None]) -> FailedDevices | None:
    """Who is lost as it shows now, or soon."""
    until = time.monotonic() + FAILURE_DELAY_S
    while (gone := lost()) is None and time.monotonic() < until:
        time.sleep(POLL_INTERVAL_S)
    return gone


def make_environment() -> dict[str, str]:
    """Ours, with what lets root start ranks; without a transport that takes a second to find no hardware, and without
    collective operations that hang where hosts bear the same name, as new boards do."""
    root = {f"{name}_ALLOW_RUN_AS_ROOT{end}": "1" for name in ("OMPI", "PRTE") for end in ("", "_CONFIRM")}
    defaults = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_coll": "^han"}
    return defaults | os.environ | (root if os.geteuid() == 0 else {}) | {"LC_ALL": "C"}


def _stop_mpirun(popen: subprocess.Popen[bytes], seconds: float) -> None:
    """Ends mpirun, which ends its ranks; they also end with it if that takes longer."""
    if popen.poll() is None:
        popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(seconds)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()


def find_failed_rank(artifact: MpiArtifact, errors: str) -> FailedDevices | None:
    """The rank whose process has ended, as mpirun says, or as those say that have lost their connection to it."""
    ended = re.search(r"process rank (\d+)\b[^()]*? on signal (\d+)", " ".join(_clean_lines(errors)))
    words = _find_rank_messages(errors)
    if ended is not None and all(PEER_ENDED_MESSAGE in word for word in words):
        number = int(ended[2])
        known = {int(one): f" ({one.name})" for one in signal.Signals}
        why = f"its process was ended by signal {number}{known.get(number, '')}"
        return FailedDevices((artifact.devices[int(ended[1])],), why)
    # When all are ended, connections are closed again: of those that are blamed by most the first one.
    blamed = Counter(
        int(found[1]) for word in words if (found := re.search(f"{PEER_ENDED_MESSAGE}; .* rank (\\d+) ", word))
    )
    return FailedDevices((artifact.devices[blamed.most_common(1)[0][0]],), "its process has ended") if blamed else None


def find_cause(artifact: MpiArtifact, errors: str, code: int) -> str:
    """The line that tells most of what mpirun and the ranks wrote to stderr."""
    lines, words = _clean_lines(errors), _find_rank_messages(errors)
    # One that has lost its connection to another can end all before mpirun hears of the other.
    noticed = re.search(r'process rank (\d+)\b.*?calling "abort"', " ".join(lines))
    if not words and noticed is not None and "Socket closed" in errors:
        return f"{artifact.describe_rank(int(noticed[1]))}: {PEER_ENDED_MESSAGE}"
    if words:
        # Of ranks that wait for each other in a row the last one, which waits for nobody, holds the others up.
        speaking = {match[1] for word in words if (match := re.match(r"rank (\d+) ", word))}
        suspects = [match[1] if (match := re.search(r"; the cause may be rank (\d+) ", word)) else "" for word in words]
        return next((w for w, other in zip(words, suspects, strict=True) if other not in speaking), words[0])
    silent = f"signal {code - 128} ended a process, it does not say which" if code > 128 else "it says nothing"
    return f"mpirun ended with exit code {code}: {lines[-1] if lines else silent}"


def _clean_lines(errors: str) -> list[str]:
    stripped = (line.strip("\0 \t") for line in errors.splitlines())  # where ranks are far away, zeros come along
    return [line for line in stripped if line and "plm:ssh: Warning: " not in line]


def _find_rank_messages(errors: str) -> list[str]:
    """What ranks say themselves."""
    lines = _clean_lines(errors)
    # Once one has ended all, others that had stopped wake up and complain in turn.
    heard = next((i for i, line in enumerate(lines) if line.startswith("MPI_ABORT was invoked")), len(lines))
    every = [
        (i, line[len(RANK_MESSAGE_PREFIX) :]) for i, line in enumerate(lines) if line.startswith(RANK_MESSAGE_PREFIX)
    ]
    return [word for i, word in every if i < heard] or [word for _, word in every]


def _read_device_report(report: Mapping[str, Any]) -> DeviceReport:
    return DeviceReport(
        report["device"],
        report["compute_s"],
        report["wait_s"],
        report["send_s"],
        {int(index): count for index, count in report["sent"].items()},
        tuple(report["segments"]),
        report["memory_peak"],
        tuple(
            TimelineEntry(kind, index, frame, max(0.0, start), end)
            for kind, index, frame, start, end in sorted(report["timeline"], key=lambda span: span[3])
            if end > 0  # of the last frame
        ),
    )


def make_result(artifact: MpiArtifact, report: Mapping[str, Any], delivered: DeliveredFrames) -> RunResult:
    """What a run gave, of the report and the outputs of the frames that were kept."""
    outputs = tuple(map(artifact.take_first_outputs, delivered))
    reports = tuple(map(_read_device_report, report["ranks"]))
    times = tuple(report["frames_s"]), report["total_s"]
    return RunResult(outputs, reports, delivered, *times, queue_wait_s=tuple(report["waited_s"]))
