"""`dicompiler keys`: makes the keys with which a compiled model's devices trust each other."""

from __future__ import annotations

from pathlib import Path

import click

from dicompiler.cli.options import directory_argument, json_option, output_option, warn_of_expiry
from dicompiler.target.remote.certificates import DEFAULT_VALIDITY_DAYS, MAX_VALIDITY_DAYS


@click.command("keys")
@directory_argument
@output_option(metavar="KEYS", help="Where to keep them. Default: DIR.keys, beside DIR.")
@click.option(
    "--days",
    metavar="N",
    type=click.IntRange(1, MAX_VALIDITY_DAYS),
    default=DEFAULT_VALIDITY_DAYS,
    help=f"How long they last. Default: {DEFAULT_VALIDITY_DAYS}.",
)
@click.option("--renew", is_flag=True, help="Make all anew; those of before are not accepted any more.")
@click.option(
    "--revoke",
    metavar="DEVICE",
    multiple=True,
    help="A device that is not to be let in any more; with --renew it alone gets new keys. Can be repeated.",
)
@json_option
def command(
    directory: Path, output: Path | None, days: int, renew: bool, revoke: tuple[str, ...], as_json: bool
) -> None:
    """Make the keys that the devices of a compiled model need to talk over a network.

    For the coordinator (this host) and each device a certificate, signed by an authority of the cluster's own. Keys
    that are there already are kept. Copy to a device only KEYS/devices/ITS-NAME; after --revoke copy to all of them
    again, as 'dicompiler deploy' does.
    """
    from dicompiler.cli.table import print_json
    from dicompiler.target.integrity import load_artifact
    from dicompiler.target.remote.certificates import make_keys

    document = load_artifact(directory)
    place = output if output is not None else directory.absolute().with_name(f"{directory.absolute().name}.keys")
    written = make_keys(document["devices"], place, days, renew, revoke)
    warn_of_expiry(place)
    if as_json:
        print_json({"keys": str(place), "made": list(written), "revoked": list(revoke)})
        return
    did = [*([", ".join(written)] if written else []), *([f"revoked {', '.join(revoke)}"] if revoke else [])]
    click.echo(f"{place}: {'; '.join(did) or 'nothing to do: all keys are there'}")
