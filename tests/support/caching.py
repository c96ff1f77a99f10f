"""Environment variables with which CMake uses ccache, because tests build the same programs in many directories."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

CACHED = (
    {
        "CMAKE_CXX_COMPILER_LAUNCHER": "ccache",
        # ccache makes paths below this directory relative. Builds in different test directories thus share its entries.
        "CCACHE_BASEDIR": tempfile.gettempdir(),
        "CCACHE_NOHASHDIR": "1",
        "CCACHE_DIR": str(Path.home() / ".cache" / "ccache"),
    }
    if shutil.which("ccache")
    else {}
)
"""Additional environment variables; empty if ccache is not installed."""
