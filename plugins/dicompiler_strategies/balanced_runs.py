"""Division of the layers into consecutive runs, one for each device, with balanced computing times.

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
    """Return the index of each layer's device, if device d computes layers ends[d - 1] to ends[d] - 1.

    index_devices((2, 2, 3)) → [0, 0, 2]: device 1 has no layer.
    """
    return [d for d, (start, end) in enumerate(zip((0, *ends), ends, strict=False)) for _ in range(start, end)]


def balance_runs(costs: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Return, for each device, the position after its last layer, such that the slowest device takes the least time.

    `costs[d][l]` are the seconds of layer l on device d. A device may get no layer.
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
    """Return the best position j to end the earlier devices' layers, if the next device computes layers j to i - 1.

    Args:
        best: For each position j, the seconds of the slowest earlier device for the layers before j.
        total: For each position j, the seconds of the next device for all layers before j.
        i: Position after the next device's last layer.
    """
    j = bisect_left(range(i), True, key=lambda j: best[j] >= total[i] - total[j])
    return min((k for k in (j - 1, j) if k >= 0), key=lambda k: max(best[k], total[i] - total[k]))
