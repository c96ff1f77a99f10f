"""The strategy `manual`: the plan of a plan file, or of a mapping.json of AutoDiCE."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dicompiler.plugin_api import Device, DicompilerError, Layer, LayerGraph, Part, Plan, Platform, Problem, Strategy
from dicompiler.plugin_api.artifacts import load_user_plan, plan_file_in_errors
from dicompiler.plugin_api.onnx import Node, NodeOrigins
from dicompiler.plugin_api.regions import tile_layer
from dicompiler.plugin_api.search import check_constraints, check_plan_devices
from dicompiler.plugin_api.utilities import did_you_mean
from dicompiler_strategies.autodice import MappingKey, find_device, load_mapping, platform_from_mapping

log = logging.getLogger("dicompiler")


@dataclass(frozen=True)
class Manual(Strategy):
    """The plan of a plan file, or of AutoDiCE's mapping.json with or without its platform.txt.

    A mapping lists nodes under keys, such as `nx01_gpu`. A key means the device of that name, or else the GPU or the
    CPU device of the host (`nx01`). Each node is given by its name or by its first output tensor, with _ instead of /
    if you like.

    - A layer is assigned to the device of its anchor (its main node), with all nodes that are fused into it.
    - A layer under several keys is split equally by output channels (LOP).
    - Nodes that constant folding removed are ignored. The Slices that replace a Split are assigned like the Split.
    - A layer that was added by a pass is assigned like the layer before it, or else like the layer after it.

    With `platform`, the keys are checked against that file. It also serves as the platform if you give no other.
    """

    name: ClassVar[str] = "manual"
    file: str = field(default="", metadata={"help": "plan file (JSON)", "file": True})
    mapping: str = field(default="", metadata={"help": "AutoDiCE's mapping.json instead of a plan file", "file": True})
    platform: str = field(default="", metadata={"help": "AutoDiCE's platform.txt for the mapping", "file": True})

    def __post_init__(self) -> None:
        if bool(self.file) == bool(self.mapping):
            raise ValueError("give either file=PLAN.json or mapping=MAPPING.json")
        if self.platform and not self.mapping:
            raise ValueError("platform=PLATFORM.txt needs mapping=MAPPING.json")

    def own_platform(self) -> Platform | None:
        return platform_from_mapping(self.mapping, self.platform) if self.platform else None

    def plan(self, problem: Problem) -> Plan:
        """Return the plan of the file.

        Raises:
            DicompilerError: The file does not fit the problem. The error names the file.
        """
        if self.file:
            plan = load_user_plan(self.file)
            with plan_file_in_errors(self.file):
                check_plan_devices(problem.platform, plan)
                check_constraints(problem, plan)
            return plan
        self.own_platform()  # This call checks that platform.txt has the hosts and cores of the keys.
        mapping = load_mapping(self.mapping)
        devices = {key: find_device(key, problem.platform, self.mapping) for key in mapping}
        _warn_of_core_mismatch(devices)
        keys = _keys_by_node(problem.lineage, mapping, self.mapping)
        homes = _MappingResolver(problem, keys, devices, self.mapping).layer_devices()
        layers = problem.layers
        return problem.build_plan(
            {layer.name: _layer_parts(layers, layer, homes[layer.name], self.mapping) for layer in layers.layers}
        )


def _warn_of_core_mismatch(devices: Mapping[MappingKey, Device]) -> None:
    for key, device in devices.items():
        others = [other.text for other in devices if other != key and devices[other] == device]
        if others:
            log.warning("mapping: keys %s and %s are both device %s", key.text, ", ".join(others), device.name)
        elif not key.is_gpu and len(key.cores) != device.cores:
            log.warning("mapping: key %s is device %s, which has %d cores", key.text, device.name, device.cores)


def _aliases(name: str, output: str) -> tuple[str, ...]:
    """Return the names that AutoDiCE's mapping.json may use for a node, the most likely one first."""
    names = [alias for alias in (output, name) if alias]
    return tuple(dict.fromkeys([*names, *(alias.replace("/", "_") for alias in names)]))


def _nodes_by_alias(nodes: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the names of the nodes that each name in a mapping.json may mean.

    A name with _ instead of / may mean several nodes. `nodes` has the first output of each node, by node name.
    """
    meanings: dict[str, tuple[str, ...]] = {}
    for name, output in nodes.items():
        for alias in _aliases(name, output):
            meanings[alias] = (*meanings.get(alias, ()), name)
    exact = {name: (name,) for name in nodes} | {output: (name,) for name, output in nodes.items() if output}
    return meanings | exact


def _keys_by_node(
    lineage: NodeOrigins, mapping: Mapping[MappingKey, Sequence[str]], place: str
) -> dict[str, tuple[MappingKey, ...]]:
    """Return, by node name, the keys (such as `nx01_gpu`) under which a mapping.json lists a node, in file order.

    Raises:
        DicompilerError: The name of a node is unknown or can mean several nodes.
    """
    known = _nodes_by_alias(lineage.added_nodes) | _nodes_by_alias(lineage.first_output_by_name)
    keys: dict[str, tuple[MappingKey, ...]] = {}
    for key, names in mapping.items():
        for name in names:
            if name not in known:
                raise DicompilerError(f"{place}: key {key.text!r}: unknown layer {name!r}{did_you_mean(name, known)}")
            if len(known[name]) > 1:
                raise DicompilerError(
                    f"{place}: key {key.text!r}: {name!r} can be any of {', '.join(known[name])}: write it with its /"
                )
            (node,) = known[name]
            keys[node] = tuple(dict.fromkeys((*keys.get(node, ()), key)))
    return keys


@dataclass(frozen=True)
class _MappingResolver:
    """The assignment of layers to devices by a mapping.json, which lists nodes under keys such as `nx01_gpu`.

    Attributes:
        problem: The problem whose layers are assigned.
        keys: For each node, by name, the keys under which the mapping lists it.
        devices: Device of each key.
        place: Path of the mapping file, for error messages.
    """

    problem: Problem
    keys: Mapping[str, tuple[MappingKey, ...]]
    devices: Mapping[MappingKey, Device]
    place: str

    def layer_devices(self) -> dict[str, tuple[str, ...]]:
        """Return the names of each layer's devices, by layer name.

        A layer that the mapping does not list gets a device of a layer whose output it reads, or else of a layer that
        reads its output, or else that of the first key.
        """
        graph = self.problem.layers
        homes: dict[str, tuple[str, ...]] = {}
        for layer in graph.layers:
            before = (homes.get(graph.producer[name].name) for name in layer.inputs if name in graph.producer)
            if home := self._devices_of_layer(layer) or next(filter(None, before), ())[:1]:
                homes[layer.name] = home
        for layer in reversed(graph.layers):
            if layer.name not in homes:
                behind = (homes[reader.name] for name in layer.outputs for reader in graph.consumers.get(name, ()))
                homes[layer.name] = next(behind, (next(iter(self.devices.values())).name,))[:1]
        return homes

    def _devices_of_layer(self, layer: Layer) -> tuple[str, ...]:
        """Return the devices of the keys under which the mapping lists a layer's anchor (its main node).

        If a pass added the anchor, another node of the layer is used. The result is () if the mapping lists none.

        Raises:
            DicompilerError: The anchor is a node of the model file that the mapping does not list.
        """
        anchor = layer.nodes[layer.anchor]
        keys = self._keys_of(anchor)
        origin = self.problem.lineage.origin_of.get(anchor.name)
        if keys is None and origin is not None:
            called = _aliases(origin, self.problem.lineage.first_output_by_name[origin])[0]
            raise DicompilerError(f"{self.place}: layer {called!r} (node {origin!r}) is missing: add it to a device")
        if keys is None:
            keys = next(filter(None, map(self._keys_of, reversed(layer.nodes))), ())
        for node in layer.nodes:
            other = self._keys_of(node)
            if other not in (None, keys):
                log.warning(
                    "mapping: node %s (%s) is fused into %s and follows it, not %s",
                    node.name,
                    node.op,
                    anchor.name,
                    ", ".join(key.text for key in other or ()),
                )
        return tuple(dict.fromkeys(self.devices[key].name for key in keys))

    def _keys_of(self, node: Node) -> tuple[MappingKey, ...] | None:
        return next((self.keys[name] for name in self.problem.lineage.names_of(node) if name in self.keys), None)


def _layer_parts(layers: LayerGraph, layer: Layer, devices: Sequence[str], place: str) -> tuple[Part, ...]:
    if len(devices) == 1:
        return (Part(devices[0]),)
    try:
        parts = tile_layer(layers, layer, "channel", [1.0] * len(devices), devices)
    except DicompilerError as error:
        raise DicompilerError(
            f"{place}: layer {layer.name!r} is under {len(devices)} keys, but its channels cannot be cut: {error}"
        ) from None
    log.warning("mapping: layer %s is under %d keys: cut by output channels (LOP)", layer.name, len(devices))
    return parts
