"""The headers of onnxruntime: fetched by apt when target mpi needs them, here from a repository on this host."""

from __future__ import annotations

import hashlib
import logging
import subprocess
from pathlib import Path

import pytest

from dicompiler.plugin_api import DicompilerError
from dicompiler_targets.mpi import fetch_headers, toolchain

PACKAGE = fetch_headers.DEBIAN_PACKAGE
ENDING = f": install {PACKAGE}, or set ONNXRUNTIME_INCLUDE_DIR to the directory with"


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration directory of apt on a host without headers. It has no sources yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(fetch_headers.INCLUDE_VARIABLE, raising=False)
    monkeypatch.setattr(fetch_headers, "HEADER_FILE", "onnxruntime_of_this_test.h")
    monkeypatch.setattr(fetch_headers, "APT_DIRECTORY", tmp_path / "apt")
    (tmp_path / "apt").mkdir()
    return tmp_path / "apt"


def write_repository(directory: Path) -> None:
    """Write a repository of apt with a package that contains one header."""
    machine = subprocess.run(
        ["dpkg", "--print-architecture"], capture_output=True, text=True, check=True
    ).stdout.strip()
    package, listing = directory / "package", directory / "dists" / fetch_headers.DEBIAN_SUITE / "main"
    include = package / "usr" / "include" / "onnxruntime"
    for path in (package / "DEBIAN", include, listing / f"binary-{machine}"):
        path.mkdir(parents=True)
    control = f"Package: {PACKAGE}\nVersion: 1\nArchitecture: {machine}\nMaintainer: a <a@b.test>\nDescription: a\n"
    (package / "DEBIAN" / "control").write_text(control)
    (include / fetch_headers.HEADER_FILE).write_text("// a header\n")
    subprocess.run(["dpkg-deb", "--build", package, directory / "a.deb"], check=True, capture_output=True)

    def describe(path: Path) -> tuple[str, int]:
        return hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size

    digest, size = describe(directory / "a.deb")
    packages = listing / f"binary-{machine}" / "Packages"
    packages.write_text(f"{control}Filename: a.deb\nSize: {size}\nSHA256: {digest}\n\n")
    digest, size = describe(packages)
    release = f"Suite: {fetch_headers.DEBIAN_SUITE}\nArchitectures: {machine}\nComponents: main\nSHA256:\n"
    (listing.parent / "Release").write_text(f"{release} {digest} {size} main/binary-{machine}/Packages\n")


def test_missing_headers_are_fetched_once_and_a_line_says_so(
    apt: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_repository(tmp_path / "repository")
    codename = fetch_headers._read_codename()
    (apt / "sources.list").write_text(f"deb [trusted=yes] file:{tmp_path / 'repository'} {codename} main\n")
    with caplog.at_level(logging.WARNING):
        found = toolchain.find_toolchain().include
        assert toolchain.find_toolchain().include == found
    assert (found / fetch_headers.HEADER_FILE).read_text() == "// a header\n"
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == f"target mpi: onnxruntime's C++ headers are missing: apt downloads them into {found}"


def test_headers_that_cannot_be_fetched_are_named_with_the_remedy(apt: Path) -> None:
    with pytest.raises(DicompilerError) as caught:
        fetch_headers.get_include_directory()
    text = str(caught.value)
    assert text.startswith(f"target mpi: onnxruntime's C++ headers cannot be fetched: {apt}: there is no source of ")
    assert ENDING in text
    (apt / "sources.list").write_text(f"deb file:/nowhere {fetch_headers._read_codename()} main\n")
    with pytest.raises(DicompilerError, match=r"cannot be fetched: apt-get .*: E: ") as caught:
        fetch_headers.get_include_directory()
    assert ENDING in str(caught.value) and "\n" not in str(caught.value)


def test_sources_of_apt_are_those_of_this_system_with_another_release(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(
        "deb [arch=amd64] http://a.test/debian bookworm main contrib\n# deb x bookworm y\n"
    )
    (tmp_path / "sources.list.d" / "debian.sources").write_text(
        "Types: deb\nURIs: http://b.test/debian\n http://c.test/debian\nSuites: bookworm bookworm-updates\n"
        "Components: main\nSigned-By: /keys.gpg\n\nTypes: deb\nURIs: http://d.test\nSuites: bookworm-security\n"
    )
    assert fetch_headers.find_apt_sources(tmp_path, "bookworm") == [
        "deb [arch=amd64] http://a.test/debian trixie main\n",
        "deb [signed-by=/keys.gpg] http://b.test/debian trixie main\n",
        "deb [signed-by=/keys.gpg] http://c.test/debian trixie main\n",
    ]
    with pytest.raises(DicompilerError, match="there is no source of the release sid"):
        fetch_headers.find_apt_sources(tmp_path, "sid")
