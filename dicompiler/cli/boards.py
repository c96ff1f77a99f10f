"""`dicompiler profile --hosts`: what boards measured of themselves, told, and written as a platform with profiles."""

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
    from dicompiler.driver.boards import Measured
    from dicompiler.ir.platform import Platform


@dataclass(frozen=True)
class Asked:
    """What the command line says: the hosts file, the platform to correct, logs of runs, whether doubtful boards are
    taken, seconds for each, and how their layers are timed."""

    hosts: Path
    platform: str | None
    logs: tuple[Path, ...]
    force: bool
    timeout_s: float
    threads: int | None
    repeat: int


def profile_boards(asked: Asked, output: Path, as_json: bool, pack: Callable[[Path], None]) -> None:
    """Measures on the boards, writes the platform to `output` and the profiles beside it, and tells what was found.
    pack: writes the package that measures into an empty directory."""
    from dicompiler.base.atomic import whole
    from dicompiler.cli.files import write_text
    from dicompiler.cli.progress import progress
    from dicompiler.cli.tables import show_json
    from dicompiler.driver import boards
    from dicompiler.driver.calibrate import calibrate
    from dicompiler.driver.prepare import platform_of
    from dicompiler.ir.platform import to_toml
    from dicompiler.target.remote.hosts import Hosts

    hosts = Hosts.load(asked.hosts)
    given = None if asked.platform is None else platform_of(asked.platform)
    arguments = ["--repeat", str(asked.repeat), "--lines"]
    arguments += [] if asked.threads is None else ["--threads", str(asked.threads)]
    with tempfile.TemporaryDirectory(prefix="dicompiler-") as temporary, progress("making pieces of layers") as tell:
        pack(Path(temporary))
        found = boards.measure(Path(temporary), hosts, given, arguments, asked.timeout_s, asked.force, tell)
    said = [line for board in found.boards for line in (board.why, board.unmeasured) if line]
    for line in (*said, *found.unlinked):
        logging.getLogger("dicompiler").warning(line)
    platform = boards.calibrated(found, given)
    if asked.logs:
        platform = calibrate(asked.logs, force=asked.force, platform=platform).platform
    profiles = output.with_name(f"{output.stem}.profiles")
    profiles.mkdir(exist_ok=True)
    paths = []
    for board in found.taken:
        paths.append(profiles / f"{board.host}.json")
        with whole(paths[-1]) as stage:
            stage.write_text(json.dumps(board.document, indent=1) + "\n", encoding="utf-8")
    write_text(output, to_toml(platform))
    if as_json:
        states = [{"host": one.host, "taken": one.document is not None, "why": one.why} for one in found.boards]
        links = [asdict(link) for link in found.links]
        written = {"platform": str(output), "profiles": [str(path) for path in paths]}
        show_json({"boards": states, "links": links, **written})
        return
    _show(found, platform)
    names = ",".join(map(str, paths))
    click.echo(f"\nwritten: {output}, for --platform; and for --cost: 'profile{{file={names}}}'")


def _show(found: Measured, platform: Platform) -> None:
    """A row for each board and for each link."""
    from dicompiler.base.units import BANDWIDTH, RATE, format_seconds, write
    from dicompiler.cli.tables import show

    rows = []
    for board in found.boards:
        profile = board.profile
        taken = "left out" if profile is None else write(platform.device(board.device).rate, RATE)
        network = "" if profile is None else format_seconds(profile.whole_s or profile.alone_s)
        rows.append((board.host, taken, network, "" if profile is None else str(profile.threads)))
    show(("board", "rate", "the network takes", "threads"), rows, right=(2, 3))
    if found.links:
        click.echo()
        lines = [
            (" – ".join(link.hosts), write(float(f"{link.bandwidth:.4g}"), BANDWIDTH), format_seconds(link.latency))
            for link in found.links
        ]
        show(("link", "rate", "latency"), lines, right=(1, 2))
