"""The strategy `stahl`: every figure of the paper, and plans that verify for any network."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.layer_graphs import formed, stack, vgg16
from support.planning import FREE, make_cluster, verify
from support.stahl_paper import chained, communication, memory, table_2, variant

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.plan import Part
from dicompiler.networks import build
from dicompiler.search.problem import Problem
from dicompiler_strategies.papers.stahl import (
    IlpLayer,
    IlpSolution,
    PartitionScheme,
    Stahl,
    build_ilp_layers,
    solve_ilp,
)

EXAMPLE = chained((4, 8, 16, 4, 4))
N = 6
MB = 1e6 / 4  # Number of 32-bit elements in a megabyte.


def schemes(text: str) -> tuple[PartitionScheme, ...]:
    """Map letters to partition schemes: "ofso" → ("o", "f", "s", "o")."""
    return tuple(scheme for letter in text for scheme in ("o", "i", "f", "s") if scheme == letter)


def test_example_of_four_layers_is_as_printed() -> None:
    assert (memory(EXAMPLE, 1), memory(EXAMPLE, 2)) == (240, 120)
    assert communication(EXAMPLE, schemes("oooo"), 2) == 34
    assert communication(EXAMPLE, schemes("iiii"), 2) == 48
    assert communication(EXAMPLE, schemes("fsfs"), 2) == 40


def test_published_optimum_needs_reuse_in_fused_pairs() -> None:
    published = schemes("ofso")
    assert communication(EXAMPLE, published, 2) == 26
    assert communication(EXAMPLE, published, 2, reuse=True) == 22
    for reuse, optimum in ((False, 26), (True, 22)):
        found = solve_ilp(EXAMPLE, 2, reuse=reuse)
        assert found.is_proven
        assert found.communication == communication(EXAMPLE, found.schemes, 2, reuse) == optimum


def test_ilp_equals_exhaustive_search() -> None:
    for sizes, count, reuse in itertools.product(((3, 9, 2, 7, 5), (8, 3, 3, 8, 1, 6)), (2, 3, 5), (False, True)):
        layers = chained(sizes)
        tried = itertools.product(("o", "i", "f", "s"), repeat=len(layers))
        legal = [
            row
            for row in tried
            if row[-1] != "f" and row[0] != "s" and all((a == "f") == (b == "s") for a, b in itertools.pairwise(row))
        ]
        least = min(communication(layers, row, count, reuse) for row in legal)  # type: ignore[arg-type]
        assert solve_ilp(layers, count, reuse).communication == pytest.approx(least)


def test_reproduces_table_2() -> None:
    found = {name: round(communication(table_2(), variant(name), N) / MB, 3) for name in ("LOP", "FUSE4", "FUSE3")}
    assert found == {"LOP": 78.141, "FUSE4": 82.238, "FUSE3": 75.461}
    for name in ("FUSE1", "FUSE2"):
        assert round(communication(table_2(), variant(name), N) / MB, 3) == 68.068
    lop, best = (communication(table_2(), variant(name), N) for name in ("LOP", "FUSE1"))
    assert lop / best - 1 == pytest.approx(0.148, abs=5e-4)
    assert 1 - best / lop == pytest.approx(0.129, abs=5e-4)


def test_published_optimum_of_table_2_is_not_optimal() -> None:
    without = solve_ilp(table_2(), N, lip=False)
    assert without.is_proven and round(without.communication / MB, 3) == 68.068
    found = solve_ilp(table_2(), N)
    assert found.is_proven and round(found.communication / MB, 3) == 59.750
    assert [size.name for size, scheme in zip(table_2(), found.schemes, strict=True) if scheme == "i"] == ["26"]
    assert solve_ilp(table_2(), N, lip=False, fuse=False).communication / MB == pytest.approx(78.141, abs=5e-4)


def darknet() -> list[IlpLayer]:
    """All convolutions of YOLOv2: (in, out, kernel), weights only."""
    rows = [(3, 32, 3), (32, 64, 3), (64, 128, 3), (128, 64, 1), (64, 128, 3), (128, 256, 3), (256, 128, 1)]
    rows += [(128, 256, 3), (256, 512, 3), (512, 256, 1), (256, 512, 3), (512, 256, 1), (256, 512, 3), (512, 1024, 3)]
    rows += [(1024, 512, 1), (512, 1024, 3), (1024, 512, 1), (512, 1024, 3), (1024, 1024, 3), (1024, 1024, 3)]
    rows += [(512, 64, 1), (1280, 1024, 3), (1024, 425, 1)]
    return [IlpLayer("", 0, 0, a * b * kernel * kernel) for a, b, kernel in rows]


def test_reproduces_memory_row_of_table_1() -> None:
    found = [round(memory(darknet(), count) / MB, 1) for count in (1, 3, 5, 6, 7)]
    assert found == [203.8, 67.9, 40.8, 34.0, 29.1]


def test_reads_networks_as_the_paper_does() -> None:
    graph = stack(
        (1, 4, 8, 8),
        [
            *(("conv", 8, 3, 1, 1, 1), ("pool", 2, 2, 0), ("conv", 6, 1, 1, 0, 1), ("conv", 6, 3, 1, 1, 6)),
            *(("flatten",), ("fc", 20), ("fc", 5)),
        ],
    )
    assert build_ilp_layers(graph) == (
        IlpLayer("conv1", 256, 512, 288, None, False),
        IlpLayer("conv3", 128, 96, 48, 0, True),
        # fc6 reads conv3 through a grouped convolution and a Flatten, which the integer linear program leaves out.
        IlpLayer("fc6", 96, 20, 1920, 1, True),
        IlpLayer("fc7", 20, 5, 100, 2, True),
    )


def test_outputs_read_twice_are_not_fused() -> None:
    sizes = {size.name: size for size in build_ilp_layers(formed(build("tiny")))}
    assert any(not size.can_fuse and size.previous is not None for size in sizes.values())


def test_fused_pair_needs_no_exchange() -> None:
    problem = Problem(vgg16(), make_cluster("shared", 1, 1, 1), FREE)
    plan = Stahl().plan(problem)
    sizes = build_ilp_layers(problem.layers)
    found = dict(zip((size.name for size in sizes), solve_ilp(sizes, 3).schemes, strict=True))
    pairs = [name for name, scheme in found.items() if scheme == "s"]
    assert pairs and "f" in found.values()
    for name in pairs:
        *partial, merger = plan.layers[name]
        assert merger == Part("d0")
        assert [part.device for part in partial] == ["d0", "d1", "d2"]
    assert sum(part.reduce[1] - part.reduce[0] for part in plan.layers["fc20"] if part.reduce) in (0, 25088)
    weights = [device.weights for device in problem.estimate(plan).devices]
    assert max(weights) < 1.01 * min(weights)  # The weights are divided into equal shares.


def test_uses_the_requested_number_of_devices() -> None:
    problem = Problem(vgg16(), make_cluster("shared", 1, 3, 2), FREE)
    plan = Stahl(devices=2).plan(problem)
    assert {part.device for parts in plan.layers.values() for part in parts} == {"d1", "d2"}
    alone = Stahl(devices=1).plan(problem)
    assert {part.device for parts in alone.layers.values() for part in parts} == {"d1"}


@pytest.mark.parametrize(
    ("name", "options", "strategy", "count"),
    [
        ("lenet", {}, Stahl(), 2),
        ("lenet", {}, Stahl(fuse=False), 3),
        ("lenet", {}, Stahl(fuse=False, lip=False), 4),
        ("vgg16", {"size": 32, "width": 0.05, "classes": 10}, Stahl(reuse=True), 3),
        ("tiny", {}, Stahl(), 3),
        ("quirks", {}, Stahl(), 2),
        ("squeezenet", {"size": 64, "width": 0.1, "classes": 10}, Stahl(), 2),
    ],
)
def test_plans_verify_exactly_and_send_the_predicted_bytes(
    name: str, options: dict[str, Any], strategy: Stahl, count: int
) -> None:
    plan = verify(build(name, **options), make_cluster("switch", *range(1, count + 1)), strategy)
    assert len(plan.devices) == count


def test_network_without_such_layers_stays_whole() -> None:
    graph = formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y)
        { r = Relu (x)  y = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (r) }"""
    )
    problem = Problem(graph, make_cluster("switch", 1, 2))
    assert set(Stahl().plan(problem).layers.values()) == {(Part("d1"),)}


def test_rejects_invalid_options() -> None:
    problem = Problem(vgg16(), make_cluster("switch", 1, 1))
    with pytest.raises(DicompilerError, match=r"stahl: devices=3, but only 2 devices of platform 'switch2' compute"):
        Stahl(devices=3).plan(problem)
    with pytest.raises(ValueError, match="devices must be positive, or 0"):
        Stahl(devices=-1)


def test_solution_is_reproducible() -> None:
    first, second = (solve_ilp(table_2(), N) for _ in range(2))
    assert isinstance(first, IlpSolution) and first == second
