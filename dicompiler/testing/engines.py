"""Check of engines: the converted files, and the outputs of the converted networks on this host."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import onnx
from onnx import numpy_helper

from dicompiler.plugin_api import Engine, Model, Segment
from dicompiler.plugin_api.artifacts import EngineFiles, UnsupportedByEngine, allowed_difference, measure_difference
from dicompiler.plugin_api.onnx import graph_inputs, random_inputs
from dicompiler.testing.assertions import (
    LIMIT_S,
    as_instance,
    checking,
    describe,
    error_context,
    require,
    time_limit,
    unchanged,
)
from dicompiler.testing.subprocess_call import call_with_hash_seeds

NAME_PATTERN = r"[a-z][a-z0-9_]*"
_SEGMENT_GRAPHS: Mapping[str, str] = MappingProxyType(
    {
        "convolutions": """(float[1, 8, 9, 7] x) => (float[1, 4, 9, 7] y, float[1, 4, 4, 3] z) {
            c = Conv <pads = [1, 1, 1, 1]> (x, w)  y = Relu (c)
            z = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (y) }""",
        "classifier": """(float[1, 8, 9, 7] x) => (float[1, 5] y) {
            p = GlobalAveragePool (x)  f = Flatten (p)  y = Gemm <transB = 1> (f, m) }""",
        "elementwise": """(float[1, 8, 9, 7] x, float[1, 8, 9, 7] s) => (float[1, 8, 9, 7] y) {
            r = Relu (x)  a = Add (r, s)  y = Mul (a, r) }""",
        "integers": "(int64[1, 8, 9, 7] x) => (int64[1, 8, 9, 7] y) { y = Add (x, x) }",
    }
)
_WEIGHT_SHAPES = {"w": (4, 8, 3, 3), "m": (5, 8)}


def make_segment_models() -> dict[str, onnx.ModelProto]:
    """Return the default submodels by name."""
    models = {}
    for name, text in _SEGMENT_GRAPHS.items():
        model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {name} {text}')
        for weight, shape in _WEIGHT_SHAPES.items():
            if any(weight in node.input for node in model.graph.node):
                array = np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)
                model.graph.initializer.append(numpy_helper.from_array(array, weight))
        models[name] = model
    return models


def check_engine(
    engine: Engine | type[Engine], on: Mapping[str, onnx.ModelProto] | None = None, limit_s: float = LIMIT_S
) -> None:
    """Check that an engine converts submodels reproducibly, and computes what onnxruntime computes.

    The engine converts and runs each submodel. The check requires that:

    - the engine's name consists of lower-case letters, digits and underscores;
    - `convert` raises only UnsupportedByEngine, and raises it for nodes that `unsupported_nodes` lists;
    - a second conversion gives the same bytes, also in another process with another hash seed;
    - the outputs are within the engine's tolerance of onnxruntime's outputs;
    - `extra_memory` returns a number of bytes;
    - the engine does not change its arguments, end the process, or exceed the time limit;
    - at least one submodel is converted, unless the engine runs ONNX files.

    Args:
        engine: The engine, or its class.
        on: Submodels by name. Default: `make_segment_models()`.
        limit_s: Seconds that the calls of the engine for one submodel may take.

    Raises:
        AssertionError: A requirement does not hold. The message names engine, submodel and cause.
    """
    instance = as_instance(engine)
    models = make_segment_models() if on is None else on
    require(re.fullmatch(NAME_PATTERN, instance.name), f"{describe(instance)}: its name does not match {NAME_PATTERN}")
    converted: dict[str, EngineFiles] = {}
    for name, model in models.items():
        place = f"{describe(instance)} on {name}"
        with checking(place), unchanged(model=model), time_limit(limit_s):
            if (files := _check_submodel(instance, model)) is not None:
                converted[name] = files
    _check_other_processes(instance, {name: models[name] for name in converted}, converted, limit_s)
    names = ", ".join(models)
    require(
        converted or all(_convert(instance, model) is None for model in models.values()),
        f"{describe(instance)}: it converts none of {names}: give submodels that it supports (on=…)",
    )


def _check_submodel(engine: Engine, model: onnx.ModelProto) -> EngineFiles | None:
    """Check the engine on a submodel in this process. Return its files, or None if the engine does not convert it."""
    unsupported = engine.unsupported_nodes(model, {})
    files = _convert(engine, model)
    memory = engine.extra_memory([_as_segment(model)])
    require(isinstance(memory, int) and memory >= 0, f"extra_memory() returned {memory!r} instead of bytes")
    if not isinstance(files, EngineFiles):
        return None
    require(not unsupported, f"convert() accepts nodes that unsupported_nodes() lists: {dict(unsupported)}")
    is_equal = _has_equal_files(files, _convert(engine, model))
    require(is_equal, "convert() returns other bytes when it is called again")
    inputs = random_inputs(graph_inputs(Model(model)))
    before = {key: array.copy() for key, array in inputs.items()}
    difference, reason = measure_difference(engine, Model(model), files, inputs)
    allowed = allowed_difference(engine)
    require(
        difference <= allowed,
        f"its outputs differ from onnxruntime's by {difference:.2g} of the largest output, more than {allowed:.2g}"
        + (f" ({reason})" if reason else ""),
    )
    require(all(np.array_equal(inputs[key], before[key]) for key in inputs), "it changes its inputs")
    return files


def _check_other_processes(
    engine: Engine, models: Mapping[str, onnx.ModelProto], converted: Mapping[str, EngineFiles], limit_s: float
) -> None:
    """Require that the engine converts submodels to the same files in processes with other hash seeds."""
    if not models:
        return
    with error_context(describe(engine)):
        for others in call_with_hash_seeds(_convert_all, engine, dict(models), limit_s=limit_s * len(models)):
            for name, files in converted.items():
                is_equal = _has_equal_files(files, others[name])
                require(is_equal, f"on {name}: convert() returns other bytes in another process")


def _convert_all(engine: Engine, models: Mapping[str, onnx.ModelProto]) -> dict[str, EngineFiles | str | None]:
    return {name: _convert(engine, model) for name, model in models.items()}


def _convert(engine: Engine, model: onnx.ModelProto) -> EngineFiles | str | None:
    """Return the files of a converted submodel, None if the engine runs ONNX files, or why it is unsupported."""
    try:
        return engine.convert(model, {})
    except UnsupportedByEngine as error:
        return str(error)


def _has_equal_files(files: EngineFiles, other: object) -> bool:
    return isinstance(other, EngineFiles) and (files.network, files.weights) == (other.network, other.weights)


def _as_segment(model: onnx.ModelProto) -> Segment:
    inputs, outputs = (tuple(value.name for value in values) for values in (model.graph.input, model.graph.output))
    return Segment("segment", "device", model, inputs, outputs)
