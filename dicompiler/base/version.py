"""The version of dicompiler."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path


def package_version() -> str:
    """Return the version of the installed distribution.

    Returns:
        The version. In a checkout that is not installed, the fallback version of pyproject.toml, marked "+checkout".
    """
    try:
        return metadata.version("dicompiler")
    except metadata.PackageNotFoundError:
        project = Path(__file__).parents[2] / "pyproject.toml"
    if not project.is_file():
        return "0+unknown"
    own = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["setuptools_scm"]
    return f"{own['fallback_version']}+checkout"
