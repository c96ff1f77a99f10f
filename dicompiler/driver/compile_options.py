"""The options of `dicompiler.compile`: a record that checks their types."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

import onnx

from dicompiler.base.errors import UsageError, check_type, did_you_mean, one_line
from dicompiler.cost.cost_model import CostModel
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.wire_dtype import WireFormat
from dicompiler.plugin.pass_base import Instrument
from dicompiler.search.strategy import Strategy
from dicompiler.target.target_base import Target

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

ModelSource = str | Path | bytes | onnx.ModelProto | Model
Shapes = str | Sequence[str] | Mapping[str, Sequence[int]]
"""Shapes of inputs: {"input": (1, 3, 224, 224)}, "input=1x3x224x224", or several such strings."""

DEFAULT_STRATEGY = "auto"
DEFAULT_TARGET = "sockets"
DEFAULT_COST_MODEL = "analytic"

INSTRUMENT_METHODS = ("before", "after", "failed")

_EXPECTED_VALUES: Mapping[str, str] = {
    "platform": "the path of a TOML file, a built-in platform's name or a Platform",
    "strategy": "a string such as 'dp' or a Strategy",
    "plan": "the path of a plan or a Plan",
    "target": "a string such as 'sockets' or a Target",
    "engine": "a string such as 'ncnn' or 'auto'",
    "precision": "'fp32', 'fp16' or 'bf16'",
    "objective": "a string such as 'latency'",
    "cost": "a string such as 'analytic' or a CostModel",
    "output": "a path",
    "shape": "as {'input': (1, 3, 224, 224)} or 'input=1x3x224x224'",
    "quantize_samples": "a path",
    "wire_dtype": "a string such as 'float16', or types by layer",
    "wire_samples": "a path",
    "tolerate_failures": "a number, 'hosts' or names of devices",
    "instruments": "a list of instruments",
    "progress": "a function that takes a string",
}
"""The allowed values of each option, as text for error messages. Only these options have their type checked."""


@dataclass(frozen=True)
class CompileOptions:
    """Options of `dicompiler.compile`, which has a keyword argument for each of these fields.

    `strategy`, `target` and `cost` are instances, or strings with a name and options, such as "cpsat{tries=2}". A value
    of a wrong type raises UsageError.

    Attributes:
        platform: The cluster: a TOML file, the name of a built-in platform, or a Platform.
        strategy: The strategy that makes the plan. Default: "auto".
        plan: A plan to use instead of a strategy, as a file or a Plan.
        target: The target that writes the programs.
        engine: The engine that computes on devices with CPU cores: "onnxruntime", "ncnn", "mnn", one from a plugin, or
            "auto" (the fastest one of each device). Default: the engines in the plan or the platform.
        precision: The precision of engines other than onnxruntime, which always computes in the types of the model:
            "fp32", "fp16" or "bf16". Default: the precisions in the plan or the platform, otherwise "fp32".
        objective: Quantity to minimize: latency, throughput, energy, memory, communication, or a weighted sum.
        cost: The cost model.
        output: Directory to write the artifact to. Only with it, plans must leave room for the memory that the target
            adds.
        shape: Shapes of inputs with dynamic dimensions: {"input": (1, 3, 224, 224)} or "input=1x3x224x224".
        state: Graph inputs and outputs that devices keep between frames: `past*=present*`, "auto" (inputs and outputs
            with common names) or "none".
        quantize_samples: An .npz file of sample inputs. If it is given, the model is quantized to int8 before it is
            split.
        wire_dtype: Element type in which tensors are sent, for all layers ("float16") or by layer ({"*": "float16",
            "conv1": "float32"}). Default: the types in the plan, otherwise the tensors' own types.
        wire_samples: An .npz file of sample inputs, from which the value ranges for sending as int8 are measured.
        tolerate_failures: Device failures to make plans for: the maximum number of failed devices, "hosts" (all devices
            of one host), or names of devices ("pi02,pi03").
        allow_worse: True to log no warning if the plan is worse than one device.
        require_complete_search: True to raise an error if a budget or an interrupt ended the search early, because such
            a plan is not reproducible.
        executor: Executor, opened by `open_executor`, that evaluates the plans of a search in parallel. Default: this
            process evaluates them.
        instruments: Objects with the methods of `Instrument`, which are called before and after each pass.
        progress: Function that is called with a message before each step. An exception that it raises ends the
            compilation.
    """

    platform: str | Path | Platform | None = None
    strategy: str | Strategy | None = None
    _: KW_ONLY
    plan: str | Path | Plan | None = None
    target: str | Target = DEFAULT_TARGET
    engine: str | None = None
    precision: str | None = None
    objective: str = "latency"
    cost: str | CostModel = DEFAULT_COST_MODEL
    output: str | Path | None = None
    shape: Shapes = ()
    state: str | Sequence[str] = "auto"
    quantize_samples: str | Path | None = None
    wire_dtype: str | Mapping[str, str] | WireFormat | None = None
    wire_samples: str | Path | None = None
    tolerate_failures: int | str = 0
    allow_worse: bool = False
    require_complete_search: bool = False
    executor: Executor | None = None
    instruments: Sequence[Instrument] = ()
    progress: Callable[[str], object] | None = None

    def __post_init__(self) -> None:
        for name, classes in _option_classes().items():
            check_type(getattr(self, name), classes, f"compile: {name}", _EXPECTED_VALUES[name])


@functools.cache
def _option_classes() -> Mapping[str, tuple[type, ...]]:
    """Return the allowed classes of each option by its name, from the annotations of `CompileOptions`."""
    annotations = get_type_hints(CompileOptions)
    return {name: _runtime_classes(annotations[name]) for name in _EXPECTED_VALUES}


def _runtime_classes(annotation: object) -> tuple[type, ...]:
    alternatives = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return tuple(get_origin(alternative) or alternative for alternative in alternatives)


def takes_fields_of(
    record: Callable[P, T],
) -> Callable[[Callable[[ModelSource, T], R]], Callable[Concatenate[ModelSource, P], R]]:
    """Return a decorator that turns `function(model, record)` into a function that takes the fields of the record.

    After the decoration, `function(model, x=1)` calls the original function with `record(x=1)`.
    """

    def decorate(function: Callable[[ModelSource, T], R]) -> Callable[Concatenate[ModelSource, P], R]:
        @functools.wraps(function)
        def call(model: ModelSource, /, *args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in fields:
                    raise TypeError(f"{function.__name__}() has no argument {name!r}{did_you_mean(name, fields)}")
            return function(model, record(*args, **kwargs))

        fields = inspect.signature(record).parameters
        # `call` gets a signature in which the fields of the record are parameters, for help() and documentation tools.
        signature = inspect.signature(function)
        model = signature.parameters["model"].replace(kind=inspect.Parameter.POSITIONAL_ONLY)
        call.__signature__ = signature.replace(parameters=[model, *fields.values()])  # type: ignore[attr-defined]
        return call

    return decorate


def format_shapes(shapes: Shapes) -> tuple[str, ...]:
    """Return the shapes of inputs as strings: {"input": (1, 3, 224, 224)} ⇒ ("input=1x3x224x224",)."""
    if isinstance(shapes, str):
        return (shapes,)
    if not isinstance(shapes, Mapping):
        for text in shapes:
            check_type(text, (str,), "compile: shape", "a string such as 'input=1x3x224x224'")
        return tuple(shapes)
    for name, sizes in shapes.items():
        check_type(sizes, (Sequence,), f"compile: shape of {name!r}", "as (1, 3, 224, 224)")
        for size in sizes:
            check_type(size, (int,), f"compile: a size in the shape of {name!r}", "an integer")
    return tuple(f"{name}={'x'.join(map(str, sizes))}" for name, sizes in shapes.items())


def check_instruments(instruments: Sequence[object]) -> None:
    """Raise UsageError if an object is not an instance with all methods of `Instrument`."""
    for instrument in instruments:
        has_methods = all(callable(getattr(instrument, name, None)) for name in INSTRUMENT_METHODS)
        if isinstance(instrument, type) or not has_methods:
            raise UsageError(
                f"compile: instruments: {one_line(repr(instrument), 60)} is not an instrument: pass objects with the "
                f"methods {', '.join(INSTRUMENT_METHODS)} (see Instrument in dicompiler.plugin_api)"
            )
