"""Overheads of a target's runtime, in the parameters of LogGP: latency L, overhead o, gap g, gap per byte G.

Source: Alexandrov, Ionescu, Schauser, Scheiman, "LogGP: incorporating long messages into the LogP model", 1995. The
platform states the parts of G and L that the network itself causes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from dicompiler.ir.cluster import Device, Link, Network

REFERENCE_FLOPS_PER_S = 128e9
"""Compute rate in FLOP/s of one core of the reference host, for ResNet-50 in onnxruntime.

Targets state the costs of their runtimes as measured on this host.
"""


@dataclass(frozen=True)
class RuntimeCosts:
    """Costs of a target's runtime on one device. Letters in parentheses are parameters of the LogGP model.

    Attributes:
        latency: Seconds from the arrival of a message until the waiting device is awake (L).
        send: Seconds of the sender's processor for each message (o).
        receive: Seconds of the receiver's processor for each message (o).
        per_byte: Seconds of the processor for each byte of a message, on the sender and on the receiver (a part of G).
        gap: Seconds for which a message occupies its link in addition to the time of its bytes (g).
        call: Seconds of the call of a segment (ONNX submodel), without its computation.
        cold_call: Additional seconds of a call if the device has computed other segments since the previous call of
            this segment, so that code and data are no longer in caches.
        per_copy: Seconds of a slice, join or wire cast (conversion to or from the element type in which a tensor is
            sent), in addition to the time of its bytes.
        per_copied_byte: Seconds for each byte that slices, joins and wire casts copy.
        per_io_byte: Seconds for each byte of the network's inputs and outputs that is sent between the device and the
            caller; the processors of both are included.
        per_tls_byte: Additional seconds of the processor for each byte with TLS, on the sender and on the receiver.
        header_share: Bytes of headers as a share of a message's bytes.
        coalesced_share: Fraction of `send` and `receive` that a message costs if it is sent together with an earlier
            message to the same device.
        in_order: Whether messages are sent in the order in which they become ready. If False, the messages of the
            oldest frame are sent first.

    Raises:
        ValueError: A value is negative or infinite.
    """

    latency: float = 0.0
    send: float = 0.0
    receive: float = 0.0
    per_byte: float = 0.0
    gap: float = 0.0
    call: float = 0.0
    cold_call: float = 0.0
    per_copy: float = 0.0
    per_copied_byte: float = 0.0
    per_io_byte: float = 0.0
    per_tls_byte: float = 0.0
    header_share: float = 0.0
    coalesced_share: float = 1.0
    in_order: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{field.name} must be at least 0 and finite, not {value!r}")

    def send_seconds(self, nbytes: int, is_coalesced: bool = False) -> float:
        """Return the seconds of the sender's processor for a message.

        Args:
            nbytes: Bytes of the message.
            is_coalesced: Whether the message is sent together with an earlier one to the same device.

        Returns:
            Seconds.
        """
        return self.send * (self.coalesced_share if is_coalesced else 1.0) + nbytes * self.per_byte

    def receive_seconds(self, nbytes: int, is_coalesced: bool = False) -> float:
        """Return the seconds of the receiver's processor for a message.

        Args:
            nbytes: Bytes of the message.
            is_coalesced: Whether the message was sent together with an earlier one from the same device.

        Returns:
            Seconds.
        """
        return self.receive * (self.coalesced_share if is_coalesced else 1.0) + nbytes * self.per_byte

    def copy_seconds(self, times: int, nbytes: int) -> float:
        """Return the seconds of slices, joins and wire casts (conversions to or from the element type of a message).

        Args:
            times: Number of copies.
            nbytes: Bytes of all copies together.

        Returns:
            Seconds.
        """
        return times * self.per_copy + nbytes * self.per_copied_byte

    def link_seconds(self, link: Link | Network, nbytes: int, message_s: float) -> float:
        """Return the seconds for which a message from this device occupies a link.

        Args:
            link: Link, or network, that carries the message.
            nbytes: Bytes of the message.
            message_s: Seconds that the network itself needs for each message, in addition to its bytes.

        Returns:
            Seconds.
        """
        return link.transfer_s(nbytes * (1 + self.header_share), message_s + self.gap)

    @property
    def segment_call_s(self) -> float:
        """Seconds of one call of a segment (ONNX submodel), without computation, if the device has several segments."""
        return self.call_seconds(2) / 2

    def call_seconds(self, segments: int) -> float:
        """Return the seconds of all calls of a device's segments (ONNX submodels) in a frame, without computation.

        Only a device with several segments has cold calls.

        Args:
            segments: Number of the device's segments.

        Returns:
            Seconds.
        """
        return segments * (self.call + (self.cold_call if segments > 1 else 0.0))

    @property
    def with_tls(self) -> RuntimeCosts:
        """The runtime costs of the same device if messages are encrypted with TLS."""
        return replace(
            self,
            per_byte=self.per_byte + self.per_tls_byte,
            per_io_byte=self.per_io_byte + 2 * self.per_tls_byte,
            per_tls_byte=0.0,
        )

    def scaled_by(self, factor: float) -> RuntimeCosts:
        """Return the costs of a device that needs `factor` times as long as this one.

        Args:
            factor: Slowdown, at least 0. With 0, nothing costs time.

        Returns:
            The scaled costs.
        """
        if not factor:
            return replace(FREE_RUNTIME, in_order=self.in_order)
        unscaled = ("header_share", "coalesced_share", "in_order")
        seconds = {field.name: factor * getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: cost for name, cost in seconds.items() if name not in unscaled})


FREE_RUNTIME = RuntimeCosts()
"""Costs of a runtime that takes no time, as papers assume."""
NO_RUNTIMES: Mapping[str, RuntimeCosts] = MappingProxyType({})
"""Costs by device if messages and calls are free on every device."""


def scale_to_device(stated: RuntimeCosts, device: Device) -> RuntimeCosts:
    """Return the costs on a device, given the costs that a target states for its reference host.

    All costs are multiplied by `runtime_slowdown`, and `per_copy` by its square: a copy wakes no thread, and such code
    slows down more (6 instead of 2.5 times on a Raspberry Pi 4). A copied byte takes at least 2 / memory bandwidth
    seconds.
    """
    slowdown = runtime_slowdown(device)
    costs = replace(stated.scaled_by(slowdown), per_copy=stated.per_copy * slowdown**2)
    if not costs.per_copied_byte or not device.memory_bandwidth:
        return costs
    return replace(costs, per_copied_byte=max(costs.per_copied_byte, 2 / device.memory_bandwidth))


def runtime_slowdown(device: Device) -> float:
    """Return the factor by which a runtime's work takes longer on a device than on the reference host, at least 1.

    It is the fourth root of the ratio of the cores' compute rates, such as 2.5 for a Raspberry Pi 4. The exponent is a
    compromise: ordinary code is 6 times slower there, but exchanges over TCP are not (docs/understand/cost-models.md).
    """
    cores = REFERENCE_FLOPS_PER_S * device.cores / device.rate if device.can_compute else 1.0
    return float(max(1.0, cores**0.25))
