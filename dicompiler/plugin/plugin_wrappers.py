"""Guards: what third parties' plugins provide is watched once, where the registry hands it out.

Class, operator rule or platform family → the same, whose exceptions and wrong results are PluginErrors that name the
plugin, its distribution and version. What comes with dicompiler is handed out as it is and costs nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from dicompiler.base.errors import DicompilerError, PluginError, describe_exception
from dicompiler.base.schema import load_json, validate
from dicompiler.cost.cost_model import CostModel, validate_seconds
from dicompiler.ir.cluster import Device
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.operator_rule import OpCost, Operation, OperatorRule
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import LayerShare, Plan
from dicompiler.ir.platform import Platform, PlatformFamily
from dicompiler.ir.program import Program
from dicompiler.ir.regions import Region, Shape
from dicompiler.plugin import guests
from dicompiler.plugin.moved import remedy
from dicompiler.plugin.pieces import describe_piece_error
from dicompiler.search.pareto_front import ParetoFront
from dicompiler.target.manifest import ARTIFACT_FILE
from dicompiler.target.run_records import RunOptions, RunResult
from dicompiler.target.target_base import Target

T = TypeVar("T")
_KEPT = ("pass", "strategy", "target", "platform")
_NOTHING = contextlib.nullcontext()


class _InvalidResult(Exception):
    """What was given is not what must be given; where: the end of the name of what gave it."""

    def __init__(self, what: str, where: str = "") -> None:
        super().__init__(what)
        self.where = where


@dataclass(frozen=True)
class CallGuard:
    """Whose things are watched, and how errors name them.

    kind: the word for one of them ("strategy"). origin: "of acme-dicompiler 1.2 (plugin 'acme')". plugin: "plugin
    'acme' of acme-dicompiler 1.2", '' for a class that no plugin provides: its exceptions stay what they are.
    packages: the top-level ones whose code is the plugin's.
    """

    kind: str
    origin: str
    plugin: str = ""
    packages: frozenset[str] = frozenset()

    def describe(self, thing: Any) -> str:
        """The thing as errors name it: "strategy 'acme-round-robin' of acme-dicompiler 1.2 (plugin 'acme')"."""
        return f"{self.kind} {thing.name!r} {self.origin}"

    def call(self, name: str, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """What the plugin's function gives. PluginError where it breaks; what it says by a DicompilerError stays."""
        if self.plugin:
            guests.enter(self.plugin)
        try:
            # A rule or a cost model is called so often that what it changes of the process is not looked for.
            with guests.kept(self.plugin) if self.plugin and self.kind in _KEPT else _NOTHING:
                return function(*arguments, **options)
        except DicompilerError:
            raise
        except _InvalidResult as wrong:
            raise PluginError(f"{name}{wrong.where}: {wrong}") from wrong.__cause__
        except BaseException as error:
            if not self.plugin or guests.is_ours(error):
                raise
            # Of what is called in the midst of something else the place in its code says enough.
            who = name if self.kind in ("pass", "strategy", "target") else self.plugin
            line = (
                format_plugin_error(error, dict.fromkeys(self.packages, who))
                or f"{who}: {describe_exception(error)}{remedy(error)}"
            )
            raise PluginError(line) from error
        finally:
            if self.plugin:
                guests.leave()


def format_plugin_error(error: BaseException, packages: Mapping[str, str]) -> str | None:
    """The line for an exception in a plugin's code: whose, what was raised, and the innermost place of that code; None
    where no such code is on the way. packages: top-level package → what to call whose it is."""
    line = None if error.__cause__ is None else format_plugin_error(error.__cause__, packages)
    if line is not None:
        return line
    for frame, number in reversed([*traceback.walk_tb(error.__traceback__)]):
        if _frame_package(frame) in packages:
            code = frame.f_code
            place = f"(in {code.co_qualname}, {code.co_filename.rpartition('/')[2]}:{number})"
            return f"{packages[_frame_package(frame)]}: {describe_exception(error)}{remedy(error)} {place}"
    return None


def _frame_package(frame: FrameType) -> str:
    """The top-level package whose code a frame runs."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def wrap_provided(value: Any, name: str, guard: CallGuard) -> Any:
    """What a plugin provides by that name, watched."""
    if isinstance(value, OperatorRule):
        name = f"rule {name!r} of {guard.plugin}"
        return replace(
            value,
            piece=WrappedFunction(value.piece, name, guard, _check_piece) if value.can_cut else value.piece,
            reduction_length=value.reduction_length
            and WrappedFunction(value.reduction_length, name, guard, _unchanged),
            cost=WrappedFunction(value.cost, name, guard, _check_op_cost),
            read_share=value.read_share and WrappedFunction(value.read_share, name, guard, _unchanged),
        )
    if isinstance(value, PlatformFamily):
        made = _instance_check(Platform, "make()")
        return replace(value, make=WrappedFunction(value.make, f"platform {name!r} of {guard.plugin}", guard, made))
    return wrap_class(inspect.unwrap(value), guard)


@dataclass(frozen=True)
class WrappedFunction:
    """A function of a rule or a family, called `name` in errors; `check` is one of those below. It can be pickled where
    these can, as layers go to other processes with their rules."""

    __wrapped__: Callable[..., Any]
    name: str
    guard: CallGuard
    check: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        """What the function gives. PluginError where it breaks or gives what is wrong."""
        return self.guard.call(self.name, lambda: self.check(self, self.__wrapped__(*arguments), *arguments))


@functools.cache
def wrap_class(cls: Any, guard: CallGuard) -> Any:
    """The class, its methods watched: a subclass that differs in nothing else, also as text, compared or pickled."""
    same = {name: getattr(cls, name) for name in ("__doc__", "__module__", "__qualname__", "__hash__")}
    subclass = type(cls)(cls.__name__, (cls,), {**same, "__slots__": (), "__wrapped__": cls, "__guard__": guard})
    subclass.__eq__, subclass.__reduce_ex__ = _make_eq(cls), _make_reduce(subclass)
    for name, check in _RESULT_CHECKS[guard.kind].items():
        setattr(subclass, name, _wrap_method(subclass, guard, name, check))
    if guard.kind == "pass":
        subclass.provenance = guard.origin
    if guard.kind == "strategy" and guard.plugin:
        subclass.check_feasible = _wrap_check_feasible(subclass, guard)
    return subclass


def make_instance(cls: Any, make: Callable[..., T], *arguments: Any) -> T:
    """`make(cls, *arguments)`, which makes an instance; PluginError where that breaks in a class that is guarded."""
    guard: CallGuard | None = getattr(cls, "__guard__", None)
    return make(cls, *arguments) if guard is None else guard.call(guard.plugin, make, cls, *arguments)


def with_wrapped_class(thing: T, cls: Any) -> T:
    """`thing` as an instance of `cls`, its class guarded: a copy unless it is guarded already."""
    return thing if type(thing) is cls or hasattr(type(thing), "__guard__") else _set_class(copy.copy(thing), cls)


def _set_class(thing: T, cls: Any) -> T:
    object.__setattr__(thing, "__class__", cls)  # it may be frozen
    return thing


def _make_eq(cls: Any) -> Callable[[Any, Any], Any]:
    """Instances of a class and of the same guarded are equal where their fields are."""

    def equal(self: Any, other: Any) -> Any:
        return cls.__eq__(self, with_wrapped_class(other, type(self)) if type(other) is cls else other)

    return equal


def _make_reduce(subclass: Any) -> Callable[[Any, Any], tuple[Any, ...]]:
    """For pickle and copy: the class by its name is the one without guard."""

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        function, arguments, *state = super(subclass, self).__reduce_ex__(protocol)
        plain = tuple(subclass.__wrapped__ if one is subclass else one for one in arguments)
        return _restore_wrapped, (subclass.__guard__, function, plain), *state

    return reduce


def _restore_wrapped(guard: CallGuard, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    thing = function(*arguments)
    cls: Any = type(thing)
    return _set_class(thing, wrap_class(cls, guard))


def _wrap_method(subclass: Any, guard: CallGuard, name: str, check: Callable[..., Any]) -> Callable[..., Any]:
    """The method of that name, what it gives looked at by `check`, which raises _Wrong."""
    signature = inspect.signature(getattr(subclass, name))

    @functools.wraps(getattr(subclass, name))
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        call = getattr(super(subclass, self), name)

        def checked() -> Any:
            given = call(*arguments, **options)
            return check(self, given, *(signature.bind(self, *arguments, **options).args[1:] if options else arguments))

        # A plugin may expect exceptions of its own from what it calls of itself.
        inside = _frame_package(sys._getframe(1)) in guard.packages
        return call(*arguments, **options) if inside else guard.call(guard.describe(self), checked)

    return method


def _wrap_check_feasible(subclass: Any, guard: CallGuard) -> Callable[..., None]:
    """`Strategy.check_feasible`, which says whose plan it is that cannot be carried out."""

    def check_feasible(self: Any, problem: Any, plan: Any) -> None:
        try:
            super(subclass, self).check_feasible(problem, plan)
        except PluginError:
            raise
        except DicompilerError as error:
            raise PluginError(f"{guard.describe(self)} made a plan that cannot be carried out: {error}") from error
        except Exception as error:
            raise PluginError(f"{guard.describe(self)} made what is no plan: {describe_exception(error)}") from error

    return check_feasible


def _unchanged(_thing: Any, given: Any, *_: Any) -> Any:
    return given


def _instance_check(cls: type, what: str) -> Callable[..., Any]:
    """The check that a method, `what`, returns an instance of `cls`."""

    def check(_thing: Any, given: Any, *_: Any) -> Any:
        if not isinstance(given, cls):
            raise _InvalidResult(f"{what} returned {type(given).__name__} instead of a {cls.__name__}")
        return given

    return check


def _check_piece(_call: WrappedFunction, given: Any, operation: Operation, region: Region, _reduce: Any) -> Any:
    if fault := describe_piece_error(operation, region, given):
        raise _InvalidResult(fault, f", for node {operation.node.name!r}")
    return given


def _check_op_cost(_call: WrappedFunction, given: Any, operation: Operation, _out: Shape, _needs: Any) -> Any:
    if not isinstance(given, OpCost) or not all(isinstance(count, Integral) and count >= 0 for count in given):
        what = f"its cost is {given!r}: give an Effort of whole numbers of at least 0"
        raise _InvalidResult(what, f", for node {operation.node.name!r}")
    return given


def _check_emitted(target: Target, given: None, _compilation: PipelineState, directory: Path) -> None:
    """There is an artifact.json, and it is of this target."""
    if not (directory / ARTIFACT_FILE).is_file():
        raise _InvalidResult(f"emit() wrote no {ARTIFACT_FILE}")
    try:
        document = load_json(directory / ARTIFACT_FILE)
        validate(document, "artifact", ARTIFACT_FILE)
    except DicompilerError as error:
        raise _InvalidResult(str(error)) from error
    if document["target"] != target.name:
        raise _InvalidResult(f"{ARTIFACT_FILE}: target is {document['target']!r}: write {target.name!r} there")
    return given


def _check_run(target: Target, given: Any, _directory: Path, frames: Sequence[Any], options: RunOptions) -> Any:
    """What runs gives outputs of as many frames as were to be kept."""
    _instance_check(RunResult, "run()")(target, given)
    kept = len(frames) if options.kept_frames is None else min(options.kept_frames, len(frames))
    if len(given.outputs) != kept:
        raise _InvalidResult(f"run() returned outputs of {len(given.outputs)} frames: {kept} were to be kept")
    return given


def _check_memory(_target: Target, given: Any, program: Program) -> Any:
    missing = [device.device for device in program.devices if device.device not in given]
    if missing:
        raise _InvalidResult(f"memory() says nothing of device {missing[0]!r}")
    return given


def _check_seconds(
    _cost: CostModel, given: Any, _layers: LayerGraph, layer: Layer, _share: LayerShare, device: Device
) -> float:
    if fault := validate_seconds(given, layer, device):
        raise _InvalidResult(fault)
    return float(given)


def _check_fill(
    _cost: Any, given: Any, _layers: Any, layer: Layer, shares: Sequence[Any], devices: Sequence[Device]
) -> Any:
    shape = (len(shares), len(devices))
    if not isinstance(given, np.ndarray) or given.shape != shape:
        raise _InvalidResult(f"fill() returned no array (shares, devices), here {shape}")
    right = (given >= 0) & ((given < math.inf) | [not device.can_compute for device in devices])
    for row, column in np.argwhere(~right):
        raise _InvalidResult(validate_seconds(given[row, column], layer, devices[column]))
    return given


_RESULT_CHECKS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "pass": {"run": _instance_check(PipelineState, "run()")},
    "strategy": {
        "plan": _instance_check(Plan, "plan()"),
        "front": _instance_check(ParetoFront, "front()"),
        "own_platform": _unchanged,
    },
    "target": {
        "emit": _check_emitted,
        "run": _check_run,
        "memory": _check_memory,
        **dict.fromkeys(("install", "occupied", "proofs", "tolerances"), _unchanged),
    },
    "cost model": {"seconds": _check_seconds, "fill": _check_fill},
}
"""Kind → the methods that are watched, each with the check of what it gives: (thing, given, *arguments) → result."""
