"""The command group: names and summaries of all commands; their modules are imported when they are called."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

import click

from dicompiler.base.errors import UsageError, did_you_mean
from dicompiler.cli.diagnostics import make_diagnostic_options, set_up_log
from dicompiler.cli.interrupts import interrupt_handler

# The summaries are repeated here so that `--help` imports no command. A test compares them with the commands.
COMMANDS: Mapping[str, str] = {
    "compile": "Compile a model into programs for the devices of a platform.",
    "run": "Run an artifact on this host, with one process per device.",
    "emulate": "Run an artifact on this host at the speed of a platform's boards.",
    "deploy": "Run an artifact on the boards of a cluster, over ssh.",
    "status": "Show the state of resident devices.",
    "keys": "Create the TLS keys of an artifact's devices.",
    "verify": "Run an artifact and compare its outputs with onnxruntime.",
    "plan": "Write the plan that a strategy makes, without compiling.",
    "compare": "Compare strategies: predicted metrics, search time, and the bottleneck of the best plan.",
    "explore": "Search for Pareto-optimal plans.",
    "simulate": "Simulate a plan on a platform, and show when each device computes, sends and waits.",
    "report": "Write a report of an artifact or Pareto front as one HTML page.",
    "profile": "Measure a model's layers, pieces of them, and the overhead of runtimes.",
    "tune": "Measure the most promising plans on the boards, and keep the fastest one.",
    "calibrate": "Correct the rates and links of a platform, or the times of a profile, by measured runs.",
    "opt": "Run passes on a model.",
    "platform": "Write a platform as a TOML file.",
    "list": "List passes, strategies, targets and other plugins, or the built-in networks.",
    "demo": "Split ResNet-50 over four boards, verify it, and explain the speed-up.",
}


class LazyGroup(click.Group):
    """A group of commands. Command `x` is `command` in the module `dicompiler.cli.x`, imported on first use."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:  # For KeyboardInterrupt, click prints an empty line; for Abort it does not.
            raise click.Abort from error

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"dicompiler.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        if not any(param.name == "debug" for param in command.params):
            command.params.extend(make_diagnostic_options())
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


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: ARG001
    if value and not ctx.resilient_parsing:
        import dicompiler

        click.echo(f"dicompiler {dicompiler.__version__}")
        ctx.exit()


def _print_cmake_directory(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: ARG001
    if value and not ctx.resilient_parsing:
        click.echo(Path(__file__).parent / "cmake")
        ctx.exit()


@click.group(cls=LazyGroup, invoke_without_command=True, params=make_diagnostic_options())
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
    """Split a trained ONNX model over a cluster of edge devices, and verify that the parts compute the same."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)
    set_up_log(ctx)
    # From here on, an interrupt raises KeyboardInterrupt, so that the command can clean up. Before, nothing has to be
    # cleaned up, so an interrupt ends the process at once. The module of the command is already imported here.
    interrupt_handler.begin_command()
