"""The command line: the group of all commands, error messages and exit codes.

    arguments ⇒ results on stdout, diagnostics on stderr, exit code

With `--json`, stdout has one JSON document: the result, or the error. All other prints go to stderr.

Exit codes:

- 0: success
- 1: invalid input, a model that cannot be compiled or run, or a broken third-party plugin
- 2: wrong arguments
- 70: internal error
- 130, 143, 129: SIGINT (Ctrl-C), SIGTERM, SIGHUP
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import click

from dicompiler.base.errors import DicompilerError, PluginError, UsageError, did_you_mean, is_out_of_memory, one_line
from dicompiler.base.termination import TerminationError
from dicompiler.cli.diagnostics import make_diagnostic_options, open_log_after_error, set_up_log
from dicompiler.cli.interrupts import EXIT_INTERRUPTED, INTERRUPTED_MESSAGE, TERMINATED_MESSAGE, interrupt_handler
from dicompiler.cli.result_stream import accept_all_texts, echo_document, get_result_stream, separate_results

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

OPTION_BY_WRONG_COMMAND = {"explain": "compare --explain"}
"""Options that users may take for commands, by the name of this command."""


class LazyGroup(click.Group):
    """A group of commands. Command `x` is `command` in the module `dicompiler.cli.x`, imported on first use."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        # click would print an empty line for KeyboardInterrupt. It prints nothing for Abort, so Abort replaces it.
        except KeyboardInterrupt as error:
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
            known = OPTION_BY_WRONG_COMMAND.get(args[0])
            hint = (
                did_you_mean(args[0], COMMANDS, "dicompiler --help") if known is None else f" (did you mean {known!r}?)"
            )
            raise UsageError(f"unknown command {args[0]!r}{hint}")
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            _check_no_option_repeats(click.Context(command, ctx, name), rest)
        return name, command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _check_no_option_repeats(ctx: click.Context, arguments: Sequence[str]) -> None:
    """Raise UsageError if an option with a value is given twice, because all values but the last would be ignored."""
    _, _, given = ctx.command.make_parser(ctx).parse_args(list(arguments))
    for param in ctx.command.params:
        has_one_value = isinstance(param, click.Option) and not (param.multiple or param.is_flag or param.count)
        if has_one_value and given.count(param) > 1:
            raise UsageError(f"{ctx.info_name}: option {' / '.join(param.opts)} is given twice: remove one of them")


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
    # From here on, Ctrl-C raises KeyboardInterrupt, so that the command can clean up. Before, it ends the process at
    # once, because nothing has to be cleaned up.
    interrupt_handler.begin_command()


EXIT_INTERNAL_ERROR = 70
_OUT_OF_MEMORY_MESSAGE = "error: memory could not be allocated: raise the limit (ulimit -v), or end other programs"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code. Errors are printed to stderr, one line each.

    Args:
        arguments: The command-line arguments. Default: the arguments of this process (`sys.argv`).
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # stdout or stderr is closed, so it is replaced by /dev/null.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    # An earlier command of this process may have opened a log file. This command must not write to it.
    if "dicompiler.cli.log_handlers" in sys.modules:
        sys.modules["dicompiler.cli.log_handlers"].set_handlers(False, None)
    if arguments is None:
        accept_all_texts()
    called = list(sys.argv[1:] if arguments is None else arguments)
    start = time.monotonic()
    with separate_results(called):
        code = _run_command(called)
    if "dicompiler.cli.log_handlers" in sys.modules:
        sys.modules["dicompiler.cli.log_handlers"].log_end(code, time.monotonic() - start)
    return code


def _run_command(arguments: list[str]) -> int:
    try:
        result = root.main(arguments, prog_name="dicompiler", standalone_mode=False, obj=arguments)
        # Flush here, because a full disk or a closed pipe raises an error only when the buffer is flushed.
        sys.stdout.flush()
        interrupt_handler.end_command(is_finished=True)
    except BaseException as error:
        interrupt_handler.end_command(is_finished=False)
        if "_DICOMPILER_COMPLETE" in os.environ and isinstance(error, SystemExit):
            return int(error.code or 0)
        if isinstance(error, BrokenPipeError) or _is_click_exit(error):
            if get_result_stream() is sys.stdout:
                _discard_stdout()
            return 1
        if "--debug" in arguments:
            import traceback

            traceback.print_exc()
        try:
            code, line = _describe_error(error, arguments)
        except Exception as second_error:
            if not is_out_of_memory(second_error):
                raise
            code, line = 1, _OUT_OF_MEMORY_MESSAGE
        message = line.removeprefix("error: ")
        open_log_after_error(arguments)
        if "dicompiler.cli.log_handlers" in sys.modules:
            is_traceback_useful = (
                code == EXIT_INTERNAL_ERROR or isinstance(error, PluginError) or "--debug" in arguments
            )
            sys.modules["dicompiler.cli.log_handlers"].log_error(message, error if is_traceback_useful else None)
        # Write the line in one call, so that it does not mix with lines of other processes on the same terminal.
        sys.stderr.write(f"dicompiler: {line}\n")
        if "--json" in arguments:
            # The error may be that stdout cannot be written. It is already printed on stderr.
            with suppress(OSError):
                echo_document(json.dumps({"error": {"message": message, "exit_code": code}}))
        return code
    return result if isinstance(result, int) else 0


def _is_click_exit(error: BaseException) -> bool:
    """Return True if click itself raised SystemExit, which it does after a broken pipe."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return isinstance(error, SystemExit) and trace is not None and trace.tb_frame.f_globals["__name__"] == "click.core"


def _discard_stdout() -> None:
    # The interpreter flushes stdout at exit, which would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _describe_error(error: BaseException, arguments: Sequence[str]) -> tuple[int, str]:
    if isinstance(error, TerminationError):
        assert isinstance(error.code, int)
        return error.code, TERMINATED_MESSAGE
    if isinstance(error, DicompilerError):
        return error.exit_code, f"error: {_with_own_label(one_line(str(error)), arguments)}"
    if any(isinstance(cause_error, click.Abort | KeyboardInterrupt) for cause_error in _cause_chain(error)):
        return EXIT_INTERRUPTED, INTERRUPTED_MESSAGE
    if isinstance(error, click.ClickException):
        return error.exit_code, f"error: {_describe_usage_error(error, arguments)}"
    if interrupt_handler.was_raised:  # A library has replaced the KeyboardInterrupt by another exception.
        return EXIT_INTERRUPTED, INTERRUPTED_MESSAGE
    # Check for lack of memory first, because the next steps import modules, which needs memory.
    if is_out_of_memory(error):
        return 1, _OUT_OF_MEMORY_MESSAGE
    if line := _plugin_error_line(error):
        return 1, f"error: {line}"
    if isinstance(error, OSError) and error.errno is not None:
        place = f"{error.filename}: " if error.filename else ""
        return 1, f"error: {one_line(place + (error.strerror or str(error)))}"
    from dicompiler.plugin.pass_base import PassError

    cause = str(error) if isinstance(error, PassError) else f"{type(error).__name__}: {error}"
    return EXIT_INTERNAL_ERROR, f"internal error: {one_line(cause)}; run again with --debug for the traceback"


_SHARED_LABELS = ("run", "deploy", "emulate", "verify", "compile", "compare", "explore", "simulate", "opt")
"""Command names at the start of error messages that are replaced by the name of the called command.

Other command names stay, because they are also names of inputs: "plan: lost: …" is about a plan.
"""


def _with_own_label(message: str, arguments: Sequence[str]) -> str:
    """Return the message with the name of the called command in front.

    Messages of shared functions begin with the name of one command, such as "run: …".
    """
    label, separator, rest = message.partition(": ")
    # Keep a label that is also a command-line argument: it is the called command, or a file of the user.
    if not separator or label not in _SHARED_LABELS or label in arguments:
        return message
    return f"{_called_command(arguments) or label}: {rest}"


def _called_command(arguments: Sequence[str]) -> str:
    return next((argument for argument in arguments if argument in COMMANDS), "")


def _cause_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, its cause, the cause of the cause, and so on.

    After Ctrl-C during an import, a library may raise ImportError with KeyboardInterrupt as its cause.
    """
    while error is not None:
        yield error
        error = error.__cause__


def _plugin_error_line(error: BaseException) -> str | None:
    """Return a message that names the third-party plugin in the traceback; None if there is none."""
    from dicompiler.plugin.entry_points import is_builtin_distribution, top_level_package
    from dicompiler.plugin.plugin_wrappers import format_plugin_error
    from dicompiler.plugin.registry import registry

    try:
        plugins = registry().plugins
    except UsageError:  # The environment variable DICOMPILER_PLUGINS names an unknown plugin: none was loaded.
        return None
    third_party = [plugin for plugin in plugins if not is_builtin_distribution(plugin.distribution)]
    return format_plugin_error(error, {top_level_package(plugin.value): str(plugin) for plugin in third_party})


def _describe_usage_error(error: click.ClickException, arguments: Sequence[str]) -> str:
    context = getattr(error, "ctx", None)
    # click's error about an option without its value has no context. Get the command name from the arguments then.
    path = context.command_path if context is not None else f"dicompiler {_called_command(arguments)}".rstrip()
    place = path.removeprefix("dicompiler").strip()
    if isinstance(error, click.NoSuchOption):
        params = [] if context is None else context.command.get_params(context)
        valid_names = [name for param in params if isinstance(param, click.Option) for name in param.opts]
        message = f"unknown option {error.option_name!r}{did_you_mean(error.option_name, valid_names)}"
    else:
        message = one_line(error.format_message()).rstrip(".")
        for theirs, ours in (("a valid integer range", "an integer"), ("a valid float range", "a number")):
            message = message.replace(theirs, ours)
        message = f"{message[:1].lower()}{message[1:]}; see '{path} --help'"
    return f"{place}: {message}" if place else message
