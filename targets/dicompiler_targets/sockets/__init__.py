"""The target `sockets`: a directory and a process per device, which communicate over TCP."""

from __future__ import annotations

from dicompiler_targets.sockets.target import SocketsTarget

__all__ = ["SocketsTarget"]
