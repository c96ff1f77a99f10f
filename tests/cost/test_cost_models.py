"""Cost models beside the analytic one: roofline, linear, measured; and arrays of many shares on many devices."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.layer_graphs import formed, stack

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.cost.linear import Coefficients, Linear, Roofline, fit
from dicompiler.cost.measured import Measured
from dicompiler.cost.model import Analytic, CostModel, Share, count, flops
from dicompiler.cost.profile import Curve, from_json, kind_of, network_digest, signature
from dicompiler.ir.devices import Device
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.regions import full
from dicompiler.ir.regions import replace as cut
from dicompiler.plugin.registry import registry

FAST = Device("fast", "fast", 4e9, memory_bandwidth=8e9)
SLOW = Device("slow", "slow", 1e9, memory_bandwidth=1e9)
NONE = Device("none", "none", 0.0)


def network() -> LayerGraph:
    return stack((1, 4, 16, 16), [("conv", 8, 3, 1, 1, 1), ("conv", 8, 3, 1, 1, 1), ("conv", 8, 3, 1, 1, 1),
                                  ("pool", 2, 2, 0), ("flatten",), ("fc", 10)])  # fmt: skip


def entry(cut: str, size: int, seconds: float, work: tuple[int, int] = (1000, 1000)) -> dict[str, Any]:
    return {"cut": cut, "size": size, "flops": work[0], "moved": work[1], "seconds": seconds, "low": 0.0, "high": 1.0}


def document(graph: LayerGraph, device: str = "*", **changes: Any) -> dict[str, Any]:
    """A profile in which each layer takes 1 µs a FLOP and 1 ms more, measured at halves and quarters of axis 2."""
    found: dict[str, Any] = {}
    for layer in graph.layers:
        own = found.setdefault(
            signature(graph, layer),
            {
                "signature": signature(graph, layer),
                "kind": kind_of(layer),
                "names": [],
                "measurements": [],
            },
        )
        own["names"].append(layer.name)
        shape = graph.tensors[layer.output].shape or ()
        if not own["measurements"]:
            counted = count(graph, layer)
            own["measurements"] = [entry("whole", 1, 1e-3 + 1e-6 * counted.flops, (counted.flops, counted.moved))]
            for part in (2, 4) if len(shape) == 4 else ():
                rows = shape[2] // part
                less = count(graph, layer, cut(full(shape), 2, (0, rows)))
                own["measurements"].append(entry("axis 2", rows, 1e-3 + 1e-6 * less.flops, (less.flops, less.moved)))
    return {
        "format": "dicompiler.profile/1", "network": network_digest(graph), "device": device, "host": {}, "threads": 1,
        "repeat": 3, "optimization": "extended", "call_s": 0.0, "layers": list(found.values()), "unmeasured": [],
        "links": [{"hosts": ["a", "b"], "bandwidth": 1e9, "latency": 1e-4}],
    } | changes  # fmt: skip


@pytest.fixture
def profile(tmp_path: Path) -> str:
    return written(tmp_path, document(network()))


def written(directory: Path, profile: dict[str, Any], name: str = "p.json") -> str:
    (directory / name).write_text(json.dumps(profile))
    return str(directory / name)


def test_all_models_come_in_by_the_hook() -> None:
    assert list(registry().cost_models) == ["analytic", "linear", "profile", "roofline"]
    assert registry().make("cost_models", 'roofline{bandwidth="4 GB/s"}') == Roofline(bandwidth="4 GB/s")


class TestCounting:
    def test_bytes_are_those_of_inputs_weights_and_outputs(self) -> None:
        layers = network()
        counted = count(layers, layers.layers[0])
        assert counted.moved == 4 * (4 * 16 * 16 + 8 * 4 * 9 + 8 * 16 * 16)
        assert counted.flops == flops(layers, layers.layers[0])

    def test_a_tile_reads_its_halo_and_all_weights(self) -> None:
        layers = network()
        region = cut(full((1, 8, 16, 16)), 2, (4, 8))
        assert count(layers, layers.layers[0], region).moved == 4 * (4 * 6 * 16 + 8 * 4 * 9 + 8 * 4 * 16)

    def test_a_merger_reads_every_partial_sum_and_writes_their_sum(self) -> None:
        layers = network()
        counted = count(layers, layers.layers[1], merge=3)
        assert counted.moved == 4 * 4 * 8 * 16 * 16
        assert counted.add == 2 * 8 * 16 * 16


@pytest.mark.parametrize(
    "model", [Analytic(), Analytic(pools=False), Roofline(), Linear(coefficients=("*:1e-9:0:1e-6",))]
)
def test_an_array_holds_the_seconds_of_each_share_on_each_device(model: CostModel) -> None:
    layers = network()
    devices = [FAST, SLOW, NONE]
    for layer in layers.layers:
        shape = layers.tensors[layer.output].shape or ()
        half = cut(full(shape), 1, (0, max(1, shape[1] // 2)))
        shares = [Share(), Share(half)]
        if layer.name.startswith("conv"):
            shares += [Share(None, (0, 2)), Share(merge=2)]
        array = model.fill(layers, layer, shares, devices)
        assert array.shape == (len(shares), 3)
        expected = [[model.seconds(layers, layer, share, device) for device in devices] for share in shares]
        assert np.array_equal(array, expected)
        assert np.all(np.isinf(array[:, 2]))
    assert model.fill(layers, layers.layers[0], [], devices).shape == (0, 3)


class TestRoofline:
    def test_the_slower_of_computing_and_moving_counts(self) -> None:
        layers = network()
        conv, pool = layers.layers[0], layers.by_name["pool4"]
        for layer in (conv, pool, layers.by_name["flatten5"]):
            counted = count(layers, layer)
            for device in (FAST, SLOW):
                expected = max(counted.flops / device.rate, counted.moved / device.memory_bandwidth)
                assert Roofline().seconds(layers, layer, Share(), device) == pytest.approx(expected)
        assert Roofline().seconds(layers, conv, Share(), SLOW) == flops(layers, conv) / SLOW.rate
        assert Roofline().seconds(layers, layers.by_name["flatten5"], Share(), SLOW) > 0

    def test_a_bandwidth_that_nobody_says_is_an_error_with_both_remedies(self) -> None:
        layers, bare = network(), replace(FAST, memory_bandwidth=0.0)
        with pytest.raises(DicompilerError, match=r"'fast' is not known: .*memory_bandwidth.*roofline\{bandwidth="):
            Roofline().seconds(layers, layers.layers[0], Share(), bare)
        both = [Roofline(bandwidth="8 GB/s").seconds(layers, x, Share(), bare) for x in layers.layers]
        assert both == [Roofline().seconds(layers, x, Share(), FAST) for x in layers.layers]

    def test_a_wrong_bandwidth_is_an_error(self) -> None:
        with pytest.raises(DicompilerError, match="unknown unit"):
            Roofline(bandwidth="4 GB")


class TestLinear:
    def test_given_coefficients_hold_for_their_kind_and_the_star_for_others(self) -> None:
        layers = network()
        model = Linear(coefficients=("Conv:1e-9:2e-9:3e-6", "*:0:1e-9:0"))
        conv, pool = layers.layers[0], layers.by_name["pool4"]
        counted = count(layers, conv)
        assert model.seconds(layers, conv, Share(), FAST) == pytest.approx(
            1e-9 * counted.flops + 2e-9 * counted.moved + 3e-6
        )
        assert model.seconds(layers, pool, Share(), FAST) == pytest.approx(1e-9 * count(layers, pool).moved)

    def test_with_a_rate_others_are_as_much_slower_as_their_rates_are_lower(self) -> None:
        layers = network()
        model = Linear(coefficients=("*:1e-9:0:0",), rate="4 GFLOP/s")
        fast, slow = (model.seconds(layers, layers.layers[0], Share(), device) for device in (FAST, SLOW))
        assert slow == pytest.approx(4 * fast)
        assert fast == pytest.approx(1e-9 * flops(layers, layers.layers[0]))

    def test_a_kind_without_coefficients_is_an_error(self) -> None:
        layers = network()
        with pytest.raises(DicompilerError, match=r"no coefficients for 'MaxPool' \(layer 'pool4'\)"):
            Linear(coefficients=("Conv:1:1:1",)).seconds(layers, layers.by_name["pool4"], Share(), FAST)

    @pytest.mark.parametrize(
        ("spec", "cause"),
        [
            ("linear", "give either file="),
            ("linear{file=a.json coefficients=Conv:1:1:1}", "give either file="),
            ("linear{coefficients=Conv:1:1}", "KIND:A:B:C"),
            ("linear{coefficients=Conv:1:-1:0}", "at least zero"),
            ("linear{coefficients=Conv:1:nan:0}", "at least zero"),
            ('linear{file=a.json rate="1 GFLOP/s"}', "rate goes with coefficients"),
            ("profile", "needs option 'file'"),
            ("profile{file=}", "at least one profile"),
        ],
    )
    def test_wrong_options_are_usage_errors(self, spec: str, cause: str) -> None:
        with pytest.raises(UsageError, match=cause):
            registry().make("cost_models", spec)

    def test_convolutions_in_groups_are_a_kind_of_their_own(self) -> None:
        layers = stack((1, 4, 8, 8), [("conv", 4, 3, 1, 1, 1), ("conv", 4, 3, 1, 1, 4)])
        assert [kind_of(layer) for layer in layers.layers] == ["Conv", "GroupConv"]
        model = Linear(coefficients=("Conv:0:0:1", "GroupConv:0:0:2"))
        assert [model.seconds(layers, layer, Share(), FAST) for layer in layers.layers] == [1, 2]

    def test_a_fit_finds_the_coefficients_that_made_the_samples(self) -> None:
        work = [(1e6, 3e4), (2e7, 1e4), (5e3, 8e6), (1e2, 1e2), (3e6, 3e6)]
        found = fit([(f, b, 2e-9 * f + 5e-10 * b + 1e-5) for f, b in work])
        assert (found.flop, found.byte, found.call) == pytest.approx((2e-9, 5e-10, 1e-5))

    def test_no_coefficient_of_a_fit_is_negative(self) -> None:
        found = fit([(1e6, 1e6, 1e-3), (2e6, 1e6, 1e-3), (3e6, 1e6, 0.9e-3)])
        assert min(found.flop, found.byte, found.call) >= 0
        assert found.seconds(2e6, 1e6) == pytest.approx(1e-3, rel=0.1)
        assert fit([]) == Coefficients(0.0, 0.0, 0.0)

    def test_a_profile_gives_coefficients(self, profile: str) -> None:
        layers, model = network(), Linear(file=(profile,))
        for layer in layers.layers:
            expected = 1e-3 + 1e-6 * flops(layers, layer)
            assert model.seconds(layers, layer, Share(), FAST) == pytest.approx(expected, rel=1e-3)
        assert model.measured and not Linear(coefficients=("*:1:1:1",)).measured


class TestMeasured:
    def test_what_was_measured_comes_back(self, profile: str) -> None:
        layers, model = network(), Measured((profile,))
        for layer in layers.layers:
            expected = 1e-3 + 1e-6 * flops(layers, layer)
            assert model.seconds(layers, layer, Share(), FAST) == pytest.approx(expected)
        conv = layers.layers[1]
        quarter = cut(full((1, 8, 16, 16)), 2, (4, 8))
        assert model.seconds(layers, conv, Share(quarter), FAST) == pytest.approx(
            1e-3 + 1e-6 * flops(layers, conv, quarter)
        )

    def test_sizes_in_between_lie_between_and_time_never_falls(self, profile: str) -> None:
        layers, model = network(), Measured((profile,))
        conv = layers.layers[1]
        times = [model.seconds(layers, conv, Share(cut(full((1, 8, 16, 16)), 2, (0, n))), FAST) for n in range(1, 17)]
        assert times == sorted(times)
        assert times[0] >= 1e-3 * 0.99
        assert times[5] == pytest.approx((times[3] + times[7]) / 2)

    def test_an_axis_that_was_not_measured_goes_in_proportion(self, profile: str) -> None:
        layers, model = network(), Measured((profile,))
        conv = layers.layers[1]
        whole = model.seconds(layers, conv, Share(), FAST)
        half = cut(full((1, 8, 16, 16)), 1, (0, 4))
        assert model.seconds(layers, conv, Share(half), FAST) == pytest.approx(whole / 2)
        rows = cut(full((1, 8, 16, 16)), 2, (0, 8))
        both = cut(rows, 1, (0, 4))
        assert model.seconds(layers, conv, Share(both), FAST) == pytest.approx(
            model.seconds(layers, conv, Share(rows), FAST) / 2
        )
        assert model.seconds(layers, conv, Share(None, (0, 2)), FAST) == pytest.approx(whole / 4)
        assert 0 < model.seconds(layers, conv, Share(merge=2), FAST) < whole

    def test_measured_partial_sums_and_mergers_count(self, tmp_path: Path) -> None:
        layers = network()
        made = document(layers)
        for one in made["layers"]:
            if one["kind"] == "Conv":
                whole = one["measurements"][0]["seconds"]
                one["measurements"] += [
                    entry("reduce", 4, whole * 0.75),
                    entry("merge", 2, 1e-3),
                    entry("merge", 4, 3e-3),
                ]
        model, conv = Measured((written(tmp_path, made),)), layers.layers[1]
        whole = model.seconds(layers, conv, Share(), FAST)
        assert model.seconds(layers, conv, Share(None, (0, 4)), FAST) == pytest.approx(0.75 * whole)
        assert [model.seconds(layers, conv, Share(merge=n), FAST) for n in (2, 3, 8)] == pytest.approx(
            [1e-3, 2e-3, 7e-3]
        )
        half = cut(full((1, 8, 16, 16)), 1, (0, 4))
        assert model.seconds(layers, conv, Share(half, None, 2), FAST) == pytest.approx(0.5e-3)

    def test_the_empty_call_is_taken_off(self, tmp_path: Path) -> None:
        layers = network()
        model = Measured((written(tmp_path, document(layers, call_s=1e-3)),))
        assert model.seconds(layers, layers.layers[0], Share(), FAST) == pytest.approx(
            1e-6 * flops(layers, layers.layers[0])
        )

    def test_each_device_has_its_own_profile_and_arrays_agree(self, tmp_path: Path) -> None:
        layers = network()
        slow = document(layers, "sl*")
        for one in slow["layers"]:
            for measurement in one["measurements"]:
                measurement["seconds"] *= 3
        files = (written(tmp_path, slow, "slow.json"), written(tmp_path, document(layers, "fast"), "fast.json"))
        model, conv = Measured(files), layers.layers[0]
        shares = [Share(), Share(cut(full((1, 8, 16, 16)), 2, (0, 5))), Share(None, (0, 2))]
        array = model.fill(layers, conv, shares, [FAST, SLOW, NONE])
        assert array[:, 1] == pytest.approx(3 * array[:, 0])
        assert np.all(np.isinf(array[:, 2]))
        for i, device in enumerate((FAST, SLOW)):
            assert list(array[:, i]) == [model.seconds(layers, conv, share, device) for share in shares]

    def test_a_layer_that_could_not_be_measured_is_counted(self, tmp_path: Path) -> None:
        layers = network()
        made = document(layers)
        made["layers"] = [one for one in made["layers"] if "fc6" not in one["names"]]
        made["unmeasured"] = [{"name": "fc6", "reason": "it would not run"}]
        fc, model = layers.by_name["fc6"], Measured((written(tmp_path, made),))
        assert model.seconds(layers, fc, Share(), SLOW) == Analytic().seconds(layers, fc, Share(), SLOW)

    def test_a_profile_of_another_network_is_an_error_that_names_both(self, profile: str) -> None:
        other = stack((1, 4, 16, 16), [("conv", 8, 5, 1, 2, 1)])
        message = f"measured was {network_digest(network())[:12]}, this one is {network_digest(other)[:12]}"
        with pytest.raises(DicompilerError, match=message):
            Measured((profile,)).seconds(other, other.layers[0], Share(), FAST)

    def test_a_profile_of_another_device_is_an_error_that_names_both(self, tmp_path: Path) -> None:
        layers = network()
        file = written(tmp_path, document(layers, "pi*"))
        for model in (Measured((file,)), Linear(file=(file,))):
            with pytest.raises(DicompilerError, match=r"none is of device 'fast' \(there is .*p.json of 'pi\*'\)"):
                model.seconds(layers, layers.layers[0], Share(), FAST)
        assert math.isfinite(Measured((file,), others=True).seconds(layers, layers.layers[0], Share(), FAST))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"layers": []}, "no layer has been measured yet"),
            ({"format": "dicompiler.profile/2"}, "is not supported"),
            ({"threads": "two"}, "threads: expected a whole number"),
            ({"divece": "x"}, "unknown key 'divece'"),
        ],
    )
    def test_a_wrong_file_is_an_error_of_one_line(self, tmp_path: Path, change: Any, message: str) -> None:
        layers = network()
        file = written(tmp_path, document(layers, **change))
        with pytest.raises(DicompilerError, match=message) as caught:
            Measured((file,)).seconds(layers, layers.layers[0], Share(), FAST)
        assert "\n" not in str(caught.value)

    def test_a_layer_without_its_whole_is_an_error(self) -> None:
        made = document(network())
        del made["layers"][0]["measurements"][0]
        with pytest.raises(DicompilerError, match=r"p.json: layers\[0\].measurements: the whole layer is missing"):
            from_json(made, "p.json")

    def test_links_are_read(self) -> None:
        (link,) = from_json(document(network()), "p.json").links
        assert (link.hosts, link.bandwidth, link.latency) == (("a", "b"), 1e9, 1e-4)


@given(st.dictionaries(st.integers(1, 300), st.floats(-1e-3, 10), min_size=1, max_size=8))
def test_a_curve_is_never_negative_and_never_falls(points: dict[int, float]) -> None:
    curve = Curve.through(points)
    values = [curve.at(size) for size in range(0, 400)]
    assert values[0] >= 0
    assert all(a <= b + 1e-12 for a, b in pairwise(values))


def test_a_curve_goes_through_points_that_grow() -> None:
    curve = Curve.through({2: 1.0, 4: 1.5, 8: 4.0})
    assert [curve.at(size) for size in (0, 2, 3, 4, 8, 10)] == pytest.approx([0.5, 1.0, 1.25, 1.5, 4.0, 5.25])


class TestSignature:
    TEXT = """<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y)
    { a = Conv <pads = [1, 1, 1, 1]> (x, v)  b = Conv <pads = [1, 1, 1, 1]> (a, w)  y = Conv <pads = [PADS]> (b, u) }"""

    def layers(self, pads: str = "1, 1, 1, 1") -> LayerGraph:
        return formed(self.TEXT.replace("PADS", pads), v=(4, 4, 3, 3), w=(4, 4, 3, 3), u=(4, 4, 3, 3))

    def test_layers_that_do_the_same_have_one_signature_whatever_their_names(self) -> None:
        layers = self.layers()
        assert len({signature(layers, layer) for layer in layers.layers}) == 1

    def test_an_attribute_makes_another_signature_and_another_network(self) -> None:
        one, two = self.layers(), self.layers("2, 0, 1, 1")
        assert signature(one, one.layers[0]) == signature(two, two.layers[0])
        assert signature(one, one.layers[2]) != signature(two, two.layers[2])
        assert network_digest(one) != network_digest(two)

    def test_a_network_read_again_has_the_same_digest(self) -> None:
        assert network_digest(self.layers()) == network_digest(self.layers())
