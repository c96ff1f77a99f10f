"""Detection of files that a target writes outside of its directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from dicompiler.testing.assertions import require

_WRITTEN_PATHS: ContextVar[set[Path] | None] = ContextVar("written_paths", default=None)
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TARGET_ARGUMENT = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1}
"""Index of the argument that names the written path, by audit event."""


@contextmanager
def writes_inside(directory: Path, function: str) -> Iterator[None]:
    """Require that Python code in the block leaves no new or changed files outside of a directory.

    These files are allowed: files that are deleted within the block, device files (below /dev), and compiled Python
    files (in `__pycache__`).

    Args:
        directory: The directory.
        function: Name of the function that writes, for the message.
    """
    _add_audit_hook()
    paths: set[Path] = set()
    token = _WRITTEN_PATHS.set(paths)
    try:
        yield
    finally:
        _WRITTEN_PATHS.reset(token)
    root = Path(os.path.realpath(directory))
    outside = sorted(path for path in paths if root not in (path, *path.parents) and path.exists())
    message = f"{function} writes outside of its directory: {', '.join(map(str, outside[:3]))}: write below {directory}"
    require(not outside, message)


@cache
def _add_audit_hook() -> None:
    """Record written paths in _WRITTEN_PATHS from now on. Audit hooks cannot be removed."""
    sys.addaudithook(_record_write)


def _record_write(event: str, arguments: tuple[Any, ...]) -> None:
    paths = _WRITTEN_PATHS.get()
    if paths is None:
        return
    path: Any = None
    if event == "open":
        opened, mode, flags = arguments
        is_write = bool(set(mode) & set("wax+")) if isinstance(mode, str) else bool((flags or 0) & _WRITE_FLAGS)
        path = opened if is_write else None
    elif event in _TARGET_ARGUMENT:
        path = arguments[_TARGET_ARGUMENT[event]]
    if isinstance(path, str | bytes | os.PathLike):
        written = Path(os.path.realpath(os.fsdecode(path)))
        if written.parts[:2] != ("/", "dev") and "__pycache__" not in written.parts:
            paths.add(written)
