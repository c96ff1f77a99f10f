"""Progress of long work: one line on a terminal, nothing elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dicompiler.cli.diagnostics import is_quiet

ProgressText = Callable[[str], None]


@contextmanager
def progress(first: str) -> Iterator[ProgressText]:
    """Yield a function that shows a text as the current step. Until it is called, `first` is shown.

    The line also shows messages that the library logs at level INFO. Warnings are printed above the line.
    """
    # Show nothing in a notebook, because its terminal cannot overwrite lines.
    if is_quiet() or not sys.stderr.isatty() or "JPY_PARENT_PID" in os.environ:
        yield lambda text: None  # noqa: ARG005
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from dicompiler.base.process import forward_progress

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    # By default, rich would redirect the command's stdout to the console of the progress line, which is stderr.
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(first, total=None)

        def tell(text: str) -> None:
            room = bar.console.width - 12  # The spinner and the elapsed time need 12 characters.
            bar.update(task, description=text if len(text) <= room else text[: room - 1] + "…", refresh=True)

        with forward_progress(tell):
            yield tell
