"""Linear: a cost model that is a fit for each kind of layer.

LayerGraph + Layer + region + Device → seconds, as every CostModel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import ClassVar

import numpy as np

from dicompiler.base.errors import DicompilerError
from dicompiler.base.units import COMPUTE_RATE, parse_quantity
from dicompiler.cost.op_counts import count_operations
from dicompiler.cost.profile import layer_kind
from dicompiler.cost.profile_model import ProfileBasedModel
from dicompiler.ir.cluster import Device
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.plan import LayerShare


@dataclass(frozen=True)
class Coefficients:
    """seconds = flop · FLOP + byte · bytes moved + call, none of them below zero."""

    flop_s: float
    byte_s: float
    call_s: float

    def predict(self, operations: float, moved: float) -> float:
        return self.flop_s * operations + self.byte_s * moved + self.call_s


@dataclass(frozen=True)
class LinearModel(ProfileBasedModel):
    """For each kind of layer a · FLOP + b · bytes + c, fitted to profiles or given.

    A kind is the anchor's operator; convolutions in groups, depthwise ones too, are of kind GroupConv. Kinds that have
    no coefficients of their own take those of kind `*`: from a profile, a fit to all that it measured. FLOP and bytes
    are those of `roofline`. Given coefficients hold for every device, or for one with the rate `rate`: then others
    take as many times longer as their rates are lower.
    """

    name: ClassVar[str] = "linear"
    file: tuple[str, ...] = field(
        default=(), metadata={"help": "profiles to fit to, one for each kind of device", "file": True}
    )
    coefficients: tuple[str, ...] = field(
        default=(), metadata={"help": "KIND:A:B:C in s/FLOP, s/byte and s: Conv:7e-11:1e-10:2e-5,*:1e-10:0:0"}
    )
    rate: str = field(default="", metadata={"help": "rate of the device that the coefficients hold for: 13.6 GFLOP/s"})
    others: bool = field(default=False, metadata={"help": "take the first profile for devices that none is of"})
    force: bool = field(default=False, metadata={"help": "take profiles that were measured on a busy host"})

    def __post_init__(self) -> None:
        if bool(self.file) == bool(self.coefficients):
            raise ValueError("give either file=PROFILE.json or coefficients=KIND:A:B:C,…")
        if self.rate and (self.file or not parse_quantity(self.rate, COMPUTE_RATE, "option 'rate' of 'linear'")):
            raise ValueError("rate goes with coefficients and is more than zero")
        for text in self.coefficients:
            _parse_coefficients(text)

    @property
    def is_measured(self) -> bool:  # type: ignore[override]
        """Whether it rests on profiles."""
        return bool(self.file)

    @cached_property
    def _stated_coefficients(self) -> Mapping[str, Coefficients]:
        return dict(_parse_coefficients(text) for text in self.coefficients)

    @cached_property
    def _fitted_coefficients(self) -> Mapping[str, Mapping[str, Coefficients]]:
        """Profile's place → layer kind → coefficients."""
        return {profile.place: fit_by_kind(profile.samples()) for profile in self._profiles.profiles}

    def seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        """By the coefficients of the layer's anchor. DicompilerError for a kind without coefficients, and for a
        profile of another network or device."""
        if self.file:
            return super().seconds(layers, layer, share, device)
        if not device.can_compute:
            return math.inf
        seconds = self.isolated_seconds(layers, layer, share, device)
        return seconds * (parse_quantity(self.rate, COMPUTE_RATE, "rate") / device.rate if self.rate else 1.0)

    def seconds_in_frame(
        self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device, local_bytes: int
    ) -> float:
        """As `CostModel.fused`: given coefficients know nothing of frames."""
        if self.file:
            return super().seconds_in_frame(layers, layer, share, device, local_bytes)
        return self.seconds(layers, layer, share, device)

    def isolated_seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        """By the coefficients of the layer's kind."""
        kind = layer_kind(layer)
        known = (
            self._fitted_coefficients[self._profiles.for_device(layers, device).place]
            if self.file
            else self._stated_coefficients
        )
        chosen = known.get(kind) or known.get("*")
        if chosen is None:
            raise DicompilerError(
                f"linear: no coefficients for {kind!r} (layer {layer.name!r}): give some for it or for every other "
                "kind (*:A:B:C)"
            )
        counted = count_operations(layers, layer, *share)
        return chosen.predict(counted.flops, counted.moved_bytes)


def _parse_coefficients(text: str) -> tuple[str, Coefficients]:
    """`Conv:7e-11:1e-10:2e-5` → ("Conv", …). ValueError where it is not that."""
    kind, *numbers = text.split(":")
    try:
        flop, byte, call = map(float, numbers)
    except ValueError:
        raise ValueError(f"coefficients are KIND:A:B:C with three numbers, not {text!r}") from None
    if not kind or not all(0 <= number < math.inf for number in (flop, byte, call)):
        raise ValueError(f"coefficients name a kind and are finite numbers of at least zero, not {text!r}")
    return kind, Coefficients(flop, byte, call)


def fit_by_kind(samples: Iterable[tuple[str, float, float, float]]) -> dict[str, Coefficients]:
    """The coefficients of every kind, and of all kinds together under `*`. samples: (kind, FLOP, bytes, seconds)."""
    rows = list(samples)
    kinds = dict.fromkeys(kind for kind, *_ in rows)
    coefficients = {kind: fit_coefficients([row[1:] for row in rows if row[0] == kind]) for kind in kinds}
    return coefficients | {"*": fit_coefficients([row[1:] for row in rows])}


def fit_coefficients(samples: Sequence[tuple[float, float, float]]) -> Coefficients:
    """Least squares, no coefficient below zero. samples: (FLOP, bytes, seconds).

    A square counts the less, the longer the sample took: absolute errors would leave short pieces to chance, relative
    ones would favour what is too low. With three unknowns the best of all choices of which are zero is found by trying
    each.
    """
    rows = np.array([row for row in samples if row[2] > 0], np.float64).reshape(-1, 3)
    wanted = np.sqrt(rows[:, 2])
    matrix = np.column_stack([rows[:, :2], np.ones(len(rows))]) / wanted[:, None]
    best, least = np.zeros(3), float(wanted @ wanted)
    scale = np.maximum(np.abs(matrix).max(axis=0, initial=0.0), 1e-300)
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            columns = list(chosen)
            part, *_ = np.linalg.lstsq(matrix[:, columns] / scale[columns], wanted, rcond=None)
            error = float(np.sum((matrix[:, columns] / scale[columns] @ part - wanted) ** 2))
            if np.all(part >= 0) and error < least * (1 - 1e-12):
                least, best = error, np.zeros(3)
                best[columns] = part / scale[columns]
    return Coefficients(*map(float, best))
