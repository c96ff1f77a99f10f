"""`dicompiler profile --hosts`: measure boards over ssh, and write a platform with their profiles."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dicompiler.ir.platform import Platform
    from dicompiler.measure.remote_profiling import BoardMeasurements


@dataclass(frozen=True)
class ProfileBoardsOptions:
    """Options of `profile --hosts`.

    Attributes:
        hosts: Path of the hosts.toml that names the boards.
        platform: The platform to correct; None to create a new one.
        logs: Logs of runs, from which links and rates are also estimated.
        force: True to accept measurements of boards that were busy or throttled.
        timeout_s: Largest number of seconds for each board.
        threads: Number of threads for a measurement; None for all processors.
        repeat: Number of timings of each piece of a layer.
    """

    hosts: Path
    platform: str | None
    logs: tuple[Path, ...]
    force: bool
    timeout_s: float
    threads: int | None
    repeat: int


def profile_boards(options: ProfileBoardsOptions, output: Path, as_json: bool, pack: Callable[[Path], None]) -> None:
    """Measure the boards, write the platform and the profiles, and print the results.

    Args:
        options: The options.
        output: File for the platform. The profiles are written to a directory next to it.
        as_json: True to print JSON.
        pack: Function that writes the measurement package to an empty directory.
    """
    from dicompiler.base.atomic_output import atomic_file
    from dicompiler.cli.file_io import write_text
    from dicompiler.cli.progress import progress
    from dicompiler.cli.table import print_json
    from dicompiler.driver.prepare import resolve_platform
    from dicompiler.ir.platform import platform_to_toml
    from dicompiler.measure import remote_profiling
    from dicompiler.measure.calibrate import calibrate
    from dicompiler.target.remote.hosts import Hosts

    hosts = Hosts.load(options.hosts)
    known_platform = None if options.platform is None else resolve_platform(options.platform)
    arguments = ["--repeat", str(options.repeat), "--lines"]
    arguments += [] if options.threads is None else ["--threads", str(options.threads)]
    with tempfile.TemporaryDirectory(prefix="dicompiler-") as temporary, progress("making pieces of layers") as tell:
        pack(Path(temporary))
        measurements = remote_profiling.measure_boards(
            Path(temporary), hosts, known_platform, arguments, options.timeout_s, options.force, tell
        )
    warnings = [line for board in measurements.boards for line in (board.reason, board.unmeasured_note) if line]
    for line in (*warnings, *measurements.link_errors):
        logging.getLogger("dicompiler").warning(line)
    platform = remote_profiling.apply_measurements(measurements, known_platform)
    if options.logs:
        platform = calibrate(options.logs, force=options.force, platform=platform).platform
    profiles = output.with_name(f"{output.stem}.profiles")
    profiles.mkdir(exist_ok=True)
    paths = []
    for board in measurements.profiled_boards:
        paths.append(profiles / f"{board.host}.json")
        with atomic_file(paths[-1]) as stage:
            stage.write_text(json.dumps(board.document, indent=1) + "\n", encoding="utf-8")
    write_text(output, platform_to_toml(platform))
    if as_json:
        states = [
            {"host": board.host, "used": board.document is not None, "reason": board.reason}
            for board in measurements.boards
        ]
        links = [asdict(link) for link in measurements.links]
        written = {"platform": str(output), "profiles": [str(path) for path in paths]}
        print_json({"boards": states, "links": links, **written})
        return
    _show_measurements(measurements, platform)
    names = ",".join(map(str, paths))
    click.echo(f"\nwritten: {output}, for --platform; and for --cost: 'profile{{file={names}}}'")


def _show_measurements(measurements: BoardMeasurements, platform: Platform) -> None:
    from dicompiler.base.units import BANDWIDTH, COMPUTE_RATE, format_quantity, format_seconds
    from dicompiler.cli.table import print_table
    from dicompiler.measure.fit_links import round_to_4_digits

    rows = []
    for board in measurements.boards:
        profile = board.profile
        taken = "left out" if profile is None else format_quantity(platform.device(board.device).rate, COMPUTE_RATE)
        network = "" if profile is None else format_seconds(profile.whole_model_s or profile.isolated_s)
        rows.append((board.host, taken, network, "" if profile is None else str(profile.threads)))
    print_table(("board", "rate", "the network takes", "threads"), rows, right=(2, 3))
    if measurements.links:
        click.echo()
        lines = [
            (
                " – ".join(link.hosts),
                format_quantity(round_to_4_digits(link.bandwidth), BANDWIDTH),
                format_seconds(link.latency),
            )
            for link in measurements.links
        ]
        print_table(("link", "rate", "latency"), lines, right=(1, 2))
