"""Arguments and options that several commands share, so that they are spelled and explained alike."""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path
from typing import Any

import click

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.base.objectives import terms

PATH = click.Path(path_type=Path)

model_argument = click.argument("model", type=PATH)
directory_argument = click.argument("directory", metavar="DIR", type=PATH)
platform_option = click.option(
    "--platform", metavar="P", help="The cluster: a TOML file or a built-in one (rpi4x4, …)."
)
shape_option = click.option(
    "--shape",
    metavar="NAME=DIMS",
    multiple=True,
    callback=lambda _context, _option, given: _check_shapes(given),
    help="Fixes a dynamic input: input=1x3x224x224. Can be repeated.",
)
strategy_option = click.option(
    "--strategy", metavar="'NAME{…}'", help="Who decides: see 'dicompiler list strategies'. Default: auto."
)


def _objective(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """UsageError for what is no objective, before any work."""
    if value is not None:
        terms(value)
    return value


objective_option = click.option(
    "--objective",
    metavar="NAME",
    callback=_objective,
    help="What the strategy makes small: latency, throughput, energy, memory, communication, or a sum such as "
    "latency+0.5*energy (seconds, joules, bytes). Default: latency.",
)
cost_option = click.option(
    "--cost", metavar="'NAME{…}'", help="What pieces cost: see 'dicompiler list cost-models'. Default: analytic."
)
inputs_option = click.option(
    "--inputs", metavar="X.npz", type=PATH, help="One array for each graph input; without it seeded random ones."
)
log_option = click.option(
    "--log", metavar="RUN.json", type=PATH, help="Where to write what the devices measured, for 'dicompiler report'."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


class Seconds(click.FloatRange):
    """A time of 0.1 s to four months: what clocks and timers take."""

    def __init__(self) -> None:
        super().__init__(0.1, 1e7)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; click's own range lets NaN through."""
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value!r} is no time", param, ctx)
        return seconds


def check_parent(path: Path | None) -> None:
    """DicompilerError where nothing can be written at `path`: said before the work, not after."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise DicompilerError(f"{path}: there is no directory {str(path.parent)!r}")
    try:
        path.is_symlink()  # a name can be too long
        tempfile.TemporaryDirectory(dir=path.parent, prefix=".dicompiler-").cleanup()
    except OSError as error:
        raise DicompilerError(f"{path}: it cannot be written: {error.strerror}: choose another place") from None


def check_file(path: Path | None) -> None:
    """DicompilerError where no file can be written at `path`: as `check_parent`, and where a directory is there."""
    check_parent(path)
    if path is not None and path.is_dir():
        raise DicompilerError(f"{path}: it is a directory: give the name of a file")


def _check_shapes(given: tuple[str, ...]) -> tuple[str, ...]:
    """UsageError for a dimension that no tensor can have; what else can be wrong is found where shapes are inferred."""
    for text in given:
        for digits in re.findall(r"[0-9]+", text.rpartition("=")[2]):
            if len(digits) > 18:
                raise UsageError(f"shape {text!r}: {digits} is too large for a dimension")
    return given
