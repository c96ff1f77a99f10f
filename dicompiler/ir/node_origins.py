"""Node origins: mapping between nodes of the model file and nodes of layers.

Users know the names in the file.

Passes fold, absorb and rename nodes, and none of them keeps records. The mapping is derived from the graph as it was
loaded, which tells the readers of the outputs of removed nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import onnx

from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.onnx.graph_structure import tensors_read
from dicompiler.ir.operator_rule import Node


class _FileNode(NamedTuple):
    """Node of the model file; `reads` and `outputs` are tensor names."""

    name: str
    op: str
    reads: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class NodeOrigins:
    """Origins of the nodes of a layer graph, computed on demand.

    Attributes:
        layers: The layers.
        loaded_graph: The graph as it was loaded; None if no node was removed or renamed.
    """

    layers: LayerGraph
    loaded_graph: onnx.GraphProto | None = None

    @cached_property
    def first_output_by_name(self) -> Mapping[str, str]:
        """First output of each node of the file, by node name in file order ('' if it has none)."""
        return {node.name: _first_output(node.outputs) for node in self._file_nodes}

    @cached_property
    def added_nodes(self) -> Mapping[str, str]:
        """First output of each layer node with a name that the file does not have, by node name."""
        return {
            node.name: _first_output(node.outputs)
            for node in self._layer_nodes()
            if node.name not in self.first_output_by_name
        }

    @cached_property
    def origin_of(self) -> Mapping[str, str]:
        """Name of the file's node from which a layer node comes, by name of the layer node.

        It is the node with the same name and operator, else the node that computes the same tensor in the file. Nodes
        that passes added have no origin.
        """
        operators = {node.name: node.op for node in self._file_nodes}
        maker = {output: node.name for node in self._file_nodes for output in node.outputs}
        origins: dict[str, str] = {}
        for node in self._layer_nodes():
            if operators.get(node.name) == node.op:
                origins[node.name] = node.name
            elif maker_name := next((maker[output] for output in node.outputs if output in maker), ""):
                origins[node.name] = maker_name
        return origins

    def names_of(self, node: Node) -> tuple[str, ...]:
        """Return the names by which users can refer to a layer node.

        Args:
            node: A node of a layer.

        Returns:
            Its own name, unless the file has another node with it, then the name of its origin.
        """
        by_name = (node.name,) if node.name in self.added_nodes else ()
        return (*by_name, *(self.origin_of[name] for name in (node.name,) if name in self.origin_of))

    def layers_of(self, name: str) -> tuple[Layer, ...]:
        """Return the layers that contain a node.

        If passes removed the node, the result is that of the first node that reads its output, directly or through
        other removed nodes.

        Args:
            name: Name of a node of the file or of a layer.

        Returns:
            The layers, in layer order; () for an unknown name, or for an unread node.
        """
        return self._layers_by_name.get(self._successor_of.get(name, name), ())

    @cached_property
    def _layers_by_name(self) -> Mapping[str, tuple[Layer, ...]]:
        """Layers of each node, by all of its names."""
        layers_of: dict[str, dict[Layer, None]] = {}
        for layer in self.layers.layers:
            for node in layer.nodes:
                for name in self.names_of(node):
                    layers_of.setdefault(name, {})[layer] = None
        return {name: tuple(layers) for name, layers in layers_of.items()}

    @cached_property
    def _successor_of(self) -> Mapping[str, str]:
        """Name of the node that replaces a file's node (itself, if it is in a layer), by node name."""
        kept, nodes = set(self.origin_of.values()), self._file_nodes
        reader: dict[str, int] = {}  # First remaining node that reads a tensor, directly or through removed nodes.
        successor_of: dict[str, str] = {}
        for index in reversed(range(len(nodes))):
            node = nodes[index]
            successors = [index] if node.name in kept else [reader[name] for name in node.outputs if name in reader]
            if not successors:
                continue
            successor = min(successors)
            successor_of[node.name] = nodes[successor].name
            reader.update((name, min(successor, reader.get(name, successor))) for name in node.reads)
        return successor_of

    @cached_property
    def _file_nodes(self) -> tuple[_FileNode, ...]:
        if self.loaded_graph is None:
            return tuple(
                _FileNode(node.name, node.op, node.inputs, _non_empty(node.outputs)) for node in self._layer_nodes()
            )
        return tuple(
            _FileNode(node.name, node.op_type, tuple(tensors_read(node)), _non_empty(node.output))
            for node in self.loaded_graph.node
        )

    def _layer_nodes(self) -> Iterator[Node]:
        return (node for layer in self.layers.layers for node in layer.nodes)


def _non_empty(outputs: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in outputs if name)


def _first_output(outputs: Iterable[str]) -> str:
    return next(filter(None, outputs), "")
