"""Options for build systems: --depfile, its details, and --print-outputs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from dicompiler.base.errors import UsageError
from dicompiler.cli.options import (
    PATH,
    STREAM,
    CompileRequest,
    check_output_file,
    combine,
    refuse_options,
    refuse_overwriting,
)
from dicompiler.cli.result_stream import echo_document

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
    click.option(
        "--depfile-empty-rules",
        is_flag=True,
        help="Add an empty rule for each file to the depfile, so that Make does not stop if a file was deleted.",
    ),
    click.option("--print-outputs", is_flag=True, help="Print only the paths of the written files."),
)


@dataclass(frozen=True)
class BuildSystemOptions:
    """Values of the options for build systems.

    Attributes:
        depfile: File to write the dependencies to; None to write nothing.
        depfile_target: Target of the make rule; None for the first output of the command.
        depfile_empty_rules: True to add an empty rule for each prerequisite.
        print_outputs: True to print only the paths of the written files.
    """

    depfile: Path | None = None
    depfile_target: str | None = None
    depfile_empty_rules: bool = False
    print_outputs: bool = False

    def depfile_rule(
        self, outputs: Sequence[Path], request: CompileRequest, plugins: Iterable[object] = ()
    ) -> DepfileRule:
        """Check the options and return the rule for the depfile, before the command starts its work.

        Args:
            outputs: Files that the command writes, the main output first.
            request: The compilation request, which names input files.
            plugins: The strategy, cost model, target and passes. Their options may name more input files.

        Returns:
            The rule. Its method `write` does nothing if no depfile was requested.

        Raises:
            UsageError: The options exclude each other, an output is also an input, or a depfile cannot name the model.
            DicompilerError: An output cannot be written, or the model cannot be read.
        """
        plugins = tuple(plugins)
        if self.print_outputs:
            refuse_options("--print-outputs prints only paths, and the JSON contains them too", "as_json")
        target = self.depfile_target or str(outputs[0])
        rule = DepfileRule(self.depfile, target, request, plugins, self.depfile_empty_rules)
        if self.depfile is None:
            if self.depfile_target is not None:
                raise UsageError("--depfile-target needs --depfile")
            if self.depfile_empty_rules:
                raise UsageError("--depfile-empty-rules needs --depfile")
            _check_no_input_is_overwritten(outputs, rule)
            return rule
        if request.model.is_fifo():
            raise UsageError("--depfile needs the names of files: give a file instead of a pipe")
        check_output_file(self.depfile)
        refuse_overwriting(self.depfile, outputs)
        _check_no_input_is_overwritten((*outputs, self.depfile), rule)
        rule.format_text()
        return rule


def _check_no_input_is_overwritten(written: Sequence[Path], rule: DepfileRule) -> None:
    overwritten = [path for path in written if path.exists()]
    if rule.request.model == STREAM or not overwritten:
        return
    prerequisites = rule.find_prerequisites()
    for output in overwritten:
        # `opt` may overwrite its model. A depfile forbids it, because the rule would then depend on its own output.
        is_model_replaceable = output == written[0] and rule.depfile is None
        refuse_overwriting(
            output, (path for path in prerequisites if not (is_model_replaceable and path == rule.request.model))
        )


@dataclass(frozen=True)
class DepfileRule:
    """A make rule with the files that the command reads as prerequisites.

    Attributes:
        depfile: File to write; None to write nothing.
        target: Target of the rule.
        request: The compilation request.
        plugins: The strategy, cost model, target and passes. Their options may name more prerequisites.
        has_empty_rules: True to add an empty rule for each prerequisite.
    """

    depfile: Path | None
    target: str
    request: CompileRequest
    plugins: Sequence[object]
    has_empty_rules: bool = False

    def write(self) -> None:
        """Write the rule to the depfile. Without a depfile, do nothing."""
        if self.depfile is None:
            return
        from dicompiler.base.atomic_output import atomic_file

        with atomic_file(self.depfile) as stage:
            stage.write_bytes(os.fsencode(self.format_text()))

    def format_text(self) -> str:
        """Return the text of the rule.

        Raises:
            DicompilerError: A file name cannot be written in a make rule.
        """
        from dicompiler.driver import depfile

        return depfile.format_rule(self.target, self.find_prerequisites(), self.has_empty_rules)

    def find_prerequisites(self) -> tuple[Path, ...]:
        """Return the input files. Call it at the end of the command to include the loaded plugins."""
        from dicompiler.driver import depfile

        return depfile.find_prerequisites(self.request.model, self.request.options, self.plugins)


def print_paths(paths: Iterable[Path]) -> None:
    for path in paths:
        echo_document(str(path))
