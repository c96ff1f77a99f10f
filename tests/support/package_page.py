"""Generate the page for the package index: `python tests/support/package_page.py`.

README.md ⇒ docs/package.md, without links into the repository, whose address is unknown
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "package.md"


def make_page() -> str:
    """Return the page's text."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"^!\[.*\n\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text)
    source = "In the source (the sdist has all pages, examples and tests)"
    return re.sub(r"In a clone of this\s+repository", source, text)


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
