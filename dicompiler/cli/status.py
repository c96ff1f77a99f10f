"""`dicompiler status`: show the state of the devices that 'deploy --resident' left running."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dicompiler.base.errors import RunError, UsageError
from dicompiler.cli.options import directory_argument, json_option, keys_option, options_as, timeout_option
from dicompiler.target.run_records import DeviceStatus, RunOptions

if TYPE_CHECKING:
    from dicompiler.target.target_base import Service


@click.command("status")
@directory_argument
@keys_option
@timeout_option(help="Wait up to S seconds for each answer, at most 5. Default: 5.")
@click.option("--watch", metavar="S", type=click.FloatRange(min=0.1, max=3600.0), help="Repeat every S seconds.")
@json_option
@options_as(options=RunOptions)
def command(directory: Path, options: RunOptions, watch: float | None, as_json: bool) -> None:
    """Show the state of resident devices.

    Prints for each device its artifact, start time, current client, memory, and the error of its last run. Also prints
    the numbers of runs, frames, repeated frames and failures over all clients. The exit code is 1 if a device does not
    answer. With --watch, the table is printed again and again until you press Ctrl-C; in a terminal, it replaces the
    previous one.

    Example: dicompiler status build --keys build.keys
    """
    from dicompiler.cli.table import print_json
    from dicompiler.driver.artifact import open_service

    if watch is not None and as_json:
        raise UsageError("status: --watch shows a table: omit --json")
    service = open_service(directory, options)
    if watch is not None:
        with contextlib.suppress(KeyboardInterrupt):
            _watch_statuses(service, watch)
        return
    statuses = service.status()
    if as_json:
        print_json({"devices": [dataclasses.asdict(status) for status in statuses]})
    else:
        _show_statuses(statuses)
    if silent := [status for status in statuses if not status.is_responding]:
        raise RunError(f"device {silent[0].device!r} at {silent[0].address}: {silent[0].error}")


def _watch_statuses(service: Service, interval_s: float) -> None:
    while True:
        statuses = service.status()
        click.clear()
        click.echo(time.strftime("%Y-%m-%d %H:%M:%S"))
        _show_statuses(statuses)
        time.sleep(interval_s)


def _show_statuses(statuses: Sequence[DeviceStatus]) -> None:
    from dicompiler.base.units import format_bytes
    from dicompiler.cli.table import print_table

    counts = ("runs", "frames", "replayed frames", "failures", "memory")
    headers = ("device", "address", "artifact", "running since", "client", *counts, "error")
    rows = [_status_row(status, format_bytes(status.memory)) for status in statuses]
    print_table(headers, rows, right=range(5, 10))


def _status_row(status: DeviceStatus, memory: str) -> tuple[str, ...]:
    if not status.is_responding:
        return (status.device, status.address, *["-"] * 8, status.error)
    counts = map(str, (status.runs, status.frames, status.replayed_frames, status.failures))
    digest = status.digest.rpartition(":")[2][:12]
    return (
        status.device,
        status.address,
        digest,
        _format_time(status.since),
        status.client or "-",
        *counts,
        memory,
        status.error or "-",
    )


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
