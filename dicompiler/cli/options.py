"""Arguments and options that several commands share, with the same names, help texts and checks."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dicompiler.base.atomic_output import check_writable, is_special_file
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.base.objectives import objective_terms
from dicompiler.base.termination import TerminationError
from dicompiler.cli.completion import complete_names, complete_platform

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.analysis.prediction_error import ExpectedTiming
    from dicompiler.cost.speed_changes import SpeedChange
    from dicompiler.driver.compile_options import CompileOptions
    from dicompiler.driver.compile_result import CompileResult
    from dicompiler.target.run_records import RunOptions, RunResult

F = TypeVar("F", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)
STREAM = Path("-")
"""Path that means stdin or stdout."""
MAX_FRAMES = 10_000_000


def combine(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return one decorator that adds several options to a command, in the order of `--help`."""

    def decorate(command: F) -> F:
        return functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)

    return decorate


def options_as(**records: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that passes option values to a command as dataclasses. Put it below the options.

    Each dataclass collects the options that have the names of its fields. An option that is not given has the field's
    default.

    Args:
        **records: The dataclass for each argument of the command.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def call(**values_by_name: Any) -> None:
            for name, record in records.items():
                fields_of_record = {
                    field.name: values_by_name.pop(field.name)
                    for field in fields(record)
                    if field.name in values_by_name
                }
                values_by_name[name] = record(
                    **{key: value for key, value in fields_of_record.items() if value is not None}
                )
            command(**values_by_name)

        return call

    return decorate


class SecondsRange(click.FloatRange):
    """An option type for durations from 0.1 s to four months, the range that timers support."""

    def __init__(self) -> None:
        super().__init__(0.1, 1e7)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):  # click's range accepts NaN.
            self.fail(f"{value!r} is not a time", param, ctx)
        return seconds


def _check_objective(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """Raise UsageError if the value of `--objective` is invalid, before the command does any work."""
    if value is not None:
        objective_terms(value)
    return value


def _check_executor(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """Raise UsageError if the value of `--executor` is invalid, before the command does any work."""
    if value is not None:
        from dicompiler.driver.executors import parse_executor

        parse_executor(value)
    return value


def _check_shapes(_: click.Context, __: click.Parameter, shapes: tuple[str, ...]) -> tuple[str, ...]:
    """Raise UsageError if a dimension in `--shape` is too large. Shape inference finds all other errors."""
    for text in shapes:
        for digits in re.findall(r"[0-9]+", text.rpartition("=")[2]):
            if len(digits) > 18:
                raise UsageError(f"shape {text!r}: {digits} is too large for a dimension")
    return shapes


def is_given(name: str) -> bool:
    """Return True if the command line of the running command has the option with this parameter name."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def refuse_options(condition: str, *names: str) -> None:
    """Raise UsageError if the user gave one of the options `names`, which would have no effect.

    Args:
        condition: The reason, as in the message: "--stop runs nothing".
        *names: Parameter names of the running command, such as "in_flight".
    """
    context = click.get_current_context()
    given = [param.opts[-1] for param in context.command.params if param.name in names and is_given(param.name)]
    if given:
        texts = given if len(given) < 2 else [", ".join(given[:-1]), given[-1]]
        raise UsageError(f"{context.info_name}: {condition}: remove {' and '.join(texts)}")


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
output_option = functools.partial(click.option, "-o", "--output", type=PATH)

# Options of a compilation: fields of `CompileOptions`.

model_argument = click.argument("model", type=PATH)
platform_option = click.option(
    "--platform",
    metavar="P",
    shell_complete=complete_platform,
    help="Describe the cluster: a TOML file, or a built-in name such as rpi4x4.",
)
shape_option = click.option(
    "--shape",
    metavar="NAME=DIMS",
    multiple=True,
    callback=_check_shapes,
    help="Set the shape of a dynamic input, such as input=1x3x224x224. Can be repeated.",
)
state_option = click.option(
    "--state",
    metavar="'past*=present*'",
    multiple=True,
    help="Keep these inputs and outputs on the devices from frame to frame, such as a key/value cache. auto: find them "
    "by common names; none: keep none. Can be repeated. Default: auto.",
)
shape_options = combine(shape_option, state_option)
strategy_option = click.option(
    "--strategy",
    metavar="'NAME{…}'",
    shell_complete=complete_names("strategies"),
    help="Use this strategy to make the plan (see 'dicompiler list strategies'). Default: auto.",
)
objective_option = click.option(
    "--objective",
    metavar="NAME",
    callback=_check_objective,
    help="Minimize this: latency, throughput, energy, memory, communication, or a sum such as latency+0.5*energy (in "
    "seconds, joules, bytes). Default: latency.",
)
complete_search_option = click.option(
    "--require-complete-search",
    is_flag=True,
    help="Fail if the budget or Ctrl-C ends the search, because another run may then give another plan.",
)
allow_worse_option = click.option(
    "--allow-worse", is_flag=True, help="Do not warn if the plan is worse than one device."
)
tolerate_failures_option = click.option(
    "--tolerate-failures",
    metavar="N|hosts|NAMES",
    help="Make failure plans: for any N devices, for all devices of a host (hosts), or for each of these devices "
    "(pi02,pi03). Default: 0.",
)
cost_option = click.option(
    "--cost",
    metavar="'NAME{…}'",
    shell_complete=complete_names("cost_models"),
    help="Use this cost model (see 'dicompiler list cost-models'). Default: analytic.",
)
engine_options = combine(
    click.option(
        "--engine",
        metavar="NAME",
        shell_complete=complete_names("engines"),
        help="Compute with this engine: onnxruntime, ncnn, mnn (see 'dicompiler list engines'), or auto (the fastest "
        "engine of each device). Default: the engines in the plan or the platform, otherwise onnxruntime.",
    ),
    click.option(
        "--precision",
        metavar="fp32|fp16|bf16",
        help="Let engines such as ncnn store values in this type. Default: the precisions in the plan or the platform, "
        "otherwise fp32.",
    ),
)
wire_dtype_option = click.option(
    "--wire-dtype",
    metavar="TYPE",
    help="Convert tensors to float16, bfloat16, int8 or int8-block before they are sent; 'float16,conv1=float32' "
    "excludes the output of layer conv1. Default: the plan's types, or no conversion.",
)
wire_options = combine(
    wire_dtype_option,
    click.option(
        "--wire-samples",
        metavar="X.npz",
        type=PATH,
        help="Measure the value ranges for --wire-dtype int8 with these samples of the inputs.",
    ),
)
executor_option = click.option(
    "--executor",
    metavar="KIND",
    callback=_check_executor,
    help="Evaluate the plans of a search in parallel: processes=N, dask=HOST:PORT (a Dask scheduler), or mpi (the "
    "ranks of mpi4py.futures). The result is the same. Default: this process.",
)
plan_option = functools.partial(click.option, "--plan", metavar="PLAN.json", type=PATH)
problem_options = combine(model_argument, platform_option)
target_option = functools.partial(
    click.option, "--target", metavar="'NAME{…}'", shell_complete=complete_names("targets")
)
cost_options = combine(
    cost_option,
    engine_options,
    target_option(help="Predict with the costs of messages and calls of this target. Default: sockets."),
    shape_options,
    json_option,
)


@dataclass(frozen=True)
class CompileRequest:
    """A model, and the options of its compilation from the command line.

    Attributes:
        model: Path of the model.
        options: The options, with defaults for those that were not given.
    """

    model: Path
    options: CompileOptions

    def compile(self, **changes: Any) -> CompileResult:
        """Compile the model. Without `output`, no file is written.

        Args:
            **changes: Fields of `options` to replace.
        """
        from dicompiler.driver.compiler import compile_with_options

        return compile_with_options(self.model, replace(self.options, **changes))


def make_plugins(**specs: object) -> dict[str, Any]:
    """Create plugins from their texts, such as strategy="dp{budget=5}".

    Args:
        **specs: Texts (or plugins) by the keys "strategy", "cost" and "target". None is ignored.

    Raises:
        UsageError: A name is unknown.
    """
    from dicompiler.plugin.registry import registry

    kinds = {"strategy": "strategies", "cost": "cost_models", "target": "targets"}
    return {name: registry().resolve(kinds[name], spec) for name, spec in specs.items() if spec is not None}


def takes_compile_request(command: Callable[..., None]) -> Callable[..., None]:
    """Pass the model and the compilation options to `command` as one argument `request`.

    Put the decorator below the options. It collects the options that are fields of `CompileOptions`.
    """

    @functools.wraps(command)
    def call(**values_by_name: Any) -> None:
        from dicompiler.driver.compile_options import CompileOptions

        # --output and --executor stay arguments: their values have other types than the fields of the same names.
        names = ({field.name for field in fields(CompileOptions)} - {"output", "executor"}) & values_by_name.keys()
        values = {name: values_by_name.pop(name) for name in names}
        options = CompileOptions(**{name: value for name, value in values.items() if value not in (None, ())})
        model = values_by_name.pop("model")
        name = click.get_current_context().info_name
        if model == STREAM and name != "opt":
            raise UsageError(f"{name}: only 'opt' reads a model from stdin ('-'): name a file")
        command(request=CompileRequest(model, options), **values_by_name)

    return call


# Options of a run: fields of `StreamOptions` and `RunOptions`.

directory_argument = click.argument("directory", metavar="DIR", type=PATH)
inputs_option = click.option(
    "--inputs",
    metavar="X.npz",
    type=PATH,
    help="Read an array for each graph input from X.npz, or lists of numbers and strings from X.json. Default: seeded "
    "random inputs.",
)
frames_option = functools.partial(click.option, "--frames", metavar="N", type=click.IntRange(1, MAX_FRAMES), default=1)
in_flight_option = click.option(
    "--in-flight",
    metavar="N",
    type=click.IntRange(min=1, max=1024),
    callback=lambda _context, _option, count: count or 0,
    help="Allow N frames in flight. Default: three per device.",
)
stream_options = combine(
    inputs_option,
    click.option(
        "--outputs",
        metavar="Y.npz",
        type=PATH,
        help="Write the outputs of the first frame to this npz file. Its name must end in .npz.",
    ),
    frames_option(help="Run N frames. Default: 1."),
    in_flight_option,
    click.option(
        "--adapt",
        is_flag=True,
        help="Search for another plan and swap to it if boards or links become slower or faster.",
    ),
    click.option(
        "--follow",
        is_flag=True,
        help="DIR is a symbolic link to an artifact. When it points to another one, swap to that without stopping.",
    ),
    click.option(
        "--metrics",
        metavar="HOST:PORT",
        default="",
        help="Serve metrics for Prometheus at this address during the run (target sockets). If other hosts can reach "
        "the address, --keys is needed, and clients need a certificate of the cluster.",
    ),
)
keys_option = click.option("--keys", metavar="KEYS", type=PATH, help="Use TLS with these keys (see 'dicompiler keys').")
insecure_option = click.option(
    "--insecure", is_flag=True, help="Allow unencrypted connections to other hosts, on trusted networks only."
)
heartbeat_option = click.option(
    "--heartbeat",
    "heartbeat_s",
    metavar="S",
    type=float,
    help="Send a heartbeat every S seconds. A device that is silent for three times S has failed. Default: 0.5 with "
    "failure plans (target sockets), otherwise 2.",
)
start_without_option = click.option(
    "--start-without",
    metavar="DEVICE",
    multiple=True,
    help="Start with the failure plan for this device. The device is not started, but may join later. Can be repeated.",
)
timeout_option = functools.partial(click.option, "--timeout", "timeout_s", metavar="S", type=SecondsRange())
listen_option = functools.partial(click.option, "--listen", metavar="HOST:PORT")
log_option = click.option(
    "--log",
    metavar="RUN.json",
    type=PATH,
    help="Write measurements and predictions to this file, for 'dicompiler report' and 'dicompiler calibrate'.",
)


def _parse_changes(_context: click.Context, _option: click.Parameter, texts: Sequence[str]) -> list[SpeedChange]:
    from dicompiler.cost.speed_changes import SpeedChange

    return [SpeedChange.parse(text) for text in texts]


SLOW_HELP = (
    "Give a board SPEED times its speed from START on, until END, such as pi03=0.4@20s-60s. link:pi03=0.3@20s changes "
    "the bandwidth of a host's network link, and link:* that of all links. "
)
slow_option = functools.partial(
    click.option, "--slow", "changes", metavar="NAME=SPEED@START[-END]", multiple=True, callback=_parse_changes
)


@dataclass(frozen=True)
class StreamOptions:
    """Options of a stream of frames.

    Attributes:
        frames: Number of frames.
        inputs: File with the inputs; None for random inputs.
        outputs: File for the first frame's outputs; None to write nothing.
        log: File for measurements and predictions; None to write nothing.
        adapt: Whether to search for another plan if boards or links change their speed.
        follow: Whether the artifact is given as a symbolic link, which may change during the run.
        metrics: Address at which metrics are served; empty for none.
    """

    frames: int = 1
    inputs: Path | None = None
    outputs: Path | None = None
    log: Path | None = None
    adapt: bool = False
    follow: bool = False
    metrics: str = ""

    def check_paths(self) -> None:
        """Raise DicompilerError if the file of --outputs or --log cannot be written, or UsageError for a wrong name."""
        check_output_file(self.outputs)
        check_output_file(self.log)
        if self.outputs is not None and self.outputs.suffix.lower() != ".npz" and not is_special_file(self.outputs):
            remedy = f"give a name that ends in .npz, such as {self.outputs.with_suffix('.npz')}"
            raise UsageError(f"{self.outputs}: outputs are written as npz: {remedy}")

    def resolve_link(self, directory: Path) -> tuple[Path, Path | None]:
        """Return the artifact, and with --follow the symbolic link to it.

        All steps of a command must use this artifact, because the link may change meanwhile.
        """
        if not self.follow:
            return directory, None
        from dicompiler.driver.swap import resolve_link

        return resolve_link(directory, follow=True)

    def run(
        self, directory: Path, inputs: dict[str, NDArray[Any]] | None, options: RunOptions, link: Path | None = None
    ) -> tuple[Path, RunResult]:
        """Run the artifact with the same inputs for all frames, and keep only the outputs of `options.kept_frames`.

        By default, only the first frame's outputs are kept. With --adapt or a symbolic link to follow, another artifact
        may replace the running one (a swap).

        Returns:
            The directory of the artifact that was used last, and the result of its frames.
        """
        from dicompiler.cli.progress import progress
        from dicompiler.driver.artifact import run

        with (
            self._serve_metrics(directory, options) as options,
            self._log_if_unfinished(directory, options) as options,
            progress(f"{directory}: running {self.frames} frame{'' if self.frames == 1 else 's'}"),
        ):
            if self.adapt or link is not None:
                from dicompiler.measure.adapt import AdaptOptions, run_with_swaps

                adapt = AdaptOptions() if self.adapt else None
                return run_with_swaps(directory, inputs, self.frames, options, adapt, link)
            options = replace(options, kept_frames=options.kept_frames or 1)
            return directory, run(directory, inputs, self.frames, options=options)

    @contextlib.contextmanager
    def _log_if_unfinished(self, directory: Path, options: RunOptions) -> Iterator[RunOptions]:
        """Write the log of the finished frames if the `with` block ends by an error or signal.

        Yield `options`, extended so that the run records its frames. Without --log, yield them unchanged.
        """
        if self.log is None:
            yield options
            return
        import logging

        from dicompiler.cli.file_io import write_json
        from dicompiler.cli.interrupts import INTERRUPTED_MESSAGE, TERMINATED_MESSAGE
        from dicompiler.driver.run_log import FrameRecorder, run_document
        from dicompiler.target.manifest import load_artifact

        recorder = FrameRecorder()
        try:
            yield recorder.observe(options)
        except (DicompilerError, KeyboardInterrupt, TerminationError) as error:
            if recorder.frames_s:
                result = recorder.make_result(load_artifact(directory)["devices"])
                cause = TERMINATED_MESSAGE if isinstance(error, TerminationError) else str(error) or INTERRUPTED_MESSAGE
                write_json(self.log, run_document(directory, result, options, self.log, unfinished=cause))
                count = len(recorder.frames_s)
                logging.getLogger("dicompiler").warning("%s: the log has the %d finished frames", self.log, count)
            elif not isinstance(error, DicompilerError):
                cause = f"target {load_artifact(directory)['target']!r} has reported no finished frame"
                logging.getLogger("dicompiler").warning("%s: no log is written: %s", self.log, cause)
            raise

    @contextlib.contextmanager
    def _serve_metrics(self, directory: Path, options: RunOptions) -> Iterator[RunOptions]:
        """Serve Prometheus metrics until the `with` block ends, if --metrics was given.

        Yield `options`, extended so that the run sends its measurements to the metrics server.
        """
        if not self.metrics:
            yield options
            return
        from dicompiler.driver.metrics_server import MetricsServer
        from dicompiler.target.manifest import load_artifact

        if (target := load_artifact(directory)["target"]) != "sockets":
            raise UsageError(f"run: target {target!r} reports no times of frames: omit --metrics")
        with MetricsServer(self.metrics, options.insecure, options.keys) as metrics:
            click.echo(f"metrics: {metrics.url}", err=True)
            yield replace(options, on_frame=metrics.record_frame, on_event=metrics.record_event)

    def predict(self, directory: Path, cost: str | None, options: RunOptions) -> ExpectedTiming | None:
        """Return the predicted times of the run; None without --log.

        If the artifact's cost model needs options and `cost` is None, log a warning and return None.
        """
        import logging

        from dicompiler.analysis.prediction_error import expect_timing
        from dicompiler.driver.run_log import frames_in_flight
        from dicompiler.target.manifest import load_artifact

        if self.log is None:
            return None
        in_flight = frames_in_flight(options.in_flight, len(load_artifact(directory)["devices"]), self.frames)
        try:
            return expect_timing(directory, cost or "", self.frames, in_flight)
        except UsageError as error:
            if cost:
                raise
            logging.getLogger("dicompiler").warning("no prediction: %s", error)
            return None

    def write_log(
        self, directory: Path, result: RunResult, options: RunOptions, expected: ExpectedTiming | None
    ) -> dict[str, Any]:
        """Return the log of the run. With --log, also write it to the file."""
        from dicompiler.cli.file_io import write_json
        from dicompiler.driver.run_log import run_document

        log = run_document(directory, result, options, self.log, None if expected is None else expected.document())
        if self.log is not None:
            write_json(self.log, log)
        return log


def warn_of_expiry(keys: Path | None) -> None:
    """Log a warning if a TLS certificate in the directory `keys` expires soon."""
    if keys is None:
        return
    import logging

    from dicompiler.target.remote.certificates import describe_expiring_certificates

    if line := describe_expiring_certificates(keys):
        logging.getLogger("dicompiler").warning(line)


def check_output_file(path: Path | None) -> None:
    """Raise DicompilerError if the command must not or cannot write the file `path`.

    The path must not be a directory, a file of an artifact, or a file that another option names (except in `opt`).
    """
    context = click.get_current_context(silent=True)
    if path == STREAM and context is not None:
        raise UsageError(f"{context.info_name}: '-' is not the name of an output: name a file, or /dev/stdout")
    check_writable(path)
    if path is None:
        return
    if path.is_dir():
        raise DicompilerError(f"{path}: it is a directory: give the name of a file")
    if context is not None and context.info_name != "opt":
        refuse_overwriting(path, _paths_of_parameters(context, path))
    if not path.exists():
        return
    for directory in list(path.absolute().parents)[:2]:
        if (directory / "artifact.json").is_file():
            raise DicompilerError(f"{path}: is a file of the artifact {directory}: give another name")


def _paths_of_parameters(context: click.Context, output: Path) -> Iterator[Path]:
    """Yield the paths that the command line gives, except the object `output`, and texts that name existing files."""
    for value in context.params.values():
        for item in value if isinstance(value, tuple) else (value,):
            if item is not output and (isinstance(item, Path) or (isinstance(item, str) and Path(item).is_file())):
                yield Path(item)


def refuse_overwriting(output: Path, others: Iterable[Path]) -> None:
    """Raise UsageError if an output is one of the files that the command reads, or that it writes as another output.

    Args:
        output: The output, which may not exist yet. A device or pipe, such as /dev/null, is never refused.
        others: The other files, which may not exist either.
    """
    if is_special_file(output):
        return
    for other in others:
        is_same_file = output.exists() and other.is_file() and output.samefile(other)
        if is_same_file or output.absolute() == other.absolute():
            raise UsageError(f"{output}: the command also reads or writes this file: give the output another name")
