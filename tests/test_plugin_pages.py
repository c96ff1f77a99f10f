"""docs/extend: a page for each hook, with the code of tests/plugin_example and tests that run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support import acme_pages, api_pages
from support.public_api import PUBLIC

import dicompiler
from dicompiler import testing
from dicompiler.plugin import hookspecs
from dicompiler.plugin.plugin_kinds import PLUGIN_KINDS

ROOT = Path(__file__).parents[1]
CODE_TOUR = "code-tour.md"  # This page is not about a hook; tests/test_pages.py checks it.
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in sorted(acme_pages.PAGES.glob("*.md"))
    if path.name != CODE_TOUR
}
INDEX = PAGES["index.md"]
ROWS = re.findall(r"^\| [^|]+ \| `(\w+)` \| \[[\w.-]+\]\(([\w.-]+)\) \| `(\w+)` \|$", INDEX, re.MULTILINE)
HOOKS = sorted(name for name, value in vars(hookspecs).items() if hasattr(value, f"{hookspecs.PLUGGY_PROJECT}_spec"))


def page_tests(page: str) -> dict[str, str]:
    """Return the blocks of a page that are tests, by file name."""
    blocks = acme_pages.python_blocks(PAGES[page])
    return {name: code for name, code in blocks.items() if name.startswith("test_")}


def test_every_hook_has_a_page_a_check_and_an_example() -> None:
    assert sorted(hook for hook, _, _ in ROWS) == HOOKS == sorted(kind.hook for kind in PLUGIN_KINDS.values())
    assert {page for _, page, _ in ROWS} == {*PAGES} - {"index.md"}
    checks = {kind.hook: testing.CHECKS[name].__name__ for name, kind in PLUGIN_KINDS.items()}
    example_hooks = acme_pages.EXAMPLE.joinpath("acme_dicompiler", "__init__.py").read_text()
    for hook, page, check in ROWS:
        assert check == checks[hook]
        assert check in testing.__all__
        assert f"def {hook}(" in example_hooks
        assert any(f"{check}(" in code for code in page_tests(page).values())


def test_pages_show_the_files_of_the_example() -> None:
    for name, text in PAGES.items():
        assert acme_pages.update(text) == text, f"{name}: run `python tests/support/acme_pages.py`"
    shown = {name for text in PAGES.values() for name in acme_pages.python_blocks(text) if "/" in name}
    package = acme_pages.EXAMPLE / "acme_dicompiler"
    assert shown == {f"acme_dicompiler/{path.name}" for path in package.glob("*.py")}


@pytest.mark.parametrize("page", api_pages.PAGES, ids=lambda page: page.name)
def test_api_pages_list_the_current_names(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert api_pages.update(text) == text, "run `python tests/support/api_pages.py`"
    assert text.count("\n- `") >= 10
    assert "GenericAlias" not in text


def test_python_page_lists_attributes_and_records_of_sessions() -> None:
    text = (api_pages.REFERENCE / "python.md").read_text(encoding="utf-8")
    for name in ("events: list[RunEvent]", "swaps: list[Swap]", "adaptations: list[Adaptation]"):
        assert f"    - `{name}`: " in text
    for name in ("RunResult", "RunEvent", "FrameTimes"):
        assert getattr(dicompiler, name).__name__ == name and f"- `{name}(" in text


def test_api_pages_list_each_public_module() -> None:
    listed = [match[2] for page in api_pages.PAGES for match in api_pages.BLOCK.finditer(page.read_text("utf-8"))]
    assert sorted(listed) == sorted(PUBLIC)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_tests_of_a_page_run(page: str, tmp_path: Path) -> None:
    found = page_tests(page)
    assert found
    for name, code in found.items():
        (tmp_path / name).write_text(code)
        path = os.pathsep.join([str(acme_pages.EXAMPLE), *sys.path])
        done = subprocess.run(
            [sys.executable, name], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_exist(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", PAGES[page])
    assert all((acme_pages.PAGES / link).is_file() for link in links)
    assert page != "index.md" or len([link for link in links if "/" not in link and link != CODE_TOUR]) == len(HOOKS)


def test_pages_state_the_current_hook_version_and_entry_point_groups() -> None:
    assert f"`dicompiler_api = {hookspecs.API_VERSION}`" in INDEX
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert all(f"group `{group}`" in "".join(PAGES.values()) for group in points)
