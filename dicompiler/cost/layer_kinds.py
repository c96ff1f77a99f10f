"""Kinds of layers, by which cost models and platforms group compute rates."""

from __future__ import annotations

from typing import Any

from dicompiler.base.memoize import memoized
from dicompiler.ir.layers import Layer, LayerGraph


def layer_kind(layer: Layer) -> str:
    """Return the type of a layer's main operator (anchor), with the prefix "Group" if it has channel groups."""
    anchor = layer.nodes[layer.anchor]
    groups = anchor.attributes.get("group")
    return f"Group{anchor.op}" if isinstance(groups, int) and groups > 1 else anchor.op


@memoized
def rate_kinds(layers: LayerGraph, layer: Layer) -> tuple[str, ...]:
    """Return the kinds of a layer, for which a platform may state compute rates; the most specific kind is first.

    Kind Conv3x3 is for convolutions without strides, dilations and groups, which engines can compute with Winograd's
    algorithm.
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
