"""Whose fault an error is: what plugins provide is watched, and what goes wrong there bears their name.

Exceptions and wrong results of a third party's plugin become a PluginError that names the plugin, its distribution and
version. Those of built-in ones stay what they are, our own mistakes; so do those of classes that no plugin provides.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Real
from types import FrameType
from typing import TYPE_CHECKING, Any

from dicompiler.base.errors import DicompilerError, PluginError, one_line
from dicompiler.ir.regions import Interval, Region, contains, full
from dicompiler.ir.rule import Operation, OperatorRule, Piece, PieceFunction

if TYPE_CHECKING:
    from dicompiler.cost.model import CostModel
    from dicompiler.ir.layers import Layer
    from dicompiler.ir.plan import Plan
    from dicompiler.ir.platform import Device
    from dicompiler.ir.program import Program
    from dicompiler.plugin.registry import Plugin, Provided
    from dicompiler.search.problem import Problem, Strategy
    from dicompiler.target.interface import Target


UNINSTALLED = "uninstalled"
"""The distribution of what `plugins.also` puts beside what is installed."""


def provider(thing: Any) -> Provided | None:
    """Which plugin provides the class of a pass, strategy, target or cost model, or this very platform family."""
    from dicompiler.plugin.registry import KINDS, registry

    known = registry()
    for kind in KINDS:
        for provided in known.of(kind).values():
            if provided.value is type(thing) or provided.value is thing:
                return provided
    return None


def origin(thing: Any) -> str:
    """How errors say where a thing is from: "of acme-dicompiler 1.2 (plugin 'acme')"."""
    found = provider(thing)
    if found is None or found.distribution == UNINSTALLED:
        return f"of module {type(thing).__module__}"
    return f"of {found.distribution} {found.version}" + (f" (plugin {found.plugin!r})" if _foreign(found) else "")


def named(thing: Any) -> str:
    """The thing and its origin: "strategy 'acme-round-robin' of acme-dicompiler 1.2 (plugin 'acme')"."""
    from dicompiler.plugin.pass_manager import Pass
    from dicompiler.search.problem import Strategy
    from dicompiler.target.interface import Target

    kinds = {Pass: "pass", Strategy: "strategy", Target: "target"}
    kind = next((word for base, word in kinds.items() if isinstance(thing, base)), "cost model")
    return f"{kind} {thing.name!r} {origin(thing)}"


def _foreign(provided: Provided) -> bool:
    from dicompiler.plugin.registry import canonical

    return canonical(provided.distribution) != "dicompiler"


def is_foreign(thing: Any) -> bool:
    """Whether a third party's plugin provides it."""
    found = provider(thing)
    return found is not None and _foreign(found)


def broken(thing: Any, what: str) -> Exception:
    """The error for a wrong result of a pass, strategy, target or cost model: `what` says what is wrong with it."""
    found = provider(thing)
    if found is not None and not _foreign(found):
        return AssertionError(f"{named(thing)}: {what}")
    return PluginError(f"{named(thing)}: {what}")


@contextmanager
def blamed(thing: Any) -> Iterator[None]:
    """What a third party's thing raises inside becomes a PluginError; what it says by a DicompilerError stays."""
    try:
        yield
    except DicompilerError:
        raise
    except (Exception, SystemExit) as error:
        if not is_foreign(thing):
            raise
        raise PluginError(culprit(error, named(thing)) or f"{named(thing)}: {cause(error)}") from error


def cause(error: BaseException) -> str:
    """An exception as one line; ours without its type."""
    text = one_line(str(error))
    return text if isinstance(error, DicompilerError) else f"{type(error).__name__}{': ' if text else ''}{text}"


def culprit(error: BaseException, name: str = "") -> str | None:
    """The line for an exception in a third party's code: the plugin, what was raised, and the innermost place of its
    code; None where no such code is on the way. name: what to call the plugin where it is the one that was called."""
    if error.__cause__ is not None:
        found = culprit(error.__cause__, name)
        if found is not None:
            return found
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        plugin = _plugin_of(frame)
        if plugin is not None:
            code = frame.f_code
            who = name if f"of {plugin.distribution} {plugin.version} " in name else str(plugin)
            return f"{who}: {cause(error)} (in {code.co_qualname}, {code.co_filename.rpartition('/')[2]}:{line})"
    return None


def _plugin_of(frame: FrameType) -> Plugin | None:
    """The third party's plugin whose module, or whose package, the frame's code is in."""
    module = str(frame.f_globals.get("__name__", ""))
    return next((plugin for plugin, package in _packages() if module.partition(".")[0] == package), None)


def _packages() -> Iterator[tuple[Plugin, str]]:
    """Every third party's plugin with the top-level packages that it and its classes are from."""
    from dicompiler.plugin.registry import BUILTINS, KINDS, canonical, registry

    ours = {module.partition(".")[0] for _, module in BUILTINS}

    try:
        known = registry()
    except DicompilerError:  # two plugins collide: nothing was loaded
        return
    for plugin in known.plugins:
        if canonical(plugin.distribution) == "dicompiler":
            continue
        yield plugin, plugin.value.partition(":")[0].partition(".")[0]
        for kind in KINDS:
            for provided in known.of(kind).values():
                package = provided.value.__module__.partition(".")[0]
                if (provided.distribution, provided.plugin) == (
                    plugin.distribution,
                    plugin.name,
                ) and package not in ours:
                    yield plugin, package


def ask(strategy: Strategy, problem: Problem) -> Plan:
    """The strategy's plan. PluginError where a third party's strategy breaks or returns none; DicompilerError where it
    says that there is none."""
    from dicompiler.ir.plan import Plan

    with blamed(strategy):
        plan: Any = strategy.plan(problem)
    if not isinstance(plan, Plan):
        raise broken(strategy, f"plan() returned {type(plan).__name__} instead of a Plan")
    return plan


@contextmanager
def judged(strategy: Strategy) -> Iterator[None]:
    """A DicompilerError about a plan says whose plan it is, where that is a third party's strategy."""
    try:
        yield
    except PluginError:
        raise
    except DicompilerError as error:
        if not is_foreign(strategy):
            raise
        raise PluginError(f"{named(strategy)} made a plan that cannot be carried out: {error}") from error
    except Exception as error:
        if not is_foreign(strategy) or culprit(error) is not None:
            raise
        raise PluginError(f"{named(strategy)} made what is no plan: {cause(error)}") from error


def seconds(cost: CostModel, found: Any, layer: Layer, device: Device) -> float:
    """`found`, what a cost model says that a part of `layer` takes: at least 0, and finite on a device that computes.
    The error of `broken` otherwise."""
    number = float(found) if isinstance(found, Real) else math.nan
    if number >= 0 and (number < math.inf or not device.computes):
        return number
    raise broken(cost, f"layer {layer.name!r} on {device.name} takes {found!r} s: give a number of at least 0")


def memory(target: Target, program: Program) -> Mapping[str, int]:
    """What `target.memory` says of the program; the error of `broken` where it leaves out a device."""
    with blamed(target):
        found = target.memory(program)
        missing = [device.device for device in program.devices if device.device not in found]
    if missing:
        raise broken(target, f"memory() says nothing of device {missing[0]!r}")
    return found


@dataclass(frozen=True)
class CheckedPiece:
    """A third party's rule with every piece looked at: is it one, and does it lie in the tensors."""

    __wrapped__: PieceFunction
    name: str
    plugin: Plugin

    def __call__(self, operation: Operation, region: Region, reduce: Interval | None) -> Piece:
        """PluginError where what the rule returns is no piece of this operation."""
        piece: Any = self.__wrapped__(operation, region, reduce)
        fault = fault_of(operation, region, piece)
        if fault:
            raise PluginError(f"rule {self.name!r} of {self.plugin}, for node {operation.node.name!r}: {fault}")
        return piece  # type: ignore[no-any-return]


def watched(rule: OperatorRule, name: str, plugin: Plugin) -> OperatorRule:
    """The rule, its pieces checked."""
    return replace(rule, piece=CheckedPiece(rule.piece, name, plugin))


def fault_of(operation: Operation, region: Region, piece: Any) -> str:
    """What is wrong with the piece that a rule gives for `region` of the output; '' where it may be right."""
    if not isinstance(piece, Piece):
        return f"returned {type(piece).__name__} instead of a Piece"
    whole = full(operation.out_shape)
    if not _inside(region, piece.out) or not _inside(piece.out, whole):
        return f"out is {piece.out}: it must hold the region asked for, {region}, and lie in the output, {whole}"
    if piece.raw is not None and (not _inside(piece.out, piece.raw) or not _inside(piece.raw, whole)):
        return f"raw is {piece.raw}: it must hold out, {piece.out}, and lie in the output, {whole}"
    if len(piece.needs) != len(operation.inputs):
        return f"needs has {len(piece.needs)} entries: give one for each of the {len(operation.inputs)} inputs"
    for i, (need, there) in enumerate(zip(piece.needs, operation.full_needs(), strict=True)):
        if need is not None and (there is None or not _inside(need, there)):
            return f"needs[{i}] is {need}: it must lie in the input, {there}"
    return ""


def _inside(inner: Any, outer: Any) -> bool:
    """Whether a region, of the same rank, lies in another."""
    return len(inner) == len(outer) and contains(outer, inner)
