"""Compile networks for tests of reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dicompiler
from dicompiler.networks import build


def made(tmp_path: Path, network: Any, platform: str = "rpi4x3", strategy: str = "modnn", **more: Any) -> Path:
    """Compile a network (a model, or the name of a built-in one), and return the directory of the artifact."""
    model = build(network) if isinstance(network, str) else network
    dicompiler.compile(model, platform=platform, strategy=strategy, output=tmp_path / "net", **more)
    return tmp_path / "net"
