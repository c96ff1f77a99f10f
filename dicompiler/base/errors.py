"""Exceptions with one-line messages (place, cause, remedy), and functions that write such messages."""

from __future__ import annotations

import difflib
import errno
import itertools
from collections.abc import Iterable
from pathlib import Path

MAX_MESSAGE_CHARS = 1500
"""Number of characters above which the middle of an error or a warning is omitted."""
ALLOW_MORE_TIME = "allow more time (--timeout; in Python: timeout)"
"""Remedy in error messages if a time limit was too short."""


class DicompilerError(Exception):
    """Invalid input, or a model that cannot be compiled. The message is one line: place, cause, remedy.

    Attributes:
        exit_code: Exit code of a command that fails with this error.
    """

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {one_line(str(self))}"]


class UsageError(DicompilerError):
    """Invalid call: an unknown name, option or value, or arguments that contradict each other or the model.

    A missing or invalid file is not a usage error.

    Attributes:
        exit_code: Exit code of a command that fails with this error.
    """

    exit_code = 2


class UnknownNameError(UsageError):
    """A name that no built-in item has, and no item of a loaded plugin."""


class PluginError(DicompilerError):
    """Error in the plugin of a third party. The message names the plugin, its distribution and version."""


class RunError(DicompilerError):
    """Failed run of an artifact. The message names the device and the cause."""


def check_type(given: object, kinds: tuple[type, ...], place: str, wanted: str) -> None:
    """Raise UsageError if an argument has the wrong type.

    Example: `check_type(5, (str, Path), "compile: output", "a path")`.

    Args:
        given: The argument's value.
        kinds: The allowed types.
        place: Beginning of the error message, such as "compile: output".
        wanted: The allowed types in words, such as "a path".

    Raises:
        UsageError: `given` has none of the allowed types.
    """
    if not isinstance(given, kinds):
        raise UsageError(f"{place} must be {wanted}, not {one_line(repr(given), 60)} ({type(given).__name__})")


def escape_unprintable(text: str) -> str:
    """Return `text` with backslash escapes in place of unprintable characters, which could control the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def one_line(text: str, limit: int = MAX_MESSAGE_CHARS) -> str:
    """Return a text as one printable line, with single blanks in place of line breaks.

    Args:
        text: Any text.
        limit: Number of characters above which the middle of the line is omitted.

    Returns:
        The line.
    """
    line = escape_unprintable(" ".join(text.split()))
    cut = f" … ({len(line) - limit} characters) … "
    return line if len(line) <= limit else line[: limit * 2 // 3] + cut + line[-limit // 3 :]


def describe_exception(error: BaseException) -> str:
    """Return an exception's message on one line, preceded by its type unless it is a DicompilerError."""
    text = one_line(str(error))
    return text if isinstance(error, DicompilerError) else f"{type(error).__name__}{': ' if text else ''}{text}"


_OUT_OF_MEMORY = ("can't start new thread", "failed to map segment", "cannot allocate memory", "bad_alloc")
"""Parts of messages, in lower case, with which libraries report that they cannot allocate memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an exception, or one of its causes, reports that memory could not be allocated."""
    chain: BaseException | None = error
    while chain is not None:
        is_memory_error = isinstance(chain, MemoryError) or getattr(chain, "errno", None) == errno.ENOMEM
        if is_memory_error or any(text in str(chain).lower() for text in _OUT_OF_MEMORY):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def _common_prefix_length(first: str, second: str) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _similarity(name: str, known_name: str) -> tuple[int, float, int]:
    """Return a key for comparisons that is larger for more similar names.

    It contains the number of common letters at both ends, the share of common letters, and the length of the common
    beginning. "--strategy" is therefore more similar to "--strategies" than to "--state", "pi02" to "pi2" than to
    "pi01", and "rpi44" to "rpi4x44" than to "rpi5x44".
    """
    start = _common_prefix_length(name, known_name)
    end = _common_prefix_length(name[start:][::-1], known_name[start:][::-1])
    return start + end, difflib.SequenceMatcher(None, known_name, name).ratio(), start


def did_you_mean(name: str, known: Iterable[str], listing: str = "") -> str:
    """Return a suggestion to append to an "unknown name" message.

    Example: `did_you_mean("tile-heigth", passes)` is ` (did you mean 'tile-height'?)`.

    Args:
        name: The unknown name.
        known: The valid names.
        listing: A command that prints all valid names. It is named if the list is not complete.

    Returns:
        The most similar valid name as a question. If no name is similar, a list of up to twelve valid names.
    """
    names = sorted(known)
    by_lower_case = {known_name.lower(): known_name for known_name in names}
    longer = [known_name for known_name in by_lower_case if len(name) > 2 and known_name.startswith(name.lower())]
    close = [min(longer, key=len)] if longer else difflib.get_close_matches(name.lower(), by_lower_case, 3, 0.6)
    if close:
        closest = max(close, key=lambda known_name: _similarity(name.lower(), known_name))
        return f" (did you mean {by_lower_case[closest]!r}?)"
    if not names:
        return " (there are none)"
    rest = f", …{f'; see {listing!r}' if listing else ''}" if len(names) > 12 else ""
    return f" (known: {', '.join(names[:12])}{rest})"


_HINT_BY_MARKER_FILE = {
    "artifact.json": "it is an artifact of 'dicompiler compile'{part}: 'dicompiler run {path}' runs it",
    "front.json": "it is a Pareto front of 'dicompiler explore': give one of the artifacts or plans in it",
    "profile_run.py": "it is a package of 'dicompiler profile': run its profile_run.py on the device",
}


def describe_wrong_path(path: str | Path, part: str = "") -> str:
    """Return a hint for an error message if `path` is a model, or is in a directory that dicompiler wrote; else "".

    An example of a hint is ": it is an artifact of …".

    Args:
        path: The path that the user gave.
        part: File in an artifact that the user probably meant, as a relative path such as "reference/model.onnx".
    """
    place = Path(path)
    for name, text in _HINT_BY_MARKER_FILE.items():
        if (place / name).is_file():
            meant = f" (did you mean {place / part}?)" if part and (place / part).is_file() else ""
            return ": " + text.format(path=place, part=meant)
    for parent in place.parents[:2]:
        if (parent / "artifact.json").is_file():
            return f": it is part of the artifact {str(parent)!r}: give the path of the artifact"
    if place.suffix == ".onnx" and place.is_file():
        return (
            f": it is a model: 'dicompiler compile {path} --platform rpi4x4 -o build' compiles it, and "
            "'dicompiler run build' runs the artifact"
        )
    return ""
