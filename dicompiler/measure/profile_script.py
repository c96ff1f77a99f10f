"""Times the pieces of a network's layers and runtimes on this device, or the link to another host, for a profile.

    python3 profile_run.py -o PROFILE.json                           times what is in pieces/, as tasks.json says
    python3 profile_run.py --serve 7000                              on one host, then on another:
    python3 profile_run.py -o PROFILE.json --connect HOST:7000       adds the link between both to PROFILE.json

It needs Python, numpy and onnxruntime, nothing else (links, which profile_links.py measures: Python alone);
profile_runtimes.py plays the runtimes. Large weights are seeded random numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

# onnxruntime 1.32 keeps a number of the device and sends what it is used for, unless told before it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
SCRIPT_DIRECTORY = Path(__file__).resolve().parent
PROFILE_FORMAT = "dicompiler.profile/1"
TASKS_FORMAT = "dicompiler.profile-tasks/1"
OPTIMIZATION, ORT_OPTIMIZATION_LEVEL = "all", "ORT_ENABLE_ALL"
"""What the targets run at by default, and onnxruntime's name for it."""
MIN_TIMING_S = 0.002
"""Seconds that one timing takes at least: short pieces run several times in it."""
MAX_MEDIAN_RATIO, MAX_ROUNDS = 1.1, 6
"""How many times the shortest time a median may be before a piece is timed again, and how often it is at most."""
PASS_COUNT = 2
"""How often all pieces, and the network, are timed, one after another: a host that others share, or that gets hot, is
slow for a while; the quickest counts."""
NETWORK_TIMING_S, RUNS_PER_TURN = 1.0, 5
"""For how many seconds the whole network is timed, and what pieces take longer in a frame, of so many runs in a turn: a
host that others share is slow for a while at a time."""

TimeRange = tuple[float, float, float]
"""Median, shortest and longest time."""


class ProfileError(Exception):
    """Why there is no profile, in one line."""


def main() -> int:
    """The command line. 0: the profile was written, or the other end was served."""
    options = _parse_options()
    try:
        if options.serve is not None:
            link_module().serve_measurement(*link_module().parse_address(options.serve), options.name)
        elif options.connect is not None:
            add_link(options)
        else:
            save_profile(options.output, measure_profile(options))
    except (ProfileError, OSError, ValueError) as error:
        print(f"profile_run.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure a network's layers on this device, or a link.")
    add = parser.add_argument
    add("-o", "--output", type=Path, default=Path("PROFILE.json"), help="the profile (default: PROFILE.json)")
    add("--device", help="the platform's devices that it holds for (a name or a pattern; default: this host)")
    add("--threads", type=int, default=available_processors(), help="threads of a piece (default: all processors)")
    add("--repeat", type=int, default=7, help="how often each piece is timed (default: 7)")
    add("--serve", metavar="[HOST:]PORT", help="answer one measurement of a link and end")
    add("--connect", metavar="HOST:PORT", help="measure the link to the host that serves there")
    add("--name", default=platform.node(), help="this host's name in links (default: its own)")
    add("--megabytes", type=int, default=16, help="how much is sent at once to measure a link (default: 16)")
    add("--lines", action="store_true", help="print a line for each layer that is begun, for programs")
    options = parser.parse_args()
    for name, most in (("threads", 1024), ("repeat", 100000), ("megabytes", 64)):
        if not 1 <= getattr(options, name) <= most:
            parser.error(f"--{name} must be 1 to {most}")
    return options


def available_processors() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_tasks() -> dict[str, Any]:
    """What to time: tasks.json beside this script."""
    path = SCRIPT_DIRECTORY / "tasks.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if found.get("format") != TASKS_FORMAT:
        raise ProfileError(f"{path}: format {found.get('format')!r}, this script reads {TASKS_FORMAT!r}")
    return found


def empty_profile(options: argparse.Namespace) -> dict[str, Any]:
    """A profile without measurements."""
    known = load_tasks()
    return {
        "format": PROFILE_FORMAT,
        "network": known["network"],
        "device": options.device or known["device"] or platform.node() or "*",
        "host": {"system": platform.system(), "machine": platform.machine(), "processors": available_processors()},
        "threads": options.threads,
        "repeat": options.repeat,
        "optimization": OPTIMIZATION,
        "call_s": 0.0,
        "layers": [],
        "unmeasured": known["unmeasured"],
        "links": [],
    }


def save_profile(path: Path, profile: dict[str, Any]) -> None:
    """Writes the profile, whole or not at all."""
    stage = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        stage.write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
        os.replace(stage, path)
    finally:
        stage.unlink(missing_ok=True)


# -- layers


def measure_profile(options: argparse.Namespace) -> dict[str, Any]:
    """The profile of all pieces; links that the file had are kept."""
    import numpy
    import onnxruntime

    known, profile = load_tasks(), empty_profile(options)
    profile["host"] |= {"onnxruntime": onnxruntime.__version__, "numpy": numpy.__version__}
    if options.output.exists():
        profile["links"] = json.loads(options.output.read_text(encoding="utf-8")).get("links", [])
    profile["call_s"] = time_piece(known["call"], options)[0]
    found: dict[str, list[TimeRange]] = {}
    network: list[dict[str, float]] = []
    for number in range(1, PASS_COUNT + 1):
        why = _time_pieces(known, options, found, f"{number}/{PASS_COUNT} ")
        network.append(_time_network(known, options))
    for layer in known["layers"]:
        if (reason := why.get(layer["names"][0])) is not None:
            profile["unmeasured"] += [{"name": name, "reason": reason} for name in layer["names"]]
        else:
            measured = [_measurement_entry(task, merge_passes(found[task["file"]])) for task in layer["measurements"]]
            profile["layers"].append({**layer, "measurements": measured})
    return profile | fastest_network_pass(network) | {"runtime": measure_runtimes(known["runtimes"])}


def _time_pieces(
    known: dict[str, Any], options: argparse.Namespace, found: dict[str, list[TimeRange]], title: str
) -> dict[str, str]:
    """Times all pieces once, into what was found of each by its file; why layers cannot be measured, by their first
    name."""
    refused: dict[str, str] = {}
    for number, layer in enumerate(known["layers"], 1):
        name = layer["names"][0]
        text = f"{title}{number}/{len(known['layers'])} {name}"
        if options.lines:
            print(text, flush=True)
        elif sys.stderr.isatty():
            print(f"\r{text:60.60}", end="", file=sys.stderr)
        try:
            for task in layer["measurements"]:
                found.setdefault(task["file"], []).append(time_piece(task, options))
        except Exception as error:  # onnxruntime's errors share no other base
            refused[name] = f"onnxruntime cannot run it alone: {' '.join(str(error).split())[:300]}"
    if sys.stderr.isatty() and not options.lines:
        print(file=sys.stderr)
    return refused


def merge_passes(found: list[TimeRange]) -> TimeRange:
    """The least median of all passes, and the extremes of all."""
    return min(found)[0], min(low for _, low, _ in found), max(high for *_, high in found)


def _time_network(known: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """What is measured of the whole network; nothing where it is not there or does not run so, for whatever reason."""
    with suppress(Exception):  # onnxruntime's errors share no other base; the network's layers are named with theirs
        return time_network_and_call(known["whole"], known["call"], options) | measure_cold_costs(
            known["layers"], known["call"], options
        )
    return {}


def fastest_network_pass(passes: list[dict[str, float]]) -> dict[str, float]:
    """What the pass found in which the whole network was the quickest, of those in which it ran."""
    return min((one for one in passes if one), key=lambda one: one["whole_s"], default={})


def _measurement_entry(task: dict[str, Any], found: TimeRange) -> dict[str, Any]:
    median, low, high = found
    return {key: task[key] for key in ("cut", "size", "flops", "moved")} | {"seconds": median, "low": low, "high": high}


def time_piece(task: dict[str, Any], options: argparse.Namespace) -> TimeRange:
    """Of a piece, after a run that does not count. Where the median is far from the shortest time the host was busy
    with something else: it is timed again."""
    piece = open_piece(task, options.threads)
    times = max(1, min(1000, round(MIN_TIMING_S / max(1e-7, run_piece(piece, 2)))))
    rounds: list[TimeRange] = []
    while not rounds or (
        rounds[-1][0] > MAX_MEDIAN_RATIO * min(low for _, low, _ in rounds) and len(rounds) < MAX_ROUNDS
    ):
        found = sorted(run_piece(piece, times) for _ in range(options.repeat))
        rounds.append((statistics.median(found), found[0], found[-1]))
    return min(rounds)[0], min(low for _, low, _ in rounds), min(rounds)[2]


def time_network_and_call(whole: dict[str, Any], call: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """Seconds of the whole network and of a call that computes nothing, in quick turns of both: what is subtracted from
    the other must not come from a moment when the host was slower."""
    pieces = [open_piece(task, options.threads) for task in (whole, call)]
    found = lower_quartiles(
        lambda: [statistics.median([run_piece(piece) for _ in range(RUNS_PER_TURN + 1)][1:]) for piece in pieces]
    )
    return dict(zip(("whole_s", "call_s"), found, strict=True))


def lower_quartiles(turn: Callable[[], list[float]]) -> list[float]:
    """What turns find in LONG_S and at least three of them, each number by itself: the lower quartile."""
    found, end = [turn() for _ in range(3)], time.perf_counter() + NETWORK_TIMING_S
    while time.perf_counter() < end:
        found.append(turn())
    return [sorted(each)[len(found) // 4] for each in zip(*found, strict=True)]


def measure_cold_costs(
    layers: list[dict[str, Any]], call: dict[str, Any], options: argparse.Namespace
) -> dict[str, float]:
    """What a piece takes longer in a frame, where the device has computed others since, than again and again: seconds
    for each byte of its weights and of what else it reads, which come from memory then, and beside those. Measured of a
    piece of each layer, one after another: they leave in caches what a device's share of the network does."""
    tasks = [median_piece(layer["measurements"]) for layer in layers for _ in layer["names"]]
    pieces = [open_piece(task, options.threads) for task in (*tasks, call)]

    def cold() -> list[float]:
        rounds = [[run_piece(piece) for piece in pieces] for _ in range(RUNS_PER_TURN + 1)]
        return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]

    def warm() -> list[float]:
        return [statistics.median([run_piece(piece) for _ in range(RUNS_PER_TURN + 1)][1:]) for piece in pieces]

    longer = [max(0.0, c - w) for c, w in zip(lower_quartiles(cold), lower_quartiles(warm), strict=True)]
    rows = [(1.0, float(task["weights"]), float(task["read"])) for task in tasks]
    each, weight, read = fit_nonnegative(rows, [more - longer[-1] for more in longer[:-1]])
    return {"weight_s": weight, "read_s": read, "cold_s": each}


def median_piece(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """The piece in the middle of those that read all of the layer's weights, by the bytes that they move."""
    own = sorted((one for one in pieces if one["weights"] == pieces[0]["weights"]), key=lambda one: one["moved"])
    return own[len(own) // 2]


def fit_nonnegative(rows: list[tuple[float, float, float]], wanted: list[float]) -> list[float]:
    """The coefficients, none below 0, with which sums over rows come nearest to what is wanted, by least squares: the
    best of all choices of which are 0."""
    import numpy

    matrix, goal = numpy.array(rows), numpy.array(wanted)
    found = []
    for chosen in itertools.product((False, True), repeat=matrix.shape[1]):
        own = numpy.zeros(matrix.shape[1])
        columns = matrix[:, list(chosen)]
        scale = numpy.maximum(columns.max(axis=0, initial=0.0), 1e-300)
        own[list(chosen)] = numpy.linalg.lstsq(columns / scale, goal, rcond=None)[0] / scale
        if own.min() >= 0:
            found.append((float(numpy.sum((matrix @ own - goal) ** 2)), own.tolist()))
    return list(min(found)[1])


def run_piece(piece: tuple[Any, dict[str, Any], list[str], Any], times: int = 1) -> float:
    """Seconds of a run of what `prepare` made, of so many runs one after another."""
    session, feeds, outputs, _ = piece
    start = time.perf_counter()
    for _ in range(times):
        session.run_with_ort_values(outputs, feeds)
    return (time.perf_counter() - start) / times


def open_piece(task: dict[str, Any], threads: int) -> tuple[Any, dict[str, Any], list[str], Any]:
    """A session, its inputs, the names of its outputs, and what must stay alive: it runs as on a device's runtime."""
    import numpy
    import onnxruntime
    import profile_sessions  # type: ignore[import-not-found]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, ORT_OPTIMIZATION_LEVEL)
    random = numpy.random.default_rng(0)
    constants = {value["name"]: random_tensor(value, random) for value in task["constants"]}
    if constants:
        options.add_external_initializers(list(constants), list(constants.values()))
    session = profile_sessions.create_session((SCRIPT_DIRECTORY / task["file"]).read_bytes(), options)
    feeds = {value["name"]: random_tensor(value, random) for value in task["inputs"]}
    return session, feeds, [value.name for value in session.get_outputs()], constants


def random_tensor(value: dict[str, Any], random: Any) -> Any:
    """Seeded numbers of the type and shape: floats about 0 (as weights are), bytes of all values, zeros for the rest
    (indices, which must stay in range; types that numpy lacks)."""
    import numpy
    import onnxruntime

    shape, name = value["shape"], value["dtype"]
    kinds = {"FLOAT": "float32", "DOUBLE": "float64", "FLOAT16": "float16"}
    if name in kinds:
        array = (0.1 * random.standard_normal(shape, "float32")).astype(kinds[name])
    elif name in ("INT8", "UINT8"):
        array = random.integers(0, 256, shape, "uint8").view(name.lower())
    elif name in ("BOOL", "INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64"):
        array = numpy.zeros(shape, name.lower())
    else:
        array = numpy.zeros(shape, "uint16" if name == "BFLOAT16" else "uint8")
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, value["number"])
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


# -- runtimes and links


def measure_runtimes(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Target → the costs of its runtime here."""
    import profile_runtimes  # type: ignore[import-not-found]

    found: dict[str, Any] = profile_runtimes.measure_runtimes(SCRIPT_DIRECTORY / "runtime", entries)
    return found


def link_module() -> Any:
    """What measures them: the module beside this script, which nothing else needs."""
    import profile_links  # type: ignore[import-not-found]

    return profile_links


def add_link(options: argparse.Namespace) -> None:
    """Measures the link and puts it into the profile, in place of an earlier one between the same hosts."""
    ends = link_module().parse_address(options.connect)
    link = link_module().measure_link(*ends, options.name, options.repeat, options.megabytes << 20)
    profile = empty_profile(options)
    if options.output.exists():
        profile = json.loads(options.output.read_text(encoding="utf-8"))
        if profile.get("format") != PROFILE_FORMAT:
            raise ProfileError(f"{options.output}: it is no profile")
    others = [one for one in profile["links"] if sorted(one["hosts"]) != sorted(link["hosts"])]
    save_profile(options.output, {**profile, "links": [*others, link]})
    print("[[link]]", f"hosts = {json.dumps(link['hosts'])}", sep="\n")
    print(f'bandwidth = "{link["bandwidth"] / 1e6:.1f} Mbit/s"\nlatency = "{link["latency"] * 1e3:.3f} ms"')


if __name__ == "__main__":
    sys.exit(main())
