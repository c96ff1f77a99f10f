"""What an artifact holds of the installed package, so that boards need nothing else: the sources of runtimes. What is
run or built here is the installed one, and the copy must be the same: an artifact is data. Needs nothing of ONNX.

In: a target's name, digests. Out: sources; one line where a copy is another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from dicompiler.plugin_api import DicompilerError
from dicompiler.plugin_api.utilities import package_version

WEIGHTS_FILE = "weights.bin"
"""A device's file of weights, beside its segments."""


def read_runtime_sources(target: str, endings: tuple[str, ...]) -> dict[str, bytes]:
    """The sources in the runtime of a target's package that go into all its artifacts as they are, by name."""
    folder = resources.files(f"dicompiler_targets.{target}").joinpath("runtime")
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {file.name: file.read_bytes() for file in files if file.name.endswith(endings)}


def read_benchmark_player(target: str, endings: tuple[str, ...] = ()) -> dict[str, bytes]:
    """A target's player, and with `endings` its runtime where the player imports it from: see Target.player."""
    package = resources.files(f"dicompiler_targets.{target}")
    sources = read_runtime_sources(target, endings) if endings else {}
    copies = {f"dicompiler_targets/{target}/runtime/{name}": source for name, source in sources.items()}
    return {"play.py": package.joinpath("player.py").read_bytes(), **copies}


def check_bundled_sources(
    directory: Path, document: Mapping[str, Any], found: Mapping[str, str], wanted: Mapping[str, str]
) -> None:
    """That an artifact's own copy of what is run or built is what this dicompiler writes: an artifact is data. found,
    wanted: digests by file. DicompilerError for the first that differs, is missing, or should not be there."""
    wrong = next((name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name)), None)
    if wrong is not None:
        here, theirs = package_version(), document["version"]
        other = f" or install version {theirs}" if theirs != here else ""
        raise DicompilerError(
            f"{directory}: its {wrong} differs from that of the installed dicompiler {here}: compile it again{other}"
        )


def hash_sources(sources: Mapping[str, bytes]) -> dict[str, str]:
    """SHA-256 by file, as manifests have it: code is told apart by nothing less."""
    return {name: f"sha256:{hashlib.sha256(content).hexdigest()}" for name, content in sources.items()}
