"""The directory for the programs that target `mpi` builds, and for the files that it fetches."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def get_cache_directory() -> Path:
    """Return the directory for built and fetched files: in XDG_CACHE_HOME or ~/.cache, else among temporary files."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = base / "dicompiler" / "mpi"
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK):
            return directory
    directory = Path(tempfile.gettempdir(), f"dicompiler-{os.getuid()}", "mpi")
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return directory
