"""`dicompiler deploy`: copies a compiled model to the boards of a cluster over ssh, runs it there, collects logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.cli.options import (
    PATH,
    Seconds,
    check_file,
    check_parent,
    directory_argument,
    inputs_option,
    json_option,
    log_option,
)

if TYPE_CHECKING:
    from dicompiler.target.records import Installed, RunOptions


@click.command("deploy")
@directory_argument
@click.option("--hosts", metavar="HOSTS.toml", type=PATH, required=True, help="Where the devices are reached by ssh.")
@click.option("--keys", metavar="KEYS", type=PATH, help="What 'dicompiler keys' made: connections are in TLS.")
@click.option("--copy-only", is_flag=True, help="Copy and check only.")
@inputs_option
@click.option("--outputs", metavar="Y.npz", type=PATH, help="Where to write the outputs of the first frame.")
@click.option("--frames", metavar="N", type=click.IntRange(min=1), default=1, help="How many times. Default: 1.")
@click.option(
    "--in-flight",
    metavar="N",
    type=click.IntRange(min=1, max=1024),
    help="Frames that are on their way at once. Default: twice the number of devices.",
)
@click.option("--verify", is_flag=True, help="Compare the outputs with those of onnxruntime.")
@click.option("--timeout", metavar="S", type=Seconds(), help="Seconds to copy, and to run. Default: 600.")
@click.option("--heartbeat", metavar="S", type=float, help="Seconds between signs of life. Default: 2.")
@click.option("--listen", metavar="HOST:PORT", help="Where devices reach this process. Default: found out, any port.")
@click.option("--insecure", is_flag=True, help="Allow connections in the clear to other hosts.")
@click.option(
    "--logs", metavar="LOGS", type=PATH, help="Keep what devices write there. Default: in DIR.logs if the run fails."
)
@log_option
@json_option
def command(
    directory: Path,
    hosts: Path,
    keys: Path | None,
    copy_only: bool,
    inputs: Path | None,
    outputs: Path | None,
    frames: int,
    in_flight: int | None,
    verify: bool,
    timeout: float | None,
    heartbeat: float | None,
    listen: str | None,
    insecure: bool,
    logs: Path | None,
    log: Path | None,
    as_json: bool,
) -> None:
    """Run a compiled model on the boards of a cluster, over ssh.

    Copies each device's directory, and its keys, to the host that HOSTS.toml names for it, unless they are there
    already; checks Python, numpy and onnxruntime there; starts all devices, gives them the frames, and stops them.
    Prints what was copied and what 'dicompiler run' prints.
    """
    from dicompiler.target.records import RunOptions
    from dicompiler.target.remote.hosts import Hosts

    if copy_only and (outputs is not None or verify or logs is not None or log is not None):
        raise UsageError("deploy: --copy-only runs nothing: there are no outputs, checks or logs then")
    check_file(outputs)
    check_file(log)
    check_parent(logs)
    options = RunOptions(
        in_flight=in_flight or 0,
        keep=1,
        heartbeat_s=2.0 if heartbeat is None else heartbeat,
        keys=keys,
        listen=listen or "",
        insecure=insecure or copy_only,  # nothing is sent where nothing is run
        hosts=Hosts.load(hosts),
        logs=logs,
    )
    _deploy(directory, options, inputs, outputs, 0 if copy_only else frames, timeout, verify, log, as_json)


def _deploy(
    directory: Path,
    options: RunOptions,
    inputs: Path | None,
    outputs: Path | None,
    frames: int,
    timeout: float | None,
    verify: bool,
    log: Path | None,
    as_json: bool,
) -> None:
    from dicompiler.cli.files import read_npz, write_json, write_npz
    from dicompiler.cli.progress import progress
    from dicompiler.cli.results import show_run, show_verification
    from dicompiler.cli.tables import show_json
    from dicompiler.driver.artifact import TIMEOUT_S, compare_run, install, run
    from dicompiler.driver.run_log import document
    from dicompiler.verify.comparison import Verification

    given = None if inputs is None else read_npz(inputs)
    seconds = TIMEOUT_S if timeout is None else timeout
    with progress(f"{directory}: copying to the hosts"):
        installed = install(directory, options, seconds)
    report: dict[str, Any] = {"installed": [dataclasses.asdict(one) for one in installed]}
    if not as_json:
        _show_installed(installed)
    failed = None
    if frames:
        with progress(f"{directory}: running {frames} frame{'' if frames == 1 else 's'}"):
            result = run(directory, given, frames, seconds, options)
        verification = compare_run(directory, result, given) if verify else Verification(())
        failed = next((check for check in verification.checks if not check.passed), None)
        report["run"] = document(directory, result)
        report["checks"] = [dataclasses.asdict(check) for check in verification.checks]
        if log is not None:
            write_json(log, report["run"])
        if not as_json:
            click.echo()
            show_run(result)
        if outputs is not None and failed is None:
            write_npz(outputs, result.outputs[0])
        if verify and not as_json:
            click.echo()
            show_verification(verification, directory, False)
    if as_json:
        show_json(report)
    if failed is not None:
        raise DicompilerError(f"{directory}: {failed.name}: {failed.detail}")


def _show_installed(installed: Sequence[Installed]) -> None:
    """Prints for each device where it is, what was copied and what runs it there."""
    from dicompiler.cli.tables import show

    programs = list(installed[0].versions)
    rows = [
        (one.device, one.host, one.directory, str(one.copied), *(one.versions[name] for name in programs))
        for one in installed
    ]
    show(("device", "host", "directory", "bytes copied", *programs), rows, right=(3,))
