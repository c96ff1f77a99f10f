"""Measures the layers of a network, or the link to another host, on this device, and writes a profile.

    python3 profile_run.py -o PROFILE.json                           measures the layers that tasks.json lists
    python3 profile_run.py --serve 7000                              serves a measurement of the link from another host
    python3 profile_run.py -o PROFILE.json --connect HOST:7000       measures the link, adds it to PROFILE.json

The script needs Python, numpy and onnxruntime; links need Python only. Other engines are measured if they are
installed. link_benchmark.py measures links, and runtime_costs_fit.py measures runtimes of targets. Large weights are
seeded random numbers in onnxruntime, and zeros in other engines.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import math
import os
import platform
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

# onnxruntime 1.32 stores an identifier of the device and reports its use, unless this is set before it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
SCRIPT_DIRECTORY = Path(__file__).resolve().parent
PROFILE_FORMAT = "dicompiler.profile/2"
TASKS_FORMAT = "dicompiler.profile-tasks/3"
OPTIMIZATION, ORT_OPTIMIZATION_LEVEL = "all", "ORT_ENABLE_ALL"
"""Default optimization level of targets, by our name and by onnxruntime's name."""
MIN_TIMING_S = 0.002
"""Minimum seconds of one measurement; a short piece (part of a layer) runs several times in it."""
MAX_MEDIAN_RATIO = 1.1
"""If the median exceeds this multiple of the shortest time, the host was busy, and the measurement is repeated."""
MAX_ROUNDS = 6
"""Maximum number of measurements of a piece (a part of a layer) in one pass over all pieces."""
MAX_PASSES = 2
"""Maximum number of passes over all pieces. The fastest pass counts, because a shared or hot host is slow at times."""
DEFAULT_REPEAT = 7
"""Default number of times that a piece (a part of a layer) is timed."""
NETWORK_TIMING_S = 1.0
"""Minimum seconds of a measurement that runs several models in turn; proportional to the option --repeat."""
RUNS_PER_TURN = 5
"""Number of timed runs of a model before the next model's turn; one more run before them is not counted.

Turns are short, because a shared host is slow at times.
"""

MAX_WARM_UP_CALLS = 15
"""Maximum number of times that all pieces or segments run in turn before they are timed.

After other data, some processors keep data in their last-level cache only when it has been used several times.
"""
MAX_WARM_UP_S = 0.25
"""Seconds after which the warm-up ends. What takes longer has too much data for the caches."""

TimeRange = tuple[float, float, float]
"""Median, shortest and longest time in seconds."""


class ProfileError(Exception):
    """The profile could not be written; the message is one line."""


def main() -> int:
    """Run the command line. Return 0 after success and 1 after an error."""
    options = _parse_options()
    if options.end_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        if options.serve is not None:
            link_module().serve_measurement(*link_module().parse_address(options.serve), options.name)
        elif options.connect is not None:
            add_link(options)
        else:
            profile = measure_profile(options)
            save_profile(options.output, profile)
            if not options.lines:
                print(describe_profile(options.output, profile))
    except (ProfileError, OSError, ValueError) as error:
        print(f"profile_run.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure a network's layers on this device, or a link.")
    add = parser.add_argument
    add("-o", "--output", type=Path, default=Path("PROFILE.json"), help="the profile (default: PROFILE.json)")
    add("--device", help="devices of the platform that the profile is for (name or pattern; default: this host)")
    add("--threads", type=int, default=available_processors(), help="threads of a piece (default: all processors)")
    add(
        "--repeat",
        type=int,
        default=DEFAULT_REPEAT,
        help="number of times that each piece is timed (default: %(default)s)",
    )
    add("--serve", metavar="[HOST:]PORT", help="answer one link measurement of another host, then end")
    add("--connect", metavar="HOST:PORT", help="measure the link to the host that runs --serve at this address")
    add("--name", default=platform.node(), help="this host's name in links (default: its own)")
    add("--megabytes", type=int, default=16, help="size of a transfer when a link is measured (default: 16)")
    add("--lines", action="store_true", help="print a line for each layer before it is timed, for programs")
    add("--end-with-stdin", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, maximum in (("threads", 1024), ("repeat", 100000), ("megabytes", 64)):
        if not 1 <= getattr(options, name) <= maximum:
            parser.error(f"--{name} must be 1 to {maximum}")
    return options


def _end_with_stdin() -> None:
    """Wait until stdin ends, i.e. the caller has ended, and kill this process and all that it has started."""
    while os.read(0, 4096):
        continue
    # The caller has started this process in its own process group, so no other processes are killed.
    os.killpg(0, signal.SIGKILL)


def available_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_tasks() -> dict[str, Any]:
    """Return the content of tasks.json in this script's directory: the pieces of layers to measure."""
    path = SCRIPT_DIRECTORY / "tasks.json"
    tasks: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if tasks.get("format") != TASKS_FORMAT:
        raise ProfileError(
            f"{path}: unknown format {tasks.get('format')!r}: use the profile_run.py of the same package "
            f"(this one reads {TASKS_FORMAT})"
        )
    return tasks


def empty_profile(options: argparse.Namespace) -> dict[str, Any]:
    tasks = load_tasks()
    return {
        "format": PROFILE_FORMAT,
        "model_digest": tasks["model_digest"],
        "device": options.device or tasks["device"] or platform.node() or "*",
        "environment": {
            "system": platform.system(),
            "machine": platform.machine(),
            "processors": available_processors(),
        },
        "threads": options.threads,
        "repeat": options.repeat,
        "optimization": OPTIMIZATION,
        "call_s": 0.0,
        "layers": [],
        "unmeasured": tasks["unmeasured"],
        "links": [],
    }


def save_profile(path: Path, profile: dict[str, Any]) -> None:
    """Write the profile as a whole, or not at all."""
    stage = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        stage.write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
        os.replace(stage, path)
    finally:
        stage.unlink(missing_ok=True)


def measure_profile(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all pieces of layers that tasks.json lists, and return their profile."""
    import numpy
    import onnxruntime

    tasks, profile = load_tasks(), empty_profile(options)
    profile["environment"] |= {"onnxruntime": onnxruntime.__version__, "numpy": numpy.__version__}
    if options.output.exists():
        # The new profile replaces the old one, but keeps its measurements of network links.
        profile["links"] = json.loads(options.output.read_text(encoding="utf-8")).get("links", [])
    profile["call_s"] = time_piece(tasks["call"], options)[0]
    times: dict[str, list[TimeRange]] = {}
    network_passes: list[dict[str, float]] = []
    engines = {entry["name"]: EngineTimes(entry) for entry in tasks["engines"] if find_network_class(entry) is not None}
    pass_count = min(MAX_PASSES, options.repeat)
    for number in range(1, pass_count + 1):
        reasons = _time_pieces(tasks, options, times, f"{number}/{pass_count} ")
        network_passes.append(_time_network(tasks, options))
        for engine in engines.values():
            engine.measure(tasks, options, f"{number}/{pass_count} ")
    for layer in tasks["layers"]:
        if (reason := reasons.get(layer["names"][0])) is not None:
            profile["unmeasured"] += [{"name": name, "reason": reason} for name in layer["names"]]
        else:
            measurements = [
                _measurement_entry(task, merge_passes(times[task["file"]])) for task in layer["measurements"]
            ]
            profile["layers"].append({**layer, "measurements": measurements})
    profile["engines"] = [engine.profile_entry(tasks) for engine in engines.values() if engine.times]
    costs, reasons = measure_runtimes(tasks["runtimes"], options.repeat)
    unmeasured = [{"target": target, "reason": reason} for target, reason in reasons.items()]
    return profile | fastest_network_pass(network_passes) | {"runtime_costs": costs, "unmeasured_runtimes": unmeasured}


def describe_profile(path: Path, profile: dict[str, Any]) -> str:
    """Return a text that lists the content of a written profile, and everything that could not be measured."""
    count = sum(len(layer["names"]) for layer in profile["layers"])
    parts = [f"{count} of {count + len(profile['unmeasured'])} layers"]
    if "whole_model_s" in profile:
        parts.append(f"the whole network ({1000 * profile['whole_model_s']:.4g} ms)")
    if profile["runtime_costs"]:
        parts.append(f"the runtime of {', '.join(profile['runtime_costs'])}")
    parts += [f"engine {engine['name']}" for engine in profile["engines"]]
    if profile["links"]:
        parts.append(f"{len(profile['links'])} links")
    lines = [f"written: {path}, for device {profile['device']}: {', '.join(parts)}"]
    lines += [f"not measured: layer {entry['name']}: {entry['reason']}" for entry in profile["unmeasured"]]
    lines += [
        f"not measured: runtime of {entry['target']}: {entry['reason']}" for entry in profile["unmeasured_runtimes"]
    ]
    return "\n".join(lines)


def _time_pieces(
    tasks: dict[str, Any], options: argparse.Namespace, times: dict[str, list[TimeRange]], prefix: str
) -> dict[str, str]:
    """Measure all pieces of layers once, and return the reasons why layers could not be measured.

    Args:
        tasks: Content of tasks.json. An entry stands for all equal layers.
        options: Command-line options.
        times: The times are appended here, by the name of the piece's file.
        prefix: Start of progress messages.

    Returns:
        The reasons, by the first name of the entry.
    """
    reasons: dict[str, str] = {}
    for number, layer in enumerate(tasks["layers"], 1):
        name = layer["names"][0]
        text = f"{prefix}{number}/{len(tasks['layers'])} {name}"
        if options.lines:
            print(text, flush=True)
        elif sys.stderr.isatty():
            print(f"\r{text:60.60}", end="", file=sys.stderr)
        try:
            for task in layer["measurements"]:
                times.setdefault(task["file"], []).append(time_piece(task, options))
        except Exception as error:  # `Exception` is the only common base class of onnxruntime's exceptions.
            reasons[name] = f"onnxruntime cannot run it alone: {' '.join(str(error).split())[:300]}"
    if sys.stderr.isatty() and not options.lines:
        print(file=sys.stderr)
    return reasons


def merge_passes(times: list[TimeRange]) -> TimeRange:
    """Return (median, shortest, longest) seconds of a piece of a layer over all passes.

    Args:
        times: The same three numbers for each pass.
    """
    # Other load on the host only makes medians larger, so the smallest one is used.
    return min(times)[0], min(low for _, low, _ in times), max(high for *_, high in times)


def _time_network(tasks: dict[str, Any], options: argparse.Namespace, engine: str = "") -> dict[str, float]:
    """Return the measurements of the whole network, and of its layers in a frame, without those that fail.

    `engine` is the name of the engine that computes the network; empty for onnxruntime.
    """
    times: dict[str, float] = {}
    # `Exception` is the only common base class of onnxruntime's exceptions. They are ignored here, because
    # `_time_pieces` reports each layer that does not run.
    with suppress(Exception):
        times |= time_network_and_call(tasks["whole"], tasks["call"], options, engine)
    with suppress(Exception):
        times |= measure_cold_costs(tasks["layers"], tasks["call"], options, engine)
    return times


def fastest_network_pass(passes: list[dict[str, float]]) -> dict[str, float]:
    """Return the measurements of the pass in which the network was fastest; empty if all passes are empty."""
    return min(filter(None, passes), key=lambda times: times.get("whole_model_s", math.inf), default={})


def _measurement_entry(task: dict[str, Any], times: TimeRange) -> dict[str, Any]:
    entry = {key: task[key] for key in ("cut", "size", "flops", "moved_bytes")}
    return entry | dict(zip(("median_s", "min_s", "max_s"), times, strict=True))


def time_piece(task: dict[str, Any], options: argparse.Namespace, engine: str = "") -> TimeRange:
    """Return the median, shortest and longest seconds of a piece of a layer.

    Args:
        task: The piece's entry in tasks.json.
        options: Command-line options.
        engine: Name of the engine that computes the piece; empty for onnxruntime.
    """
    piece = open_piece(task, options.threads, engine)
    runs = max(1, min(1000, round(MIN_TIMING_S / max(1e-7, run_piece(piece, 2)))))
    rounds: list[TimeRange] = []
    while not rounds or (
        rounds[-1][0] > MAX_MEDIAN_RATIO * min(low for _, low, _ in rounds) and len(rounds) < MAX_ROUNDS
    ):
        times = sorted(run_piece(piece, runs) for _ in range(options.repeat))
        rounds.append((statistics.median(times), times[0], times[-1]))
    return min(rounds)[0], min(low for _, low, _ in rounds), min(rounds)[2]


def time_network_and_call(
    network: dict[str, Any], call: dict[str, Any], options: argparse.Namespace, engine: str = ""
) -> dict[str, float]:
    """Return the seconds of the whole network and of an empty call, in an engine (empty: onnxruntime)."""
    # The difference matters most, so both are measured in turn, while the host has the same speed.
    pieces = [open_piece(task, options.threads, engine) for task in (network, call)]
    times = lower_quartiles(lambda: [_warm_median(piece) for piece in pieces], options)
    return dict(zip(("whole_model_s", "call_s"), times, strict=True))


def _warm_median(piece: tuple[Any, dict[str, Any], list[str], Any]) -> float:
    return statistics.median([run_piece(piece) for _ in range(RUNS_PER_TURN + 1)][1:])


def lower_quartiles(run_turn: Callable[[], list[float]], options: argparse.Namespace) -> list[float]:
    """Call a function for some seconds, and return the lower quartile of each number that it returns.

    Args:
        run_turn: Function that returns the same number of seconds each time.
        options: Command-line options. The duration is proportional to --repeat.
    """
    turns = [run_turn() for _ in range(3)]
    end = time.perf_counter() + NETWORK_TIMING_S * options.repeat / DEFAULT_REPEAT
    while time.perf_counter() < end:
        turns.append(run_turn())
    return [sorted(values)[len(turns) // 4] for values in zip(*turns, strict=True)]


def measure_cold_costs(
    layers: list[dict[str, Any]], call: dict[str, Any], options: argparse.Namespace, engine: str = ""
) -> dict[str, float]:
    """Return how much longer pieces of layers take in a frame than when they are run again and again.

    In a frame, weights and inputs come from memory and not from caches.

    Args:
        layers: Entries of tasks.json with the pieces of layers.
        call: Entry of a call that computes nothing.
        options: Command-line options.
        engine: Name of the engine that computes the pieces; empty for onnxruntime.

    Returns:
        Additional seconds for each byte of weights, for each byte of other inputs, and for each call. Those of an empty
        call are subtracted, because the costs of the target's runtime include them.
    """
    import numpy

    tasks = [median_piece(layer["measurements"]) for layer in layers for _ in layer["names"]]
    # In a frame, the inputs of a piece have just been written. So all pieces use the same memory, which stays cached.
    shapes = [value["shape"] for task in tasks for value in task["inputs"]]
    shapes += [shape for task in tasks if engine for shape in task["engines"][engine]["shapes"]]
    memory = numpy.full(max(map(math.prod, shapes), default=0), 0.1, "float32")
    pieces = [open_piece(task, options.threads, engine, memory) for task in (*tasks, call)]

    def run_round() -> list[float]:
        return [run_piece(piece) for piece in pieces]

    # One piece of each layer is run in turn. The pieces displace each other from the caches, as layers do in a frame.
    def run_cold() -> list[float]:
        warm_up(run_round)
        rounds = [run_round() for _ in range(RUNS_PER_TURN)]
        return [statistics.median(times) for times in zip(*rounds, strict=True)]

    def run_warm() -> list[float]:
        return [_warm_median(piece) for piece in pieces]

    cold, warm = lower_quartiles(run_cold, options), lower_quartiles(run_warm, options)
    extra = [max(0.0, cold_s - warm_s) for cold_s, warm_s in zip(cold, warm, strict=True)]
    rows = [(1.0, float(task["weight_bytes"]), float(task["input_bytes"])) for task in tasks]
    call_s, weight_byte_s, read_byte_s = fit_nonnegative(rows, [extra_s - extra[-1] for extra_s in extra[:-1]])
    return {"weight_byte_s": weight_byte_s, "read_byte_s": read_byte_s, "cold_call_s": call_s}


def warm_up(run_all: Callable[[], object]) -> None:
    """Call a function, which runs everything that will be timed, until the caches contain its data."""
    end = time.perf_counter() + MAX_WARM_UP_S
    for _ in range(MAX_WARM_UP_CALLS):
        run_all()
        if time.perf_counter() > end:
            break


def median_piece(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the piece that moves the median number of bytes, among pieces that read all weights of the layer."""
    most_bytes = max(piece["weight_bytes"] for piece in pieces)
    complete = [piece for piece in pieces if piece["weight_bytes"] == most_bytes]
    return sorted(complete, key=lambda piece: piece["moved_bytes"])[len(complete) // 2]


def fit_nonnegative(rows: list[tuple[float, float, float]], targets: list[float]) -> list[float]:
    """Return nonnegative coefficients of a least-squares fit: `rows` times coefficients is nearest to `targets`."""
    import numpy

    matrix, goal = numpy.array(rows), numpy.array(targets)
    candidates = []
    # Each subset of the coefficients is fitted alone, with 0 for the others. The best nonnegative fit is used.
    for chosen in itertools.product((False, True), repeat=matrix.shape[1]):
        coefficients = numpy.zeros(matrix.shape[1])
        columns = matrix[:, list(chosen)]
        scale = numpy.maximum(columns.max(axis=0, initial=0.0), 1e-300)
        coefficients[list(chosen)] = numpy.linalg.lstsq(columns / scale, goal, rcond=None)[0] / scale
        if coefficients.min() >= 0:
            error = float(numpy.sum((matrix @ coefficients - goal) ** 2))
            candidates.append((error, coefficients.tolist()))
    return list(min(candidates)[1])


def run_piece(piece: tuple[Any, dict[str, Any], list[str], Any], runs: int = 1) -> float:
    """Return the mean seconds of one run of a piece, which is a result of `open_piece`."""
    session, feeds, outputs, _ = piece
    start = time.perf_counter()
    for _ in range(runs):
        session.run_with_ort_values(outputs, feeds)
    return (time.perf_counter() - start) / runs


def open_piece(
    task: dict[str, Any], threads: int, engine: str = "", memory: Any = None
) -> tuple[Any, dict[str, Any], list[str], Any]:
    """Return the session for a piece of a layer, inputs by name, names of outputs, and constants.

    The caller must keep the constants, because the session does not keep them alive.

    Args:
        task: The piece's entry in tasks.json.
        threads: Number of threads.
        engine: Name of the engine that computes the piece; empty for onnxruntime.
        memory: Array of float32 in which float32 inputs, and outputs of engines, are stored. Default: each has its own.
    """
    if engine:
        return open_network(task, engine, threads, memory)
    import numpy
    import onnxruntime
    import ort_session  # type: ignore[import-not-found]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, ORT_OPTIMIZATION_LEVEL)
    random = numpy.random.default_rng(0)
    constants = {value["name"]: random_tensor(value, random) for value in task["constants"]}
    if constants:
        options.add_external_initializers(list(constants), list(constants.values()))
    session = ort_session.create_session((SCRIPT_DIRECTORY / task["file"]).read_bytes(), options)
    feeds = {value["name"]: input_tensor(value, random, memory) for value in task["inputs"]}
    return session, feeds, [value.name for value in session.get_outputs()], constants


def input_tensor(value: dict[str, Any], random: Any, memory: Any) -> Any:
    """Return an input of a piece: the start of the array `memory` if there is one and the input is float32."""
    import onnxruntime

    if memory is None or value["dtype"] != "FLOAT":
        return random_tensor(value, random)
    return onnxruntime.OrtValue.ortvalue_from_numpy(view_of(memory, value["shape"]))


def view_of(memory: Any, shape: list[int]) -> Any:
    return memory[: math.prod(shape)].reshape(shape)


def find_network_class(engine: dict[str, Any]) -> Any:
    """Return the class that loads networks of an engine; None if this device lacks the engine.

    Args:
        engine: The engine's entry in tasks.json.
    """
    try:
        # The packages are not imported, because MNN then prints to stdout. The engine's own module prevents this.
        if any(importlib.util.find_spec(package) is None for package in engine["packages"]):
            return None
        return importlib.import_module(f"dicompiler_engine_{engine['name']}").EngineNetwork
    except ImportError:
        return None


class EnginePiece:
    """A piece of a layer in the format of an engine, with the interface of an onnxruntime session."""

    def __init__(self, network: Any, inputs: list[Any], outputs: list[Any]) -> None:
        self._network, self._inputs, self._outputs = network, inputs, outputs
        self._shapes = [list(output.shape) for output in outputs]

    def run_with_ort_values(self, _outputs: list[str], _feeds: dict[str, Any]) -> None:
        """Run the piece with its own fixed inputs, and copy its outputs as runtimes do; the arguments are ignored."""
        for target, array in zip(self._outputs, self._network.run(self._inputs, self._shapes), strict=True):
            target[...] = array


def open_network(
    task: dict[str, Any], engine: str, threads: int, memory: Any
) -> tuple[EnginePiece, dict[str, Any], list[str], Any]:
    """Return a piece of a layer in the format of an engine, in the form of the results of `open_piece`.

    All weights are 0.
    """
    import numpy

    entry, random = task["engines"][engine], numpy.random.default_rng(0)
    if memory is None:
        inputs = [0.1 * random.standard_normal(value["shape"], "float32") for value in task["inputs"]]
        outputs = [numpy.empty(shape, "float32") for shape in entry["shapes"]]
    else:
        inputs = [view_of(memory, value["shape"]) for value in task["inputs"]]
        outputs = [view_of(memory, shape) for shape in entry["shapes"]]
    with tempfile.NamedTemporaryFile() as weights:
        weights.truncate(entry["weight_nbytes"])
        network_class = find_network_class({"name": engine, "packages": []})
        network = network_class(SCRIPT_DIRECTORY / entry["file"], Path(weights.name), threads, True)
    return EnginePiece(network, inputs, outputs), {}, [], None


class EngineTimes:
    """The times that an engine needs for pieces of layers.

    Attributes:
        times: Median, shortest and longest seconds of each pass, by the piece's file.
    """

    def __init__(self, engine: dict[str, Any]) -> None:
        self._name, self._packages = engine["name"], engine["packages"]
        self._network_passes: list[dict[str, float]] = []
        self.times: dict[str, list[TimeRange]] = {}

    def measure(self, tasks: dict[str, Any], options: argparse.Namespace, prefix: str) -> None:
        """Measure all pieces of layers, the whole network, an empty call and transfers of tensors once.

        Args:
            tasks: Content of tasks.json.
            options: Command-line options.
            prefix: Start of progress messages.
        """
        for number, layer in enumerate(tasks["layers"], 1):
            if options.lines:
                print(f"{prefix}{number}/{len(tasks['layers'])} {layer['names'][0]} in {self._name}", flush=True)
            for task in layer["measurements"]:
                self._measure_task(task, options)
        for task in (tasks["call"], *tasks["transfers"]):
            self._measure_task(task, options)
        self._network_passes.append(_time_network(self._computable(tasks), options, self._name))

    def _computable(self, tasks: dict[str, Any]) -> dict[str, Any]:
        """Return the tasks without the pieces of layers that the engine cannot compute."""
        layers = [
            layer | {"measurements": [task for task in layer["measurements"] if task["file"] in self.times]}
            for layer in tasks["layers"]
        ]
        return tasks | {"layers": [layer for layer in layers if layer["measurements"]]}

    def _measure_task(self, task: dict[str, Any], options: argparse.Namespace) -> None:
        if self._name in task["engines"]:
            # A ValueError means that the engine cannot run the piece, which is then left to onnxruntime.
            with suppress(ValueError):
                times = time_piece(task, options, self._name)
                self.times.setdefault(task["file"], []).append(times)

    def profile_entry(self, tasks: dict[str, Any]) -> dict[str, Any]:
        layers = []
        for layer in self._computable(tasks)["layers"]:
            pieces = layer["measurements"]
            entries = [_measurement_entry(task, merge_passes(self.times[task["file"]])) for task in pieces]
            layers.append({"signature": layer["signature"], "measurements": entries})
        call_times = self.times.get(tasks["call"]["file"], [])
        entry = {
            "name": self._name,
            "versions": {package: metadata.version(package) for package in self._packages},
            "call_s": merge_passes(call_times)[0] if call_times else 0.0,
            "whole_model_s": None,
            "transfers": [
                {"nbytes": task["nbytes"], "median_s": merge_passes(self.times[task["file"]])[0]}
                for task in tasks["transfers"]
                if task["file"] in self.times
            ],
            "layers": layers,
        }
        return entry | fastest_network_pass(self._network_passes)


def random_tensor(value: dict[str, Any], random: Any) -> Any:
    """Return a seeded random tensor: floats near 0, 8-bit integers of the full range, zeros for other types."""
    import numpy
    import onnxruntime

    shape, dtype = value["shape"], value["dtype"]
    float_types = {"FLOAT": "float32", "DOUBLE": "float64", "FLOAT16": "float16"}
    if dtype in float_types:
        array = (0.1 * random.standard_normal(shape, "float32")).astype(float_types[dtype])
    elif dtype in ("INT8", "UINT8"):
        array = random.integers(0, 256, shape, "uint8").view(dtype.lower())
    elif dtype in ("BOOL", "INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64"):
        array = numpy.zeros(shape, dtype.lower())  # Zeros are valid indices.
    else:
        # numpy cannot represent these types, so zeros of the same size are used.
        array = numpy.zeros(shape, "uint16" if dtype == "BFLOAT16" else "uint8")
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, value["number"])
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def measure_runtimes(entries: list[dict[str, Any]], repeat: int) -> tuple[dict[str, Any], dict[str, str]]:
    import runtime_costs_fit  # type: ignore[import-not-found]

    found: tuple[dict[str, Any], dict[str, str]] = runtime_costs_fit.measure_runtimes(
        SCRIPT_DIRECTORY / "runtime", entries, repeat
    )
    return found


def link_module() -> Any:
    """Return the module that measures links, which is imported only if it is needed."""
    import link_benchmark  # type: ignore[import-not-found]

    return link_benchmark


def add_link(options: argparse.Namespace) -> None:
    """Measure a link and add it to the profile, in place of an earlier measurement of the link."""
    address = link_module().parse_address(options.connect)
    link = link_module().measure_link(*address, options.name, options.repeat, options.megabytes << 20)
    profile = empty_profile(options)
    if options.output.exists():
        profile = json.loads(options.output.read_text(encoding="utf-8"))
        if profile.get("format") != PROFILE_FORMAT:
            raise ProfileError(f"{options.output}: expected a profile of format {PROFILE_FORMAT}: measure it again")
    others = [other for other in profile["links"] if sorted(other["hosts"]) != sorted(link["hosts"])]
    save_profile(options.output, {**profile, "links": [*others, link]})
    print(f"# written: {options.output}, with this link for a platform file")
    print("[[link]]", f"hosts = {json.dumps(link['hosts'])}", sep="\n")
    print(f'bandwidth = "{link["bandwidth"] / 1e6:.1f} Mbit/s"\nlatency = "{link["latency"] * 1e3:.3f} ms"')


if __name__ == "__main__":
    sys.exit(main())
