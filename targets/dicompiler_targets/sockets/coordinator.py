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
from dicompiler_targets.sockets.artifact import Artifact
from dicompiler_targets.sockets.deploy import Remote
from dicompiler_targets.sockets.keeping import joined
from dicompiler_targets.sockets.processes import Start
from dicompiler_targets.sockets.session import Flight, Session, check_elsewhere


def run(
    directory: Path,
    frames: Sequence[Mapping[str, NDArray[Any]]],
    options: RunOptions,
    start: Start | None = None,
) -> RunResult:
    """Runs the artifact in `directory` for `frames`: see Target.run. start: how its devices are started on
    this host."""
    artifact = Artifact.load(directory)
    check_elsewhere(options, artifact)
    if start is None and (calls := joined(artifact, options)) is not None:
        return replace(_run(artifact, frames, calls.options, calls), apart=calls.apart)
    if options.hosts is not None:
        remote = Remote(artifact, options)
        with remote.explained():
            return _run(artifact, frames, remote.options, remote)
    return _run(artifact, frames, options, start)


def _run(
    artifact: Artifact,
    frames: Sequence[Mapping[str, NDArray[Any]]],
    options: RunOptions,
    start: Start | None,
) -> RunResult:
    for frame in frames[:1] if all(frame is frames[0] for frame in frames) else frames:
        artifact.arrays(frame)
    kept: list[dict[str, dict[str, Any]]] = []
    flights: list[Flight] = []
    with Session(artifact, options, start, time.monotonic() + options.timeout_s) as session:
        for flight, delivered in session.flights(frames):
            flights.append(flight)
            if options.keep is None or len(kept) < options.keep:
                kept.append(delivered)
    return RunResult(
        tuple(artifact.first(delivered) for delivered in kept),
        session.reports,
        tuple(kept),
        tuple(flight.end_s - flight.start_s for flight in flights),
        flights[-1].end_s - flights[0].start_s if flights else 0.0,
        tuple(session.events),
        tuple(flight.waited_s for flight in flights),
    )
