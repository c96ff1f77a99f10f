"""Files that commands read and write: npz in, npz and text out. What is written appears whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dicompiler.errors import DicompilerError, nearest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dicompiler.program import Value


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write instead of `path`, in a hidden directory beside it; moved in when the block ends well.

    Nothing is left behind by a block that fails.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".dicompiler-") as temporary:
        stage = Path(temporary, path.name)
        yield stage
        os.replace(stage, path)


def write_text(path: Path, text: str) -> None:
    """Writes a text file in UTF-8, whole or not at all."""
    with whole(path) as stage:
        stage.write_text(text, encoding="utf-8")


def write_npz(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Writes arrays by name, uncompressed, whole or not at all; the same arrays give the same bytes.

    Not with `numpy.savez`, which cannot take tensors that are called like its own arguments ("file").
    """
    import zipfile

    import numpy as np

    with whole(path) as stage, zipfile.ZipFile(stage, "w") as archive:
        for name, array in arrays.items():
            # A ZipInfo made from a name alone bears no time of writing.
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an npz file by name. DicompilerError where it is missing, no npz, or holds Python objects."""
    import zipfile

    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as archive:
            if not hasattr(archive, "files"):
                raise DicompilerError(f"{path}: holds a single array; expected an npz file (numpy.savez)")
            return {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DicompilerError(f"{path}: not an npz file of plain arrays: {' '.join(str(error).split())}") from error


def check_arrays(arrays: Mapping[str, NDArray[Any]], values: Sequence[Value], place: str) -> dict[str, NDArray[Any]]:
    """`arrays` in the order of the graph inputs `values`. DicompilerError names `place`, the input and what it must be.

    The types that npz files do not know (bfloat16, float8) are stored there as raw bytes: they are taken as what the
    input is.
    """
    names = [value.name for value in values]
    for name in arrays:
        if name not in names:
            raise DicompilerError(f"{place}: there is no input {name!r}{nearest(name, names)}")
    checked = {}
    for value in values:
        if value.name not in arrays:
            raise DicompilerError(
                f"{place}: input {value.name!r} is missing; the file holds {', '.join(arrays) or 'nothing'}"
            )
        checked[value.name] = _check_array(arrays[value.name], value, f"{place}: input {value.name!r}")
    return checked


def _check_array(array: NDArray[Any], value: Value, place: str) -> NDArray[Any]:
    import onnx

    wanted: np.dtype[Any] = onnx.helper.tensor_dtype_to_np_dtype(value.dtype)
    if array.dtype.kind == "V" and array.dtype.itemsize == wanted.itemsize and array.dtype.names is None:
        array = array.view(wanted)
    if array.dtype.newbyteorder("=") == wanted:
        array = array.astype(wanted, copy=False)
    if array.dtype != wanted:
        raise DicompilerError(f"{place} must be {wanted}, not {array.dtype}")
    if value.shape is not None and array.shape != value.shape:
        raise DicompilerError(f"{place} must have shape {_dims(value.shape)}, not {_dims(array.shape)}")
    return array


def _dims(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"
