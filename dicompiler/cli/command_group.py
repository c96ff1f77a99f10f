"""The command group: knows the commands' names and summaries, and imports a command's module when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from dicompiler.base.errors import UsageError, did_you_mean, one_line

# Stated here so that `--help` imports no command; a test compares them with the commands' own.
COMMANDS: Mapping[str, str] = {
    "compile": "Compile a model into programs for the devices of a platform.",
    "run": "Run a compiled model on this host, a process for each device.",
    "emulate": "Run a compiled model on this host as the boards of a platform would.",
    "deploy": "Run a compiled model on the boards of a cluster, over ssh.",
    "status": "Ask the devices that are kept running how they do.",
    "keys": "Make the keys that the devices of a compiled model need to talk over a network.",
    "verify": "Run a compiled model and compare it with onnxruntime.",
    "plan": "Decide only: write the plan that a strategy makes.",
    "compare": "Compare strategies: what their plans come to, how long they searched, what holds the best back.",
    "explore": "Search for the plans of which none is better than another in everything.",
    "simulate": "Play a plan on a platform, step by step as its devices would, and show who computes, sends and waits.",
    "report": "Draw a compiled network, or a front of plans, as one HTML page.",
    "profile": "Measure the layers of a model, pieces of them, and what targets' runtimes cost, on this device.",
    "calibrate": "Correct a platform's figures, or a profile's, by what runs measured.",
    "opt": "Run passes over a model.",
    "list": "List what plugins provide, with options and origins, or the networks that come with dicompiler.",
    "demo": "Split ResNet-50 over four boards, verify it, and say why it is faster or not.",
}


class LazyGroup(click.Group):
    """A group whose command `x` is `command` in module `dicompiler.cli.x`."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"dicompiler.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        if not any(param.name == "debug" for param in command.params):
            command.params.append(_make_debug_option())
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            raise UsageError(f"unknown command {args[0]!r}{did_you_mean(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _make_debug_option() -> click.Option:
    # Its value is not used: `main` looks for the flag itself, as parsing the arguments may be what fails.
    return click.Option(["--debug"], is_flag=True, expose_value=False, help="Print a traceback with every error.")


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: ARG001
    if value and not ctx.resilient_parsing:
        import dicompiler

        click.echo(f"dicompiler {dicompiler.__version__}")
        ctx.exit()


def _print_cmake_directory(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: ARG001
    if value and not ctx.resilient_parsing:
        click.echo(Path(__file__).parent / "cmake")
        ctx.exit()


def _log_warnings_to_stderr() -> None:
    """Warnings of the library become lines like those of errors."""
    import logging

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # Whatever stderr is now: while progress is shown, lines go above it.
            line = f"dicompiler: {record.levelname.lower()}: {one_line(record.getMessage())}"
            print(line, file=sys.stderr)

    log = logging.getLogger("dicompiler")
    log.handlers, log.propagate = [Lines(logging.WARNING)], False


@click.group(cls=LazyGroup, invoke_without_command=True, params=[_make_debug_option()])
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
@click.option(
    "--cmakedir",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_cmake_directory,
    help="Show the directory of the CMake package.",
)
@click.pass_context
def root(ctx: click.Context) -> None:
    """Splits a trained ONNX model over a cluster of edge devices, and proves that the parts compute the same."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)
    _log_warnings_to_stderr()
