"""Errors that users see: one line with place, cause and remedy. No other code prints or exits."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

MAX_MESSAGE_CHARS = 1500
"""Maximum number of characters of an error or a warning that are shown."""


class DicompilerError(Exception):
    """Invalid input, or a model that cannot be compiled. The message is one line: place, cause, remedy.

    Attributes:
        exit_code: Exit code of the command that ends with this error.
    """

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in place of a traceback."""
        return [f"{type(self).__name__}: {one_line(str(self))}"]


class UsageError(DicompilerError):
    """Invalid call: an unknown name, option or value.

    Attributes:
        exit_code: Exit code of the command that ends with this error.
    """

    exit_code = 2


class PluginError(DicompilerError):
    """Error in the plugin of a third party. The message names the plugin, its distribution and version."""


class RunError(DicompilerError):
    """Run of an artifact that did not finish. The message names the device and the cause."""


def check_type(given: object, kinds: tuple[type, ...], place: str, wanted: str) -> None:
    """Raise UsageError if an argument has the wrong type.

    Example: `check_type(5, (str, Path), "compile: output", "a path")`.

    Args:
        given: The argument's value.
        kinds: The allowed types.
        place: Prefix of the message, such as "compile: output".
        wanted: The allowed types in words.

    Raises:
        UsageError: `given` is an instance of none of `kinds`.
    """
    if not isinstance(given, kinds):
        raise UsageError(f"{place} must be {wanted}, not {one_line(repr(given), 60)} ({type(given).__name__})")


def escape_unprintable(text: str) -> str:
    """Return the text with escapes in place of unprintable characters, which could control the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def one_line(text: str, limit: int = MAX_MESSAGE_CHARS) -> str:
    """Return the text on one printable line, with whitespace collapsed.

    Args:
        text: Any text.
        limit: Maximum number of characters; longer texts lose their middle part.

    Returns:
        The line.
    """
    line = escape_unprintable(" ".join(text.split()))
    cut = f" … ({len(line) - limit} characters) … "
    return line if len(line) <= limit else line[: limit * 2 // 3] + cut + line[-limit // 3 :]


def describe_exception(error: BaseException) -> str:
    """Return an exception as one line, with its type unless it is a DicompilerError.

    Args:
        error: The exception.

    Returns:
        The line.
    """
    text = one_line(str(error))
    return text if isinstance(error, DicompilerError) else f"{type(error).__name__}{': ' if text else ''}{text}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suggestion to append to an "unknown name" message.

    Example: `did_you_mean("tile-heigth", passes)` is ` (did you mean 'tile-height'?)`.

    Args:
        name: The unknown name.
        known: The known names.

    Returns:
        The nearest known name, or up to twelve known names if none is near.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f" (did you mean {close[0]!r}?)"
    if not names:
        return " (there are none)"
    shown = ", ".join(names[:12])
    return f" (known: {shown}{', …' if len(names) > 12 else ''})"


_MARKER_FILES = {
    "artifact.json": "it is an artifact of 'dicompiler compile'{part}: 'dicompiler run {path}' runs it",
    "front.json": "it is a front of 'dicompiler explore': give one of the artifacts or plans in it",
    "profile_run.py": "it is a package of 'dicompiler profile': run its profile_run.py on the device",
}


def describe_wrong_path(path: str | Path, part: str = "") -> str:
    """Return a hint to append to an error if a path belongs to another output of dicompiler.

    Args:
        path: The path that the user gave.
        part: Relative path of the file in an artifact that may have been meant.

    Returns:
        ": it is an artifact of …"; '' if the path does not belong to an output.
    """
    place = Path(path)
    for name, text in _MARKER_FILES.items():
        if (place / name).is_file():
            meant = f" (its own is {place / part})" if part and (place / part).is_file() else ""
            return ": " + text.format(path=place, part=meant)
    for parent in place.parents[:2]:
        if (parent / "artifact.json").is_file():
            return f": it is part of the artifact {str(parent)!r}: give that"
    return ""
