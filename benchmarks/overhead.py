"""Measure the overhead of the targets' runtimes, in addition to the times of the engine and the network.

Each figure is the ratio of two times that are measured in turn, such as those of a device and of onnxruntime alone. The
script prints a line for each figure. The exit code is 1 if a figure is above its limit. Run it as README.md says, on an
idle host.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial

import click
from overheads.emulated import stream, wire
from overheads.engine_parts import engine_parts
from overheads.exchanges import exchanges
from overheads.one import one
from overheads.parts import parts

FIGURES = {"exchanges": exchanges, "one": one, "parts": parts, "wire": wire, "stream": stream}


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--figure", type=click.Choice(sorted(FIGURES)), required=True, help="What is measured.")
@click.option("--network", "names", multiple=True, help="Networks; default: the figure's own.")
@click.option("--engine", "engines", multiple=True, help="Only for `parts`: measure height tiles in this engine.")
@click.option("--frames", default=20, help="Frames of each round.")
@click.option("--rounds", default=6, help="How often each side is measured.")
def main(figure: str, names: Sequence[str], engines: Sequence[str], frames: int, rounds: int) -> None:
    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    if engines and figure != "parts":
        raise click.UsageError(f"--engine is not for the figure '{figure}'")
    measure = partial(engine_parts, engines) if engines else FIGURES[figure]
    found = measure(names, frames, rounds)
    sys.exit(0 if all(min(one.median, one.shortest) <= one.goal for one in found) else 1)


if __name__ == "__main__":
    main()
