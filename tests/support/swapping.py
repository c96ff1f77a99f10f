"""Artifacts that can replace each other in a session, and checks of the outputs of a stream with swaps.

The artifact `times 3` computes y = 3 s, with the sum s of each 3×3 window of x. Frame n has n in all elements, so an
output shows the number of its frame and the artifact that computed it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from support.onnx_models import parsed

import dicompiler

SIZE = 12


def times(factor: int, size: int = SIZE) -> onnx.ModelProto:
    """Return the model of the artifact `times factor`, for images of `size` × `size`."""
    text = f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[1, 2, {size}, {size}] x) => (float[1, 2, {size}, {size}] y)
        {{ a = Conv <pads = [1, 1, 1, 1], group = 2> (x, ones)  y = Conv (a, factor) }}"""
    scale = np.array([[factor, 0], [0, factor]], np.float32).reshape(2, 2, 1, 1)
    return parsed(text, ones=np.ones((2, 1, 3, 3), np.float32), factor=scale)


def compile_times(
    factor: int, directory: Path, platform: Any = "rpi4x4", strategy: str = "modnn", **options: Any
) -> Path:
    """Compile the artifact `times factor` into a directory and return it."""
    dicompiler.compile(times(factor), platform, strategy, output=directory, **options)
    return directory


def frame(number: int) -> dict[str, Any]:
    return {"x": np.full((1, 2, SIZE, SIZE), number, np.float32)}


def frames(count: int | None = None) -> Iterator[dict[str, Any]]:
    return (frame(number) for number in (range(1, count + 1) if count else itertools.count(1)))


def factor_of(outputs: Mapping[str, Any], number: int) -> int:
    """Return the factor of the artifact that computed the outputs of frame `number`; all elements must be its."""
    factor = int(outputs["y"][0, 0, 5, 5]) // (9 * number)
    windows = np.full((SIZE, SIZE), 9, np.float32)
    windows[0] = windows[-1] = windows[:, 0] = windows[:, -1] = 6
    windows[:: SIZE - 1, :: SIZE - 1] = 4
    assert np.array_equal(outputs["y"], np.broadcast_to(windows * number * factor, (1, 2, SIZE, SIZE)))
    return factor


def artifact_changes(outputs: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Check that outputs are those of frames 1, 2, …, and return where artifacts change, as (frame index, factor)."""
    factors: Sequence[int] = [factor_of(found, number) for number, found in enumerate(outputs, 1)]
    return [(i, factor) for i, factor in enumerate(factors) if i == 0 or factors[i - 1] != factor]
