"""Costs of a target's runtime for messages, calls and copies, from the frame times of its benchmark programs.

Profile packages contain a copy of this module, so it needs Python only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN_COUNTS = (2, 3)
"""Minimum and maximum number of times that each benchmark program is run, if `repeat` does not limit them."""
RUN_S = 0.25
"""Seconds for which a benchmark program is run each time."""
MAX_RUN_RATIO = 1.05
"""Benchmark programs are run once more if the two shortest times of a program differ by more than this factor."""


MESSAGE_COSTS = ("send", "receive", "latency")
"""Costs into which the time of a message is split. If one of them is 0, the split is wrong, and so are the others."""
MAX_FITS = 3
"""Maximum number of measurements of a runtime. It is measured again if a cost is 0, because no real cost is 0."""


class BenchmarkProgramError(OSError):
    """A benchmark program did not run; the message is one line."""


def measure_runtimes(
    directory: Path, entries: list[dict[str, Any]], repeat: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the runtime costs by target, and the reasons why costs could not be measured by target.

    Args:
        directory: Directory with a subdirectory of benchmark programs for each target.
        entries: The key `runtimes` of tasks.json.
        repeat: Maximum number of times that each program is run in one measurement.
    """
    costs: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for entry in entries:
        try:
            found = _measure_runtime(directory / entry["target"], entry, repeat)
            reason = describe_zero_costs(found)
            if measured := omit_zero_costs(found):
                costs[entry["target"]] = measured
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
        if reason:
            reasons[entry["target"]] = reason
            print(f"profile_run.py: runtime of {entry['target']}: not measured: {reason}", file=sys.stderr)
    return costs, reasons


def _measure_runtime(directory: Path, entry: dict[str, Any], repeat: int) -> dict[str, float]:
    """Return the costs of one target's runtime in seconds, by name; 0 if other load on the host hides a cost."""
    costs: dict[str, float] = {}
    shortest: dict[str, float] = {}
    sends: list[float] = []
    for _ in range(MAX_FITS):
        times, send_s = run_programs(directory, list(entry["programs"]), repeat)
        # Other load on the host only makes frames longer, so the shortest times of all measurements are used.
        shortest = {name: min(frame_s, shortest.get(name, frame_s)) for name, frame_s in times.items()}
        sends += [] if send_s is None else [send_s]
        costs = fit_costs(entry, shortest, min(sends, default=None))
        if not find_zero_costs(costs):
            break
    return costs


def find_zero_costs(costs: dict[str, float]) -> list[str]:
    """Return the names of the costs that were measured as 0, and of those that are wrong for this reason."""
    # `header_share` is stated and not measured, so it may be 0.
    names = [name for name, seconds in costs.items() if name != "header_share" and not seconds]
    is_split_wrong = any(name in MESSAGE_COSTS for name in names)
    return [name for name in costs if name in names or (is_split_wrong and name in MESSAGE_COSTS)]


def omit_zero_costs(costs: dict[str, float]) -> dict[str, float]:
    """Return the costs without those that `find_zero_costs` returns; empty if no measured cost is left."""
    zero = find_zero_costs(costs)
    measured = {name: seconds for name, seconds in costs.items() if name not in zero}
    return measured if set(measured) - {"header_share"} else {}


def describe_zero_costs(costs: dict[str, float]) -> str:
    """Return a message that costs were measured as 0, with the remedy; '' if there are none."""
    names = ", ".join(find_zero_costs(costs))
    if not names:
        return ""
    return f"the host was busy, so that costs were measured as 0 s ({names}): measure again on an idle host"


def run_programs(directory: Path, names: list[str], repeat: int) -> tuple[dict[str, float], float | None]:
    """Run benchmark programs; return the shortest frame time of each one, and the time to send a message, in seconds.

    The time to send is None if the target does not report it.

    Args:
        directory: Directory with the programs and the target's `play.py`, which runs them.
        names: Names of the programs.
        repeat: Maximum number of times that each program is run.
    """
    times: dict[str, list[float]] = {name: [] for name in names}
    sends = []
    for count in range(min(RUN_COUNTS[1], repeat)):
        is_stable = count > 1 and all(
            sorted(frames_s)[1] <= MAX_RUN_RATIO * min(frames_s) for frames_s in times.values()
        )
        if count >= RUN_COUNTS[0] and is_stable:
            break
        command = [sys.executable, "-B", str(directory / "play.py"), str(RUN_S), *names]
        result = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
        if result.returncode:
            raise BenchmarkProgramError((result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1])
        for name, line in zip(names, result.stdout.splitlines(), strict=True):
            report = json.loads(line)
            times[name].append(min(report["frames"]))
            if name == "messages" and report["send"] is not None:
                sends.append(report["send"])
    return {name: min(frames_s) for name, frames_s in times.items()}, min(sends, default=None)


def fit_costs(entry: dict[str, Any], times: dict[str, float], send_s: float | None) -> dict[str, float]:
    """Return the runtime costs, from the differences between the times of two programs.

    A cost is missing if no program measures it.

    Args:
        entry: The target's entry in the key `runtimes` of tasks.json. Its key `waking` is the fraction of the
            receiver's time for a message in which the receiver wakes up.
        times: Seconds of a frame of each program, by its name.
        send_s: Seconds to pass a message to the operating system; None for a third of a message's time.
    """
    programs: dict[str, dict[str, int]] = entry["programs"]

    def cost_of_one(quantity: str, more: str, less: str) -> float:
        return (times[more] - times[less]) / (programs[more][quantity] - programs[less][quantity])

    def message_bytes(name: str) -> float:
        return programs[name]["bytes"] / programs[name]["messages"]

    message_s, per_byte, others = cost_of_one("messages", "messages", "calls"), 0.0, dict[str, float]()
    if "messages-large" in programs:
        large_message_s = cost_of_one("messages", "messages-large", "calls-large")
        extra_bytes = message_bytes("messages-large") - message_bytes("messages")
        others["per_byte"] = per_byte = max(0.0, (large_message_s - message_s) / extra_bytes) / 2
    if "copies-huge" in programs:
        others["per_copied_byte"] = max(0.0, cost_of_one("copied", "copies-huge", "one-huge"))
        small, none = programs["copies-small"], programs["one-small"]
        copies_s = times["copies-small"] - times["one-small"]
        copies_s -= (small["copied"] - none["copied"]) * others["per_copied_byte"]
        others["per_copy"] = max(0.0, copies_s) / (small["nodes"] - none["nodes"])
    fixed_s = max(0.0, message_s - 2 * per_byte * message_bytes("messages"))
    send = fixed_s / 3
    if send_s is not None:
        send = min(fixed_s, max(0.0, send_s - per_byte * message_bytes("messages")))
    call = max(0.0, cost_of_one("calls", "calls", "one"))
    latency = entry["waking"] * (fixed_s - send)
    if entry["waking"]:
        others["latency"] = latency
    costs = {"send": send, "receive": fixed_s - send - latency, "call": call, **others}
    return {**costs, "header_share": entry["header_share"]}
