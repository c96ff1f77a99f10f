"""A command in which third parties' plugins are at work, watched from outside: a process that waits for another.

In: what to run, and the plugins. Out: its exit code; or, where the code of a plugin ends the process, is killed by a
signal, never ends or leaves a thread that never ends, one line that names it. What plugins print goes to stderr.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from dicompiler.base.errors import UsageError
from dicompiler.plugin import guests
from dicompiler.plugin.entry_points import Plugin, top_level_package

PAGE = 1 << 16
TICK_S = 0.2
GRACE_S = 5.0
"""Seconds that a plugin which was told to end has to do so, and threads after the end of the command."""
AGAIN_S = 0.3
"""An interrupt that follows another so soon is the same: a terminal interrupts both processes."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
WORKING, LOADING, ENDED = range(3)


def watched(run: Callable[[], int], plugins: Sequence[Plugin]) -> int:
    """Runs it in a child process and returns its exit code; 1 where a plugin has ended the process."""
    try:
        limit = guests.limit_s(os.environ)
    except UsageError:
        return run()  # which says so where plugins are loaded
    page = mmap.mmap(-1, PAGE)
    alive, held = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    child = os.fork()
    if child:
        os.close(alive)
        return _Watch(child, page, limit + GRACE_S, _one_of(map(str, plugins))).code()
    os.close(held)
    threading.Thread(target=_end_with_parent, args=(alive,), daemon=True).start()
    names = _names(plugins)
    guests.on_change.append(lambda: _note(page, LOADING if guests.loads else WORKING, 0, guests.at_work[-1:]))
    os.register_at_fork(after_in_child=guests.on_change.clear)  # what processes of ours do is not noted there
    guests.watches_interrupts = True
    signal.signal(signal.SIGINT, _interrupt)
    sys.stdout = _own_stdout(names)
    code = run()
    sys.stdout = sys.stderr  # what comes now, from functions called at the end, is no result
    lasting = [
        thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()
    ]
    _note(page, ENDED, code, [f"{_owner(thread, names)}: its thread {thread.name!r}" for thread in lasting])
    return code


@contextlib.contextmanager
def sorted_stdout(plugins: Sequence[Plugin]) -> Iterator[None]:
    """Inside, sys.stdout is stderr to what plugins call: for who runs a command line in a process of its own."""
    before = sys.stdout
    sys.stdout = _Sorted(before, _names(plugins))
    try:
        yield
    finally:
        sys.stdout = before


def _names(plugins: Sequence[Plugin]) -> dict[str, str]:
    return {top_level_package(plugin.value): str(plugin) for plugin in plugins}


def _end_with_parent(alive: int) -> None:
    os.read(alive, 1)  # nothing is ever written: it ends with the one that could
    os._exit(1)


def _note(page: mmap.mmap, state: int, code: int, words: Sequence[str]) -> None:
    text = "; ".join(words).encode()[: PAGE - 3]
    page[: len(text) + 3] = bytes((state, code)) + text + b"\0"


def _interrupt(number: int, _frame: FrameType | None, last: list[float] = [-1.0]) -> None:  # noqa: B006
    now = time.monotonic()
    last[0], before = now, last[0]
    if now - before > AGAIN_S:
        guests.interrupts.append(number)
        raise KeyboardInterrupt


def _own_stdout(packages: Mapping[str, str]) -> Any:
    """What sys.stdout becomes; what writes to the process's first descriptor writes to stderr from now on."""
    own: Any = sys.stdout
    with contextlib.suppress(OSError):  # it is no file, or closed: no descriptor that plugins could write to
        number = sys.stdout.fileno()
        own = open(os.dup(number), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115
        os.dup2(sys.stderr.fileno(), number)
    return _Sorted(own, packages)


class _Sorted:
    """The stream of the command's results; to a plugin's code, and to what it calls, it is stderr."""

    def __init__(self, own: Any, packages: Mapping[str, str]) -> None:
        self._own, self._packages = own, packages

    def __getattr__(self, name: str) -> Any:
        theirs = guests.at_work or _of(sys._getframe(), self._packages)
        return getattr(sys.stderr if theirs else self._own, name)


def _of(frame: FrameType | None, packages: Mapping[str, str]) -> str:
    """Whose code is on the way to a frame; ''."""
    while frame is not None:
        if found := packages.get(str(frame.f_globals.get("__name__", "")).partition(".")[0]):
            return found
        frame = frame.f_back
    return ""


def _owner(thread: threading.Thread, packages: Mapping[str, str]) -> str:
    return _of(sys._current_frames().get(thread.ident or 0), packages) or _one_of(packages.values())


def _one_of(names: Iterable[str]) -> str:
    several = sorted({*names})
    return several[0] if len(several) == 1 else f"one of {', '.join(several)}"


class _Watch:
    """The parent's part: waits for the child, and says what became of it."""

    def __init__(self, child: int, page: mmap.mmap, limit_s: float, plugins: str) -> None:
        self._child, self._page, self._limit_s, self._plugins = child, page, limit_s, plugins
        self._statuses: list[int] = []
        self._sent: list[int] = []

    def code(self) -> int:
        """Waits for the end of the child; the exit code."""
        for number in FORWARDED:
            signal.signal(number, self._forward)
        waiting = threading.Thread(target=lambda: self._statuses.append(os.waitpid(self._child, 0)[1]), daemon=True)
        waiting.start()
        since, before = time.monotonic(), self._noted()
        while waiting.is_alive():
            waiting.join(TICK_S)
            if self._noted() != before:
                since, before = time.monotonic(), self._noted()
            state, code, words = before
            longest = {LOADING: self._limit_s, ENDED: GRACE_S}.get(state)
            if longest is not None and time.monotonic() - since > longest and waiting.is_alive():
                os.kill(self._child, signal.SIGKILL)
                waiting.join()
                return self._stopped(state, code, words)
        return self._ended(os.waitstatus_to_exitcode(self._statuses[0]))

    def _noted(self) -> tuple[int, int, str]:
        state, code, *_ = self._page[:2]
        return state, code, self._page[2:].partition(b"\0")[0].decode(errors="replace")

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self._sent.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, number)

    def _stopped(self, state: int, code: int, words: str) -> int:
        if state == ENDED:
            what = words or self._plugins
            print(f"dicompiler: warning: {what} still runs {GRACE_S:g} s after the end: stopped", file=sys.stderr)
            return code
        return _say(f"{words}: loading it does not end: leave it out (DICOMPILER_PLUGINS names those to load)")

    def _ended(self, status: int) -> int:
        state, code, words = self._noted()
        if state == ENDED:
            return code
        if -status in self._sent:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        how = f"with exit code {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
        if words:
            return _say(f"{words}: its code has ended the process {how}")
        return _say(f"the process has ended {how}, which {self._plugins} may have caused")


def _say(line: str) -> int:
    print(f"dicompiler: error: {line}", file=sys.stderr)
    return 1
