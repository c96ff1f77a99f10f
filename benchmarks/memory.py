"""Compare the predicted with the measured memory of the devices of target `sockets`.

The table on stdout has a row for each device. A device process reports its largest resident memory. With `--constants`,
networks of one kind of layer show where the constants of the target's memory model come from.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
from onnx import helper, numpy_helper

import dicompiler
from dicompiler import networks
from dicompiler.cli.table import print_table
from dicompiler.cost.memory import program_memory
from dicompiler.ir.plan import Part, Plan
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.comparison import random_inputs
from dicompiler_targets.sockets.target import SocketsTarget

MIB = 1 << 20
PLATFORM = "rpi4-gateway-x4"
OVER, UNDER = 1.15, 0.95
"""Limits of the predicted memory divided by the measured memory."""
STRATEGIES = ("pipeline", "modnn")


@dataclass(frozen=True)
class Row:
    """The memory of one device in one run, in bytes.

    Attributes:
        name: Name of the run.
        device: Name of the device.
        held: Predicted memory for weights, activations and buffers.
        added: Memory that the target adds, according to its memory model.
        measured: Largest resident memory of the device's process.
    """

    name: str
    device: str
    held: int
    added: int
    measured: int

    @property
    def ratio(self) -> float:
        """Predicted divided by measured memory."""
        return (self.held + self.added) / self.measured


def run(name: str, model: onnx.ModelProto, strategy: str | Plan, platform: str = PLATFORM) -> list[Row]:
    """Compile a model, run one frame, and return a row for each device, with predicted and measured memory."""
    target = SocketsTarget()
    chosen: dict[str, Any] = {"plan": strategy} if isinstance(strategy, Plan) else {"strategy": strategy}
    with tempfile.TemporaryDirectory() as place:
        made = dicompiler.compile(model, platform=platform, output=Path(place, "a"), **chosen)
        program = made.program
        assert program is not None
        reports = target.run(Path(place, "a"), [random_inputs(program.inputs)], RunOptions(in_flight=1)).reports
    held, added = program_memory(program), target.memory_overhead(program)
    return [Row(name, r.device, held[r.device].total, added[r.device], r.peak_memory_bytes) for r in reports]


# -- networks with one kind of layer, each to measure one constant of the target's memory model


def _model(
    nodes: Sequence[onnx.NodeProto], shape: Sequence[int], weights: dict[str, tuple[int, ...]]
) -> onnx.ModelProto:
    """Return a model from `x` to `y`, both of `shape`, with seeded weights near 1.

    The weights are positive, because some of them are variances.
    """
    random = np.random.default_rng(0)
    float_ = onnx.TensorProto.FLOAT
    arrays = [numpy_helper.from_array(1 + 0.01 * random.random(s, "float32"), name) for name, s in weights.items()]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", float_, shape)],
        [helper.make_tensor_value_info("y", float_, shape)],
        arrays,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def chain(ops: Sequence[str], shape: Sequence[int]) -> onnx.ModelProto:
    """Return a model of operators without weights, one after another, named n0, n1, …."""
    names = ["x", *(f"t{i}" for i in range(1, len(ops))), "y"]
    extra: dict[str, dict[str, Any]] = {"LRN": {"size": 5}}
    nodes = [
        helper.make_node(op, [names[i]], [names[i + 1]], name=f"n{i}", **extra.get(op, {})) for i, op in enumerate(ops)
    ]
    return _model(nodes, shape, {})


def gemms(count: int, size: int) -> onnx.ModelProto:
    """Return a model of `count` fully connected layers, one after another, with `size` inputs and outputs each."""
    names = ["x", *(f"t{i}" for i in range(1, count)), "y"]
    nodes = [helper.make_node("Gemm", [names[i], f"w{i}"], [names[i + 1]], name=f"n{i}") for i in range(count)]
    return _model(nodes, (1, size), {f"w{i}": (size, size) for i in range(count)})


def convolutions(count: int, channels: int, kernel: int, behind: Sequence[str], side: int = 4) -> onnx.ModelProto:
    """Return a model of `count` convolutions, one after another, each followed by the operators `behind`."""
    nodes, weights, at = [], dict[str, tuple[int, ...]](), "x"
    for i in range(count):
        weights[f"w{i}"] = (channels, channels, kernel, kernel)
        nodes.append(helper.make_node("Conv", [at, f"w{i}"], [f"c{i}"], name=f"c{i}", pads=[kernel // 2] * 4))
        at = f"c{i}"
        for op in behind:
            own = {"BatchNormalization": [f"{at}.{p}" for p in "abcd"], "Mul": [f"{at}.m"], "Add": [f"{at}.a"]}.get(
                op, []
            )
            weights |= dict.fromkeys(own, (channels,) if len(own) == 4 else (channels, 1, 1))
            nodes.append(helper.make_node(op, [at, *own], [f"{at}.{op}"], name=f"{at}.{op}"))
            at = f"{at}.{op}"
    nodes.append(helper.make_node("Identity", [at], ["y"], name="last"))
    return _model(nodes, (1, channels, side, side), weights)


def constants() -> Iterator[Row]:
    """Yield the rows of one network for each constant of the target's memory model."""
    one = "rpi4x1"
    yield from run("BASE: one node", chain(["Relu"], (1, 8)), "single", one)
    yield from run("NODE: 400 nodes", chain(["Softplus"] * 400, (1, 8)), "single", one)
    count = 80
    plan = Plan({f"n{i}": (Part(f"pi0{1 + i % 2}"),) for i in range(count)}, ("pi01",), ("pi01",))
    yield from run(f"SESSION: {count // 2} each", chain(["Softmax"] * count, (1, 8)), plan, "rpi4-gateway-x2")
    yield from run("PACKED: three of 64 MiB", gemms(3, 4096), "single", one)
    yield from run("ACTIVATIONS: 12 MiB each", chain(["Softmax"] * 3, (1, 64, 224, 224)), "single", one)
    yield from run("WORKSPACE: LRN", chain(["LRN"], (1, 64, 224, 224)), "single", one)
    yield from run("WORKSPACE: Conv", convolutions(3, 64, 3, ["Relu"], 224), "single", one)
    for behind in (["Relu"], ["BatchNormalization", "Relu"], ["BatchNormalization", "Mul", "Add", "Relu"]):
        text = "FOLDED" if len(behind) == 2 else "REFOLDED" if len(behind) > 2 else "not folded"
        yield from run(f"{text}: 32 of 0.6 MiB", convolutions(32, 128, 3, behind), "single", one)
        yield from run(f"{text}: 16 of 1 MiB", convolutions(16, 512, 1, behind), "single", one)
        yield from run(f"{text}: 8 of 9 MiB", convolutions(8, 512, 3, behind), "single", one)


def report(rows: Sequence[Row]) -> bool:
    """Print the table, and return True if all predictions are within the limits."""
    headers = ("run", "device", "program MiB", "target adds MiB", "measured MiB", "predicted / measured")
    texts = [
        (r.name, r.device, *(f"{value / MIB:.1f}" for value in (r.held, r.added, r.measured)), f"{r.ratio:.3f}")
        for r in rows
    ]
    print_table(headers, texts, right=range(2, len(headers)))
    ratios = [row.ratio for row in rows]
    click.echo(f"predicted / measured: from {min(ratios):.3f} to {max(ratios):.3f} (allowed: {UNDER} to {OVER})")
    return all(UNDER <= ratio <= OVER for ratio in ratios)


@click.command()
@click.option("--network", multiple=True, help="Names in dicompiler.networks; default: the nine light CNNs.")
@click.option("--strategy", multiple=True, default=STRATEGIES, show_default=True, help="How they are split.")
@click.option("--constants", "only_constants", is_flag=True, help="Networks of one thing each instead.")
def main(network: tuple[str, ...], strategy: tuple[str, ...], only_constants: bool) -> None:
    """Compare predicted and measured memory."""
    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    if only_constants:
        report(list(constants()))
        return
    names = network or tuple(f"light/{name}" for name in networks.LIGHT_NAMES)
    rows = [row for name in names for how in strategy for row in run(f"{name} {how}", networks.build(name), how)]
    sys.exit(0 if report(rows) else 1)


if __name__ == "__main__":
    main()
