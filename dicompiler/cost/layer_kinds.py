"""Kinds of layers, by which cost models and platforms group compute rates."""

from __future__ import annotations

from typing import Any

from dicompiler.base.memoize import memoized
from dicompiler.ir.layers import Layer, LayerGraph


def layer_kind(layer: Layer) -> str:
    """Return the anchor (main operator) of a layer, with the prefix "Group" if the operator has groups."""
    anchor = layer.nodes[layer.anchor]
    groups = anchor.attributes.get("group")
    return f"Group{anchor.op}" if isinstance(groups, int) and groups > 1 else anchor.op


@memoized
def rate_kinds(layers: LayerGraph, layer: Layer) -> tuple[str, ...]:
    """Return the kinds of a layer, the most specific kind first. A platform may state a compute rate for each kind.

    Pointwise convolutions are of kind Conv1x1. 3×3 convolutions without strides, dilations and groups are of kind
    Conv3x3, because engines can compute them with Winograd's fast algorithm. Both are also of kind Conv.
    """
    kind = layer_kind(layer)
    if kind != "Conv":
        return (kind,)
    anchor = layer.nodes[layer.anchor]
    weight = layers.tensors[anchor.inputs[1]].shape
    kernel = () if weight is None else tuple(weight[2:])
    if kernel == (1, 1):
        return "Conv1x1", kind
    is_dense = all(_are_ones(anchor.attributes.get(name)) for name in ("strides", "dilations"))
    return ("Conv3x3", kind) if kernel == (3, 3) and is_dense else (kind,)


def _are_ones(values: Any) -> bool:
    return values is None or set(values) == {1}
