"""Files that commands read and write: npz and JSON in, npz and text out. What is written appears whole or
not at all."""

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

    from dicompiler.ir.plan import Plan


def write_text(path: Path, text: str) -> None:
    """Writes a text file in UTF-8, whole or not at all."""
    with atomic_file(path) as stage:
        stage.write_text(text, encoding="utf-8")


def write_json(path: Path, document: Any) -> None:
    """Writes a JSON document, whole or not at all; entries of the outermost lists stand on lines of their own."""
    rows = []
    for key, value in document.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  " + ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in value) + "]"
        rows.append(f" {json.dumps(key)}: {text}")
    write_text(path, "{\n" + ",\n".join(rows) + "\n}\n")


def read_plan(path: Path) -> Plan:
    """Reads a plan that somebody gives: no part may stand twice, which is harmless and never meant."""
    from dicompiler.base.schema import format_key_path
    from dicompiler.ir.plan import load_plan

    plan = load_plan(path)
    for name, parts in plan.layers.items():
        for i, part in enumerate(parts):
            if part in parts[:i]:
                place = format_key_path(("layers", name, i))
                raise DicompilerError(f"{path}: {place}: the same part stands there twice: remove one")
    return plan


def write_npz(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes arrays by name, uncompressed, whole or not at all; the same arrays give the same bytes.

    Not with `numpy.savez`, which cannot take tensors that are called like its own arguments ("file").
    """
    import zipfile

    import numpy as np

    with atomic_file(path) as stage, zipfile.ZipFile(stage, "w") as archive:
        for name, array in _flatten_tensors(arrays):
            # A ZipInfo made from a name alone bears no time of writing.
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, _require_tensor(array, f"{path}: {name!r}"), allow_pickle=False)


def _flatten_tensors(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is no tensor as tensors: of a sequence x → x_0, x_1, …; of a map → x_keys, x_values (of one to each number);
    of an optional value that is not there → nothing."""
    import numpy as np

    for name, value in values.items():
        if isinstance(value, list):
            yield from _flatten_tensors({f"{name}_{i}": one for i, one in enumerate(value)})
        elif isinstance(value, Mapping):
            yield f"{name}_keys", np.array(list(value))
            yield f"{name}_values", np.array(list(value.values()))
        elif value is not None:
            yield name, value


def _require_array(value: Any, place: str) -> NDArray[Any]:
    """What an archive holds under a name; bytes where that is no array."""
    import numpy as np

    if not isinstance(value, np.ndarray):
        raise DicompilerError(f"{place} is no array: write the file with numpy.savez")
    return value


def _require_tensor(array: Any, place: str) -> NDArray[Any]:
    """The array, texts with a fixed length. DicompilerError for what is no tensor."""
    import numpy as np

    if not isinstance(array, np.ndarray):
        raise DicompilerError(f"{place} is no tensor, which an npz file cannot hold")
    return array.astype(str) if array.dtype.kind == "O" else array


def read_inputs(path: Path | None) -> dict[str, Any] | None:
    """What --inputs names, an npz file or one of JSON; None: nothing was given."""
    if path is None:
        return None
    if path.suffix != ".json":
        return read_npz(path)
    document = load_json(path)
    if not isinstance(document, dict):
        raise DicompilerError(f'{path}: is no JSON object: give inputs by name, as {{"words": ["a", "b"]}}')
    return document


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an npz file by name. DicompilerError where it is missing, no npz, or holds Python objects."""
    import zipfile

    import numpy as np

    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise DicompilerError(f"{path}: holds a single array; expected an npz file (numpy.savez)")
        with archive:
            return {name: _require_array(archive[name], f"{path}: {name!r}") for name in archive.files}
    except OSError as error:
        raise DicompilerError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile, MemoryError) as error:
        # Of a file that is no zip archive numpy says that it may be a pickle.
        cause = "it is another kind of file" if "pickle" in str(error) else " ".join(str(error).split())
        if "Object arrays" in str(error):
            cause = "it holds Python objects"
        raise DicompilerError(f"{path}: not an npz file of plain arrays: {cause}: write it with numpy.savez") from error
