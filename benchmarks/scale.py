"""The time of each strategy for growing numbers of layers and devices, up to 1000 layers on 64 devices.

It prints a table of seconds, one row for each size.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import click
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

from dicompiler.base.errors import DicompilerError
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.onnx.model import Model
from dicompiler.plugin.registry import registry

STRATEGIES = ("pipeline", "modnn", "dp", "gradient", "genetic", "cpsat", "auto")
MAX_AUTO_S = 60.0
"""Limit of the search time of the strategy `auto` in seconds."""


def network(layers: int, rows: int = 64) -> Model:
    """Return a network of `layers` convolutions with 16 channels of `rows` × 64 elements, in residual blocks of two."""
    import numpy as np

    random = np.random.default_rng(0)
    nodes, weights, skip, last = [], [], "x", "x"
    for i in range(layers):
        weights.append(numpy_helper.from_array(random.normal(size=(16, 16, 3, 3)).astype(np.float32), f"w{i}"))
        nodes.append(helper.make_node("Conv", [last, f"w{i}"], [f"c{i}"], f"conv{i}", pads=[1, 1, 1, 1]))
        if i % 2:
            nodes.append(helper.make_node("Add", [f"c{i}", skip], [f"a{i}"], f"add{i}"))
            last = f"a{i}"
        else:
            nodes.append(helper.make_node("Relu", [f"c{i}"], [f"r{i}"], f"relu{i}"))
            skip, last = last, f"r{i}"
    shape = [1, 16, rows, 64]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", last)]
    graph = helper.make_graph(nodes, "scale", values[:1], values[1:], weights)
    return Model.load(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 17)]))


@click.command()
@click.option("--layers", multiple=True, type=int, default=(10, 100, 1000), show_default=True)
@click.option("--devices", multiple=True, type=int, default=(4, 16, 64), show_default=True)
@click.option("--strategy", "strategies", multiple=True, default=STRATEGIES, show_default=True)
def main(layers: Sequence[int], devices: Sequence[int], strategies: Sequence[str]) -> None:
    """Time every strategy on networks and clusters of growing size."""
    table = Table("layers", "devices", *(f"{name} s" for name in strategies))
    over = False
    for count in layers:
        model = network(count)
        for number in devices:
            cells = []
            for name in strategies:
                problem = load_problem(model, f"rpi4-gateway-x{number}")
                start = time.perf_counter()
                try:
                    registry().make("strategies", name).plan(problem)
                    cells.append(f"{time.perf_counter() - start:.1f}")
                except DicompilerError as error:
                    cells.append("none")
                    click.echo(f"{count} layers, {number} devices: {name}: {error}", err=True)
                over = over or (name == "auto" and time.perf_counter() - start > MAX_AUTO_S)
                click.echo(f"{count} {number} {name} {cells[-1]}", err=True)
            table.add_row(str(count), str(number), *cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    sys.exit(1 if over else 0)


if __name__ == "__main__":
    main()
