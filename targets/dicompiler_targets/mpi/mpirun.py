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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dicompiler.plugin_api import (
    DeviceReport,
    RunError,
    RunOptions,
    RunResult,
    Timed,
    UsageError,
    Written,
    one_line,
)
from dicompiler_targets.mpi.artifact import Artifact, Delivered

GRACE_S = 5.0
"""Seconds beyond the time allowed in which the ranks themselves must have said who is late."""
SAYS = "dicompiler: "
IN_FLIGHT_LIMIT = 1024
REPORT_LIMIT = 1 << 26
"""Bytes that are read of what rank 0 prints."""


class Lost(RunError):
    """A rank's process has ended, and with it all others. device: its own."""

    def __init__(self, words: str, device: str) -> None:
        super().__init__(words)
        self.device = device


def arguments(artifact: Artifact, frames: int, options: RunOptions, roles: tuple[int, int] | None = None) -> list[str]:
    """What a program is told of a run, wherever it runs. UsageError for options that this target cannot take. roles:
    see `Artifact.roles`."""
    if options.keys is not None or options.elsewhere:
        raise UsageError(
            "run: target 'mpi' starts all ranks itself, and MPI has no keys: leave out --elsewhere and --keys"
        )
    flight = options.frames_in_flight(len(artifact.devices), IN_FLIGHT_LIMIT)
    flags = {"frames": frames, "keep": kept(frames, options), "timeout": f"{options.timeout_s:g}", "in-flight": flight}
    if "lost" in artifact.program:
        first, count = roles or artifact.roles(()) or (0, 1)
        flags["roles"] = f"{first},{count}"
    partial = ["--partial"] if "roles" in flags else []
    return [*(word for name, value in flags.items() for word in (f"--{name}", str(value))), *partial]


def kept(frames: int, options: RunOptions) -> int:
    """The outputs of how many frames are kept."""
    return frames if options.keep is None else min(options.keep, frames)


def call(
    artifact: Artifact, line: Sequence[str], scratch: Path, timeout: float, more: Mapping[str, str]
) -> dict[str, Any]:
    """Runs mpirun to its end: what rank 0 printed. Nothing that it started is left behind. more: of the environment."""
    with (scratch / "stdout").open("w+b") as output:
        variables, late = {**environment(), **more}, False
        try:
            # A session of its own: an interrupt from the terminal is for our process, which then ends the ranks.
            popen = subprocess.Popen(
                line, cwd=scratch, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise RunError(f"{line[0]}: cannot be started: {error.strerror or error}") from None
        assert popen.stderr is not None
        errors = Written(popen.stderr)
        try:
            code = popen.wait(timeout + GRACE_S)
        except subprocess.TimeoutExpired:
            code, late = 1, True
        finally:
            _end(popen)
        output.seek(0)
        said, wrong = output.read(REPORT_LIMIT).decode(errors="replace"), errors.read().decode(errors="replace")
    if late and SAYS not in wrong:
        raise RunError(f"the ranks did not finish within {timeout:g} s: allow more time (--timeout)")
    if code:
        words = one_line(cause(artifact, wrong, code))
        if (found := re.match(r"rank (\d+) .*: its process was ended by signal", words)) is not None:
            raise Lost(words, artifact.devices[int(found[1])])
        raise RunError(words)
    start = said.find("{")
    try:
        report: dict[str, Any] = json.loads(said[start:]) if start >= 0 else {}
    except ValueError:
        report = {}
    if not report:
        raise RunError("the ranks ended without a report: run them again, and look at what mpirun says")
    return report


def environment() -> dict[str, str]:
    """Ours, with what lets root start ranks; without a transport that takes a second to find no hardware, and without
    collective operations that hang where hosts bear the same name, as new boards do."""
    root = {f"{name}_ALLOW_RUN_AS_ROOT{end}": "1" for name in ("OMPI", "PRTE") for end in ("", "_CONFIRM")}
    defaults = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_coll": "^han"}
    return defaults | os.environ | (root if os.geteuid() == 0 else {}) | {"LC_ALL": "C"}


def _end(popen: subprocess.Popen[bytes]) -> None:
    """Ends mpirun, which ends its ranks; they also end with it if that takes too long."""
    if popen.poll() is None:
        popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()


def cause(artifact: Artifact, errors: str, code: int) -> str:
    """The line that tells most of what mpirun and the ranks wrote to stderr."""
    stripped = (line.strip("\0 \t") for line in errors.splitlines())  # where ranks are far away, zeros come along
    lines = [line for line in stripped if line and "plm:ssh: Warning: " not in line]
    # Once one has ended all, others that had stopped wake up and complain in turn.
    heard = next((i for i, line in enumerate(lines) if line.startswith("MPI_ABORT was invoked")), len(lines))
    every = [(i, line[len(SAYS) :]) for i, line in enumerate(lines) if line.startswith(SAYS)]
    words = [word for i, word in every if i < heard] or [word for _, word in every]
    ended = re.search(r"rank (\d+)\b.*?on signal (\d+)", " ".join(lines))
    if not words and ended is not None:
        number = int(ended[2])
        known = {int(one): f" ({one.name})" for one in signal.Signals}
        return f"{artifact.title(int(ended[1]))}: its process was ended by signal {number}{known.get(number, '')}"
    # One that has lost its connection to another can end all before mpirun hears of the other.
    noticed = re.search(r'process rank (\d+)\b.*?calling "abort"', " ".join(lines))
    if not words and noticed is not None and "Socket closed" in errors:
        return f"{artifact.title(int(noticed[1]))}: its connection to another rank was closed, which has ended"
    if words:
        # Of ranks that wait for each other in a row the last one, which waits for nobody, holds the others up.
        speaking = {match[1] for word in words if (match := re.match(r"rank (\d+) ", word))}
        suspects = [match[1] if (match := re.search(r"; the cause may be rank (\d+) ", word)) else "" for word in words]
        return next((w for w, other in zip(words, suspects, strict=True) if other not in speaking), words[0])
    silent = f"signal {code - 128} ended a process, it does not say which" if code > 128 else "it says nothing"
    return f"mpirun ended with exit code {code}: {lines[-1] if lines else silent}"


def _last(ranks: Sequence[Mapping[str, Any]], lead: int, last: float) -> list[float]:
    """When the last frame began, `last` on rank `lead`, in the time of each rank: they begin at once, as far as a
    barrier can tell; those of one kernel have one clock, which tells exactly."""
    first = ranks[lead]
    shifts = [one["origin_ns"] - first["origin_ns"] if one["clock"] == first["clock"] else 0 for one in ranks]
    return [last - shift / 1e9 for shift in shifts]


def _device_report(report: Mapping[str, Any], last: float) -> DeviceReport:
    """last: when the last frame began, in the time of this rank."""
    spans = sorted(report["timeline"], key=lambda span: span[3])
    return DeviceReport(
        report["device"],
        report["compute_s"],
        report["wait_s"],
        report["send_s"],
        {int(index): count for index, count in report["sent"].items()},
        tuple(report["segments"]),
        report["memory_peak"],
        tuple(
            Timed(kind, index, frame, max(0.0, start - last), end - last)
            for kind, index, frame, start, end in spans
            if end > last
        ),
    )


def result(artifact: Artifact, report: Mapping[str, Any], delivered: Delivered) -> RunResult:
    """What a run gave, of the report and the outputs of the frames that were kept."""
    outputs = tuple(map(artifact.first, delivered))
    lasts = _last(report["ranks"], report["lead"], report["last_s"])
    reports = tuple(map(_device_report, report["ranks"], lasts))
    times = tuple(report["frames_s"]), report["total_s"]
    return RunResult(outputs, reports, delivered, *times, waited_s=tuple(report["waited_s"]))
