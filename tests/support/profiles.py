"""A network, devices, and profiles (measured layer times), for tests of cost models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.layer_graphs import stack

from dicompiler.cost.layer_kinds import layer_kind
from dicompiler.cost.op_counts import count_operations
from dicompiler.cost.profile import layer_signature, network_digest
from dicompiler.ir.cluster import Device
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.regions import full_region, with_interval

FAST = Device("fast", "fast", 4e9, memory_bandwidth=8e9)
SLOW = Device("slow", "slow", 1e9, memory_bandwidth=1e9)
NONE = Device("none", "none", 0.0)


def network() -> LayerGraph:
    """Return three convolutions, a pool and a fully connected layer."""
    return stack((1, 4, 16, 16), [("conv", 8, 3, 1, 1, 1), ("conv", 8, 3, 1, 1, 1), ("conv", 8, 3, 1, 1, 1),
                                  ("pool", 2, 2, 0), ("flatten",), ("fc", 10)])  # fmt: skip


def entry(cut: str, size: int, seconds: float, work: tuple[int, int] = (1000, 1000)) -> dict[str, Any]:
    """Return one measurement of a profile; `work` has its FLOPs and moved bytes."""
    return {
        "cut": cut,
        "size": size,
        "flops": work[0],
        "moved_bytes": work[1],
        "median_s": seconds,
        "min_s": seconds,
        "max_s": 1.0,
    }


def document(graph: LayerGraph, device: str = "*", **changes: Any) -> dict[str, Any]:
    """Return a profile of a graph's layers in which each part takes 1 ms plus 1 µs per FLOP.

    Layers of rank 4 are measured whole, and at halves and quarters of axis 2 if it has at least four rows. `changes`
    replace keys of the profile.
    """
    found: dict[str, Any] = {}
    for layer in graph.layers:
        own = found.setdefault(
            layer_signature(graph, layer),
            {
                "signature": layer_signature(graph, layer),
                "kind": layer_kind(layer),
                "names": [],
                "measurements": [],
            },
        )
        own["names"].append(layer.name)
        shape = graph.tensors[layer.output].shape or ()
        if not own["measurements"]:
            counted = count_operations(graph, layer)
            own["measurements"] = [entry("whole", 1, 1e-3 + 1e-6 * counted.flops, (counted.flops, counted.moved_bytes))]
            for part in (2, 4) if len(shape) == 4 and shape[2] >= 4 else ():
                rows = shape[2] // part
                less = count_operations(graph, layer, with_interval(full_region(shape), 2, (0, rows)))
                own["measurements"].append(
                    entry("axis 2", rows, 1e-3 + 1e-6 * less.flops, (less.flops, less.moved_bytes))
                )
    return {
        "format": "dicompiler.profile/2", "model_digest": network_digest(graph), "device": device, "environment": {},
        "threads": 1,
        "repeat": 3, "optimization": "extended", "call_s": 0.0, "layers": list(found.values()), "unmeasured": [],
        "links": [{"hosts": ["a", "b"], "bandwidth": 1e9, "latency": 1e-4}],
    } | changes  # fmt: skip


def written(directory: Path, profile: dict[str, Any], name: str = "p.json") -> str:
    """Write a profile to a file and return the file's path."""
    (directory / name).write_text(json.dumps(profile))
    return str(directory / name)
