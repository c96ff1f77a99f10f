"""Reading of sample inputs from an .npz file.

Value ranges of tensors are measured on these samples, for example to send tensors as int8.
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
    """Read samples of a network's inputs from a file and check their types and shapes.

    Args:
        path: An .npz file with one array for each input: the samples stacked along a new first axis.
        inputs: The network's inputs.

    Returns:
        For each sample, a dict of arrays by input name.

    Raises:
        DicompilerError: The file cannot be read, or an array does not match its input.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not an .npz file of arrays"
        raise DicompilerError(f"{path}: the samples cannot be read: {reason}") from None
    names = [value.name for value in inputs]
    for name in arrays:
        if name not in names:
            raise DicompilerError(f"{path}: the network has no input {name!r}{did_you_mean(name, names)}")
    for value in inputs:
        _check_array(path, value, arrays)
    counts = {len(arrays[name]) for name in names}
    if not counts:
        raise DicompilerError(f"{path}: the network has no inputs, so it cannot be calibrated: omit the samples")
    if len(counts) > 1:
        raise DicompilerError(
            f"{path}: the numbers of samples of the inputs are {sorted(counts)}: give the same number for every input"
        )
    return [{name: arrays[name][i] for name in names} for i in range(*counts)]


def _check_array(path: Path, value: TensorSpec, arrays: Mapping[str, NDArray[Any]]) -> None:
    if value.shape is None:
        raise DicompilerError(f"{path}: input {value.name!r} has no static shape: give its shape (--shape)")
    if value.name not in arrays:
        raise DicompilerError(f"{path}: no samples of input {value.name!r}: give samples of every input")
    array, dtype = arrays[value.name], np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.dtype))
    shape = value.shape
    if array.ndim != len(shape) + 1 or array.shape[1:] != shape or not len(array):
        raise DicompilerError(
            f"{path}: samples of input {value.name!r} have the shape {array.shape}: give the shape (samples, "
            f"{', '.join(map(str, shape))})"
        )
    if array.dtype != dtype:
        raise DicompilerError(f"{path}: samples of input {value.name!r} are of type {array.dtype}: give {dtype}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DicompilerError(f"{path}: samples of input {value.name!r} hold NaN or infinity: remove these samples")
