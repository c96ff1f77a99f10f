"""Language of the product and its documentation: plain technical English and unique class names (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("dicompiler", "passes", "targets", "plugins")
MAX_PER_1000_WORDS = {"what": 2.0, "who|whom|whose": 0.5, "where": 2.0}
MAX_UNUSUAL_OPENINGS = 0.02
"""Share of function docstrings that may open with a wh-word, preposition or pronoun."""
OPENING = re.compile(
    r"(What|Whom|Whose|Who|How|Why|Where|When|Which|Whether|Of|As|By|From|To|For|With|At|On|Beside|Behind|Among|That|"
    r"Those|These|The same|All|Each|Every)\b"
)
# Words that the project's texts must not use, each with its replacement.
IDIOMS = {
    r"anew": "again, or re-created",
    r"beside": "next to, or in addition to",
    r"signs? of life": "heartbeat",
    r"on (its|their) way": "in flight",
    r"travels?": "is sent",
    r"(what|it|that|plan|plans) comes? to": "costs, or is",
    r"holds? .{0,20}back": "bottleneck, or delays",
    r"is none of": "is not one of",
    r"(?<!there )is no (?!longer|more|less|larger|greater|smaller|later)[a-z]+": "is not a",
    r"whole numbers?": "integer",
    r"that which|those who|who(ever)? (asks|waits|decides|reads|writes|sends)": "name the thing",
    r"strangers?|guests?|crew|peel(s|ed)?": "no metaphors",
}


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@cache
def trees() -> tuple[tuple[Path, ast.Module], ...]:
    """Return the syntax trees of all modules."""
    return tuple((path, ast.parse(path.read_text(encoding="utf-8"))) for path in sources())


@cache
def docstrings() -> tuple[tuple[str, str, bool], ...]:
    """Return the place and text of all docstrings, and whether it is a function's docstring."""
    return tuple(find_docstrings())


def find_docstrings() -> Iterator[tuple[str, str, bool]]:
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text, line = ast.get_docstring(node), getattr(node, "lineno", 1)
                if text:
                    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                    yield f"{path.relative_to(ROOT)}:{line}", text, function


@cache
def comments() -> tuple[tuple[str, str], ...]:
    """Return the place and text of all comments."""
    return tuple(find_comments())


def find_comments() -> Iterator[tuple[str, str]]:
    for path in sources():
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            text = token.string.lstrip("#: ").strip()
            if token.type == tokenize.COMMENT and not re.match(r"noqa|type:|pyright|fmt:|!/", text):
                yield f"{path.relative_to(ROOT)}:{token.start[0]}", text


def paragraphs(path: Path, text: str) -> Iterator[tuple[str, str]]:
    """Yield the paragraphs of a Markdown page, without headings, tables and code."""
    code, start, block = False, 1, list[str]()
    for number, line in enumerate([*text.split("\n"), ""], 1):
        if line.strip().startswith("```"):
            code = not code
        elif not code and line.strip() and not line.startswith(("#", "|", "    ", "[", "<")):
            start, block = (start if block else number), [*block, re.sub(r"`[^`]*`", "``", line.strip())]
            continue
        if block:
            yield f"{path.relative_to(ROOT)}:{start}", " ".join(block)
        block = []


def pages() -> Iterator[tuple[str, str]]:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        yield from paragraphs(path, path.read_text(encoding="utf-8"))


def newest_changes() -> Iterator[tuple[str, str]]:
    """Yield the paragraphs of the changelog's first version."""
    path = ROOT / "CHANGELOG.md"
    _, first, *_ = re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    yield from paragraphs(path, first)


def texts(kind: str) -> list[tuple[str, str]]:
    if kind == "docstrings":
        return [(place, text) for place, text, _ in docstrings()]
    return list({"comments": comments, "pages": pages, "changelog": newest_changes}[kind]())


KINDS = ("docstrings", "comments", "pages", "changelog")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("words", MAX_PER_1000_WORDS)
def test_wh_words_are_rare(kind: str, words: str) -> None:
    found = texts(kind)
    count = sum(len(text.split()) for _, text in found)
    hits = [place for place, text in found for _ in re.findall(rf"\b(?:{words})\b", text, re.IGNORECASE)]
    assert 1000 * len(hits) / count < MAX_PER_1000_WORDS[words], f"{len(hits)} of {count} words: {hits[:20]}"


def test_function_docstrings_open_with_a_verb() -> None:
    functions = [(place, text) for place, text, function in docstrings() if function]
    hits = [place for place, text in functions if OPENING.match(text)]
    assert len(hits) <= MAX_UNUSUAL_OPENINGS * len(functions), hits


@pytest.mark.parametrize("kind", KINDS)
def test_standard_terms_are_used(kind: str) -> None:
    hits = [
        f"{place}: {match.group()!r}: write {better}"
        for place, text in texts(kind)
        for idiom, better in IDIOMS.items()
        for match in re.finditer(rf"\b(?:{idiom})\b", text, re.IGNORECASE)
    ]
    assert not hits, "\n".join(hits[:50])


def test_class_names_are_unique() -> None:
    found = defaultdict(list)
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: places for name, places in found.items() if len(places) > 1}
