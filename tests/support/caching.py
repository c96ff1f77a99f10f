"""What lets CMake take from a cache what was compiled from the same sources before: tests build the same programs again
and again, in other directories."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

CACHED = (
    {
        "CMAKE_CXX_COMPILER_LAUNCHER": "ccache",
        # Where tests build; paths to libraries stay as they are, whatever the depth of what is built.
        "CCACHE_BASEDIR": tempfile.gettempdir(),
        "CCACHE_NOHASHDIR": "1",
        "CCACHE_DIR": str(Path.home() / ".cache" / "ccache"),
    }
    if shutil.which("ccache")
    else {}
)
"""For the environment; empty where there is no ccache."""
