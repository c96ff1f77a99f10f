"""Arguments and options that several commands share, so that they are spelled, explained and checked alike.

A command names them one by one or as stacks, and says what those are for that mean something else in each command; with
`handed` the values reach it as records.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dicompiler.base.atomic_output import check_writable
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.base.objectives import objective_terms

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.analysis.prediction_error import ExpectedTiming
    from dicompiler.driver.compile_result import CompileResult
    from dicompiler.target.run_records import RunOptions, RunResult

F = TypeVar("F", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)
MAX_FRAMES = 10_000_000


def combine(*options: Callable[[F], F]) -> Callable[[F], F]:
    """One decorator for several options, which stand in `--help` in this order."""

    def decorate(command: F) -> F:
        return functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)

    return decorate


def options_as(**records: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Stands below a command's options: those that are fields of one of these dataclasses reach it as that record.

    What was not given (None) keeps the field's default.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def call(**given: Any) -> None:
            for name, record in records.items():
                values = {field.name: given.pop(field.name) for field in fields(record) if field.name in given}
                given[name] = record(**{key: value for key, value in values.items() if value is not None})
            command(**given)

        return call

    return decorate


class SecondsRange(click.FloatRange):
    """A time of 0.1 s to four months: what clocks and timers take."""

    def __init__(self) -> None:
        super().__init__(0.1, 1e7)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; click's own range lets NaN through."""
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value!r} is no time", param, ctx)
        return seconds


def _check_objective(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """UsageError for what is no objective, before any work."""
    if value is not None:
        objective_terms(value)
    return value


def _check_executor(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """UsageError for what is no executor, before any work."""
    if value is not None:
        from dicompiler.driver.executors import parse_executor

        parse_executor(value)
    return value


def _check_shapes(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """UsageError for a dimension that no tensor can have; what else can be wrong is found where shapes are inferred."""
    for text in given:
        for digits in re.findall(r"[0-9]+", text.rpartition("=")[2]):
            if len(digits) > 18:
                raise UsageError(f"shape {text!r}: {digits} is too large for a dimension")
    return given


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
output_option = functools.partial(click.option, "-o", "--output", type=PATH)

# What is asked of the compiler: fields of `Request`.

model_argument = click.argument("model", type=PATH)
platform_option = click.option(
    "--platform", metavar="P", help="The cluster: a TOML file or a built-in one (rpi4x4, …)."
)
shape_option = click.option(
    "--shape",
    metavar="NAME=DIMS",
    multiple=True,
    callback=_check_shapes,
    help="Fixes a dynamic input: input=1x3x224x224. Can be repeated.",
)
state_option = click.option(
    "--state",
    metavar="'past*=present*'",
    multiple=True,
    default=("auto",),
    help="Inputs and outputs that devices keep from frame to frame, so that they never travel; auto: those of the "
    "usual names, none: none. Can be repeated. Default: auto.",
)
shape_options = combine(shape_option, state_option)
strategy_option = click.option(
    "--strategy", metavar="'NAME{…}'", help="Who decides: see 'dicompiler list strategies'. Default: auto."
)
objective_option = click.option(
    "--objective",
    metavar="NAME",
    callback=_check_objective,
    help="What the strategy makes small: latency, throughput, energy, memory, communication, or a sum such as "
    "latency+0.5*energy (seconds, joules, bytes). Default: latency.",
)
tolerate_failures_option = click.option(
    "--survive",
    metavar="N|hosts|NAMES",
    help="Plans for when devices are lost: any N of them at most, all of a host together (hosts), or each of these "
    "(pi02,pi03). Default: 0.",
)
cost_option = click.option(
    "--cost", metavar="'NAME{…}'", help="What pieces cost: see 'dicompiler list cost-models'. Default: analytic."
)
wire_option = click.option(
    "--wire",
    metavar="TYPE",
    help="What travels between devices is narrowed to float16, bfloat16 or int8; 'float16,conv1=float32': not what "
    "layer conv1 sends. Default: the plan's, else as it is.",
)
wire_options = combine(
    wire_option,
    click.option("--samples", metavar="X.npz", type=PATH, help="Samples of the inputs: the ranges of --wire int8."),
)
executor_option = click.option(
    "--executor",
    metavar="WHO",
    callback=_check_executor,
    help="Who evaluates the plans of a search: processes=N, dask=HOST:PORT (a scheduler of Dask), or mpi (the ranks of "
    "mpi4py.futures). The result is the same. Default: this process.",
)
plan_option = functools.partial(click.option, "--plan", metavar="PLAN.json", type=PATH)
problem_options = combine(model_argument, platform_option)
target_option = functools.partial(click.option, "--target", metavar="'NAME{…}'")
cost_options = combine(
    cost_option,
    target_option(help="What is to run it: what messages and calls cost. Default: sockets."),
    shape_options,
    json_option,
)


@dataclass(frozen=True)
class CompileRequest:
    """What a command line asks of the compiler; None, or (): not given, or no option of the command."""

    model: Path
    platform: str | None = None
    strategy: str | None = None
    plan: Path | None = None
    objective: str | None = None
    cost: str | None = None
    shape: tuple[str, ...] = ()
    state: tuple[str, ...] = ("auto",)
    wire_dtype: str | None = None
    wire_samples: Path | None = None
    target: str | None = None
    tolerate_failures: str | None = None

    def compile(self, **more: Any) -> CompileResult:
        """What `dicompiler.compile` makes of it; `more`: arguments beside these, or in their place."""
        from dicompiler.cli.file_io import read_plan
        from dicompiler.driver.compiler import compile

        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "model"}
        given |= {"plan": None if self.plan is None else read_plan(self.plan), **more}
        return compile(self.model, **{name: value for name, value in given.items() if value is not None})


# How what was compiled is run: fields of `Stream` and of target.RunOptions.

directory_argument = click.argument("directory", metavar="DIR", type=PATH)
inputs_option = click.option(
    "--inputs",
    metavar="X.npz",
    type=PATH,
    help="One array for each graph input (or lists of numbers and words in X.json); without it seeded random ones.",
)
frames_option = functools.partial(click.option, "--frames", metavar="N", type=click.IntRange(1, MAX_FRAMES), default=1)
in_flight_option = click.option(
    "--in-flight",
    metavar="N",
    type=click.IntRange(min=1, max=1024),
    callback=lambda _context, _option, given: given or 0,
    help="Frames that are on their way at once. Default: three for each device.",
)
stream_options = combine(
    inputs_option,
    click.option("--outputs", metavar="Y.npz", type=PATH, help="Where to write the outputs of the first frame."),
    frames_option(help="How many times. Default: 1."),
    in_flight_option,
)
keys_option = click.option(
    "--keys", metavar="KEYS", type=PATH, help="What 'dicompiler keys' made: connections are in TLS."
)
insecure_option = click.option("--insecure", is_flag=True, help="Allow connections in the clear to other hosts.")
heartbeat_option = click.option(
    "--heartbeat", "heartbeat_s", metavar="S", type=float, help="Seconds between signs of life. Default: 2."
)
start_without_option = click.option(
    "--without",
    metavar="DEVICE",
    multiple=True,
    help="A device that is away when the run begins, by a plan for its loss. It is not started, and may come. Can be "
    "repeated.",
)
timeout_option = functools.partial(click.option, "--timeout", "timeout_s", metavar="S", type=SecondsRange())
listen_option = functools.partial(click.option, "--listen", metavar="HOST:PORT")
log_option = click.option(
    "--log",
    metavar="RUN.json",
    type=PATH,
    help="Where to write what the devices measured and what was predicted, for 'report' and 'calibrate'.",
)


@dataclass(frozen=True)
class StreamOptions:
    """Which frames are run, and where what comes of them is written."""

    frames: int = 1
    inputs: Path | None = None
    outputs: Path | None = None
    log: Path | None = None

    def check_paths(self) -> None:
        """DicompilerError where a file cannot be written."""
        check_output_file(self.outputs)
        check_output_file(self.log)

    def run(self, directory: Path, given: dict[str, NDArray[Any]] | None, options: RunOptions) -> RunResult:
        """Runs the artifact; the outputs of the first frame are kept."""
        from dicompiler.cli.progress import progress
        from dicompiler.driver.artifact import run

        with progress(f"{directory}: running {self.frames} frame{'' if self.frames == 1 else 's'}"):
            return run(directory, given, self.frames, options=replace(options, kept_frames=1))

    def predict(self, directory: Path, cost: str | None, options: RunOptions) -> ExpectedTiming | None:
        """What is predicted of the run; None without a log, and with a warning where the cost model that it was
        compiled with needs options and none is given."""
        import logging

        from dicompiler.analysis.prediction_error import expect_timing
        from dicompiler.driver.run_log import frames_in_flight
        from dicompiler.target.integrity import load_artifact

        if self.log is None:
            return None
        in_flight = frames_in_flight(options.in_flight, len(load_artifact(directory)["devices"]), self.frames)
        try:
            return expect_timing(directory, cost or "", self.frames, in_flight)
        except UsageError as error:
            if cost:
                raise
            logging.getLogger("dicompiler").warning("nothing is predicted: %s", error)
            return None

    def write_log(
        self, directory: Path, result: RunResult, options: RunOptions, expected: ExpectedTiming | None
    ) -> dict[str, Any]:
        """The log of the run, written where one is wanted."""
        from dicompiler.cli.file_io import write_json
        from dicompiler.driver.run_log import run_document

        log = run_document(directory, result, options, self.log, None if expected is None else expected.document())
        if self.log is not None:
            write_json(self.log, log)
        return log


def warn_of_expiry(keys: Path | None) -> None:
    """Warns of certificates in a directory of keys that expire soon."""
    import logging

    from dicompiler.target.remote.certificates import describe_expiring_certificates

    if keys is not None and (line := describe_expiring_certificates(keys)):
        logging.getLogger("dicompiler").warning(line)


def check_output_file(path: Path | None) -> None:
    """DicompilerError where no file can be written at `path`: as `check_parent`, where a directory is there, and where
    the file there is one that the command reads, but for the model of `opt`, or one of an artifact."""
    check_writable(path)
    if path is None or not path.exists():
        return
    if path.is_dir():
        raise DicompilerError(f"{path}: it is a directory: give the name of a file")
    context = click.get_current_context(silent=True)
    if context is not None and context.info_name != "opt":
        given = [one for value in context.params.values() for one in (value if isinstance(value, tuple) else (value,))]
        others = [Path(one) for one in given if isinstance(one, str | Path) and one is not path]
        if any(other.is_file() and path.samefile(other) for other in others):
            raise DicompilerError(f"{path}: the command was given it for something else too: give another name")
    for directory in list(path.absolute().parents)[:2]:
        if (directory / "artifact.json").is_file():
            raise DicompilerError(f"{path}: it is a file of the artifact {directory}: give another name")
