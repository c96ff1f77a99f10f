"""`dicompiler calibrate`: correct the rates and links of a platform, or the times of a profile, by measured runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dicompiler.cli.options import PATH, check_output_file, json_option, output_option

if TYPE_CHECKING:
    from dicompiler.measure.calibrate import CalibratedValue, Calibration


@click.command("calibrate")
@click.argument("logs", metavar="RUN.json…", type=PATH, nargs=-1, required=True)
@click.option(
    "--artifact",
    metavar="DIR",
    type=PATH,
    help="Read the artifact from DIR. Default: the directory that the first log names.",
)
@click.option(
    "--profile", metavar="P.json", type=PATH, help="Correct the seconds of this profile instead of a platform."
)
@click.option("--force", is_flag=True, help="Accept runs that were measured on a busy machine.")
@json_option
@output_option(metavar="PLATFORM.toml", required=True, help="Write the platform, or the profile, to this file.")
def command(
    logs: tuple[Path, ...], artifact: Path | None, profile: Path | None, force: bool, as_json: bool, output: Path
) -> None:
    """Correct the rates and links of a platform, or the times of a profile, by measured runs.

    All logs must be of the same artifact, from 'deploy --log' or 'emulate --log'. Compute rates are estimated from the
    times of segments (ONNX submodels), and links from the times between a device's segments. Use several runs to
    estimate links. Prints each rate, bandwidth and latency, and the error of the predicted frame time, before and after
    the correction.

    Example: dicompiler calibrate run1.json run2.json -o cluster.toml
    """
    from dicompiler.cli.file_io import write_json, write_text
    from dicompiler.cli.progress import progress
    from dicompiler.cli.table import print_json
    from dicompiler.ir.platform import platform_to_toml
    from dicompiler.measure.calibrate import calibrate

    check_output_file(output)
    with progress(f"calibrating by {len(logs)} run{'' if len(logs) == 1 else 's'}"):
        calibration = calibrate(logs, artifact, profile, force)
    if calibration.document is None:
        write_text(output, platform_to_toml(calibration.platform))
    else:
        write_json(output, calibration.document)
    if as_json:
        figures, frames = (
            [dataclasses.asdict(entry) for entry in entries] for entries in (calibration.values, calibration.frames)
        )
        print_json({"figures": figures, "frames": frames, "warnings": calibration.warnings, "written": str(output)})
    else:
        _show_calibration(calibration)
        click.echo(f"\nwritten: {output}")


def _show_calibration(calibration: Calibration) -> None:
    from dicompiler.base.units import format_seconds
    from dicompiler.cli.table import print_table, wrap_text

    rows = [
        (entry.name, _format_number(entry, entry.before), _format_number(entry, entry.after), _format_change(entry))
        for entry in calibration.values
    ]
    print_table(("figure", "before", "after", "change"), rows, right=(1, 2))
    click.echo()
    times = [
        (entry.log, *map(format_seconds, (entry.measured_s, entry.before_s, entry.after_s)),
         *(f"{predicted_s / entry.measured_s - 1:+.1%}" for predicted_s in (entry.before_s, entry.after_s)))
        for entry in calibration.frames
    ]  # fmt: skip
    print_table(("run", "measured frame", "before", "after", "error before", "error after"), times, right=range(1, 6))
    for warning in calibration.warnings:
        click.echo(wrap_text(f"warning: {warning}"))


def _format_number(entry: CalibratedValue, value: float | None) -> str:
    """Return a value in the unit of platform files, with four significant digits."""
    from dicompiler.base.units import BANDWIDTH, COMPUTE_RATE, TIME, format_number, format_quantity
    from dicompiler.measure.fit_links import round_to_4_digits

    if value is None:
        return "unchanged"
    quantity = {"FLOP/s": COMPUTE_RATE, "bit/s": BANDWIDTH, "s": TIME}.get(entry.unit)
    return format_number(value) if quantity is None else format_quantity(round_to_4_digits(value), quantity)


def _format_change(value: CalibratedValue) -> str:
    if value.after is None:
        return value.reason
    return f"{value.before / value.after - 1:+.1%}" if value.after else "is zero"
