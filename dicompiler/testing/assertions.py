"""Assertions for checks of plugins. Their errors name the plugin, the sample (test problem) and the cause."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from dicompiler.base.errors import describe_exception, one_line
from dicompiler.plugin.plugin_kinds import check_registrable, plugin_kind
from dicompiler.plugin_api import registry
from dicompiler.testing.fingerprints import field_fingerprints

log = logging.getLogger("dicompiler.testing")

LIMIT_S = 300.0
"""Default limit in seconds for the calls of a plugin with one sample (test problem)."""


class TimeLimitError(KeyboardInterrupt):
    """Raised in a `with time_limit(…)` block after the limit.

    It is a KeyboardInterrupt, so that `except Exception` does not catch it, and libraries end their processes as after
    Ctrl-C.
    """


class _ProcessEndError(BaseException):
    """Raised if a plugin calls `os._exit`, which would otherwise end the test run."""


def require(condition: Any, message: str) -> None:
    """Raise AssertionError if a condition is false, even if Python runs with -O."""
    if not condition:
        raise AssertionError(message)


@contextmanager
def error_context(place: str) -> Iterator[None]:
    """Turn any exception in the `with` block into an AssertionError, with `place` before its message.

    This includes `sys.exit` and `os._exit`, which would end the test run without an error.
    """
    try:
        with _process_end_as_error():
            yield
    except (Exception, SystemExit, TimeLimitError, _ProcessEndError) as error:
        raise AssertionError(f"{place}: {_describe_error(error)}") from error


@contextmanager
def checking(place: str) -> Iterator[None]:
    """Log `place` as progress, and put it before the message of errors in the `with` block."""
    log.info("checking %s", place)
    with error_context(place):
        yield


def _describe_error(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it ends the process by sys.exit({error.code!r}): raise DicompilerError instead"
    if isinstance(error, TimeLimitError):
        return f"{one_line(str(error))}: end sooner, or increase limit_s of the check"
    is_message = isinstance(error, AssertionError | _ProcessEndError)
    return one_line(str(error)) if is_message else describe_exception(error)


@contextmanager
def _process_end_as_error() -> Iterator[None]:
    """Let `os._exit` raise an error in this thread, instead of ending the process."""
    real_exit, owner = os._exit, (os.getpid(), threading.get_ident())

    def exit_process(status: int) -> NoReturn:
        # In forked children and other threads, `os._exit` still ends the process.
        if (os.getpid(), threading.get_ident()) != owner:
            real_exit(status)
        raise _ProcessEndError(f"it ends the process by os._exit({status}): raise DicompilerError instead")

    os._exit = exit_process
    try:
        yield
    finally:
        os._exit = real_exit


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError, which names the running function, if the `with` block takes longer.

    The limit has no effect outside the main thread and on systems without timer signals.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(_signal: int, frame: FrameType | None) -> None:
        code = None if frame is None else frame.f_code
        place = "" if code is None else f" (it is in {code.co_qualname}, {os.path.basename(code.co_filename)})"
        raise TimeLimitError(f"it did not end within {seconds:g} s{place}")

    handler = signal.signal(signal.SIGALRM, stop)
    # Repeat the timer, to interrupt a plugin again that catches the error.
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def unchanged(**arguments: Any) -> Iterator[None]:
    """Raise AssertionError if the `with` block changes one of the arguments.

    A plugin must not change its arguments, because its callers use them again.
    """
    before = field_fingerprints(arguments)
    try:
        yield
    finally:  # Check after an error too, because a changed argument is often its cause.
        after = field_fingerprints(arguments)
        changed = ", ".join(name for name in before if before[name] != after.get(name))
        require(not changed, f"it changes its argument {changed}: change a copy")


def describe(plugin: Any) -> str:
    """Return a plugin's kind, name and origin, such as "strategy 'x' of module my_module"."""
    return registry().describe(plugin_kind(type(plugin)), plugin)


def as_instance(plugin: Any) -> Any:
    """Return `plugin`, or an instance with default options if `plugin` is a class.

    Raises:
        AssertionError: The class cannot be registered.
    """
    cls = plugin if isinstance(plugin, type) else type(plugin)
    with error_context(f"{cls.__module__}.{cls.__name__}"):
        check_registrable(cls)
        return plugin() if plugin is cls else plugin
