"""Printed figures of Stahl et al. (SAMOS 2019): the layers and rows of table 2, and the cost of given schemes.

"14.8 % reduction" in table 2 is LOP / FUSE − 1. Its optimum is not the optimum of the ILP: a layer in LIP that is not
fused is better.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dicompiler_strategies.papers.stahl import IlpLayer, PartitionScheme, scaled_cost


def chained(sizes: Sequence[int]) -> tuple[IlpLayer, ...]:
    """Return fully connected layers in a chain: (4, 8, 16) → two layers, 4 × 8 and 8 × 16.

    By eq. (2) of the paper, a layer has Q = K · M weights.
    """
    return tuple(
        IlpLayer(f"{at + 1}", M, K, M * K, at - 1 if at else None)
        for at, (M, K) in enumerate(itertools.pairwise(sizes))
    )


# Convolutions of YOLOv2 at 608 × 608 pixels, from table 2 of the paper, by darknet's number. The values are input
# channels (C), output channels (O), height and width of the output, and kernel size (U).
_YOLO = {
    **{16: (256, 512, 38, 3), 18: (512, 1024, 19, 3), 19: (1024, 512, 19, 1), 20: (512, 1024, 19, 3)},
    **{21: (1024, 512, 19, 1), 22: (512, 1024, 19, 3), 23: (1024, 1024, 19, 3), 24: (1024, 1024, 19, 3)},
    **{26: (512, 64, 38, 1), 29: (1280, 1024, 19, 3), 30: (1024, 425, 19, 1)},
}
_PAIRS = {
    "LOP": (),
    "FUSE4": ((19, 20), (21, 22), (23, 24), (29, 30)),
    "FUSE3": ((18, 19), (21, 22), (23, 24), (29, 30)),
    "FUSE2": ((18, 19), (20, 21), (23, 24), (29, 30)),
    "FUSE1": ((18, 19), (20, 21), (22, 23), (29, 30)),
}


def table_2() -> tuple[IlpLayer, ...]:
    """Return the layers of the paper's table 2; by its eq. (5), a layer has Q = U · V · C · O weights.

    Pools, routes and reorg are not counted. The input of layer 16 is stored in shares, and layer 26 reads layer 16.
    """
    numbers = list(_YOLO)
    return tuple(
        IlpLayer(
            f"{number}",
            C * side * side,
            out * side * side,
            U * U * C * out,
            None if number == 16 else 0 if number == 26 else at - 1,
            number not in (18, 26, 29),
            number == 16,
        )
        for at, (number, (C, out, side, U)) in enumerate(zip(numbers, _YOLO.values(), strict=True))
    )


def variant(name: str) -> tuple[PartitionScheme, ...]:
    """Return a row of table 2: LOP, FUSE4, FUSE3, FUSE2, FUSE1; layers that are not fused are in LOP."""
    roles: dict[int, PartitionScheme] = {}
    for first, second in _PAIRS[name]:
        roles |= {first: "f", second: "s"}
    return tuple(roles.get(number, "o") for number in _YOLO)


def memory(layers: Sequence[IlpLayer], N: int) -> float:
    """Return F_n of the paper's eq. (7) in elements: the weights in equal shares, for any schemes."""
    return sum(layer.Q for layer in layers) / N


def communication(layers: Sequence[IlpLayer], schemes: Sequence[PartitionScheme], N: int, reuse: bool = False) -> float:
    """Return the communication C of the paper's eq. (10) in elements, for given schemes."""
    total = 0
    for layer, scheme in zip(layers, schemes, strict=True):
        held = layer.has_split_inputs if layer.previous is None else schemes[layer.previous] == "o"
        total += scaled_cost(layer, scheme, held and (scheme == "o" or (reuse and scheme == "f")), N)
    return total / N
