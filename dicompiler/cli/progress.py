"""Progress of long work: one line of a terminal on stderr that disappears in the end; elsewhere nothing at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ProgressText = Callable[[str], None]


@contextmanager
def progress(first: str) -> Iterator[ProgressText]:
    """Gives whom to tell what is being done; `first` is shown until then. What the library logs as information is
    shown too; its warnings stand above the line."""
    # A cell of a notebook that starts a command gives it a terminal that shows no line over another.
    if not sys.stderr.isatty() or "JPY_PARENT_PID" in os.environ:
        yield lambda text: None  # noqa: ARG005
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from dicompiler.driver.progress import forward_progress

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    # What is printed on stdout stays there: rich would move it to stderr.
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(first, total=None)

        def tell(text: str) -> None:
            room = bar.console.width - 12  # beside the other columns
            bar.update(task, description=text if len(text) <= room else text[: room - 1] + "…", refresh=True)

        with forward_progress(tell):
            yield tell
