"""Check of cost models: predicted seconds for pieces of layers must be valid, consistent and reproducible."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler.cost.cost_model import describe_seconds_error
from dicompiler.plugin_api import CostModel, Device, Layer, LayerGraph, LayerShare
from dicompiler.plugin_api.regions import (
    align_region,
    cuttable_axes,
    full_region,
    output_shape,
    reduction_length,
    with_interval,
)
from dicompiler.testing.assertions import (
    LIMIT_S,
    as_instance,
    checking,
    describe,
    error_context,
    require,
    time_limit,
    unchanged,
)
from dicompiler.testing.samples import Sample, samples
from dicompiler.testing.subprocess_call import call_with_hash_seeds

_SecondsBySample = list[list[NDArray[np.float64]]]


def check_cost_model(
    cost: CostModel | type[CostModel], on: Iterable[Sample] | None = None, limit_s: float = LIMIT_S
) -> None:
    """Check that a cost model returns valid, consistent and reproducible times.

    The cost model predicts the time of every layer of each sample (test problem) on each device: of the whole layer, of
    halves, of a partial sum over half of the input channels, and of the addition of two partial sums. The check
    requires that:

    - seconds are finite and not negative (they may be infinite if the device has no compute);
    - `seconds_table` returns the same values as `seconds`, as a float64 array of shape (pieces, devices);
    - both functions return equal values in a second call, and in another process with another hash seed;
    - the cost model does not change its arguments, end the process, or exceed the time limit.

    Args:
        cost: The cost model, or its class.
        on: The samples to use. Default: `samples()`. Their objectives are ignored.
        limit_s: Seconds that the calls of the cost model for one sample may take.

    Raises:
        AssertionError: A requirement does not hold. The message names cost model, sample, layer and device.
    """
    model = as_instance(cost)
    chosen = list({(s.name, s.platform.name): s for s in (samples() if on is None else on)}.values())
    require(chosen, f"{describe(model)}: there are no samples")
    results = _all_seconds(model, chosen, limit_s)
    with error_context(describe(model)):
        _check_same_seconds(chosen, results, _all_seconds(model, chosen, limit_s), "when it is called again")
        for other in call_with_hash_seeds(_all_seconds, model, chosen, limit_s, limit_s=limit_s * len(chosen)):
            _check_same_seconds(chosen, results, other, "in another process")


def _check_same_seconds(
    chosen: Sequence[Sample], results: _SecondsBySample, repeated: _SecondsBySample, place: str
) -> None:
    for sample, first, other in zip(chosen, results, repeated, strict=True):
        same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, other, strict=True))
        require(same, f"on {sample.name} on {sample.platform.name}: it returns other seconds {place}")


def _all_seconds(cost: CostModel, on: Sequence[Sample], limit_s: float) -> _SecondsBySample:
    return [_predict_valid_seconds(cost, sample, limit_s) for sample in on]


def _predict_valid_seconds(cost: CostModel, sample: Sample, limit_s: float) -> list[NDArray[np.float64]]:
    """Return an array of shape (pieces, devices) for each layer: the predicted seconds.

    Raises:
        AssertionError: Some seconds are invalid, or the cost model needs more than `limit_s` seconds for a layer.
    """
    layers, devices = sample.problem.layers, sample.platform.devices
    place, seconds = f"{describe(cost)} on {sample.name} on {sample.platform.name}", []
    with checking(place), unchanged(layers=layers, devices=devices):
        for layer in layers.layers:
            with error_context(f"layer {layer.name}"), time_limit(limit_s):
                seconds.append(_layer_seconds(cost, layers, layer, devices))
    return seconds


def _layer_seconds(cost: CostModel, layers: LayerGraph, layer: Layer, devices: Sequence[Device]) -> NDArray[np.float64]:
    pieces = list(sample_shares(layers, layer))
    table: Any = cost.seconds_table(layers, layer, pieces, devices)
    shape = (len(pieces), len(devices))
    require(isinstance(table, np.ndarray), f"seconds_table() returned {type(table).__name__} instead of an array")
    require(
        table.shape == shape and table.dtype == np.float64,
        f"seconds_table() returned an array of type {table.dtype} and shape {table.shape}: return float64 and the "
        f"shape (shares, devices), which is {shape}",
    )
    for share, row in zip(pieces, table, strict=True):
        for device, value in zip(devices, row, strict=True):
            seconds = cost.seconds(layers, layer, share, device)
            error = describe_seconds_error(seconds, layer, device) or describe_seconds_error(
                float(value), layer, device
            )
            require(not error, error)
            require(
                math.isclose(seconds, value, rel_tol=1e-9) or not device.can_compute,
                f"{share} on {device.name} takes {seconds:.6g} s by seconds(), but {value:.6g} s by seconds_table()",
            )
    return table  # type: ignore[no-any-return]


def sample_shares(layers: LayerGraph, layer: Layer) -> Iterator[LayerShare]:
    """Yield the shares of a layer (pieces without a device) that `check_cost_model` uses.

    They are the whole layer, half of it along each axis that can be cut, a partial sum over half of the input channels,
    and the addition of two partial sums.
    """
    yield LayerShare()
    if layer.whole_reason:
        return
    shape = output_shape(layers, layer)
    for axis in cuttable_axes(layers, layer):
        if shape[axis] > 1:
            half = with_interval(full_region(shape), axis, (0, shape[axis] // 2))
            yield LayerShare(align_region(layers, layer, half))
    extent = reduction_length(layers, layer)
    if extent is not None and extent > 1:
        yield LayerShare(full_region(shape), (0, extent // 2))
        yield LayerShare(full_region(shape), None, 2)
