"""The pages in docs/ that are read from top to bottom: what they show runs, in their order."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import click
import onnx
import pytest
from support import console, gallery
from support.boards import Cluster, cluster
from support.browser import browser
from support.console import blocks
from test_documents import check

import dicompiler
from dicompiler import plugin_api
from dicompiler.cli.command_group import root
from dicompiler.ir.platform import platform_from_toml
from dicompiler.target.remote.hosts import parse_hosts as hosts_from_toml

ROOT = console.DOCUMENT.parent
BELOW = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *BELOW]
TUTORIAL = console.TUTORIAL.read_text(encoding="utf-8")
WAY = (console.DOCUMENT.parent / "docs" / "how-it-works.md").read_text(encoding="utf-8")
API = (console.DOCUMENT.parent / "docs" / "api.md").read_text(encoding="utf-8")


@pytest.fixture
def boards(tmp_path: Path) -> Iterator[Cluster]:
    """The tutorial's boards, as network namespaces."""
    names = [host.name for host in platform_from_toml(blocks(TUTORIAL, "toml")[0]).hosts]
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
    for device in platform_from_toml(platform).devices:
        assert (
            hosts_from_toml(hosts)
            .locate_device(device.name, device.host, "camera")
            .ssh_destination.startswith("pi@192.168.1.")
        )
    console.tutorial_files(TUTORIAL, tmp_path)
    boards.hosts(tmp_path / "hosts.toml")
    for command in console.shown(TUTORIAL):
        check(command, tmp_path)
    assert (tmp_path / "measured" / "artifact.json").is_file()


def test_the_program_that_follows_a_model_prints_what_the_page_shows(tmp_path: Path) -> None:
    """All Python of the page is one program; what it prints stands in the block that follows each piece."""
    assert console.run_python("".join(blocks(WAY, "python")), tmp_path) == "".join(blocks(WAY, "text"))


def command_lines(text: str) -> list[list[str]]:
    """The words of each `dicompiler …` that a page shows: in blocks that a shell reads, and in the text."""
    read = text + "".join("    " + line for block in blocks(text, "sh") for line in block.splitlines(keepends=True))
    shown = re.findall(r"^(?: {4}|\$ )(?:sudo )?dicompiler (\w.*)$", read, re.MULTILINE)
    shown += re.findall(r"`(?:sudo )?dicompiler (\w[^`]*)`", text)
    return [shlex.split(re.sub(r"\s\[.*|\s(?:>|2>|\s{2}).*|…", " ", line), comments=True) for line in shown]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_of_a_page_exist(page: Path) -> None:
    for name, *words in command_lines(page.read_text(encoding="utf-8")):
        command = root.get_command(click.Context(root), name)
        assert command is not None, name
        options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        given = {word.split("=")[0] for word in words if word.startswith("-") and not word[1:2].isdigit()}
        assert given <= options, f"dicompiler {name}: {given - options}"


def test_python_of_a_page_is_python_and_toml_loads() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for code in blocks(text, "python"):
            compile(textwrap.dedent(code), str(page), "exec")
    hosts = blocks((ROOT / "docs" / "how-to" / "raspberry-pi.md").read_text(), "toml")[0]
    assert hosts_from_toml(hosts).locate_device("pi04", "pi04", "net").python == "dicompiler/bin/python"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as strictly as can be: a link, picture or heading that is not there is an error."""
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", ROOT / ".mkdocs.yml", "-d", place]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return place


def test_the_site_has_all_pages_and_all_that_is_public(site: Path) -> None:
    written = {path.stem for path in site.rglob("*.html")}
    assert {path.stem for path in BELOW} - {"README", "package"} <= written
    reference = (site / "api.html").read_text(encoding="utf-8")
    for module in (dicompiler, plugin_api):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isroutine(value):
                assert f'id="{value.__module__}.{value.__qualname__}"' in reference, name
    places = {entry["location"] for entry in json.loads((site / "search" / "search_index.json").read_text())["docs"]}
    assert {"index.html", "how-to/raspberry-pi.html", "plugins/strategy.html"} <= places
    for module, summary in re.findall(r"^\| `(.+?)` \| (.+) \|$", API, re.MULTILINE):
        assert summary == (inspect.getdoc(importlib.import_module(module)) or "").split("\n\n")[0].replace("\n", " ")


def test_the_site_can_be_read_on_a_phone_and_on_paper_and_asks_nobody_else(site: Path) -> None:
    with browser() as chromium:
        for name in ("index", "operators", "formats", "troubleshooting", "peers", "api", "gallery", "gallery/pays"):
            chromium.open(site / f"{name}.html", width=360, height=740)
            width = chromium.value("document.documentElement.scrollWidth")
            assert width <= 360, f"{name}: {width} px"
            assert not [url for url in chromium.requests() if not url.startswith(("file:", "data:", "blob:"))]
        for name in ("index", "gallery"):
            chromium.open(site / f"{name}.html")
            assert chromium.pdf().startswith(b"%PDF")
            assert chromium.value("[...document.images].every((one) => one.naturalWidth > 0)")
        for name in ("index", "formats"):  # on paper nothing is cut off at the right
            chromium.open(site / f"{name}.html", width=720)
            chromium.call("Emulation.setEmulatedMedia", media="print")
            wide = "[...document.querySelectorAll('article *')].filter((one) => one.scrollWidth > 720).length"
            assert chromium.value(wide) == 0, name


def test_the_gallery_shows_reports_as_they_are_written_today(tmp_path: Path) -> None:
    """One is made anew, from the network on, and has the same bytes; each stands on the page with its picture."""
    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert gallery.page("stream", tmp_path) == (gallery.PLACE / "stream.html").read_bytes(), (
        "run tests/support/gallery.py"
    )
    for name in gallery.CASES:
        assert f"](gallery/{name}.html)" in text and f"](gallery/{name}.png)" in text
        assert (gallery.PLACE / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "</html>" in (gallery.PLACE / f"{name}.html").read_text(encoding="utf-8")[-20:]


def test_the_picture_of_the_readme_is_a_drawing() -> None:
    assert ElementTree.parse(ROOT / "docs" / "architecture.svg").getroot().tag.endswith("svg")
