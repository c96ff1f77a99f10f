"""Sessions for segments that engines other than onnxruntime compute.

The sessions have those methods of an onnxruntime session that the runtime calls. A segment (ONNX sub-model) that was
converted at compile time has two files. The class `EngineNetwork` of its engine loads and runs them. The class is in
the module `engine_NAME` of this package, or in the installed module `dicompiler_engine_NAME`.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

FLOAT_BYTES = 4


@dataclass(frozen=True)
class TensorDescription:
    """An input or output of a session, with the attributes of onnxruntime's NodeArg."""

    name: str
    shape: Sequence[int]
    type: str = "tensor(float)"


class NetworkBinding:
    """The inputs and outputs of a call, with the methods of onnxruntime's IOBinding that the runtime calls.

    Attributes:
        inputs: Bound values by name.
        outputs: For each output by name, the existing value into which the call writes, or None for a new value. After
            the call: the computed values.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self.inputs[name] = value

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        self.outputs[name] = value

    def bind_output(self, name: str) -> None:
        self.outputs[name] = None

    def get_outputs(self) -> list[Any]:
        return list(self.outputs.values())


class NetworkSession:
    """A session that computes a segment with another engine than onnxruntime. Its tensors have type float."""

    def __init__(self, directory: Path, segment: Mapping[str, Any], threads: int, is_spinning: bool) -> None:
        """Load the files of a segment.

        `segment` is its entry in the manifest. If `is_spinning`, the threads wait actively between two calls. Raise
        ValueError if the engine is missing or cannot load the files.
        """
        engine = segment["engine"]
        paths = directory / segment["file"], directory / engine["weights"]
        self._network = find_network_class(engine["name"])(*paths, threads, is_spinning)
        self._inputs = [TensorDescription(value["name"], value["shape"]) for value in engine["inputs"]]
        self._outputs = [TensorDescription(value["name"], value["shape"]) for value in engine["outputs"]]

    def get_inputs(self) -> list[TensorDescription]:
        return self._inputs

    def get_outputs(self) -> list[TensorDescription]:
        return self._outputs

    def io_binding(self) -> NetworkBinding:
        return NetworkBinding()

    def run_with_iobinding(self, binding: NetworkBinding, _run_options: Any = None) -> None:
        """Compute the outputs of a binding. A call cannot be stopped, so the options of the run are ignored."""
        inputs = [_float_view(binding.inputs[value.name]) for value in self._inputs]
        arrays = self._network.run(inputs, [value.shape for value in self._outputs])
        for value, array in zip(self._outputs, arrays, strict=True):
            if binding.outputs[value.name] is None:
                # The value is a copy of the array, because the engine reuses the array's memory in the next call.
                binding.outputs[value.name] = ort.OrtValue.ortvalue_from_numpy(np.array(array, order="C"))
            else:
                np.copyto(_float_view(binding.outputs[value.name]), array)


def find_network_class(engine: str) -> Any:
    """Return the class `EngineNetwork` of an engine; raise ValueError if this device has no module of the engine."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", engine):
        raise ValueError(f"{engine!r} is not a valid name of an engine")
    own, installed = f"{__package__}.engine_{engine}", f"dicompiler_engine_{engine}"
    name = own if importlib.util.find_spec(own) is not None else installed
    try:
        return importlib.import_module(name).EngineNetwork
    except ImportError as error:
        raise ValueError(f"the engine {engine} is not installed ({error}): install the module {installed}") from error


def check_packages(packages: Iterable[Mapping[str, str]]) -> None:
    """Raise ValueError with a pip command if a package that the manifest lists is missing or too old."""
    for package in packages:
        name, oldest = package["name"], package["min_version"]
        try:
            found = metadata.version(name)
            importlib.import_module(name)
        except ImportError as error:
            raise ValueError(f"the package {name} is not installed ({error}): run 'pip install {name}'") from error
        if _release(found) < _release(oldest):
            cause = f"{name} {found} is too old, {oldest} or newer is needed"
            raise ValueError(f"{cause}: run 'pip install --upgrade {name}'")


def _release(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def _float_view(value: Any) -> np.ndarray[Any, Any]:
    """Return an array that uses the memory of an onnxruntime value of type float."""
    shape = value.shape()
    if value.data_type() != "tensor(float)":
        raise ValueError(f"only tensors of type float can be computed, not {value.data_type()}")
    buffer = (ctypes.c_ubyte * (FLOAT_BYTES * math.prod(shape))).from_address(value.data_ptr())
    return np.frombuffer(buffer, np.float32).reshape(shape)
