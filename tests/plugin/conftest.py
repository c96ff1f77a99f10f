"""A fixture for tests of plugins: a directory in which tests install distributions."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An empty directory; a process can be started that finds distributions in it."""
    path = tmp_path / "site"
    path.mkdir()
    return path
