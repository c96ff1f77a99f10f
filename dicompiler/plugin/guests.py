"""Third parties' plugins as guests in our process: what they change of it is put back, and loading them has a limit.

In: whose code runs. Out: warnings that name it. `guardian` sees to what cannot be seen from inside.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from dicompiler.base.errors import DicompilerError, UsageError

log = logging.getLogger("dicompiler")

LIMIT = "DICOMPILER_PLUGIN_TIMEOUT"
"""The seconds that loading one plugin may take; LIMIT_S where it is not set."""
LIMIT_S = 60.0

at_work: list[str] = []
"""Whose code runs, the innermost last."""
loads: list[str] = []
"""The plugin that is being loaded."""
on_change: list[Callable[[], None]] = []
"""Called whenever `at_work` has changed."""
interrupts: list[int] = []
"""The signals with which the user has interrupted us."""
watches_interrupts = False
"""Whether `interrupts` is kept: else every KeyboardInterrupt may be the user's."""


class TooLong(BaseException):
    """Loading a plugin takes longer than its limit. No Exception: a plugin may expect any of these."""


def enter(who: str) -> None:
    """From now on the code of `who` runs."""
    at_work.append(who)
    for call in on_change:
        call()


def leave() -> None:
    """The code of the last who entered has ended."""
    at_work.pop()
    for call in on_change:
        call()


def is_ours(error: BaseException) -> bool:
    """Whether an exception that comes out of a plugin is none of its own: the user's interrupt."""
    return isinstance(error, KeyboardInterrupt) and (bool(interrupts) or not watches_interrupts)


def limit_s(env: Mapping[str, str]) -> float:
    """The seconds that loading one plugin may take. UsageError where the environment says what is no time."""
    text = env.get(LIMIT, str(LIMIT_S))
    with suppress(ValueError):
        if 0 < float(text) < 1e7:
            return float(text)
    raise UsageError(f"{LIMIT} is {text!r}: give seconds, more than 0")


@contextmanager
def loading(who: str, seconds: float) -> Iterator[None]:
    """Inside, the plugin `who` is imported and its hooks are called. DicompilerError where that takes longer: only in a
    main thread, no other can be woken."""

    def wake(*_: Any) -> None:
        raise TooLong

    loads.append(who)
    enter(who)
    alarmed = threading.current_thread() is threading.main_thread()
    try:
        with kept(who, everything=True):
            if alarmed:
                before = signal.signal(signal.SIGALRM, wake)
                # Once more each second: a plugin may catch what wakes it.
                signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
            try:
                yield
            finally:
                if alarmed:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    signal.signal(signal.SIGALRM, before)
    except TooLong:
        raise DicompilerError(f"loading it takes longer than {seconds:g} s (allow more with {LIMIT})") from None
    finally:
        loads.pop()
        leave()


@contextmanager
def kept(who: str, everything: bool = False) -> Iterator[None]:
    """Puts back what `who` changes of the process inside, with a warning that says what.

    That is the working directory, the environment, stdout and the handlers of signals; with `everything` also the
    filters of warnings that hide what others say, and functions, classes and methods of dicompiler.
    """
    before = _State(everything)
    try:
        yield
    finally:
        if what := before.put_back():
            _warn(f"{who} changed {', '.join(what)}: put back")


@functools.cache
def _warn(line: str) -> None:
    """Warns once: what a plugin does it does again and again."""
    log.warning(line)


class _State:
    """What a plugin must leave as it is."""

    def __init__(self, everything: bool) -> None:
        self._place, self._environment, self._stdout = _place(), dict(os.environ), sys.stdout
        self._handlers = _handlers()
        self._everything, self._filters = everything, [*warnings.filters]
        self._code = _code() if everything else {}

    def put_back(self) -> list[str]:
        """Makes all as it was; what was not, in words."""
        found = []
        if self._place and _place() != self._place:
            os.chdir(self._place)
            found.append("the working directory")
        if names := _differing(self._environment, os.environ):
            for name in names:
                os.environ.pop(name, None)
                os.environ.update({name: self._environment[name]} if name in self._environment else {})
            found.append(f"the environment ({', '.join(names)})")
        if sys.stdout is not self._stdout:
            sys.stdout = self._stdout
            found.append("sys.stdout")
        if numbers := _differing(self._handlers, _handlers()):
            for number in numbers:
                signal.signal(number, self._handlers[number])
            found.append(f"the handler of {', '.join(signal.Signals(number).name for number in numbers)}")
        if self._everything:
            found += self._put_filters_back() + self._put_code_back()
        return found

    def _put_filters_back(self) -> list[str]:
        """Where a filter is gone, or one has come for whatever anybody says: libraries add narrow ones of their own."""
        come = [one for one in warnings.filters if one not in self._filters]
        broad = [one for one in come if one[1] is None and one[3] is None and one[2].__module__ == "builtins"]
        if not broad and all(one in warnings.filters for one in self._filters):
            return []
        warnings.filters[:] = [one for one in come if one not in broad] + self._filters  # type: ignore[index]
        getattr(warnings, "_filters_mutated", lambda: None)()
        return ["the filters of warnings"]

    def _put_code_back(self) -> list[str]:
        changed = {key: value for key, value in self._code.items() if vars(key[0]).get(key[1]) is not value}
        for (owner, name), value in changed.items():
            setattr(owner, name, value)
        names = sorted(f"{owner.__name__}.{name}" for owner, name in changed)
        return [f"the code of dicompiler ({', '.join(names)})"] if names else []


def _place() -> str:
    """The working directory, '' where it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _differing(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[Any]:
    """The keys of which two mappings say different things, sorted."""
    return sorted(key for key in {*before, *now} if before.get(key) != now.get(key))


def _handlers() -> dict[int, Any]:
    """The handlers of signals; none outside of the main thread, which alone may set them, nor those that are not
    Python's."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    pairs = ((number, signal.getsignal(number)) for number in signal.valid_signals())
    return {int(number): handler for number, handler in pairs if handler is not None}


def _code() -> dict[tuple[Any, str], Any]:
    """The functions and classes of dicompiler's modules, and what is callable in these classes, by owner and name."""
    found: dict[tuple[Any, str], Any] = {}
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] != "dicompiler" or module is None:
            continue
        for attribute, value in vars(module).items():
            if callable(value) and not attribute.startswith("__"):
                found[module, attribute] = value
            if isinstance(value, type) and value.__module__ == name:
                methods = ((key, one) for key, one in vars(value).items() if callable(one) or hasattr(one, "__get__"))
                found.update({(value, key): one for key, one in methods if key not in ("__dict__", "__weakref__")})
    return found
