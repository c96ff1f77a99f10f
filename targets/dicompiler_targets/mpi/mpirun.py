"""Runs mpirun, reads its output and that of the ranks (MPI processes), and finds the cause of failures.

command line ⇒ the report that rank 0 prints, or an error of one line that names the failed rank and its device
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dicompiler.plugin_api import DeviceReport, RunError, RunOptions, RunResult, UsageError
from dicompiler.plugin_api.artifacts import TimelineEntry
from dicompiler.plugin_api.utilities import ALLOW_MORE_TIME, CapturedOutput, one_line
from dicompiler_targets.mpi.artifact import DeliveredFrames, MpiArtifact
from dicompiler_targets.mpi.host_monitor import FailedDevices

REPORT_GRACE_S = 5.0
"""Seconds after the timeout in which the ranks can still report which rank is late."""
MAX_STOP_S = 5.0
"""Seconds that a terminated mpirun may take to end its ranks before it is killed."""
MAX_STOP_AFTER_FAILURE_S = 1.0
"""Seconds that mpirun may take to end its ranks after a failure.

They are fewer than MAX_STOP_S, because mpirun would wait for a failed host.
"""
RANK_MESSAGE_PREFIX = "dicompiler: "
MAX_REPORT_BYTES = 1 << 26
"""Maximum number of bytes of rank 0's output that are read."""
FAILURE_DELAY_S = 1.0
"""Seconds after the end of mpirun in which HostMonitor may still detect that a host has failed."""
POLL_INTERVAL_S = 0.05
PEER_ENDED_MESSAGE = "another rank has ended and closed its connection to this rank"
"""The message of a rank that has lost its connection to another rank; it is part of runtime/run.cc."""


class RankFailure(RunError):
    """The error for failed ranks (MPI processes). MPI has ended all other ranks too.

    Attributes:
        failed_devices: The devices of the failed ranks, and the reason.
        noticed_at: When the failure was noticed (time.perf_counter).
    """

    def __init__(self, artifact: MpiArtifact, failed_devices: FailedDevices) -> None:
        rank = artifact.devices.index(failed_devices.devices[0])
        super().__init__(f"{artifact.describe_rank(rank)}: {failed_devices.reason}")
        self.failed_devices, self.noticed_at = failed_devices, time.perf_counter()


def check_options(artifact: MpiArtifact, options: RunOptions) -> None:
    """Check that target mpi supports the options.

    Raises:
        UsageError: An option is not supported, or `in_flight` is too large.
    """
    if options.keys is not None or options.start_manually:
        raise UsageError("run: target 'mpi' supports neither --start-manually nor --keys: omit them")
    get_in_flight(artifact, options)


def get_in_flight(artifact: MpiArtifact, options: RunOptions) -> int:
    """Return the maximum number of frames that the devices process at the same time.

    Raises:
        UsageError: `in_flight` is too large.
    """
    return options.resolve_in_flight(len(artifact.devices))


def make_arguments(artifact: MpiArtifact, frames: int, options: RunOptions, roles: tuple[int, int]) -> list[str]:
    """Return the command-line arguments of the program that are the same for all ranks.

    `roles` is the index of the first role that frames use, and the number of roles that they use in turn. A role is the
    normal plan, a failure plan, or a replica of either.

    If there are failure plans, `--partial` is added. The outputs of a failed run then remain, and the next run omits
    the frames that are finished.
    """
    flags = {
        "frames": frames,
        "kept-frames": count_kept_frames(frames, options),
        "timeout": f"{options.timeout_s:g}",
        "in-flight": get_in_flight(artifact, options),
    }
    if "failed" in artifact.program:
        flags["roles"] = "{},{}".format(*roles)
    partial = ["--partial"] if "roles" in flags else []
    return [*(argument for name, value in flags.items() for argument in (f"--{name}", str(value))), *partial]


def count_kept_frames(frames: int, options: RunOptions) -> int:
    """Return a number N: the program writes the outputs of the first N frames of a run."""
    return frames if options.kept_frames is None else min(options.kept_frames, frames)


def run_mpirun(
    artifact: MpiArtifact,
    command: Sequence[str],
    scratch: Path,
    timeout: float,
    extra_environment: Mapping[str, str],
    find_failure: Callable[[], FailedDevices | None] = lambda: None,
) -> dict[str, Any]:
    """Run mpirun and wait for its end. No process of the run remains, even after an error.

    Args:
        artifact: The artifact; error messages name its devices.
        command: The command line.
        scratch: A directory for temporary files.
        timeout: Seconds that the ranks may take.
        extra_environment: Environment variables in addition to those of `make_environment`.
        find_failure: Returns failed devices that mpirun may not detect; called again and again during the run.

    Returns:
        The report that rank 0 has printed.

    Raises:
        RankFailure: A rank has failed.
        RunError: The run has failed for another reason.
    """
    with (scratch / "stdout").open("w+b") as output:
        variables = {**make_environment(scratch), **extra_environment}
        try:
            # In a new session, mpirun does not receive Ctrl-C from the terminal. _stop_mpirun ends the ranks instead.
            process = subprocess.Popen(
                command, cwd=scratch, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise RunError(f"{command[0]}: cannot be started: {error.strerror or error}") from None
        assert process.stderr is not None
        captured_errors = CapturedOutput(process.stderr)
        failed = None
        try:
            failed = _wait_for_end(process, timeout + REPORT_GRACE_S, find_failure)
            is_late = process.poll() is None
        finally:
            _stop_mpirun(process, MAX_STOP_AFTER_FAILURE_S if failed else MAX_STOP_S)
        output.seek(0)
        text = output.read(MAX_REPORT_BYTES).decode(errors="replace")
        errors = captured_errors.read().decode(errors="replace")
    if process.returncode or failed:
        failed = failed or find_failed_rank(artifact, errors) or _wait_for_failure(find_failure)
        if failed:
            raise RankFailure(artifact, failed)
        if is_late and RANK_MESSAGE_PREFIX not in errors:
            raise RunError(f"the ranks did not finish within {timeout:g} s: {ALLOW_MORE_TIME}")
        raise RunError(one_line(find_cause(artifact, errors, process.returncode)))
    start = text.find("{")
    try:
        report: dict[str, Any] = json.loads(text[start:]) if start >= 0 else {}
    except ValueError:
        report = {}
    if not report:
        raise RunError("the ranks ended without a report: run them again, and read the messages of mpirun")
    return report


def _wait_for_end(
    process: subprocess.Popen[bytes], seconds: float, find_failure: Callable[[], FailedDevices | None]
) -> FailedDevices | None:
    """Wait until mpirun has ended, devices have failed, or `seconds` have passed.

    Returns:
        The failed devices; None if there are none.
    """
    deadline = time.monotonic() + seconds
    while (failed := find_failure()) is None and (now := time.monotonic()) < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(POLL_INTERVAL_S, deadline - now))
            return None
    return failed


def _wait_for_failure(find_failure: Callable[[], FailedDevices | None]) -> FailedDevices | None:
    """Wait up to FAILURE_DELAY_S until `find_failure` returns failed devices."""
    deadline = time.monotonic() + FAILURE_DELAY_S
    while (failed := find_failure()) is None and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
    return failed


def make_environment(scratch: Path) -> dict[str, str]:
    """Return the environment variables for mpirun.

    - They allow root to start ranks.
    - They exclude the transport "ofi", which takes a second to find out that its hardware is missing.
    - They exclude the collective operations "han", which hang if several hosts have the same name.
    - They let mpirun keep its temporary files in the directory `scratch`. By default, they are in a directory in /tmp
      that has the process ID of mpirun in its name. A killed mpirun does not remove it, and a later mpirun with the
      same process ID does not start.
    """
    root = {f"{name}_ALLOW_RUN_AS_ROOT{end}": "1" for name in ("OMPI", "PRTE") for end in ("", "_CONFIRM")}
    defaults = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_coll": "^han"}
    fixed = {"LC_ALL": "C", "PRTE_MCA_prte_local_tmpdir_base": str(scratch)}
    return defaults | os.environ | (root if os.geteuid() == 0 else {}) | fixed


def _stop_mpirun(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Terminate mpirun, which then ends its ranks; if it takes longer than `seconds`, kill it and the ranks."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def find_failed_rank(artifact: MpiArtifact, errors: str) -> FailedDevices | None:
    """Return the device of the rank (MPI process) that has ended; None if the messages in `errors` do not show it."""
    ended = re.search(r"process rank (\d+)\b[^()]*? on signal (\d+)", " ".join(_clean_lines(errors)))
    messages = _find_rank_messages(errors)
    if ended is not None and all(PEER_ENDED_MESSAGE in message for message in messages):
        number = int(ended[2])
        names = {int(entry): f" ({entry.name})" for entry in signal.Signals}
        reason = f"its process was ended by signal {number}{names.get(number, '')}"
        return FailedDevices((artifact.devices[int(ended[1])],), reason)
    # Each message suspects the rank at the other end of a lost connection. When MPI ends the other ranks, their
    # connections are lost too, but most messages suspect the rank that failed first, and this rank sends none.
    pattern = f"^rank (\\d+) .*{PEER_ENDED_MESSAGE}; .* rank (\\d+) "
    found = [match for message in messages if (match := re.search(pattern, message))]
    if not found:
        return None
    reporting, suspects = {int(match[1]) for match in found}, Counter(int(match[2]) for match in found)
    failed = max(suspects, key=lambda rank: (rank not in reporting, suspects[rank]))
    return FailedDevices((artifact.devices[failed],), "its process has ended")


def find_cause(artifact: MpiArtifact, errors: str, exit_code: int) -> str:
    """Return the message in `errors` that best shows why mpirun or a rank has failed, as one line."""
    lines, messages = _clean_lines(errors), _find_rank_messages(errors)
    # A rank that loses its connection to a failed rank can end all ranks before mpirun detects the failure. Open MPI
    # then reports an abort of this rank and a closed socket, and no rank prints a message of its own.
    aborted = re.search(r'process rank (\d+)\b.*?calling "abort"', " ".join(lines))
    if not messages and aborted is not None and "Socket closed" in errors:
        return f"{artifact.describe_rank(int(aborted[1]))}: {PEER_ENDED_MESSAGE}"
    if messages:
        # A late rank reports the rank that it waits for (its suspect). In a chain of waiting ranks, the last one delays
        # all others. It has no suspect, or a suspect that reports nothing.
        reporting = {match[1] for message in messages if (match := re.match(r"rank (\d+) ", message))}
        suspects = [
            match[1] if (match := re.search(r"; the cause may be rank (\d+) ", message)) else "" for message in messages
        ]
        pairs = zip(messages, suspects, strict=True)
        return next((message for message, suspect in pairs if suspect not in reporting), messages[0])
    unknown = f"signal {exit_code - 128} ended an unknown process" if exit_code > 128 else "without a message"
    return f"mpirun ended with exit code {exit_code}: {_join_last_paragraph(errors) or unknown}"


def _clean_lines(errors: str) -> list[str]:
    # mpirun adds null bytes to the lines of ranks on other hosts.
    stripped = (line.strip("\0 \t") for line in errors.splitlines())
    return [line for line in stripped if line and "plm:ssh: Warning: " not in line]


def _join_last_paragraph(errors: str) -> str:
    """Return the last paragraph of the messages as one line. Empty lines and lines of dashes separate paragraphs."""
    paragraphs = [list[str]()]
    for line in errors.splitlines():
        if line.strip("\0 \t-"):
            paragraphs[-1] += _clean_lines(line)
        else:
            paragraphs.append([])
    return " ".join(next((paragraph for paragraph in reversed(paragraphs) if paragraph), []))


def _find_rank_messages(errors: str) -> list[str]:
    """Return the messages that ranks printed before the first rank ended all others; without such messages, all."""
    lines = _clean_lines(errors)
    # Messages after the first line "MPI_ABORT was invoked" do not show the cause: mpirun resumes stopped ranks to end
    # them, and these then print further messages.
    aborted = (index for index, line in enumerate(lines) if line.startswith("MPI_ABORT was invoked"))
    end = next(aborted, len(lines))
    messages = [
        (index, line[len(RANK_MESSAGE_PREFIX) :])
        for index, line in enumerate(lines)
        if line.startswith(RANK_MESSAGE_PREFIX)
    ]
    return [message for index, message in messages if index < end] or [message for _, message in messages]


def _read_device_report(report: Mapping[str, Any]) -> DeviceReport:
    return DeviceReport(
        report["device"],
        report["compute_s"],
        report["wait_s"],
        report["send_s"],
        {int(index): count for index, count in report["sent_bytes"].items()},
        tuple(report["segments_s"]),
        report["peak_memory_bytes"],
        tuple(
            TimelineEntry(kind, index, frame, max(0.0, start), end)
            for kind, index, frame, start, end in sorted(report["timeline"], key=lambda entry: entry[3])
            if end > 0  # Times are relative to the start of the last frame; activities before it are omitted.
        ),
    )


def write_launch_agent(scratch: Path, commands: Mapping[str, str]) -> dict[str, str]:
    """Write a script, and return the environment variables that make mpirun call it instead of ssh.

    `commands` has, by host name, the shell command that the script executes. In it, "$*" is the command line that
    mpirun runs on the host.
    """
    cases = "\n".join(f"{shlex.quote(host)}) exec {command} ;;" for host, command in commands.items())
    script = scratch / "agent"
    lines = f'name=$1; shift\ncase $name in\n{cases}\nesac\necho "there is no host $name" >&2\nexit 1\n'
    script.write_text(f"#!/bin/sh\n{lines}", encoding="utf-8")
    script.chmod(0o700)
    return {name: str(script) for name in ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent")}


def make_result(artifact: MpiArtifact, report: Mapping[str, Any], delivered: DeliveredFrames) -> RunResult:
    """Return the result of a run.

    Args:
        artifact: The artifact that was run.
        report: The report of rank 0: measurements of each rank, and times of the frames.
        delivered: The outputs of the kept frames, by device.
    """
    return RunResult(
        outputs=tuple(map(artifact.merge_outputs, delivered)),
        reports=tuple(map(_read_device_report, report["ranks"])),
        outputs_by_device=delivered,
        frames_s=tuple(report["frames_s"]),
        total_s=report["total_s"],
        queue_wait_s=tuple(report["queue_wait_s"]),
    )
