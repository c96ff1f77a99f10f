"""The options by which build systems learn what a command read and wrote: --depfile, --depfile-target, --print-outputs.

In: the options, what the command was asked, what it wrote. Out: a depfile; a path each line on stdout.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dicompiler.base.errors import UsageError
from dicompiler.cli.options import PATH, CompileRequest, check_output_file, combine

build_system_options = combine(
    click.option("--depfile", metavar="FILE", type=PATH, help="Write there what was read, for Make and Ninja."),
    click.option(
        "--depfile-target", metavar="NAME", help="What the build rule makes, where that is not the first output."
    ),
    click.option("--print-outputs", is_flag=True, help="Print the paths of the written files, and nothing else."),
)


@dataclass(frozen=True)
class BuildSystemOptions:
    """What the three options say."""

    depfile: Path | None = None
    depfile_target: str | None = None
    print_outputs: bool = False

    def depfile_rule(
        self, outputs: Sequence[Path], request: CompileRequest, parts: Iterable[object] = ()
    ) -> DepfileRule:
        """Before the work: what `Rule.write` will write after it, which is checked. outputs: what the command writes,
        the main file first; parts: see Rule."""
        rule = DepfileRule(self.depfile, self.depfile_target or str(outputs[0]), request, tuple(parts))
        if self.depfile is None:
            if self.depfile_target is not None:
                raise UsageError("--depfile-target goes with --depfile")
            return rule
        check_output_file(self.depfile)
        for path in outputs:
            if path.absolute() == self.depfile.absolute():
                raise UsageError(f"--depfile: {path} is written too: give the depfile a name of its own")
        rule.format_text()
        return rule


@dataclass(frozen=True)
class DepfileRule:
    """That a command makes `target` of what `request` and the options of `parts` name (see depfile.prerequisites)."""

    depfile: Path | None
    target: str
    request: CompileRequest
    plugins: Sequence[object]

    def write(self) -> None:
        """After the work: the depfile, whole, if there is to be one."""
        if self.depfile is None:
            return
        from dicompiler.base.atomic_output import atomic_file

        with atomic_file(self.depfile) as stage:
            stage.write_bytes(os.fsencode(self.format_text()))

    def format_text(self) -> str:
        """The depfile's text. DicompilerError for names that it cannot hold."""
        from dicompiler.driver import depfile

        given = self.request
        read = (given.plan, given.wire_samples)
        return depfile.format_rule(
            self.target, depfile.find_prerequisites(given.model, given.platform, read, self.plugins)
        )


def make_plugins(**specs: str | None) -> dict[str, Any]:
    """Strategy, cost model and target from their texts, by the same name; those that are given. UsageError for unknown
    names."""
    from dicompiler.plugin.registry import registry

    kinds = {"strategy": "strategies", "cost": "cost_models", "target": "targets"}
    return {name: registry().make(kinds[name], spec) for name, spec in specs.items() if spec is not None}


def print_paths(paths: Iterable[Path]) -> None:
    """One each line."""
    for path in paths:
        click.echo(path)
