"""The runtime's source files in artifacts, and the check that they are identical to the installed ones.

Boards need no installed package, because the artifact contains the runtime. On this host, only the installed runtime is
run or compiled, because artifacts must not bring their own code. This module does not import onnx, so that processes
that only run artifacts need few packages.
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
"""Name of the file with a device's weights, in the same directory as the device's segments."""


def read_runtime_sources(target: str, suffixes: tuple[str, ...]) -> dict[str, bytes]:
    """Return the content, by name, of the source files of a target's runtime.

    These files are copied into every artifact. Only those whose names end with one of the `suffixes` are returned.
    """
    folder = resources.files(f"dicompiler_targets.{target}").joinpath("runtime")
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {file.name: file.read_bytes() for file in files if file.name.endswith(suffixes)}


def read_benchmark_player(target: str, suffixes: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Return the content, by name, of the files of a target's benchmark player.

    The player is a program that runs artifacts on a board and prints the times of their frames. The result includes the
    runtime's files with these suffixes, which the player imports.
    """
    package = resources.files(f"dicompiler_targets.{target}")
    sources = read_runtime_sources(target, suffixes) if suffixes else {}
    runtime = {f"dicompiler_targets/{target}/runtime/{name}": source for name, source in sources.items()}
    return {"play.py": package.joinpath("benchmark_player.py").read_bytes(), **runtime}


def check_bundled_sources(
    directory: Path, document: Mapping[str, Any], found: Mapping[str, str], expected: Mapping[str, str]
) -> None:
    """Raise DicompilerError if an artifact's copy of the runtime differs from the installed source files.

    `found` has the digests of the source files in the artifact, by name, and `expected` those of the files in the
    installed package. The error message uses `directory`, the artifact's directory, and `document`, the content of its
    artifact.json.
    """
    wrong = [name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name)]
    if wrong:
        installed, compiled = package_version(), document["version"]
        remedy = f"compile the model again{'' if compiled == installed else f' or install version {compiled}'}"
        raise DicompilerError(f"{directory}: {wrong[0]} differs from that of dicompiler {installed}: {remedy}")


def hash_sources(sources: Mapping[str, bytes]) -> dict[str, str]:
    """Return the SHA-256 of each file's content, written as in manifests: sha256:HEX."""
    return {name: f"sha256:{hashlib.sha256(content).hexdigest()}" for name, content in sources.items()}
