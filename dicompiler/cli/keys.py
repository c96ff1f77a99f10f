"""`dicompiler keys`: makes the keys with which a compiled model's devices trust each other."""

from __future__ import annotations

from pathlib import Path

import click

from dicompiler.cli.options import directory_argument, json_option, output_option


@click.command("keys")
@directory_argument
@output_option(metavar="KEYS", help="Where to keep them. Default: DIR.keys, beside DIR.")
@click.option("--days", metavar="N", type=click.IntRange(min=1), default=825, help="How long they last. Default: 825.")
@click.option("--renew", is_flag=True, help="Make all anew; those of before are not accepted any more.")
@json_option
def command(directory: Path, output: Path | None, days: int, renew: bool, as_json: bool) -> None:
    """Make the keys that the devices of a compiled model need to talk over a network.

    For the coordinator (this host) and each device a certificate, signed by an authority of the cluster's own. Keys
    that are there already are kept. Copy to a device only KEYS/devices/ITS-NAME.
    """
    from dicompiler.cli.tables import show_json
    from dicompiler.target.remote.certificates import make
    from dicompiler.target.seal import open_artifact

    document = open_artifact(directory)
    place = output if output is not None else directory.absolute().with_name(f"{directory.absolute().name}.keys")
    written = make(document["devices"], place, days, renew)
    if as_json:
        show_json({"keys": str(place), "made": list(written)})
        return
    click.echo(f"{place}: {', '.join(written) if written else 'nothing to do: all keys are there'}")
