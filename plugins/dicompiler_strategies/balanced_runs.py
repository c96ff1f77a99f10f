"""Distribution of consecutive layers over devices in a fixed order, such that computing times are balanced.

The times of messages are ignored.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from dicompiler.plugin_api import Device, LayerShare, Problem


def whole_layer_seconds(problem: Problem, device: Device) -> list[float]:
    """Return the seconds that a device needs for each layer as a whole, in layer order."""
    return [problem.cost_model.seconds(problem.layers, layer, LayerShare(), device) for layer in problem.layers.layers]


def index_devices(ends: Sequence[int]) -> list[int]:
    """Return the index of the device of each layer, given the position after the last layer of each device (`ends`).

    Device d has the layers ends[d - 1] to ends[d] - 1, and device 0 begins at layer 0.

    index_devices((2, 2, 3)) → [0, 0, 2]: device 1 has no layer.
    """
    return [d for d, (start, end) in enumerate(zip((0, *ends), ends, strict=False)) for _ in range(start, end)]


def balance_runs(costs: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Return, for each device, the position after its last layer, such that the slowest device takes the least time.

    costs[d][l] are the seconds of layer l on device d. A device may get no layer.

    A dynamic program computes best[d][i]: the time of the slowest device, if the first d devices compute the first i
    layers in the best way. It is the minimum over j of max(best[d-1][j], seconds of layers j to i - 1 on the d-th
    device). The first term grows with j, and the second one falls, so that bisection finds the minimum.
    """
    count = len(costs[0])
    best = [0.0] + [math.inf] * count
    choices: list[list[int]] = []
    for row in costs:
        total = (0.0, *accumulate(row))
        cuts = [_best_cut(best, total, i) for i in range(count + 1)]
        best = [max(best[cut], total[i] - total[cut]) for i, cut in enumerate(cuts)]
        choices.append(cuts)
    ends = [count]
    for cuts in reversed(choices[1:]):
        ends.append(cuts[ends[-1]])
    return tuple(reversed(ends))


def _best_cut(best: Sequence[float], total: Sequence[float], i: int) -> int:
    """Return the position j at which the layers before position i are best divided between devices.

    `best[j]` is the time of the earlier devices for the layers before j, and total[i] - total[j] is the time of the
    next device for layers j to i - 1. The result is the first j with the least maximum of the two times. It is the
    first j with best[j] ≥ total[i] - total[j], or the position just before.
    """
    j = bisect_left(range(i), True, key=lambda j: best[j] >= total[i] - total[j])
    return min((k for k in (j - 1, j) if k >= 0), key=lambda k: max(best[k], total[i] - total[k]))
