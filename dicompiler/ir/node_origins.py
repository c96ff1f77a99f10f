"""Lineage: where the nodes of a file went, whose names users know, after passes folded, absorbed and renamed them.

LayerGraph + the graph as it was loaded → for a layer's node the file's node, for the file's node its layers. No pass
keeps a record: the file's own graph says who read what a lost node made.
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
    """A node of the file: `reads` and `outputs` are names of tensors."""

    name: str
    op: str
    reads: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class NodeOrigins:
    """`layers`, and the graph that they were made of as it was when it was loaded (None: nothing of it was lost).

    Nothing is worked out before somebody asks.
    """

    layers: LayerGraph
    loaded_graph: onnx.GraphProto | None = None

    @cached_property
    def first_output_by_name(self) -> Mapping[str, str]:
        """Name → first output of every node of the file, in its order ('' where it has none)."""
        return {node.name: _first_output(node.outputs) for node in self._file_nodes}

    @cached_property
    def added_nodes(self) -> Mapping[str, str]:
        """Name → first output of every node of a layer whose name the file does not have."""
        return {
            node.name: _first_output(node.outputs)
            for node in self._layer_nodes()
            if node.name not in self.first_output_by_name
        }

    @cached_property
    def origin_of(self) -> Mapping[str, str]:
        """Name of a layer's node → name of the file's node that it is: that of its name and operator, else the one that
        made its output there (Split → Slice, Slice). What passes added has none."""
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
        """What a user may call a layer's node, the nearest first: by its own name, unless that is another node's in the
        file, and by its origin's."""
        by_name = (node.name,) if node.name in self.added_nodes else ()
        return (*by_name, *(self.origin_of[name] for name in (node.name,) if name in self.origin_of))

    def layers_of(self, name: str) -> tuple[Layer, ...]:
        """The layers, in layer order, of a node by its name: those that it is in; where it is gone (folded, say) those
        of the first node in file order that reads what it made, directly or by way of others that are gone. () for a
        node that vanished because nobody reads it, and for a name that neither the file nor a layer has."""
        return self._layers_by_name.get(self._successor_of.get(name, name), ())

    @cached_property
    def _layers_by_name(self) -> Mapping[str, tuple[Layer, ...]]:
        """Every name of a node that is in a layer → its layers."""
        layers_of: dict[str, dict[Layer, None]] = {}
        for layer in self.layers.layers:
            for node in layer.nodes:
                for name in self.names_of(node):
                    layers_of.setdefault(name, {})[layer] = None
        return {name: tuple(layers) for name, layers in layers_of.items()}

    @cached_property
    def _successor_of(self) -> Mapping[str, str]:
        """Name of the file's node → name of the one that stands for it: itself, if it is in a layer. Read backwards,
        because what a node made is read behind it."""
        kept, nodes = set(self.origin_of.values()), self._file_nodes
        reader: dict[str, int] = {}  # tensor → the first node, by way of lost ones, that is left of those that read it
        heirs_of: dict[str, str] = {}
        for index in reversed(range(len(nodes))):
            node = nodes[index]
            heirs = [index] if node.name in kept else [reader[name] for name in node.outputs if name in reader]
            if not heirs:
                continue
            heir = min(heirs)
            heirs_of[node.name] = nodes[heir].name
            reader.update((name, min(heir, reader.get(name, heir))) for name in node.reads)
        return heirs_of

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
