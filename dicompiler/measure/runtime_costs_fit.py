"""What runtimes take for messages, calls and copies, by what frames of small programs take.

It lies beside profile_run.py in a package, and needs what those programs' players need.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PLAY_COUNTS, PLAY_S, MAX_PLAY_RATIO = (2, 3), 0.25, 1.05
"""How often a runtime's programs are played, at least and at most, for how many seconds each, and how far the two best
plays of each may be apart for no further one."""


class PlayError(OSError):
    """Why a program did not run, in one line."""


def measure_runtimes(place: Path, entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Target → the costs of its runtime, whose programs lie in `place`. What cannot be measured is said, and left
    out."""
    found = {}
    for entry in entries:
        try:
            times, send_s = play_programs(place / entry["target"], list(entry["programs"]))
            found[entry["target"]] = fit_costs(entry, times, send_s)
        except (OSError, ValueError) as error:
            why = " ".join(str(error).split())
            print(f"profile_run.py: runtime of {entry['target']}: it is not measured: {why}", file=sys.stderr)
    return found


def play_programs(place: Path, names: list[str]) -> tuple[dict[str, float], float | None]:
    """The shortest frame of each program, and the least that handing a message over took, where that is told: in s."""
    times: dict[str, list[float]] = {name: [] for name in names}
    sends = []
    for round_ in range(PLAY_COUNTS[1]):
        if round_ >= PLAY_COUNTS[0] and all(
            sorted(found)[1] <= MAX_PLAY_RATIO * min(found) for found in times.values()
        ):
            break
        command = [sys.executable, "-B", str(place / "play.py"), str(PLAY_S), *names]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PlayError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        for name, line in zip(names, done.stdout.splitlines(), strict=True):
            told = json.loads(line)
            times[name].append(min(told["frames"]))
            if name == "messages" and told["send"] is not None:
                sends.append(told["send"])
    return {name: min(found) for name, found in times.items()}, min(sends, default=None)


def fit_costs(entry: dict[str, Any], times: dict[str, float], send_s: float | None) -> dict[str, float]:
    """By what programs with more of them take longer; waking and receiving are parted as the target's own figures.
    Bytes, and copies, which are left out then, only where programs with many of them were played."""
    programs: dict[str, dict[str, int]] = entry["programs"]

    def each(what: str, more: str, less: str) -> float:
        return (times[more] - times[less]) / (programs[more][what] - programs[less][what])

    def size(name: str) -> float:
        return programs[name]["bytes"] / programs[name]["messages"]

    small, byte, copies = each("messages", "messages", "calls"), 0.0, dict[str, float]()
    if "messages-large" in programs:
        large = each("messages", "messages-large", "calls-large")
        byte = max(0.0, (large - small) / (size("messages-large") - size("messages"))) / 2
    if "copies-huge" in programs:
        copies["per_copied_byte"] = max(0.0, each("copied", "copies-huge", "one-huge"))
        nbytes, nodes = (programs["copies-small"][what] - programs["one-small"][what] for what in ("copied", "nodes"))
        copies["per_copy"] = (
            max(0.0, times["copies-small"] - times["one-small"] - nbytes * copies["per_copied_byte"]) / nodes
        )
    both = max(0.0, small - 2 * byte * size("messages"))
    send = both / 3 if send_s is None else min(both, max(0.0, send_s - byte * size("messages")))
    call = max(0.0, each("calls", "calls", "one"))
    waking = entry["waking"] * (both - send)
    found = {"latency": waking, "send": send, "receive": both - send - waking, "per_byte": byte, "gap": 0.0}
    return {**found, "call": call, **copies, "header_share": entry["header_share"]}
