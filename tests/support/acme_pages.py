"""The code that docs/plugins shows: the files of tests/plugin_example. `python tests/support/acme_pages.py` writes it.

In: a page. Out: its Python blocks by the file name in their first line; the page with the files as they are now.
"""

from __future__ import annotations

import re
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "plugin_example"
PAGES = Path(__file__).parents[2] / "docs" / "plugins"
BLOCK = re.compile(r"```python\n# ([\w/]+\.py)\n(.*?)```", re.DOTALL)
PROJECT = re.compile(r"```toml\n.*?```", re.DOTALL)


def python_blocks(text: str) -> dict[str, str]:
    """File name → code."""
    return dict(BLOCK.findall(text))


def written(text: str) -> str:
    """The page with what it shows of the example as that is now; its tests are written by hand."""

    def block(match: re.Match[str]) -> str:
        code = (EXAMPLE / match[1]).read_text(encoding="utf-8") if "/" in match[1] else match[2]
        return f"```python\n# {match[1]}\n{code}```"

    project = f"```toml\n{(EXAMPLE / 'pyproject.toml').read_text(encoding='utf-8')}```"
    return PROJECT.sub(lambda _: project, BLOCK.sub(block, text))


if __name__ == "__main__":
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
