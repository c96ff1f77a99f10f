"""The cost model `profile`: what was measured comes back, and what lies in between lies between."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from support.layer_graphs import stack
from support.profiles import FAST, NONE, SLOW, document, entry, network, written

from dicompiler.base.errors import DicompilerError
from dicompiler.cost.counting import flops
from dicompiler.cost.linear import Linear
from dicompiler.cost.measured import Measured
from dicompiler.cost.model import Analytic
from dicompiler.cost.profile import network_digest
from dicompiler.ir.plan import Share
from dicompiler.ir.regions import full, with_interval


@pytest.fixture
def profile(tmp_path: Path) -> str:
    return written(tmp_path, document(network()))


class TestMeasured:
    def test_what_was_measured_comes_back(self, profile: str) -> None:
        layers, model = network(), Measured((profile,))
        for layer in layers.layers:
            expected = 1e-3 + 1e-6 * flops(layers, layer)
            assert model.seconds(layers, layer, Share(), FAST) == pytest.approx(expected)
        conv = layers.layers[1]
        quarter = with_interval(full((1, 8, 16, 16)), 2, (4, 8))
        assert model.seconds(layers, conv, Share(quarter), FAST) == pytest.approx(
            1e-3 + 1e-6 * flops(layers, conv, quarter)
        )

    def test_sizes_in_between_lie_between_and_time_never_falls(self, profile: str) -> None:
        layers, model = network(), Measured((profile,))
        conv = layers.layers[1]
        times = [
            model.seconds(layers, conv, Share(with_interval(full((1, 8, 16, 16)), 2, (0, n))), FAST)
            for n in range(1, 17)
        ]
        assert times == sorted(times)
        assert times[0] >= 1e-3 * 0.99
        assert times[5] == pytest.approx((times[3] + times[7]) / 2)

    def test_an_axis_that_was_not_measured_goes_in_proportion(self, profile: str) -> None:
        layers, model = network(), Measured((profile,))
        conv = layers.layers[1]
        whole = model.seconds(layers, conv, Share(), FAST)
        half = with_interval(full((1, 8, 16, 16)), 1, (0, 4))
        assert model.seconds(layers, conv, Share(half), FAST) == pytest.approx(whole / 2)
        rows = with_interval(full((1, 8, 16, 16)), 2, (0, 8))
        both = with_interval(rows, 1, (0, 4))
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
        half = with_interval(full((1, 8, 16, 16)), 1, (0, 4))
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
                measurement |= {key: 3 * measurement[key] for key in ("seconds", "low")}
        files = (written(tmp_path, slow, "slow.json"), written(tmp_path, document(layers, "fast"), "fast.json"))
        model, conv = Measured(files), layers.layers[0]
        shares = [Share(), Share(with_interval(full((1, 8, 16, 16)), 2, (0, 5))), Share(None, (0, 2))]
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
