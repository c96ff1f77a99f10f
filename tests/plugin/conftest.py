"""Fixtures of plugins: where tests install distributions."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An empty directory that a process can be told to find distributions in."""
    path = tmp_path / "site"
    path.mkdir()
    return path
