"""`dicompiler status`: asks the devices that 'deploy --keep' left running how they do."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import click

from dicompiler.base.errors import RunError
from dicompiler.cli.options import directory_argument, handed, json_option, keys_option, timeout_option
from dicompiler.target.records import DeviceStatus, RunOptions


@click.command("status")
@directory_argument
@keys_option
@timeout_option(help="Seconds that a device has to answer, at most 5. Default: 5.")
@json_option
@handed(options=RunOptions)
def command(directory: Path, options: RunOptions, as_json: bool) -> None:
    """Ask the devices that are kept running how they do.

    Prints for each of them the artifact that it holds, since when it runs, whom it serves, what it did for all clients
    so far, the memory that it takes, and how its last run failed. Exit code 1 where one does not answer.
    """
    from dicompiler.base.units import format_bytes
    from dicompiler.cli.tables import show, show_json
    from dicompiler.driver.artifact import service

    found = service(directory, options).status()
    if as_json:
        show_json({"devices": [dataclasses.asdict(one) for one in found]})
    else:
        head = (
            "device",
            "address",
            "artifact",
            "since",
            "serves",
            "runs",
            "frames",
            "replays",
            "losses",
            "memory",
            "error",
        )
        show(head, [_row(one, format_bytes(one.memory)) for one in found], right=(5, 6, 7, 8, 9))
    if silent := [one for one in found if not one.answers]:
        raise RunError(f"device {silent[0].device!r} at {silent[0].address}: {silent[0].error}")


def _row(one: DeviceStatus, memory: str) -> tuple[str, ...]:
    if not one.answers:
        return (one.device, one.address, *["-"] * 8, one.error)
    counts = map(str, (one.runs, one.frames, one.replays, one.losses))
    digest = one.digest.rpartition(":")[2][:12]
    return (one.device, one.address, digest, _when(one.since), one.client or "-", *counts, memory, one.error or "-")


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
