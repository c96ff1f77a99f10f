"""Networks in the engine MNN, in float32.

The module needs only numpy and MNN, because `dicompiler profile` copies it to boards.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

STDOUT = 1
"""File descriptor to which MNN prints messages, such as the features of the processor."""
SESSION_OPTIONS = {"backend": "CPU", "precision": "high"}
"""Options of MNN's sessions. With another precision than "high", MNN may compute in fp16 or bf16."""

ACCURATE_MARK = b"\naccurate\n"
"""End of the file of a network that is computed more accurately. MNN ignores bytes after the network."""
WINOGRAD_MEMORY_LEVEL, SMALL_TILES = 3, 1
"""Number of a hint for MNN's sessions, and its value for which Winograd's algorithm computes tiles of 2×2 values."""


class MnnNetwork:
    """A network that MNN has loaded. Its inputs have the names in0, in1, …, and its outputs out0, out1, …."""

    def __init__(self, network: Path, weights: Path, threads: int, is_spinning: bool) -> None:  # noqa: ARG002
        """Load the files of a network; raise ValueError if MNN is not installed or cannot load them.

        `is_spinning` has no effect, because MNN's threads always sleep between two calls.
        """
        with discard_native_prints():
            try:
                import MNN
            except ImportError as error:
                raise ValueError(f"the engine mnn is not installed ({error}): run 'pip install MNN'") from error
            try:
                self._interpreter = MNN.Interpreter(str(network))
                self._interpreter.setExternalFile(str(weights))
                if network.read_bytes().endswith(ACCURATE_MARK):
                    self._interpreter.setSessionHint(WINOGRAD_MEMORY_LEVEL, SMALL_TILES)
                self._session = self._interpreter.createSession({**SESSION_OPTIONS, "numThread": threads})
                inputs = self._interpreter.getSessionInputAll(self._session)
                outputs = self._interpreter.getSessionOutputAll(self._session)
                self._inputs = [_HostCopy(MNN, inputs[f"in{i}"]) for i in range(len(inputs))]
                self._outputs = [_HostCopy(MNN, outputs[f"out{i}"]) for i in range(len(outputs))]
            except Exception as error:  # MNN raises objects of class Exception.
                raise ValueError(f"MNN cannot load {network.name}: {error}") from error

    def run(self, inputs: Sequence[Any], shapes: Sequence[Sequence[int]]) -> list[Any]:
        """Compute the network's outputs, which are valid until the next call.

        `shapes` has the expected shape of each output. Raise ValueError if MNN fails or an output has another shape.
        """
        for copy, array in zip(self._inputs, inputs, strict=True):
            np.copyto(copy.array, array)
            copy.tensor.copyFrom(copy.host_tensor)
        if code := self._interpreter.runSession(self._session):
            raise ValueError(f"MNN fails with the error code {code}")
        for i, (copy, shape) in enumerate(zip(self._outputs, shapes, strict=True)):
            if copy.array.shape != tuple(shape):
                raise ValueError(f"output {i} has shape {copy.array.shape} in MNN, but {tuple(shape)} in the model")
            copy.tensor.copyToHostTensor(copy.host_tensor)
        return [copy.array for copy in self._outputs]


class _HostCopy:
    """A tensor of a session, and a copy of it in the memory layout of numpy.

    The session may store channels in groups of 4 or 8, and it may reuse the tensor's memory for other tensors.

    Attributes:
        tensor: The tensor of the session.
        host_tensor: The copy.
        array: The values of the copy, in the same memory.
    """

    def __init__(self, mnn: Any, tensor: Any) -> None:
        shape = tensor.getShape()
        zeros = np.zeros(shape, np.float32)
        self.tensor = tensor
        self.host_tensor = mnn.Tensor(shape, mnn.Halide_Type_Float, zeros, mnn.Tensor_DimensionType_Caffe)
        self.array = self.host_tensor.getNumpyData()


EngineNetwork = MnnNetwork
"""The class under the name that all modules of engines use."""


@contextmanager
def discard_native_prints() -> Iterator[None]:
    """Return a context manager in which prints of C code to stdout are discarded.

    MNN prints when it is imported and when it creates a session. Programs that read the output of this process, such
    as JSON, must not see these messages.
    """
    flush_native_streams = ctypes.CDLL(None).fflush
    flush_native_streams(None)
    try:
        saved = os.dup(STDOUT)
    except OSError:  # The process has no stdout.
        yield
        return
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), STDOUT)
    try:
        yield
    finally:
        # Without a flush, C code would write its buffered messages to the restored stdout later.
        flush_native_streams(None)
        os.dup2(saved, STDOUT)
        os.close(saved)
