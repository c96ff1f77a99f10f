"""What a target's runtime takes of devices and lines beside the engine, in the letters of LogGP (Alexandrov 1995).

A message costs its sender o and each of its bytes a share of G, holds its line for g beside its bytes, is on its way
for the link's L, and costs its receiver o again. The line's part of G, and L, are the network's own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class RuntimeCosts:
    """Seconds, on one device. send, receive: of its processor for a message (o of both ends); byte: for each byte of
    it, at each end; gap: for which a message holds its line beside its bytes (g). call: of a segment's call beside its
    computing; copy: for each byte that a slice or a join copies. ValueError for one below 0."""

    send: float = 0.0
    receive: float = 0.0
    byte: float = 0.0
    gap: float = 0.0
    call: float = 0.0
    copy: float = 0.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            if not 0 <= getattr(self, entry.name) < float("inf"):
                raise ValueError(f"{entry.name} must be at least 0 s, not {getattr(self, entry.name)!r}")

    def sending(self, nbytes: int) -> float:
        """Seconds of the sender's processor for a message."""
        return self.send + nbytes * self.byte

    def receiving(self, nbytes: int) -> float:
        """Seconds of the receiver's processor for a message."""
        return self.receive + nbytes * self.byte


FREE = RuntimeCosts()
"""Of a runtime that costs nothing, as the papers have it."""
