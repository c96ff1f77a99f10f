"""Export of a simulation as a trace file for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

The trace shows three tracks for each device: computing, sending and receiving.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dicompiler.cost.simulation_result import SimulationResult, Span

_TRACKS = ("computing", "sending", "receiving")


def dumps(simulation: SimulationResult, devices: Sequence[str]) -> str:
    """Return the content of a trace file in the Trace Event Format, with tracks in the order of `devices`."""
    events: list[dict[str, Any]] = []
    for i, device in enumerate(devices):
        events.append({"name": "process_name", "ph": "M", "pid": i, "args": {"name": device}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": i, "args": {"sort_index": i}})
        for t, track in enumerate(_TRACKS):
            events.append({"name": "thread_name", "ph": "M", "pid": i, "tid": t, "args": {"name": track}})
    place = {device: i for i, device in enumerate(devices)}
    for span in simulation.spans:
        if span.kind == "message":
            events.append(_event(span, place[span.device], 1, f"{span.name} to {span.peer}"))
            events.append(_event(span, place[span.peer], 2, f"{span.name} from {span.device}"))
        elif span.kind == "compute":
            events.append(_event(span, place[span.device], 0, span.name))
        else:
            events.append(_event(span, place[span.device], 0, f"waits for {span.peer or span.name}"))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, indent=0) + "\n"


def _event(span: Span, process: int, track: int, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "cat": span.kind,
        "ph": "X",
        "ts": round(1e6 * span.start, 3),
        "dur": round(1e6 * span.seconds, 3),
        "pid": process,
        "tid": track,
        "args": {"frame": span.frame},
    }
