"""`dicompiler opt`: run a pipeline of passes on a model, and write the result."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.atomic_output import is_special_file
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.base.termination import signal_deferral
from dicompiler.cli.build_system_options import BuildSystemOptions, build_system_options, print_paths
from dicompiler.cli.completion import complete_name_list
from dicompiler.cli.options import (
    PATH,
    STREAM,
    CompileRequest,
    check_output_file,
    json_option,
    options_as,
    output_option,
    plan_option,
    problem_options,
    refuse_overwriting,
    shape_option,
    takes_compile_request,
    wire_options,
)
from dicompiler.cli.result_stream import get_result_stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dicompiler.driver.debug_instruments import LayerStatistics
    from dicompiler.ir.onnx.model import Model
    from dicompiler.ir.pipeline_state import PipelineState
    from dicompiler.plugin.pass_base import Instrument, Pass


@click.command("opt")
@click.option(
    "-p",
    "--pipeline",
    metavar="PIPELINE",
    required=True,
    shell_complete=complete_name_list("passes"),
    help="Run these passes: 'infer-shapes,form-layers,…'.",
)
@problem_options
@plan_option(metavar="IN.json", help="Start with this plan.")
@click.option(
    "--save-plan", metavar="OUT.json", type=PATH, help="Write the plan that the passes have set to this file."
)
@shape_option
@wire_options
@click.option(
    "--dump-after-all", metavar="DIR", type=PATH, help="Write the graph and the plan to DIR after every pass."
)
@click.option("--timing", is_flag=True, help="Print the time of each pass on stderr.")
@click.option("--print-after", is_flag=True, help="Print the graph on stderr after every pass. Long constants are cut.")
@click.option("--verify-each", is_flag=True, help="Run the model after every pass and compare its outputs.")
@click.option(
    "--statistics", is_flag=True, help="Print the parts, halos and redundant multiply-adds of each layer on stderr."
)
@click.option(
    "--reproducer", metavar="DIR", type=PATH, help="If a pass fails, write files to DIR that reproduce the failure."
)
@build_system_options
@json_option
@output_option(metavar="OUT.onnx", required=True, help="Write the model to this file.")
@takes_compile_request
@options_as(building=BuildSystemOptions)
def command(
    request: CompileRequest,
    building: BuildSystemOptions,
    pipeline: str,
    save_plan: Path | None,
    dump_after_all: Path | None,
    timing: bool,
    print_after: bool,
    verify_each: bool,
    statistics: bool,
    reproducer: Path | None,
    as_json: bool,
    output: Path,
) -> None:
    """Run passes on a model.

    PIPELINE is a list of passes: 'infer-shapes,form-layers,tile-height{layers=conv1..conv4 parts=4}'. The model is
    normalised first. If --plan or a pass has set a plan, the model is partitioned at the end. Without a platform,
    devices are named d0, d1, …. The path '-' stands for stdin (MODEL) and stdout (--output).

    Example: dicompiler opt model.onnx -p 'infer-shapes,form-layers,tile-height{parts=2}' -o tiled.onnx
    """
    from dicompiler.cli.table import print_json
    from dicompiler.driver.compile_options import format_shapes
    from dicompiler.driver.debug_instruments import PartitionStatistics, Reproducer, VerifyEach
    from dicompiler.driver.optimize import make_passes
    from dicompiler.ir.onnx.loader import external_files
    from dicompiler.plugin.instruments import DumpAfterPass, PassTiming, PrintAfterPass

    if STREAM in (request.model, output):
        _check_stream_options(building, as_json and output == STREAM)
    _check_output_paths(output, save_plan, (dump_after_all, reproducer))
    passes = make_passes(pipeline, format_shapes(request.options.shape))
    outputs = [path for path in (output, save_plan) if path is not None]
    rule = building.depfile_rule(outputs, request, passes)
    is_summary_shown = not (as_json or building.print_outputs or output == STREAM or is_special_file(output))
    size_before = ""
    if is_summary_shown and request.model != STREAM:
        # `opt` may overwrite its model, so its size is read before.
        size_before = _model_size([request.model, *external_files(request.model)])
    times, counts = PassTiming(), PartitionStatistics()
    instruments: list[Instrument] = [
        *([times] if timing else []),
        *([counts] if statistics else []),
        *([VerifyEach()] if verify_each else []),
        *([] if reproducer is None else [Reproducer(reproducer)]),
        *([] if dump_after_all is None else [DumpAfterPass(dump_after_all)]),
        *([PrintAfterPass()] if print_after else []),
    ]
    try:
        result = _run_passes(request, passes, instruments)
    finally:
        if timing:
            _show_times(times.rows)
    if statistics:
        _show_statistics(counts.rows)
    signal_deferral.is_commit_last = True
    written = _write_outputs(result, output, save_plan)
    rule.write()
    if as_json:
        shown = {"timing": _timing_records(times.rows) if timing else None}
        shown["statistics"] = [asdict(row) for row in counts.rows] if statistics else None
        places = {"model": str(output), "plan": None if save_plan is None else str(save_plan)}
        names = [str(path) for path in written]
        print_json({**places, "outputs": names, "passes": [str(step.spec) for step in passes], **shown})
    elif building.print_outputs:
        print_paths(written)
    elif is_summary_shown:
        _show_written(written, output, save_plan, size_before)


def _model_size(files: Sequence[Path]) -> str:
    """Return the total size of a model's files as text."""
    from dicompiler.base.units import format_bytes

    return format_bytes(sum(file.stat().st_size for file in files))


def _show_written(written: Sequence[Path], output: Path, save_plan: Path | None, size_before: str) -> None:
    """Print the names of the model and the plan, and the size of the model.

    Args:
        written: All written files. The model may have a second file with its weights.
        output: The model.
        save_plan: The plan; None if it was not written.
        size_before: Size of the model before the passes; empty if it is unknown.
    """
    size = _model_size([path for path in written if path != save_plan])
    before = f", before: {size_before}" if size_before else ""
    plan = "" if save_plan is None else f", {save_plan}"
    click.echo(f"written: {output} ({size}{before}){plan}")


def _run_passes(request: CompileRequest, passes: Sequence[Pass], instruments: Sequence[Instrument]) -> PipelineState:
    from dicompiler.cli.progress import progress
    from dicompiler.driver.optimize import opt

    options = request.options
    with progress(f"running passes over {request.model.name}"):
        return opt(
            _read_stdin() if request.model == STREAM else request.model,
            passes,
            platform=options.platform,
            plan=options.plan,
            wire_dtype=options.wire_dtype,
            wire_samples=options.wire_samples,
            instruments=instruments,
        )


def _read_stdin() -> bytes:
    """Return the ONNX model on stdin.

    Raises:
        UsageError: stdin is a terminal or empty.
    """
    cause = "a terminal"
    if not (sys.stdin is None or sys.stdin.isatty()):
        if model := sys.stdin.buffer.read():
            return model
        cause = "empty"
    raise UsageError(f"opt: the model '-' is read from stdin, which is {cause}: write a model to it, or name a file")


def _check_stream_options(building: BuildSystemOptions, is_json_on_stdout: bool) -> None:
    """Raise UsageError for options that cannot be combined with '-' as the model or output."""
    if is_json_on_stdout or building.print_outputs:
        raise UsageError("opt: --output - writes the model to stdout: remove --json and --print-outputs")
    if building.depfile is not None:
        raise UsageError("opt: --depfile needs the names of files: give a file instead of '-'")


def _check_output_paths(output: Path, plan: Path | None, directories: Sequence[Path | None]) -> None:
    if output != STREAM:
        check_output_file(output)
    check_output_file(plan)
    if plan is not None:
        refuse_overwriting(plan, [output])
    for directory in directories:
        if directory is not None and directory.exists() and not directory.is_dir():
            raise DicompilerError(f"{directory}: it is a file: give the name of a directory")


def _timing_records(rows: Sequence[tuple[str, float, bool]]) -> list[dict[str, Any]]:
    return [{"pass": text, "seconds": seconds} for text, seconds, _ in rows]


def _show_times(rows: Sequence[tuple[str, float, bool]]) -> None:
    from dicompiler.cli.table import print_table

    shown = [(text + (" (failed)" if failed else ""), f"{1000 * seconds:.1f}") for text, seconds, failed in rows]
    total = sum(seconds for _, seconds, _ in rows)
    print_table(("pass", "ms"), [*shown, ("total", f"{1000 * total:.1f}")], right=(1,), err=True)


def _show_statistics(rows: Sequence[LayerStatistics]) -> None:
    from dicompiler.cli.table import print_table

    headers = ("layer", "parts", "devices", "elements received", "multiplications", "redundant")
    counts = [(row.parts, row.devices, row.halo, row.macs, row.redundant_macs) for row in rows]
    total = ("total", *(str(sum(column)) for column in zip(*counts, strict=True))) if counts else ("total",)
    shown = [(row.layer, *map(str, count)) for row, count in zip(rows, counts, strict=True)]
    print_table(headers, [*shown, total], right=range(1, len(headers)), err=True)


def _write_outputs(state: PipelineState, output: Path, save_plan: Path | None) -> tuple[Path, ...]:
    """Write the model and the plan, or neither if one cannot be written. Return the written paths."""
    from dicompiler.base.atomic_output import atomic_file
    from dicompiler.ir.plan import plan_to_text

    if save_plan is None:
        return _write_model(state.model, output)
    if state.plan is None:
        raise UsageError("--save-plan: the pipeline has no pass that makes a plan")
    with atomic_file(save_plan) as stage:
        stage.write_text(plan_to_text(state.plan), encoding="utf-8")
        return (*_write_model(state.model, output), save_plan)


def _write_model(model: Model, output: Path) -> tuple[Path, ...]:
    if output != STREAM:
        return model.save(output)
    try:
        content = model.to_bytes()
    except DicompilerError as error:
        raise DicompilerError(f"opt: {error}: name a file instead of '-'") from error
    stream = get_result_stream()
    stream.buffer.write(content)
    stream.flush()
    return ()
