"""The stream for documents that other programs read, such as the JSON of --json.

    command with --json   ⇒ the document on stdout, all other prints on stderr
    command with --quiet  ⇒ documents on stdout, all other prints are discarded

The other prints include those of plugins, and of processes that the command starts.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from typing import TextIO

import click

_DOCUMENT_OPTION = re.compile(r"(^| )(--json|--print-outputs|--format[ =](json|csv|markdown)|(-o|--output)[ =]?-)( |$)")
"""Pattern of the options with which a command prints a document."""
_STDOUT, _STDERR = 1, 2
_separate_stream: TextIO | None = None


def get_result_stream() -> TextIO:
    """Return the stream of documents, which is sys.stdout unless `separate_results` is active."""
    return _separate_stream or sys.stdout


def echo_document(text: str, nl: bool = True) -> None:
    """Print a document, also if the command has the option --quiet."""
    click.echo(text, file=get_result_stream(), nl=nl)


def accept_all_texts() -> None:
    """Let sys.stdout print every text, also names of files that are not valid in the encoding of the locale.

    If the locale supports only ASCII, the output is UTF-8.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        encoding = codecs.lookup(sys.stdout.encoding).name
        is_unicode = encoding in ("ascii", "utf-8")
        errors = "surrogateescape" if is_unicode else "backslashreplace"
        sys.stdout.reconfigure(encoding="utf-8" if is_unicode else encoding, errors=errors)


@contextmanager
def separate_results(arguments: Sequence[str]) -> Iterator[None]:
    """Let only documents be printed to stdout while a command runs that prints documents or has the option --quiet.

    Args:
        arguments: Arguments of the command line.
    """
    global _separate_stream
    is_quiet = "--quiet" in arguments
    if "--help" in arguments or not (is_quiet or _DOCUMENT_OPTION.search(" ".join(arguments))):
        yield
        return
    with ExitStack() as stack:
        other = (
            stack.enter_context(open(os.devnull, "w", encoding="utf-8", errors="replace")) if is_quiet else sys.stderr
        )
        _separate_stream = stack.enter_context(_redirect_descriptor(sys.stdout, _descriptor(other)))
        stack.callback(_end_separation)
        stack.enter_context(redirect_stdout(other))
        yield


def _end_separation() -> None:
    global _separate_stream
    _separate_stream = None


@contextmanager
def _redirect_descriptor(stream: TextIO, other: int) -> Iterator[TextIO]:
    """Redirect this process's descriptor of stdout to the descriptor `other`, and yield a stream to the former stdout.

    If `stream` is not the process's stdout, for example because a notebook replaced it, nothing is redirected.
    """
    if _descriptor(stream) != _STDOUT:
        yield stream
        return
    stream.flush()
    saved = os.dup(_STDOUT)
    os.dup2(other, _STDOUT)
    result = open(os.dup(saved), "w", encoding=stream.encoding, errors=stream.errors)  # noqa: SIM115
    try:
        yield result
    finally:
        # A broken pipe has already been reported when the document was printed.
        with suppress(OSError):
            result.close()
        os.dup2(saved, _STDOUT)
        os.close(saved)


def _descriptor(stream: TextIO) -> int:
    """Return the file descriptor of a stream, or that of stderr if the stream has none."""
    try:
        return stream.fileno()
    except (OSError, io.UnsupportedOperation):
        return _STDERR
