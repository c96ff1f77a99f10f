"""`dicompiler deploy`: copies a compiled model to the boards of a cluster over ssh, runs it there, collects logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.atomic import check_parent
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.cli.options import (
    PATH,
    Stream,
    cost_option,
    directory_argument,
    handed,
    heartbeat_option,
    insecure_option,
    json_option,
    keys_option,
    listen_option,
    log_option,
    stream_options,
    tell_expiry,
    timeout_option,
    without_option,
)
from dicompiler.target.records import Installed, RunOptions

if TYPE_CHECKING:
    from dicompiler.driver.fidelity import Expected


@click.command("deploy")
@directory_argument
@click.option(
    "--hosts", "places", metavar="HOSTS.toml", type=PATH, required=True, help="Where the devices are reached by ssh."
)
@keys_option
@click.option("--copy-only", is_flag=True, help="Copy and check only.")
@stream_options
@click.option("--verify", is_flag=True, help="Compare the outputs with those of onnxruntime.")
@timeout_option(help="Seconds to copy, and to run. Default: 600.")
@heartbeat_option
@without_option
@listen_option(help="Where devices reach this process. Default: found out, any port.")
@insecure_option
@click.option(
    "--logs", metavar="LOGS", type=PATH, help="Keep what devices write there. Default: in DIR.logs if the run fails."
)
@log_option
@cost_option
@json_option
@handed(stream=Stream, options=RunOptions)
def command(
    directory: Path,
    places: Path,
    stream: Stream,
    options: RunOptions,
    copy_only: bool,
    verify: bool,
    cost: str | None,
    as_json: bool,
) -> None:
    """Run a compiled model on the boards of a cluster, over ssh.

    Copies each device's directory, and its keys, to the host that HOSTS.toml names for it, unless they are there
    already; checks Python, numpy and onnxruntime there; starts all devices, gives them the frames, and stops them.
    Prints what was copied and what 'dicompiler run' prints; with --log where prediction and measurement part.
    """
    from dicompiler.target.remote.hosts import Hosts

    if copy_only and (verify or any(path is not None for path in (stream.outputs, options.logs, stream.log))):
        raise UsageError("deploy: --copy-only runs nothing: there are no outputs, checks or logs then")
    stream.check()
    tell_expiry(options.keys)
    check_parent(options.logs)
    insecure = options.insecure or copy_only  # nothing is sent where nothing is run
    options = dataclasses.replace(options, hosts=Hosts.load(places), insecure=insecure)
    expected = stream.expect(directory, cost, options)
    _deploy(directory, stream, options, copy_only, verify, expected, as_json)


def _deploy(
    directory: Path,
    stream: Stream,
    options: RunOptions,
    copy_only: bool,
    verify: bool,
    expected: Expected | None,
    as_json: bool,
) -> None:
    from dicompiler.cli.files import read_inputs, write_npz
    from dicompiler.cli.progress import progress
    from dicompiler.cli.results import show_verification
    from dicompiler.cli.runs import show_partings, show_predicted, show_run
    from dicompiler.cli.tables import show_json
    from dicompiler.driver import summary
    from dicompiler.driver.artifact import compare_run, install
    from dicompiler.verify.comparison import Verification

    given = read_inputs(stream.inputs)
    with progress(f"{directory}: copying to the hosts"):
        installed = install(directory, options)
    report: dict[str, Any] = {"installed": [dataclasses.asdict(one) for one in installed]}
    if not as_json:
        _show_installed(installed)
    failed = None
    if not copy_only:
        result = stream.run(directory, given, options)
        verification = compare_run(directory, result, given) if verify else Verification(())
        failed = next((check for check in verification.checks if not check.passed), None)
        report["run"] = stream.write(directory, result, options, expected)
        report["checks"] = [dataclasses.asdict(check) for check in verification.checks]
        if not as_json:
            click.echo()
            log = report["run"]
            show_run(result, log["in_flight"])
            show_predicted(summary.load(directory), result, log["where"], log["in_flight"])
            show_partings(expected, log)
        if stream.outputs is not None and failed is None:
            write_npz(stream.outputs, result.outputs[0])
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
