"""Profiles: files are read or rejected in one line, curves never decrease, and signatures ignore names."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.layer_graphs import formed
from support.profiles import FAST, document, network, written

from dicompiler.base.errors import DicompilerError
from dicompiler.base.units import format_seconds
from dicompiler.cost.linear_model import LinearModel
from dicompiler.cost.piecewise_linear import TimeCurve
from dicompiler.cost.profile import layer_signature, network_digest, parse_profile
from dicompiler.cost.profile_model import ProfileModel
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.plan import LayerShare


@given(st.dictionaries(st.integers(1, 300), st.floats(-1e-3, 10), min_size=1, max_size=8))
def test_curve_is_not_negative_and_never_decreases(points: dict[int, float]) -> None:
    curve = TimeCurve.fit(points)
    values = [curve.seconds_at(size) for size in range(0, 400)]
    assert values[0] >= 0
    assert all(a <= b + 1e-12 for a, b in pairwise(values))


def test_curve_passes_through_increasing_points() -> None:
    curve = TimeCurve.fit({2: 1.0, 4: 1.5, 8: 4.0})
    assert [curve.seconds_at(size) for size in (0, 2, 3, 4, 8, 10)] == pytest.approx([0.5, 1.0, 1.25, 1.5, 4.0, 5.25])


class TestSignature:
    TEXT = """<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y)
    { a = Conv <pads = [1, 1, 1, 1]> (x, v)  b = Conv <pads = [1, 1, 1, 1]> (a, w)  y = Conv <pads = [PADS]> (b, u) }"""

    def layers(self, pads: str = "1, 1, 1, 1") -> LayerGraph:
        return formed(self.TEXT.replace("PADS", pads), v=(4, 4, 3, 3), w=(4, 4, 3, 3), u=(4, 4, 3, 3))

    def test_signature_ignores_names(self) -> None:
        layers = self.layers()
        assert len({layer_signature(layers, layer) for layer in layers.layers}) == 1

    def test_signature_depends_on_attributes(self) -> None:
        one, two = self.layers(), self.layers("2, 0, 1, 1")
        assert layer_signature(one, one.layers[0]) == layer_signature(two, two.layers[0])
        assert layer_signature(one, one.layers[2]) != layer_signature(two, two.layers[2])
        assert network_digest(one) != network_digest(two)

    def test_reloaded_network_has_same_digest(self) -> None:
        assert network_digest(self.layers()) == network_digest(self.layers())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": []}, "no layer has been measured yet"),
        ({"format": "dicompiler.profile/1"}, "is not supported"),
        ({"threads": "two"}, "threads: expected a whole number"),
        ({"divece": "x"}, "unknown key 'divece'"),
    ],
)
def test_rejects_invalid_file_in_one_line(tmp_path: Path, change: Any, message: str) -> None:
    layers = network()
    file = written(tmp_path, document(layers, **change))
    with pytest.raises(DicompilerError, match=message) as caught:
        ProfileModel((file,)).seconds(layers, layers.layers[0], LayerShare(), FAST)
    assert "\n" not in str(caught.value)


def test_rejects_layer_without_whole_measurement() -> None:
    made = document(network())
    del made["layers"][0]["measurements"][0]
    with pytest.raises(DicompilerError, match=r"layers\[0\].measurements: the time of the whole layer is missing"):
        parse_profile(made, "p.json")


def test_links_are_read() -> None:
    (link,) = parse_profile(document(network()), "p.json").links
    assert (link.hosts, link.bandwidth, link.latency) == (("a", "b"), 1e9, 1e-4)


@pytest.mark.parametrize("model", [ProfileModel, LinearModel])
def test_rejects_profile_of_busy_host_unless_forced(model: Any, tmp_path: Path) -> None:
    layers = network()
    given = document(layers)
    whole = given["layers"][1]["measurements"][0]
    expected = model((written(tmp_path, given),)).seconds(layers, layers.layers[1], LayerShare(), FAST)
    assert expected > 0
    whole["min_s"] = whole["median_s"]
    whole["median_s"] *= 11
    noisy = written(tmp_path, given)
    with pytest.raises(DicompilerError) as caught:
        model((noisy,)).seconds(layers, layers.layers[1], LayerShare(), FAST)
    name, times = given["layers"][1]["names"][0], [format_seconds(whole[key]) for key in ("median_s", "min_s")]
    said = str(caught.value)
    assert said.startswith(f"{noisy}: its host was busy: medians are ")
    assert f" times the shortest times (allowed: 2; most of all {name} {' against '.join(times)}): measure" in said
    assert said.endswith("it again on an idle host, or accept it (force=true)")
    assert model((noisy,), force=True).seconds(layers, layers.layers[1], LayerShare(), FAST) > expected
