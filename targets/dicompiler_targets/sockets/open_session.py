"""Opening a session of an artifact, for `Target.run`, `dicompiler deploy` and `dicompiler.connect`.

An artifact and the options of a run ⇒ devices that are started here or over ssh, or resident devices that join the run.
Needs numpy, but no ONNX package.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dicompiler.plugin_api import RunOptions, RunResult, Session
from dicompiler_targets.sockets.artifact import SocketsArtifact
from dicompiler_targets.sockets.daemon_client import DaemonConnector, ResidentCluster
from dicompiler_targets.sockets.device_process import StartDevice
from dicompiler_targets.sockets.session import ClusterSession, InFlightFrame, check_device_options


@dataclass(frozen=True)
class ClusterAccess:
    """How a session reaches its devices.

    Attributes:
        options: The options of the session.
        start: Starts a device; None: on this host.
        connector: Connects to resident devices, if there are any.
        explain_errors: A context that adds the place of the devices' logs to a RunError.
    """

    options: RunOptions
    start: StartDevice | None = None
    connector: DaemonConnector | None = None
    explain_errors: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def open(self, artifact: SocketsArtifact, deadline: float | None = None) -> ClusterSession:
        """Start the devices, or join the resident ones, and wait until they are ready."""
        return ClusterSession(artifact, self.options, self.start, self.connector, deadline)


def find_cluster(artifact: SocketsArtifact, options: RunOptions, start: StartDevice | None = None) -> ClusterAccess:
    """Return how a session reaches the artifact's devices: resident ones, those on `options.hosts`, or local ones.

    Args:
        artifact: The artifact.
        options: The options of the run.
        start: Starts a local device in a special way.

    Raises:
        UsageError: The options are invalid.
        RunError: The resident devices run another artifact.
    """
    check_device_options(options, artifact)
    # The modules for ssh are imported only when they are needed.
    if start is None and ResidentCluster.load(artifact.directory) is not None:
        from dicompiler_targets.sockets.daemon_control import make_connector

        if (connector := make_connector(artifact, options)) is not None:
            return ClusterAccess(connector.options, connector, connector)
    if options.hosts is not None:
        from dicompiler_targets.sockets.deploy import RemoteStarter

        starter = RemoteStarter(artifact, options)
        return ClusterAccess(starter.options, starter, explain_errors=starter.with_log_hint)
    return ClusterAccess(options, start)


def open_session(directory: Path, options: RunOptions) -> Session:
    """Open a session for `dicompiler.connect`.

    On other hosts, missing files are copied first. The only device of an artifact runs in this process if no option
    needs a separate one.

    Args:
        directory: The artifact's directory.
        options: The options of the session.

    Raises:
        DicompilerError: The directory is not a valid artifact.
        RunError: A device cannot be started.
        UsageError: The options are invalid.
    """
    artifact = SocketsArtifact.load(directory)
    access = find_cluster(artifact, options)
    if access.connector is None and options.hosts is not None:
        from dicompiler_targets.sockets.deploy import install

        install(directory, options)
    elif access.connector is None and len(artifact.devices) == 1 and not _needs_process(options):
        from dicompiler_targets.sockets.in_process_session import InProcessSession  # Imports onnxruntime.

        return InProcessSession(artifact, options)
    return access.open(artifact)


def _needs_process(options: RunOptions) -> bool:
    return bool(
        options.keys
        or options.listen
        or options.start_manually
        or options.start_without
        or options.pin
        or options.emulation
    )


def run_artifact(
    directory: Path,
    frames: Sequence[Mapping[str, NDArray[Any]]],
    options: RunOptions,
    start: StartDevice | None = None,
) -> RunResult:
    """Run an artifact on a sequence of frames: see Target.run.

    Args:
        directory: The artifact's directory.
        frames: The inputs of each frame.
        options: The options of the run.
        start: Starts a local device in a special way.

    Returns:
        Outputs, times, and the reports of the devices.
    """
    artifact = SocketsArtifact.load(directory)
    access = find_cluster(artifact, options, start)
    for inputs in frames[:1] if all(inputs is frames[0] for inputs in frames) else frames:
        artifact.check_inputs(inputs)
    outputs: list[dict[str, dict[str, Any]]] = []
    finished: list[InFlightFrame] = []
    with access.explain_errors(), access.open(artifact, time.monotonic() + options.timeout_s) as session:
        for frame, frame_outputs in session.stream_frames(frames):
            finished.append(frame)
            if options.kept_frames is None or len(outputs) < options.kept_frames:
                outputs.append(frame_outputs)
    return RunResult(
        tuple(map(artifact.first_outputs, outputs)),
        session.reports,
        tuple(outputs),
        tuple(frame.finished_at - frame.sent_at for frame in finished),
        finished[-1].finished_at - finished[0].sent_at if finished else 0.0,
        tuple(session.events),
        tuple(frame.queue_wait_s for frame in finished),
        access.connector is not None and access.connector.is_remote,
    )
