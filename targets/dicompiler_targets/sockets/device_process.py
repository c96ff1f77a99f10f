"""A device's process on this host: how it is started, its connection, its output, and how it ended.

Directory of an artifact and address of the coordinator ⇒ a running process that ends when this process ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dicompiler.plugin_api import DeviceReport, RunError, RunOptions
from dicompiler.plugin_api.utilities import CapturedOutput, one_line
from dicompiler_targets.sockets.artifact import MANIFEST, Manifest
from dicompiler_targets.sockets.runtime import __name__ as RUNTIME
from dicompiler_targets.sockets.runtime.channel import MessageChannel

RUNTIME_COMMAND = ("-P", "-m", RUNTIME)
"""Arguments of Python that run the installed runtime and no module of the working directory."""


@dataclass
class DeviceProcess:
    """The process of a device. `ClusterState` owns one for each device, and a `StartDevice` function creates it.

    Attributes:
        manifest: The device's manifest.
        popen: The process on this host; for a device on another host, the ssh process that runs the device and ends
            with its exit code. None if somebody else starts the device.
        output: The captured output of the process.
        channel: The connection to the device; None until the handshake is finished.
        address: The address at which peers reach the device.
        report: The report that the device sends at the end of the run; None until it has arrived.
        queued_messages: Number of JSON messages of the device that are queued as events.
        location: Text that follows the device's name in messages, for example " on pi@10.0.0.2".
        allowed_hosts: Hosts that the device may name as its own, in addition to the one from which it connects.
    """

    manifest: Manifest
    popen: subprocess.Popen[bytes] | None = None
    output: CapturedOutput | None = None
    channel: MessageChannel | None = None
    address: Any = None
    report: DeviceReport | None = None
    queued_messages: int = 0
    location: str = ""
    allowed_hosts: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        return str(self.manifest["device"])

    @property
    def title(self) -> str:
        """The device's name in messages."""
        return f"device {self.device!r}{self.location}"

    def get_channel(self) -> MessageChannel:
        assert self.channel is not None
        return self.channel

    def send_token(self, token: str) -> None:
        """Write the run's secret token to the process's standard input, which no other user of the host can read."""
        if self.popen is not None and self.popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # The process has ended, which `failures` will notice.
                self.popen.stdin.write(f"{token}\n".encode())
                self.popen.stdin.flush()

    def exit_code(self) -> int | None:
        """Return the exit code; None while the process runs, or if somebody else has started it."""
        return None if self.popen is None else self.popen.poll()

    def describe_exit(self) -> str | None:
        """Return a text about the exit code and the last line of output; None if `exit_code` returns None."""
        code = self.exit_code()
        if code is None:
            return None
        cause = f"ended with exit code {code}"
        if code < 0:
            cause = f"was ended by signal {-code}"
            with contextlib.suppress(ValueError):  # Some signals have no name.
                cause += f" ({signal.Signals(-code).name})"
        line = self.last_line()
        return f"its process {cause}: {line}" if line else f"its process {cause}"

    def close(self) -> None:
        """Close the connection to a process that has ended, and the pipe to its standard input."""
        if self.popen is not None and self.popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.popen.stdin.close()
        if self.channel is not None:
            self.channel.close()

    def last_line(self) -> str:
        """Return the last line of output; '' without output."""
        tail = b"" if self.output is None else self.output.read()[-4096:]
        lines = tail.decode(errors="replace").strip().splitlines()
        return one_line(lines[-1], 500) if lines else ""


StartDevice = Callable[[Manifest, Sequence[str]], DeviceProcess]
"""Starts a device's runtime: (manifest, arguments that are the same for all devices of the run) → process."""


def local_starter(directory: Path, options: RunOptions, count: int) -> StartDevice:
    """Return a function that starts devices on this host.

    `count` is the number of devices that share the host's cores equally.
    """
    keys, emulation = options.keys, options.emulation
    cores = sorted(os.sched_getaffinity(0))
    # Each emulated device uses one core, because the times of its segments are measured on one core.
    share = max(1, len(cores) // count) if emulation is None else 1

    def start(manifest: Manifest, arguments: Sequence[str]) -> DeviceProcess:
        extra = ["--threads", str(min(share, manifest["threads"]))]
        if keys is not None:
            extra += ["--keys", os.path.abspath(keys / "devices" / manifest["device"])]
        if options.pin:
            first = manifest["index"] * share
            extra += ["--cores", ",".join(str(cores[(first + i) % len(cores)]) for i in range(share))]
        if emulation is None:
            return launch_process(directory, manifest, [*arguments, *extra])
        extra += ["--min-seconds", ",".join(map(repr, emulation.min_segments_s[manifest["device"]]))]
        changes = emulation.speeds.get(manifest["device"], ())
        extra += ["--speeds", ",".join(f"{at!r}:{speed!r}" for at, speed in changes)] if changes else []
        with emulation.enter_network(manifest["device"]):
            return launch_process(directory, manifest, [*arguments, *extra])

    return start


def launch_process(directory: Path, manifest: Manifest, arguments: Sequence[str]) -> DeviceProcess:
    """Start the installed runtime for a device on this host. No code in the device's directory is run."""
    # The full path of the manifest shows in the process list which device of which artifact a process is.
    place = (directory / manifest["device"]).absolute()
    try:
        popen = subprocess.Popen(
            [sys.executable, *RUNTIME_COMMAND, "--manifest", str(place / MANIFEST), "--end-with-stdin", *arguments],
            cwd=place,
            env=_child_environment(),
            stdin=subprocess.PIPE,  # The pipe closes when this process ends. Then the device ends too.
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C interrupts only this process, which then ends the devices.
        )
    except OSError as error:
        raise RunError(f"device {manifest['device']!r}: cannot start its process: {error}") from error
    assert popen.stdout is not None
    return DeviceProcess(manifest, popen, CapturedOutput(popen.stdout))


def _child_environment() -> dict[str, str]:
    """Return this process's environment without those PYTHON… variables that change how Python behaves."""
    kept = ("PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE")
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") or k in kept}
    # The child has another working directory, so relative paths must become absolute. Without
    # PYTHONDONTWRITEBYTECODE, it would write bytecode into the artifact.
    path = [os.path.abspath(entry) for entry in variables.pop("PYTHONPATH", "").split(os.pathsep) if entry]
    return variables | {"PYTHONDONTWRITEBYTECODE": "1"} | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


def end_all(processes: Sequence[DeviceProcess]) -> None:
    """Kill the processes that still run, and wait until all have ended.

    A device that somebody else has started ends by itself when its connection is closed.
    """
    for process in processes:
        if process.popen is not None:
            process.popen.kill()
    for process in processes:
        if process.popen is not None:
            process.popen.wait()
        process.close()


def end_process(process: DeviceProcess) -> None:
    """Kill a process and wait for its end, but not longer than a second."""
    if process.popen is not None:
        process.popen.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # The process is stuck in the kernel.
            process.popen.wait(1)
    process.close()
