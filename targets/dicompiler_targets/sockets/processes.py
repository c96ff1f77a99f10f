"""One device's process on this host: how it is started, what it last said, how it ended.

In: an artifact's directory and where the coordinator listens. Out: a running process that nothing outlives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dicompiler.errors import RunError
from dicompiler.target import DeviceReport
from dicompiler_targets.sockets.runtime.wire import Channel, ProtocolError

Manifest = Mapping[str, Any]


@dataclass
class Process:
    """A device's process, its connection and address once it has greeted, and what was heard of it.

    expected: the outputs that it delivers, as the manifest has them, by index; outputs: those of this frame so far.
    """

    manifest: Manifest
    popen: subprocess.Popen[bytes]
    log: IO[bytes]
    expected: Mapping[int, Mapping[str, Any]]
    outputs: dict[int, Any] = field(default_factory=dict)
    channel: Channel | None = None
    address: Any = None
    report: DeviceReport | None = None

    @property
    def device(self) -> str:
        return str(self.manifest["device"])

    def connection(self) -> Channel:
        """The channel of a device that has greeted."""
        assert self.channel is not None
        return self.channel

    def ending(self) -> str | None:
        """How the process ended and the last line that it wrote, or None while it runs."""
        code = self.popen.poll()
        if code is None:
            return None
        if code >= 0:
            return f"its process ended with exit code {code}{self._last_words()}"
        with contextlib.suppress(ValueError):  # a signal without a name
            return f"its process was ended by signal {-code} ({signal.Signals(-code).name}){self._last_words()}"
        return f"its process was ended by signal {-code}{self._last_words()}"

    def _last_words(self) -> str:
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - 4096))
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1].strip()[:500]}" if lines else ""


def start(directory: Path, manifest: Manifest, arguments: Sequence[str]) -> Process:
    """Starts the device's runtime in its directory. RunError if the system refuses."""
    log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
    try:
        # A session of its own: an interrupt from the terminal is for our process, which then ends the devices.
        popen = subprocess.Popen(
            [sys.executable, "-m", "runtime", *arguments],
            cwd=directory / manifest["device"],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    except OSError as error:
        log.close()
        raise RunError(f"device {manifest['device']!r}: its process cannot be started: {error}") from error
    return Process(manifest, popen, log, {value["index"]: value for value in manifest["outputs"]})


def _environment() -> dict[str, str]:
    """Ours without what changes how Python runs, other than where it finds modules."""
    kept = ("PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE")
    found = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") or k in kept}
    # The working directory is another one there; and nothing may be written into the artifact.
    path = [os.path.abspath(entry) for entry in found.pop("PYTHONPATH", "").split(os.pathsep) if entry]
    return found | {"PYTHONDONTWRITEBYTECODE": "1"} | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


def end(processes: Sequence[Process]) -> None:
    """Ends those of the processes that still run, waits for all, and closes what belongs to them."""
    for process in processes:
        process.popen.kill()
    for process in processes:
        process.popen.wait()
        process.log.close()
        if process.channel is not None:
            process.channel.close()


def read_report(device: str, report: Mapping[str, Any]) -> DeviceReport:
    """The report that a device sent. ProtocolError if it is not as agreed."""
    try:
        return DeviceReport(
            device,
            float(report["compute_s"]),
            float(report["wait_s"]),
            float(report["send_s"]),
            {int(index): int(count) for index, count in report["sent"].items()},
            tuple(map(float, report["segments"])),
            int(report["memory_peak"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"the report is not as agreed: {error!r}") from None
