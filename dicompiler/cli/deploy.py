"""`dicompiler deploy`: copy an artifact to the boards of a cluster over ssh, run it, and collect logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.atomic_output import check_writable
from dicompiler.base.errors import UsageError
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
    refuse_options,
    start_without_option,
    stream_options,
    timeout_option,
    warn_of_expiry,
)
from dicompiler.target.run_records import InstalledDevice, RunOptions

if TYPE_CHECKING:
    from dicompiler.analysis.prediction_error import ExpectedTiming
    from dicompiler.verify.comparison import Check

_OPTIONS_OF_RUNS = (
    *("inputs", "outputs", "frames", "in_flight", "adapt", "follow", "metrics", "verify"),
    *("heartbeat_s", "start_without", "listen", "logs", "log", "cost"),
)


@click.command("deploy")
@directory_argument
@click.option(
    "--hosts",
    "hosts_file",
    metavar="HOSTS.toml",
    type=PATH,
    required=True,
    help="Read the ssh destinations of the devices from this file.",
)
@keys_option
@click.option("--copy-only", is_flag=True, help="Copy and check the files, but run nothing.")
@click.option(
    "--resident", is_flag=True, help="Keep the devices running for later runs. See 'dicompiler status' and --stop."
)
@click.option("--stop", is_flag=True, help="Stop the resident devices, and do nothing else.")
@click.option(
    "--remove",
    is_flag=True,
    help="Stop the resident devices, remove weights, keys and logs of the artifact from the hosts, and end.",
)
@stream_options
@click.option("--verify", is_flag=True, help="Compare the outputs with onnxruntime.")
@timeout_option(help="Stop copying, or the run, after S seconds. Default: 600.")
@heartbeat_option
@start_without_option
@listen_option(
    help="Listen for devices at this address. Default: the address that reaches the first host, any free port."
)
@insecure_option
@click.option(
    "--logs",
    metavar="LOGS",
    type=PATH,
    help="Keep the output of the devices in this directory. Default: DIR.logs, only if the run fails.",
)
@log_option
@cost_option
@json_option
@options_as(stream=StreamOptions, options=RunOptions)
def command(
    directory: Path,
    hosts_file: Path,
    stream: StreamOptions,
    options: RunOptions,
    copy_only: bool,
    resident: bool,
    stop: bool,
    remove: bool,
    verify: bool,
    cost: str | None,
    as_json: bool,
) -> None:
    """Run an artifact on the boards of a cluster, over ssh.

    Copies each device's directory and keys to its host in HOSTS.toml, unless they are already there. Checks Python,
    numpy and onnxruntime on the hosts. Starts all devices, sends them the frames, and stops them. Prints the copied
    files and the output of 'dicompiler run'. With --log it also prints differences between prediction and measurement.

    With --resident, the devices keep running with their sessions loaded, until you call 'deploy' with --stop. Until
    then, 'run', 'deploy' and 'dicompiler.connect' use these running devices.

    Example: dicompiler deploy build --hosts hosts.toml --keys build.keys --frames 100
    """
    from dicompiler.target.remote.hosts import Hosts

    if (stream.adapt or stream.follow) and (verify or resident):
        raise UsageError("deploy: --adapt and --follow exclude --verify and --resident: omit one of them")
    if sum((copy_only, resident, stop, remove)) > 1:
        raise UsageError("deploy: --copy-only, --resident, --stop and --remove exclude each other: give one of them")
    if copy_only or stop or remove:
        name = "copy-only" if copy_only else "stop" if stop else "remove"
        refuse_options(f"--{name} runs nothing", *_OPTIONS_OF_RUNS)
    elif stream.log is None:
        refuse_options("only the log of --log needs a cost model", "cost")
    stream.check_paths()
    warn_of_expiry(options.keys)
    check_writable(options.logs)
    # --copy-only, --stop and --remove send no tensors, so they need no keys for encryption.
    insecure = options.insecure or copy_only or stop or remove
    options = dataclasses.replace(options, hosts=Hosts.load(hosts_file), insecure=insecure)
    if stop:
        _stop_devices(directory, options, as_json)
        return
    if remove:
        _remove_files(directory, options, as_json)
        return
    directory, link = stream.resolve_link(directory)
    expected = stream.predict(directory, cost, options)
    _copy_and_run(directory, link, stream, options, copy_only, resident, verify, cost, expected, as_json)


def _stop_devices(directory: Path, options: RunOptions, as_json: bool) -> None:
    from dicompiler.cli.table import print_json, print_table
    from dicompiler.driver.artifact import open_service

    was_running = open_service(directory, options).stop()
    if as_json:
        print_json({"stopped": [name for name in was_running if was_running[name]], "installed": []})
    else:
        rows = [(name, "stopped" if ran else "was not running") for name, ran in was_running.items()]
        print_table(("device", "state"), rows)


def _remove_files(directory: Path, options: RunOptions, as_json: bool) -> None:
    from dicompiler.cli.progress import progress
    from dicompiler.cli.table import print_json, print_table
    from dicompiler.driver.artifact import uninstall

    with progress(f"{directory}: removing its files from the hosts"):
        was_there = uninstall(directory, options)
    if as_json:
        print_json({"removed": [name for name in was_there if was_there[name]], "installed": []})
    else:
        rows = [(name, "removed" if found else "nothing to remove") for name, found in was_there.items()]
        print_table(("device", "state"), rows)


def _copy_and_run(
    directory: Path,
    link: Path | None,
    stream: StreamOptions,
    options: RunOptions,
    copy_only: bool,
    resident: bool,
    verify: bool,
    cost: str | None,
    expected: ExpectedTiming | None,
    as_json: bool,
) -> None:
    from dicompiler.cli.compile_output import require_passed, show_idle_replicas, show_verification
    from dicompiler.cli.file_io import read_inputs, write_npz
    from dicompiler.cli.progress import progress
    from dicompiler.cli.run_output import show_discrepancies, show_prediction, show_run
    from dicompiler.cli.table import print_json
    from dicompiler.driver.artifact import install, open_service, verify_run
    from dicompiler.driver.compile_result import load_summary
    from dicompiler.ir.plan import load_plan
    from dicompiler.target.manifest import PLAN_FILE
    from dicompiler.verify.comparison import Verification

    inputs = read_inputs(stream.inputs)
    with progress(f"{directory}: copying to the hosts"):
        installed = install(directory, options)
    report: dict[str, Any] = {"installed": [dataclasses.asdict(device) for device in installed]}
    if not as_json:
        _show_installed(installed)
    checks: tuple[Check, ...] = ()
    if resident:
        report["resident"] = list(open_service(directory, options).start())
    if not copy_only:
        if verify:
            options = dataclasses.replace(options, kept_frames=len(load_plan(directory / PLAN_FILE).replica_roles))
        last, result = stream.run(directory, inputs, options, link)
        if last.resolve() != directory.resolve():
            directory, expected = last, stream.predict(last, cost, options)
        verification = verify_run(directory, result, inputs) if verify else Verification(())
        checks = verification.checks
        report["run"] = stream.write_log(directory, result, options, expected)
        report["checks"] = [dataclasses.asdict(check) for check in checks]
        if not as_json:
            click.echo()
            log = report["run"]
            show_run(result, log["in_flight"])
            show_idle_replicas(load_plan(directory / PLAN_FILE), len(result.frames_s), log["in_flight"])
            show_prediction(load_summary(directory), result, log["location"], log["in_flight"])
            show_discrepancies(expected, log)
        if stream.outputs is not None and all(check.passed for check in checks):
            write_npz(stream.outputs, result.outputs[0])
        if verify and not as_json:
            click.echo()
            show_verification(verification, directory, False)
    if as_json:
        print_json(report)
    require_passed(checks, str(directory))


def _show_installed(installed: Sequence[InstalledDevice]) -> None:
    from dicompiler.cli.table import print_table

    programs = list(installed[0].versions)
    rows = [
        (
            entry.device,
            entry.host,
            entry.directory,
            str(entry.copied_bytes),
            *(entry.versions[name] for name in programs),
        )
        for entry in installed
    ]
    print_table(("device", "host", "directory", "bytes copied", *programs), rows, right=(3,))
