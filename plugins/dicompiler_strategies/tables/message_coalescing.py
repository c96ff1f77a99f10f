"""Layers whose outputs leave a device in one message with another layer's: values with keys of an attention."""

from __future__ import annotations

from dicompiler.plugin_api import Layer, LayerGraph
from dicompiler.plugin_api.costs import count_macs


def coalesced_layers(layers: LayerGraph) -> frozenset[int]:
    """Return the positions of layers whose outputs are sent in one message with another layer's output.

    These are matrix products that read the same tensor as another product. The first product of a tensor pays for the
    message, the others join it. Queries usually stay on their device; if they are sent, they join the keys as well.
    """
    products: dict[str, list[int]] = {}
    for i, layer in enumerate(layers.layers):
        node = layer.nodes[layer.anchor]
        if not layer.whole_reason and node.op in ("MatMul", "Gemm"):
            products.setdefault(node.inputs[0], []).append(i)
    asking = _find_queries(layers)
    found = set[int]()
    for places in products.values():
        found.update(sorted(places, key=lambda i: (layers.layers[i].name in asking, i))[1:])
    return frozenset(found)


def _find_queries(layers: LayerGraph) -> set[str]:
    """Return the names of the products whose output is, possibly reshaped, the first operand of a product of two tensors."""
    found, seen = set[str](), set[str]()
    waiting = [layer.nodes[layer.anchor].inputs[0] for layer in layers.layers if _multiplies_two_tensors(layers, layer)]
    while waiting:
        tensor = waiting.pop()
        layer = layers.producer.get(tensor)
        if layer is None or tensor in seen:
            continue
        seen.add(tensor)
        if count_macs(layers, layer):
            found.add(layer.name)
        else:
            waiting.extend(layer.inputs)
    return found


def _multiplies_two_tensors(layers: LayerGraph, layer: Layer) -> bool:
    inputs = layer.nodes[layer.anchor].inputs
    tensors = sum(bool(name) and not layers.tensors[name].is_constant for name in inputs)
    return tensors > 1 and not layer.whole_reason and bool(count_macs(layers, layer))
