"""Wrappers of third-party plugins: exceptions and invalid results become PluginErrors that name the plugin.

    class, operator rule or platform family ⇒ the same with wrapped functions

An error names the plugin, its distribution and version, and the place in its code. Built-in plugins are not wrapped, so
their calls cost nothing extra.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import onnx

from dicompiler.base.errors import DicompilerError, PluginError, describe_exception, one_line
from dicompiler.base.schema import load_json, validate
from dicompiler.base.termination import TerminationError
from dicompiler.cost.cost_model import CostModel, describe_seconds_error
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.ir.cluster import Device
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.metrics import DeviceFootprint
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.operator_rule import Node, OpCost, Operation, OperatorRule, Piece
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import LayerShare, Part, Plan
from dicompiler.ir.platform import Platform, PlatformFamily
from dicompiler.ir.program import Program
from dicompiler.ir.regions import Region, contains, full_region, is_empty
from dicompiler.search.pareto_front import ParetoFront
from dicompiler.target.engine import Engine, EngineFiles
from dicompiler.target.manifest import ARTIFACT_FILE
from dicompiler.target.run_records import RunOptions, RunResult
from dicompiler.target.target_base import Target

T = TypeVar("T")


class _InvalidResult(Exception):
    """Raised if a function of a plugin returned an invalid value.

    Attributes:
        place: Text after the name of the function in the message, such as ", for node 'conv1'".
    """

    def __init__(self, cause: str, place: str = "") -> None:
        super().__init__(cause)
        self.place = place


@dataclass(frozen=True)
class CallGuard:
    """Calls functions of a plugin, and names the plugin in errors.

    Attributes:
        kind: Kind of the plugin, such as "strategy".
        origin: Origin of the plugin in messages, such as "of acme-dicompiler 1.2 (plugin 'acme')".
        plugin: The plugin, such as "plugin 'acme' of acme-dicompiler 1.2". Empty for a class that no installed plugin
            provides; exceptions of such a class are passed on unchanged.
        packages: Top-level packages of the plugin's code.
    """

    kind: str
    origin: str
    plugin: str = ""
    packages: frozenset[str] = frozenset()

    def describe(self, thing: Any) -> str:
        """Return kind, name and origin of an object: "strategy 'acme' of acme-dicompiler 1.2 (plugin 'acme')"."""
        return f"{self.kind} {thing.name!r} {self.origin}"

    def call(self, name: str, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call a function of the plugin, and turn its exceptions into PluginErrors.

        DicompilerErrors, Ctrl-C (KeyboardInterrupt) and TerminationErrors are passed on unchanged.

        Args:
            name: Description of the called object in error messages.
            function: The function.
            *arguments: Its positional arguments.
            **options: Its keyword arguments.

        Returns:
            The result of the function.

        Raises:
            PluginError: The function raised another exception, or returned an invalid value.
        """
        try:
            return function(*arguments, **options)
        except DicompilerError:
            raise
        except _InvalidResult as error:
            raise PluginError(f"{name}{error.place}: {error}") from error.__cause__
        except BaseException as error:
            if not self.plugin or isinstance(error, KeyboardInterrupt | TerminationError):
                raise
            line = format_plugin_error(error, dict.fromkeys(self.packages, name))
            raise PluginError(line or f"{name}: {describe_exception(error)}") from error


def format_plugin_error(error: BaseException, packages: Mapping[str, str]) -> str | None:
    """Return a line with the plugin, an exception, and the innermost place in the plugin's code.

    Args:
        error: The exception, with its traceback.
        packages: For each top-level package of plugins, the name of its plugin as it must appear in the line.

    Returns:
        The line, or None if no frame of the traceback is plugin code.
    """
    line = None if error.__cause__ is None else format_plugin_error(error.__cause__, packages)
    if line is not None:
        return line
    for frame, number in reversed([*traceback.walk_tb(error.__traceback__)]):
        if _frame_package(frame) in packages:
            return f"{packages[_frame_package(frame)]}: {describe_exception(error)} ({_format_place(frame, number)})"
    return None


def _format_place(frame: FrameType, number: int) -> str:
    """Return function, file and line of a frame: "in Acme.plan, strategy.py:12", or "acme/__init__.py:3"."""
    path = Path(frame.f_code.co_filename)
    # Every package has a file `__init__.py`, so this file name needs the name of the package.
    file = f"{path.parent.name}/{path.name}" if path.name == "__init__.py" else path.name
    name = frame.f_code.co_qualname
    return f"{file}:{number}" if name == "<module>" else f"in {name}, {file}:{number}"


def _frame_package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def wrap_provided(value: Any, name: str, guard: CallGuard) -> Any:
    """Wrap the functions of a class, operator rule or platform family, so that errors in them name the plugin.

    `name` is the operator or the family in error messages.
    """
    if isinstance(value, OperatorRule):
        name = f"rule {name!r} of {guard.plugin}"
        return replace(
            value,
            piece=WrappedFunction(value.piece, name, guard, _check_piece) if value.can_cut else value.piece,
            reduction_length=value.reduction_length
            and WrappedFunction(value.reduction_length, name, guard, _OperationCheck(describe_reduction_length_error)),
            cost=WrappedFunction(value.cost, name, guard, _OperationCheck(describe_op_cost_error)),
            read_share=value.read_share
            and WrappedFunction(value.read_share, name, guard, _OperationCheck(describe_read_share_error)),
        )
    if isinstance(value, PlatformFamily):
        made = _instance_check(Platform, "make()")
        return replace(value, make=WrappedFunction(value.make, f"platform {name!r} of {guard.plugin}", guard, made))
    return wrap_class(inspect.unwrap(value), guard)


@dataclass(frozen=True)
class WrappedFunction:
    """A function of an operator rule or platform family, wrapped so that errors in it name the plugin.

    It can be pickled, because operator rules are sent to other processes.

    Attributes:
        name: Name of the function in errors.
        guard: Calls the function, and names the plugin in errors.
        check: Function that checks the result and returns it. It raises _InvalidResult if the result is invalid.
    """

    __wrapped__: Callable[..., Any]
    name: str
    guard: CallGuard
    check: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.guard.call(self.name, lambda: self.check(self, self.__wrapped__(*arguments), *arguments))


def describe_rule_plugin(rule: OperatorRule) -> str:
    """Return the name of a third party's rule in errors: "rule 'Conv' of plugin 'acme' of acme 1.2".

    The result is '' for a built-in rule, and for a rule that cannot cut.
    """
    return rule.piece.name if isinstance(rule.piece, WrappedFunction) else ""


@functools.cache
def wrap_class(cls: Any, guard: CallGuard) -> Any:
    """Return a subclass of the plugin class `cls` that checks results and turns exceptions into PluginErrors.

    It has the name of `cls`, and its instances compare and pickle like those of `cls`.
    """
    same = {name: getattr(cls, name) for name in ("__doc__", "__module__", "__qualname__", "__hash__")}
    subclass = type(cls)(cls.__name__, (cls,), {**same, "__slots__": (), "__wrapped__": cls, "__guard__": guard})
    subclass.__eq__, subclass.__reduce_ex__ = _make_eq(cls), _make_reduce(subclass)
    for name, check in _RESULT_CHECKS[guard.kind].items():
        wrap = _wrap_method if callable(getattr(cls, name)) else _wrap_property
        setattr(subclass, name, wrap(subclass, guard, name, check))
    if guard.kind == "pass":
        subclass.provenance = guard.origin
    if guard.kind == "strategy" and guard.plugin:
        subclass.check_feasible = _wrap_check_feasible(subclass, guard)
    return subclass


def make_instance(cls: Any, make: Callable[..., T], *arguments: Any) -> T:
    """Return `make(cls, *arguments)`. If `cls` is a wrapped plugin class, an exception becomes a PluginError."""
    guard: CallGuard | None = getattr(cls, "__guard__", None)
    return make(cls, *arguments) if guard is None else guard.call(guard.plugin, make, cls, *arguments)


def with_wrapped_class(thing: T, cls: Any) -> T:
    """Return a copy of `thing` that is an instance of `cls`, the wrapped form of its class.

    An object of a wrapped class is returned unchanged.
    """
    return thing if type(thing) is cls or hasattr(type(thing), "__guard__") else _set_class(copy.copy(thing), cls)


def _set_class(thing: T, cls: Any) -> T:
    object.__setattr__(thing, "__class__", cls)  # `thing.__class__ = cls` would fail for a frozen dataclass.
    return thing


def _make_eq(cls: Any) -> Callable[[Any, Any], Any]:
    """Return an `__eq__` for the wrapped form of `cls`: its instances equal instances of `cls` with the same fields."""

    def equal(self: Any, other: Any) -> Any:
        return cls.__eq__(self, with_wrapped_class(other, type(self)) if type(other) is cls else other)

    return equal


def _make_reduce(subclass: Any) -> Callable[[Any, Any], tuple[Any, ...]]:
    """Return a `__reduce_ex__` for a wrapped class, which pickles the plugin's class and wraps it again on loading.

    Pickle finds classes by their name, but the wrapped class has no name in a module.
    """

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        function, arguments, *state = super(subclass, self).__reduce_ex__(protocol)
        plain = tuple(subclass.__wrapped__ if argument is subclass else argument for argument in arguments)
        return _restore_wrapped, (subclass.__guard__, function, plain), *state

    return reduce


def _restore_wrapped(guard: CallGuard, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    thing = function(*arguments)
    cls: Any = type(thing)
    return _set_class(thing, wrap_class(cls, guard))


def _wrap_method(subclass: Any, guard: CallGuard, name: str, check: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method `name` of a wrapped class: it calls the plugin's method and checks its result with `check`."""
    signature = inspect.signature(getattr(subclass, name))

    @functools.wraps(getattr(subclass, name))
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        call = getattr(super(subclass, self), name)

        def checked() -> Any:
            result = call(*arguments, **options)
            return check(
                self, result, *(signature.bind(self, *arguments, **options).args[1:] if options else arguments)
            )

        # A plugin that calls the wrapped method itself may catch its own exceptions, so they are not turned into
        # PluginErrors.
        called_by_plugin = _frame_package(sys._getframe(1)) in guard.packages
        return call(*arguments, **options) if called_by_plugin else guard.call(guard.describe(self), checked)

    return method


def _wrap_property(subclass: Any, guard: CallGuard, name: str, check: Callable[..., Any]) -> property:
    """Return the property `name` of a wrapped class: it checks the value of the plugin's property or attribute."""

    def get(self: Any) -> Any:
        return guard.call(guard.describe(self), lambda: check(self, getattr(super(subclass, self), name)))

    return property(get, doc=inspect.getdoc(getattr(subclass, name)))


def _wrap_check_feasible(subclass: Any, guard: CallGuard) -> Callable[..., None]:
    """Return a wrapped `Strategy.check_feasible`: errors name the strategy that made the infeasible plan."""

    def check_feasible(self: Any, problem: Any, plan: Any) -> None:
        try:
            super(subclass, self).check_feasible(problem, plan)
        except PluginError:
            raise
        except DicompilerError as error:
            raise PluginError(f"{guard.describe(self)} made an infeasible plan: {error}") from error
        except Exception as error:
            raise PluginError(f"{guard.describe(self)} made an invalid plan: {describe_exception(error)}") from error

    return check_feasible


def _unchanged(_thing: Any, result: Any, *_: Any) -> Any:
    return result


def _instance_check(cls: type, what: str) -> Callable[..., Any]:
    """Return a function that raises _InvalidResult unless a result is an instance of `cls`.

    `what` names the method in the message.
    """

    def check(_thing: Any, result: Any, *_: Any) -> Any:
        if not isinstance(result, cls):
            raise _InvalidResult(f"{what} returned {type(result).__name__} instead of a {cls.__name__}")
        return result

    return check


def describe_piece_error(operation: Operation, region: Region, piece: Any) -> str:
    """Return a description of the mistake in an operator rule's result `piece`; '' if there is none.

    `piece` must be a Piece with the input regions from which the output region `region` is computed.
    """
    if not isinstance(piece, Piece):
        return f"returned {type(piece).__name__} instead of a Piece"
    if cause := _describe_piece_type_error(piece):
        return cause
    output = full_region(operation.out_shape)
    if not _is_inside(region, piece.out) or not _is_inside(piece.out, output):
        return f"out is {piece.out}: it must contain the region {region} and lie in the output {output}"
    written = piece.written_region
    if written is not None and (not _is_inside(piece.out, written) or not _is_inside(written, output)):
        return f"written_region is {written}: it must contain out, {piece.out}, and lie in the output {output}"
    if len(piece.needs) != len(operation.inputs):
        return f"needs has {len(piece.needs)} entries: expected one for each of the {len(operation.inputs)} inputs"
    for i, (need, whole) in enumerate(zip(piece.needs, operation.full_needs(), strict=True)):
        if need is not None and (whole is None or not _is_inside(need, whole)):
            return f"needs[{i}] is {need}: it must lie in the input {whole}"
        if need is not None and is_empty(need) and need != whole:
            return f"needs[{i}] is {need}, which is empty: give None or a region that is not empty"
    return _describe_table_rows_error(operation, piece) or _describe_node_error(operation, piece)


def _describe_piece_type_error(piece: Piece) -> str:
    """Return a description of a region or constant of a piece that has the wrong type; '' if there is none."""
    if not isinstance(piece.needs, tuple):
        return f"needs is {piece.needs!r}: expected a tuple of regions"
    regions = {f"needs[{i}]": need for i, need in enumerate(piece.needs)}
    for name, region in {"out": piece.out, "written_region": piece.written_region, **regions}.items():
        if not _is_region(region) and (region is not None or name == "out"):
            return f"{name} is {region!r}: expected a tuple with a pair of integers (start, stop) for each axis"
    for i, constant in piece.constants.items():
        if not isinstance(i, int) or i < 0 or not isinstance(constant, np.ndarray):
            return f"constants[{i!r}] is {constant!r}: expected an array for the index of an input"
    if not isinstance(piece.attributes, Mapping):
        return f"attributes is {piece.attributes!r}: expected values by attribute name"
    return ""


def _describe_table_rows_error(operation: Operation, piece: Piece) -> str:
    """Return a description of the mistake in a piece's `table_rows`; '' if there is none."""
    if piece.table_rows is None:
        return ""
    place = f"table_rows is {piece.table_rows!r}"
    table, *indices = piece.needs
    if len(indices) != 1 or not table or indices[0] is None:
        return f"{place}: the node must read regions of two inputs, which are a table and its indices"
    if table[0] != piece.table_rows:
        return f"{place}: it must be the first interval of needs[0], {table}"
    indices_info = operation.inputs[1]
    if indices_info is None or indices_info.dtype not in (onnx.TensorProto.INT32, onnx.TensorProto.INT64):
        return f"{place}: the second input must contain integers (int32 or int64)"
    if len(piece.out) != len(indices[0]) + len(table) - 1:
        return f"{place}: out is {piece.out}: expected the axes of the indices, then those of one row of the table"
    return ""


def _describe_node_error(operation: Operation, piece: Piece) -> str:
    """Return a description of an operator, attribute or input of a piece that ONNX does not allow; '' if there is none.

    Operators of domains that onnx does not know are not checked.
    """
    node = operation.node
    unchanged = Piece(piece.out, operation.full_needs())
    cause = _describe_checker_error(node, piece)
    # The checker also rejects some nodes of models that onnxruntime runs, such as deprecated ones.
    return cause and ("" if _describe_checker_error(node, unchanged) else cause)


def _describe_checker_error(node: Node, piece: Piece) -> str:
    """Return the error of onnx's checker for the node of a piece; '' if there is none."""
    attributes = {name: value for name, value in {**node.attributes, **piece.attributes}.items() if value is not None}
    inputs = ["" if need is None else name for name, need in zip(node.inputs, piece.needs, strict=True)]
    inputs += [""] * (max(piece.constants, default=-1) + 1 - len(inputs))
    for i in piece.constants:
        inputs[i] = f"constant {i}"
    while inputs and not inputs[-1]:
        inputs.pop()
    context = onnx.checker.C.CheckerContext()
    context.ir_version, context.opset_imports = onnx.IR_VERSION, {node.domain: node.opset}
    try:
        proto = onnx.helper.make_node(piece.op or node.op, inputs, node.outputs, node.name, domain=node.domain)
        proto.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in attributes.items())
        onnx.checker.check_node(proto, context)
    except (TypeError, ValueError, onnx.checker.ValidationError) as error:
        changes = f"op is {piece.op!r} and " * bool(piece.op) + f"attributes is {dict(piece.attributes)!r}"
        return f"{changes}: {one_line(str(error).partition('==>')[0]).rstrip('. ')}"
    return ""


def _is_region(value: Any) -> bool:
    intervals = value if isinstance(value, tuple) else (None,)
    return all(
        isinstance(interval, tuple) and len(interval) == 2 and all(isinstance(bound, Integral) for bound in interval)
        for interval in intervals
    )


def _is_inside(inner: Any, outer: Any) -> bool:
    return len(inner) == len(outer) and contains(outer, inner)


def _check_piece(_call: WrappedFunction, result: Any, operation: Operation, region: Region, _reduce: Any) -> Any:
    if cause := describe_piece_error(operation, region, result):
        raise _InvalidResult(cause, f", for node {operation.node.name!r}")
    return result


def describe_op_cost_error(cost: Any) -> str:
    """Return a description of the mistake in the cost that an operator rule returned; '' if there is none."""
    if isinstance(cost, OpCost) and all(isinstance(count, Integral) and count >= 0 for count in cost):
        return ""
    return f"its cost is {cost!r}: expected an OpCost of integers of at least 0"


def describe_reduction_length_error(length: Any) -> str:
    """Return a description of the mistake in a result of `OperatorRule.reduction_length`; '' if there is none."""
    is_valid = length is None or (isinstance(length, Integral) and int(length) >= 0)
    return "" if is_valid else f"its reduction_length is {length!r}: expected None or an integer of at least 0"


def describe_read_share_error(share: Any) -> str:
    """Return a description of the mistake in a result of `OperatorRule.read_share`; '' if there is none."""
    is_valid = isinstance(share, Real) and 0 <= float(share) <= 1
    return "" if is_valid else f"its read_share is {share!r}: expected a number from 0 to 1"


def describe_plan_error(plan: Any) -> str:
    """Return a description of a plan that is not a Plan with tuples of parts; '' if there is no such mistake."""
    if not isinstance(plan, Plan):
        return f"{type(plan).__name__} instead of a Plan"
    if not isinstance(plan.layers, Mapping):
        return f"a Plan whose layers are of type {type(plan.layers).__name__}: expected the parts by layer name"
    for name, parts in plan.layers.items():
        if not isinstance(parts, Sequence) or not all(isinstance(part, Part) for part in parts):
            return f"a Plan with {parts!r} for layer {name!r}: expected a tuple of Part"
        for part in parts:
            if not isinstance(part.device, str):
                return f"a Plan with a {type(part.device).__name__} as the device of layer {name!r}: give its name"
            for bound in itertools.chain(*(part.region or ()), part.reduce or ()):
                if type(bound) is not int:
                    kind = type(bound).__name__
                    return f"a Plan with the bound {bound} ({kind}) in a region of layer {name!r}: give integers (int)"
    return ""


@dataclass(frozen=True)
class _OperationCheck:
    """Check of the results of a function of an operator rule, with an Operation (a node) as its first argument.

    Attributes:
        describe_error: Function that returns a description of the mistake in a result; '' if there is none.
    """

    describe_error: Callable[[Any], str]

    def __call__(self, _call: WrappedFunction, result: Any, operation: Operation, *_: Any) -> Any:
        if cause := self.describe_error(result):
            raise _InvalidResult(cause, f", for node {operation.node.name!r}")
        return result


def _check_plan(_strategy: Any, result: Any, *_: Any) -> Any:
    if cause := describe_plan_error(result):
        raise _InvalidResult(f"plan() returned {cause}")
    return result


def _check_emitted(target: Target, result: None, _compilation: PipelineState, directory: Path) -> None:
    """Raise _InvalidResult unless a target's `emit()` wrote an artifact.json that names this target."""
    if not (directory / ARTIFACT_FILE).is_file():
        raise _InvalidResult(f"emit() wrote no {ARTIFACT_FILE}")
    try:
        document = load_json(directory / ARTIFACT_FILE)
        validate(document, "artifact", ARTIFACT_FILE)
    except DicompilerError as error:
        raise _InvalidResult(str(error)) from error
    if document["target"] != target.name:
        raise _InvalidResult(f"{ARTIFACT_FILE}: target is {document['target']!r}: expected {target.name!r}")
    return result


def _check_run(target: Target, result: Any, _directory: Path, frames: Sequence[Any], options: RunOptions) -> Any:
    """Raise _InvalidResult unless a target's `run()` returned the times of all frames, and outputs.

    Outputs must exist for all frames, or for `kept_frames` of them.
    """
    _instance_check(RunResult, "run()")(target, result)
    kept = len(frames) if options.kept_frames is None else min(options.kept_frames, len(frames))
    if len(result.outputs) != kept:
        raise _InvalidResult(f"run() returned outputs of {len(result.outputs)} frames: expected {kept}")
    for report in result.reports:
        if report.compute_s < 0:
            raise _InvalidResult(f"run() returned compute_s {report.compute_s:g} of device {report.device!r}: below 0")
    if len(result.frames_s) != len(frames):
        raise _InvalidResult(f"run() returned frames_s with {len(result.frames_s)} times: expected {len(frames)}")
    return result


def _check_memory(_target: Target, result: Any, program: Program) -> Any:
    if not isinstance(result, Mapping):
        raise _InvalidResult(f"memory_overhead() returned {type(result).__name__} instead of the bytes by device name")
    for device in (device.device for device in program.devices):
        if device not in result:
            raise _InvalidResult(f"memory_overhead() has no entry for device {device!r}")
        if not isinstance(result[device], Integral) or result[device] < 0:
            raise _InvalidResult(
                f"memory_overhead() returns {result[device]!r} for device {device!r}: expected an integer of at least 0"
            )
    return result


def _check_converted(_engine: Engine, result: Any, _model: onnx.ModelProto, _weights: Any) -> Any:
    if result is not None and not isinstance(result, EngineFiles):
        raise _InvalidResult(f"convert() returned {type(result).__name__} instead of EngineFiles or None")
    return result


def _check_unsupported(_engine: Engine, result: Any, model: onnx.ModelProto, _weights: Any) -> Any:
    if not isinstance(result, Mapping) or not all(i in range(len(model.graph.node)) for i in result):
        raise _InvalidResult("unsupported_nodes() did not return a mapping from indices of nodes to reasons")
    return result


def _check_extra_memory(_engine: Engine, result: Any, _segments: Any) -> int:
    if not isinstance(result, Integral) or result < 0:
        raise _InvalidResult(f"extra_memory() returned {result!r}: expected a number of bytes of at least 0")
    return int(result)


def _check_state(_step: Any, result: Any, *_: Any) -> Any:
    """Raise _InvalidResult unless a pass's `run()` returned a PipelineState with fields of the right types."""
    _instance_check(PipelineState, "run()")(_step, result)
    for name, cls in _STATE_TYPES.items():
        value = getattr(result, name)
        if not isinstance(value, cls) and (value is not None or name == "model"):
            raise _InvalidResult(f"run() set {name} to {type(value).__name__} instead of a {cls.__name__}")
    if result.plan is not None and (cause := describe_plan_error(result.plan)):
        raise _InvalidResult(f"run() set plan to {cause}")
    return result


_STATE_TYPES = {"model": Model, "layers": LayerGraph, "platform": Platform, "plan": Plan, "program": Program}
"""Types of the fields of PipelineState that passes set."""


def _check_footprints(_target: Any, result: Any, *_: Any) -> Any:
    if not isinstance(result, Sequence) or not all(isinstance(item, DeviceFootprint) for item in result):
        raise _InvalidResult("device_footprints() did not return a tuple of DeviceFootprint")
    return result


def _check_seconds(
    _cost: CostModel, result: Any, _layers: LayerGraph, layer: Layer, _share: LayerShare, device: Device, *_: Any
) -> float:
    if cause := describe_seconds_error(result, layer, device):
        raise _InvalidResult(cause)
    return float(result)


def _check_seconds_table(
    _cost: Any, result: Any, _layers: Any, layer: Layer, shares: Sequence[Any], devices: Sequence[Device]
) -> Any:
    shape = (len(shares), len(devices))
    if not isinstance(result, np.ndarray) or result.shape != shape:
        raise _InvalidResult(f"seconds_table() must return an array of shape (shares, devices), which is {shape} here")
    valid = (result >= 0) & ((result < math.inf) | [not device.can_compute for device in devices])
    for row, column in np.argwhere(~valid):
        raise _InvalidResult(describe_seconds_error(result[row, column], layer, devices[column]))
    return result


_RESULT_CHECKS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "pass": {"run": _check_state},
    "strategy": {
        "plan": _check_plan,
        "front": _instance_check(ParetoFront, "front()"),
        "own_platform": _unchanged,
    },
    "target": {
        "emit": _check_emitted,
        "run": _check_run,
        "memory_overhead": _check_memory,
        "device_footprints": _check_footprints,
        "runtime_costs": _instance_check(RuntimeCosts, "runtime_costs"),
        **dict.fromkeys(("install", "uninstall", "extra_checks", "tolerances"), _unchanged),
    },
    "engine": {
        "convert": _check_converted,
        "unsupported_nodes": _check_unsupported,
        "extra_memory": _check_extra_memory,
    },
    "cost model": {
        "seconds": _check_seconds,
        "seconds_in_frame": _check_seconds,
        "seconds_table": _check_seconds_table,
        "runtime_costs": _instance_check(RuntimeCosts, "runtime_costs()"),
    },
}
"""Function that checks a result, by kind of plugin and name of a wrapped method or property.

It is called with the object, the result and the arguments of the method, and returns the result.
"""
