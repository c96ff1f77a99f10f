"""Builds programs: an artifact's source goes in, an executable comes out. Built once, it is found by its content.

What is the same for all programs is compiled once for each set of tools; a program of its own is then one short source
file and a link.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dicompiler.plugin_api import DicompilerError
from dicompiler.plugin_api.artifacts import file_digest
from dicompiler_targets.mpi import toolchain as tools
from dicompiler_targets.mpi.toolchain import Toolchain

MAX_CACHED_PROGRAMS = 64
"""Executables that are kept for each set of tools; those used least recently go first."""
MAIN_SOURCE, EXECUTABLE = "main.cc", "program"


def build_program(package: Path, toolchain: Toolchain, sanitize: bool = False) -> Path:
    """The executable of a package's source. sanitize: with AddressSanitizer and UndefinedBehaviorSanitizer.

    DicompilerError where it cannot be compiled, with the compiler's first error; nothing half-built is left.
    """
    source = _read_sources(package)
    main = source.pop(MAIN_SOURCE)
    tree = tools.get_cache_directory() / _hash_contents(
        {**source, "tools": _describe_build(toolchain, sanitize).encode()}
    )
    programs, sums = tree / "programs", tree / "sums"
    for place in (programs, sums):
        place.mkdir(parents=True, exist_ok=True)
    program = programs / hashlib.sha256(main).hexdigest()[:32]
    with _exclusive_lock(tree / "lock"):
        if not _is_intact(program, sums / program.name):
            _compile(tree, source, main, toolchain, sanitize)
            with tempfile.TemporaryDirectory(dir=tree) as temporary:
                copy = Path(shutil.copy2(tree / "build" / EXECUTABLE, Path(temporary, EXECUTABLE)))
                (sums / program.name).write_text(file_digest(copy), encoding="ascii")
                os.replace(copy, program)
        os.utime(program)
        for old in sorted(programs.iterdir(), key=lambda path: path.stat().st_mtime)[:-MAX_CACHED_PROGRAMS]:
            old.unlink()
            (sums / old.name).unlink(missing_ok=True)
    return program


def _is_intact(program: Path, record: Path) -> bool:
    """Whether it is there as it was built: one that was damaged since is built again."""
    return program.is_file() and record.is_file() and record.read_text(encoding="ascii") == file_digest(program)


def _read_sources(package: Path) -> dict[str, bytes]:
    """The files of a package that are compiled, by path."""
    paths = [package / MAIN_SOURCE, package / "CMakeLists.txt", *sorted((package / "runtime").glob("*"))]
    try:
        return {str(path.relative_to(package)): path.read_bytes() for path in paths}
    except OSError as error:
        raise DicompilerError(f"{error.filename}: {error.strerror}: compile the network again") from None


def _describe_build(toolchain: Toolchain, sanitize: bool) -> str:
    """What a build depends on beside the source."""
    parts = []
    for path in (
        toolchain.mpicxx,
        toolchain.cmake,
        toolchain.compiler,
        toolchain.library,
        toolchain.include / tools.HEADER_FILE,
    ):
        status = path.stat()
        parts.append(f"{path} {path.resolve()} {status.st_size} {status.st_mtime_ns}")
    return "\n".join([*parts, f"sanitize {sanitize}"])


def _hash_contents(content: Mapping[str, bytes]) -> str:
    lines = [f"{name} {hashlib.sha256(data).hexdigest()}\n" for name, data in sorted(content.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


@contextlib.contextmanager
def _exclusive_lock(path: Path) -> Iterator[None]:
    """One process at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(tree: Path, source: Mapping[str, bytes], main: bytes, toolchain: Toolchain, sanitize: bool) -> None:
    place, binaries, log = tree / "source", tree / "build", tree / "log"
    for name, data in {**source, MAIN_SOURCE: main}.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_bytes() != data:
            path.write_bytes(data)
    if not (binaries / "configured").is_file():
        shutil.rmtree(binaries, ignore_errors=True)
        options = {
            "CMAKE_CXX_COMPILER": toolchain.compiler,
            "MPI_CXX_COMPILER": toolchain.mpicxx,
            "ONNXRUNTIME_INCLUDE_DIR": toolchain.include,
            "ONNXRUNTIME_LIBRARY": toolchain.library,
            "DICOMPILER_SANITIZE": "ON" if sanitize else "OFF",
        }
        line = [str(toolchain.cmake), "-G", "Unix Makefiles", "-S", str(place), "-B", str(binaries)]
        log.unlink(missing_ok=True)
        _run_command([*line, *(f"-D{name}={value}" for name, value in options.items())], log)
        (binaries / "configured").touch()
    _run_command([str(toolchain.cmake), "--build", str(binaries), "--parallel", str(len(os.sched_getaffinity(0)))], log)


def _run_command(line: Sequence[str], log: Path) -> None:
    """Runs a command to its end. What it says is added to `log`."""
    environment = os.environ | {"LC_ALL": "C", "PATH": tools.get_search_path()}
    with log.open("a+", encoding="utf-8", errors="replace") as file:
        start = file.tell()
        done = subprocess.run(line, stdout=file, stderr=file, env=environment, stdin=subprocess.DEVNULL)
        file.seek(start)
        said = file.read().splitlines()
    if done.returncode:
        errors = [one for one in said if re.search(r"error:|fatal:", one, re.IGNORECASE)] or said[-1:] or ["it failed"]
        raise DicompilerError(f"target mpi: the program cannot be built: {errors[0].strip()} (all of it: {log})")
