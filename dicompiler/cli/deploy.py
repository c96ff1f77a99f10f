"""`dicompiler deploy`: copy an artifact to the boards of a cluster over ssh, run it, and collect logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.atomic_output import check_writable
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.cli.options import (
    PATH,
    StreamOptions,
    cost_option,
    directory_argument,
    heartbeat_option,
    insecure_option,
    json_option,
    keys_option,
    listen_option,
    log_option,
    options_as,
    start_without_option,
    stream_options,
    timeout_option,
    warn_of_expiry,
)
from dicompiler.target.run_records import InstalledDevice, RunOptions

if TYPE_CHECKING:
    from dicompiler.analysis.prediction_error import ExpectedTiming


@click.command("deploy")
@directory_argument
@click.option(
    "--hosts", "places", metavar="HOSTS.toml", type=PATH, required=True, help="Where the devices are reached by ssh."
)
@keys_option
@click.option("--copy-only", is_flag=True, help="Copy and check only.")
@click.option(
    "--keep", "stays", is_flag=True, help="Leave the devices running: later runs join them. See 'dicompiler status'."
)
@click.option("--stop", is_flag=True, help="End the devices that are kept running, and nothing else.")
@click.option(
    "--units",
    metavar="UNITS",
    type=PATH,
    help="Copy, and write unit files there with which systemd keeps them running.",
)
@stream_options
@click.option("--verify", is_flag=True, help="Compare the outputs with those of onnxruntime.")
@timeout_option(help="Seconds to copy, and to run. Default: 600.")
@heartbeat_option
@start_without_option
@listen_option(help="Where devices reach this process. Default: found out, any port.")
@insecure_option
@click.option(
    "--logs", metavar="LOGS", type=PATH, help="Keep what devices write there. Default: in DIR.logs if the run fails."
)
@log_option
@cost_option
@json_option
@options_as(stream=StreamOptions, options=RunOptions)
def command(
    directory: Path,
    places: Path,
    stream: StreamOptions,
    options: RunOptions,
    copy_only: bool,
    stays: bool,
    stop: bool,
    units: Path | None,
    verify: bool,
    cost: str | None,
    as_json: bool,
) -> None:
    """Run an artifact on the boards of a cluster, over ssh.

    Copies each device's directory and keys to its host in HOSTS.toml, unless they are already there. Checks Python, numpy and
    onnxruntime on the hosts. Starts all devices, sends them the frames, and stops them. Prints the copied files and the
    output of 'dicompiler run'. With --log it also prints differences between prediction and measurement.

    With --resident the devices keep running with their sessions loaded, until --stop. Later runs of 'run', 'deploy' and
    'dicompiler.connect' use them.

    Example: dicompiler deploy build --hosts hosts.toml --keys build.keys --frames 100
    """
    from dicompiler.target.remote.hosts import Hosts

    if copy_only and (verify or any(path is not None for path in (stream.outputs, options.logs, stream.log))):
        raise UsageError("deploy: --copy-only runs nothing: there are no outputs, checks or logs then")
    if sum((copy_only, stays, stop, units is not None)) > 1:
        raise UsageError("deploy: --copy-only, --keep, --stop and --units exclude each other: give one of them")
    stream.check_paths()
    warn_of_expiry(options.keys)
    check_writable(options.logs)
    check_writable(units)
    insecure = options.insecure or copy_only or stop  # nothing is sent where nothing is run
    options = dataclasses.replace(options, hosts=Hosts.load(places), insecure=insecure)
    if stop:
        _stop_devices(directory, options, as_json)
        return
    if units is not None:
        _write_units(directory, options, units, as_json)
        return
    expected = stream.predict(directory, cost, options)
    _copy_and_run(directory, stream, options, copy_only, stays, verify, expected, as_json)


def _stop_devices(directory: Path, options: RunOptions, as_json: bool) -> None:
    from dicompiler.cli.table import print_json, print_table
    from dicompiler.driver.artifact import open_service

    ran = open_service(directory, options).stop()
    if as_json:
        print_json({"stopped": [name for name in ran if ran[name]], "installed": []})
    else:
        print_table(("device", "was"), [(name, "stopped" if ran[name] else "not running") for name in ran])


def _write_units(directory: Path, options: RunOptions, place: Path, as_json: bool) -> None:
    from dicompiler.cli.table import print_json
    from dicompiler.driver.artifact import install, open_service

    installed = install(directory, options)
    units = open_service(directory, options).units()
    place.mkdir(exist_ok=True)
    for name, text in units.items():
        (place / name).touch(0o600)
        (place / name).write_text(text)
    if as_json:
        print_json({"installed": [dataclasses.asdict(one) for one in installed], "units": sorted(units)})
        return
    _show_installed(installed)
    click.echo(f"\n{place}: {', '.join(sorted(units))}")
    click.echo("copy each to its host's ~/.config/systemd/user/, then there: loginctl enable-linger;")
    click.echo("systemctl --user daemon-reload; systemctl --user enable --now UNIT")


def _copy_and_run(
    directory: Path,
    stream: StreamOptions,
    options: RunOptions,
    copy_only: bool,
    stays: bool,
    verify: bool,
    expected: ExpectedTiming | None,
    as_json: bool,
) -> None:
    from dicompiler.cli.compile_output import show_verification
    from dicompiler.cli.file_io import read_inputs, write_npz
    from dicompiler.cli.progress import progress
    from dicompiler.cli.run_output import show_discrepancies, show_prediction, show_run
    from dicompiler.cli.table import print_json
    from dicompiler.driver import compile_summary
    from dicompiler.driver.artifact import install, open_service, verify_run
    from dicompiler.verify.comparison import Verification

    given = read_inputs(stream.inputs)
    with progress(f"{directory}: copying to the hosts"):
        installed = install(directory, options)
    report: dict[str, Any] = {"installed": [dataclasses.asdict(one) for one in installed]}
    if not as_json:
        _show_installed(installed)
    failed = None
    if stays:
        report["kept"] = list(open_service(directory, options).start())
    if not copy_only:
        result = stream.run(directory, given, options)
        verification = verify_run(directory, result, given) if verify else Verification(())
        failed = next((check for check in verification.checks if not check.passed), None)
        report["run"] = stream.write_log(directory, result, options, expected)
        report["checks"] = [dataclasses.asdict(check) for check in verification.checks]
        if not as_json:
            click.echo()
            log = report["run"]
            show_run(result, log["in_flight"])
            show_prediction(compile_summary.load_summary(directory), result, log["where"], log["in_flight"])
            show_discrepancies(expected, log)
        if stream.outputs is not None and failed is None:
            write_npz(stream.outputs, result.outputs[0])
        if verify and not as_json:
            click.echo()
            show_verification(verification, directory, False)
    if as_json:
        print_json(report)
    if failed is not None:
        raise DicompilerError(f"{directory}: {failed.name}: {failed.detail}")


def _show_installed(installed: Sequence[InstalledDevice]) -> None:
    """Print the directory, the copied bytes and the software versions of each device."""
    from dicompiler.cli.table import print_table

    programs = list(installed[0].versions)
    rows = [
        (one.device, one.host, one.directory, str(one.copied_bytes), *(one.versions[name] for name in programs))
        for one in installed
    ]
    print_table(("device", "host", "directory", "bytes copied", *programs), rows, right=(3,))
