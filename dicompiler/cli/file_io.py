"""Input and output files of commands: npz, JSON and text. Files are written completely or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dicompiler.base.atomic_output import atomic_file
from dicompiler.base.errors import DicompilerError
from dicompiler.base.schema import load_json

if TYPE_CHECKING:
    from numpy.typing import NDArray


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as stage:
        # If the locale is not UTF-8, names of files in the text have surrogates for their bytes.
        stage.write_text(text, encoding="utf-8", errors="surrogateescape")


def write_json(path: Path, document: Any) -> None:
    """Write a JSON object. Top-level lists of objects have one line per entry."""
    rows = []
    for key, value in document.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  " + ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in value) + "]"
        rows.append(f" {json.dumps(key)}: {text}")
    write_text(path, "{\n" + ",\n".join(rows) + "\n}\n")


def write_npz(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays to an npz file. Equal arrays give equal bytes."""
    import zipfile

    import numpy as np

    # `numpy.savez` cannot store a tensor with the name of one of its own parameters ("file").
    with atomic_file(path) as stage, zipfile.ZipFile(stage, "w") as archive:
        for name, array in _flatten_tensors(arrays):
            # A default ZipInfo has a fixed date, so the bytes do not depend on the time.
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, _require_tensor(array, f"{path}: {name!r}"), allow_pickle=False)


def _flatten_tensors(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) for all values, and replace ONNX sequences and maps by several tensors.

    A sequence x becomes x_0, x_1, …; a map x becomes x_keys and x_values; an empty optional is omitted.
    """
    import numpy as np

    for name, value in values.items():
        if isinstance(value, list):
            yield from _flatten_tensors({f"{name}_{i}": item for i, item in enumerate(value)})
        elif isinstance(value, Mapping):
            yield f"{name}_keys", np.array(list(value))
            yield f"{name}_values", np.array(list(value.values()))
        elif value is not None:
            yield name, value


def _require_array(value: Any, place: str) -> NDArray[Any]:
    import numpy as np

    if not isinstance(value, np.ndarray):
        raise DicompilerError(f"{place} is not an array: write the file with numpy.savez")
    return value


def _require_tensor(array: Any, place: str) -> NDArray[Any]:
    """Return the value if it is an array. `place` is the beginning of the error message.

    An array of Python strings is converted to a NumPy string type, because npz files store objects only as pickles.

    Raises:
        DicompilerError: The value is not an array.
    """
    import numpy as np

    if not isinstance(array, np.ndarray):
        raise DicompilerError(f"{place} is not a tensor, so it cannot be stored in an npz file")
    return array.astype(str) if array.dtype.kind == "O" else array


def read_inputs(path: Path | None) -> dict[str, Any] | None:
    """Read the file of --inputs (npz or JSON). Return None if `path` is None."""
    if path is None:
        return None
    if path.suffix != ".json":
        return read_npz(path)
    document = load_json(path)
    if not isinstance(document, dict):
        raise DicompilerError(f'{path}: not a JSON object: give inputs by name, such as {{"words": ["a", "b"]}}')
    return document


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an npz file by name.

    Raises:
        DicompilerError: The file is missing or invalid.
    """
    import zipfile

    import numpy as np

    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise DicompilerError(f"{path}: contains a single array; expected an npz file (numpy.savez)")
        with archive:
            return {name: _require_array(archive[name], f"{path}: {name!r}") for name in archive.files}
    except OSError as error:
        raise DicompilerError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile, MemoryError) as error:
        # For a file that is not a zip archive, NumPy's message suggests that it is a pickle.
        cause = "it is not a zip archive" if "pickle" in str(error) else " ".join(str(error).split())
        if "Object arrays" in str(error):
            cause = "it contains Python objects"
        raise DicompilerError(f"{path}: not an npz file of plain arrays: {cause}: write it with numpy.savez") from error
