"""Compare predictions with runs on emulated clusters, for plans of all strategies.

Each case is a line on stderr. The tables on stdout show the errors, how often `auto` is really the fastest, and its
loss otherwise. Run it as README.md says, as root, on an idle host.
"""

from __future__ import annotations

import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import click
import onnx
from rich.console import Console
from rich.table import Table
from support.modern_net import Net

import dicompiler
from dicompiler import networks
from dicompiler.analysis.prediction_error import share_processors
from dicompiler.base.errors import DicompilerError
from dicompiler.ir.cluster import DEFAULT_ENGINE, Network
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.platform import Platform
from dicompiler.measure.emulation.boards import measure_runtime_costs, runtime_cost_factor
from dicompiler.measure.emulation.emulate import MAX_COMPUTE_SLOWDOWN, emulate
from dicompiler.measure.emulation.segment_timing import bind_network
from dicompiler.target.manifest import load_artifact
from dicompiler.target.remote.certificates import make_keys
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.executor import OrtSession
from dicompiler.verify.run_inputs import prepare_inputs

NETWORKS = ("resnet18", "squeezenet", "mobilenet_v2", "resnet50", "unet-gru", "yolov8n")
STRATEGIES = ("single", "pipeline", "modnn", "dp", "gradient", "cpsat", "auto")
BANDWIDTHS = (10, 100, 1000)
NETWORK_OPTIONS = {"llama_small": {"past": 128, "size": 1}, "yolov8n": {"size": 320}}
"""Options of networks that are not built with their defaults: a step of a decoder with its caches, a small image."""
MEMORY_BANDWIDTHS = {"llama_small": 4e9}
"""Memory bandwidth of the boards in bytes/s, if it is not that of a Raspberry Pi 4."""
CLUSTERS = ("4", "2+2", "6")
TARGETS = ("sockets", "mpi")
SLOW_FACTOR = 3.0
"""How many times slower the slow boards of a mixed cluster are."""
MAX_MEDIAN_ERROR, MAX_ERROR = 0.10, 0.25
"""Allowed relative errors of predictions."""
MAX_AUTO_LOSS, MIN_NEAR_SHARE, MAX_GAIN_ERROR, MAX_SINGLE_LOSS = 1.05, 0.90, 0.15, 1.03
"""Limits for the plans of `auto`.

- MAX_AUTO_LOSS: Largest time of a frame, relative to the fastest strategy.
- MIN_NEAR_SHARE: Fraction of the settings in which MAX_AUTO_LOSS must be kept.
- MAX_GAIN_ERROR: Largest relative error of the predicted gain over one device.
- MAX_SINGLE_LOSS: Largest time of a frame, relative to one device.
"""

TIMING_S = 1.0
"""Seconds for which a whole network is timed."""
HOST_COSTS = ("latency", "send", "receive", "per_byte", "call", "header_share")
"""Runtime costs that have the values of this host, because the runtimes of all emulated boards run on it.

The costs of copies are not among them. Copies are made within segments, whose times are scaled to those of the board.
"""
NO_TIME_S = 1e-15
"""Seconds that replace a cost of 0 s, because a profile must not contain such a cost."""


@dataclass(frozen=True)
class Case:
    """One plan on one cluster.

    Attributes:
        network: Name of the network.
        bandwidth: Bandwidth of the links in Mbit/s.
        cluster: Number of boards, or numbers of fast and slow boards ("2+2").
        target: Name of the target.
        strategy: Name of the strategy.
        predicted_s: Predicted seconds of a frame.
        simulated_s: Predicted seconds with the computing times that the boards really had.
        measured_s: Measured seconds of a frame.
        slowdown: Fraction by which this host computed more slowly than the boards that it emulated.
        boards: Number of boards that compute.
    """

    network: str
    bandwidth: int
    cluster: str
    target: str
    strategy: str
    predicted_s: float
    simulated_s: float
    measured_s: float
    slowdown: float
    boards: int

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return abs(self.predicted_s / self.measured_s - 1)

    @property
    def setting(self) -> tuple[str, int, str, str]:
        return self.network, self.bandwidth, self.cluster, self.target

    def __str__(self) -> str:
        doubt = f"  host slowdown by {self.slowdown:.0%}" if self.slowdown > MAX_COMPUTE_SLOWDOWN else ""
        times = f"{1000 * self.predicted_s:9.2f} ms predicted {1000 * self.measured_s:9.2f} measured"
        ratios = f"{self.measured_s / self.predicted_s:6.3f} ({self.measured_s / self.simulated_s:.3f} of simulated)"
        return (
            f"{self.network:13} {self.bandwidth:5} Mbit/s {self.cluster:4} {self.target:8} {self.strategy:9} {times} "
            f"{ratios}{doubt}"
        )


def boards(cluster: str, bandwidth: int, network: str = "") -> Platform:
    """Return a platform of Raspberry Pis 4 on a switch: `cluster` is their number, or "2+2" for fast and slow ones.

    Some neural networks need boards with another memory bandwidth (MEMORY_BANDWIDTHS).
    """
    fast, _, slow = cluster.partition("+")
    platform = Platform.load(f"rpi4-gateway-x{int(fast) + int(slow or 0)}")
    devices = tuple(
        replace(
            device,
            rate=device.rate / (1 if i < int(fast) else SLOW_FACTOR),
            memory_bandwidth=MEMORY_BANDWIDTHS.get(network, device.memory_bandwidth),
        )
        for i, device in enumerate(platform.devices)
    )
    return replace(platform, devices=devices, network=Network("switch", 1e6 * bandwidth))


@dataclass(frozen=True)
class Setup:
    """Settings of the emulation, which are the same for all cases.

    Attributes:
        frames: Number of frames of each case; a stream has this number for each frame in flight.
        in_flight: Number of frames in flight.
        tls: True if messages are encrypted.
        slower: How many times slower than one core of this host the boards are. Their times are then those of a
            profile; if it is 0, they follow from compute rates.
        engine: Name of the engine that computes, or `auto`.
        wire_dtype: Element type in which tensors are sent; "" for their own types.
        dilation: How many times slower than the real boards the whole emulation runs.
    """

    frames: int
    in_flight: int
    tls: bool
    slower: float
    engine: str
    wire_dtype: str
    dilation: float

    def cost(self, network: str, platform: Platform, target: str, directory: Path) -> str:
        """Return the text of the cost model with which plans for the emulated boards are made.

        The runtimes of all boards share this host, so that their costs are measured on it. With a dilation, they are
        divided by its factor. Profiles are written to `directory`.
        """
        count = len(platform.devices)
        if not self.slower:
            return f"analytic{{runtime={runtime_cost_factor(target, count) / self.dilation:.3g}}}"
        here, files = share_processors(measure_runtime_costs(target).scaled_by(1 / self.dilation), count), []
        engine = DEFAULT_ENGINE if self.engine == "auto" else self.engine
        profile, then_s = measure_profile(network, target, engine)
        slower = self.slower * time_network(network, engine) / then_s
        for device in platform.devices:
            times = slower * platform.fastest_device.rate / device.rate
            document = slow_profile(profile, times)
            # A profile must not contain a cost of 0. On emulated boards, the bytes of messages cost nothing, so
            # NO_TIME_S replaces 0.
            runtime = {name: getattr(here, name) or NO_TIME_S for name in HOST_COSTS}
            # Costs that could not be measured are missing. The target's stated costs then replace them.
            own = document["runtime_costs"].get(target, {})
            runtime |= {name: times * own[name] for name in ("per_copy", "per_copied_byte") if name in own}
            document |= {"device": device.name, "runtime_costs": {target: runtime}}
            files.append(directory / f"{device.name}.json")
            files[-1].write_text(json.dumps(document))
        return f"profile{{file={','.join(map(str, files))}}}"


def build_network(network: str) -> onnx.ModelProto:
    """Return the network with seeded weights."""
    if network == "unet-gru":
        return unet_gru()
    return networks.build(network, 1, **NETWORK_OPTIONS.get(network, {}))


def unet_gru(size: int = 256, channels: int = 16) -> onnx.ModelProto:
    """Return a U-Net for images whose deepest map passes through a recurrent layer (GRU), row by row."""
    net = Net()

    def block(x: str, given: int, out: int, stride: int = 1) -> str:
        x = net.op("Relu", net.conv(x, given, out, (3, 3), strides=[stride, stride], pads=[1] * 4))
        return net.op("Relu", net.conv(x, out, out, (3, 3), pads=[1] * 4))

    x, given, skips = net.input("image", (1, 3, size, size)), 3, list[str]()
    for level in range(4):
        x, given = block(x, given, channels << level, 2 if level else 1), channels << level
        skips.append(x)
    rows = size >> 3
    x = net.op("Reshape", net.op("Transpose", x, perm=[2, 0, 3, 1]), net.ints(rows, rows, given))
    weights = [net.weight(1, 3 * given, given), net.weight(1, 3 * given, given), net.weight(1, 6 * given)]
    x = net.op("GRU", x, *weights, hidden_size=given, outputs=2)
    x = net.op("Transpose", net.op("Reshape", x, net.ints(rows, 1, rows, given)), perm=[1, 3, 0, 2])
    for level in (2, 1, 0):
        out = channels << level
        x = net.op("ConvTranspose", x, net.weight(given, out, 2, 2), kernel_shape=[2, 2], strides=[2, 2])
        x, given = block(net.op("Concat", x, skips[level], axis=1), 2 * out, out), out
    return net.model(net.op("Sigmoid", net.conv(x, given, 1, (1, 1))))


@cache
def measure_profile(network: str, target: str, engine: str) -> tuple[dict[str, Any], float]:
    """Return the profile of a network on one core of this host, and the result of `time_network` right after it.

    The speed of this host during a later emulation may differ. The caller compares it with the second result, and
    scales the profile.
    """
    with tempfile.TemporaryDirectory() as scratch:
        onnx.save(build_network(network), model := Path(scratch, "model.onnx"))
        words = ("profile", model, "--threads", "1", "--target", target, "-o", Path(scratch, "profile.json"))
        subprocess.run([sys.executable, "-m", "dicompiler", *words], check=True, stdout=subprocess.DEVNULL)
        return dict(json.loads(Path(scratch, "profile.json").read_text())), time_network(network, engine)


def time_network(network: str, engine: str) -> float:
    """Return the processor seconds of a network on one core of this host: the lower quartile of several frames."""
    model = Model.load(build_network(network))
    session = OrtSession(model.proto, model.weights, network, "all")
    inputs = prepare_inputs(model, None)
    run: Callable[[], object] = partial(session.run, inputs)
    if engine != DEFAULT_ENGINE:
        # If the engine cannot compute the whole network, onnxruntime shows how fast the host is.
        run = bind_network(engine, model, inputs | session.run(inputs)) or run
    times: list[float] = []
    end = time.monotonic() + TIMING_S
    while time.monotonic() < end or len(times) < 5:
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return sorted(times)[len(times) // 4]


def slow_profile(profile: dict[str, Any], factor: float) -> dict[str, Any]:
    """Return the profile of a device that takes `factor` times as long."""

    def slow(entry: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
        return entry | {key: factor * entry[key] for key in keys if key in entry}

    def slow_all(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [slow(entry, ("median_s", "min_s", "max_s")) for entry in entries]

    def slow_engine(engine: dict[str, Any]) -> dict[str, Any]:
        layers = [layer | {"measurements": slow_all(layer["measurements"])} for layer in engine["layers"]]
        keys = ("call_s", "whole_model_s", "weight_byte_s", "read_byte_s", "cold_call_s")
        return slow(engine | {"layers": layers}, keys)

    # The fields of onnxruntime are in the profile itself, and those of other engines in `engines`.
    engines = [slow_engine(engine) | {"transfers": slow_all(engine["transfers"])} for engine in profile["engines"]]
    return slow_engine(profile) | {"engines": engines}


def measure(setting: tuple[str, int, str, str], strategy: str, setup: Setup) -> Case:
    """Compile one case, emulate it, and return its predicted and measured times.

    `setting` has the name of the network, the bandwidth in Mbit/s, the cluster and the target.

    Raises:
        DicompilerError: The strategy has no plan, or this host cannot emulate it.
    """
    network, bandwidth, cluster, target = setting
    with tempfile.TemporaryDirectory() as scratch:
        artifact, platform = Path(scratch, "artifact"), boards(cluster, bandwidth, network)
        cost = setup.cost(network, platform, target, Path(scratch))
        objective = "throughput" if setup.in_flight > 1 else "latency"
        compiled = dicompiler.compile(
            build_network(network),
            platform,
            strategy,
            target=target,
            cost=cost,
            objective=objective,
            output=artifact,
            engine=setup.engine,
            wire_dtype=setup.wire_dtype or None,
        )
        keys = Path(scratch, "keys") if setup.tls else None
        if keys is not None:
            make_keys(load_artifact(artifact)["devices"], keys)
        options = RunOptions(in_flight=setup.in_flight, keys=keys)
        frames = setup.frames * setup.in_flight + 1
        found = emulate(
            artifact,
            frames=frames,
            cost=cost,
            slower=setup.slower or None,
            options=options,
            dilation=setup.dilation,
        )
    boards_used = sum(device.compute_s > 0 for device in compiled.metrics.devices)
    times = found.predicted_s, found.simulated_s, found.frame_s, found.compute_slowdown
    return Case(*setting, strategy, *times, boards_used)


def cases(settings: Sequence[tuple[str, int, str, str]], strategies: Sequence[str], setup: Setup) -> Iterator[Case]:
    for setting, strategy in product(settings, strategies):
        try:
            yield measure(setting, strategy, setup)
        except DicompilerError as error:
            click.echo(f"{' '.join(map(str, setting))} {strategy}: {error}", err=True)


def error_table(found: Sequence[Case]) -> Table:
    """Return the median and the worst error by target and network, of plans on several boards only.

    A plan on one board has hardly anything to predict, because each emulated segment takes as long as predicted.
    """
    title = "predicted against measured, plans on several boards"
    table = Table("target", "network", "cases", "median error", "worst", "of", title=title)
    split = [case for case in found if case.boards > 1]
    groups = [(target, "all") for target in dict.fromkeys(case.target for case in split)]
    groups += dict.fromkeys((case.target, case.network) for case in split)
    for target, network in groups:
        own = [case for case in split if case.target == target and network in ("all", case.network)]
        worst = max(own, key=lambda case: case.error)
        middle = statistics.median(case.error for case in own)
        name = f"{worst.network} {worst.bandwidth} {worst.cluster} {worst.strategy}"
        table.add_row(target, network, str(len(own)), f"{middle:.1%}", f"{worst.error:.1%}", name)
    return table


@dataclass(frozen=True)
class AutoComparison:
    """How the plan of `auto` compares with those of other strategies in a setting.

    Attributes:
        setting: Network, bandwidth, cluster and target.
        fastest: The strategy that was really fastest.
        loss: Time of `auto` relative to the fastest strategy.
        measured_gain: Measured speed relative to one device.
        predicted_gain: Predicted speed relative to one device.
    """

    setting: tuple[str, int, str, str]
    fastest: str
    loss: float
    measured_gain: float
    predicted_gain: float

    @property
    def is_right(self) -> bool:
        """True if the measured gain over one device is near the predicted one, and `auto` is not slower than it."""
        error = abs(self.predicted_gain / self.measured_gain - 1)
        return error <= MAX_GAIN_ERROR and self.measured_gain * MAX_SINGLE_LOSS >= 1


def rate_choices(found: Sequence[Case]) -> list[AutoComparison]:
    """Return how `auto` compares with the other strategies, for each setting with `auto` and `single`."""
    chosen = []
    for setting in dict.fromkeys(case.setting for case in found):
        own = {case.strategy: case for case in found if case.setting == setting}
        if "auto" in own and "single" in own:
            best, auto, single = min(own.values(), key=lambda case: case.measured_s), own["auto"], own["single"]
            gains = single.measured_s / auto.measured_s, single.predicted_s / auto.predicted_s
            chosen.append(AutoComparison(setting, best.strategy, auto.measured_s / best.measured_s, *gains))
    return chosen


def choice_table(found: Sequence[AutoComparison]) -> Table:
    table = Table("setting", "really fastest", "auto / fastest", "gain over one device", "predicted gain", title="auto")
    for choice in found:
        figures = f"{choice.loss:.3f}", f"{choice.measured_gain:.2f}", f"{choice.predicted_gain:.2f}"
        table.add_row(" ".join(map(str, choice.setting)), choice.fastest, *figures)
    return table


def within_limits(found: Sequence[Case]) -> bool:
    """Return True if the errors of the predictions and the times of the plans of `auto` are within the limits."""
    errors, choices = [case.error for case in found if case.boards > 1] or [0.0], rate_choices(found)
    near = sum(choice.loss <= MAX_AUTO_LOSS for choice in choices)
    return (
        statistics.median(errors) <= MAX_MEDIAN_ERROR
        and max(errors) <= MAX_ERROR
        and near >= MIN_NEAR_SHARE * len(choices)
        and all(choice.is_right for choice in choices)
    )


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--network", "names", multiple=True, default=NETWORKS, help="Only these (repeatable).")
@click.option("--bandwidth", "bandwidths", multiple=True, type=int, default=BANDWIDTHS, help="Mbit/s (repeatable).")
@click.option("--cluster", "clusters", multiple=True, default=CLUSTERS, help="Boards (repeatable).")
@click.option("--target", "targets", multiple=True, default=TARGETS, help="Only these (repeatable).")
@click.option("--strategy", "strategies", multiple=True, default=STRATEGIES, help="Only these (repeatable).")
@click.option("--frames", default=8, help="Frames of each case; a stream has this many for each frame in flight.")
@click.option("--in-flight", default=1, help="Frames in flight: more than 1 measures the period of a stream.")
@click.option("--tls", is_flag=True, help="Encrypt messages of sockets with TLS.")
@click.option("--slower", default=0.0, help="Slowdown of boards against one core here, by a profile.")
@click.option("--engine", default="onnxruntime", help="Name of an engine, or `auto`.")
@click.option("--wire-dtype", default="", help="Wire type, such as float16.")
@click.option("--dilation", default=1.0, help="Slowdown of the whole emulation, as in `dicompiler emulate`.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write all cases as JSON.")
def main(
    names: Sequence[str],
    bandwidths: Sequence[int],
    clusters: Sequence[str],
    targets: Sequence[str],
    strategies: Sequence[str],
    output: Path | None,
    **setup: Any,
) -> None:
    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    found = []
    for case in cases(list(product(names, bandwidths, clusters, targets)), strategies, Setup(**setup)):
        click.echo(case, err=True)
        found.append(case)
        if output is not None:
            output.write_text(json.dumps([asdict(case) for case in found], indent=1) + "\n", encoding="utf-8")
    if not found:
        raise click.ClickException("no case could be emulated: see the bandwidths above")
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(error_table(found))
    console.print(choice_table(rate_choices(found)))
    sys.exit(0 if within_limits(found) else 1)


if __name__ == "__main__":
    main()
