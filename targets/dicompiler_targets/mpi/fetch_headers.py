"""Download of onnxruntime's C++ headers with apt, without installing them.

    python3 -m dicompiler_targets.mpi.fetch_headers

Debian before version 13 has no package of them. The package of Debian 13 is downloaded from the mirrors that this
machine's apt uses, and unpacked into a directory that the target searches. The library is that of the Python package.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from dicompiler.plugin_api import DicompilerError
from dicompiler_targets.mpi.toolchain import HEADER_FILE, find_include_directory, get_cache_directory

DEBIAN_PACKAGE, DEBIAN_SUITE = "libonnxruntime-dev", "trixie"
APT_DIRECTORY = Path("/etc/apt")


def main() -> int:
    """Fetch the headers unless they exist, print their directory, and return the exit code."""
    try:
        print(fetch_headers())
    except DicompilerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def fetch_headers() -> Path:
    """Return the directory of the headers, and fetch them if they are missing.

    Raises:
        DicompilerError: apt cannot fetch them.
    """
    try:
        return find_include_directory()
    except DicompilerError:
        target = get_cache_directory() / "include" / "onnxruntime"
    for name in ("apt-get", "dpkg"):
        if shutil.which(name) is None:
            raise DicompilerError(f"{name} is missing: fetch {HEADER_FILE} and the headers next to it into {target}")
    with tempfile.TemporaryDirectory(dir=get_cache_directory()) as temporary:
        scratch = Path(temporary)
        scratch.chmod(0o755)  # apt downloads as another user
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
        shutil.rmtree(target, ignore_errors=True)
        (scratch / "unpacked" / "usr" / "include" / "onnxruntime").rename(target)
    return target


def _read_codename() -> str:
    """Return the codename of this system's Debian release."""
    try:
        text = Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^VERSION_CODENAME=\"?(\w+)", text, re.MULTILINE)
    if match is None:
        raise DicompilerError(
            f"this system is not Debian: fetch {HEADER_FILE} and the headers next to it in another way"
        )
    return match[1]


def find_apt_sources(apt: Path, codename: str) -> list[str]:
    """Return apt's sources of a release as lines of a sources.list, with DEBIAN_SUITE instead of the release.

    Args:
        apt: Directory of apt's configuration.
        codename: Codename of the release.

    Raises:
        DicompilerError: There are no such sources.
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
        raise DicompilerError(
            f"{apt}: there is no source of the release {codename}: add one, or fetch {DEBIAN_PACKAGE} by hand"
        )
    return list(dict.fromkeys(lines))


def _parse_stanzas(text: str, codename: str) -> Iterable[str]:
    """Yield the sources in a file of the deb822 format."""
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
    """Yield the sources in a file of the one-line format."""
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
