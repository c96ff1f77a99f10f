"""The cost of compiling large networks into 24 submodels on 8 devices for target `sockets`.

The table shows the CPU time and peak memory of the whole `dicompiler compile` process, the time to copy the model file,
and the time of each phase. The exit code is 1 if a limit is exceeded. How to run it: see README.md.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

PLATFORM, DEVICES, PIECES = "rpi4-gateway-x8", 8, 24


@dataclass(frozen=True)
class Limit:
    """Limit of the compile time of a network, and the cost of AutoDiCE's published tool for the same work.

    AutoDiCE was measured on a machine with two cores.

    Attributes:
        cpu_s: CPU seconds (user and system) that compiling may take.
        autodice_s: Seconds that AutoDiCE takes.
        autodice_mib: Peak memory of AutoDiCE in MiB.
    """

    cpu_s: float
    autodice_s: float
    autodice_mib: int


LIMITS = {
    "light/vgg19": Limit(2.0, 45.0, 2786),
    "resnet101": Limit(1.8, 11.9, 899),
    "densenet121": Limit(2.0, 2.3, 205),
}
PHASES = (
    "start", "load", "normalise", "infer-shapes", "form-layers", "trim", "make_plan", "partition", "build_program",
    "write_artifact", "rest",
)  # fmt: skip

# This program runs `dicompiler compile` and measures the CPU time of each phase. Measuring adds time, so the total is
# measured in another process.
_CLOCKED = """
import functools, json, resource, sys
def now():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
import dicompiler.cli, dicompiler.driver.compiler as compiler, dicompiler.partition.lowering as lowering
import dicompiler.plugin.pass_manager as passes
spent, inner = {}, [0.0]
def clocked(place, attribute, name):
    function = getattr(place, attribute)
    @functools.wraps(function)
    def call(*given, **named):
        outer, inner[0], start = inner[0], 0.0, now()
        try:
            return function(*given, **named)
        finally:
            took, key = now() - start, name or given[0].name
            spent[key] = spent.get(key, 0.0) + took - inner[0]
            inner[0] = outer + took
    setattr(place, attribute, call)
clocked(passes, "_run_pass", None)
for attribute in ("make_plan", "add_metrics", "write_artifact"):
    clocked(compiler, attribute, attribute)
clocked(lowering, "build_program", "build_program")
load = compiler.Model.load
clocked(compiler.Model, "load", "load")
spent["start"] = now()
code = dicompiler.cli.main(sys.argv[1:])
spent["rest"] = now() - sum(spent.values())
print(json.dumps(spent), file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True)
class Cost:
    """The cost of one process.

    Attributes:
        user_s: CPU seconds in user mode.
        system_s: CPU seconds in the kernel.
        peak: Peak resident bytes.
        last: The last line that the process printed.
    """

    user_s: float
    system_s: float
    peak: int
    last: str

    @property
    def cpu_s(self) -> float:
        return self.user_s + self.system_s


def run_measured(arguments: Sequence[str]) -> Cost:
    """Run a command to its end and return its cost; raise SystemExit with its output if it fails."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(arguments, stdout=out, stderr=out, text=True)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read().strip()
    if process.returncode:
        raise SystemExit(text)
    return Cost(used.ru_utime, used.ru_stime, used.ru_maxrss * 1024, text.rpartition("\n")[2])


def write_model_and_plan(name: str, model: Path, plan: Path) -> None:
    """Write the network and its plan: the layers in order, in 24 pieces of equal length, which the devices get in turn.

    This runs in its own process, because the peak memory of a process includes that of its children.
    """
    from dicompiler import networks
    from dicompiler.driver.prepare import prepare
    from dicompiler.ir.onnx.model import Model
    from dicompiler.ir.plan import Part, Plan, plan_to_text
    from dicompiler.ir.platform import Platform
    from dicompiler.plugin.registry import registry

    network = Model.load(networks.build(name))
    network.save(model)
    compilation = prepare(network)
    assert compilation.layers is not None
    names = [layer.name for layer in compilation.layers.layers]
    families = [provided.value for provided in registry().platforms.values()]
    devices = [device.name for device in Platform.load(PLATFORM, families).devices]
    parts = {name: (Part(devices[i * PIECES // len(names) % DEVICES]),) for i, name in enumerate(names)}
    plan.write_text(plan_to_text(Plan(parts, (devices[0],), (devices[0],))))


def measure_best(arguments: Sequence[str], output: Path, times: int) -> Cost:
    """Return the least cost of several runs, each of which writes a new `output`."""
    costs = []
    for _ in range(times):
        if output.is_dir():
            shutil.rmtree(output)
        costs.append(run_measured(arguments))
    return min(costs, key=lambda cost: cost.cpu_s)


def measure_row(name: str, scratch: Path, times: int) -> tuple[list[str], bool]:
    """Measure the compilation of a network; return its table row, and True if the costs are within the limits."""
    limit, model, plan, output = LIMITS[name], scratch / "model.onnx", scratch / "plan.json", scratch / "out"
    maker = multiprocessing.get_context("spawn").Process(target=write_model_and_plan, args=(name, model, plan))
    maker.start()
    maker.join()
    command = [
        "compile",
        str(model),
        "--platform",
        PLATFORM,
        "--strategy",
        f'manual{{file="{plan}"}}',
        "-o",
        str(output),
    ]
    whole = measure_best([sys.executable, "-m", "dicompiler", *command], output, times)
    segments = sum(len(json.loads(file.read_text())["segments"]) for file in output.glob("*/manifest.json"))
    phases = json.loads(measure_best([sys.executable, "-c", _CLOCKED, *command], output, times).last)
    copy = measure_best(["cp", str(model), str(scratch / "copy.onnx")], output, times)
    size = model.stat().st_size
    allowed = 1.2 * size + 250e6
    cells = [
        name,
        f"{size / 1e6:.0f}",
        str(segments),
        f"{whole.user_s:.2f} + {whole.system_s:.2f} = {whole.cpu_s:.2f}",
        f"{limit.cpu_s}",
        f"{whole.peak / 1e6:.0f}",
        f"{allowed / 1e6:.0f}",
        f"{copy.cpu_s:.2f}",
        *(f"{phases.get(phase, 0.0):.2f}" for phase in PHASES),
        f"{limit.autodice_s} s, {limit.autodice_mib} MiB",
    ]
    return cells, whole.cpu_s <= limit.cpu_s and whole.peak <= allowed


@click.command()
@click.option("--network", "names", multiple=True, type=click.Choice(list(LIMITS)), help="Only these (repeatable).")
@click.option("--times", default=3, show_default=True, help="Runs of each; the cheapest counts.")
@click.option("--scratch", type=click.Path(path_type=Path, file_okay=False), help="Where to write (2 GB); else /tmp.")
def main(names: Sequence[str], times: int, scratch: Path | None) -> None:
    """Measure the cost of compiling large networks."""
    table = Table(title=f"{PIECES} submodels on {DEVICES} devices; seconds of CPU, MB", show_lines=True)
    for header in (
        "network",
        "MB",
        "segments",
        "user + system",
        "limit",
        "peak MB",
        "limit",
        "cp",
        *PHASES,
        "AutoDiCE",
    ):
        table.add_column(header, justify="right")
    kept = True
    for name in names or LIMITS:
        with tempfile.TemporaryDirectory(dir=scratch) as place:
            cells, within = measure_row(name, Path(place), times)
        table.add_row(*cells)
        kept = kept and within
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
