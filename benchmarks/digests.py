"""Digests of plans and artifacts for many networks, strategies and targets, to find changes that a user would see.

The script writes a JSON file of digests (`-o`). With `--against`, it compares them with an earlier file and prints a
line for each case that differs, with the files of the artifact that differ. The exit code is then 1. See README.md.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import onnx

import dicompiler
from dicompiler.cli.file_io import write_npz
from dicompiler.networks import build


class Case(NamedTuple):
    """One compilation, described by texts.

    Attributes:
        network: Name of a network of `dicompiler.networks`; " int8" at its end if it is quantised first.
        strategy: Strategy with its options.
        target: Name of the target.
        platform: Name of the platform.
        objective: Objective of the strategy.
        cost: Cost model with its options.
    """

    network: str
    strategy: str
    target: str
    platform: str = "rpi4-gateway-x4"
    objective: str = "latency"
    cost: str = "analytic"

    def __str__(self) -> str:
        return " ".join(self)


SMALL = ("lenet", "tiny", "quirks", "resnet8", "ds_cnn", "light/squeezenet", "light/shufflenet")
LARGE = ("resnet18", "mobilenet_v2", "squeezenet", "alexnet", "densenet121")
STRATEGIES = ("single", "pipeline", "modnn", "dp", "dp{method=sls}", "stahl", "gradient")
SEARCHES = (
    "cpsat{time=60 workers=1}",
    "genetic{population=12 generations=3 measured=4}",
    "auto{strategies=single,modnn,dp,gradient budget=120 tries=20}",
)
BOARDS = "stm32h743x4"


def cases() -> list[Case]:
    """Return all cases (compilations) of the benchmark, the slowest first."""
    found = [Case(network, strategy, "sockets") for network in LARGE for strategy in STRATEGIES[1:4]]
    found += [Case("resnet18", strategy, "mpi", "jetson-nx3") for strategy in (*STRATEGIES, SEARCHES[2])]
    found += [Case(network, search, "sockets") for network in ("tiny", "resnet8", "lenet") for search in SEARCHES]
    found += [Case(network, strategy, "sockets") for network in SMALL for strategy in STRATEGIES]
    found += [Case(network, strategy, "mpi") for network in SMALL[:3] for strategy in STRATEGIES[:3]]
    found += [
        Case(f"{network} int8", s, "sockets") for network in ("lenet", "resnet8", "tiny") for s in STRATEGIES[1:4]
    ]
    for network in ("lenet", "ds_cnn", "resnet8"):
        found += [Case(f"{network} int8", strategy, "tflm", BOARDS) for strategy in ("single", "modnn", "dp", "fit")]
        found.append(Case(network, "modnn", "tflm", BOARDS))
    found += [Case("resnet8", "gradient", "sockets", objective=o) for o in ("energy", "latency+0.5*energy")]
    found += [Case(network, "replicate", "sockets", objective="throughput") for network in SMALL[:4]]
    found += [Case("tiny", "modnn", "sockets", cost='roofline{bandwidth="4 GB/s"}')]
    return found


def source(network: str) -> onnx.ModelProto:
    """Return the network of a case in float32, with seeded weights."""
    return build(network.removesuffix(" int8"), seed=1)


def samples(model: onnx.ModelProto, file: Path) -> None:
    """Write two seeded random inputs of a network to `file`, as samples for its quantisation."""
    (value,) = model.graph.input
    shape = tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
    rows = np.random.default_rng(7).normal(size=(2, *shape)).astype(np.float32)
    write_npz(file, {value.name: rows})


def digest(case: Case) -> dict[str, Any]:
    """Compile a case, and return its metrics and the digests of all files of its artifact, or its error message."""
    with tempfile.TemporaryDirectory() as scratch:
        model, place, given = source(case.network), Path(scratch), None
        if case.network.endswith(" int8"):
            given = place / "samples.npz"
            samples(model, given)
        try:
            result = dicompiler.compile(
                model, case.platform, case.strategy, target=case.target, objective=case.objective, cost=case.cost,
                output=place / "out", quantize_samples=given,
            )  # fmt: skip
        except dicompiler.DicompilerError as error:
            return {"error": str(error).replace(scratch, "")}
        files = {str(f.relative_to(place / "out")): f for f in sorted((place / "out").rglob("*")) if f.is_file()}
        hashes = {name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for name, file in files.items()}
        metrics = [
            json.loads(json.dumps(asdict(m), default=float)) for m in (result.metrics, result.single_device_metrics)
        ]
        return {"metrics": metrics, "files": hashes}


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line for each case whose digests, metrics or error differ between two runs of the benchmark."""
    lines = []
    for name in [*now, *(name for name in before if name not in now)]:
        old, new = before.get(name), now.get(name)
        if old is None or new is None:
            lines.append(f"{name}: only {'now' if old is None else 'before'}")
        elif "error" in old or "error" in new:
            if old != new:
                lines.append(f"{name}: {old.get('error', 'compiled')} → {new.get('error', 'compiles')}")
        else:
            every = sorted({*old["files"], *new["files"]})
            wrong = [file for file in every if old["files"].get(file) != new["files"].get(file)]
            wrong += ["metrics"] * (old["metrics"] != new["metrics"])
            if wrong:
                lines.append(f"{name}: {', '.join(wrong)}")
    return lines


@click.command(help=__doc__)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write the digests.")
@click.option("--against", type=click.Path(path_type=Path, exists=True), help="What an earlier run wrote.")
@click.option("--jobs", default=2, show_default=True)
@click.option("--only", default="", help="The cases whose text holds this.")
def main(output: Path | None, against: Path | None, jobs: int, only: str) -> None:
    chosen = [case for case in cases() if only in str(case)]
    with ProcessPoolExecutor(jobs) as pool:
        found = dict(zip(map(str, chosen), pool.map(digest, chosen), strict=True))
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{len(found)} cases, {sum('error' in one for one in found.values())} refused")
    if against is not None:
        before = json.loads(against.read_text(encoding="utf-8"))
        lines = differences({name: one for name, one in before.items() if only in name}, found)
        print("\n".join(lines) or "all as before")
        sys.exit(bool(lines))


if __name__ == "__main__":
    main()
