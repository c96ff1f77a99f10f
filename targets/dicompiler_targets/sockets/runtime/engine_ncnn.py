"""Networks in the engine ncnn, in float32.

ncnn has no batch axis, so tensors of shape (1, …) are passed without their first axis. The blobs (tensors) of a network
are named in0, in1, … and out0, out1, …. This module needs numpy and ncnn only, because `profile` copies it to boards.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

REDUCED_PRECISION_OPTIONS = ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage")
"""Options of ncnn that round values to 16 bits. By default, ncnn sets some of them if the processor supports it."""


class EngineNetwork:
    """A network that ncnn has loaded."""

    def __init__(self, network: Path, weights: Path, threads: int, is_spinning: bool) -> None:
        """Load the files of a network; raise ValueError if ncnn is missing or cannot load them.

        If `is_spinning` is false, threads without work sleep at once instead of waiting actively.
        """
        try:
            import ncnn
        except ImportError as error:
            raise ValueError(f"the engine ncnn is not installed ({error}): run 'pip install ncnn'") from error
        self._ncnn, self._net = ncnn, ncnn.Net()
        self._net.opt.num_threads = threads
        if not is_spinning:
            self._net.opt.openmp_blocktime = 0
        for option in REDUCED_PRECISION_OPTIONS:
            setattr(self._net.opt, option, False)
        for load, file in ((self._net.load_param, network), (self._net.load_model, weights)):
            if load(str(file)) != 0:
                raise ValueError(f"ncnn cannot load {file.name}")
        self._kept: list[Any] = []

    def run(self, inputs: Sequence[Any], shapes: Sequence[Sequence[int]]) -> list[Any]:
        """Return the outputs; raise ValueError if ncnn fails or an output does not have the expected shape.

        `shapes` has the expected shape of each output. The outputs are valid until the next call.
        """
        extractor = self._net.create_extractor()
        for i, array in enumerate(inputs):
            # The blob is a copy of the input, because ncnn's layers may overwrite their input blobs.
            if extractor.input(f"in{i}", self._ncnn.Mat(array[0]).clone()) != 0:
                raise ValueError(f"ncnn does not accept input {i}")
        self._kept = [extractor]  # The returned arrays use memory of the extractor and its blobs.
        outputs = []
        for i, shape in enumerate(shapes):
            code, mat = extractor.extract(f"out{i}")
            array = np.asarray(mat)
            if code != 0 or array.shape != tuple(shape[1:]):
                raise ValueError(f"ncnn computes output {i} with shape {array.shape}, not {shape[1:]} (code {code})")
            self._kept.append(mat)
            outputs.append(array[None])
        return outputs
