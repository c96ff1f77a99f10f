"""The page of the package index: README.md without what leads into the repository, whose address it cannot know.
`python tests/support/package_page.py` writes it.

In: README.md. Out: docs/package.md, in which every link is a whole address.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "package.md"


def written() -> str:
    """The page's text."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"^!\[.*\n\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text)
    return text.replace("in a clone of this repository", "in its source (the sdist has all pages, examples and tests)")


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
