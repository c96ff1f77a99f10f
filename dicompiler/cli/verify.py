"""`dicompiler verify`: run an artifact and compare it with onnxruntime."""

from __future__ import annotations

from pathlib import Path

import click

from dicompiler.cli.options import directory_argument, inputs_option, json_option, timeout_option


@click.command("verify")
@directory_argument
@inputs_option
@timeout_option(help="Stop after S seconds. Default: 600.")
@json_option
def command(directory: Path, inputs: Path | None, timeout_s: float | None, as_json: bool) -> None:
    """Run an artifact and compare its outputs with onnxruntime.

    The exit code is 0 only if every output is equal within the tolerance of its type, and every transfer had the
    predicted number of bytes.

    Example: dicompiler verify build
    """
    from dicompiler.cli.compile_output import show_verification
    from dicompiler.cli.file_io import read_inputs
    from dicompiler.cli.progress import progress
    from dicompiler.driver.artifact import verify

    arrays = read_inputs(inputs)
    with progress(f"{directory}: running check models and programs"):
        verification = verify(directory, arrays, timeout_s)
    show_verification(verification, directory, as_json)
