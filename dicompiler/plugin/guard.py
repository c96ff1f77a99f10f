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

from dicompiler.base.errors import DicompilerError, PluginError, cause
from dicompiler.base.schema import load_json, validate
from dicompiler.cost.model import CostModel, fault_of_seconds
from dicompiler.ir.compilation import Compilation
from dicompiler.ir.devices import Device
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.plan import Plan, Share
from dicompiler.ir.platform import Platform, PlatformFamily
from dicompiler.ir.program import Program
from dicompiler.ir.regions import Region, Shape
from dicompiler.ir.rule import Effort, Operation, OperatorRule
from dicompiler.plugin import guests
from dicompiler.plugin.moved import remedy
from dicompiler.plugin.pieces import fault_of
from dicompiler.search.fronts import Front
from dicompiler.target.interface import Target
from dicompiler.target.manifest import MANIFEST
from dicompiler.target.records import RunOptions, RunResult

T = TypeVar("T")
_KEPT = ("pass", "strategy", "target", "platform")
_NOTHING = contextlib.nullcontext()


class _Wrong(Exception):
    """What was given is not what must be given; where: the end of the name of what gave it."""

    def __init__(self, what: str, where: str = "") -> None:
        super().__init__(what)
        self.where = where


@dataclass(frozen=True)
class Guard:
    """Whose things are watched, and how errors name them.

    kind: the word for one of them ("strategy"). origin: "of acme-dicompiler 1.2 (plugin 'acme')". plugin: "plugin
    'acme' of acme-dicompiler 1.2", '' for a class that no plugin provides: its exceptions stay what they are.
    packages: the top-level ones whose code is the plugin's.
    """

    kind: str
    origin: str
    plugin: str = ""
    packages: frozenset[str] = frozenset()

    def named(self, thing: Any) -> str:
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
        except _Wrong as wrong:
            raise PluginError(f"{name}{wrong.where}: {wrong}") from wrong.__cause__
        except BaseException as error:
            if not self.plugin or guests.is_ours(error):
                raise
            # Of what is called in the midst of something else the place in its code says enough.
            who = name if self.kind in ("pass", "strategy", "target") else self.plugin
            line = culprit(error, dict.fromkeys(self.packages, who)) or f"{who}: {cause(error)}{remedy(error)}"
            raise PluginError(line) from error
        finally:
            if self.plugin:
                guests.leave()


def culprit(error: BaseException, packages: Mapping[str, str]) -> str | None:
    """The line for an exception in a plugin's code: whose, what was raised, and the innermost place of that code; None
    where no such code is on the way. packages: top-level package → what to call whose it is."""
    line = None if error.__cause__ is None else culprit(error.__cause__, packages)
    if line is not None:
        return line
    for frame, number in reversed([*traceback.walk_tb(error.__traceback__)]):
        if _package(frame) in packages:
            code = frame.f_code
            place = f"(in {code.co_qualname}, {code.co_filename.rpartition('/')[2]}:{number})"
            return f"{packages[_package(frame)]}: {cause(error)}{remedy(error)} {place}"
    return None


def _package(frame: FrameType) -> str:
    """The top-level package whose code a frame runs."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def guarded(value: Any, name: str, guard: Guard) -> Any:
    """What a plugin provides by that name, watched."""
    if isinstance(value, OperatorRule):
        name = f"rule {name!r} of {guard.plugin}"
        return replace(
            value,
            piece=GuardedCall(value.piece, name, guard, _piece) if value.cuts else value.piece,
            reduction=value.reduction and GuardedCall(value.reduction, name, guard, _as_it_is),
            cost=GuardedCall(value.cost, name, guard, _effort),
            reads=value.reads and GuardedCall(value.reads, name, guard, _as_it_is),
        )
    if isinstance(value, PlatformFamily):
        made = _of(Platform, "make()")
        return replace(value, make=GuardedCall(value.make, f"platform {name!r} of {guard.plugin}", guard, made))
    return guarded_class(inspect.unwrap(value), guard)


@dataclass(frozen=True)
class GuardedCall:
    """A function of a rule or a family, called `name` in errors; `check` is one of those below. It can be pickled where
    these can, as layers go to other processes with their rules."""

    __wrapped__: Callable[..., Any]
    name: str
    guard: Guard
    check: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        """What the function gives. PluginError where it breaks or gives what is wrong."""
        return self.guard.call(self.name, lambda: self.check(self, self.__wrapped__(*arguments), *arguments))


@functools.cache
def guarded_class(cls: Any, guard: Guard) -> Any:
    """The class, its methods watched: a subclass that differs in nothing else, also as text, compared or pickled."""
    same = {name: getattr(cls, name) for name in ("__doc__", "__module__", "__qualname__", "__hash__")}
    subclass = type(cls)(cls.__name__, (cls,), {**same, "__slots__": (), "__wrapped__": cls, "__guard__": guard})
    subclass.__eq__, subclass.__reduce_ex__ = _equal(cls), _reduce(subclass)
    for name, check in _CHECKS[guard.kind].items():
        setattr(subclass, name, _watched(subclass, guard, name, check))
    if guard.kind == "pass":
        subclass.provenance = guard.origin
    if guard.kind == "strategy" and guard.plugin:
        subclass.check_feasible = _judged(subclass, guard)
    return subclass


def instance(cls: Any, make: Callable[..., T], *arguments: Any) -> T:
    """`make(cls, *arguments)`, which makes an instance; PluginError where that breaks in a class that is guarded."""
    guard: Guard | None = getattr(cls, "__guard__", None)
    return make(cls, *arguments) if guard is None else guard.call(guard.plugin, make, cls, *arguments)


def adopted(thing: T, cls: Any) -> T:
    """`thing` as an instance of `cls`, its class guarded: a copy unless it is guarded already."""
    return thing if type(thing) is cls or hasattr(type(thing), "__guard__") else _become(copy.copy(thing), cls)


def _become(thing: T, cls: Any) -> T:
    object.__setattr__(thing, "__class__", cls)  # it may be frozen
    return thing


def _equal(cls: Any) -> Callable[[Any, Any], Any]:
    """Instances of a class and of the same guarded are equal where their fields are."""

    def equal(self: Any, other: Any) -> Any:
        return cls.__eq__(self, adopted(other, type(self)) if type(other) is cls else other)

    return equal


def _reduce(subclass: Any) -> Callable[[Any, Any], tuple[Any, ...]]:
    """For pickle and copy: the class by its name is the one without guard."""

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        function, arguments, *state = super(subclass, self).__reduce_ex__(protocol)
        plain = tuple(subclass.__wrapped__ if one is subclass else one for one in arguments)
        return _restored, (subclass.__guard__, function, plain), *state

    return reduce


def _restored(guard: Guard, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    thing = function(*arguments)
    cls: Any = type(thing)
    return _become(thing, guarded_class(cls, guard))


def _watched(subclass: Any, guard: Guard, name: str, check: Callable[..., Any]) -> Callable[..., Any]:
    """The method of that name, what it gives looked at by `check`, which raises _Wrong."""
    signature = inspect.signature(getattr(subclass, name))

    @functools.wraps(getattr(subclass, name))
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        call = getattr(super(subclass, self), name)

        def checked() -> Any:
            given = call(*arguments, **options)
            return check(self, given, *(signature.bind(self, *arguments, **options).args[1:] if options else arguments))

        # A plugin may expect exceptions of its own from what it calls of itself.
        inside = _package(sys._getframe(1)) in guard.packages
        return call(*arguments, **options) if inside else guard.call(guard.named(self), checked)

    return method


def _judged(subclass: Any, guard: Guard) -> Callable[..., None]:
    """`Strategy.check_feasible`, which says whose plan it is that cannot be carried out."""

    def check_feasible(self: Any, problem: Any, plan: Any) -> None:
        try:
            super(subclass, self).check_feasible(problem, plan)
        except PluginError:
            raise
        except DicompilerError as error:
            raise PluginError(f"{guard.named(self)} made a plan that cannot be carried out: {error}") from error
        except Exception as error:
            raise PluginError(f"{guard.named(self)} made what is no plan: {cause(error)}") from error

    return check_feasible


def _as_it_is(_thing: Any, given: Any, *_: Any) -> Any:
    return given


def _of(cls: type, what: str) -> Callable[..., Any]:
    """The check that a method, `what`, returns an instance of `cls`."""

    def check(_thing: Any, given: Any, *_: Any) -> Any:
        if not isinstance(given, cls):
            raise _Wrong(f"{what} returned {type(given).__name__} instead of a {cls.__name__}")
        return given

    return check


def _piece(_call: GuardedCall, given: Any, operation: Operation, region: Region, _reduce: Any) -> Any:
    if fault := fault_of(operation, region, given):
        raise _Wrong(fault, f", for node {operation.node.name!r}")
    return given


def _effort(_call: GuardedCall, given: Any, operation: Operation, _out: Shape, _needs: Any) -> Any:
    if not isinstance(given, Effort) or not all(isinstance(count, Integral) and count >= 0 for count in given):
        what = f"its cost is {given!r}: give an Effort of whole numbers of at least 0"
        raise _Wrong(what, f", for node {operation.node.name!r}")
    return given


def _emitted(target: Target, given: None, _compilation: Compilation, directory: Path) -> None:
    """There is an artifact.json, and it is of this target."""
    if not (directory / MANIFEST).is_file():
        raise _Wrong(f"emit() wrote no {MANIFEST}")
    try:
        document = load_json(directory / MANIFEST)
        validate(document, "artifact", MANIFEST)
    except DicompilerError as error:
        raise _Wrong(str(error)) from error
    if document["target"] != target.name:
        raise _Wrong(f"{MANIFEST}: target is {document['target']!r}: write {target.name!r} there")
    return given


def _ran(target: Target, given: Any, _directory: Path, frames: Sequence[Any], options: RunOptions) -> Any:
    """What runs gives outputs of as many frames as were to be kept."""
    _of(RunResult, "run()")(target, given)
    kept = len(frames) if options.keep is None else min(options.keep, len(frames))
    if len(given.outputs) != kept:
        raise _Wrong(f"run() returned outputs of {len(given.outputs)} frames: {kept} were to be kept")
    return given


def _remembered(_target: Target, given: Any, program: Program) -> Any:
    missing = [device.device for device in program.devices if device.device not in given]
    if missing:
        raise _Wrong(f"memory() says nothing of device {missing[0]!r}")
    return given


def _timed(_cost: CostModel, given: Any, _layers: LayerGraph, layer: Layer, _share: Share, device: Device) -> float:
    if fault := fault_of_seconds(given, layer, device):
        raise _Wrong(fault)
    return float(given)


def _filled(
    _cost: Any, given: Any, _layers: Any, layer: Layer, shares: Sequence[Any], devices: Sequence[Device]
) -> Any:
    shape = (len(shares), len(devices))
    if not isinstance(given, np.ndarray) or given.shape != shape:
        raise _Wrong(f"fill() returned no array (shares, devices), here {shape}")
    right = (given >= 0) & ((given < math.inf) | [not device.computes for device in devices])
    for row, column in np.argwhere(~right):
        raise _Wrong(fault_of_seconds(given[row, column], layer, devices[column]))
    return given


_CHECKS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "pass": {"run": _of(Compilation, "run()")},
    "strategy": {"plan": _of(Plan, "plan()"), "front": _of(Front, "front()"), "own_platform": _as_it_is},
    "target": {
        "emit": _emitted,
        "run": _ran,
        "memory": _remembered,
        **dict.fromkeys(("install", "occupied", "proofs", "tolerances"), _as_it_is),
    },
    "cost model": {"seconds": _timed, "fill": _filled},
}
"""Kind → the methods that are watched, each with the check of what it gives: (thing, given, *arguments) → result."""
