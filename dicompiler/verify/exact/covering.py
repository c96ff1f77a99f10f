"""Coverage: how much of a network's weights is read by the check models of several seeds.

In: check models of one network. Out: how many taps and input channels of its layers some filter reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dicompiler.ir.onnx.model import Model
from dicompiler.verify.exact.facts import gather
from dicompiler.verify.exact.patterns import extent, unified
from dicompiler.verify.exact.values import weight_index


@dataclass(frozen=True)
class Coverage:
    """Over all weighted layers: taps of the kernels, and input channels (of each group), that some filter reads."""

    taps_read: int
    taps: int
    channels_read: int
    channels: int

    def __str__(self) -> str:
        return f"{self.taps_read} of {self.taps} taps and {self.channels_read} of {self.channels} input channels read"


def seeds_needed(model: Model) -> int:
    """So many check models of consecutive seeds read every tap and every input channel of every layer of `model`."""
    known = gather(model)
    needed = 1
    for node in known.nodes:
        index = weight_index(known, node)
        if index is not None:
            needed = max(needed, extent(node, index, known.constants[node.input[index]][1]).seeds)
    return needed


def coverage(models: Iterable[Model]) -> Coverage:
    """What the check models of several seeds read together. They are taken one at a time: a generator saves memory."""
    taps: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]] = {}
    channels = dict(taps)
    for model in models:
        known = gather(model)
        for node in known.nodes:
            index = weight_index(known, node)
            if index is None:
                continue
            read = unified(node, index, model.array(node.input[index])) != 0
            of_taps, of_channels = read.any((0, 1, 2)), read.any((1, 3))
            taps[node.name] = taps.get(node.name, False) | of_taps
            channels[node.name] = channels.get(node.name, False) | of_channels
    return Coverage(
        sum(int(mask.sum()) for mask in taps.values()),
        sum(mask.size for mask in taps.values()),
        sum(int(mask.sum()) for mask in channels.values()),
        sum(mask.size for mask in channels.values()),
    )
