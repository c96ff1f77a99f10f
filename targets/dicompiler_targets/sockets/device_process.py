"""One device's process on this host: how it is started, what it last said, how it ended.

In: an artifact's directory and where the coordinator listens. Out: a running process that nothing outlives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dicompiler.plugin_api import DeviceReport, RunError, RunOptions
from dicompiler.plugin_api.artifacts import TimelineEntry
from dicompiler.plugin_api.utilities import CapturedOutput, one_line
from dicompiler_targets.sockets.artifact import Manifest
from dicompiler_targets.sockets.runtime import __name__ as RUNTIME
from dicompiler_targets.sockets.runtime.channel import MessageChannel
from dicompiler_targets.sockets.runtime.protocol import ProtocolError
from dicompiler_targets.sockets.runtime.role_schedule import role_manifests

RUNTIME_COMMAND = ("-P", "-m", RUNTIME)
"""How Python starts the installed runtime: where it is started, no module is looked for."""


@dataclass
class DeviceProcess:
    """A device's process, its connection and address once it has greeted, and what was heard of it.

    popen: None for one that someone else starts, else the process on this host (which may be one that reaches another
    host, such as ssh); it must end with the device's exit code. log: what it writes. where: what messages add to the
    device's name. addresses: those that it may name to its peers, besides the one that it comes from.
    """

    manifest: Manifest
    popen: subprocess.Popen[bytes] | None = None
    output: CapturedOutput | None = None
    channel: MessageChannel | None = None
    address: Any = None
    report: DeviceReport | None = None
    queued_messages: int = 0
    location: str = ""
    allowed_addresses: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        return str(self.manifest["device"])

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"device {self.device!r}{self.location}"

    def get_channel(self) -> MessageChannel:
        """The channel of a device that has greeted."""
        assert self.channel is not None
        return self.channel

    def send_token(self, token: str) -> None:
        """Gives it the run's token by its standard input, which nobody else can read."""
        if self.popen is not None and self.popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended, and is told so where endings are looked for
                self.popen.stdin.write(f"{token}\n".encode())
                self.popen.stdin.flush()

    def exit_code(self) -> int | None:
        """None while it runs, or where it is not ours to know."""
        return None if self.popen is None else self.popen.poll()

    def describe_exit(self) -> str | None:
        """How the process ended and the last line that it wrote, or None while it runs."""
        code = self.exit_code()
        if code is None:
            return None
        if code >= 0:
            return f"its process ended with exit code {code}{self._last_line_suffix()}"
        with contextlib.suppress(ValueError):  # a signal without a name
            return f"its process was ended by signal {-code} ({signal.Signals(-code).name}){self._last_line_suffix()}"
        return f"its process was ended by signal {-code}{self._last_line_suffix()}"

    def close(self) -> None:
        """Lets go of what belongs to a process that has ended."""
        if self.popen is not None and self.popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.popen.stdin.close()
        if self.channel is not None:
            self.channel.close()

    def last_line(self) -> str:
        """The last line that it has written, '' without one."""
        lines = [] if self.output is None else self.output.read()[-4096:].decode(errors="replace").strip().splitlines()
        return one_line(lines[-1], 500) if lines else ""

    def _last_line_suffix(self) -> str:
        return f": {line}" if (line := self.last_line()) else ""


StartDevice = Callable[[Manifest, Sequence[str]], DeviceProcess]
"""Starts a device's runtime, given its manifest and the arguments that any device of the run needs."""


def local_starter(directory: Path, options: RunOptions, count: int) -> StartDevice:
    """Starts the artifact's devices on this host, which share its processors evenly between all `count` devices."""
    keys, emulation = options.keys, options.emulation
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // count) if emulation is None else 1  # what calls take was measured for one

    def start(manifest: Manifest, arguments: Sequence[str]) -> DeviceProcess:
        more = ["--threads", str(min(share, manifest["threads"]))]
        if keys is not None:
            more += ["--keys", os.path.abspath(keys / "devices" / manifest["device"])]
        if options.pin:
            first = manifest["index"] * share
            more += ["--cores", ",".join(str(cores[(first + i) % len(cores)]) for i in range(share))]
        if emulation is None:
            return launch_process(directory, manifest, [*arguments, *more])
        more += ["--least", ",".join(map(repr, emulation.min_segments_s[manifest["device"]]))]
        with emulation.enter_network(manifest["device"]):
            return launch_process(directory, manifest, [*arguments, *more])

    return start


def launch_process(directory: Path, manifest: Manifest, arguments: Sequence[str]) -> DeviceProcess:
    """Starts the installed runtime for the device on this host: of its directory no code is run. RunError if the system
    refuses."""
    try:
        # A session of its own: an interrupt from the terminal is for our process, which then ends the devices.
        popen = subprocess.Popen(
            [sys.executable, *RUNTIME_COMMAND, "--tethered", *arguments],
            cwd=directory / manifest["device"],
            env=_child_environment(),
            stdin=subprocess.PIPE,  # held open by this process: the device ends with it
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise RunError(f"device {manifest['device']!r}: its process cannot be started: {error}") from error
    assert popen.stdout is not None
    return DeviceProcess(manifest, popen, CapturedOutput(popen.stdout))


def _child_environment() -> dict[str, str]:
    """Ours without what changes how Python runs, other than where it finds modules."""
    kept = ("PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE")
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") or k in kept}
    # The working directory is another one there; and nothing may be written into the artifact.
    path = [os.path.abspath(entry) for entry in variables.pop("PYTHONPATH", "").split(os.pathsep) if entry]
    return variables | {"PYTHONDONTWRITEBYTECODE": "1"} | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


def end_all(processes: Sequence[DeviceProcess]) -> None:
    """Ends those of the processes that still run, waits for all, and closes what belongs to them. Devices that someone
    else started end by themselves when their connection does."""
    for process in processes:
        if process.popen is not None:
            process.popen.kill()
    for process in processes:
        if process.popen is not None:
            process.popen.wait()
        process.close()


def end_process(process: DeviceProcess) -> None:
    """Ends a device while all others go on. One that someone else started ends by itself when its connection does."""
    if process.popen is not None:
        process.popen.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the system: it is asked again in the end
            process.popen.wait(1)
    process.close()


def empty_report(manifest: Manifest) -> DeviceReport:
    """The report of a device that is away at the end: it tells nothing."""
    count = sum(len(role["segments"]) for role in role_manifests(manifest))
    return DeviceReport(manifest["device"], 0.0, 0.0, 0.0, {}, (0.0,) * count, 0)


def read_report(device: str, report: Mapping[str, Any]) -> DeviceReport:
    """The report that a device sent. ProtocolError if it is not as agreed."""
    try:
        spans = report.get("timeline", ())  # earlier runtimes did not tell
        return DeviceReport(
            device,
            float(report["compute_s"]),
            float(report["wait_s"]),
            float(report["send_s"]),
            {int(index): int(count) for index, count in report["sent"].items()},
            tuple(map(float, report["segments"])),
            int(report["memory_peak"]),
            tuple(TimelineEntry(str(k), int(i), int(f), float(start), float(end)) for k, i, f, start, end in spans),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"the report is not as agreed: {error!r}") from None
