"""The runtime sources that artifacts contain, and the check that they are those of the installed package.

Boards need no installed package, because the artifact contains the runtime's sources. On this host, only the installed
sources are run or built, because an artifact is data; so its copy must be identical. This module does not import onnx.
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
"""The file of a device's weights, next to its segments."""


def read_runtime_sources(target: str, suffixes: tuple[str, ...]) -> dict[str, bytes]:
    """Return the files of a target's runtime that are in all its artifacts, by name."""
    folder = resources.files(f"dicompiler_targets.{target}").joinpath("runtime")
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {file.name: file.read_bytes() for file in files if file.name.endswith(suffixes)}


def read_benchmark_player(target: str, suffixes: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Return the files of a target's benchmark player; see `Target.benchmark_player`.

    Args:
        target: Name of the target.
        suffixes: Suffixes of the runtime files that the player imports.
    """
    package = resources.files(f"dicompiler_targets.{target}")
    sources = read_runtime_sources(target, suffixes) if suffixes else {}
    runtime = {f"dicompiler_targets/{target}/runtime/{name}": source for name, source in sources.items()}
    return {"play.py": package.joinpath("benchmark_player.py").read_bytes(), **runtime}


def check_bundled_sources(
    directory: Path, document: Mapping[str, Any], found: Mapping[str, str], expected: Mapping[str, str]
) -> None:
    """Check that an artifact's sources are those that this version of dicompiler writes.

    Args:
        directory: The directory of the sources, for messages.
        document: The artifact's artifact.json.
        found: Digests of the artifact's sources, by file.
        expected: Digests of the installed sources, by file.

    Raises:
        DicompilerError: A file differs, is missing or is unexpected.
    """
    names = sorted({*found, *expected})
    wrong = next((name for name in names if found.get(name) != expected.get(name)), None)
    if wrong is not None:
        installed, compiled = package_version(), document["version"]
        alternative = f" or install version {compiled}" if compiled != installed else ""
        raise DicompilerError(
            f"{directory}: its {wrong} differs from that of the installed dicompiler {installed}: "
            f"compile the model again{alternative}"
        )


def hash_sources(sources: Mapping[str, bytes]) -> dict[str, str]:
    """Return the SHA-256 of each file, in the form of manifests."""
    return {name: f"sha256:{hashlib.sha256(content).hexdigest()}" for name, content in sources.items()}
