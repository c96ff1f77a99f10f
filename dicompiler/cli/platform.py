"""`dicompiler platform`: write a platform as a TOML file, to adapt it to your boards."""

from __future__ import annotations

from pathlib import Path

import click

from dicompiler.cli.completion import complete_platform
from dicompiler.cli.options import check_output_file, json_option, output_option
from dicompiler.cli.result_stream import echo_document


@click.command("platform")
@click.argument("name", shell_complete=complete_platform)
@output_option(metavar="PLATFORM.toml", required=False, help="Write to this file. Default: print the text.")
@json_option
def command(name: str, output: Path | None, as_json: bool) -> None:
    """Write a platform as a TOML file.

    NAME is a built-in platform (options in braces), a platform file, or `this`. For `this`, the command measures the
    compute rate of this host. Change the values in the written file to those of your boards.

    Example: dicompiler platform 'rpi5x4{bandwidth="2.5 Gbit/s"}' -o cluster.toml
    """
    from dicompiler.cli.file_io import write_text
    from dicompiler.cli.table import print_json
    from dicompiler.driver.prepare import resolve_platform
    from dicompiler.ir.platform import THIS_HOST, platform_to_toml
    from dicompiler.measure.this_host import measure_this_host

    check_output_file(output)
    platform = measure_this_host() if name == THIS_HOST else resolve_platform(name)
    text = platform_to_toml(platform)
    if output is not None:
        write_text(output, text)
    if as_json:
        outputs = [] if output is None else [str(output)]
        devices = [device.name for device in platform.devices]
        print_json({"name": platform.name, "devices": devices, "text": text, "outputs": outputs})
    elif output is None:
        echo_document(text, nl=False)
    else:
        click.echo(f"written: {output}")
