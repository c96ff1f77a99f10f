"""The sockets target: one directory and one process per device, which talk over TCP."""

from __future__ import annotations

from dicompiler_targets.sockets.target import SocketsTarget

__all__ = ["SocketsTarget"]
