"""Environment variables with which CMake uses ccache, because tests build the same programs in many directories."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

LOCK = Path(tempfile.gettempdir(), f"dicompiler-tests-{os.getuid()}.compiling")

CACHED = (
    {
        # One compiler runs at a time. Simultaneous builds would otherwise all compile a source that is not cached yet.
        "CMAKE_CXX_COMPILER_LAUNCHER": f"flock;{LOCK};ccache",
        # ccache makes paths below this directory relative. Builds in different test directories thus share its entries.
        "CCACHE_BASEDIR": tempfile.gettempdir(),
        "CCACHE_NOHASHDIR": "1",
        "CCACHE_DIR": str(Path.home() / ".cache" / "ccache"),
    }
    if shutil.which("ccache") and shutil.which("flock")
    else {}
)
"""Additional environment variables; empty if ccache or flock is not installed."""
