"""Insert the files of tests/plugin_example into docs/extend: `python tests/support/acme_pages.py`.

plugin files, pages ⇒ pages with the current code
"""

from __future__ import annotations

import re
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "plugin_example"
PAGES = Path(__file__).parents[2] / "docs" / "extend"
BLOCK = re.compile(r"```python\n# ([\w/]+\.py)\n(.*?)```", re.DOTALL)
PROJECT = re.compile(r"```toml\n.*?```", re.DOTALL)


def python_blocks(text: str) -> dict[str, str]:
    """Return the Python blocks of a page by the file name in their first line."""
    return dict(BLOCK.findall(text))


def update(text: str) -> str:
    """Return a page's text with the current files of the example; tests and short examples stay."""

    def replace_block(match: re.Match[str]) -> str:
        file = EXAMPLE / match[1]
        code = file.read_text(encoding="utf-8") if file.is_file() else match[2]
        return f"```python\n# {match[1]}\n{code}```"

    project = f"```toml\n{(EXAMPLE / 'pyproject.toml').read_text(encoding='utf-8')}```"
    return PROJECT.sub(lambda _: project, BLOCK.sub(replace_block, text))


if __name__ == "__main__":
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(update(page.read_text(encoding="utf-8")), encoding="utf-8")
