"""Builds the C++ program of a package. Executables are cached by the content of their sources.

The sources that are the same for all programs are compiled once for each set of tools. A further program then takes one
short source file and a link.
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
from dicompiler_targets.mpi.toolchain import HEADER_FILE, Toolchain, get_cache_directory, get_search_path

MAX_CACHED_PROGRAMS = 64
"""Maximum number of cached executables for each set of tools. The least recently used ones are removed."""
MAIN_SOURCE, EXECUTABLE = "main.cc", "program"


def build_program(package: Path, toolchain: Toolchain, sanitize: bool = False) -> Path:
    """Build the program of a package, unless it is in the cache.

    Args:
        package: The package.
        toolchain: The tools to use.
        sanitize: Whether to build with AddressSanitizer and UndefinedBehaviorSanitizer.

    Returns:
        The executable.

    Raises:
        DicompilerError: It cannot be compiled; the message contains the compiler's first error.
    """
    sources = _read_sources(package)
    main_source = sources.pop(MAIN_SOURCE)
    tree = get_cache_directory() / _hash_contents({**sources, "tools": _describe_build(toolchain, sanitize).encode()})
    programs, digests = tree / "programs", tree / "sums"
    for directory in (programs, digests):
        directory.mkdir(parents=True, exist_ok=True)
    program = programs / hashlib.sha256(main_source).hexdigest()[:32]
    with _exclusive_lock(tree / "lock"):
        if not _is_intact(program, digests / program.name):
            _compile(tree, sources, main_source, toolchain, sanitize)
            with tempfile.TemporaryDirectory(dir=tree) as temporary:
                copy = Path(shutil.copy2(tree / "build" / EXECUTABLE, Path(temporary, EXECUTABLE)))
                (digests / program.name).write_text(file_digest(copy), encoding="ascii")
                os.replace(copy, program)
        os.utime(program)
        by_last_use = sorted(programs.iterdir(), key=lambda path: path.stat().st_mtime)
        for unused in by_last_use[:-MAX_CACHED_PROGRAMS]:
            unused.unlink()
            (digests / unused.name).unlink(missing_ok=True)
    return program


def _is_intact(program: Path, digest: Path) -> bool:
    """Return True if a cached executable exists and is not damaged."""
    return program.is_file() and digest.is_file() and digest.read_text(encoding="ascii") == file_digest(program)


def _read_sources(package: Path) -> dict[str, bytes]:
    """Return the files of a package that are compiled, by path."""
    paths = [package / MAIN_SOURCE, package / "CMakeLists.txt", *sorted((package / "runtime").glob("*"))]
    try:
        return {str(path.relative_to(package)): path.read_bytes() for path in paths}
    except OSError as error:
        raise DicompilerError(f"{error.filename}: {error.strerror}: compile the network again") from None


def _describe_build(toolchain: Toolchain, sanitize: bool) -> str:
    """Return a text of all that a build depends on except the sources."""
    header = toolchain.include / HEADER_FILE
    lines = []
    for path in (toolchain.mpicxx, toolchain.cmake, toolchain.compiler, toolchain.library, header):
        status = path.stat()
        lines.append(f"{path} {path.resolve()} {status.st_size} {status.st_mtime_ns}")
    return "\n".join([*lines, f"sanitize {sanitize}"])


def _hash_contents(contents: Mapping[str, bytes]) -> str:
    lines = [f"{name} {hashlib.sha256(data).hexdigest()}\n" for name, data in sorted(contents.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


@contextlib.contextmanager
def _exclusive_lock(path: Path) -> Iterator[None]:
    """Hold a lock against other processes."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(
    tree: Path, sources: Mapping[str, bytes], main_source: bytes, toolchain: Toolchain, sanitize: bool
) -> None:
    source_directory, build_directory, log = tree / "source", tree / "build", tree / "log"
    for name, data in {**sources, MAIN_SOURCE: main_source}.items():
        path = source_directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_bytes() != data:
            path.write_bytes(data)
    if not (build_directory / "configured").is_file():
        shutil.rmtree(build_directory, ignore_errors=True)
        options = {
            "CMAKE_CXX_COMPILER": toolchain.compiler,
            "MPI_CXX_COMPILER": toolchain.mpicxx,
            "ONNXRUNTIME_INCLUDE_DIR": toolchain.include,
            "ONNXRUNTIME_LIBRARY": toolchain.library,
            "DICOMPILER_SANITIZE": "ON" if sanitize else "OFF",
        }
        command = [
            str(toolchain.cmake),
            "-G",
            "Unix Makefiles",
            "-S",
            str(source_directory),
            "-B",
            str(build_directory),
        ]
        log.unlink(missing_ok=True)
        _run_command([*command, *(f"-D{name}={value}" for name, value in options.items())], log)
        (build_directory / "configured").touch()
    jobs = str(len(os.sched_getaffinity(0)))
    _run_command([str(toolchain.cmake), "--build", str(build_directory), "--parallel", jobs], log)


def _run_command(command: Sequence[str], log: Path) -> None:
    """Run a command to its end and append its output to the log."""
    environment = os.environ | {"LC_ALL": "C", "PATH": get_search_path()}
    with log.open("a+", encoding="utf-8", errors="replace") as file:
        start = file.tell()
        done = subprocess.run(command, stdout=file, stderr=file, env=environment, stdin=subprocess.DEVNULL)
        file.seek(start)
        lines = file.read().splitlines()
    if done.returncode:
        errors = [line for line in lines if re.search(r"error:|fatal:", line, re.IGNORECASE)]
        first = (errors or lines[-1:] or ["it failed"])[0].strip()
        raise DicompilerError(f"target mpi: the program cannot be built: {first} (full log: {log})")
