"""Whether what is predicted is what happens: plans of all strategies on emulated clusters, predicted and measured.

In: which networks, lines, clusters, targets, strategies. Out: a line for each case on stderr; on stdout the errors, how
often `auto` is really the fastest, and what it loses where it is not. Run it as README.md says, as root, on a host that
does nothing else.
"""

from __future__ import annotations

import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import click
import onnx
from rich.console import Console
from rich.table import Table

import dicompiler
from dicompiler import networks
from dicompiler.analysis.prediction_error import share_processors
from dicompiler.base.errors import DicompilerError
from dicompiler.emulation.boards import measure_runtime_costs, runtime_cost_factor
from dicompiler.emulation.emulate import MAX_COMPUTE_SLOWDOWN, emulate
from dicompiler.ir.cluster import Network
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.platform import Platform
from dicompiler.target.integrity import load_artifact
from dicompiler.target.remote.certificates import make_keys
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.executor import OrtSession
from dicompiler.verify.run_inputs import prepare_inputs

NETWORKS = ("resnet18", "squeezenet", "mobilenet_v2", "resnet50")
STRATEGIES = ("single", "pipeline", "modnn", "dp", "gradient", "cpsat", "auto")
LINES = (10, 100, 1000)
OPTIONS = {"llama_small": {"past": 128, "size": 1}}
"""Of networks that are not built as they are by default: a step of a decoder with its caches."""
MEMORY = {"llama_small": 4e9}
"""Bytes/s of the boards' memory, where it is not a Raspberry Pi 4's."""
CLUSTERS = ("4", "2+2", "6")
TARGETS = ("sockets", "mpi")
SLOW = 3.0
"""How many times slower the slow boards of a mixed cluster are."""
MEDIAN, WORST = 0.10, 0.25
"""By what share a prediction may be wrong."""
NEAR, OFTEN, PROMISE, ALONE = 1.05, 0.90, 0.15, 1.03
"""Within what of the fastest `auto` must be, in what share of cases, by what share its gain may differ from what it
promised, and how many times as long as one device it may take."""

WHOLE_S = 1.0
"""For how many seconds a whole network is timed."""
HOST_COSTS = ("latency", "send", "receive", "per_byte", "gap", "call", "header_share")
"""Of a runtime's costs, those that this host decides; segments, which do the copying, are held back."""


@dataclass(frozen=True)
class Case:
    """One plan on one cluster: seconds of a frame as predicted, also for the very seconds that its boards were given to
    compute (timed_s), and as measured. late: by what share this host was."""

    network: str
    line: int
    cluster: str
    target: str
    strategy: str
    predicted_s: float
    timed_s: float
    measured_s: float
    late: float

    @property
    def error(self) -> float:
        """By what share of the measured time the prediction is wrong."""
        return abs(self.predicted_s / self.measured_s - 1)

    @property
    def setting(self) -> tuple[str, int, str, str]:
        return self.network, self.line, self.cluster, self.target

    def __str__(self) -> str:
        doubt = f"  host late by {self.late:.0%}" if self.late > MAX_COMPUTE_SLOWDOWN else ""
        times = f"{1000 * self.predicted_s:9.2f} ms predicted {1000 * self.measured_s:9.2f} measured"
        ratios = f"{self.measured_s / self.predicted_s:6.3f} ({self.measured_s / self.timed_s:.3f} of what was played)"
        return (
            f"{self.network:13} {self.line:5} Mbit/s {self.cluster:4} {self.target:8} {self.strategy:9} {times} "
            f"{ratios}{doubt}"
        )


def boards(cluster: str, line: int, network: str = "") -> Platform:
    """Raspberry Pis 4 on a switch: so many, or so many fast and so many slow ones ("2+2"), for that network."""
    fast, _, slow = cluster.partition("+")
    platform = Platform.load(f"rpi4x{int(fast) + int(slow or 0)}")
    devices = tuple(
        replace(
            device,
            rate=device.rate / (1 if i < int(fast) else SLOW),
            memory_bandwidth=MEMORY.get(network, device.memory_bandwidth),
        )
        for i, device in enumerate(platform.devices)
    )
    return replace(platform, devices=devices, network=Network("switch", 1e6 * line))


@dataclass(frozen=True)
class Setup:
    """How cases are played. frames: of each, or of each of those in flight; slower: boards compute so many times as
    long as one core of this host, by a profile (0: by rates); wire: as what tensors travel ("": as they are);
    dilation: how many times slower all of it is played."""

    frames: int
    in_flight: int
    tls: bool
    slower: float
    wire: str
    dilation: float

    def cost(self, network: str, platform: Platform, target: str, place: Path) -> str:
        """The boards' runtimes are as fast as this host, which they share, or as many times faster as all is played
        slower. `place` takes profiles."""
        count = len(platform.devices)
        if not self.slower:
            return f"analytic{{runtime={runtime_cost_factor(target, count) / self.dilation:.3g}}}"
        here, files = share_processors(measure_runtime_costs(target).scaled_by(1 / self.dilation), count), []
        profile, then_s = profile_of(network, target)
        slower = self.slower * whole_s(network) / then_s
        for device in platform.devices:
            times = slower * platform.fastest_device.rate / device.rate
            document = slowed(profile, times)
            runtime = {name: getattr(here, name) for name in HOST_COSTS}
            own = document["runtime_costs"][target]
            runtime |= {name: times * own[name] for name in ("per_copy", "per_copied_byte")}
            document |= {"device": device.name, "runtime_costs": {target: runtime}}
            files.append(place / f"{device.name}.json")
            files[-1].write_text(json.dumps(document))
        return f"profile{{file={','.join(map(str, files))}}}"


def built(network: str) -> onnx.ModelProto:
    """The network, with seeded weights."""
    return networks.build(network, 1, **OPTIONS.get(network, {}))


@cache
def profile_of(network: str, target: str) -> tuple[dict[str, Any], float]:
    """What `dicompiler profile` says of a network on one core of this host, and of the target's runtime; and `whole_s`
    right after that: boards take so many times as long as this host when they are played, which is not always as fast
    as while it was profiled."""
    with tempfile.TemporaryDirectory() as scratch:
        onnx.save(built(network), model := Path(scratch, "model.onnx"))
        words = ("profile", model, "--threads", "1", "--target", target, "-o", Path(scratch, "profile.json"))
        subprocess.run([sys.executable, "-m", "dicompiler.cli", *words], check=True, stdout=subprocess.DEVNULL)
        return dict(json.loads(Path(scratch, "profile.json").read_text())), whole_s(network)


def whole_s(network: str) -> float:
    """Seconds of the network on one core of this host now."""
    model = Model.load(built(network))
    session = OrtSession(model.proto, model.weights, network, "all")
    inputs, times = prepare_inputs(model, None), []
    end = time.monotonic() + WHOLE_S
    while time.monotonic() < end or len(times) < 5:
        start = time.thread_time()
        session.run(inputs)
        times.append(time.thread_time() - start)
    return sorted(times)[len(times) // 4]


def slowed(profile: dict[str, Any], times: float) -> dict[str, Any]:
    """The profile of a device that takes so many times as long."""

    def longer(entry: dict[str, Any]) -> dict[str, Any]:
        return entry | {key: times * entry[key] for key in ("median_s", "min_s", "max_s")}

    layers = [one | {"measurements": [longer(entry) for entry in one["measurements"]]} for one in profile["layers"]]
    return (
        profile
        | {"layers": layers}
        | {
            key: times * profile[key]
            for key in ("call_s", "whole_model_s", "weight_byte_s", "read_byte_s", "cold_call_s")
        }
    )


def measured(setting: tuple[str, int, str, str], strategy: str, setup: Setup) -> Case:
    """One case. DicompilerError where the strategy has no plan, or this host cannot play it."""
    network, line, cluster, target = setting
    with tempfile.TemporaryDirectory() as scratch:
        artifact, platform = Path(scratch, "artifact"), boards(cluster, line, network)
        cost = setup.cost(network, platform, target, Path(scratch))
        objective = "throughput" if setup.in_flight > 1 else "latency"
        dicompiler.compile(
            built(network),
            platform,
            strategy,
            target=target,
            cost=cost,
            objective=objective,
            output=artifact,
            wire_dtype=setup.wire or None,
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
    return Case(*setting, strategy, found.predicted_s, found.simulated_s, found.frame_s, found.compute_slowdown)


def cases(settings: Sequence[tuple[str, int, str, str]], strategies: Sequence[str], setup: Setup) -> Iterator[Case]:
    for setting, strategy in product(settings, strategies):
        try:
            yield measured(setting, strategy, setup)
        except DicompilerError as error:
            click.echo(f"{' '.join(map(str, setting))} {strategy}: {error}", err=True)


def errors(found: Sequence[Case]) -> Table:
    """Median and worst error by target."""
    table = Table("target", "cases", "median error", "worst", "of", title="predicted against measured")
    for target in dict.fromkeys(case.target for case in found):
        own = [case for case in found if case.target == target]
        worst = max(own, key=lambda case: case.error)
        middle = statistics.median(case.error for case in own)
        name = f"{worst.network} {worst.line} {worst.cluster} {worst.strategy}"
        table.add_row(target, str(len(own)), f"{middle:.1%}", f"{worst.error:.1%}", name)
    return table


@dataclass(frozen=True)
class Choice:
    """What `auto` chose in a setting. lost: how many times as long its frame took as the fastest's; gave, promised: how
    many times as fast as one device it was, and was to be."""

    setting: tuple[str, int, str, str]
    fastest: str
    lost: float
    gave: float
    promised: float

    @property
    def right(self) -> bool:
        """Whether its gain is near what it promised, and it is not slower than one device."""
        return abs(self.promised / self.gave - 1) <= PROMISE and self.gave * ALONE >= 1


def choices(found: Sequence[Case]) -> list[Choice]:
    """How `auto` did among the strategies of each setting that one device was measured in too."""
    chosen = []
    for setting in dict.fromkeys(case.setting for case in found):
        own = {case.strategy: case for case in found if case.setting == setting}
        if "auto" in own and "single" in own:
            best, auto, single = min(own.values(), key=lambda case: case.measured_s), own["auto"], own["single"]
            gave, promised = single.measured_s / auto.measured_s, single.predicted_s / auto.predicted_s
            chosen.append(Choice(setting, best.strategy, auto.measured_s / best.measured_s, gave, promised))
    return chosen


def chosen(found: Sequence[Choice]) -> Table:
    """A row for each setting."""
    table = Table("setting", "really fastest", "auto by it", "auto by one device", "promised", title="auto")
    for one in found:
        figures = f"{one.lost:.3f}", f"{one.gave:.2f}", f"{one.promised:.2f}"
        table.add_row(" ".join(map(str, one.setting)), one.fastest, *figures)
    return table


def reached(found: Sequence[Case]) -> bool:
    """Whether errors, and what auto chose, are within the limits."""
    wrong, auto = [case.error for case in found], choices(found)
    near = sum(one.lost <= NEAR for one in auto)
    return (
        statistics.median(wrong) <= MEDIAN
        and max(wrong) <= WORST
        and near >= OFTEN * len(auto)
        and all(one.right for one in auto)
    )


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--network", "names", multiple=True, default=NETWORKS, help="Only these (repeatable).")
@click.option("--line", "lines", multiple=True, type=int, default=LINES, help="Mbit/s (repeatable).")
@click.option("--cluster", "clusters", multiple=True, default=CLUSTERS, help="Boards (repeatable).")
@click.option("--target", "targets", multiple=True, default=TARGETS, help="Only these (repeatable).")
@click.option("--strategy", "strategies", multiple=True, default=STRATEGIES, help="Only these (repeatable).")
@click.option("--frames", default=8, help="Of each case; a stream has as many times those in flight.")
@click.option(
    "--in-flight", default=1, help="Frames on their way at once: more than 1 measures the period of a stream."
)
@click.option("--tls", is_flag=True, help="Messages of sockets are in TLS.")
@click.option("--slower", default=0.0, help="Boards compute so many times as long as one core here, by a profile.")
@click.option("--wire", default="", help="As what tensors travel, such as float16.")
@click.option("--dilation", default=1.0, help="All of it is played so many times slower, as `dicompiler emulate` does.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="All cases, as JSON.")
def main(
    names: Sequence[str],
    lines: Sequence[int],
    clusters: Sequence[str],
    targets: Sequence[str],
    strategies: Sequence[str],
    output: Path | None,
    **setup: Any,
) -> None:
    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    found = []
    for case in cases(list(product(names, lines, clusters, targets)), strategies, Setup(**setup)):
        click.echo(case, err=True)
        found.append(case)
        if output is not None:
            output.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n", encoding="utf-8")
    if not found:
        raise click.ClickException("no case could be played: see the lines above")
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(errors(found))
    console.print(chosen(choices(found)))
    sys.exit(0 if reached(found) else 1)


if __name__ == "__main__":
    main()
