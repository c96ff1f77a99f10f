"""Artifacts that are changed: by one random byte, or on purpose and with valid checksums, as an attacker would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from dicompiler.base.schema import load_json
from dicompiler.target.manifest import format_checksummed_json, make_file_record, write_digests_and_checksum


def flip(path: Path, random: Random) -> tuple[int, bytes]:
    """Change one random byte of a file; return its offset and the file's content before."""
    data = path.read_bytes()
    at, other = random.randrange(len(data)), random.randrange(1, 256)
    path.write_bytes(data[:at] + bytes([data[at] ^ other]) + data[at + 1 :])
    return at, data


def rewrite(path: Path, change: Callable[[Any], object]) -> None:
    """Change the JSON object in a file with a checksum, and update the checksum."""
    document = load_json(path)
    change(document)
    path.write_text(format_checksummed_json(document), encoding="utf-8")


def reseal(artifact: Path) -> Path:
    """Update all digests of a sockets artifact after its files were changed."""
    for path in artifact.glob("*/manifest.json"):
        for name in load_json(path).get("files", {}):
            file = path.parent / name
            if file.is_file():
                record = make_file_record(file)
                rewrite(path, lambda document, name=name, record=record: document["files"].update({name: record}))
    write_digests_and_checksum(artifact)
    return artifact


def named(artifact: Path) -> list[str]:
    """Return artifact.json and the files that it lists."""
    return ["artifact.json", *json.loads((artifact / "artifact.json").read_bytes())["files"]]
