"""Measure the target `mpi`: one rank against onnxruntime in Python, two ranks against one, and the time to lower.

It also checks the outputs for many networks and splits. Each command prints medians. The exit code is 1 if a limit is
exceeded. Run it as README.md says, on an idle host.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import onnxruntime as ort
from compile_cost import DEVICES, PIECES, PLATFORM, write_model_and_plan
from support import boards
from support.splits import ALL, Case, splits

import dicompiler
from dicompiler import networks
from dicompiler.driver.artifact import install, run
from dicompiler.driver.compiler import run_strategy
from dicompiler.driver.prepare import prepare
from dicompiler.driver.problem_setup import make_problem
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Plan, load_plan
from dicompiler.ir.platform import Platform
from dicompiler.networks import LIGHT_NAMES
from dicompiler.partition.lowering import lower
from dicompiler.plugin.registry import registry
from dicompiler.target.manifest import write_digests_and_checksum
from dicompiler.target.remote.hosts import Hosts
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.comparison import check_transfers, compare_value, random_inputs
from dicompiler.verify.exact import check_model
from dicompiler.verify.executor import run_model
from dicompiler_targets.mpi import MpiTarget

OVERHEAD, SPEEDUP, COPIES, EXTRA_S = 1.05, 1.6, 1.5, 0.5
"""Limits of the measurements.

- OVERHEAD: Largest time of a frame on one rank, divided by that in onnxruntime in Python.
- SPEEDUP: Least frames per second of two ranks, divided by those of one rank.
- COPIES, EXTRA_S: Lowering may take COPIES times as long as copying the model file, plus EXTRA_S seconds.
"""


@click.group(context_settings={"show_default": True})
def main() -> None:
    """Measure the MPI target."""
    logging.getLogger("dicompiler").setLevel(logging.ERROR)


def compiled(model: Any, strategy: str, platform: str, place: Path) -> PipelineState:
    """Compile a model for `mpi` with one thread for each segment, write the artifact to `place`, and return the result.

    The objective is throughput.
    """
    return dicompiler.compile(
        model, platform=platform, strategy=strategy, objective="throughput", target="mpi{threads=1}", output=place
    )


def in_python(model: Path, inputs: Any, frames: int) -> float:
    """Return the median seconds of a frame in onnxruntime, with one thread and the default optimization level."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(str(model), options, ["CPUExecutionProvider"])
    seconds = []
    for _ in range(frames + 2):
        start = time.perf_counter()
        session.run(None, inputs)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


@main.command()
@click.option("--network", "names", multiple=True, default=("vgg16", "resnet50", "mobilenet_v2"))
@click.option("--frames", default=20, help="Frames of each run.")
@click.option("--rounds", default=5, help="Repetitions.")
def single(names: Sequence[str], frames: int, rounds: int) -> None:
    """Compare the time of a frame on one rank, with one thread, with that of onnxruntime in Python."""
    reached = True
    for name in names:
        with tempfile.TemporaryDirectory() as place:
            made = compiled(networks.build(name), "single", "rpi4x1", Path(place, "a"))
            assert made.program is not None
            inputs, ratios = random_inputs(made.program.inputs), []
            model = Path(place, "a", "reference", "model.onnx")
            for _ in range(rounds):
                python = in_python(model, inputs, frames)
                result = MpiTarget().run(
                    Path(place, "a"), [inputs] * (frames + 2), RunOptions(in_flight=1, kept_frames=1)
                )
                ratios.append(statistics.median(result.frames_s[2:]) / python)
        ratio = statistics.median(ratios)
        reached = reached and ratio <= OVERHEAD
        click.echo(
            f"{name}: {1000 * python:.2f} ms in Python, a rank takes {ratio:.3f} times that (at most {OVERHEAD})"
        )
    sys.exit(0 if reached else 1)


@main.command()
@click.option("--network", default="vgg16")
@click.option("--frames", default=20, help="Frames of each run.")
@click.option("--rounds", default=5, help="Repetitions.")
def pipeline(network: str, frames: int, rounds: int) -> None:
    """Compare the frames per second of two ranks in a pipeline, with a core each, with those of one rank."""
    cores, found = sorted(os.sched_getaffinity(0)), []
    with tempfile.TemporaryDirectory() as place:
        model = networks.build(network)
        made = compiled(model, "pipeline", "rpi4-gateway-x2", Path(place, "two"))
        compiled(model, "single", "rpi4x1", Path(place, "one"))
        assert made.program is not None
        given = [random_inputs(made.program.inputs)] * frames
        options = RunOptions(pin=True, kept_frames=1)
        for _ in range(rounds):
            two = MpiTarget().run(Path(place, "two"), given, options)
            os.sched_setaffinity(0, cores[:1])
            try:
                one = MpiTarget().run(Path(place, "one"), given, options)
            finally:
                os.sched_setaffinity(0, cores)
            found.append(one.total_s / two.total_s)
            busy = ", ".join(f"{1000 * report.compute_s / frames:.1f} ms" for report in two.reports)
            click.echo(
                f"one rank {1000 * one.total_s / frames:.1f} ms a frame, two {1000 * two.total_s / frames:.1f} ms, of"
                f" which they compute {busy}",
                err=True,
            )
    speedup = statistics.median(found)
    click.echo(f"{network}: two ranks have {speedup:.2f} times the frames per second of one (wanted: {SPEEDUP})")
    sys.exit(0 if speedup >= SPEEDUP else 1)


def fastest(work: Callable[[], object], times: int) -> float:
    """Call the function `work` several times, and return the least seconds of a call."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@main.command()
@click.option("--network", default="light/vgg19")
@click.option("--rounds", default=3, help="Repetitions, of which the fastest counts.")
def lowering(network: str, rounds: int) -> None:
    """Compare splitting a network into 24 submodels on 8 devices, and writing them, with copying the model file."""
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        path, planned = scratch / "model.onnx", scratch / "plan.json"
        write_model_and_plan(network, path, planned)
        model, platform, chosen = Model.load(path), Platform.load(PLATFORM, _families()), load_plan(planned)

        def write_programs() -> None:
            out = scratch / "out"
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            MpiTarget().emit(lower(replace(prepare(model), plan=chosen, platform=platform)), out)

        copy_s = fastest(lambda: shutil.copyfile(path, scratch / "copy.onnx"), rounds)
        lower_s = fastest(write_programs, rounds)
        size = path.stat().st_size
    limit = COPIES * copy_s + EXTRA_S
    click.echo(
        f"{network}, {size >> 20} MiB in {PIECES} pieces on {DEVICES} devices: lowered in {lower_s:.2f} s, copied in"
        f" {copy_s:.2f} s (allowed: {limit:.2f} s)"
    )
    sys.exit(0 if lower_s <= limit else 1)


def find_difference(case: Case, plan: Plan, model: Model, inputs: Any, is_exact: bool, place: Path) -> str:
    """Run a model on MPI ranks under a plan, and describe the first wrong output or transfer; "" if there is none.

    Outputs must be bit-equal to those of the model if `is_exact` is True, and else within a tolerance.
    """
    made = lower(replace(prepare(model), plan=plan, platform=case.compilation.platform))
    assert made.program is not None
    place.mkdir()
    MpiTarget(threads=1).emit(made, place)
    write_digests_and_checksum(place)
    result = MpiTarget().run(place, [inputs], RunOptions(in_flight=1))
    shutil.rmtree(place)
    reference = run_model(model, inputs)
    checks = [
        compare_value(name, reference[name], value, exact=is_exact)
        for outputs in result.outputs_by_device[0].values()
        for name, value in outputs.items()
    ]
    sent = {index: count for report in result.reports for index, count in report.sent_bytes.items()}
    checks.append(check_transfers(made.program.transfers, sent, 1))
    return next((f"{check.name}: {check.detail}" for check in checks if not check.passed), "")


@main.command()
@click.option("--network", "names", multiple=True, default=tuple(f"light/{name}" for name in LIGHT_NAMES))
@click.option("--kind", "kinds", multiple=True, default=ALL)
@click.option("--ranks", "counts", multiple=True, type=int, default=(1, 2, 4, 7))
def matrix(names: Sequence[str], kinds: Sequence[str], counts: Sequence[int]) -> None:
    """Run networks by kind of split and number of ranks, and check outputs and bytes.

    With the check model, outputs must be bit-equal; with real weights, they must be within a tolerance. The bytes must
    be as predicted. A single rank computes all layers whole.
    """
    failed = 0
    for name, count in itertools.product(names, counts):
        case = Case.of(networks.build(name), count)
        single = registry().make("strategies", "single")
        plans = [("single", run_strategy(make_problem(case.compilation), single))] if count == 1 else []
        if count > 1:
            plans += [(one.kind, case.plan(one)) for one in splits(case.layers, kinds, sets=1, devices=count)]
        for kind, chosen in plans:
            with tempfile.TemporaryDirectory() as scratch:
                model, inputs = check_model(case.compilation.model, 0)
                place = Path(scratch, "a")
                wrong = find_difference(case, chosen, model, inputs, True, place)
                wrong = wrong or find_difference(case, chosen, case.compilation.model, case.inputs, False, place)
            failed += bool(wrong)
            click.echo(f"{name:20} {count} {kind:16} {wrong or 'ok'}")
    sys.exit(1 if failed else 0)


def _families() -> list[Any]:
    return [provided.value for provided in registry().platforms.values()]


@main.command()
@click.option("--network", default="light/squeezenet")
@click.option("--strategy", default="modnn")
@click.option("--frames", default=10, help="Frames, one after another.")
def cluster(network: str, strategy: str, frames: int) -> None:
    """Compare the time of four ranks on emulated boards, joined at 100 Mbit/s, with the simulator's prediction.

    The boards are network namespaces, which compute as fast as this host. The prediction is for Raspberry Pi 4 boards.
    It needs root, tc, ip and sshd.
    """
    names = [f"pi{index:02}" for index in range(1, 5)]
    with tempfile.TemporaryDirectory() as place, boards.cluster(Path(place), names) as made, made.inside():
        # By default, ranks on one machine use shared memory. Boards have no common memory, so TCP is used instead.
        os.environ |= {"OMPI_MCA_btl": "self,tcp"}
        for board in made.boards.values():
            shape = "qdisc add dev net root tbf rate 100mbit burst 32kbit latency 400ms"
            boards.call("tc", "-n", board.space, *shape.split())
            boards.call("tc", "-n", made.space, *shape.replace("dev net", f"dev {board.space}").split())
        net, hosts = Path(place, "net"), Hosts.load(made.hosts(Path(place, "hosts.toml")))
        compilation = compiled(networks.build(network), strategy, "rpi4-gateway-x4", net)
        assert compilation.program is not None and compilation.platform is not None
        options = RunOptions(in_flight=1, kept_frames=1, hosts=hosts, insecure=True)
        install(net, options)
        given = random_inputs(compilation.program.inputs)
        result = run(net, {value: given[value] for value in given}, frames, options=options)
    sent = {index: count for report in result.reports for index, count in report.sent_bytes.items()}
    check = check_transfers(compilation.program.transfers, sent, frames)
    click.echo(f"{network}, {strategy}: {check.detail}")
    computing = max(report.compute_s for report in result.reports) / frames
    assert compilation.metrics is not None
    click.echo(f"a frame takes {1000 * statistics.median(result.frames_s):.1f} ms, of which a rank computes at most "
               f"{1000 * computing:.1f} ms")  # fmt: skip
    click.echo(f"predicted for boards of {compilation.platform.name}: {1000 * compilation.metrics.latency_s:.1f} ms")
    sys.exit(0 if check.passed else 1)


if __name__ == "__main__":
    main()
