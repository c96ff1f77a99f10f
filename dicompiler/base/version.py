"""The version of dicompiler."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path


def package_version() -> str:
    """Return the version of the installed distribution.

    Returns:
        The version. If dicompiler is not installed, the fallback version in pyproject.toml, followed by "+checkout".
    """
    try:
        return metadata.version("dicompiler")
    except metadata.PackageNotFoundError:
        project = Path(__file__).parents[2] / "pyproject.toml"
    if not project.is_file():
        return "0+unknown"
    settings = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["setuptools_scm"]
    return f"{settings['fallback_version']}+checkout"


def parse_release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, to compare it with a minimum version: "1.26.4rc1" ⇒ (1, 26).

    Args:
        version: The version.

    Returns:
        At most two numbers.
    """
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
