"""Artifacts that were changed: one byte by chance; or on purpose and sealed again, as a stranger could write them.

In: an artifact's directory. Out: the same, with another content.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from dicompiler.base.schema import load_json
from dicompiler.target.integrity import format_checksummed_json, make_file_record, write_integrity


def flip(path: Path, random: Random) -> tuple[int, bytes]:
    """Changes one byte; (where, what the file held)."""
    data = path.read_bytes()
    at, other = random.randrange(len(data)), random.randrange(1, 256)
    path.write_bytes(data[:at] + bytes([data[at] ^ other]) + data[at + 1 :])
    return at, data


def rewrite(path: Path, change: Callable[[Any], object]) -> None:
    """Changes the JSON object of a sealed file, and seals it again."""
    document = load_json(path)
    change(document)
    path.write_text(format_checksummed_json(document), encoding="utf-8")


def reseal(artifact: Path) -> Path:
    """Makes of a sockets artifact whose files were changed one that holds together."""
    for path in artifact.glob("*/manifest.json"):
        for name in load_json(path).get("files", {}):
            file = path.parent / name
            if file.is_file():
                record = make_file_record(file)
                rewrite(path, lambda document, name=name, record=record: document["files"].update({name: record}))
    write_integrity(artifact)
    return artifact


def named(artifact: Path) -> list[str]:
    """All files that its artifact.json names, and itself."""
    return ["artifact.json", *json.loads((artifact / "artifact.json").read_bytes())["files"]]
