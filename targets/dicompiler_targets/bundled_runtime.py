"""The runtime's source files in artifacts, and the check that they are identical to the installed ones.

Boards need no installed package, because the artifact contains the runtime. On this host, only the installed runtime is
run or compiled, because artifacts must not bring their own code. This module must not import onnx.
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
"""Name of the file with a device's weights, next to the device's segments."""


def read_runtime_sources(target: str, suffixes: tuple[str, ...]) -> dict[str, bytes]:
    """Return the content of the runtime's source files, by file name; only names that end with one of `suffixes`."""
    folder = resources.files(f"dicompiler_targets.{target}").joinpath("runtime")
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {file.name: file.read_bytes() for file in files if file.name.endswith(suffixes)}


def read_benchmark_player(target: str, suffixes: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Return the content of the files of a target's benchmark player, by path.

    The player is a program that runs artifacts on a board and prints the times of their frames. It includes the
    runtime's files with these suffixes.
    """
    package = resources.files(f"dicompiler_targets.{target}")
    sources = read_runtime_sources(target, suffixes) if suffixes else {}
    runtime = {f"dicompiler_targets/{target}/runtime/{name}": source for name, source in sources.items()}
    return {"play.py": package.joinpath("benchmark_player.py").read_bytes(), **runtime}


def check_bundled_sources(
    directory: Path, document: Mapping[str, Any], found: Mapping[str, str], expected: Mapping[str, str]
) -> None:
    """Raise DicompilerError if an artifact's copy of the runtime differs from the installed source files.

    Args:
        directory: The artifact's directory.
        document: The content of its artifact.json.
        found: Digests of the artifact's source files, by name.
        expected: Digests of the installed source files, by name.
    """
    wrong = [name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name)]
    if wrong:
        installed, compiled = package_version(), document["version"]
        remedy = f"compile the model again{'' if compiled == installed else f' or install version {compiled}'}"
        raise DicompilerError(f"{directory}: {wrong[0]} differs from that of dicompiler {installed}: {remedy}")


def hash_sources(sources: Mapping[str, bytes]) -> dict[str, str]:
    return {name: f"sha256:{hashlib.sha256(content).hexdigest()}" for name, content in sources.items()}
