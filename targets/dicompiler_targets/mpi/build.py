"""Builds the C++ program of a package (a host's directory of an artifact), and caches the executable.

The runtime sources, which are the same for all programs, are compiled once for each set of tools. For each program,
only its main.cc is compiled and linked.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from dicompiler.plugin_api import DicompilerError
from dicompiler.plugin_api.artifacts import file_digest
from dicompiler.plugin_api.utilities import NOTICE_LEVEL
from dicompiler_targets.mpi.cache_directory import get_cache_directory
from dicompiler_targets.mpi.fetch_headers import HEADER_FILE
from dicompiler_targets.mpi.fetch_ncnn import LIBRARY_FILE
from dicompiler_targets.mpi.toolchain import Toolchain, get_search_path

MAX_CACHED_PROGRAMS = 64
"""Maximum number of cached executables for each set of tools. The least recently used ones are removed."""
MAIN_SOURCE, EXECUTABLE = "main.cc", "program"
log = logging.getLogger("dicompiler")


def build_program(package: Path, toolchain: Toolchain, sanitize: bool = False) -> Path:
    """Return the path of a package's executable. Build the executable if it is not in the cache.

    With `sanitize`, the program checks itself with AddressSanitizer and UndefinedBehaviorSanitizer.

    Raises:
        DicompilerError: The program cannot be built. The message has the first error of the compiler.
    """
    sources = _read_sources(package)
    main_source = sources.pop(MAIN_SOURCE)
    tree = get_cache_directory() / _hash_contents({**sources, "tools": _describe_build(toolchain, sanitize).encode()})
    programs, digests = tree / "programs", tree / "sums"
    for directory in (programs, digests):
        directory.mkdir(parents=True, exist_ok=True)
    program = programs / hashlib.sha256(main_source).hexdigest()[:32]
    with (tree / "lock").open("w") as lock:
        # Processes that build in the same directory must do so one after another.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_intact(program, digests / program.name):
            log.log(NOTICE_LEVEL, "target mpi: building the program (only once, about a minute)")
            _compile(tree, sources, main_source, toolchain, sanitize)
            with tempfile.TemporaryDirectory(dir=tree) as temporary:
                copy = Path(shutil.copy2(tree / "build" / EXECUTABLE, Path(temporary, EXECUTABLE)))
                (digests / program.name).write_text(file_digest(copy), encoding="ascii")
                os.replace(copy, program)
            _link_libraries(programs, tree / "build" / "lib")
        os.utime(program)
        files = [path for path in programs.iterdir() if path.is_file()]
        by_last_use = sorted(files, key=lambda path: path.stat().st_mtime)
        for unused in by_last_use[:-MAX_CACHED_PROGRAMS]:
            unused.unlink()
            (digests / unused.name).unlink(missing_ok=True)
    return program


def _link_libraries(programs: Path, libraries: Path) -> None:
    """Create the link `lib`, through which executables in the directory `programs` load their libraries."""
    link = programs / "lib"
    if libraries.is_dir() and not link.is_symlink():
        link.symlink_to(Path(os.path.relpath(libraries, programs)))


def _is_intact(program: Path, digest: Path) -> bool:
    return program.is_file() and digest.is_file() and digest.read_text(encoding="ascii") == file_digest(program)


def _read_sources(package: Path) -> dict[str, bytes]:
    paths = [package / MAIN_SOURCE, package / "CMakeLists.txt", *sorted((package / "runtime").glob("*"))]
    try:
        return {str(path.relative_to(package)): path.read_bytes() for path in paths}
    except OSError as error:
        raise DicompilerError(f"{error.filename}: {error.strerror}: compile the model again") from None


def _describe_build(toolchain: Toolchain, sanitize: bool) -> str:
    header = toolchain.include / HEADER_FILE
    lines = []
    libraries = [toolchain.library] if toolchain.ncnn is None else [toolchain.library, toolchain.ncnn / LIBRARY_FILE]
    for path in (toolchain.mpicxx, toolchain.cmake, toolchain.compiler, *libraries, header):
        status = path.stat()
        lines.append(f"{path} {path.resolve()} {status.st_size} {status.st_mtime_ns}")
    # CMake reads these environment variables when a build directory is made, and never again.
    names = sorted(name for name in os.environ if name in ("CXXFLAGS", "LDFLAGS") or name.startswith("CMAKE_"))
    lines += [f"{name}={os.environ[name]}" for name in names]
    return "\n".join([*lines, f"sanitize {sanitize}"])


def _hash_contents(contents: Mapping[str, bytes]) -> str:
    lines = [f"{name} {hashlib.sha256(data).hexdigest()}\n" for name, data in sorted(contents.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def _compile(
    tree: Path, sources: Mapping[str, bytes], main_source: bytes, toolchain: Toolchain, sanitize: bool
) -> None:
    source, build, log = tree / "source", tree / "build", tree / "log"
    for name, data in {**sources, MAIN_SOURCE: main_source}.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_bytes() != data:
            path.write_bytes(data)
    if not (build / "configured").is_file():
        shutil.rmtree(build, ignore_errors=True)
        options: dict[str, Path | str] = {
            "CMAKE_CXX_COMPILER": toolchain.compiler,
            "MPI_CXX_COMPILER": toolchain.mpicxx,
            "ONNXRUNTIME_INCLUDE_DIR": toolchain.include,
            "ONNXRUNTIME_LIBRARY": toolchain.library,
            "DICOMPILER_SANITIZE": "ON" if sanitize else "OFF",
        }
        if toolchain.ncnn is not None:
            options["NCNN_DIRECTORY"] = toolchain.ncnn
        command = [
            str(toolchain.cmake),
            "-G",
            "Unix Makefiles",
            "-S",
            str(source),
            "-B",
            str(build),
        ]
        log.unlink(missing_ok=True)
        _run_command([*command, *(f"-D{name}={value}" for name, value in options.items())], log)
        (build / "configured").touch()
    jobs = str(len(os.sched_getaffinity(0)))
    _run_command([str(toolchain.cmake), "--build", str(build), "--parallel", jobs], log)


def _run_command(command: Sequence[str], log: Path) -> None:
    """Run a build command and append its output to the log.

    Raises:
        DicompilerError: The command fails. The message has its first error.
    """
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
