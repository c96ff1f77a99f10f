"""Runs an artifact for a number of frames, on this host or others: opens a session, streams them through it, closes it.

In: an artifact's directory, frames. Out: outputs, times, and what each device reported.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dicompiler.plugin_api import RunOptions, RunResult
from dicompiler_targets.sockets.artifact import SocketsArtifact
from dicompiler_targets.sockets.daemon_control import make_connector
from dicompiler_targets.sockets.deploy import RemoteStarter
from dicompiler_targets.sockets.device_process import StartDevice
from dicompiler_targets.sockets.session import ClusterSession, InFlightFrame, check_device_options


def run_artifact(
    directory: Path,
    frames: Sequence[Mapping[str, NDArray[Any]]],
    options: RunOptions,
    start: StartDevice | None = None,
) -> RunResult:
    """Runs the artifact in `directory` for `frames`: see Target.run. start: how its devices are started on
    this host."""
    artifact = SocketsArtifact.load(directory)
    check_device_options(options, artifact)
    if start is None and (calls := make_connector(artifact, options)) is not None:
        return replace(run_session(artifact, frames, calls.options, calls), is_remote=calls.is_remote)
    if options.hosts is not None:
        remote = RemoteStarter(artifact, options)
        with remote.with_log_hint():
            return run_session(artifact, frames, remote.options, remote)
    return run_session(artifact, frames, options, start)


def run_session(
    artifact: SocketsArtifact,
    frames: Sequence[Mapping[str, NDArray[Any]]],
    options: RunOptions,
    start: StartDevice | None,
) -> RunResult:
    for frame in frames[:1] if all(frame is frames[0] for frame in frames) else frames:
        artifact.check_inputs(frame)
    kept: list[dict[str, dict[str, Any]]] = []
    flights: list[InFlightFrame] = []
    with ClusterSession(artifact, options, start, time.monotonic() + options.timeout_s) as session:
        for flight, delivered in session.stream_frames(frames):
            flights.append(flight)
            if options.kept_frames is None or len(kept) < options.kept_frames:
                kept.append(delivered)
    return RunResult(
        tuple(artifact.first_outputs(delivered) for delivered in kept),
        session.reports,
        tuple(kept),
        tuple(flight.end_s - flight.start_s for flight in flights),
        flights[-1].end_s - flights[0].start_s if flights else 0.0,
        tuple(session.events),
        tuple(flight.waited_s for flight in flights),
    )
