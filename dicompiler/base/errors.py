"""The errors that users meet: one line each, saying place, cause and remedy. Nothing else here prints or exits."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_MESSAGE_CHARS = 1500
"""Characters of an error or a warning that are shown."""


class DicompilerError(Exception):
    """A mistake in what the user gave us, or something that cannot be compiled. The message is one line."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """For IPython, which asks for it: notebooks show the line alone."""
        return [f"{type(self).__name__}: {one_line(str(self))}"]


class UsageError(DicompilerError):
    """A mistake in how we were called: an unknown name, option or value on the command line."""

    exit_code = 2


class PluginError(DicompilerError):
    """A third party's plugin broke, or gave what its hook does not allow: names it, its distribution and version."""


class RunError(DicompilerError):
    """A compiled program did not finish: names the device and the cause."""


def check_type(given: object, kinds: tuple[type, ...], place: str, wanted: str) -> None:
    """UsageError where a caller gave something else: `expect(5, (str, Path), "compile: output", "a path")`."""
    if not isinstance(given, kinds):
        raise UsageError(f"{place} must be {wanted}, not {one_line(repr(given), 60)} ({type(given).__name__})")


def escape_unprintable(text: str) -> str:
    """The text with what cannot be printed as an escape: names come from files, and a terminal obeys."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def one_line(text: str, limit: int = MAX_MESSAGE_CHARS) -> str:
    """The text, printable, with every run of blanks and line ends as one blank. One longer than `limit` is cut in its
    middle."""
    line = escape_unprintable(" ".join(text.split()))
    cut = f" … ({len(line) - limit} characters) … "
    return line if len(line) <= limit else line[: limit * 2 // 3] + cut + line[-limit // 3 :]


def describe_exception(error: BaseException) -> str:
    """An exception as one line; ours without its type."""
    text = one_line(str(error))
    return text if isinstance(error, DicompilerError) else f"{type(error).__name__}{': ' if text else ''}{text}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an "unknown name" message: `nearest("tile-heigth", passes)` → ` (did you mean 'tile-height'?)`.

    Without a near name it lists what is known, at most twelve names.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f" (did you mean {close[0]!r}?)"
    if not names:
        return " (there are none)"
    shown = ", ".join(names[:12])
    return f" (known: {shown}{', …' if len(names) > 12 else ''})"
