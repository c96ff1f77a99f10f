"""Networks in the engine ncnn, in float32 or in the precision that the last line of the .param file states.

ncnn has no batch axis, so tensors of shape (1, …) are passed without their first axis. The module needs only numpy and
ncnn, because `dicompiler profile` copies it to boards.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PRECISION_OPTIONS = {
    "fp16": ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic"),
    "bf16": ("use_bf16_packed", "use_bf16_storage"),
}
"""Options of ncnn that round values to 16 bits, by precision.

By default, ncnn sets some of them if the processor supports them, so all of them are set explicitly.
"""
PRECISION_KEY = "precision="
"""Start of the last line of a .param file with reduced precision. ncnn itself ignores this line."""


class EngineNetwork:
    """A network that ncnn has loaded. Its inputs have the names in0, in1, …, and its outputs out0, out1, …."""

    def __init__(self, network: Path, weights: Path, threads: int, is_spinning: bool) -> None:
        """Load the files of a network; raise ValueError if ncnn or the processor cannot compute it.

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
        precision = read_precision(network)
        check_precision(ncnn, precision)
        for name, options in PRECISION_OPTIONS.items():
            for option in options:
                if hasattr(self._net.opt, option):  # Older releases of ncnn do not have all options.
                    setattr(self._net.opt, option, name == precision)
        for load, file in ((self._net.load_param, network), (self._net.load_model, weights)):
            if load(str(file)) != 0:
                raise ValueError(f"ncnn cannot load {file.name}")
        self._kept: list[Any] = []

    def run(self, inputs: Sequence[Any], shapes: Sequence[Sequence[int]]) -> list[Any]:
        """Compute the network's outputs, which are valid until the next call.

        `shapes` has the expected shape of each output. Raise ValueError if ncnn fails or an output has another shape.
        """
        extractor = self._net.create_extractor()
        for i, array in enumerate(inputs):
            # The blob is a copy of the input, because ncnn's layers may overwrite their input blobs.
            if extractor.input(f"in{i}", self._ncnn.Mat(array[0]).clone()) != 0:
                raise ValueError(f"ncnn does not accept input {i}")
        # The returned arrays use memory of the extractor and its blobs, so both must exist until the next call.
        self._kept = [extractor]
        outputs = []
        for i, shape in enumerate(shapes):
            code, mat = extractor.extract(f"out{i}")
            array = np.asarray(mat)
            if code != 0 or array.shape != tuple(shape[1:]):
                raise ValueError(
                    f"output {i} has shape {array.shape} in ncnn (exit code {code}), but {shape[1:]} in the model"
                )
            self._kept.append(mat)
            outputs.append(array[None])
        return outputs


def read_precision(network: Path) -> str:
    """Return the precision that the last line of a .param file states; fp32 if it states none."""
    last_line = network.read_bytes().rstrip().rpartition(b"\n")[2].decode(errors="replace")
    return last_line.removeprefix(PRECISION_KEY) if last_line.startswith(PRECISION_KEY) else "fp32"


def check_precision(ncnn: Any, precision: str) -> None:
    if precision not in ("fp32", *PRECISION_OPTIONS):
        raise ValueError(f"ncnn does not know the precision {precision!r}: expected fp32, fp16 or bf16")
    if precision == "bf16" and not hasattr(ncnn.Option(), "use_bf16_storage"):
        raise ValueError(f"ncnn {ncnn.__version__} has no bf16: run 'pip install --upgrade ncnn'")
    if precision == "fp16" and not _has_fp16(ncnn):
        # Without this error, ncnn would ignore the option and compute in fp32.
        raise ValueError("the processor has no fp16: compile with --precision bf16 or fp32")


def _has_fp16(ncnn: Any) -> bool:
    if platform.machine() not in ("x86_64", "AMD64"):
        return bool(ncnn.cpu_support_arm_asimdhp())
    # ncnn's Python package does not show whether an x86 processor has the extension F16C, so Linux's list of processor
    # features is read.
    cpuinfo = Path("/proc/cpuinfo")
    return not cpuinfo.exists() or " f16c " in cpuinfo.read_text(encoding="utf-8", errors="replace")
