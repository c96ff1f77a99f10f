"""Reports of artifacts and fronts as HTML pages: the function behind `dicompiler report`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dicompiler.analysis.compare import compare_strategies, parse_strategies
from dicompiler.analysis.explore import FRONT_FILE
from dicompiler.analysis.report.page import render_front, render_report
from dicompiler.analysis.report.report_data import load_front, load_report_data
from dicompiler.base.atomic_output import atomic_file
from dicompiler.base.errors import UsageError
from dicompiler.search.strategy import Strategy


def write_report(
    directory: str | Path,
    output: str | Path,
    *,
    run_log: str | Path | None = None,
    comparison: str | Path | Mapping[str, Any] | None = None,
    strategies: str | Sequence[str | Strategy] = (),
    front: str | Path | None = None,
    cost: str = "",
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Write a report of an artifact or Pareto front as one HTML page.

    Args:
        directory: The artifact, or a directory of `dicompiler explore`. The other arguments are for artifacts only.
        output: File to write the page to.
        run_log: Log of a run (`dicompiler run --log`), of which the measured times are shown.
        comparison: Comparison to show: a file, or the result of `Comparison.document`.
        strategies: Strategies to compare now, as `compare` does.
        front: Pareto front to show: a front.json, or its directory.
        cost: The cost model. Default: the one that the artifact was compiled with.
        progress: Function that is called with the name of each strategy before its search.

    Returns:
        The path of the page.

    Raises:
        DicompilerError: A file is missing or not valid, or belongs to another network or artifact.
        UsageError: The arguments exclude each other.
    """
    if comparison is not None and strategies:
        raise UsageError("report: comparison and strategies are both given: remove one of them")
    path = Path(directory)
    if (path / FRONT_FILE).is_file():
        if strategies or cost or any(value is not None for value in (run_log, comparison, front)):
            raise UsageError(f"report: {path} is a front: remove all arguments except the output")
        text = render_front(path.resolve().name, load_front(path))
    else:
        files = comparison if comparison is None or isinstance(comparison, Mapping) else Path(comparison)
        log_file, front_file = (None if file is None else Path(file) for file in (run_log, front))
        data = load_report_data(path, cost, log_file, files, front_file)
        if strategies:
            compared = compare_strategies(data.problem, parse_strategies(strategies), progress)
            data = replace(data, comparison=compared.document())
        text = render_report(data)
    with atomic_file(Path(output)) as stage:
        stage.write_text(text, encoding="utf-8")
    return Path(output)
