"""Samples of a network's inputs, from a file: what ranges of its tensors are measured with.

.npz file + the network's inputs → a list of inputs by name, checked
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.base.errors import DicompilerError, did_you_mean
from dicompiler.ir.program import TensorSpec

Samples = list[dict[str, NDArray[Any]]]


def read_samples(path: Path, inputs: tuple[TensorSpec, ...]) -> Samples:
    """The samples in a file, checked against the network's inputs: an array for each, samples one after another along a
    first axis of its own. DicompilerError for what does not fit."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is no .npz file of arrays"
        raise DicompilerError(f"{path}: the samples cannot be read: {reason}") from None
    known = [value.name for value in inputs]
    for name in arrays:
        if name not in known:
            raise DicompilerError(f"{path}: the network has no input {name!r}{did_you_mean(name, known)}")
    for value in inputs:
        _check_array(path, value, arrays)
    counts = {len(arrays[name]) for name in known}
    if not counts:
        raise DicompilerError(f"{path}: the network has no inputs: nothing of it can be calibrated")
    if len(counts) > 1:
        raise DicompilerError(f"{path}: its arrays hold {sorted(counts)} samples: give as many for every input")
    return [{name: arrays[name][i] for name in known} for i in range(*counts)]


def _check_array(path: Path, value: TensorSpec, arrays: Mapping[str, NDArray[Any]]) -> None:
    if value.shape is None:
        raise DicompilerError(f"{path}: input {value.name!r} has no static shape: fix its dimensions (--shape)")
    if value.name not in arrays:
        raise DicompilerError(f"{path}: no samples of input {value.name!r}: give some of every input")
    array, dtype = arrays[value.name], np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.dtype))
    shape = value.shape
    if array.ndim != len(shape) + 1 or array.shape[1:] != shape or not len(array):
        raise DicompilerError(
            f"{path}: samples of input {value.name!r} have the shape {array.shape}: give (samples, "
            f"{', '.join(map(str, shape))})"
        )
    if array.dtype != dtype:
        raise DicompilerError(f"{path}: samples of input {value.name!r} are of type {array.dtype}: give {dtype}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DicompilerError(f"{path}: samples of input {value.name!r} hold NaN or infinity: leave such samples out")
