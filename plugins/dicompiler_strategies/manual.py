"""Plans that somebody else made: a plan file, or a `mapping.json` of AutoDiCE."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dicompiler.base.errors import DicompilerError, nearest
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.plan import Part, Plan, load
from dicompiler.ir.platform import Device, Platform
from dicompiler.ir.rule import Node
from dicompiler.partition.tiling import tile
from dicompiler.search.problem import Problem, Strategy
from dicompiler_strategies.autodice import Key, device_of, load_mapping, platform_from_autodice

log = logging.getLogger("dicompiler")


@dataclass(frozen=True)
class Manual(Strategy):
    """A plan file, or AutoDiCE's mapping.json, with or without its platform.txt.

    Keys of a mapping stand for the platform's device of that name, else for the GPU or the CPU cores of the host. A
    node is named by its name or its first output tensor, with / as it is or written as _. A layer goes where its
    anchor goes, with all nodes that it absorbs; a layer under two keys is cut by output channels in equal shares (LOP).
    With `platform`, the keys are checked against that file; where no other platform is given it also is the platform.
    """

    name: ClassVar[str] = "manual"
    file: str = field(default="", metadata={"help": "a plan file (JSON)", "file": True})
    mapping: str = field(default="", metadata={"help": "AutoDiCE's mapping.json, instead of a plan file", "file": True})
    platform: str = field(
        default="", metadata={"help": "AutoDiCE's platform.txt, to go with the mapping", "file": True}
    )

    def __post_init__(self) -> None:
        if bool(self.file) == bool(self.mapping):
            raise ValueError("give either file=PLAN.json or mapping=MAPPING.json")
        if self.platform and not self.mapping:
            raise ValueError("platform=PLATFORM.txt goes with mapping=MAPPING.json only")

    def own_platform(self) -> Platform | None:
        """The platform of mapping and platform.txt together, where both are given."""
        return platform_from_autodice(self.mapping, self.platform) if self.platform else None

    def plan(self, problem: Problem) -> Plan:
        """The plan of the file; one of a mapping has the problem's source and sink. Errors name the file."""
        if self.file:
            return _from_file(problem, self.file)
        self.own_platform()  # only to check the keys against platform.txt
        mapping = load_mapping(self.mapping)
        devices = {key: device_of(key, problem.platform, self.mapping) for key in mapping}
        _say_other_cores(devices)
        keys = _keys_by_node(problem.layers, mapping, self.mapping)
        return problem.plan(
            {
                layer.name: _parts(problem.layers, layer, _devices_of(layer, keys, devices, self.mapping), self.mapping)
                for layer in problem.layers.layers
            }
        )


def _from_file(problem: Problem, path: str) -> Plan:
    plan = load(path)
    known = problem.platform.host_of
    for name in plan.devices:
        if name not in known:
            raise DicompilerError(
                f"{path}: device {name!r} is not on platform {problem.platform.name!r}{nearest(name, known)}"
            )
    return plan


def _say_other_cores(devices: Mapping[Key, Device]) -> None:
    for key, device in devices.items():
        others = [other.text for other in devices if other != key and devices[other] == device]
        if others:
            log.warning("mapping: keys %s and %s are both device %s", key.text, ", ".join(others), device.name)
        elif not key.gpu and len(key.cores) != device.cores:
            log.warning("mapping: key %s is device %s, which has %d cores", key.text, device.name, device.cores)


def _aliases(node: Node) -> tuple[str, ...]:
    """What a mapping may call a node, the likelier first."""
    names = [name for name in (*node.outputs[:1], node.name) if name]
    return tuple(dict.fromkeys([*names, *(name.replace("/", "_") for name in names)]))


def _keys_by_node(layers: LayerGraph, mapping: Mapping[Key, Sequence[str]], place: str) -> dict[str, tuple[Key, ...]]:
    """Node name → the keys that it is under, in rank order. Raises for an unknown or ambiguous name."""
    nodes = [node for layer in layers.layers for node in layer.nodes]
    known: dict[str, dict[str, None]] = {}
    for node in nodes:
        for alias in _aliases(node):
            known.setdefault(alias, {})[node.name] = None
    exact = {node.name: node.name for node in nodes} | {node.outputs[0]: node.name for node in nodes}
    found: dict[str, tuple[Key, ...]] = {}
    for key, names in mapping.items():
        for name in names:
            if name not in known:
                raise DicompilerError(f"{place}: key {key.text!r}: unknown layer {name!r}{nearest(name, known)}")
            if name not in exact and len(known[name]) > 1:
                raise DicompilerError(
                    f"{place}: key {key.text!r}: {name!r} can be any of {', '.join(known[name])}: write it with its /"
                )
            node_name = exact.get(name) or next(iter(known[name]))
            if key not in found.get(node_name, ()):
                found[node_name] = (*found.get(node_name, ()), key)
    return found


def _devices_of(
    layer: Layer, keys: Mapping[str, tuple[Key, ...]], devices: Mapping[Key, Device], place: str
) -> tuple[str, ...]:
    """The devices of a layer: those of its anchor. Says where an absorbed node was to go elsewhere."""
    anchor = layer.nodes[layer.anchor]
    if anchor.name not in keys:
        raise DicompilerError(
            f"{place}: layer {_aliases(anchor)[0]!r} (node {anchor.name!r}) is missing: put it under a key"
        )
    for node in layer.nodes:
        other = keys.get(node.name, keys[anchor.name])
        if other != keys[anchor.name]:
            log.warning(
                "mapping: node %s (%s) goes with %s, which it is absorbed by, not to %s",
                node.name,
                node.op,
                anchor.name,
                ", ".join(key.text for key in other),
            )
    return tuple(dict.fromkeys(devices[key].name for key in keys[anchor.name]))


def _parts(layers: LayerGraph, layer: Layer, devices: Sequence[str], place: str) -> tuple[Part, ...]:
    if len(devices) == 1:
        return (Part(devices[0]),)
    try:
        parts = tile(layers, layer, "channel", [1.0] * len(devices), devices)
    except DicompilerError as error:
        raise DicompilerError(
            f"{place}: layer {layer.name!r} is under {len(devices)} keys, but its channels cannot be cut: {error}"
        ) from None
    log.warning("mapping: layer %s is under %d keys: cut by output channels (LOP)", layer.name, len(devices))
    return parts
