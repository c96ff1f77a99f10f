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

from dicompiler.cost.cost_model import AnalyticModel, CostModel
from dicompiler.cost.op_counts import count_operations
from dicompiler.cost.profile import Profile, ProfileSet, axis_cut, is_whole_layer, layer_input_nbytes, layer_signature
from dicompiler.cost.runtime_overhead import FREE_RUNTIME, RuntimeCosts
from dicompiler.ir.cluster import Device
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.plan import LayerShare
from dicompiler.ir.regions import Region, full_region
from dicompiler.partition.bounds_inference import align_region, output_shape, reduction_length


class ProfileBasedModel(CostModel):
    """A cost model that may rest on profiles.

    Attributes:
        file: Paths of the profiles.
        others: Whether the first profile holds for devices without one.
        force: Whether profiles from a busy host are accepted.
    """

    file: tuple[str, ...]
    others: bool
    force: bool

    @cached_property
    def _profiles(self) -> ProfileSet:
        return ProfileSet.load(self.file, self.others, self.force)

    def runtime_costs(self, device: Device, stated: RuntimeCosts, target: str) -> RuntimeCosts:
        """Return the measured costs of the target's runtime, unless option `runtime` overrides them."""
        uses_profile = self.runtime is None and stated != FREE_RUNTIME and bool(self.file)
        scaled = super().runtime_costs(device, stated, target)
        return self._profiles.runtime_costs(device, scaled, target) if uses_profile else scaled

    @abstractmethod
    def isolated_seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        """Return the seconds of a share that runs repeatedly on its own, as it was profiled."""

    def seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        """Return the seconds of a share in a frame.

        A whole layer usually shares a session with its neighbours; a part exchanges tensors with other devices.

        Raises DicompilerError if the profile is of another network or device.
        """
        local_bytes = layer_input_nbytes(layers, layer) if is_whole_layer(layers, layer, share) else 0
        return self.seconds_in_frame(layers, layer, share, device, local_bytes)

    def seconds_in_frame(
        self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device, local_bytes: int
    ) -> float:
        """Return the seconds in a frame as the profile has measured frames, see `Profile.seconds_in_frame`.

        Layers that were not measured are predicted for frames already.
        """
        if not device.can_compute:
            return math.inf
        profile = self._profiles.for_device(layers, device)
        isolated_s = self.isolated_seconds(layers, layer, share, device)
        unmeasured = profile.unmeasured_layers(layers)
        if layer.name in unmeasured:
            return isolated_s
        unmeasured_s = sum(self.isolated_seconds(layers, other, LayerShare(), device) for other in unmeasured.values())
        return profile.seconds_in_frame(layers, layer, share, isolated_s, local_bytes, unmeasured_s)


@dataclass(frozen=True)
class ProfileModel(ProfileBasedModel):
    """Times measured by `dicompiler profile`; sizes in between are interpolated.

    Whole layers together take the time that was measured for the whole network. The time of a part that is cut along
    several axes is the whole layer's time multiplied by the share that each cut alone leaves of it. Operation counts
    decide along axes that were not measured, and for layers that could not be measured.
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
        profile = self._profiles.for_device(layers, device)
        if layer_signature(layers, layer) not in profile.layers:
            return AnalyticModel().seconds(layers, layer, share, device)
        return _isolated_seconds(profile, layers, layer, share)

    def seconds_table(
        self, layers: LayerGraph, layer: Layer, shares: Sequence[LayerShare], devices: Sequence[Device]
    ) -> NDArray[np.float64]:
        columns: dict[tuple[str, float, float], list[float]] = {}
        times = np.full((len(shares), len(devices)), np.inf)
        for i, device in enumerate(devices):
            if device.can_compute:
                profile = self._profiles.for_device(layers, device)
                key = (
                    profile.place,
                    device.rate,
                    device.memory_bandwidth,
                )  # Rates matter for layers that were not measured.
                if key not in columns:
                    columns[key] = [self.seconds(layers, layer, share, device) for share in shares]
                times[:, i] = columns[key]
        return times


def _isolated_seconds(profile: Profile, layers: LayerGraph, layer: Layer, share: LayerShare) -> float:
    region, reduce, merge = share
    signature = layer_signature(layers, layer)
    whole = profile.whole_layer_s(signature)
    if layer.whole_reason or region is None:
        remaining = 1.0
    else:
        remaining = _remaining_share(
            profile, signature, align_region(layers, layer, region), full_region(output_shape(layers, layer))
        )
    if merge:
        return remaining * _merge_seconds(profile, layers, layer, merge)
    if reduce is None:
        return whole * remaining
    length = reduction_length(layers, layer)
    assert length is not None
    return whole * remaining * _time_share(profile, signature, "reduce", reduce[1] - reduce[0], length)


def _remaining_share(profile: Profile, signature: str, region: Region, full: Region) -> float:
    """Return the share of the time that remains when a layer is cut to `region`, at most 1.

    Along several axes it is the product of the shares of each cut. The part that every cut leaves even at size 0
    (weights are read as before) is counted once.
    """
    cuts = [
        (axis_cut(axis), stop - start, high - low)
        for axis, ((start, stop), (low, high)) in enumerate(zip(region, full, strict=True))
        if (start, stop) != (low, high)
    ]
    fixed = min(_time_share(profile, signature, cut, 0, extent) for cut, _, extent in cuts) if len(cuts) > 1 else 0.0
    if fixed == 1:
        return 1.0
    varying = [(_time_share(profile, signature, *cut) - fixed) / (1 - fixed) for cut in cuts]
    return fixed + (1 - fixed) * math.prod(varying)


def _time_share(profile: Profile, signature: str, cut: str, size: int, extent: int) -> float:
    """Return the time of `size` of `extent` as a share of the whole, at most 1.

    It is proportional to the size if nothing was measured.
    """
    curve, whole = profile.curve(signature, cut, extent), profile.whole_layer_s(signature)
    return size / extent if curve is None or whole <= 0 else min(1.0, curve.seconds_at(size) / whole)


def _merge_seconds(profile: Profile, layers: LayerGraph, layer: Layer, merge: int) -> float:
    """Return the seconds of adding up partial sums of the whole output; by bytes if that was not measured."""
    curve = profile.curve(layer_signature(layers, layer), "merge")
    return (
        profile.byte_s * count_operations(layers, layer, merge=merge).moved_bytes
        if curve is None
        else curve.seconds_at(merge)
    )
