"""Node origins: mapping between the nodes of the model file and the nodes of layers.

Users know the names in the file, but passes remove and rename nodes. The mapping is derived afterwards, by comparing
the nodes of the layers with the graph as it was loaded.
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
    name: str
    op: str
    reads: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class NodeOrigins:
    """Mapping between the nodes of a layer graph and the nodes of the model file, computed on demand.

    Attributes:
        layers: The layers, after all passes that change nodes.
        loaded_graph: The graph as it was loaded; None if no node was removed or renamed.
    """

    layers: LayerGraph
    loaded_graph: onnx.GraphProto | None = None

    @cached_property
    def first_output_by_name(self) -> Mapping[str, str]:
        """First output of each node of the model file, by node name in file order ('' if a node has no output)."""
        return {node.name: _first_output(node.outputs) for node in self._file_nodes}

    @cached_property
    def added_nodes(self) -> Mapping[str, str]:
        """First output of each node in a layer whose name is not in the model file, by node name."""
        return {
            node.name: _first_output(node.outputs)
            for node in self._layer_nodes()
            if node.name not in self.first_output_by_name
        }

    @cached_property
    def origin_of(self) -> Mapping[str, str]:
        """Name of the model file's node from which each node of a layer was made, by the name of the layer's node.

        This origin has the same name and operator. Otherwise it is the node that computes one of the outputs of the
        layer's node. Nodes that passes added have no entry.
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
        """Return the names by which users can refer to a node of a layer.

        Args:
            node: A node of a layer.

        Returns:
            The node's own name, unless a node of the model file has the same name; then the name of its origin (the
            node of the model file from which it was made), if it has one.
        """
        added = [node.name] if node.name in self.added_nodes else []
        origin = [self.origin_of[node.name]] if node.name in self.origin_of else []
        return (*added, *origin)

    def layers_of(self, name: str) -> tuple[Layer, ...]:
        """Return the layers that contain a node.

        Args:
            name: Name of a node of the file or of a layer. For a node that passes removed, the first remaining node
                that reads its output, directly or through other removed nodes, is used instead.

        Returns:
            The layers, in layer order; () if the name is unknown or nothing reads the removed node.
        """
        return self._layers_by_name.get(self._successor_of.get(name, name), ())

    @cached_property
    def _layers_by_name(self) -> Mapping[str, tuple[Layer, ...]]:
        layers_of: dict[str, dict[Layer, None]] = {}
        for layer in self.layers.layers:
            for node in layer.nodes:
                for name in self.names_of(node):
                    layers_of.setdefault(name, {})[layer] = None
        return {name: tuple(layers) for name, layers in layers_of.items()}

    @cached_property
    def _successor_of(self) -> Mapping[str, str]:
        """Name of the remaining node that represents each node of the file, by node name.

        A remaining node represents itself. A removed node is represented by the first remaining node that reads its
        output, directly or through other removed nodes. If there is none, the removed node has no entry.
        """
        kept, nodes = set(self.origin_of.values()), self._file_nodes
        # For each tensor: the index of the first remaining node that reads it, directly or through removed nodes.
        reader: dict[str, int] = {}
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
