"""`dicompiler verify`: runs a compiled model and compares it with onnxruntime."""

from __future__ import annotations

from pathlib import Path

import click

from dicompiler.cli.options import directory_argument, inputs_option, json_option, timeout_option


@click.command("verify")
@directory_argument
@inputs_option
@timeout_option(help="Seconds for all of it. Default: 600.")
@json_option
def command(directory: Path, inputs: Path | None, timeout_s: float | None, as_json: bool) -> None:
    """Run a compiled model and compare it with onnxruntime.

    Exit code 0 only where every output is the same within the tolerance of its type, and every transfer had the bytes
    that were predicted.
    """
    from dicompiler.cli.compile_output import show_verification
    from dicompiler.cli.file_io import read_inputs
    from dicompiler.cli.progress import progress
    from dicompiler.driver.artifact import verify

    given = read_inputs(inputs)
    with progress(f"{directory}: exact check models, then its programs against onnxruntime"):
        verification = verify(directory, given, timeout_s)
    show_verification(verification, directory, as_json)
