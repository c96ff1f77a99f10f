"""Errors have one line, their own exit codes, and suggestions for unknown names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dicompiler.base.errors import DicompilerError, PluginError, RunError, UsageError, did_you_mean, one_line

NAMES = st.text(st.characters(categories=["L"]), min_size=1, max_size=12)


def test_exit_codes_are_2_for_usage_errors_and_1_otherwise() -> None:
    codes = {kind.__name__: kind.exit_code for kind in (DicompilerError, UsageError, PluginError, RunError)}
    assert codes == {"DicompilerError": 1, "UsageError": 2, "PluginError": 1, "RunError": 1}
    assert all(issubclass(kind, DicompilerError) for kind in (UsageError, PluginError, RunError))


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (["tile-height", "tile-grid", "place"], " (did you mean 'tile-height'?)"),
        (["TILE-HEIGHT", "place"], " (did you mean 'TILE-HEIGHT'?)"),
        (["place", "fuse"], " (known: fuse, place)"),
        ([], " (there are none)"),
    ],
)
def test_suggests_a_near_name_or_lists_all_names(known: list[str], expected: str) -> None:
    assert did_you_mean("tile-heigth", known) == expected


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("--strategy", ["--state", "--strategies"], "--strategies"),
        ("pi02", ["pi01", "pi2"], "pi2"),
        ("pi2", ["pi01", "pi02"], "pi02"),
        ("rpi44", ["rpi5x44", "rpi4x44"], "rpi4x44"),
    ],
)
def test_suggests_the_most_similar_name(name: str, known: list[str], expected: str) -> None:
    assert did_you_mean(name, known) == f" (did you mean {expected!r}?)"


def test_lists_at_most_twelve_names() -> None:
    names = [f"{letter * 3}" for letter in "abcdefghijklmn"]
    assert did_you_mean("?", names[:12]) == f" (known: {', '.join(names[:12])})"
    assert did_you_mean("?", names) == f" (known: {', '.join(names[:12])}, …)"
    assert did_you_mean("?", names, "dicompiler list x").endswith(", lll, …; see 'dicompiler list x')")
    assert "see" not in did_you_mean("?", names[:12], "dicompiler list x")


@given(NAMES, st.lists(NAMES, max_size=20))
def test_suggests_the_name_itself_in_any_order(name: str, others: list[str]) -> None:
    assert (
        did_you_mean(name, [*others, name])
        == f" (did you mean {name!r}?)"
        == did_you_mean(name, [name, *reversed(others)])
    )


@given(st.text("ab\u00e9 \t\r\n\v\f\x1c\x85\u2028\u2029\u3000"))
def test_one_line_keeps_all_words(text: str) -> None:
    line = one_line(text)
    assert len(line.splitlines()) <= 1
    assert line.split() == text.split()
    assert one_line(line) == line


def test_notebooks_show_only_the_line() -> None:
    assert UsageError("run: no\nframes")._render_traceback_() == ["UsageError: run: no frames"]
