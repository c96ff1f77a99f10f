"""The cost model `profile`: it returns measured times and interpolates between them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.layer_graphs import stack
from support.profiles import FAST, NONE, SLOW, document, entry, network, written

from dicompiler.base.errors import DicompilerError
from dicompiler.cost import profile as profile_module
from dicompiler.cost.cost_model import AnalyticModel, LocalBytes
from dicompiler.cost.linear_model import LinearModel
from dicompiler.cost.op_counts import count_flops, count_operations
from dicompiler.cost.profile import MAX_COMPUTE_FACTOR, MIN_COMPUTE_FACTOR, network_digest
from dicompiler.cost.profile_model import ProfileModel
from dicompiler.cost.runtime_overhead import FREE_RUNTIME, RuntimeCosts
from dicompiler.driver.engines import choose_engines
from dicompiler.driver.prepare import prepare
from dicompiler.ir.cluster import Host, Network
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import LayerShare
from dicompiler.ir.platform import Platform
from dicompiler.ir.regions import full_region, with_interval
from dicompiler.partition.bounds_inference import output_shape


@pytest.fixture
def profile(tmp_path: Path) -> str:
    return written(tmp_path, document(network()))


class TestMeasured:
    def test_returns_measured_times(self, profile: str) -> None:
        layers, model = network(), ProfileModel((profile,))
        for layer in layers.layers:
            expected = 1e-3 + 1e-6 * count_flops(layers, layer)
            assert model.seconds(layers, layer, LayerShare(), FAST) == pytest.approx(expected)
        conv = layers.layers[1]
        quarter = with_interval(full_region((1, 8, 16, 16)), 2, (4, 8))
        assert model.seconds(layers, conv, LayerShare(quarter), FAST) == pytest.approx(
            1e-3 + 1e-6 * count_flops(layers, conv, quarter)
        )

    def test_interpolated_times_never_decrease(self, profile: str) -> None:
        layers, model = network(), ProfileModel((profile,))
        conv = layers.layers[1]
        times = [
            model.seconds(layers, conv, LayerShare(with_interval(full_region((1, 8, 16, 16)), 2, (0, n))), FAST)
            for n in range(1, 17)
        ]
        assert times == sorted(times)
        assert times[0] >= 1e-3 * 0.99
        assert times[5] == pytest.approx((times[3] + times[7]) / 2)

    def test_unmeasured_axis_is_proportional(self, profile: str) -> None:
        layers, model = network(), ProfileModel((profile,))
        conv = layers.layers[1]
        whole = model.seconds(layers, conv, LayerShare(), FAST)
        half = with_interval(full_region((1, 8, 16, 16)), 1, (0, 4))
        assert model.seconds(layers, conv, LayerShare(half), FAST) == pytest.approx(whole / 2)
        rows = with_interval(full_region((1, 8, 16, 16)), 2, (0, 8))
        both = with_interval(rows, 1, (0, 4))
        assert model.seconds(layers, conv, LayerShare(both), FAST) == pytest.approx(
            model.seconds(layers, conv, LayerShare(rows), FAST) / 2
        )
        assert model.seconds(layers, conv, LayerShare(None, (0, 2)), FAST) == pytest.approx(whole / 4)
        assert 0 < model.seconds(layers, conv, LayerShare(merge_count=2), FAST) < whole

    def test_fixed_share_of_several_cuts_counts_once(self, tmp_path: Path) -> None:
        layers = network()
        made = document(layers)
        for one in made["layers"]:
            # Half of the layer takes 0.6 of its time, so a fifth of the time does not depend on the amount of work.
            whole = one["measurements"][0]["median_s"]
            one["measurements"][1:] = [entry(cut, 8, whole * 0.6) for cut in ("axis 2", "axis 3")]
        model, conv = ProfileModel((written(tmp_path, made),)), layers.layers[1]
        whole = model.seconds(layers, conv, LayerShare(), FAST)
        region = with_interval(with_interval(full_region((1, 8, 16, 16)), 3, (0, 8)), 2, (0, 8))
        assert model.seconds(layers, conv, LayerShare(region), FAST) == pytest.approx(
            whole * (0.2 + 0.8 * 0.25), rel=0.01
        )

    def test_measured_partial_sums_and_mergers_count(self, tmp_path: Path) -> None:
        layers = network()
        made = document(layers)
        for one in made["layers"]:
            if one["kind"] == "Conv":
                whole = one["measurements"][0]["median_s"]
                one["measurements"] += [
                    entry("reduce", 4, whole * 0.75),
                    entry("merge", 2, 1e-3),
                    entry("merge", 4, 3e-3),
                ]
        model, conv = ProfileModel((written(tmp_path, made),)), layers.layers[1]
        whole = model.seconds(layers, conv, LayerShare(), FAST)
        assert model.seconds(layers, conv, LayerShare(None, (0, 4)), FAST) == pytest.approx(0.75 * whole)
        assert [model.seconds(layers, conv, LayerShare(merge_count=n), FAST) for n in (2, 3, 8)] == pytest.approx(
            [1e-3, 2e-3, 7e-3]
        )
        half = with_interval(full_region((1, 8, 16, 16)), 1, (0, 4))
        assert model.seconds(layers, conv, LayerShare(half, None, 2), FAST) == pytest.approx(0.5e-3)

    def test_subtracts_empty_call(self, tmp_path: Path) -> None:
        layers = network()
        model = ProfileModel((written(tmp_path, document(layers, call_s=1e-3)),))
        assert model.seconds(layers, layers.layers[0], LayerShare(), FAST) == pytest.approx(
            1e-6 * count_flops(layers, layers.layers[0])
        )

    def test_each_device_uses_its_profile_and_tables_agree(self, tmp_path: Path) -> None:
        layers = network()
        slow = document(layers, "sl*")
        for one in slow["layers"]:
            for measurement in one["measurements"]:
                measurement |= {key: 3 * measurement[key] for key in ("median_s", "min_s")}
        files = (written(tmp_path, slow, "slow.json"), written(tmp_path, document(layers, "fast"), "fast.json"))
        model, conv = ProfileModel(files), layers.layers[0]
        shares = [
            LayerShare(),
            LayerShare(with_interval(full_region((1, 8, 16, 16)), 2, (0, 5))),
            LayerShare(None, (0, 2)),
        ]
        array = model.seconds_table(layers, conv, shares, [FAST, SLOW, NONE])
        assert array[:, 1] == pytest.approx(3 * array[:, 0])
        assert np.all(np.isinf(array[:, 2]))
        for i, device in enumerate((FAST, SLOW)):
            assert list(array[:, i]) == [model.seconds(layers, conv, share, device) for share in shares]

    def test_predicts_unmeasured_layer_by_operations(self, tmp_path: Path) -> None:
        layers = network()
        made = document(layers)
        made["layers"] = [one for one in made["layers"] if "fc6" not in one["names"]]
        made["unmeasured"] = [{"name": "fc6", "reason": "it would not run"}]
        fc, model = layers.layer_by_name["fc6"], ProfileModel((written(tmp_path, made),))
        assert model.seconds(layers, fc, LayerShare(), SLOW) == AnalyticModel().seconds(layers, fc, LayerShare(), SLOW)

    def test_unmeasured_layer_has_its_share_of_whole(self, tmp_path: Path) -> None:
        layers = network()
        fc, changes = layers.layer_by_name["fc6"], {"weight_byte_s": 1e-6, "read_byte_s": 2e-9}
        counted = AnalyticModel().seconds(layers, fc, LayerShare(), SLOW)
        for whole_s in (0.3, 0.6, 1.2):
            made = document(layers, whole_model_s=whole_s, **changes)
            made["layers"] = [one for one in made["layers"] if "fc6" not in one["names"]]
            model = ProfileModel((written(tmp_path, made, f"{whole_s}.json"),))
            # The profile has no time for layer fc6, so the analytic time is used, which includes reading the weights.
            assert model.seconds(layers, fc, LayerShare(), SLOW) == counted > 0
            each = [model.seconds(layers, layer, LayerShare(), SLOW) for layer in layers.layers]
            assert sum(each) == pytest.approx(whole_s)

    def test_measured_layers_are_unchanged_if_unmeasured_ones_take_all(self, tmp_path: Path) -> None:
        layers = network()
        made = document(layers)
        made["layers"] = [one for one in made["layers"] if "fc6" not in one["names"]]
        alone, within = (
            ProfileModel((written(tmp_path, made | more, f"{len(more)}.json"),))
            for more in ({}, {"whole_model_s": 1e-6})
        )
        for layer in layers.layers:
            assert (
                within.seconds(layers, layer, LayerShare(), SLOW)
                == alone.seconds(layers, layer, LayerShare(), SLOW)
                > 0
            )

    def test_rejects_profile_of_another_network(self, profile: str) -> None:
        other = stack((1, 4, 16, 16), [("conv", 8, 5, 1, 2, 1)])
        digests = f"{network_digest(network())[:12]} instead of {network_digest(other)[:12]}"
        message = rf"of another network \(structural digest {digests}\)"
        with pytest.raises(DicompilerError, match=message):
            ProfileModel((profile,)).seconds(other, other.layers[0], LayerShare(), FAST)

    def test_rejects_profile_of_another_device(self, tmp_path: Path) -> None:
        layers = network()
        file = written(tmp_path, document(layers, "pi*"))
        for model in (ProfileModel((file,)), LinearModel(file=(file,))):
            with pytest.raises(DicompilerError, match=r"no profile is for device 'fast'; .*p.json of 'pi\*'"):
                model.seconds(layers, layers.layers[0], LayerShare(), FAST)
        assert math.isfinite(ProfileModel((file,), others=True).seconds(layers, layers.layers[0], LayerShare(), FAST))


COSTS: dict[str, Any] = {
    "send": 1e-4,
    "receive": 2e-4,
    "per_byte": 1e-9,
    "call": 3e-4,
    "per_copied_byte": 1e-10,
    "header_share": 0.05,
}
STATED = RuntimeCosts(send=1e-6, receive=2e-6)


@pytest.mark.parametrize("model", [ProfileModel, LinearModel])
class TestRuntime:
    def test_measured_runtime_costs_count_unless_overridden(self, model: Any, tmp_path: Path) -> None:
        file = written(tmp_path, document(network(), "slow", runtime_costs={"sockets": COSTS}))
        assert model((file,)).runtime_costs(SLOW, STATED, "sockets") == RuntimeCosts(**COSTS)
        # Profiles do not measure `in_order`, the order of sending; the target's value is kept.
        orderly = replace(STATED, in_order=True)
        assert model((file,)).runtime_costs(SLOW, orderly, "sockets") == RuntimeCosts(**COSTS, in_order=True)
        assert model((file,), runtime=1.0).runtime_costs(SLOW, STATED, "sockets") == STATED
        assert model((file,), runtime=0.0).runtime_costs(SLOW, STATED, "sockets") == FREE_RUNTIME
        # Devices without a measured profile or without compute have the runtime costs that the target states.
        for device in (FAST, NONE):
            assert model((file,)).runtime_costs(device, STATED, "sockets") == AnalyticModel().runtime_costs(
                device, STATED, "sockets"
            )

    def test_profile_without_runtime_costs_uses_stated_ones_and_warns_once(
        self, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said: list[str] = []
        monkeypatch.setattr(profile_module.log, "warning", lambda text, *words: said.append(text % words))
        file = written(tmp_path, document(network(), runtime_costs={"mpi": COSTS}))
        for device in (FAST, SLOW, FAST):
            stated = AnalyticModel().runtime_costs(device, STATED, "sockets")
            assert model((file,)).runtime_costs(device, STATED, "sockets") == stated
        (line,) = said
        assert line.startswith(f"{file}: not measured: costs of the runtime of target sockets; the target's own costs")
        assert line.endswith("measure the device again with 'dicompiler profile --target sockets'")
        # The target "tflm" states no runtime costs.
        assert model((file,)).runtime_costs(FAST, FREE_RUNTIME, "tflm") == FREE_RUNTIME
        assert len(said) == 1

    def test_profile_without_copy_cost_uses_stated_one_and_warns_once(
        self, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said: list[str] = []
        monkeypatch.setattr(profile_module.log, "warning", lambda text, *words: said.append(text % words))
        newer = written(tmp_path, document(network(), runtime_costs={"acme": COSTS | {"per_copy": 7e-6}}), "new.json")
        older = written(tmp_path, document(network(), runtime_costs={"acme": COSTS}))
        stated = replace(STATED, per_copy=1e-6)
        assert model((newer,)).runtime_costs(FAST, stated, "acme") == RuntimeCosts(**COSTS, per_copy=7e-6)
        for _ in range(2):
            scaled = AnalyticModel().runtime_costs(SLOW, stated, "acme").per_copy
            assert model((older,)).runtime_costs(SLOW, stated, "acme") == RuntimeCosts(**COSTS, per_copy=scaled)
        (line,) = said
        assert line.startswith(f"{older}: not measured: per_copy of the runtime of target acme; the target's own costs")

    def test_warning_states_why_a_runtime_was_not_measured(
        self, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said: list[str] = []
        monkeypatch.setattr(profile_module.log, "warning", lambda text, *words: said.append(text % words))
        reasons = [{"target": "acme", "reason": "mpirun is missing: install it"}]
        file = written(tmp_path, document(network(), unmeasured_runtimes=reasons), "reason.json")
        assert model((file,)).runtime_costs(FAST, STATED, "acme") == AnalyticModel().runtime_costs(FAST, STATED, "acme")
        (line,) = said
        assert "costs of the runtime of target acme (mpirun is missing: install it); the target's own" in line

    @pytest.mark.parametrize("names", [("send", "receive"), ("call",), ("per_byte", "per_copied_byte")])
    def test_a_cost_of_zero_is_refused(self, model: Any, tmp_path: Path, names: tuple[str, ...]) -> None:
        costs = COSTS | dict.fromkeys(names, 0.0)
        file = written(tmp_path, document(network(), runtime_costs={"sockets": costs}))
        with pytest.raises(DicompilerError) as caught:
            model((file,)).runtime_costs(FAST, STATED, "sockets")
        cause = f"{', '.join(names)}: 0 s cannot be a measured cost"
        remedy = "measure the device again on an idle host ('dicompiler profile --target sockets')"
        assert str(caught.value) == f"{file}: runtime_costs.sockets: {cause}: {remedy}"


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 1.5])
def test_whole_layers_sum_to_whole_network(share: float, tmp_path: Path) -> None:
    layers = network()
    alone = ProfileModel((written(tmp_path, document(layers)),))
    total = sum(alone.seconds(layers, layer, LayerShare(), FAST) for layer in layers.layers)
    changes = {"whole_model_s": 1e-4 + share * total, "call_s": 0.0, "weight_byte_s": 1e-9, "read_byte_s": 2e-9}
    within = ProfileModel((written(tmp_path, document(layers, **changes), "q.json"),))
    each = [within.seconds(layers, layer, LayerShare(), FAST) for layer in layers.layers]
    assert sum(each) == pytest.approx(1e-4 + share * total) and min(each) >= 0
    for layer in layers.layers:
        everything = LayerShare(full_region(output_shape(layers, layer)))
        assert within.seconds(layers, layer, everything, FAST) == within.seconds(layers, layer, LayerShare(), FAST)


@pytest.mark.parametrize("model", [ProfileModel, LinearModel])
def test_parts_read_inputs_and_weights_from_memory(model: Any, tmp_path: Path) -> None:
    layers = network()
    warm = model((written(tmp_path, document(layers)),))
    cold = model((written(tmp_path, document(layers, weight_byte_s=1e-9, read_byte_s=3e-9), "q.json"),))
    conv, everything = layers.layers[1], full_region((1, 8, 16, 16))
    rows, channels = (LayerShare(with_interval(everything, axis, (0, 4))) for axis in (2, 1))
    read = count_operations(layers, conv).weight_bytes
    assert (
        count_operations(layers, conv, *rows).weight_bytes
        == read
        > count_operations(layers, conv, *channels).weight_bytes
        > 0
    )
    assert (
        count_operations(layers, conv, *rows).input_bytes
        == 4 * 8 * 5 * 16
        < count_operations(layers, conv, *channels).input_bytes
        == 4 * 8 * 16 * 16
    )
    for share in (rows, channels, LayerShare(None, (0, 4)), LayerShare(merge_count=2)):
        own = count_operations(layers, conv, *share)
        alone = warm.seconds(layers, conv, share, FAST)
        assert cold.seconds(layers, conv, share, FAST) - alone == pytest.approx(
            1e-9 * own.weight_bytes + 3e-9 * own.input_bytes
        )
        for inside in (own.input_bytes // 2, own.input_bytes):
            more = cold.seconds_in_frame(layers, conv, share, FAST, LocalBytes(inside)) - alone
            assert more == pytest.approx(1e-9 * own.weight_bytes + 3e-9 * (own.input_bytes - inside), abs=1e-12)


def test_ignores_inputs_of_variable_size() -> None:
    """A layer that was not measured reads a sequence or strings."""
    text = "several (seq(float[2]) s, int64 at, string[2] w) => (float[2] y, float[2] z) { y = SequenceAt (s, at) "
    text += 'z = ai.onnx.ml.LabelEncoder <keys_strings = ["a"], values_floats = [1.0]> (w) }'
    proto = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17, "ai.onnx.ml": 3]> {text}')
    layers = prepare(Model.load(proto)).layers
    assert layers is not None
    assert [LocalBytes.of_whole_layer(layers, layer).inputs for layer in layers.layers] == [0, 0]


@pytest.mark.parametrize("model", [ProfileModel, LinearModel])
def test_calls_are_cold_after_other_segments(model: Any, tmp_path: Path) -> None:
    layers = network()
    for runtime, call in (({"acme": COSTS}, COSTS["call"]), ({}, STATED.call)):
        own = model(
            (written(tmp_path, document(layers, cold_call_s=2e-5, runtime_costs=runtime), f"{len(runtime)}.json"),)
        )
        costs = own.runtime_costs(FAST, STATED, "acme")
        assert (costs.call, costs.cold_call) == (call, 2e-5)
        # With one segment, the data stays in the processor's caches between calls, so `cold_call` is not added.
        assert costs.call_seconds(1) == pytest.approx(call)
        assert costs.call_seconds(3) == pytest.approx(3 * costs.segment_call_s) == pytest.approx(3 * (call + 2e-5))


@pytest.mark.parametrize("model", [ProfileModel, LinearModel])
def test_parts_that_continue_in_a_session_have_session_times(model: Any, tmp_path: Path) -> None:
    layers = network()
    alone = model((written(tmp_path, document(layers)),))
    total = sum(alone.seconds(layers, layer, LayerShare(), FAST) for layer in layers.layers)
    within = model((written(tmp_path, document(layers, whole_model_s=0.9 * total), "q.json"),))
    conv = layers.layers[1]
    half, quarter = (LayerShare(with_interval(full_region((1, 8, 16, 16)), 2, (0, n))) for n in (8, 4))
    read = [count_operations(layers, conv, *share).input_bytes for share in (half, quarter)]
    saved = [
        within.seconds(layers, conv, one, FAST) - within.seconds_in_frame(layers, conv, one, FAST, LocalBytes(inside))
        for one, inside in zip((half, quarter), read, strict=True)
    ]
    # The time saved within a session is proportional to the bytes that layers read from each other, and smaller for a
    # share that takes less time for each byte than the whole layer.
    whole_s, whole_bytes = alone.seconds(layers, conv, LayerShare(), FAST), count_operations(layers, conv).input_bytes
    byte_times_s = [alone.seconds(layers, conv, one, FAST) / n for one, n in zip((half, quarter), read, strict=True)]
    fractions = [min(1, byte_s / (whole_s / whole_bytes)) for byte_s in byte_times_s]
    assert saved[0] / read[0] / fractions[0] == pytest.approx(saved[1] / read[1] / fractions[1])
    assert saved[0] > saved[1] > 0 and min(fractions) < 1
    assert alone.seconds_in_frame(layers, conv, half, FAST, LocalBytes(read[0])) == alone.seconds(
        layers, conv, half, FAST
    )


class TestEngines:
    """Profiles with the times of another engine."""

    @staticmethod
    def with_ncnn(tmp_path: Path, **changes: Any) -> str:
        """Return a profile in which ncnn computes each convolution in half the time, without measuring other layers."""
        given = document(network(), call_s=1e-4)
        halves = [
            {
                "signature": layer["signature"],
                "measurements": [
                    {**piece, "median_s": piece["median_s"] / 2, "min_s": piece["min_s"] / 2}
                    for piece in layer["measurements"]
                ],
            }
            for layer in given["layers"]
            if layer["kind"] == "Conv"
        ]
        engine = {"name": "ncnn", "versions": {"ncnn": "1.0"}, "call_s": 2e-4, "whole_model_s": None, "layers": halves}
        return written(tmp_path, given | {"engines": [engine | changes]})

    def test_layers_have_the_time_of_the_engine_or_else_that_of_onnxruntime(self, tmp_path: Path) -> None:
        layers, model = network(), ProfileModel((self.with_ncnn(tmp_path),))
        with_ncnn = replace(FAST, engine="ncnn")
        for layer in layers.layers:
            flops = count_flops(layers, layer)
            assert model.seconds(layers, layer, LayerShare(), FAST) == pytest.approx(9e-4 + 1e-6 * flops)
            is_conv = layer.nodes[layer.anchor].op == "Conv"
            expected = (1e-3 + 1e-6 * flops) / 2 - 2e-4 if is_conv else 9e-4 + 1e-6 * flops
            assert model.seconds(layers, layer, LayerShare(), with_ncnn) == pytest.approx(expected)
            table = model.seconds_table(layers, layer, [LayerShare()], [FAST, with_ncnn, FAST])
            assert (table[0, 1] == pytest.approx(expected) and table[0, 0] == table[0, 2] != table[0, 1]) or not is_conv

    def test_cuts_that_only_onnxruntime_computed_keep_their_times(self, tmp_path: Path) -> None:
        path = self.with_ncnn(tmp_path)
        profile = profile_module.load_profile(path)
        conv = next(layer for layer in profile.layers.values() if layer.kind == "Conv")
        measured = profile.engines["ncnn"]
        whole_only = {conv.signature: tuple(p for p in measured.layers[conv.signature] if p.cut == "whole")}
        changed = replace(profile, engines={"ncnn": replace(measured, layers=whole_only)}).of_engine("ncnn")
        pieces = {(p.cut, p.size): p.median_s for p in changed.layers[conv.signature].measurements}
        for piece in conv.measurements:
            expected = piece.median_s / 2 if piece.cut == "whole" else piece.median_s + 1e-4
            assert pieces[piece.cut, piece.size] == pytest.approx(expected)

    @pytest.mark.parametrize("whole_model_s", [None, 0.02])
    def test_layers_of_a_call_exchange_tensors_without_transfers(
        self, whole_model_s: float | None, tmp_path: Path
    ) -> None:
        layers, with_ncnn = network(), replace(FAST, engine="ncnn")
        # A call takes 2e-4 s; reading or returning a tensor takes 1e-8 s for each byte.
        transfers = [{"nbytes": nbytes, "median_s": 2e-4 + 2e-8 * nbytes} for nbytes in (1000, 100_000)]
        model = ProfileModel((self.with_ncnn(tmp_path, transfers=transfers, whole_model_s=whole_model_s),))
        conv, half = layers.layers[1], LayerShare(with_interval(full_region((1, 8, 16, 16)), 2, (0, 8)))
        counts = count_operations(layers, conv, *half)
        read, written_bytes = counts.input_bytes, 4 * 8 * 8 * 16
        alone_s = model.seconds(layers, conv, half, with_ncnn)
        for local in (LocalBytes(read), LocalBytes(read // 2, written_bytes), LocalBytes(0, written_bytes)):
            saved_s = alone_s - model.seconds_in_frame(layers, conv, half, with_ncnn, local)
            assert saved_s == pytest.approx(1e-8 * sum(local))
        if whole_model_s is None:
            assert alone_s == pytest.approx(model.isolated_seconds(layers, conv, half, with_ncnn))
        # ncnn does not compute the other layers, so their times contain no transfers.
        for layer in layers.layers:
            if layer.nodes[layer.anchor].op != "Conv":
                expected = model.isolated_seconds(layers, layer, LayerShare(), with_ncnn)
                assert model.seconds(layers, layer, LayerShare(), with_ncnn) == pytest.approx(expected)

    @pytest.mark.parametrize(("whole_share", "counted_share"), [(0.9, 0.9), (1.3, 1.3), (100, None), (0.01, None)])
    def test_layers_of_a_converting_engine_add_up_to_the_whole_network(
        self, whole_share: float, counted_share: float | None, tmp_path: Path
    ) -> None:
        layers, with_ncnn = network(), replace(FAST, engine="ncnn")
        given = document(layers, call_s=1e-4)
        pieces = [{key: layer[key] for key in ("signature", "measurements")} for layer in given["layers"]]
        transfers = [{"nbytes": nbytes, "median_s": 1e-4 + 2e-9 * nbytes} for nbytes in (1000, 100_000)]
        engine = {"name": "ncnn", "versions": {}, "call_s": 1e-4, "layers": pieces, "transfers": transfers}

        def total_s(whole_model_s: float | None, name: str) -> float:
            entry = {"engines": [engine | {"whole_model_s": whole_model_s}]}
            model = ProfileModel((written(tmp_path, given | entry, name),))
            return sum(model.seconds(layers, layer, LayerShare(), with_ncnn) for layer in layers.layers)

        plain_s = total_s(None, "a.json")
        corrected_s = total_s(1e-4 + whole_share * plain_s, "b.json")
        if counted_share is not None:
            assert corrected_s == pytest.approx(counted_share * plain_s)
        else:
            assert MIN_COMPUTE_FACTOR * 0.9 < corrected_s / plain_s <= MAX_COMPUTE_FACTOR

    def test_frames_have_the_cold_costs_of_the_engine(self, tmp_path: Path) -> None:
        layers, with_ncnn = network(), replace(FAST, engine="ncnn")
        conv, stated = layers.layers[0], RuntimeCosts(call=1e-5)
        warm_s = ProfileModel((self.with_ncnn(tmp_path),)).seconds(layers, conv, LayerShare(), with_ncnn)
        model = ProfileModel((self.with_ncnn(tmp_path, weight_byte_s=1e-8, cold_call_s=3e-5),))
        cold_s = model.seconds(layers, conv, LayerShare(), with_ncnn)
        assert cold_s - warm_s == pytest.approx(1e-8 * count_operations(layers, conv).weight_bytes)
        assert model.runtime_costs(with_ncnn, stated, "sockets").cold_call == 3e-5
        assert model.runtime_costs(FAST, stated, "sockets").cold_call == 0

    @pytest.mark.parametrize("make", [ProfileModel, LinearModel])
    def test_models_know_the_measured_engines(self, make: Any, tmp_path: Path) -> None:
        model = make((self.with_ncnn(tmp_path),))
        assert [model.knows_engine(FAST, name) for name in ("onnxruntime", "ncnn", "other")] == [True, True, False]
        layers = network()
        conv = layers.layers[0]
        times = [model.seconds(layers, conv, LayerShare(), replace(FAST, engine=e)) for e in ("onnxruntime", "ncnn")]
        assert times[1] < 0.6 * times[0]
        assert not LinearModel(coefficients=("*:1e-9:0:0",)).knows_engine(FAST, "ncnn")

    @pytest.mark.parametrize(("factor", "chosen"), [(1.0, "ncnn"), (4.0, "onnxruntime")])
    def test_auto_chooses_by_measured_times(self, factor: float, chosen: str, tmp_path: Path) -> None:
        path = self.with_ncnn(tmp_path)
        given = json.loads(Path(path).read_text())
        for layer in given["engines"][0]["layers"]:
            for piece in layer["measurements"]:
                piece["median_s"] *= factor
        model = ProfileModel((written(tmp_path, given),))
        platform = Platform("p", (Host("fast", 1 << 40),), (FAST,), Network("switch", 1e9))
        assert choose_engines(network(), platform, model, engine="auto").devices[0].engine == chosen
