"""What callers of the Python functions give: checked before any work, so that a wrong value is one line; and who wants
to hear of progress.

Arguments → the same, or UsageError;   a callback → called with what the library logs as information, in this thread.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

import onnx

from dicompiler.base.errors import UsageError, check_type, one_line
from dicompiler.cost.cost_model import CostModel
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.wire_dtype import WireFormat
from dicompiler.search.failure_cases import FailureSelection
from dicompiler.search.strategy import Strategy
from dicompiler.target.target_base import Target

P = ParamSpec("P")
R = TypeVar("R")
Shapes = str | Sequence[str] | Mapping[str, Sequence[int]]
"""Sizes of inputs: {"input": (1, 3, 224, 224)}, "input=1x3x224x224", or several such texts."""

INSTRUMENT_METHODS = ("before", "after", "failed")

_PATH_TYPES = (str, Path), "a path"
_ARGUMENT_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "model": ((str, Path, bytes, onnx.ModelProto, Model), "the path of an ONNX file, its bytes or a ModelProto"),
    "platform": ((str, Path, Platform), "the path of a TOML file, a built-in platform's name or a Platform"),
    "strategy": ((str, Strategy), "a text such as 'dp' or a Strategy"),
    "plan": ((str, Path, Plan), "the path of a plan or a Plan"),
    "target": ((str, Target), "a text such as 'sockets' or a Target"),
    "objective": ((str,), "a text such as 'latency'"),
    "cost": ((str, CostModel), "a text such as 'analytic' or a CostModel"),
    "output": _PATH_TYPES,
    "shape": ((str, Mapping, Sequence), "as {'input': (1, 3, 224, 224)} or 'input=1x3x224x224'"),
    "instruments": ((Sequence,), "a list of instruments"),
    "calibrate": _PATH_TYPES,
    "wire": ((str, Mapping, WireFormat), "a text such as 'float16', or types by layer"),
    "samples": _PATH_TYPES,
    "survive": ((int, str, FailureSelection), "a number, 'hosts' or names of devices"),
    "directory": _PATH_TYPES,
    "inputs": ((Mapping,), "arrays by the names of inputs"),
    "frames": ((int,), "a number"),
    "timeout": ((int, float), "seconds"),
}
"""By an argument's name what it may be; None is for what has that as default."""


def validate_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Checks what the function is called with: UsageError for values of other types. Its argument `progress`, where it
    has one, is a callback that hears of what is being done."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs).arguments
        for name, value in given.items():
            if name in _ARGUMENT_TYPES and (value is not None or signature.parameters[name].default is not None):
                check_type(value, _ARGUMENT_TYPES[name][0], f"{function.__name__}: {name}", _ARGUMENT_TYPES[name][1])
        tell = given.get("progress")
        if tell is None:
            return function(*args, **kwargs)
        if not callable(tell):
            raise UsageError(f"{function.__name__}: progress must be a function of a text, not {tell!r}")
        with forward_progress(tell):
            return function(*args, **kwargs)

    return call


@contextmanager
def forward_progress(progress: Callable[[str], object]) -> Iterator[None]:
    """In the block `tell` is called, in a line each, with what the library logs as information in this thread. What it
    raises is raised there."""
    thread = threading.get_ident()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.INFO and record.thread == thread:
                progress(" ".join(record.getMessage().split()))

    log, listener = logging.getLogger("dicompiler"), Listener()
    level = log.level
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(listener)


def format_shapes(given: Shapes) -> tuple[str, ...]:
    """{"input": (1, 3, 224, 224)} → ("input=1x3x224x224",); texts as they are. UsageError for what is no size."""
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Mapping):
        for text in given:
            check_type(text, (str,), "compile: shape", "a text such as 'input=1x3x224x224'")
        return tuple(given)
    for name, sizes in given.items():
        check_type(sizes, (Sequence,), f"compile: shape of {name!r}", "as (1, 3, 224, 224)")
        for size in sizes:
            check_type(size, (int,), f"compile: a size in the shape of {name!r}", "a whole number")
    return tuple(f"{name}={'x'.join(map(str, sizes))}" for name, sizes in given.items())


def check_instruments(given: Sequence[object]) -> None:
    """UsageError for what cannot watch passes: see `Instrument`."""
    for one in given:
        if isinstance(one, type) or not all(callable(getattr(one, name, None)) for name in INSTRUMENT_METHODS):
            raise UsageError(
                f"compile: instruments: {one_line(repr(one), 60)} is none: give objects with the methods "
                f"{', '.join(INSTRUMENT_METHODS)} (see Instrument in dicompiler.plugin_api)"
            )
