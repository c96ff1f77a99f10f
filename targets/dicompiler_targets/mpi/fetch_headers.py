"""`python3 -m dicompiler_targets.mpi.fetch_headers`: fetches onnxruntime's C++ headers with apt, without installing them.

For Debian before 13, which has no package of them: the package of Debian 13 is downloaded from the mirrors that this
machine's apt uses, and unpacked where the target looks for headers. The library is that of the Python package.
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
from dicompiler_targets.mpi import toolchain

DEBIAN_PACKAGE, DEBIAN_SUITE = "libonnxruntime-dev", "trixie"
APT_DIRECTORY = Path("/etc/apt")


def main() -> int:
    """Fetches the headers unless they are there; prints their directory. The exit code."""
    try:
        print(fetch_headers())
    except DicompilerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def fetch_headers() -> Path:
    """The directory of the headers, after they were fetched where none are. DicompilerError where apt cannot."""
    try:
        return toolchain.find_include_directory()
    except DicompilerError:
        target = toolchain.get_cache_directory() / "include" / "onnxruntime"
    for name in ("apt-get", "dpkg"):
        if shutil.which(name) is None:
            raise DicompilerError(
                f"{name} is missing: fetch {toolchain.HEADER_FILE} and the headers beside it into {target}"
            )
    with tempfile.TemporaryDirectory(dir=toolchain.get_cache_directory()) as temporary:
        scratch = Path(temporary)
        scratch.chmod(0o755)  # apt downloads as a user of its own
        (scratch / "lists" / "partial").mkdir(parents=True)
        (scratch / "own.list").write_text("".join(find_apt_sources(APT_DIRECTORY, _read_codename())), encoding="utf-8")
        options = {
            "Dir::Etc::SourceList": scratch / "own.list",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State::Lists": scratch / "lists",
            "Dir::Cache": scratch / "cache",
            "Acquire::Languages": "none",
        }
        line = ["apt-get", "-q", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
        _run_command([*line, "update"], scratch)
        _run_command([*line, "download", DEBIAN_PACKAGE], scratch)
        _run_command(["dpkg", "-x", str(next(iter(scratch.glob("*.deb")))), str(scratch / "unpacked")], scratch)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        (scratch / "unpacked" / "usr" / "include" / "onnxruntime").rename(target)
    return target


def _read_codename() -> str:
    """This system's name among Debian's releases."""
    try:
        text = Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^VERSION_CODENAME=\"?(\w+)", text, re.MULTILINE)
    if match is None:
        raise DicompilerError(
            f"this is no Debian: fetch {toolchain.HEADER_FILE} and the headers beside it by another way"
        )
    return match[1]


def find_apt_sources(apt: Path, codename: str) -> list[str]:
    """apt's own sources of the release `codename`, as lines of a sources.list, for SUITE instead of it.

    apt: the directory of its configuration. DicompilerError where it names none.
    """
    lines: list[str] = []
    for file in [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]:
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        lines += (
            _parse_stanzas(text, codename) if file.suffix == ".sources" else _parse_lines(text, codename, file.suffix)
        )
    if not lines:
        raise DicompilerError(
            f"{apt}: there is no source of the release {codename}: add one, or fetch {DEBIAN_PACKAGE} by hand"
        )
    return list(dict.fromkeys(lines))


def _parse_stanzas(text: str, codename: str) -> Iterable[str]:
    for stanza in re.split(r"\n\s*\n", text):
        fields = {
            name.lower(): " ".join(value.split())
            for name, value in re.findall(r"^([A-Za-z-]+):(.*(?:\n[ \t]+.*)*)", stanza, re.MULTILINE)
        }
        if codename in fields.get("suites", "").split() and fields.get("enabled", "yes") != "no":
            signed = fields.get("signed-by", "")
            option = f"[signed-by={signed}] " if signed.startswith("/") else ""
            for uri in fields.get("uris", "").split():
                yield f"deb {option}{uri} {DEBIAN_SUITE} main\n"


def _parse_lines(text: str, codename: str, suffix: str) -> Iterable[str]:
    if suffix == ".list":
        for match in re.finditer(
            r"^deb\s+((?:\[[^\]]*\]\s+)?\S+)\s+" + re.escape(codename) + r"\s", text, re.MULTILINE
        ):
            yield f"deb {match[1]} {DEBIAN_SUITE} main\n"


def _run_command(line: list[str], directory: Path) -> None:
    done = subprocess.run(line, capture_output=True, text=True, cwd=directory, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = [one for one in done.stderr.splitlines() if one.strip()]
        first = next((one for one in said if one.startswith("E:")), (said or ["it failed"])[-1])
        raise DicompilerError(f"{' '.join([line[0], *line[-2:]])}: {first}")


if __name__ == "__main__":
    sys.exit(main())
