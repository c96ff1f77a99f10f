"""The cost model `linear`: seconds as a linear function of FLOPs and bytes, fitted for each kind of layer."""

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
from dicompiler.cost.cost_model import LocalBytes
from dicompiler.cost.layer_kinds import layer_kind
from dicompiler.cost.op_counts import count_operations
from dicompiler.cost.profile_model import ProfileBasedModel
from dicompiler.ir.cluster import DEFAULT_ENGINE, Device
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.plan import LayerShare


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of one kind of layer: seconds = flop_s · FLOPs + byte_s · bytes + call_s.

    Attributes:
        flop_s: Seconds for each FLOP.
        byte_s: Seconds for each byte that is read or written.
        call_s: Seconds for each call, independent of its size.
    """

    flop_s: float
    byte_s: float
    call_s: float

    def predict(self, flops: float, nbytes: float) -> float:
        return self.flop_s * flops + self.byte_s * nbytes + self.call_s


@dataclass(frozen=True)
class LinearModel(ProfileBasedModel):
    """Time as a · FLOPs + b · bytes + c, with fitted or stated coefficients for each kind of layer.

    The kind of a layer is its main operator, such as Conv or GroupConv (with channel groups). Kind `*` is for all kinds
    without coefficients of their own. Stated coefficients are valid for every device. With the option `rate`, they are
    valid for a device of this compute rate, and scaled for other devices.
    """

    name: ClassVar[str] = "linear"
    file: tuple[str, ...] = field(
        default=(),
        metadata={"help": "profiles to which the coefficients are fitted, one for each kind of device", "file": True},
    )
    coefficients: tuple[str, ...] = field(
        default=(), metadata={"help": "KIND:A:B:C in s/FLOP, s/byte and s, such as Conv:7e-11:1e-10:2e-5,*:1e-10:0:0"}
    )
    rate: str = field(
        default="",
        metadata={
            "help": "compute rate for which the coefficients hold (13.6 GFLOP/s); times are scaled to other rates"
        },
    )
    others: bool = field(default=False, metadata={"help": "use the first profile for devices without a profile"})
    force: bool = field(default=False, metadata={"help": "accept profiles that were measured on a busy host"})

    def __post_init__(self) -> None:
        if bool(self.file) == bool(self.coefficients):
            raise ValueError("give either file=PROFILE.json or coefficients=KIND:A:B:C,…")
        if self.rate and self.file:
            raise ValueError("rate is only used together with coefficients=KIND:A:B:C,…: remove it")
        if self.rate and not parse_quantity(self.rate, COMPUTE_RATE, "option 'rate' of 'linear'"):
            raise ValueError(f"rate is {self.rate}: give a rate above 0")
        for text in self.coefficients:
            _parse_coefficients(text)

    @property
    def is_measured(self) -> bool:  # type: ignore[override]
        return bool(self.file)

    @cached_property
    def _stated_coefficients(self) -> Mapping[str, Coefficients]:
        return dict(_parse_coefficients(text) for text in self.coefficients)

    @cached_property
    def _fitted_coefficients(self) -> Mapping[tuple[str, str], Mapping[str, Coefficients]]:
        """Fitted coefficients by (path of the profile, engine), and then by kind of layer."""
        return {
            (profile.place, engine): fit_by_kind(profile.of_engine(engine).samples())
            for profile in self._profiles.profiles
            for engine in (profile.engine, *profile.engines)
        }

    def knows_engine(self, device: Device, engine: str) -> bool:
        return engine == DEFAULT_ENGINE or (bool(self.file) and super().knows_engine(device, engine))

    def seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        if self.file:
            return super().seconds(layers, layer, share, device)
        if not device.can_compute:
            return math.inf
        seconds = self.isolated_seconds(layers, layer, share, device)
        return seconds * (parse_quantity(self.rate, COMPUTE_RATE, "rate") / device.rate if self.rate else 1.0)

    def seconds_in_frame(
        self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device, local: LocalBytes
    ) -> float:
        if self.file:
            return super().seconds_in_frame(layers, layer, share, device, local)
        return self.seconds(layers, layer, share, device)

    def isolated_seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        kind = layer_kind(layer)
        coefficients = self._stated_coefficients
        if self.file:
            profile = self._profiles.for_device(layers, device.with_engine_of(layer.name))
            coefficients = self._fitted_coefficients[profile.place, profile.engine]
        fit = coefficients.get(kind) or coefficients.get("*")
        if fit is None:
            raise DicompilerError(
                f"linear: no coefficients for operator {kind!r} of layer {layer.name!r}: give coefficients for this "
                "operator (KIND:A:B:C) or for all other operators (*:A:B:C)"
            )
        counts = count_operations(layers, layer, *share)
        return fit.predict(counts.flops, counts.moved_bytes)


def _parse_coefficients(text: str) -> tuple[str, Coefficients]:
    """Parse `Conv:7e-11:1e-10:2e-5` (KIND:A:B:C).

    Raises:
        ValueError: The form is wrong, or a number is negative or infinite.
    """
    kind, *numbers = text.split(":")
    try:
        flop, byte, call = map(float, numbers)
    except ValueError:
        raise ValueError(f"coefficients must be KIND:A:B:C with three numbers, not {text!r}") from None
    if not kind or not all(0 <= number < math.inf for number in (flop, byte, call)):
        raise ValueError(f"coefficients must be KIND:A:B:C with finite numbers of at least zero, not {text!r}")
    return kind, Coefficients(flop, byte, call)


def fit_by_kind(samples: Iterable[tuple[str, float, float, float]]) -> dict[str, Coefficients]:
    """Return the coefficients of each kind of layer, and under the key `*` those of all kinds together.

    A sample is (kind, FLOPs, bytes, seconds) of a measured piece of a layer.
    """
    rows = list(samples)
    kinds = dict.fromkeys(kind for kind, *_ in rows)
    coefficients = {kind: fit_coefficients([row[1:] for row in rows if row[0] == kind]) for kind in kinds}
    return coefficients | {"*": fit_coefficients([row[1:] for row in rows])}


def fit_coefficients(samples: Sequence[tuple[float, float, float]]) -> Coefficients:
    """Fit coefficients of at least 0 to samples (FLOPs, bytes, seconds) by weighted least squares.

    Squared errors are divided by the measured seconds. Without weights, the fit would ignore short samples. With
    relative errors, it would prefer predictions that are too low.
    """
    rows = np.array([row for row in samples if row[2] > 0], np.float64).reshape(-1, 3)
    targets = np.sqrt(rows[:, 2])
    matrix = np.column_stack([rows[:, :2], np.ones(len(rows))]) / targets[:, None]
    best, least_error = np.zeros(3), float(targets @ targets)
    scale = np.maximum(np.abs(matrix).max(axis=0, initial=0.0), 1e-300)
    for size in (1, 2, 3):
        for nonzero in combinations(range(3), size):
            columns = list(nonzero)
            solution, *_ = np.linalg.lstsq(matrix[:, columns] / scale[columns], targets, rcond=None)
            error = float(np.sum((matrix[:, columns] / scale[columns] @ solution - targets) ** 2))
            if np.all(solution >= 0) and error < least_error * (1 - 1e-12):
                least_error, best = error, np.zeros(3)
                best[columns] = solution / scale[columns]
    return Coefficients(*map(float, best))
