"""The cost models `roofline` and `linear`: layers limited by computing or by memory, given or fitted coefficients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.layer_graphs import stack
from support.profiles import FAST, SLOW, document, network, written

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.cost.layer_kinds import layer_kind
from dicompiler.cost.linear_model import Coefficients, LinearModel, fit_coefficients
from dicompiler.cost.op_counts import count_flops, count_operations
from dicompiler.cost.roofline_model import RooflineModel
from dicompiler.ir.plan import LayerShare
from dicompiler.plugin.registry import registry


@pytest.fixture
def profile(tmp_path: Path) -> str:
    return written(tmp_path, document(network()))


class TestRoofline:
    def test_slower_of_computing_and_moving_counts(self) -> None:
        layers = network()
        conv, pool = layers.layers[0], layers.layer_by_name["pool4"]
        for layer in (conv, pool, layers.layer_by_name["flatten5"]):
            counted = count_operations(layers, layer)
            for device in (FAST, SLOW):
                expected = max(counted.flops / device.rate, counted.moved_bytes / device.memory_bandwidth)
                assert RooflineModel().seconds(layers, layer, LayerShare(), device) == pytest.approx(expected)
        assert RooflineModel().seconds(layers, conv, LayerShare(), SLOW) == count_flops(layers, conv) / SLOW.rate
        assert RooflineModel().seconds(layers, layers.layer_by_name["flatten5"], LayerShare(), SLOW) > 0

    def test_unknown_bandwidth_is_an_error_with_both_remedies(self) -> None:
        layers, bare = network(), replace(FAST, memory_bandwidth=0.0)
        with pytest.raises(
            DicompilerError, match=r"'fast' has no memory bandwidth: .*memory_bandwidth.*roofline\{bandwidth="
        ):
            RooflineModel().seconds(layers, layers.layers[0], LayerShare(), bare)
        both = [RooflineModel(bandwidth="8 GB/s").seconds(layers, x, LayerShare(), bare) for x in layers.layers]
        assert both == [RooflineModel().seconds(layers, x, LayerShare(), FAST) for x in layers.layers]

    def test_rejects_invalid_bandwidth(self) -> None:
        with pytest.raises(DicompilerError, match="unknown unit"):
            RooflineModel(bandwidth="4 GB")


class TestLinear:
    def test_given_coefficients_hold_for_kind_and_star_for_others(self) -> None:
        layers = network()
        model = LinearModel(coefficients=("Conv:1e-9:2e-9:3e-6", "*:0:1e-9:0"))
        conv, pool = layers.layers[0], layers.layer_by_name["pool4"]
        counted = count_operations(layers, conv)
        assert model.seconds(layers, conv, LayerShare(), FAST) == pytest.approx(
            1e-9 * counted.flops + 2e-9 * counted.moved_bytes + 3e-6
        )
        assert model.seconds(layers, pool, LayerShare(), FAST) == pytest.approx(
            1e-9 * count_operations(layers, pool).moved_bytes
        )

    def test_rate_scales_other_devices(self) -> None:
        layers = network()
        model = LinearModel(coefficients=("*:1e-9:0:0",), rate="4 GFLOP/s")
        fast, slow = (model.seconds(layers, layers.layers[0], LayerShare(), device) for device in (FAST, SLOW))
        assert slow == pytest.approx(4 * fast)
        assert fast == pytest.approx(1e-9 * count_flops(layers, layers.layers[0]))

    def test_rejects_kind_without_coefficients(self) -> None:
        layers = network()
        with pytest.raises(DicompilerError, match="no coefficients for operator 'MaxPool' of layer 'pool4'"):
            LinearModel(coefficients=("Conv:1:1:1",)).seconds(layers, layers.layer_by_name["pool4"], LayerShare(), FAST)

    @pytest.mark.parametrize(
        ("spec", "cause"),
        [
            ("linear", "give either file="),
            ("linear{file=a.json coefficients=Conv:1:1:1}", "give either file="),
            ("linear{coefficients=Conv:1:1}", "KIND:A:B:C"),
            ("linear{coefficients=Conv:1:-1:0}", "at least zero"),
            ("linear{coefficients=Conv:1:nan:0}", "at least zero"),
            ('linear{file=a.json rate="1 GFLOP/s"}', "rate is only used together with coefficients=KIND"),
            ("profile", "needs option 'file'"),
            ("profile{file=}", "at least one profile"),
        ],
    )
    def test_wrong_options_are_usage_errors(self, spec: str, cause: str) -> None:
        with pytest.raises(UsageError, match=cause):
            registry().make("cost_models", spec)

    def test_grouped_convolutions_are_own_kind(self) -> None:
        layers = stack((1, 4, 8, 8), [("conv", 4, 3, 1, 1, 1), ("conv", 4, 3, 1, 1, 4)])
        assert [layer_kind(layer) for layer in layers.layers] == ["Conv", "GroupConv"]
        model = LinearModel(coefficients=("Conv:0:0:1", "GroupConv:0:0:2"))
        assert [model.seconds(layers, layer, LayerShare(), FAST) for layer in layers.layers] == [1, 2]

    def test_fit_finds_original_coefficients(self) -> None:
        work = [(1e6, 3e4), (2e7, 1e4), (5e3, 8e6), (1e2, 1e2), (3e6, 3e6)]
        found = fit_coefficients([(f, b, 2e-9 * f + 5e-10 * b + 1e-5) for f, b in work])
        assert (found.flop_s, found.byte_s, found.call_s) == pytest.approx((2e-9, 5e-10, 1e-5))

    def test_fitted_coefficients_are_not_negative(self) -> None:
        found = fit_coefficients([(1e6, 1e6, 1e-3), (2e6, 1e6, 1e-3), (3e6, 1e6, 0.9e-3)])
        assert min(found.flop_s, found.byte_s, found.call_s) >= 0
        assert found.predict(2e6, 1e6) == pytest.approx(1e-3, rel=0.1)
        assert fit_coefficients([]) == Coefficients(0.0, 0.0, 0.0)

    def test_fits_profile(self, profile: str) -> None:
        layers, model = network(), LinearModel(file=(profile,))
        for layer in layers.layers:
            expected = 1e-3 + 1e-6 * count_flops(layers, layer)
            assert model.seconds(layers, layer, LayerShare(), FAST) == pytest.approx(expected, rel=1e-3)
        assert model.is_measured and not LinearModel(coefficients=("*:1:1:1",)).is_measured
