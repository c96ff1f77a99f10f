"""`dicompiler run`: starts every device's program on this host and shows what each of them did."""

from __future__ import annotations

from pathlib import Path

import click

from dicompiler.cli.options import (
    PATH,
    Seconds,
    check_file,
    directory_argument,
    inputs_option,
    json_option,
    log_option,
)

MOST_FRAMES = 10_000_000


@click.command("run")
@directory_argument
@inputs_option
@click.option("--outputs", metavar="Y.npz", type=PATH, help="Where to write the outputs of the first frame.")
@click.option(
    "--frames", metavar="N", type=click.IntRange(1, MOST_FRAMES), default=1, help="How many times. Default: 1."
)
@click.option(
    "--in-flight",
    metavar="N",
    type=click.IntRange(min=1, max=1024),
    help="Frames that are on their way at once. Default: twice the number of devices.",
)
@click.option("--timeout", metavar="S", type=Seconds(), help="Seconds for all of it. Default: 600.")
@click.option("--pin", is_flag=True, help="Each process keeps to its share of the processors.")
@click.option("--keys", metavar="KEYS", type=PATH, help="What 'dicompiler keys' made: connections are in TLS.")
@click.option("--listen", metavar="HOST:PORT", help="Where devices reach this process. Default: 127.0.0.1, any port.")
@click.option("--elsewhere", metavar="DEVICE", multiple=True, help="A device that you start yourself. Can be repeated.")
@click.option("--insecure", is_flag=True, help="Allow connections in the clear to other hosts.")
@click.option("--heartbeat", metavar="S", type=float, help="Seconds between signs of life. Default: 2.")
@log_option
@json_option
def command(
    directory: Path,
    inputs: Path | None,
    outputs: Path | None,
    frames: int,
    in_flight: int | None,
    timeout: float | None,
    pin: bool,
    keys: Path | None,
    listen: str | None,
    elsewhere: tuple[str, ...],
    insecure: bool,
    heartbeat: float | None,
    log: Path | None,
    as_json: bool,
) -> None:
    """Run a compiled model on this host, a process for each device.

    Prints for each device the seconds that it computed, waited and sent, and the bytes it sent, over all frames.
    Devices on other hosts are started there by hand: --elsewhere prints the command, for which --listen gives an
    address of this host that they reach.
    """
    from dicompiler.cli.files import read_npz, write_json, write_npz
    from dicompiler.cli.progress import progress
    from dicompiler.cli.results import show_run
    from dicompiler.cli.tables import show_json
    from dicompiler.driver.artifact import TIMEOUT_S, run
    from dicompiler.driver.run_log import document
    from dicompiler.target.records import RunOptions

    check_file(outputs)
    check_file(log)
    options = RunOptions(
        in_flight=in_flight or 0,
        keep=1,
        heartbeat_s=2.0 if heartbeat is None else heartbeat,
        keys=keys,
        listen=listen or "127.0.0.1:0",
        insecure=insecure,
        elsewhere=elsewhere,
        pin=pin,
    )
    given = None if inputs is None else read_npz(inputs)
    with progress(f"{directory}: running {frames} frame{'' if frames == 1 else 's'}"):
        result = run(directory, given, frames, TIMEOUT_S if timeout is None else timeout, options)
    if outputs is not None:
        write_npz(outputs, result.outputs[0])
    if log is not None:
        write_json(log, document(directory, result))
    if as_json:
        show_json(document(directory, result))
    else:
        show_run(result)
