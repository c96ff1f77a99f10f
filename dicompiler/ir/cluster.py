"""What a cluster is made of: hosts, the devices in them, and the network that joins them. Frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NetworkKind = Literal["switch", "shared", "gateway"]


@dataclass(frozen=True)
class Host:
    """A machine. `memory`: bytes that its devices may use together.

    flash: of these the bytes of flash, where weights lie and nothing else (0: weights lie in RAM, with all else).
    bandwidth: bit/s of its own connection, in each direction, where that is less than the network's (None: no limit).
    """

    name: str
    memory: int
    bandwidth: float | None = None
    flash: int = 0

    @property
    def ram(self) -> int:
        """Bytes for what changes, and for the weights where there is no flash."""
        return self.memory - self.flash


@dataclass(frozen=True)
class Device:
    """One processing element of a host: a group of CPU cores, or a GPU.

    rate: FLOP/s sustained, a multiplication and its addition being two; 0: compute-less (a camera, a gateway).
    power_active, power_idle: W while it computes and while it waits; a host draws the sum over its devices.
    power_network: W that come on top while it sends or receives. memory_bandwidth: byte/s between its cores and its
    memory (0: not known).
    """

    name: str
    host: str
    rate: float
    cores: int = 1
    power_active: float = 0.0
    power_idle: float = 0.0
    gpu: bool = False
    power_network: float = 0.0
    memory_bandwidth: float = 0.0

    @property
    def can_compute(self) -> bool:
        return self.rate > 0


Amount = TypeVar("Amount", float, "NDArray[np.float64]")


class TransferMedium:
    """What carries bytes, at `bandwidth` bit/s."""

    bandwidth: float

    def transfer_s(self, nbytes: Amount, message: float = 0.0) -> Amount:
        """How long `nbytes` bytes occupy the line, in a transfer that takes `message` seconds beside them. The latency
        is not in it: the line is free again by then."""
        return message + 8 * nbytes / self.bandwidth


@dataclass(frozen=True)
class Link(TransferMedium):
    """The connection of two hosts, the same in both directions. `bandwidth` in bit/s, `latency` in seconds."""

    hosts: tuple[str, str]
    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True)
class Network(TransferMedium):
    """What joins the hosts: `bandwidth` in bit/s, `latency` in seconds, `links` that differ from these.

    message: seconds that each transfer occupies its line beside the time of its bytes (headers, system calls).

    switch: every host has a full-duplex line of its own; shared: all hosts share one medium; gateway: everything
    passes one gateway whose bandwidth all share. The devices of one host talk through its memory.
    """

    kind: NetworkKind
    bandwidth: float
    latency: float = 0.0
    links: tuple[Link, ...] = ()
    message_overhead_s: float = 0.0

    def link(self, a: str, b: str) -> Link | None:
        """The link between hosts `a` and `b`; None where they are one host, which needs none."""
        if a == b:
            return None
        return next((x for x in self.links if {*x.hosts} == {a, b}), Link((a, b), self.bandwidth, self.latency))
