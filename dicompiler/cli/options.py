"""Arguments and options that several commands share, so that they are spelled and explained alike."""

from __future__ import annotations

from pathlib import Path

import click

from dicompiler.errors import DicompilerError

PATH = click.Path(path_type=Path)

model_argument = click.argument("model", type=PATH)
directory_argument = click.argument("directory", metavar="DIR", type=PATH)
platform_option = click.option(
    "--platform", metavar="P", help="The cluster: a TOML file or a built-in one (rpi4x4, …)."
)
shape_option = click.option(
    "--shape", metavar="NAME=DIMS", multiple=True, help="Fixes a dynamic input: input=1x3x224x224. Can be repeated."
)
strategy_option = click.option(
    "--strategy", metavar="'NAME{…}'", help="Who decides: see 'dicompiler list strategies'. Default: modnn."
)
objective_option = click.option(
    "--objective",
    type=click.Choice(["latency", "throughput", "energy", "memory", "communication"]),
    help="What the strategy makes small. Default: latency.",
)
cost_option = click.option(
    "--cost", metavar="'NAME{…}'", help="What pieces cost: see 'dicompiler list cost-models'. Default: analytic."
)
inputs_option = click.option(
    "--inputs", metavar="X.npz", type=PATH, help="One array for each graph input; without it seeded random ones."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def check_parent(path: Path | None) -> None:
    """DicompilerError where `path` cannot be written for want of its directory: said before the work, not after."""
    if path is not None and not path.parent.is_dir():
        raise DicompilerError(f"{path}: there is no directory {str(path.parent)!r}")
