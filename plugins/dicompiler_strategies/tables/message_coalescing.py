"""What leaves together: keys and values, in one message for each receiver (`partition.segmentation`).

LayerGraph → the layers whose outputs leave with another one's.
"""

from __future__ import annotations

from dicompiler.plugin_api import Layer, LayerGraph
from dicompiler.plugin_api.costs import count_macs


def coalesced_layers(layers: LayerGraph) -> frozenset[int]:
    """The layers, by place, that are a product of a tensor of which another is, too, and whose output leaves with that
    one's: values with keys. Queries mostly stay where they are; where they leave, they go with keys, too."""
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
    """The products that come, in whatever shape, as what is multiplied by other tensors than weights: names."""
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
