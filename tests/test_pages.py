"""The pages of docs/, and the site that is built from them."""

from __future__ import annotations

import ast
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
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import click
import onnx
import pytest
from support import command_reference, console, gallery
from support.boards import Cluster, cluster
from support.browser import browser
from support.console import blocks
from test_documents import check

import dicompiler
from dicompiler.cli.command_line import root
from dicompiler.ir.platform import platform_from_toml
from dicompiler.target.remote.hosts import parse_hosts as hosts_from_toml

ROOT = console.DOCUMENT.parent
BELOW = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
TOPICS = ("regions", "costs", "onnx", "artifacts", "search", "utilities")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *BELOW]
TUTORIAL = console.TUTORIAL.read_text(encoding="utf-8")
HOW_IT_WORKS = (console.DOCS / "understand" / "how-it-works.md").read_text(encoding="utf-8")
PUBLIC_MODULES = (
    *("dicompiler", "dicompiler.networks", "dicompiler.testing", "dicompiler.plugin_api"),
    *(f"dicompiler.plugin_api.{topic}" for topic in TOPICS),
)


@pytest.fixture
def boards(tmp_path: Path) -> Iterator[Cluster]:
    """The tutorial's boards, as network namespaces."""
    names = [host.name for host in platform_from_toml(blocks(TUTORIAL, "toml")[0]).hosts]
    place = tmp_path / "boards"
    place.mkdir()
    with cluster(place, names) as made, made.inside():
        yield made


def test_network_of_the_tutorial_is_the_one_that_its_export_writes() -> None:
    (code,) = blocks(TUTORIAL, "python")
    digest = hashlib.sha256(code.encode()).hexdigest()
    assert onnx.load(console.EXPORTED).producer_version == digest, "run tests/fixtures/torch/make.py"


@pytest.mark.slow
def test_commands_of_the_tutorial_print_the_shown_output(boards: Cluster, tmp_path: Path) -> None:
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
        # The boards of the tutorial are this host, so its two profiles need not be as exact as the readers' profiles.
        is_profile = "profile_run.py" in command.line
        check(replace(command, line=f"{command.line} --repeat 1") if is_profile else command, tmp_path)
    assert (tmp_path / "measured" / "artifact.json").is_file()


def test_program_of_how_it_works_prints_the_shown_output(tmp_path: Path) -> None:
    """All Python of the page is one program; the block after each piece shows its output."""
    printed = console.run_python("".join(blocks(HOW_IT_WORKS, "python")), tmp_path)
    assert printed == "".join(blocks(HOW_IT_WORKS, "text"))


def command_lines(text: str) -> list[list[str]]:
    """Return the words of each `dicompiler …` on a page, in shell blocks and in the text."""
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
    hosts = blocks((console.DOCS / "use" / "boards.md").read_text(), "toml")[0]
    assert hosts_from_toml(hosts).locate_device("pi04", "pi04", "net").python == "dicompiler/bin/python"


def test_pages_that_the_code_refers_to_exist() -> None:
    for package in ("dicompiler", "passes", "targets", "plugins", "tests", "benchmarks"):
        for path in (ROOT / package).rglob("*.py"):
            for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text(encoding="utf-8")):
                assert (ROOT / page).is_file(), f"{path.relative_to(ROOT)}: {page}"


def defined_names(path: Path) -> set[str]:
    """Return the functions, classes and "Class.method"s of a Python file, and the members of its IntEnums."""
    names = set[str]()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)}
            if [ast.unparse(base) for base in node.bases] == ["IntEnum"]:
                names |= {ast.unparse(entry.targets[0]) for entry in node.body if isinstance(entry, ast.Assign)}
    return names


def undefined_names(text: str) -> list[str]:
    """Return the files of a page's tables that do not exist, and the names that are not defined.

    A name before a file must be defined in that file. A name in the last column must be defined in any package.
    """
    packages = [ROOT / package for package in ("dicompiler", "passes", "targets", "plugins")]
    anywhere = set[str]().union(*(defined_names(path) for place in packages for path in place.rglob("*.py")))
    wrong = []
    for row in re.findall(r"^\|.*`[\w/]+\.py` \|.*$", text, re.MULTILINE):
        *_, name, file, meaning = (cell.strip() for cell in row.strip("|").split("|"))
        path = ROOT / file.strip("`")
        here = defined_names(path) if path.is_file() else set()
        wrong += [] if path.is_file() else [file]
        wrong += [name] if name.startswith("`") and name.strip("`") not in here else []
        wrong += [word for word in re.findall(r"`(\w*[A-Z_][\w.]*)`", meaning) if word not in anywhere]
    return wrong


def test_functions_and_files_of_the_code_tour_exist() -> None:
    tour = (console.DOCS / "extend" / "code-tour.md").read_text(encoding="utf-8")
    assert tour.count(".py` |") > 30 and not undefined_names(tour)
    for file in re.findall(r"`([\w/]+\.py)`", tour):
        assert (ROOT / file).is_file() or (ROOT / "targets" / "dicompiler_targets" / "sockets" / file).is_file(), file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("`role_states` |", "`roles_state` |"),
        ("/lowering.py", "/lowered.py"),
        ("`make_tasks`", "`made_tasks`"),
        ("`Plan`", "`Plans`"),
    ],
)
def test_wrong_name_in_the_code_tour_is_found(old: str, new: str) -> None:
    tour = (console.DOCS / "extend" / "code-tour.md").read_text(encoding="utf-8")
    assert old in tour and undefined_names(tour.replace(old, new))


def test_changes_are_one_short_bullet_each() -> None:
    changes = re.findall(r"^- (.*(?:\n  .*)*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(changes) > 50
    assert not [change for change in changes if len(change.split()) > 25]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built in strict mode: a missing link target, picture or heading is an error."""
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", ROOT / ".mkdocs.yml", "-d", place]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return place


@pytest.mark.slow
def test_site_has_all_pages(site: Path) -> None:
    pages = {path.relative_to(console.DOCS).with_suffix(".html") for path in console.DOCS.rglob("*.md")}
    missing = {page for page in pages - {Path("package.html")} if not (site / page).is_file()}
    assert not missing
    places = {entry["location"] for entry in json.loads((site / "search" / "search_index.json").read_text())["docs"]}
    assert {"index.html", "use/boards.html", "extend/strategy.html", "project/changelog.html"} <= places


@pytest.mark.slow
def test_site_documents_all_public_names(site: Path) -> None:
    api_pages = (site / "reference" / "python.html", *(site / "reference" / "plugin-api").glob("*.html"))
    reference = "".join(page.read_text(encoding="utf-8") for page in api_pages)
    for module_name in PUBLIC_MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            assert name == "__version__" or f'id="{module_name}.{name}"' in reference, name
    for option in inspect.signature(dicompiler.compile).parameters:
        assert f"<code>{option}</code></b>" in reference, option


def test_public_modules_are_listed_with_their_summaries() -> None:
    texts = [page.read_text(encoding="utf-8") for page in command_reference.MODULE_PAGES]
    listed = [name for text in texts for _, name, _ in command_reference.MODULE_ROW.findall(text)]
    assert sorted(listed) == sorted(PUBLIC_MODULES)
    for text in texts:
        assert command_reference.update_modules(text) == text, "run `python tests/support/command_reference.py`"


@pytest.mark.slow
def test_site_fits_a_phone_and_paper_and_loads_nothing_from_elsewhere(site: Path) -> None:
    narrow_pages = (
        *("index", "project/comparison", "use/gallery", "gallery/pays"),
        *(f"reference/{name}" for name in ("operators", "commands", "plugins", "troubleshooting", "python", "results")),
        *("reference/formats/plan", "reference/formats/json-output", "reference/plugin-api/index"),
    )
    with browser() as chromium:
        for name in narrow_pages:
            chromium.open(site / f"{name}.html", width=360, height=740)
            width = chromium.value("document.documentElement.scrollWidth")
            assert width <= 360, f"{name}: {width} px"
            assert not [url for url in chromium.requests() if not url.startswith(("file:", "data:", "blob:"))]
        for name in ("index", "use/gallery"):
            chromium.open(site / f"{name}.html")
            assert chromium.pdf().startswith(b"%PDF")
            assert chromium.value("[...document.images].every((image) => image.naturalWidth > 0)")
        for name in (
            "index",
            "reference/formats/plan",
            "reference/formats/profile",
            "reference/results",
        ):  # On paper, nothing may be wider than the page.
            chromium.open(site / f"{name}.html", width=720)
            chromium.call("Emulation.setEmulatedMedia", media="print")
            wide = "[...document.querySelectorAll('article *')].filter((node) => node.scrollWidth > 720).length"
            assert chromium.value(wide) == 0, name


def test_gallery_shows_current_reports(tmp_path: Path) -> None:
    """One report is created again and has the same bytes; each report is on the page, with its picture."""
    text = (console.DOCS / "use" / "gallery.md").read_text(encoding="utf-8")
    current = gallery.make_report("stream", tmp_path)
    assert current == (gallery.PLACE / "stream.html").read_bytes(), "run tests/support/gallery.py"
    for name in gallery.CASES:
        assert f"](../gallery/{name}.html)" in text and f"](../gallery/{name}.png)" in text
        assert (gallery.PLACE / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "</html>" in (gallery.PLACE / f"{name}.html").read_text(encoding="utf-8")[-20:]


def test_picture_of_the_readme_is_an_svg() -> None:
    assert ElementTree.parse(console.DOCS / "architecture.svg").getroot().tag.endswith("svg")
