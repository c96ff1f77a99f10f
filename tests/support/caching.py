"""Environment variables with which CMake uses ccache, because tests build the same programs in many directories."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

# Directory of the lock files of compile_once.sh, so that two tests do not compile the same file at once.
LOCKS = Path(tempfile.gettempdir(), f"dicompiler-tests-{os.getuid()}.compiling")
COMPILE_ONCE = Path(__file__).with_name("compile_once.sh")

CCACHE_VARIABLES = (
    {
        "CMAKE_CXX_COMPILER_LAUNCHER": f"{COMPILE_ONCE};{LOCKS}",
        # ccache makes all paths relative. Builds in different directories thus share its entries.
        "CCACHE_BASEDIR": "/",
        "CCACHE_NOHASHDIR": "1",
        "CCACHE_DIR": str(Path.home() / ".cache" / "ccache"),
    }
    if shutil.which("ccache") and shutil.which("flock")
    else {}
)
"""Variables to add to the environment of CMake; empty if ccache or flock is not installed."""
