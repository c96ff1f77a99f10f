"""CoopAI: the published tables are reproduced with the paper's networks and figures."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from support.layer_graphs import alexnet, stack, vgg16

from dicompiler.base.errors import UsageError
from dicompiler.ir.layers import LayerGraph
from dicompiler.networks import count_parameters
from dicompiler_strategies.papers.coopai import CoopaiResult, best_k, build_chain, minimise_latency

F, G = 13.6e9, 100e6  # F: FLOP/s of a Raspberry Pi 4; G: bit/s of the gateway.


COUNTS = range(1, 11)


def vgg19() -> LayerGraph:
    """VGG19 without activations."""
    rows: list[tuple[object, ...]] = []
    for channels, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        rows += [("conv", channels, 3, 1, 1, 1)] * count + [("pool", 2, 2, 0)]
    return stack((1, 3, 224, 224), [*rows, ("flatten",), ("fc", 4096), ("fc", 4096), ("fc", 1000)])


GRAPHS: dict[str, Callable[[], LayerGraph]] = {"alexnet": lambda: alexnet(1), "vgg16": vgg16, "vgg19": vgg19}


@cache
def results(name: str) -> tuple[list[CoopaiResult], list[CoopaiResult]]:
    """Return the results of CoopAI's methods (MLS, SLS) for 1 to 10 devices."""
    layers = build_chain(GRAPHS[name]())
    return [minimise_latency(layers, F, G, k) for k in COUNTS], [
        minimise_latency(layers, F, G, k, single=True) for k in COUNTS
    ]


@pytest.mark.parametrize(
    ("name", "blocks", "best", "against_sls", "against_one"),
    [
        ("alexnet", [1, 5, 4, 4, 4, 4, 4, 4, 4, 4], (2, 2), 4.91, 18.43),
        ("vgg16", [1, 8, 7, 6, 5, 4, 4, 4, 4, 4], (7, 3), 31.49, 60.46),
        ("vgg19", [1, 11, 9, 8, 5, 4, 5, 5, 4, 4], (7, 3), 28.53, 58.94),
    ],
)
def test_reproduces_published_tables(
    name: str, blocks: list[int], best: tuple[int, int], against_sls: float, against_one: float
) -> None:
    many, single = results(name)
    assert [len(result.blocks) for result in many] == blocks
    assert (best_k(many).k, best_k(single).k) == best
    saved = 100 * (1 - best_k(many).seconds / best_k(single).seconds)
    assert saved == pytest.approx(against_sls, abs=1.7 if name == "alexnet" else 0.7)
    assert 100 * (1 - best_k(many).seconds / many[0].seconds) == pytest.approx(against_one, abs=0.7)


def test_reproduces_times_of_vgg16() -> None:
    many, single = results("vgg16")
    assert [round(many[k - 1].seconds, 4) for k in (1, 2, 4, 7)] == [2.3235, 1.3117, 1.0567, 0.9113]
    assert all(a.seconds <= b.seconds for a, b in zip(many, single, strict=True))
    assert [block.mode for block in many[6].blocks] == ["grids", "grids", "grids+data", "hybrid"]
    assert {block.mode for block in single[6].blocks} == {"grids", "model"}


def test_builds_the_alexnet_of_the_paper() -> None:
    # Table I of the paper states 62 million.
    assert count_parameters("alexnet", columns="two-column", size=227) == 62_378_344
    with pytest.raises(UsageError, match="alexnet: columns must be one of one-column, two-column, not 'two'"):
        count_parameters("alexnet", columns="two")
