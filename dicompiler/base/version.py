"""Which dicompiler this is."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path


def package_version() -> str:
    """The installed distribution's version; in an uninstalled checkout that of pyproject.toml, marked as such (tags may
    say another)."""
    try:
        return metadata.version("dicompiler")
    except metadata.PackageNotFoundError:
        project = Path(__file__).parents[2] / "pyproject.toml"
    if not project.is_file():
        return "0+unknown"
    own = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["setuptools_scm"]
    return f"{own['fallback_version']}+checkout"
