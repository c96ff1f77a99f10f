"""The matrix of networks and kinds of splits on four devices.

Results are bit-equal in the exact check and within tolerance with real weights, and every transfer has the predicted
bytes. `benchmarks/matrix.py` runs the same with large networks.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
from support.budget import examples
from support.splits import ALL, FUSED, Case, branches, random_sets, splits

from dicompiler import networks
from dicompiler.ir.layers import LayerGraph
from dicompiler.partition.tiling import exit_layer

#: For each network: its options; how many random sets of layers `tests/run --all` fuses, for each kind of tiles; and
#: how many layers each kind of split in ALL cuts.
NETWORKS: dict[str, tuple[dict[str, Any], int, tuple[int, ...]]] = {
    "tiny": ({}, 10, (12, 9, 9, 12, 6, 2, 9, 9)),
    "quirks": ({}, 10, (15, 11, 11, 14, 2, 0, 11, 11)),
    "mobilenet_v2": ({"size": 64, "width": 0.1}, 3, (55, 52, 52, 55, 35, 28, 52, 52)),
    "resnet18": ({"size": 64, "width": 0.25}, 4, (24, 21, 21, 24, 20, 10, 21, 21)),
    "yolov2": ({"size": 64, "width": 0.1, "classes": 2}, 3, (30, 30, 30, 29, 21, 22, 30, 30)),
    "light/squeezenet": ({}, 3, (39, 37, 37, 38, 25, 3, 37, 37)),
    "light/shufflenet": ({}, 3, (108, 104, 104, 107, 1, 4, 104, 104)),
}


MIN_RANDOM_SPLITS = 3
#: Networks that are also tested without `tests/run --all`.
QUICK = ("tiny", "quirks")
MATRIX = [(name, kind, cut) for name, (_, _, counts) in NETWORKS.items() for kind, cut in zip(ALL, counts, strict=True)]


@cache
def case(name: str) -> Case:
    return Case.of(networks.build(name, 1, **NETWORKS[name][0]))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "dicompiler")  # Hide the warnings about parts that nothing reads.


@pytest.mark.parametrize(
    ("name", "kind", "cut"),
    [
        pytest.param(name, kind, cut, marks=() if name in QUICK else pytest.mark.slow)
        for name, kind, cut in MATRIX
        if cut
    ],
)
def test_split_computes_same_and_sends_predicted_bytes(name: str, kind: str, cut: int) -> None:
    random_splits = max(MIN_RANDOM_SPLITS, examples(NETWORKS[name][1]))
    tried = list(splits(case(name).layers, [kind], random_splits))
    assert len(tried[0].cut) == cut
    assert len(tried) > random_splits / 2 if kind in FUSED else len(tried) == 1
    for split in tried:
        for check in case(name).verify(split):
            assert check.passed, f"{split.kind} {split.number} of {split.cut}: {check.name}: {check.detail}"


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kind, cut in MATRIX if not cut])
def test_skips_kind_that_no_layer_allows(name: str, kind: str) -> None:
    assert not list(splits(case(name).layers, [kind]))


def ahead(layers: LayerGraph, names: set[str]) -> set[str]:
    """Return all layers that a path reaches from one of `names`."""
    reached: set[str] = set()
    for layer in layers.layers:
        if any((made := layers.producer.get(t)) and made.name in names | reached for t in layer.inputs):
            reached.add(layer.name)
    return reached


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("name", ["tiny", "light/squeezenet", "light/shufflenet"])
def test_random_sets_are_convex_with_one_exit_and_branches(name: str, kind: str) -> None:
    layers = case(name).layers
    sets = random_sets(layers, kind, 20, seed=3)
    assert len({tuple(layer.name for layer in chosen) for chosen in sets}) == len(sets) >= 9
    for chosen in sets:
        names = {layer.name for layer in chosen}
        outside = {layer.name for layer in layers.layers} - names
        assert not ahead(layers, ahead(layers, names) & outside) & names
        assert exit_layer(layers, chosen) is chosen[-1]
        assert branches(layers, chosen)
