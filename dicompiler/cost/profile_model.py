"""The cost model `profile`: measured times, interpolated for sizes that were not measured."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dicompiler.cost.cost_model import AnalyticModel, CostModel, LocalBytes
from dicompiler.cost.op_counts import count_operations
from dicompiler.cost.profile import Profile, ProfileSet, axis_cut, is_whole_layer, layer_signature
from dicompiler.cost.runtime_overhead import FREE_RUNTIME, RuntimeCosts
from dicompiler.ir.cluster import Device
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.plan import LayerShare
from dicompiler.ir.regions import Region, full_region
from dicompiler.partition.bounds_inference import align_region, output_shape, reduction_length


class ProfileBasedModel(CostModel):
    """Base class of cost models that can use profiles (files with measured times of layers).

    Attributes:
        file: Paths of the profiles; empty if the model uses no measurements.
        others: Whether the first profile is also used for devices that no profile names.
        force: Whether profiles that were measured on a busy host are accepted.
    """

    file: tuple[str, ...]
    others: bool
    force: bool

    @cached_property
    def _profiles(self) -> ProfileSet:
        return ProfileSet.load(self.file, self.others, self.force)

    def knows_engine(self, device: Device, engine: str) -> bool:
        return self._profiles.has_engine(device, engine) if self.file else super().knows_engine(device, engine)

    def knows_layer(self, layers: LayerGraph, layer: Layer, device: Device, engine: str) -> bool:
        return bool(self.file) and self._profiles.has_layer(layers, layer, device, engine)

    def runtime_costs(self, device: Device, stated: RuntimeCosts, target: str) -> RuntimeCosts:
        uses_profile = self.runtime is None and stated != FREE_RUNTIME and bool(self.file)
        scaled = super().runtime_costs(device, stated, target)
        return self._profiles.runtime_costs(device, scaled, target) if uses_profile else scaled

    @abstractmethod
    def isolated_seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        """Return the seconds of a share (a piece of a layer) that runs repeatedly on its own, as in a profile."""

    def seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        """Return the seconds of a share (a piece of a layer, or a whole layer) in a frame.

        A whole layer is assumed to exchange tensors with other layers in the same call, and a smaller share with other
        devices.

        Raises:
            DicompilerError: No profile is valid for the network and the device.
        """
        is_whole = is_whole_layer(layers, layer, share)
        local = LocalBytes.of_whole_layer(layers, layer) if is_whole else LocalBytes()
        return self.seconds_in_frame(layers, layer, share, device, local)

    def seconds_in_frame(
        self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device, local: LocalBytes
    ) -> float:
        """Return the seconds of a share (a piece of a layer) in a frame; it exchanges `local` bytes in the same call.

        Profiles measure a share that runs repeatedly on its own. In a frame, weights and inputs are read from memory
        and not from caches, so measured times are corrected.
        """
        if not device.can_compute:
            return math.inf
        profile = self._profiles.for_device(layers, device.with_engine_of(layer.name))
        isolated_s = self.isolated_seconds(layers, layer, share, device)
        unmeasured = profile.unmeasured_layers(layers)
        if layer.name in unmeasured:
            return isolated_s
        unmeasured_s = sum(self.isolated_seconds(layers, other, LayerShare(), device) for other in unmeasured.values())
        return profile.seconds_in_frame(layers, layer, share, isolated_s, local, unmeasured_s)


@dataclass(frozen=True)
class ProfileModel(ProfileBasedModel):
    """Times that `dicompiler profile` measured, interpolated for sizes that were not measured.

    The predicted times of all whole layers add up to the measured time of the whole network. A piece of a layer takes a
    measured fraction of its layer's time; along an axis that was not measured, the time is proportional to the size. A
    layer that could not be measured is predicted from its operations.
    """

    name: ClassVar[str] = "profile"
    is_measured: ClassVar[bool] = True

    file: tuple[str, ...] = field(metadata={"help": "profiles, one for each kind of device", "file": True})
    others: bool = field(default=False, metadata={"help": "use the first profile for devices without a profile"})
    force: bool = field(default=False, metadata={"help": "accept profiles that were measured on a busy host"})

    def __post_init__(self) -> None:
        if not self.file:
            raise ValueError("give at least one profile: file=PROFILE.json")

    def isolated_seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        profile = self._profiles.for_device(layers, device.with_engine_of(layer.name))
        if layer_signature(layers, layer) not in profile.layers:
            return AnalyticModel().seconds(layers, layer, share, device)
        return _isolated_seconds(profile, layers, layer, share)

    def seconds_table(
        self, layers: LayerGraph, layer: Layer, shares: Sequence[LayerShare], devices: Sequence[Device]
    ) -> NDArray[np.float64]:
        columns: dict[tuple[str, str, float, float], list[float]] = {}
        times = np.full((len(shares), len(devices)), np.inf)
        for i, device in enumerate(devices):
            if device.can_compute:
                profile = self._profiles.for_device(layers, device.with_engine_of(layer.name))
                # Devices with equal keys have equal times, which are predicted once. The key includes the rate and the
                # memory bandwidth, because the times of layers that were not measured depend on them.
                key = (profile.place, profile.engine, device.rate, device.memory_bandwidth)
                if key not in columns:
                    columns[key] = [self.seconds(layers, layer, share, device) for share in shares]
                times[:, i] = columns[key]
        return times


def _isolated_seconds(profile: Profile, layers: LayerGraph, layer: Layer, share: LayerShare) -> float:
    region, reduce, merge = share
    signature = layer_signature(layers, layer)
    whole = profile.whole_layer_s(signature)
    remaining = 1.0
    if region is not None and not layer.whole_reason:
        aligned, full = align_region(layers, layer, region), full_region(output_shape(layers, layer))
        remaining = _remaining_fraction(profile, signature, aligned, full)
    if merge:
        return remaining * _merge_seconds(profile, layers, layer, merge)
    if reduce is None:
        return whole * remaining
    length = reduction_length(layers, layer)
    assert length is not None
    return whole * remaining * _time_fraction(profile, signature, "reduce", reduce[1] - reduce[0], length)


def _remaining_fraction(profile: Profile, signature: str, region: Region, full: Region) -> float:
    """Return the fraction of a layer's time that remains if only `region` of its output `full` is computed.

    A cut along one axis leaves a measured fraction. For cuts along several axes, the fractions are multiplied, except
    for the fixed part of the time (such as reading all weights), which remains.
    """
    cuts = [
        (axis_cut(axis), stop - start, high - low)
        for axis, ((start, stop), (low, high)) in enumerate(zip(region, full, strict=True))
        if (start, stop) != (low, high)
    ]
    fixed = min(_time_fraction(profile, signature, cut, 0, extent) for cut, _, extent in cuts) if len(cuts) > 1 else 0.0
    if fixed == 1:
        return 1.0
    varying = [(_time_fraction(profile, signature, *cut) - fixed) / (1 - fixed) for cut in cuts]
    return fixed + (1 - fixed) * math.prod(varying)


def _time_fraction(profile: Profile, signature: str, cut: str, size: int, extent: int) -> float:
    """Return the fraction of a whole layer's time that a piece of it needs, at most 1.

    The piece is cut along one axis, with `size` of `extent` elements. Without a measurement for this axis, the time is
    proportional to the size.
    """
    curve, whole = profile.curve(signature, cut, extent), profile.whole_layer_s(signature)
    return size / extent if curve is None or whole <= 0 else min(1.0, curve.seconds_at(size) / whole)


def _merge_seconds(profile: Profile, layers: LayerGraph, layer: Layer, merge: int) -> float:
    """Return the seconds of adding up `merge` partial sums of a layer's whole output.

    Without a measurement, they are estimated from the bytes that are read and written.
    """
    curve = profile.curve(layer_signature(layers, layer), "merge")
    if curve is not None:
        return curve.seconds_at(merge)
    return profile.byte_s * count_operations(layers, layer, merge=merge).moved_bytes
