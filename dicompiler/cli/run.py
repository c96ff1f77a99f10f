"""`dicompiler run`: run an artifact on this host, and print the work of each device."""

from __future__ import annotations

from pathlib import Path

import click

from dicompiler.base.errors import UsageError
from dicompiler.cli.diagnostics import is_quiet
from dicompiler.cli.options import (
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
from dicompiler.target.run_records import RunOptions


@click.command("run")
@directory_argument
@stream_options
@timeout_option(help="Stop the run after S seconds. Default: 600.")
@click.option("--pin", is_flag=True, help="Let each device process use only its own part of this host's processors.")
@keys_option
@listen_option(help="Listen for devices at this address. Default: 127.0.0.1, any free port.")
@click.option(
    "--start-manually",
    metavar="DEVICE",
    multiple=True,
    help="Do not start this device, but print the command that starts it. Can be repeated.",
)
@insecure_option
@heartbeat_option
@start_without_option
@log_option
@cost_option
@json_option
@options_as(stream=StreamOptions, options=RunOptions)
def command(directory: Path, stream: StreamOptions, options: RunOptions, cost: str | None, as_json: bool) -> None:
    """Run an artifact on this host, with one process per device.

    Prints for each device the seconds of computing, waiting and sending, and the bytes sent, over all frames. To run
    a device on another host, name it with --start-manually, and run the printed command there. Set --listen to an
    address of this host that the other host can reach. With --log, also prints differences between prediction and
    measurement.

    Example: dicompiler run build --inputs x.npz --frames 100 --in-flight 4
    """
    from dicompiler.cli.compile_output import show_idle_replicas, show_wire
    from dicompiler.cli.file_io import read_inputs, write_npz
    from dicompiler.cli.run_output import show_discrepancies, show_prediction, show_run
    from dicompiler.cli.table import print_json
    from dicompiler.driver.compile_result import load_summary
    from dicompiler.ir.plan import load_plan
    from dicompiler.target.manifest import PLAN_FILE

    if stream.log is None:
        refuse_options("only the log of --log needs a cost model", "cost")
    if options.start_manually and is_quiet():
        raise UsageError("run: --quiet hides the commands that --start-manually prints: omit --quiet")
    stream.check_paths()
    warn_of_expiry(options.keys)
    directory, link = stream.resolve_link(directory)
    expected = stream.predict(directory, cost, options)
    last, result = stream.run(directory, read_inputs(stream.inputs), options, link)
    if stream.outputs is not None:
        write_npz(stream.outputs, result.outputs[0])
    if last.resolve() != directory.resolve():
        directory, expected = last, stream.predict(last, cost, options)
    log = stream.write_log(directory, result, options, expected)
    if as_json:
        print_json(log)
    else:
        plan = load_plan(directory / PLAN_FILE)
        show_run(result, log["in_flight"])
        show_idle_replicas(plan, len(result.frames_s), log["in_flight"])
        show_prediction(load_summary(directory), result, log["location"], log["in_flight"])
        show_discrepancies(expected, log)
        show_wire(plan)
