"""Checks cost models: seconds of parts of layers, one by one and as arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler.cost.model import fault_of_seconds
from dicompiler.plugin_api import (
    CostModel,
    Device,
    Layer,
    LayerGraph,
    Share,
    align,
    cuttable,
    full,
    output_shape,
    reduction,
    with_interval,
)
from dicompiler.testing.elsewhere import elsewhere
from dicompiler.testing.faults import checking, expect, named, one_of
from dicompiler.testing.samples import Sample, samples


def check_cost_model(cost: CostModel | type[CostModel], on: Iterable[Sample] | None = None) -> None:
    """For each layer of each sample, whole and in halves, as partial sums and as what adds them up, on each device:
    seconds are finite and at least 0 (endless where the device has no compute); `fill` gives the same as an array
    (shares, devices) of float64; both give the same again, here and in a process with another hash seed.

    on: by default `samples()`; the objective makes no difference. AssertionError otherwise, with cost model, sample,
    layer and device.
    """
    model = one_of(cost)
    chosen = list({(s.name, s.platform.name): s for s in (samples() if on is None else on)}.values())
    expect(chosen, f"{named(model)}: there are no samples")
    here = [_checked(model, sample) for sample in chosen]
    for sample, first in zip(chosen, here, strict=True):
        with checking(f"{named(model)} on {sample.name} on {sample.platform.name}"):
            _check_same(first, _checked(model, sample), "asked again")
    with checking(named(model)):
        there = elsewhere(_all, model, chosen)
    for sample, first, other in zip(chosen, here, there, strict=True):
        with checking(f"{named(model)} on {sample.name} on {sample.platform.name}"):
            _check_same(first, other, "in another process")


def _all(cost: CostModel, on: Sequence[Sample]) -> list[list[NDArray[np.float64]]]:
    return [_checked(cost, sample) for sample in on]


def _checked(cost: CostModel, sample: Sample) -> list[NDArray[np.float64]]:
    """The seconds of every layer: an array (shares, devices) each."""
    layers, devices = sample.problem.layers, sample.platform.devices
    seconds = []
    for layer in layers.layers:
        with checking(f"{named(cost)} on {sample.name} on {sample.platform.name}, layer {layer.name}"):
            seconds.append(_seconds(cost, layers, layer, devices))
    return seconds


def _seconds(cost: CostModel, layers: LayerGraph, layer: Layer, devices: Sequence[Device]) -> NDArray[np.float64]:
    pieces = list(shares(layers, layer))
    filled: Any = cost.fill(layers, layer, pieces, devices)
    shape = (len(pieces), len(devices))
    expect(isinstance(filled, np.ndarray), f"fill() returned {type(filled).__name__} instead of an array")
    right = filled.shape == shape and filled.dtype == np.float64
    expect(right, f"fill() returned {filled.dtype} {filled.shape}: give float64 (shares, devices), here {shape}")
    for share, row in zip(pieces, filled, strict=True):
        for device, value in zip(devices, row, strict=True):
            one = cost.seconds(layers, layer, share, device)
            fault = fault_of_seconds(one, layer, device) or fault_of_seconds(float(value), layer, device)
            expect(not fault, fault)
            same = math.isclose(one, value, rel_tol=1e-9) or not device.computes
            expect(same, f"{share} on {device.name} takes {one:.6g} s by seconds(), {value:.6g} s by fill()")
    return filled  # type: ignore[no-any-return]


def shares(layers: LayerGraph, layer: Layer) -> Iterator[Share]:
    """All of it; half of it along each axis that can be cut; half of its input channels, and the adding up of two."""
    yield Share()
    if layer.reason:
        return
    shape = output_shape(layers, layer)
    for axis in cuttable(layers, layer):
        if shape[axis] > 1:
            yield Share(align(layers, layer, with_interval(full(shape), axis, (0, shape[axis] // 2))))
    extent = reduction(layers, layer)
    if extent is not None and extent > 1:
        yield Share(full(shape), (0, extent // 2))
        yield Share(full(shape), None, 2)


def _check_same(first: Sequence[NDArray[np.float64]], other: Sequence[NDArray[np.float64]], how: str) -> None:
    same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, other, strict=True))
    expect(same, f"{how} it says other seconds")
