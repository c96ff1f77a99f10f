"""Segments in ncnn: sessions with the methods of onnxruntime's that `segments` and `executor` use.

A segment that was converted at compile time has two files: layers (.param) and weights (.bin). ncnn has no batch axis,
so tensors of shape (1, …) are passed without their first axis.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

REDUCED_PRECISION_OPTIONS = ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage")
"""Options of ncnn that round values to 16 bits. By default, ncnn sets some of them if the processor supports it."""
FLOAT_BYTES = 4


@dataclass(frozen=True)
class TensorDescription:
    """An input or output of a session, with the attributes of onnxruntime's NodeArg."""

    name: str
    shape: Sequence[int]
    type: str = "tensor(float)"


class NcnnBinding:
    """The inputs and outputs of a call, as onnxruntime's IOBinding.

    Attributes:
        inputs: Bound values by name.
        outputs: Values to write into by name, None for a new value. After the call, they are the computed values.
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


class NcnnSession:
    """A segment that ncnn computes in float32. The blobs of its network are in0, in1, … and out0, out1, …."""

    def __init__(self, directory: Path, segment: Mapping[str, Any], threads: int, is_spinning: bool) -> None:
        """Load the files of a segment.

        `segment` is its entry in the manifest. If `is_spinning`, threads wait actively for the next segment. Raise
        ValueError if the package ncnn is missing or cannot load the files.
        """
        try:
            import ncnn
        except ImportError as error:
            raise ValueError(f"its engine is not installed ({error}): run 'pip install ncnn'") from error
        network = segment["ncnn"]
        self._ncnn, self._net = ncnn, ncnn.Net()
        self._net.opt.num_threads = threads
        if not is_spinning:
            self._net.opt.openmp_blocktime = 0
        for option in REDUCED_PRECISION_OPTIONS:
            setattr(self._net.opt, option, False)
        for load, file in ((self._net.load_param, segment["file"]), (self._net.load_model, network["weights"])):
            if load(str(directory / file)) != 0:
                raise ValueError(f"ncnn cannot load {file}")
        self._inputs = [TensorDescription(value["name"], value["shape"]) for value in network["inputs"]]
        self._outputs = [TensorDescription(value["name"], value["shape"]) for value in network["outputs"]]

    def get_inputs(self) -> list[TensorDescription]:
        return self._inputs

    def get_outputs(self) -> list[TensorDescription]:
        return self._outputs

    def io_binding(self) -> NcnnBinding:
        return NcnnBinding()

    def run_with_iobinding(self, binding: NcnnBinding, _run_options: Any = None) -> None:
        """Compute the outputs of a binding. A call cannot be stopped, so the options of the run are ignored."""
        extractor = self._net.create_extractor()
        for i, value in enumerate(self._inputs):
            # A copy, because layers that work in place may write into the blob.
            blob = self._ncnn.Mat(_float_view(binding.inputs[value.name])[0]).clone()
            if extractor.input(f"in{i}", blob) != 0:
                raise ValueError(f"ncnn does not accept the input {value.name!r}")
        for i, value in enumerate(self._outputs):
            code, mat = extractor.extract(f"out{i}")
            array, shape = np.asarray(mat), tuple(value.shape[1:])
            if code != 0 or array.shape != shape:
                raise ValueError(f"ncnn computes {value.name!r} with shape {array.shape}, not {shape} (code {code})")
            if binding.outputs[value.name] is None:
                # A copy, because the memory of ncnn has gaps between channels and is freed with the extractor.
                binding.outputs[value.name] = ort.OrtValue.ortvalue_from_numpy(np.array(array, order="C")[None])
            else:
                np.copyto(_float_view(binding.outputs[value.name])[0], array)


def _float_view(value: Any) -> np.ndarray[Any, Any]:
    """Return an array that uses the memory of an onnxruntime value of type float."""
    shape = value.shape()
    if value.data_type() != "tensor(float)":
        raise ValueError(f"ncnn computes only tensors of type float, not {value.data_type()}")
    buffer = (ctypes.c_ubyte * (FLOAT_BYTES * math.prod(shape))).from_address(value.data_ptr())
    return np.frombuffer(buffer, np.float32).reshape(shape)
