"""Opening a session of an artifact, for `Target.run`, `dicompiler deploy` and `dicompiler.connect`.

The devices of a session are new processes on this host or on other hosts, or resident devices (running daemons). The
module imports neither onnx nor onnxruntime, so that sessions start fast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dicompiler.plugin_api import RunError, RunOptions, RunResult, Session
from dicompiler.plugin_api.artifacts import describe_unfinished_run
from dicompiler_targets.sockets.artifact import SocketsArtifact
from dicompiler_targets.sockets.daemon_client import DaemonConnector, ResidentCluster
from dicompiler_targets.sockets.device_connections import StartDevice
from dicompiler_targets.sockets.session import ClusterSession, InFlightFrame, check_device_options, default_heartbeat_s


@dataclass(frozen=True)
class ClusterAccess:
    """The settings by which a session starts its devices or connects to them. `find_cluster` creates it.

    Attributes:
        options: The options of the session.
        start: Function that starts a device; None to start devices on this host.
        connector: Connects to resident devices (running daemons); None if the session starts new processes.
        explain_errors: Returns a context manager that appends the directory of the devices' logs to a RunError.
    """

    options: RunOptions
    start: StartDevice | None = None
    connector: DaemonConnector | None = None
    explain_errors: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


def find_cluster(artifact: SocketsArtifact, options: RunOptions, start: StartDevice | None = None) -> ClusterAccess:
    """Return how a session gets its devices: resident ones, new ones on `options.hosts`, or new ones on this host.

    Resident devices run already, and are preferred. If `start` is given, it starts the devices on this host instead.

    Raises:
        UsageError: The options are invalid.
        RunError: The resident devices run another artifact.
    """
    check_device_options(options, artifact)
    options = options.with_heartbeat(default_heartbeat_s(artifact))
    # `daemon_control` and `deploy` use ssh. They are imported only if needed, so that local sessions start faster.
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

    If the options have a hosts file, files that the hosts lack are first copied there. A single device runs in this
    process, unless an option needs a separate one.

    Raises:
        DicompilerError: The artifact is invalid.
        RunError: A device cannot be started.
        UsageError: The options are invalid.
    """
    artifact = SocketsArtifact.load(directory)
    access = find_cluster(artifact, options)
    if access.connector is None and options.hosts is not None:
        from dicompiler_targets.sockets.deploy import install

        install(directory, options)
    elif access.connector is None and len(artifact.devices) == 1 and not _needs_process(options):
        # The module is imported only here, because it loads onnxruntime, which takes long.
        from dicompiler_targets.sockets.in_process_session import InProcessSession

        return InProcessSession(artifact, access.options)
    return ClusterSession(artifact, access.options, access.start, access.connector)


def _needs_process(options: RunOptions) -> bool:
    o = options
    return bool(o.keys or o.listen or o.start_manually or o.start_without or o.pin or o.emulation)


def total_seconds(frames: Sequence[InFlightFrame]) -> float:
    """Return the seconds from sending the first of the finished frames to having the outputs of all; 0 without frames.

    The newest frame may have overtaken older ones.
    """
    return max(frame.finished_at for frame in frames) - frames[0].sent_at if frames else 0.0


def run_artifact(
    directory: Path,
    frames: Sequence[Mapping[str, NDArray[Any]]],
    options: RunOptions,
    start: StartDevice | None = None,
) -> RunResult:
    """Run an artifact on a sequence of frames, for `Target.run`.

    If `start` is given, it starts the devices on this host.
    """
    artifact = SocketsArtifact.load(directory)
    access = find_cluster(artifact, options, start)
    for inputs in frames[:1] if all(inputs is frames[0] for inputs in frames) else frames:
        artifact.check_inputs(inputs)
    outputs: list[dict[str, dict[str, Any]]] = []
    finished: list[InFlightFrame] = []
    session_options = replace(access.options, deadline=options.deadline_from_now())
    try:
        with (
            access.explain_errors(),
            ClusterSession(artifact, session_options, access.start, access.connector) as session,
        ):
            for frame, frame_outputs in session.stream_frames(frames):
                finished.append(frame)
                if options.kept_frames is None or len(outputs) < options.kept_frames:
                    outputs.append(frame_outputs)
    except RunError as error:
        if cause := describe_unfinished_run(session_options, len(frames), [frame.finished_at for frame in finished]):
            raise RunError(f"{cause}; then: {error}") from error
        raise
    return RunResult(
        tuple(map(artifact.merge_outputs, outputs)),
        session.reports,
        tuple(outputs),
        tuple(frame.finished_at - frame.sent_at for frame in finished),
        total_seconds(finished),
        tuple(session.events),
        tuple(frame.queue_wait_s for frame in finished),
        access.connector is not None and access.connector.cluster.is_remote,
    )
