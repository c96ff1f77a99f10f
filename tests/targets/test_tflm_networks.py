"""Networks for microcontrollers in TFLite Micro, in every kind of split, compared with onnxruntime and LiteRT."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from support.splits import Case, splits
from support.tflm_runs import int8, play

from dicompiler import networks
from dicompiler.ir.onnx.model import Model
from dicompiler.partition.tiling import single_device_plan
from dicompiler.verify.comparison import Tolerance, compare_value
from dicompiler_targets.tflm.reference_checks import LiteRtRuntime, make_tolerances

NAMES = ("autoencoder", "ds_cnn", "resnet8", "person_detection")
TILES = ("pipeline", "height", "grid", "lop", "fused-height", "fused-grid")
FLOATS = (*TILES, "lip", "fuse")


@cache
def network(name: str, numbers: str) -> Model:
    options = {"size": 96, "width": 0.35} if name == "mobilenet_v2" else {}
    source = Model.load(networks.build(name, 1, **options))
    return source if numbers == "float32" else int8(source)


@cache
def whole(name: str, runtime: type[Any] | None = None) -> Any:
    """Return the output of an int8 network on one device."""
    case = Case.of(network(name, "int8"), 1)
    made = case.with_plan(single_device_plan(case.layers, "pi01"))
    return (play(made, case.inputs) if runtime is None else play(made, case.inputs, runtime))["output"]


def check(name: str, numbers: str, devices: int, kinds: tuple[str, ...]) -> int:
    """Run the network in each of the splits, and return their number."""
    case = Case.of(network(name, numbers), devices)
    (allowed,) = make_tolerances(network(name, numbers)).values()
    found = list(splits(case.layers, kinds, 0, devices=devices))
    for one in found:
        got = play(case.with_plan(case.plan(one)), case.inputs)["output"]
        result = compare_value(one.kind, case.reference["output"], got, tolerance=allowed)
        assert result.passed, result
        assert numbers == "float32" or np.array_equal(got, whole(name)), one.kind
    return len(found)


@pytest.mark.parametrize("name", NAMES)
def test_float32_is_within_a_ten_thousandth_of_onnxruntime_in_every_split(name: str) -> None:
    assert check(name, "float32", 2, FLOATS) >= 4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices"), [*((name, 2) for name in NAMES), ("ds_cnn", 4), ("resnet8", 4)])
def test_int8_is_bit_equal_to_the_whole_and_near_onnxruntime_in_every_split(name: str, devices: int) -> None:
    assert check(name, "int8", devices, TILES) >= 2


@pytest.mark.parametrize("name", [*NAMES, "mobilenet_v2"])
def test_int8_is_within_a_step_of_litert(name: str) -> None:
    (about,) = make_tolerances(network(name, "int8")).values()
    assert about.step is not None
    result = compare_value(name, whole(name, LiteRtRuntime), whole(name), tolerance=Tolerance(1, about.step))
    assert result.passed, result
    assert len(np.unique(whole(name))) > 1


@pytest.mark.slow
def test_mobilenet_v2_in_tiles_and_in_output_channels_is_bit_equal_in_int8() -> None:
    assert check("mobilenet_v2", "int8", 4, ("height", "lop")) == 2


def test_output_that_is_a_third_too_large_is_beyond_the_tolerance() -> None:
    (allowed,) = make_tolerances(network("autoencoder", "int8")).values()
    reference = Case.of(network("autoencoder", "int8"), 1).reference["output"]
    assert compare_value("right", reference, reference, tolerance=allowed).passed
    assert not compare_value("wrong", reference, reference * np.float32(1.34), tolerance=allowed).passed
