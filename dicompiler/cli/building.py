"""The options by which build systems learn what a command read and wrote: --depfile, --depfile-target, --print-outputs.

In: the options, what the command was given, what it wrote. Out: a depfile; a path each line on stdout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from dicompiler.base.errors import UsageError
from dicompiler.cli.options import PATH, check_file

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--depfile", metavar="FILE", type=PATH, help="Write there what was read, for Make and Ninja."),
    click.option(
        "--depfile-target", metavar="NAME", help="What the build rule makes, where that is not the first output."
    ),
    click.option("--print-outputs", is_flag=True, help="Print the paths of the written files, and nothing else."),
)


def building_options(command: F) -> F:
    """Adds the three options to a command, as depfile, depfile_target and print_outputs."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True)
class Building:
    """What a build system wants of a command that reads `model`, `platform`, `plan` and what options of `parts` name
    (see depfile.prerequisites). depfile: where to write that, if anywhere; target: what the rule makes."""

    depfile: Path | None
    target: str
    model: Path
    platform: str | None
    plan: Path | None
    parts: Sequence[object]

    def write(self) -> None:
        """After the work: the depfile, whole."""
        if self.depfile is None:
            return
        from dicompiler.base.atomic import whole

        with whole(self.depfile) as stage:
            stage.write_bytes(os.fsencode(self.text()))

    def text(self) -> str:
        """The depfile's text. DicompilerError for names that it cannot hold."""
        from dicompiler.driver import depfile

        return depfile.text(self.target, depfile.prerequisites(self.model, self.platform, self.plan, self.parts))


def building(
    depfile: Path | None,
    target: str | None,
    outputs: Sequence[Path],
    model: Path,
    platform: str | None = None,
    plan: Path | None = None,
    parts: Iterable[object] = (),
) -> Building:
    """Checked before the work: the depfile can be written and holds all names. outputs: what the command writes, the
    main file first."""
    found = Building(depfile, target or str(outputs[0]), model, platform, plan, tuple(parts))
    if depfile is None:
        if target is not None:
            raise UsageError("--depfile-target goes with --depfile")
        return found
    check_file(depfile)
    for path in outputs:
        if path.absolute() == depfile.absolute():
            raise UsageError(f"--depfile: {path} is written too: give the depfile a name of its own")
    found.text()
    return found


def made(**specs: str | None) -> dict[str, Any]:
    """Strategy, cost model and target from their texts, by the same name; those that are given. UsageError for unknown
    names."""
    from dicompiler.plugin.registry import registry

    kinds = {"strategy": "strategies", "cost": "cost_models", "target": "targets"}
    return {name: registry().make(kinds[name], spec) for name, spec in specs.items() if spec is not None}


def print_paths(paths: Iterable[Path]) -> None:
    """One each line."""
    for path in paths:
        click.echo(path)
