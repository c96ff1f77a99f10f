"""Check of cost models: seconds of parts of layers, computed one by one and as arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler.cost.cost_model import validate_seconds
from dicompiler.plugin_api import CostModel, Device, Layer, LayerGraph, LayerShare
from dicompiler.plugin_api.regions import (
    align_region,
    cuttable_axes,
    full_region,
    output_shape,
    reduction_length,
    with_interval,
)
from dicompiler.testing.assertions import as_instance, describe, error_context, require
from dicompiler.testing.samples import Sample, samples
from dicompiler.testing.subprocess_call import call_in_subprocess


def check_cost_model(cost: CostModel | type[CostModel], on: Iterable[Sample] | None = None) -> None:
    """Check that a cost model gives valid, consistent and reproducible times.

    Every layer of each sample is timed on each device: as a whole, in halves, as a partial sum and as the sum of two
    partial results. The check requires that:

    - seconds are finite and not negative (infinite if the device has no compute);
    - `seconds_table` returns the same values as `seconds`, as a float64 array of shape (shares, devices);
    - both return the same values when called again, here and in a process with another hash seed.

    Args:
        cost: The cost model, or its class.
        on: The samples to use. Default: `samples()`. The objective is ignored.

    Raises:
        AssertionError: A requirement does not hold. The message names cost model, sample, layer and device.
    """
    model = as_instance(cost)
    chosen = list({(s.name, s.platform.name): s for s in (samples() if on is None else on)}.values())
    require(chosen, f"{describe(model)}: there are no samples")
    here = [_checked_seconds(model, sample) for sample in chosen]
    for sample, first in zip(chosen, here, strict=True):
        with error_context(f"{describe(model)} on {sample.name} on {sample.platform.name}"):
            _check_same_seconds(first, _checked_seconds(model, sample), "called again")
    with error_context(describe(model)):
        there = call_in_subprocess(_all_seconds, model, chosen)
    for sample, first, other in zip(chosen, here, there, strict=True):
        with error_context(f"{describe(model)} on {sample.name} on {sample.platform.name}"):
            _check_same_seconds(first, other, "in another process")


def _all_seconds(cost: CostModel, on: Sequence[Sample]) -> list[list[NDArray[np.float64]]]:
    return [_checked_seconds(cost, sample) for sample in on]


def _checked_seconds(cost: CostModel, sample: Sample) -> list[NDArray[np.float64]]:
    """Return an array (shares, devices) of seconds for each layer, after checking it."""
    layers, devices = sample.problem.layers, sample.platform.devices
    seconds = []
    for layer in layers.layers:
        with error_context(f"{describe(cost)} on {sample.name} on {sample.platform.name}, layer {layer.name}"):
            seconds.append(_layer_seconds(cost, layers, layer, devices))
    return seconds


def _layer_seconds(cost: CostModel, layers: LayerGraph, layer: Layer, devices: Sequence[Device]) -> NDArray[np.float64]:
    pieces = list(sample_shares(layers, layer))
    table: Any = cost.seconds_table(layers, layer, pieces, devices)
    shape = (len(pieces), len(devices))
    require(isinstance(table, np.ndarray), f"seconds_table() returned {type(table).__name__} instead of an array")
    valid = table.shape == shape and table.dtype == np.float64
    require(
        valid, f"seconds_table() returned {table.dtype} {table.shape}: give float64 (shares, devices), here {shape}"
    )
    for share, row in zip(pieces, table, strict=True):
        for device, value in zip(devices, row, strict=True):
            seconds = cost.seconds(layers, layer, share, device)
            error = validate_seconds(seconds, layer, device) or validate_seconds(float(value), layer, device)
            require(not error, error)
            same = math.isclose(seconds, value, rel_tol=1e-9) or not device.can_compute
            require(
                same,
                f"{share} on {device.name} takes {seconds:.6g} s by seconds(), but {value:.6g} s by seconds_table()",
            )
    return table  # type: ignore[no-any-return]


def sample_shares(layers: LayerGraph, layer: Layer) -> Iterator[LayerShare]:
    """Yield the shares of a layer that are timed.

    These are the whole layer, half of it along each axis that can be cut, half of its input channels, and the sum of
    two partial results.
    """
    yield LayerShare()
    if layer.whole_reason:
        return
    shape = output_shape(layers, layer)
    for axis in cuttable_axes(layers, layer):
        if shape[axis] > 1:
            yield LayerShare(
                align_region(layers, layer, with_interval(full_region(shape), axis, (0, shape[axis] // 2)))
            )
    extent = reduction_length(layers, layer)
    if extent is not None and extent > 1:
        yield LayerShare(full_region(shape), (0, extent // 2))
        yield LayerShare(full_region(shape), None, 2)


def _check_same_seconds(first: Sequence[NDArray[np.float64]], other: Sequence[NDArray[np.float64]], how: str) -> None:
    same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, other, strict=True))
    require(same, f"{how} it returns other seconds")
