"""Selection and conversion of the segments that engines other than onnxruntime compute.

A segment (ONNX submodel of a device) is converted if the device's engine supports all of its operators and computes
nearly the same outputs as onnxruntime for random inputs.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from numpy.typing import NDArray

from dicompiler.plugin_api import Engine, Model, Program, registry
from dicompiler.plugin_api.artifacts import (
    DEFAULT_ENGINE,
    FULL_PRECISION,
    DeviatingResults,
    EngineFiles,
    Json,
    UnsupportedByEngine,
    convert_checked,
)
from dicompiler.plugin_api.onnx import ProgramExecutor, Weight, random_inputs
from dicompiler_targets.artifact_files import HoistedSegment, make_input_arrays, serialize_model

log = logging.getLogger("dicompiler")

DeviceNetworks = Mapping[str, Mapping[bytes, EngineFiles]]
"""Files of converted segments in the format of an engine, by the name of the device and the serialized ONNX model."""


def make_engine(name: str) -> Engine:
    engine: Engine = registry().make("engines", name)
    return engine


def convert_segments(program: Program, hoisted: Sequence[Sequence[Sequence[HoistedSegment]]]) -> DeviceNetworks:
    """Convert the segments that the engines of their devices can compute; onnxruntime computes the others.

    Warnings state the causes if segments are not converted.

    Args:
        program: The program of all devices.
        hoisted: For each role (the plan, a replica or a failure plan), each device and each segment: the segment
            without the operators at its inputs and outputs that only move data.

    Returns:
        The converted segments; empty if onnxruntime is the engine of all devices.

    Raises:
        DicompilerError: A package of an engine is not installed.
    """
    names = sorted({device.engine for device in program.devices} - {DEFAULT_ENGINE})
    converters = {name: _SegmentConverter(make_engine(name)) for name in names}
    if not converters:
        return {}
    for converter in converters.values():
        converter.engine.check_installed()
    networks: dict[str, dict[bytes, EngineFiles]] = defaultdict(dict)
    for role, devices in zip(program.roles, hoisted, strict=True):
        tensors = ProgramExecutor(role).run(random_inputs(role.inputs), keep_values=True).values
        for device, segments in zip(role.devices, devices, strict=True):
            for entry in segments:
                if entry.segment is None or device.engine not in converters:
                    continue
                files = converters[device.engine].convert(entry, role.weights, tensors[device.device])
                if files is not None:
                    networks[device.device][serialize_model(entry.segment)] = files
    for converter in converters.values():
        converter.report()
    return networks


class _SegmentConverter:
    """Converts segments to the format of one engine; equal segments are converted only once.

    Attributes:
        engine: The engine to which segments are converted.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._converted: dict[bytes, EngineFiles | None] = {}
        self._causes = Counter[str]()

    def convert(
        self, hoisted: HoistedSegment, weights: Mapping[str, Weight], tensors: Mapping[str, NDArray[Any]]
    ) -> EngineFiles | None:
        """Return the engine's files of a segment; None if onnxruntime must compute the segment.

        `tensors` has example values of the device's tensors by name, for the comparison with onnxruntime.
        """
        assert hoisted.segment is not None
        key = serialize_model(hoisted.segment)
        if key not in self._converted:
            model = Model(hoisted.segment.model, weights)
            self._converted[key] = None
            try:
                self._converted[key] = convert_checked(self.engine, model, make_input_arrays(hoisted, tensors))
            except DeviatingResults as error:
                name = hoisted.segment.name
                log.warning("segment %r: %s %s: onnxruntime computes it", name, self.engine.name, error)
                self._causes["other results than onnxruntime's"] += 1
            except UnsupportedByEngine as error:
                self._causes[str(error)] += 1
        return self._converted[key]

    def report(self) -> None:
        count = sum(files is not None for files in self._converted.values())
        reasons = ", ".join(f"{cause} ({count}×)" for cause, count in sorted(self._causes.items()))
        if reasons:
            log.warning(
                "%s computes %d of %d segments, onnxruntime the others%s, because of %s",
                self.engine.spec,
                count,
                len(self._converted),
                "" if self.engine.precision == FULL_PRECISION else " (without reduced precision)",
                reasons,
            )


def describe_network(engine: str, graph: onnx.GraphProto, weights_file: str) -> Json:
    """Return the manifest entry `engine` of a segment: names of the engine and weights file, inputs, outputs."""
    inputs, outputs = (
        [{"name": v.name, "shape": [d.dim_value for d in v.type.tensor_type.shape.dim]} for v in values]
        for values in (graph.input, graph.output)
    )
    return {"name": make_engine(engine).name, "weights": weights_file, "inputs": inputs, "outputs": outputs}


def describe_packages(engine: str) -> list[Json]:
    """Return the entries of a device's manifest for the Python packages that an engine needs."""
    return [
        {"name": package.name, "min_version": ".".join(map(str, package.min_version))}
        for package in make_engine(engine).packages
    ]


def predict_engine_bytes(program: Program) -> dict[str, int]:
    """Return, by device name, the bytes that its engine needs in addition to those of onnxruntime."""
    return {
        device.device: 0
        if device.engine == DEFAULT_ENGINE
        else make_engine(device.engine).extra_memory([s for role in program.roles for s in role.devices[i].segments])
        for i, device in enumerate(program.devices)
    }
