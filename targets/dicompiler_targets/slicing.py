"""What a Slice takes, as a region of its input.

In: a node, the shape of what it reads, constants by name. Out: a region, or None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from numpy.typing import NDArray

from dicompiler.plugin_api import Region, Shape
from dicompiler.plugin_api.regions import full_region, is_empty, with_interval


def find_slice_region(node: onnx.NodeProto, shape: Shape, constants: Mapping[str, NDArray[Any]]) -> Region | None:
    """The region that a Slice takes of a tensor of that shape; None where it has steps, is computed, or holds
    nothing."""
    keys = ("starts", "ends", "axes", "steps")
    given: dict[str, list[int]] = {a.name: list(a.ints) for a in node.attribute}
    for key, name in zip(keys, node.input[1:], strict=False):
        if name and name not in constants:
            return None
        if name:
            given[key] = [int(n) for n in constants[name].reshape(-1)]
    if any(step != 1 for step in given.get("steps", [])):
        return None
    region = full_region(shape)
    along = given.get("axes") or range(len(given["starts"]))
    for axis, start, end in zip(along, given["starts"], given["ends"], strict=True):
        begin, stop, _ = slice(start, end).indices(shape[axis])
        region = with_interval(region, axis % len(shape), (begin, stop))
    return None if is_empty(region) else region
