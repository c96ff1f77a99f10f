"""Operation counts agree with published ones, parts sum to the whole, and time is operations / rate."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.layer_graphs import alexnet, formed, stack, vgg16
from support.profiles import FAST, NONE, SLOW, network

from dicompiler.cost.cost_model import AnalyticModel, CostModel
from dicompiler.cost.linear_model import LinearModel
from dicompiler.cost.op_counts import count_flops, count_macs, count_operations
from dicompiler.cost.roofline_model import RooflineModel
from dicompiler.ir.cluster import Device
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.plan import LayerShare
from dicompiler.ir.regions import full_region, split_proportionally, with_interval
from dicompiler.networks import build
from dicompiler.plugin.registry import registry

SMALL = """<ir_version: 8, opset_import: ["": 17]>
g (float[1, 4, 8, 8] x) => (float[1, 6] y)
{
  c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], group = 2> (x, w, b)
  r = Relu (c)
  p = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (r)
  n = LRN <size = 5> (p)
  g = GlobalAveragePool (n)
  f = Flatten (g)
  y = Gemm (f, v)
}"""


def small() -> LayerGraph:
    return formed(SMALL, w=(8, 2, 3, 3), b=(8,), v=(8, 6))


def total(layers: LayerGraph) -> int:
    return sum(count_macs(layers, layer) for layer in layers.layers)


def test_vgg16_has_15_47_giga_macs() -> None:
    assert total(vgg16()) == 15_470_264_320


def test_alexnet_has_0_72_giga_macs_with_groups_and_1_14_without() -> None:
    assert total(alexnet()) == 724_406_816
    # Table I of the paper on CoopAI has 2.27 G operations: two for each of these 1.135 G multiply-adds.
    assert total(alexnet(groups=1)) == 1_135_256_096


def test_resnet50_has_4_09_giga_macs() -> None:
    assert total(formed(build("resnet50"))) == 4_089_184_256


def test_counts_each_kind_of_node() -> None:
    layers = small()
    conv, pool, lrn, glob, flatten, gemm = layers.layers
    assert count_macs(layers, conv) == 8 * 64 * 2 * 9
    # The second term counts the Relu that is fused into the layer.
    assert count_flops(layers, conv) == 2 * 8 * 64 * 2 * 9 + 8 * 64
    assert count_flops(layers, conv, elementwise=False) == 2 * 8 * 64 * 2 * 9
    assert (count_macs(layers, pool), count_flops(layers, pool)) == (0, 8 * 16 * 4)
    assert count_flops(layers, pool, pools=False) == 0
    assert count_flops(layers, lrn) == 8 * 16 * 5
    assert count_flops(layers, glob) == 8 * 16
    assert count_flops(layers, flatten) == 0
    assert (count_macs(layers, gemm), count_flops(layers, gemm)) == (48, 96)


def test_counts_transposed_convolution() -> None:
    layers = formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1, 3, 5, 5] x) => (float[1, 4, 11, 11] y)
        { y = ConvTranspose <kernel_shape = [3, 3], strides = [2, 2]> (x, w) }""",
        w=(3, 4, 3, 3),
    )
    assert total(layers) == 3 * 25 * 4 * 9


def test_counts_reduction_axis_of_matmul() -> None:
    layers = formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[2, 5, 7] x) => (float[2, 5, 3] y)
        { y = MatMul (x, w) }""",
        w=(7, 3),
    )
    assert total(layers) == 2 * 5 * 3 * 7


def test_layers_without_static_shape_count_zero() -> None:
    layers = formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[9] x) => (float[n, m] y)
        { i = NonZero (x)  c = Cast <to = 1> (i)  y = Transpose (c) }"""
    )
    assert total(layers) == 0
    assert sum(count_flops(layers, layer) for layer in layers.layers) == 0


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=5), st.sampled_from([1, 2, 3]))
def test_tiles_sum_to_whole(weights: list[float], axis: int) -> None:
    layers = stack((1, 6, 13, 13), [("conv", 24, 3, 1, 1, 1)])
    (layer,) = layers.layers
    whole = full_region(layers.tensors[layer.output].shape or ())
    regions = [
        with_interval(whole, axis, cut) for cut in split_proportionally(whole[axis][1], weights) if cut[0] < cut[1]
    ]
    assert sum(count_macs(layers, layer, region) for region in regions) == count_macs(layers, layer)


def test_partial_sums_cost_whole_plus_merging() -> None:
    layers = stack((1, 6, 13, 13), [("conv", 24, 3, 1, 1, 1)])
    (layer,) = layers.layers
    parts = [count_flops(layers, layer, None, (0, 2)), count_flops(layers, layer, None, (2, 6))]
    assert sum(parts) == count_flops(layers, layer)
    assert parts[0] * 2 == parts[1]
    assert count_flops(layers, layer, merge=2) == 24 * 13 * 13


def test_absorbed_nodes_belong_to_the_merger() -> None:
    layers = formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 8, 8] x) => (float[1, 8, 6, 6] y)
        { c = Conv <kernel_shape = [3, 3]> (x, w)  y = Relu (c) }""",
        w=(8, 4, 3, 3),
    )
    (layer,) = layers.layers
    size = 8 * 36
    assert count_flops(layers, layer, None, (0, 4)) == 2 * size * 36
    assert count_flops(layers, layer, merge=3) == 2 * size + size


def test_counts_whole_group_if_cut_through() -> None:
    layers = small()
    conv = layers.layers[0]
    shape = full_region(layers.tensors[conv.output].shape or ())
    assert count_macs(layers, conv, with_interval(shape, 1, (0, 1))) in (
        count_macs(layers, conv) // 2,
        count_macs(layers, conv) // 8,
    )


def test_time_is_operations_by_rate() -> None:
    layers = small()
    conv = layers.layers[0]
    fast, none = Device("a", "a", 2e9), Device("b", "b", 0.0)
    assert AnalyticModel().seconds(layers, conv, LayerShare(), fast) == pytest.approx(count_flops(layers, conv) / 2e9)
    assert (
        AnalyticModel(elementwise=False).seconds(layers, conv, LayerShare(), fast) == 2 * count_macs(layers, conv) / 2e9
    )
    assert AnalyticModel().seconds(layers, conv, LayerShare(), none) == math.inf


def test_time_is_at_least_reading_weights() -> None:
    layers = formed(
        """<ir_version: 8, opset_import: ["": 17]> g (int64[1, 2] ids) => (float[1, 2, 8] y)
        { e = Gather (table, ids)  y = MatMul (e, w) }""",
        table=(1000, 16),
        w=(16, 8),
    )
    embedding, product = layers.layers
    wide, narrow, unknown = (Device("a", "a", 1e9, memory_bandwidth=width) for width in (1e12, 1e6, 0.0))
    by_rate = 2 * count_macs(layers, product) / 1e9
    assert [AnalyticModel().seconds(layers, product, LayerShare(), one) for one in (wide, unknown)] == [by_rate] * 2
    assert AnalyticModel().seconds(layers, product, LayerShare(), narrow) == 4 * 16 * 8 / 1e6
    # For this matrix product, cutting columns halves the weights of a part, but cutting rows does not.
    half = LayerShare(((0, 1), (0, 2), (0, 4)))
    assert AnalyticModel().seconds(layers, product, half, narrow) == 4 * 16 * 4 / 1e6
    row = LayerShare(((0, 1), (0, 1), (0, 8)))
    assert AnalyticModel().seconds(layers, product, row, narrow) == 4 * 16 * 8 / 1e6
    assert AnalyticModel(weights=False).seconds(layers, product, LayerShare(), narrow) == by_rate
    assert count_operations(layers, embedding).weight_bytes == 4 * 2 * 16


def test_models_are_registered_by_hook() -> None:
    assert list(registry().cost_models) == ["analytic", "linear", "profile", "roofline"]
    assert registry().make("cost_models", 'roofline{bandwidth="4 GB/s"}') == RooflineModel(bandwidth="4 GB/s")


class TestCounting:
    def test_counts_bytes_of_inputs_weights_and_outputs(self) -> None:
        layers = network()
        counted = count_operations(layers, layers.layers[0])
        assert counted.moved_bytes == 4 * (4 * 16 * 16 + 8 * 4 * 9 + 8 * 16 * 16)
        assert counted.flops == count_flops(layers, layers.layers[0])

    def test_tile_reads_halo_and_all_weights(self) -> None:
        layers = network()
        region = with_interval(full_region((1, 8, 16, 16)), 2, (4, 8))
        assert count_operations(layers, layers.layers[0], region).moved_bytes == 4 * (
            4 * 6 * 16 + 8 * 4 * 9 + 8 * 4 * 16
        )

    def test_merger_reads_partial_sums_and_writes_sum(self) -> None:
        layers = network()
        counted = count_operations(layers, layers.layers[1], merge=3)
        assert counted.moved_bytes == 4 * 4 * 8 * 16 * 16
        assert counted.merge_flops == 2 * 8 * 16 * 16


@pytest.mark.parametrize(
    "model",
    [AnalyticModel(), AnalyticModel(pools=False), RooflineModel(), LinearModel(coefficients=("*:1e-9:0:1e-6",))],
)
def test_table_has_seconds_of_each_share_and_device(model: CostModel) -> None:
    layers = network()
    devices = [FAST, SLOW, NONE]
    for layer in layers.layers:
        shape = layers.tensors[layer.output].shape or ()
        half = with_interval(full_region(shape), 1, (0, max(1, shape[1] // 2)))
        shares = [LayerShare(), LayerShare(half)]
        if layer.name.startswith("conv"):
            shares += [LayerShare(None, (0, 2)), LayerShare(merge_count=2)]
        array = model.seconds_table(layers, layer, shares, devices)
        assert array.shape == (len(shares), 3)
        expected = [[model.seconds(layers, layer, share, device) for device in devices] for share in shares]
        assert np.array_equal(array, expected)
        assert np.all(np.isinf(array[:, 2]))
    assert model.seconds_table(layers, layers.layers[0], [], devices).shape == (0, 3)
