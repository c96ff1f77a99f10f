"""Builds ncnn for this machine or another one: `python3 -m dicompiler_targets.mpi.fetch_ncnn [aarch64]`.

Target mpi calls this module when an artifact needs ncnn. The sources of the installed version are downloaded from PyPI,
because neither the Python package ncnn nor Debian has ncnn's C++ library. Only the layers that `engines.ncnn_converter`
writes are compiled, in float32.
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path

from dicompiler.plugin_api import DicompilerError
from dicompiler_targets.mpi.cache_directory import get_cache_directory
from dicompiler_targets.mpi.toolchain import find_program, get_search_path

log = logging.getLogger("dicompiler")

ARCHIVE_PATTERN = "ncnn-*.tar.gz"
DIRECTORY_VARIABLE = "NCNN_DIRECTORY"
"""Environment variable with the directory of an installed ncnn, which is then used instead of building ncnn."""
HEADER_FILE, LIBRARY_FILE = Path("include", "ncnn", "net.h"), Path("lib", "libncnn.a")
LAYERS = frozenset(
    (
        "input", "split", "convolution", "convolutiondepthwise", "innerproduct", "relu", "clip", "sigmoid", "hardswish",
        "hardsigmoid", "tanh", "swish", "pooling", "reshape", "binaryop", "concat", "softmax", "lrn", "padding", "crop",
        "interp", "batchnorm", "noop", "memorydata", "slice", "flatten", "packing", "cast",
    )
)  # fmt: skip
"""Layers that the converter from ONNX to ncnn writes, and layers that ncnn itself inserts between them."""
DISABLED_FEATURES = (
    "BUILD_TOOLS", "BUILD_EXAMPLES", "BUILD_BENCHMARK", "BUILD_TESTS", "VULKAN", "C_API", "PIXEL", "INT8", "BF16",
    "WEIGHT_QUANT", "ARM82", "ARM86SVE", "XOP", "FMA4", "AVXVNNI", "AVXNECONVERT", "AVX512VNNI", "AVX512BF16",
    "AVX512FP16",
)  # fmt: skip
"""Features of ncnn that are not compiled, because computation in float32 does not use them.

With them, the build would take several times as long.
"""


def main() -> int:
    try:
        if len(sys.argv) > 2 or not re.fullmatch(r"[a-z0-9_]+", machine := (*sys.argv[1:], platform.machine())[0]):
            raise DicompilerError("fetch_ncnn: expected a machine as 'uname -m' prints it, such as aarch64")
        print(get_ncnn_directory(metadata.version("ncnn"), machine))
    except metadata.PackageNotFoundError:
        print("error: fetch_ncnn: the Python package ncnn is not installed: run 'pip install ncnn'", file=sys.stderr)
        return 1
    except DicompilerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def get_ncnn_directory(version: str, machine: str = "") -> Path:
    """Return a directory with ncnn's library and headers; build them if they are missing.

    Args:
        version: The version of ncnn.
        machine: Name of the machine; by default this one.

    Raises:
        DicompilerError: They cannot be built.
    """
    configured = os.environ.get(DIRECTORY_VARIABLE)
    if configured and not machine:
        for file in (HEADER_FILE, LIBRARY_FILE):
            if not Path(configured, file).is_file():
                raise DicompilerError(f"target mpi: {DIRECTORY_VARIABLE}: {configured} has no {file}: unset it")
        return Path(configured).absolute()
    machine = machine or platform.machine()
    directory = get_cache_directory() / "ncnn" / machine
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # The lock lets only one process at a time build ncnn in this directory.
        if _read_version(directory) != version:
            if machine != platform.machine() and shutil.which(f"{machine}-linux-gnu-g++") is None:
                raise DicompilerError(
                    f"target mpi: ncnn cannot be built for {machine}: {machine}-linux-gnu-g++ is missing: install it "
                    f"with 'apt install g++-{machine.replace('_', '-')}-linux-gnu'"
                )
            log.warning("target mpi: ncnn %s is compiled once for %s; this takes some minutes", version, machine)
            _build(version, machine, directory)
    return directory


def _read_version(directory: Path) -> str:
    file = directory / "version"
    is_complete = file.is_file() and (directory / HEADER_FILE).is_file() and (directory / LIBRARY_FILE).is_file()
    return file.read_text(encoding="utf-8") if is_complete else ""


def _build(version: str, machine: str, directory: Path) -> None:
    with tempfile.TemporaryDirectory(dir=get_cache_directory()) as temporary:
        scratch = Path(temporary)
        source = _fetch_source(version, scratch)
        log_file = directory.with_suffix(".log")
        log_file.unlink(missing_ok=True)
        options = _make_options(source, version, machine) | {"CMAKE_INSTALL_PREFIX": str(scratch / "installed")}
        cmake = find_program("cmake")
        commands = [
            [cmake, "-S", source, "-B", scratch / "build", *(f"-D{name}={value}" for name, value in options.items())],
            [cmake, "--build", scratch / "build", "--parallel", str(len(os.sched_getaffinity(0)))],
            [cmake, "--install", scratch / "build"],
        ]
        for command in commands:
            _run_command(list(map(str, command)), log_file)
        (scratch / "installed" / "version").write_text(version, encoding="utf-8")
        shutil.rmtree(directory, ignore_errors=True)
        (scratch / "installed").rename(directory)


def _fetch_source(version: str, scratch: Path) -> Path:
    # The version in the archive's metadata is the current date, so pip refuses the archive if it is asked for ncnn's
    # version. Its message contains the URL, which the second call names instead.
    errors = _download(f"ncnn=={version}", scratch)
    url = re.search(rf"\w+://\S+/ncnn-{re.escape(version)}\.tar\.gz", errors)
    if url is not None and not list(scratch.glob(ARCHIVE_PATTERN)):
        errors = _download(f"ncnn @ {url[0]}", scratch)
    archives = sorted(scratch.glob(ARCHIVE_PATTERN))
    if not archives:
        lines = [line for line in errors.splitlines() if line.startswith("ERROR:")] or ["it failed"]
        raise DicompilerError(
            f"target mpi: pip cannot download the sources of ncnn {version} ({lines[-1]}): build ncnn, and set "
            f"{DIRECTORY_VARIABLE} to its installation"
        )
    with tarfile.open(archives[0]) as archive:
        archive.extractall(scratch / "source", filter="data")
    return next((scratch / "source").iterdir())


def _download(requirement: str, directory: Path) -> str:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary=ncnn", "--dest", str(directory)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stderr


def _make_options(source: Path, version: str, machine: str) -> dict[str, str]:
    """Return the options of CMake: only the layers in LAYERS are compiled, without the disabled features."""
    text = (source / "src" / "CMakeLists.txt").read_text(encoding="utf-8")
    layers = {name.lower() for name in re.findall(r"ncnn_add_layer\((\w+)", text)}
    options = {f"WITH_LAYER_{name}": "OFF" for name in sorted(layers - LAYERS)}
    options |= {f"NCNN_{name}": "OFF" for name in DISABLED_FEATURES}
    options |= {"CMAKE_BUILD_TYPE": "Release", "NCNN_VERSION": version.rpartition(".")[2]}
    if machine != platform.machine():
        options |= {
            "CMAKE_SYSTEM_NAME": "Linux",
            "CMAKE_SYSTEM_PROCESSOR": machine,
            "CMAKE_C_COMPILER": f"{machine}-linux-gnu-gcc",
            "CMAKE_CXX_COMPILER": f"{machine}-linux-gnu-g++",
        }
    return options


def _run_command(command: list[str], log_file: Path) -> None:
    with log_file.open("a", encoding="utf-8") as stream:
        environment = os.environ | {"LC_ALL": "C", "PATH": get_search_path()}
        done = subprocess.run(command, stdout=stream, stderr=stream, env=environment, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line.strip() for line in lines if re.search(r"error:|CMake Error", line, re.IGNORECASE)]
        raise DicompilerError(f"target mpi: ncnn cannot be built: {(errors or lines[-1:])[0]} (full log: {log_file})")


if __name__ == "__main__":
    sys.exit(main())
