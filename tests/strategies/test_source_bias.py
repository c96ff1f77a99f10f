"""Source bias: the device with the network's input computes more rows, and all finish together."""

from __future__ import annotations

import pytest
from support.layer_graphs import formed, stack

from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.platform import Platform
from dicompiler.search.problem import Problem
from dicompiler.testing import make_cluster
from dicompiler_strategies.tables.choices import (
    SOURCE_SHARE,
    ChoiceSet,
    find_first_layers,
    list_choices,
    rows_for_source,
)

ROWS = 60


def network() -> LayerGraph:
    return stack((1, 3, ROWS, 40), [("conv", 8, 3, 1, 1, 1), ("pool", 2, 2, 0), ("conv", 8, 3, 1, 1, 1)])


def rows(platform: Platform, place: int = 0, source: tuple[str, ...] = ()) -> list[float] | None:
    """Return the rows of the layer at this position on all devices that compute."""
    problem = Problem(network(), platform, source=source)
    return rows_for_source(problem, problem.layers.layers[place], platform.computing_devices)


@pytest.mark.parametrize("rates", [(1, 1), (1, 1, 1), (2, 1, 1, 1), (1, 1, 3), (1, 4, 1, 2)])
@pytest.mark.parametrize("bandwidth", [3e7, 1e8, 1e9])
def test_all_devices_finish_within_a_row(rates: tuple[float, ...], bandwidth: float) -> None:
    platform = make_cluster("switch", *rates, bandwidth=bandwidth)
    found = rows(platform)
    assert found is not None and sum(found) == ROWS and all(count == int(count) for count in found)
    row = 2 * 8 * 40 * 3 * 9 / 1e9  # Seconds that a device with 1 GFLOP/s needs for one row of the output.
    sent = (ROWS - found[0]) * 3 * 40 * 4 * 8 / bandwidth
    ends = [sent * (i > 0) + count * row / rate for i, (count, rate) in enumerate(zip(found, rates, strict=True))]
    slowest = row / min(rates) + 3 * 40 * 4 * 8 / bandwidth
    assert max(ends) - min(ends) <= slowest


def test_source_gets_more_rows_on_slower_links() -> None:
    found = [rows(make_cluster("switch", 1, 1, 1, bandwidth=bandwidth)) for bandwidth in (1e9, 1e8, 1e3)]
    kept = [one[0] for one in found if one is not None]
    assert ROWS / 3 < kept[0] < kept[1] < kept[2] == ROWS
    named = rows(make_cluster("switch", 1, 1, 1), source=("d1",))
    assert named is not None and named[1] == kept[1] and named[0] == named[2]


def test_no_bias_for_other_layers_or_sources() -> None:
    pair = make_cluster("switch", 1, 1)
    assert rows(pair) is not None
    # Layer 1 is a pool with too few elements, and layer 2 does not read the network's input, so neither has a bias.
    assert rows(pair, 1) is None and rows(pair, 2) is None
    assert rows(make_cluster("switch", 1)) is None  # There is no other device to send rows to.
    assert rows(make_cluster("gateway", 0, 1, 1)) is None  # The source cannot compute.
    assert rows(pair, source=("d0", "d1")) is None  # With two sources, each device already has the whole input.


def test_reshaped_layers_follow_the_first_layer() -> None:
    """An example are the patches of a ViT, which become a sequence."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1, 3, 16, 4] x) => (float[1, 64, 4] y)
    <int64[3] to = {1, 4, 64}> {
        a = Conv <kernel_shape = [1, 1]> (x, w)
        b = Reshape (a, to)
        c = Transpose <perm = [0, 2, 1]> (b)
        y = Softmax (c)
    }"""
    layers = formed(text, w=(4, 3, 1, 1))
    first = layers.layers[0]
    assert first.nodes[first.anchor].op == "Conv"
    found = find_first_layers(layers)
    assert {found[layer.name].name for layer in layers.layers[:3]} == {first.name}


def test_only_the_first_layer_has_the_choice() -> None:
    problem = Problem(network(), make_cluster("switch", 1, 1, 1))
    first, *others = problem.layers.layers
    options = ChoiceSet(("whole", "height"), (3,), 0, ("equal", SOURCE_SHARE), ("balanced",))
    (near,) = [one for one in list_choices(problem, first, options) if SOURCE_SHARE in one.label]
    assert not any(SOURCE_SHARE in one.label for layer in others for one in list_choices(problem, layer, options))
    assert [part.device for part in near.parts] == ["d0", "d1", "d2"]
    regions = [part.region for part in near.parts]
    assert [region[2][1] - region[2][0] for region in regions if region] == rows_for_source(
        problem, first, problem.platform.computing_devices
    )
