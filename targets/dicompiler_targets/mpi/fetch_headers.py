"""Download of the C++ headers of onnxruntime with apt, without installing them.

Target mpi fetches the headers when it first builds a program. For a host that will be offline, fetch them earlier:

    python3 -m dicompiler_targets.mpi.fetch_headers

Debian before version 13 has no package of these headers. The package of Debian 13 is therefore downloaded from the
mirrors that apt uses on this machine. The library itself is in the Python package onnxruntime.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from dicompiler.plugin_api import DicompilerError
from dicompiler_targets.mpi.cache_directory import get_cache_directory

log = logging.getLogger("dicompiler")

HEADER_FILE = "onnxruntime_cxx_api.h"
INCLUDE_VARIABLE = "ONNXRUNTIME_INCLUDE_DIR"
"""Environment variable with the directory of onnxruntime's headers, if they are not in a standard place."""
DEBIAN_PACKAGE, DEBIAN_SUITE = "libonnxruntime-dev", "trixie"
APT_DIRECTORY = Path("/etc/apt")


def main() -> int:
    try:
        print(get_include_directory())
    except DicompilerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def get_include_directory() -> Path:
    """Return the directory of onnxruntime's C++ headers; fetch them if they are missing.

    Raises:
        DicompilerError: They cannot be fetched.
    """
    found = _find_include_directory()
    if found is not None:
        return found
    target = get_cache_directory() / "include" / "onnxruntime"
    log.warning("target mpi: onnxruntime's C++ headers are missing: apt downloads them into %s", target)
    try:
        _fetch_headers(target)
    except DicompilerError as error:
        remedy = f"install {DEBIAN_PACKAGE}, or set {INCLUDE_VARIABLE} to the directory with {HEADER_FILE}"
        raise DicompilerError(f"target mpi: onnxruntime's C++ headers cannot be fetched: {error}: {remedy}") from None
    return target


def _find_include_directory() -> Path | None:
    configured = os.environ.get(INCLUDE_VARIABLE)
    directories = [Path(configured)] if configured else []
    prefixes = (sys.prefix, "/usr", "/usr/local", get_cache_directory())
    directories += [Path(prefix, "include", "onnxruntime") for prefix in prefixes]
    return next((path.absolute() for path in directories if (path / HEADER_FILE).is_file()), None)


def _fetch_headers(target: Path) -> None:
    """Download the headers into the directory `target`, or raise DicompilerError."""
    for name in ("apt-get", "dpkg"):
        if shutil.which(name) is None:
            raise DicompilerError(f"{name} is not on this host")
    with tempfile.TemporaryDirectory(dir=get_cache_directory()) as temporary:
        scratch = Path(temporary)
        scratch.chmod(0o755)  # apt downloads as another user, who must be able to enter the directory.
        (scratch / "lists" / "partial").mkdir(parents=True)
        (scratch / "own.list").write_text("".join(find_apt_sources(APT_DIRECTORY, _read_codename())), encoding="utf-8")
        options = {
            "Dir::Etc::SourceList": scratch / "own.list",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State::Lists": scratch / "lists",
            "Dir::Cache": scratch / "cache",
            "Acquire::Languages": "none",
        }
        command = ["apt-get", "-q", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
        _run_command([*command, "update"], scratch)
        _run_command([*command, "download", DEBIAN_PACKAGE], scratch)
        _run_command(["dpkg", "-x", str(next(iter(scratch.glob("*.deb")))), str(scratch / "unpacked")], scratch)
        target.parent.mkdir(parents=True, exist_ok=True)
        # If `target` exists, another process has just fetched the headers.
        with contextlib.suppress(OSError):
            (scratch / "unpacked" / "usr" / "include" / "onnxruntime").rename(target)


def _read_codename() -> str:
    try:
        text = Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^VERSION_CODENAME=\"?(\w+)", text, re.MULTILINE)
    if match is None:
        raise DicompilerError("/etc/os-release: not Debian")
    return match[1]


def find_apt_sources(apt: Path, codename: str) -> list[str]:
    """Return lines of a sources.list with the release DEBIAN_SUITE and this machine's mirrors.

    Args:
        apt: apt's configuration directory.
        codename: Codename of the installed release, such as bookworm. Its mirrors are used.

    Raises:
        DicompilerError: apt has no mirror of this release.
    """
    lines: list[str] = []
    for file in [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]:
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        if file.suffix == ".sources":
            lines += _parse_stanzas(text, codename)
        elif file.suffix == ".list":
            lines += _parse_lines(text, codename)
    if not lines:
        raise DicompilerError(f"{apt}: there is no source of the release {codename}")
    return list(dict.fromkeys(lines))


def _parse_stanzas(text: str, codename: str) -> Iterable[str]:
    """Yield apt's package repositories for a release, from a file with paragraphs of KEY: VALUE (deb822 format)."""
    for stanza in re.split(r"\n\s*\n", text):
        fields = {
            name.lower(): " ".join(value.split())
            for name, value in re.findall(r"^([A-Za-z-]+):(.*(?:\n[ \t]+.*)*)", stanza, re.MULTILINE)
        }
        if codename in fields.get("suites", "").split() and fields.get("enabled", "yes") != "no":
            signed_by = fields.get("signed-by", "")
            option = f"[signed-by={signed_by}] " if signed_by.startswith("/") else ""
            for uri in fields.get("uris", "").split():
                yield f"deb {option}{uri} {DEBIAN_SUITE} main\n"


def _parse_lines(text: str, codename: str) -> Iterable[str]:
    """Yield apt's package repositories for a release, from a file with lines: deb URI RELEASE COMPONENT."""
    pattern = r"^deb\s+((?:\[[^\]]*\]\s+)?\S+)\s+" + re.escape(codename) + r"\s"
    for match in re.finditer(pattern, text, re.MULTILINE):
        yield f"deb {match[1]} {DEBIAN_SUITE} main\n"


def _run_command(command: list[str], directory: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=directory, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        cause = next((line for line in lines if line.startswith("E:")), (lines or ["it failed"])[-1])
        raise DicompilerError(f"{' '.join([command[0], *command[-2:]])}: {cause}")


if __name__ == "__main__":
    sys.exit(main())
