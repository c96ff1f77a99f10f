"""Directories that commands write: they appear whole or not at all. A path goes in, a directory to fill comes out."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dicompiler.errors import DicompilerError


def check_place(output: Path, mark: str, what: str) -> None:
    """An earlier output of the same kind, known by its file `mark`, is replaced; anything else that is there is refused
    (an empty directory is nothing). `what`: how errors call such an output ("artifact")."""
    if output.exists() and not (output / mark).is_file() and (not output.is_dir() or any(output.iterdir())):
        raise DicompilerError(f"{output}: it exists and is no {what} of ours: choose another place or remove it")
    if not output.absolute().parent.is_dir():
        raise DicompilerError(f"{output}: its parent is no directory: create it first")


@contextmanager
def moved_in_whole(output: Path, mark: str, what: str) -> Iterator[Path]:
    """A fresh directory beside `output` that takes its place in the end; see `check_place`."""
    check_place(output, mark, what)
    scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.absolute().parent))
    try:
        stage = scratch / "new"
        stage.mkdir()
        yield stage
        if output.exists():
            output.rename(scratch / "old")
        stage.rename(output)
    except OSError as error:
        raise DicompilerError(f"{output}: it cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
