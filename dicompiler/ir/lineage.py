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
from dicompiler.ir.onnx.structure import node_reads
from dicompiler.ir.rule import Node


class _Loaded(NamedTuple):
    """A node of the file: `reads` and `outputs` are names of tensors."""

    name: str
    op: str
    reads: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Lineage:
    """`layers`, and the graph that they were made of as it was when it was loaded (None: nothing of it was lost).

    Nothing is worked out before somebody asks.
    """

    layers: LayerGraph
    loaded: onnx.GraphProto | None = None

    @cached_property
    def names(self) -> Mapping[str, str]:
        """Name → first output of every node of the file, in its order ('' where it has none)."""
        return {node.name: _first(node.outputs) for node in self._file}

    @cached_property
    def added(self) -> Mapping[str, str]:
        """Name → first output of every node of a layer whose name the file does not have."""
        return {node.name: _first(node.outputs) for node in self._nodes() if node.name not in self.names}

    @cached_property
    def origin(self) -> Mapping[str, str]:
        """Name of a layer's node → name of the file's node that it is: that of its name and operator, else the one that
        made its output there (Split → Slice, Slice). What passes added has none."""
        operators = {node.name: node.op for node in self._file}
        maker = {output: node.name for node in self._file for output in node.outputs}
        origins: dict[str, str] = {}
        for node in self._nodes():
            if operators.get(node.name) == node.op:
                origins[node.name] = node.name
            elif maker_name := next((maker[output] for output in node.outputs if output in maker), ""):
                origins[node.name] = maker_name
        return origins

    def names_of(self, node: Node) -> tuple[str, ...]:
        """What a user may call a layer's node, the nearest first: by its own name, unless that is another node's in the
        file, and by its origin's."""
        by_name = (node.name,) if node.name in self.added else ()
        return (*by_name, *(self.origin[name] for name in (node.name,) if name in self.origin))

    def layers_of(self, name: str) -> tuple[Layer, ...]:
        """The layers, in layer order, of a node by its name: those that it is in; where it is gone (folded, say) those
        of the first node in file order that reads what it made, directly or by way of others that are gone. () for a
        node that vanished because nobody reads it, and for a name that neither the file nor a layer has."""
        return self._homes.get(self._heir.get(name, name), ())

    @cached_property
    def _homes(self) -> Mapping[str, tuple[Layer, ...]]:
        """Every name of a node that is in a layer → its layers."""
        layers_of: dict[str, dict[Layer, None]] = {}
        for layer in self.layers.layers:
            for node in layer.nodes:
                for name in self.names_of(node):
                    layers_of.setdefault(name, {})[layer] = None
        return {name: tuple(layers) for name, layers in layers_of.items()}

    @cached_property
    def _heir(self) -> Mapping[str, str]:
        """Name of the file's node → name of the one that stands for it: itself, if it is in a layer. Read backwards,
        because what a node made is read behind it."""
        kept, nodes = set(self.origin.values()), self._file
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
    def _file(self) -> tuple[_Loaded, ...]:
        if self.loaded is None:
            return tuple(_Loaded(node.name, node.op, node.inputs, _present(node.outputs)) for node in self._nodes())
        return tuple(
            _Loaded(node.name, node.op_type, tuple(node_reads(node)), _present(node.output))
            for node in self.loaded.node
        )

    def _nodes(self) -> Iterator[Node]:
        return (node for layer in self.layers.layers for node in layer.nodes)


def _present(outputs: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in outputs if name)


def _first(outputs: Iterable[str]) -> str:
    return next(filter(None, outputs), "")
