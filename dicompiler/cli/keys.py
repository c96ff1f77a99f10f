"""`dicompiler keys`: create the keys with which an artifact's devices authenticate each other."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from dicompiler.cli.options import directory_argument, json_option, output_option, warn_of_expiry
from dicompiler.target.remote import DEFAULT_VALIDITY_DAYS, MAX_VALIDITY_DAYS


@click.command("keys")
@directory_argument
@output_option(metavar="KEYS", help="Write the keys to this directory. Default: DIR.keys next to DIR.")
@click.option(
    "--days",
    metavar="N",
    type=click.IntRange(1, MAX_VALIDITY_DAYS),
    help=f"Make new certificates valid for N days. Default: {DEFAULT_VALIDITY_DAYS}.",
)
@click.option("--renew", is_flag=True, help="Create all keys again; the old ones are no longer accepted.")
@click.option(
    "--revoke",
    metavar="DEVICE",
    multiple=True,
    help="Refuse this device from now on; with --renew, create new keys only for it. Can be repeated.",
)
@json_option
def command(
    directory: Path, output: Path | None, days: int | None, renew: bool, revoke: tuple[str, ...], as_json: bool
) -> None:
    """Create the TLS keys of an artifact's devices.

    Creates a certificate for the coordinator (this host) and for each device. A certificate authority (CA) that is
    created for this cluster signs them. Existing keys are kept. Copy only KEYS/devices/NAME to the device NAME. After
    --revoke, copy the keys to all devices again, as 'dicompiler deploy' does.

    Example: dicompiler keys build --days 365
    """
    from dicompiler.cli.table import print_json, wrap_text
    from dicompiler.target.manifest import load_artifact
    from dicompiler.target.remote.certificates import make_keys

    document = load_artifact(directory)
    place = output if output is not None else directory.absolute().with_name(f"{directory.absolute().name}.keys")
    written = make_keys(document["devices"], place, days or DEFAULT_VALIDITY_DAYS, renew, revoke)
    if days is not None and not written:
        logging.getLogger("dicompiler").warning(
            "--days: all keys exist, and none is new: create them again with --renew"
        )
    warn_of_expiry(place)
    if as_json:
        print_json({"keys": str(place), "created": list(written), "revoked": list(revoke)})
        return
    did = [*([", ".join(written)] if written else []), *([f"revoked {', '.join(revoke)}"] if revoke else [])]
    click.echo(wrap_text(f"{place}: {'; '.join(did) or 'unchanged: all keys exist'}"))
