"""`dicompiler run`: starts every device's program on this host and shows what each of them did."""

from __future__ import annotations

from pathlib import Path

import click

from dicompiler.cli.options import PATH, check_parent, directory_argument, inputs_option, json_option


@click.command("run")
@directory_argument
@inputs_option
@click.option("--outputs", metavar="Y.npz", type=PATH, help="Where to write the outputs of the first frame.")
@click.option("--frames", metavar="N", type=click.IntRange(min=1), default=1, help="How many times. Default: 1.")
@json_option
def command(directory: Path, inputs: Path | None, outputs: Path | None, frames: int, as_json: bool) -> None:
    """Run a compiled model on this host, a process for each device.

    Prints for each device the seconds that it computed, waited and sent, and the bytes it sent, over all frames.
    """
    from dicompiler.cli.files import read_npz, write_npz
    from dicompiler.cli.results import show_run
    from dicompiler.compiler import run

    check_parent(outputs)
    result = run(directory, None if inputs is None else read_npz(inputs), frames)
    if outputs is not None:
        write_npz(outputs, result.outputs[0])
    show_run(result, as_json)
