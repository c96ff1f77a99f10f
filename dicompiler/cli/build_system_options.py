"""Options for build systems: --depfile, --depfile-target and --print-outputs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from dicompiler.base.errors import UsageError
from dicompiler.cli.options import PATH, CompileRequest, check_output_file, combine, refuse_options

build_system_options = combine(
    click.option(
        "--depfile",
        metavar="FILE",
        type=PATH,
        help="Write the files that were read to FILE, as a rule for Make and Ninja.",
    ),
    click.option(
        "--depfile-target", metavar="NAME", help="Set the target of the rule in the depfile. Default: the first output."
    ),
    click.option("--print-outputs", is_flag=True, help="Print only the paths of the written files."),
)


@dataclass(frozen=True)
class BuildSystemOptions:
    """Values of the options --depfile, --depfile-target and --print-outputs.

    Attributes:
        depfile: File to write the dependencies to; None to write nothing.
        depfile_target: Target of the make rule; None for the first output of the command.
        print_outputs: True to print only the paths of the written files.
    """

    depfile: Path | None = None
    depfile_target: str | None = None
    print_outputs: bool = False

    def depfile_rule(
        self, outputs: Sequence[Path], request: CompileRequest, plugins: Iterable[object] = ()
    ) -> DepfileRule:
        """Check the options before the command does its work; return the rule to write afterwards.

        Args:
            outputs: The files that the command writes, the main one first.
            request: The compilation request, which names the files that the command reads.
            plugins: The strategy, cost model, target and passes, because their options may name more files.

        Returns:
            The rule.

        Raises:
            UsageError: The options do not fit together.
        """
        if self.print_outputs:
            refuse_options("--print-outputs prints only paths, and the JSON contains them too", "as_json")
        rule = DepfileRule(self.depfile, self.depfile_target or str(outputs[0]), request, tuple(plugins))
        if self.depfile is None:
            if self.depfile_target is not None:
                raise UsageError("--depfile-target needs --depfile")
            return rule
        check_output_file(self.depfile)
        for path in outputs:
            if path.absolute() == self.depfile.absolute():
                raise UsageError(f"--depfile: {path} is also an output: give the depfile another name")
        rule.format_text()
        return rule


@dataclass(frozen=True)
class DepfileRule:
    """A make rule for `target`, whose prerequisites are the files that the command reads.

    Attributes:
        depfile: File to write; None to write nothing.
        target: Target of the rule.
        request: The compilation request.
        plugins: The strategy, cost model, target and passes of the command. Files that their options name are
            prerequisites too.
    """

    depfile: Path | None
    target: str
    request: CompileRequest
    plugins: Sequence[object]

    def write(self) -> None:
        """Write the depfile, if there is one."""
        if self.depfile is None:
            return
        from dicompiler.base.atomic_output import atomic_file

        with atomic_file(self.depfile) as stage:
            stage.write_bytes(os.fsencode(self.format_text()))

    def format_text(self) -> str:
        """Return the text of the depfile; raise DicompilerError if a file name cannot be written in a make rule."""
        from dicompiler.driver import depfile

        request = self.request
        return depfile.format_rule(
            self.target, depfile.find_prerequisites(request.model, request.options, self.plugins)
        )


def print_paths(paths: Iterable[Path]) -> None:
    for path in paths:
        click.echo(path)
