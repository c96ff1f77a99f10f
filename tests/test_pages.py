"""The pages in docs/ that are read from top to bottom: what they show runs, in their order."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from support import console
from support.boards import Cluster, cluster
from support.console import blocks
from test_documents import check

from dicompiler.ir.platform import from_toml
from dicompiler.target.remote.hosts import from_toml as hosts_from_toml

TUTORIAL = console.TUTORIAL.read_text(encoding="utf-8")
WAY = (console.DOCUMENT.parent / "docs" / "how-it-works.md").read_text(encoding="utf-8")
API = (console.DOCUMENT.parent / "docs" / "api.md").read_text(encoding="utf-8")


@pytest.fixture
def boards(tmp_path: Path) -> Iterator[Cluster]:
    """The tutorial's boards, as network namespaces."""
    names = [host.name for host in from_toml(blocks(TUTORIAL, "toml")[0]).hosts]
    place = tmp_path / "boards"
    place.mkdir()
    with cluster(place, names) as made, made.inside():
        yield made


def test_the_network_of_the_tutorial_is_what_its_export_writes() -> None:
    (code,) = blocks(TUTORIAL, "python")
    digest = hashlib.sha256(code.encode()).hexdigest()
    assert onnx.load(console.EXPORTED).producer_version == digest, "run tests/fixtures/torch/make.py"


def test_the_commands_of_the_tutorial_print_what_it_shows(boards: Cluster, tmp_path: Path) -> None:
    platform, hosts = blocks(TUTORIAL, "toml")
    for device in from_toml(platform).devices:
        assert hosts_from_toml(hosts).place(device.name, device.host, "camera").ssh.startswith("pi@192.168.1.")
    console.tutorial_files(TUTORIAL, tmp_path)
    boards.hosts(tmp_path / "hosts.toml")
    for command in console.shown(TUTORIAL):
        check(command, tmp_path)
    assert (tmp_path / "measured" / "artifact.json").is_file()


def test_the_program_that_follows_a_model_prints_what_the_page_shows(tmp_path: Path) -> None:
    """All Python of the page is one program; what it prints stands in the block that follows each piece."""
    assert console.run_python("".join(blocks(WAY, "python")), tmp_path) == "".join(blocks(WAY, "text"))


def test_the_reference_has_a_page_for_each_module_and_says_what_it_says_of_itself(tmp_path: Path) -> None:
    (command,) = console.shown(API)
    console.run(command.line, tmp_path)
    pages = {str(path.relative_to(tmp_path / "api").with_suffix("")) for path in (tmp_path / "api").rglob("*.html")}
    rows = dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", API, re.MULTILINE))
    assert command.line.split()[5:] == list(rows)
    assert {module.replace(".", "/") for module in rows} <= pages
    for module, summary in rows.items():
        text = inspect.getdoc(importlib.import_module(module)) or ""
        assert summary == text.split("\n\n")[0].replace("\n", " ")
