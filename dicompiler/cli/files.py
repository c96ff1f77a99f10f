"""Files that commands read and write: npz in, npz and text out. What is written appears whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dicompiler.errors import DicompilerError

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
                np.lib.format.write_array(member, _storable(array, f"{path}: {name!r}"), allow_pickle=False)


def _storable(array: Any, place: str) -> NDArray[Any]:
    """The array, texts with a fixed length. DicompilerError for what is no tensor."""
    import numpy as np

    if not isinstance(array, np.ndarray):
        raise DicompilerError(f"{place} is no tensor, which an npz file cannot hold")
    return array.astype(str) if array.dtype.kind == "O" else array


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an npz file by name. DicompilerError where it is missing, no npz, or holds Python objects."""
    import zipfile

    import numpy as np

    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise DicompilerError(f"{path}: holds a single array; expected an npz file (numpy.savez)")
        with archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DicompilerError(f"{path}: not an npz file of plain arrays: {' '.join(str(error).split())}") from error
