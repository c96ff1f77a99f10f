"""What Stahl et al. (SAMOS 2019) print: the layers and rows of table 2, and the communication of given schemes.

Of table 2: "14.8 % reduction" there is LOP / FUSE − 1, and its optimum is not the optimum of its ILP: a layer in LIP
form that is not fused is better still.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dicompiler_strategies.papers.stahl import IlpLayer, PartitionScheme, scaled_cost


def chained(sizes: Sequence[int]) -> tuple[IlpLayer, ...]:
    """Fully connected layers in a row: (4, 8, 16) → two layers, 4 × 8 and 8 × 16. Eq. (2): Q = K · M."""
    return tuple(
        IlpLayer(f"{at + 1}", M, K, M * K, at - 1 if at else None)
        for at, (M, K) in enumerate(itertools.pairwise(sizes))
    )


# Table 2: darknet's number of each convolution of YOLOv2 at 608 × 608 that counts: C, O (out), side of the map, U.
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
    """The layers of the paper's table 2. Pools, routes and reorg are not counted; layer 16's input is held in shares;
    layer 26 reads layer 16. Eq. (5): Q = U · V · C · O."""
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
    """A row of table 2: LOP, FUSE4, FUSE3, FUSE2, FUSE1; layers that are not fused are in LOP form."""
    roles: dict[int, PartitionScheme] = {}
    for first, second in _PAIRS[name]:
        roles |= {first: "f", second: "s"}
    return tuple(roles.get(number, "o") for number in _YOLO)


def memory(layers: Sequence[IlpLayer], N: int) -> float:
    """F_n of eq. (7), in elements: the weights in equal shares, whatever the schemes."""
    return sum(layer.Q for layer in layers) / N


def communication(layers: Sequence[IlpLayer], schemes: Sequence[PartitionScheme], N: int, reuse: bool = False) -> float:
    """C of eq. (10) for given schemes, in elements."""
    total = 0
    for layer, scheme in zip(layers, schemes, strict=True):
        held = layer.is_held if layer.previous is None else schemes[layer.previous] == "o"
        total += scaled_cost(layer, scheme, held and (scheme == "o" or (reuse and scheme == "f")), N)
    return total / N
