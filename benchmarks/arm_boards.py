"""Run split networks on emulated 64-bit ARM boards with each engine, and compare the outputs with onnxruntime.

Each board is a process of qemu-user with the processor of a Raspberry Pi 4 (Cortex-A72), Debian's Python, and wheels
for aarch64, as on a real board. The outputs show that the runtime of target `sockets` and the engines work on such
boards. The times mean nothing. The exit code is 1 if an output is outside its tolerance. How to run it: see README.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from support.crossing import CORE

import dicompiler
from dicompiler import networks
from dicompiler.base.captured_output import CapturedOutput
from dicompiler.driver.engines import engine_tolerances
from dicompiler.ir.onnx.model import Model
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.comparison import compare_value, graph_inputs, random_inputs
from dicompiler.verify.executor import run_model
from dicompiler_targets.sockets.artifact import Manifest
from dicompiler_targets.sockets.device_connections import DeviceProcess, StartDevice
from dicompiler_targets.sockets.open_session import run_artifact

NETWORKS = ("lenet", "squeezenet", "mobilenet_v2")
ENGINES = ("onnxruntime", "ncnn", "mnn")
PACKAGES = ("python3.11", "libstdc++6", "libgomp1", "zlib1g")
"""Debian packages of a board."""
WHEELS = ("numpy", "onnxruntime", "ncnn", "MNN")
PLATFORMS = ("manylinux2014_aarch64", "manylinux_2_27_aarch64", "manylinux_2_28_aarch64")
FRAMES, TIMEOUT_S = 3, 600.0


def install_board(place: Path) -> None:
    """Unpack Debian's Python and the wheels for aarch64 below `place`, with a processor description for onnxruntime."""
    lists, cache = place / "lists", place / "cache"
    for directory in (lists / "partial", cache / "archives" / "partial", place / "proc"):
        directory.mkdir(parents=True)
    (place / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures::": "arm64",
        "Dir::State::lists": lists,
        "Dir::State::status": place / "status",
        "Dir::Cache": cache,
    }
    apt = ["apt-get", "-q", "-y", *(f"-o{name}={value}" for name, value in settings.items())]
    subprocess.run([*apt, "update"], check=True, stdout=sys.stderr)
    subprocess.run(
        [*apt, "--download-only", "--no-install-recommends", "install", *PACKAGES], check=True, stdout=sys.stderr
    )
    for package in sorted((cache / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(place)], check=True)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary=:all:", "--python-version=3.11"]
    platforms = [f"--platform={name}" for name in PLATFORMS]
    subprocess.run([*pip, *platforms, f"--target={place / 'wheels'}", *WHEELS], check=True, stdout=sys.stderr)
    (place / "proc" / "cpuinfo").write_text("".join(CORE.format(i) for i in range(os.cpu_count() or 1)))


def start_on_board(place: Path, artifact: Path) -> StartDevice:
    """Return a function that starts a device of the artifact on an emulated board, with the artifact's own runtime."""
    variables = {"PYTHONHOME": place / "usr", "PYTHONPATH": place / "wheels"}
    emulator = ["qemu-aarch64", "-cpu", "cortex-a72", "-L", str(place)]
    emulator += [part for name, value in variables.items() for part in ("-E", f"{name}={value}")]

    def start(manifest: Manifest, arguments: Sequence[str]) -> DeviceProcess:
        popen = subprocess.Popen(
            [*emulator, str(place / "usr/bin/python3.11"), "-m", "runtime", "--end-with-stdin", *arguments],
            cwd=artifact / manifest["device"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert popen.stdout is not None
        return DeviceProcess(manifest, popen, CapturedOutput(popen.stdout))

    return start


def run_network(place: Path, network: str, engine: str) -> bool:
    """Run a network on two boards and print how its outputs differ; return True if they are within the tolerance."""
    proto = networks.build(network)
    model = Model.load(proto)
    inputs: Mapping[str, Any] = random_inputs(graph_inputs(model))
    with tempfile.TemporaryDirectory() as scratch:
        artifact = Path(scratch, "artifact")
        plan = dicompiler.compile(proto, "rpi4x2", "modnn", engine=engine, output=artifact).plan
        options = RunOptions(timeout_s=TIMEOUT_S, heartbeat_s=TIMEOUT_S)
        result = run_artifact(artifact, [inputs] * FRAMES, options, start_on_board(place, artifact))
    tolerances = engine_tolerances(model, plan.engines)
    expected = run_model(model, inputs)
    checks = [
        compare_value(name, expected[name], found[name], tolerance=tolerances.get(name))
        for found in result.outputs
        for name in expected
    ]
    click.echo(f"{network}, {engine}: {checks[-1].detail}")
    return all(check.passed for check in checks)


@click.command(help=__doc__)
@click.option("--network", "names", multiple=True, default=NETWORKS, show_default=True, help="Networks.")
@click.option("--engine", "engines", multiple=True, default=ENGINES, show_default=True, help="Engines.")
def main(names: Sequence[str], engines: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        install_board(Path(place))
        passed = [run_network(Path(place), name, engine) for name in names for engine in engines]
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
