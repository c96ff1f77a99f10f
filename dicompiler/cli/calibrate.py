"""`dicompiler calibrate`: corrects a platform's or a profile's figures by what runs measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dicompiler.cli.options import PATH, check_file, json_option, output_option

if TYPE_CHECKING:
    from dicompiler.driver.calibrate import Calibration, Figure


@click.command("calibrate")
@click.argument("logs", metavar="RUN.json…", type=PATH, nargs=-1, required=True)
@click.option("--artifact", metavar="DIR", type=PATH, help="What was run. Default: where the first log says.")
@click.option("--profile", metavar="P.json", type=PATH, help="Correct this profile's seconds instead.")
@click.option("--force", is_flag=True, help="Take runs of a busy machine.")
@json_option
@output_option(metavar="PLATFORM.toml", required=True, help="Where to write the platform, or the profile.")
def command(
    logs: tuple[Path, ...], artifact: Path | None, profile: Path | None, force: bool, as_json: bool, output: Path
) -> None:
    """Correct a platform's figures, or a profile's, by what runs measured.

    The logs are of one artifact, from 'deploy --log' or 'emulate --log'. Rates follow from what segments took, lines
    from the pauses between them. Prints each figure before and after, and how far off a frame was with it.
    """
    from dicompiler.cli.files import write_json, write_text
    from dicompiler.cli.progress import progress
    from dicompiler.cli.tables import show_json
    from dicompiler.driver.calibrate import calibrate
    from dicompiler.ir.platform import to_toml

    check_file(output)
    with progress(f"calibrating by {len(logs)} run{'' if len(logs) == 1 else 's'}"):
        found = calibrate(logs, artifact, profile, force)
    if found.document is None:
        write_text(output, to_toml(found.platform))
    else:
        write_json(output, found.document)
    if as_json:
        figures, frames = ([dataclasses.asdict(one) for one in each] for each in (found.figures, found.frames))
        show_json({"figures": figures, "frames": frames, "doubts": found.doubts, "written": str(output)})
    else:
        _show(found)
        click.echo(f"\nwritten: {output}")


def _show(found: Calibration) -> None:
    from dicompiler.base.units import format_seconds
    from dicompiler.cli.tables import show

    rows = [(one.name, _text(one, one.before), _text(one, one.after), _change(one)) for one in found.figures]
    show(("figure", "before", "after", "was off by"), rows, right=(1, 2))
    click.echo()
    times = [
        (one.log, *map(format_seconds, (one.measured_s, one.before_s, one.after_s)),
         *(f"{told / one.measured_s - 1:+.1%}" for told in (one.before_s, one.after_s)))
        for one in found.frames
    ]  # fmt: skip
    show(("a frame of", "measured", "before", "after", "off before", "off after"), times, right=range(1, 6))
    for doubt in found.doubts:
        click.echo(f"doubtful: {doubt}")


def _text(figure: Figure, value: float | None) -> str:
    """In the unit of platform files, with four digits."""
    from dicompiler.base.units import BANDWIDTH, RATE, TIME, write

    if value is None:
        return "left"
    quantity = {"FLOP/s": RATE, "bit/s": BANDWIDTH, "s": TIME}.get(figure.unit)
    return f"{value:.4g}" if quantity is None else write(float(f"{value:.4g}"), quantity)


def _change(figure: Figure) -> str:
    if figure.after is None:
        return figure.why
    return f"{figure.before / figure.after - 1:+.1%}" if figure.after else "it is nothing"
