"""Profiles: the times of a network's layers on a device, measured by `dicompiler profile`."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from dicompiler.base.errors import DicompilerError
from dicompiler.base.memoize import Memoizing, memoized
from dicompiler.base.units import format_seconds
from dicompiler.cost.op_counts import count_operations
from dicompiler.cost.piecewise_linear import TimeCurve
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.ir.cluster import Device, Link
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.onnx.weights import is_fixed_size, raw_nbytes
from dicompiler.ir.operator_rule import TensorInfo
from dicompiler.ir.plan import LayerShare
from dicompiler.ir.regions import full_region
from dicompiler.partition.bounds_inference import output_shape

log = logging.getLogger("dicompiler")

MAX_MEDIAN_TO_MIN = 2.0
"""Largest ratio of median to shortest times, over all layers, at which the host counts as idle."""
Cut = str
"""How a measured piece is smaller than its layer.

"whole": it is the layer. "axis 2": cut along an axis of the output. "reduce": a partial sum over a range of the
reduction axis. "merge": it adds partial sums up, and its size is their number.
"""


def axis_cut(axis: int) -> Cut:
    """Return the name of a cut along an axis of the layer's output."""
    return f"axis {axis}"


@dataclass(frozen=True)
class PieceMeasurement:
    """One piece of a layer that was timed.

    Attributes:
        cut: How it is smaller than the layer.
        size: Its extent along the cut.
        flops: Its floating-point operations.
        moved_bytes: Bytes that it reads and writes.
        median_s: Median time in seconds, with the call.
        min_s: Shortest time in seconds.
        max_s: Longest time in seconds.
    """

    cut: Cut
    size: int
    flops: int
    moved_bytes: int
    median_s: float
    min_s: float
    max_s: float


def is_whole_layer(layers: LayerGraph, layer: Layer, share: LayerShare) -> bool:
    """Return True if a share is the whole layer, neither a partial sum nor a merger."""
    everything = share.region is None or share.region == full_region(output_shape(layers, layer))
    return everything and share.reduce is None and not share.merge_count


def layer_input_nbytes(layers: LayerGraph, layer: Layer) -> int:
    """Return the bytes that a whole layer reads from other layers, without the network's inputs."""
    network_inputs = [layers.tensors[name] for name in layer.inputs if name in layers.inputs]
    sized = (tensor for tensor in network_inputs if tensor.shape is not None and is_fixed_size(tensor.dtype))
    sizes = [raw_nbytes(tensor.dtype, tensor.shape or ()) for tensor in sized]
    return count_operations(layers, layer).input_bytes - sum(sizes)


@dataclass(frozen=True)
class LayerProfile:
    """The measurements of all layers with one signature.

    Attributes:
        signature: Digest of the layers, see `layer_signature`.
        kind: Kind of the layers, see `layer_kind`.
        names: Names of the layers.
        measurements: The measured pieces.
    """

    signature: str
    kind: str
    names: tuple[str, ...]
    measurements: tuple[PieceMeasurement, ...]


@dataclass(frozen=True, eq=False)  # compared by identity: curves are remembered
class Profile(Memoizing):
    """A profile file.

    Attributes:
        place: Path of the file, for messages.
        model_digest: Structural digest of the network.
        device: Name or name pattern of the devices for which it holds.
        threads: Number of threads.
        call_s: Seconds of an empty call, included in every measurement.
        layers: Measurements by layer signature.
        unmeasured: Reasons for layers that could not be measured, by name.
        links: Measured links between hosts.
        runtime_costs: Measured costs of targets' runtimes, by target name.
        whole_model_s: Seconds of the whole network in one session with the call; None if not measured.
        weight_byte_s: Additional seconds for each byte of weights in a frame, because it comes from memory instead of
            caches.
        read_byte_s: The same for each byte of other inputs.
        cold_call_s: Additional seconds of a call in a frame, because the device has computed other layers since the
            last one.
    """

    place: str
    model_digest: str
    device: str
    threads: int
    call_s: float
    layers: Mapping[str, LayerProfile]
    unmeasured: Mapping[str, str]
    links: tuple[Link, ...]
    runtime_costs: Mapping[str, RuntimeCosts] = field(default_factory=dict)
    whole_model_s: float | None = None
    weight_byte_s: float = 0.0
    read_byte_s: float = 0.0
    cold_call_s: float = 0.0

    def samples(self) -> Iterator[tuple[str, float, float, float]]:
        """Yield (layer kind, FLOPs, bytes, seconds without an empty call) of all pieces."""
        for layer in self.layers.values():
            for piece in layer.measurements:
                yield layer.kind, piece.flops, piece.moved_bytes, max(0.0, piece.median_s - self.call_s)

    @cached_property
    def byte_s(self) -> float:
        """Seconds to move a byte: the least of all pieces."""
        return min((seconds / nbytes for _, _, nbytes, seconds in self.samples() if nbytes > 0 < seconds), default=0.0)

    def whole_layer_s(self, signature: str) -> float:
        """Return the seconds of the whole layer, without an empty call.

        Raises KeyError if the layer was not measured.
        """
        piece = next(m for m in self.layers[signature].measurements if m.cut == "whole")
        return max(0.0, piece.median_s - self.call_s)

    @cached_property
    def isolated_s(self) -> float:
        """Seconds of all layers, each measured on its own, without empty calls."""
        return sum(len(layer.names) * self.whole_layer_s(layer.signature) for layer in self.layers.values())

    @memoized
    def unmeasured_layers(self, layers: LayerGraph) -> Mapping[str, Layer]:
        """Return the layers that were not measured, by name."""
        return {layer.name: layer for layer in layers.layers if layer_signature(layers, layer) not in self.layers}

    def seconds_in_frame(
        self,
        layers: LayerGraph,
        layer: Layer,
        share: LayerShare,
        isolated_s: float,
        local_bytes: int,
        unmeasured_s: float,
    ) -> float:
        """Return the seconds in a frame of a share that takes `isolated_s` when it runs repeatedly on its own.

        In a frame its weights come from memory, and so do its inputs, except for the bytes that the device has just
        computed in the same session. Such layers are fused, which saves time.

        Args:
            layers: The layers of the network.
            layer: The layer.
            share: The part of the layer.
            isolated_s: Seconds of the share on its own.
            local_bytes: Bytes that it reads from the same session.
            unmeasured_s: Seconds of all layers that were not measured.

        Returns:
            Seconds, at least 0.
        """
        saved_s = self.fusing_s(layers, unmeasured_s) * local_bytes
        return max(0.0, isolated_s + self._memory_wait_s(layers, layer, share, local_bytes) - saved_s)

    def _memory_wait_s(self, layers: LayerGraph, layer: Layer, share: LayerShare, local_bytes: int) -> float:
        """Return the additional seconds because data comes from memory."""
        counts = count_operations(layers, layer, *share)
        return self.weight_byte_s * counts.weight_bytes + self.read_byte_s * max(0, counts.input_bytes - local_bytes)

    @memoized
    def fusing_s(self, layers: LayerGraph, unmeasured_s: float) -> float:
        """Return the seconds that each byte between layers saves in a session.

        It is chosen such that all layers, none below 0 s, together take the measured time of the whole network,
        including `unmeasured_s` for layers that were not measured. It is negative if the whole takes longer than its
        layers, and 0 if the unmeasured layers alone account for the whole.
        """
        whole_s = max(0.0, (self.whole_model_s or 0.0) - self.call_s)
        if self.whole_model_s is None or 0 < whole_s <= unmeasured_s:
            return 0.0
        pieces = [
            (self.whole_layer_s(signature) + self._memory_wait_s(layers, layer, LayerShare(), local_bytes), local_bytes)
            for layer in layers.layers
            if (signature := layer_signature(layers, layer)) in self.layers
            for local_bytes in (layer_input_nbytes(layers, layer),)
        ]
        while (total_bytes := sum(nbytes for _, nbytes in pieces)) > 0:
            saved_s = (sum(seconds for seconds, _ in pieces) - max(0.0, whole_s - unmeasured_s)) / total_bytes
            positive = [(seconds, nbytes) for seconds, nbytes in pieces if seconds >= saved_s * nbytes]
            if len(positive) == len(pieces):
                return saved_s
            pieces = positive
        return 0.0

    @cached_property
    def median_to_min(self) -> float:
        """Ratio of median to shortest times over all layers, infinite without times."""
        whole_measurements = [
            (m, len(layer.names)) for layer in self.layers.values() for m in layer.measurements if m.cut == "whole"
        ]
        shortest = sum(count * piece.min_s for piece, count in whole_measurements)
        return sum(count * piece.median_s for piece, count in whole_measurements) / shortest if shortest else math.inf

    @property
    def busy_message(self) -> str:
        """The message that the host was busy, with the most affected layers; '' if it was not."""
        if self.median_to_min <= MAX_MEDIAN_TO_MIN:
            return ""
        whole_measurements = [
            (m, layer.names) for layer in self.layers.values() for m in layer.measurements if m.cut == "whole"
        ]
        whole_measurements.sort(key=lambda entry: len(entry[1]) * (entry[0].min_s - entry[0].median_s))
        noisiest = [(m, names[0]) for m, names in whole_measurements[:3] if m.median_s > MAX_MEDIAN_TO_MIN * m.min_s]
        examples = ", ".join(
            f"{name} {format_seconds(m.median_s)} against {format_seconds(m.min_s)}" for m, name in noisiest
        )
        return (
            f"{self.place}: its host was busy: medians are {self.median_to_min:.3g} times the shortest times (allowed: "
            f"{MAX_MEDIAN_TO_MIN:g}; most of all {examples}): measure it again on an idle host"
        )

    @memoized
    def curve(self, signature: str, cut: Cut, extent: int | None = None) -> TimeCurve | None:
        """Return the seconds without an empty call by size along a cut; None if nothing was measured along it.

        At size `extent` the piece is the whole layer, which adds the last point.
        """
        points = {m.size: m.median_s - self.call_s for m in self.layers[signature].measurements if m.cut == cut}
        if not points:
            return None
        return TimeCurve.fit(points | ({} if extent is None else {extent: self.whole_layer_s(signature)}))


def parse_profile(document: Any, place: str) -> Profile:
    """Return the profile in a JSON document.

    Raises DicompilerError if the document does not match the schema. The error names `place` and the key.
    """
    from dicompiler.base.schema import validate

    validate(document, "profile", place)
    layers = {
        entry["signature"]: _parse_layer(entry, f"{place}: layers[{i}]") for i, entry in enumerate(document["layers"])
    }
    links = [Link((e["hosts"][0], e["hosts"][1]), e["bandwidth"], e["latency"]) for e in document["links"]]
    return Profile(
        place,
        document["model_digest"],
        document["device"],
        document["threads"],
        document["call_s"],
        layers,
        {entry["name"]: entry["reason"] for entry in document["unmeasured"]},
        tuple(links),
        {target: RuntimeCosts(**costs) for target, costs in document.get("runtime_costs", {}).items()},
        document.get("whole_model_s"),
        document.get("weight_byte_s", 0.0),
        document.get("read_byte_s", 0.0),
        document.get("cold_call_s", 0.0),
    )


def _parse_layer(entry: Mapping[str, Any], place: str) -> LayerProfile:
    keys = ("cut", "size", "flops", "moved_bytes", "median_s", "min_s", "max_s")
    if all(record["cut"] != "whole" for record in entry["measurements"]):
        raise DicompilerError(f"{place}.measurements: the whole layer is missing: measure it again")
    measurements = tuple(PieceMeasurement(*(record[key] for key in keys)) for record in entry["measurements"])
    return LayerProfile(entry["signature"], entry["kind"], tuple(entry["names"]), measurements)


def load_profile(path: str | Path) -> Profile:
    """Read and check a profile file."""
    from dicompiler.base.schema import load_json

    return parse_profile(load_json(path), str(path))


@dataclass(frozen=True)
class ProfileSet:
    """Profiles of several kinds of devices.

    Attributes:
        profiles: The profiles.
        others: Whether the first profile holds for devices without one.
    """

    profiles: tuple[Profile, ...]
    others: bool = False

    @classmethod
    def load(cls, files: Sequence[str], others: bool, force: bool = False) -> ProfileSet:
        """Read profile files.

        Raises DicompilerError if a file is missing or invalid, has no measured layer, or (without `force`) is from a
        busy host.
        """
        profiles = tuple(load_profile(file) for file in files)
        for profile in profiles:
            if not profile.layers:
                raise DicompilerError(f"{profile.place}: no layer has been measured yet: run its package on the device")
            if profile.busy_message and not force:
                raise DicompilerError(f"{profile.busy_message}, or accept it (force=true)")
        return cls(profiles, others)

    def runtime_costs(self, device: Device, scaled: RuntimeCosts, target: str) -> RuntimeCosts:
        """Return the measured costs of a target's runtime on a device, completed by the `scaled` ones.

        Never measured are TLS, joint sending, the sending order and the ends of a frame. Old files lack more; a warning
        says so once for each file.
        """
        profile = self._find(device)
        if profile is None:
            return scaled
        if target not in profile.runtime_costs:
            _warn_unmeasured(profile.place, target, "costs of the runtime")
            return replace(scaled, cold_call=profile.cold_call_s)
        stated = {
            name: getattr(scaled, name) for name in ("per_io_byte", "per_tls_byte", "coalesced_share", "in_order")
        }
        costs = replace(profile.runtime_costs[target], **stated)
        if not costs.per_copy and scaled.per_copy:
            _warn_unmeasured(profile.place, target, "cost of slices in the runtime")
            costs = replace(costs, per_copy=scaled.per_copy)
        return replace(costs, cold_call=profile.cold_call_s)

    def _find(self, device: Device) -> Profile | None:
        """Return the first profile that holds for a device, None if there is none."""
        named = (p for p in self.profiles if fnmatch.fnmatchcase(device.name, p.device))
        return next(named, self.profiles[0] if self.others else None)

    def for_device(self, layers: LayerGraph, device: Device) -> Profile:
        """Return the first profile that holds for a device.

        Raises DicompilerError if no profile holds for the device, or the profile is of another network.
        """
        profile = self._find(device)
        if profile is None:
            names = ", ".join(f"{p.place} of {p.device!r}" for p in self.profiles)
            raise DicompilerError(
                f"profile: there is none for device {device.name!r}, only {names}: measure it with "
                f"--device {device.name}, or use the first profile for all devices (others=true)"
            )
        digest = network_digest(layers)
        if profile.model_digest != digest:
            raise DicompilerError(
                f"{profile.place}: it is the profile of another network, {profile.model_digest[:12]}; this one is "
                f"{digest[:12]} (structural digests): make it again with 'dicompiler profile'"
            )
        return profile


@cache
def _warn_unmeasured(place: str, target: str, noun: str) -> None:
    log.warning(
        "%s: it has no %s of %s, so the target's own figures are scaled to the device: "
        "make it again with 'dicompiler profile --target %s'",
        place,
        noun,
        target,
        target,
    )


def layer_kind(layer: Layer) -> str:
    """Return the kind of a layer: its anchor operator, with "Group" before it for grouped ones."""
    anchor = layer.nodes[layer.anchor]
    groups = anchor.attributes.get("group")
    return f"Group{anchor.op}" if isinstance(groups, int) and groups > 1 else anchor.op


@memoized
def layer_signature(layers: LayerGraph, layer: Layer) -> str:
    """Return a digest of all properties of a layer that its time depends on, except the device.

    It covers operators, attributes, types, shapes and connections, but no names and no weight values. 64 hex digits.
    """
    sources: dict[str, str] = {name: f"in {i}" for i, name in enumerate(layer.inputs)}
    rows = []
    for i, node in enumerate(layer.nodes):
        inputs = [_input_entry(sources.get(name, ""), layers.tensors[name]) if name else None for name in node.inputs]
        sources |= {name: f"node {i} {k}" for k, name in enumerate(node.outputs)}
        outputs = [_tensor_entry(layers.tensors[name]) if name else None for name in node.outputs]
        attributes = {key: _to_json(value) for key, value in sorted(node.attributes.items())}
        rows.append([node.domain, node.op, node.opset, attributes, inputs, outputs])
    output_sources = [sources[name] for name in layer.outputs]
    return _digest([rows, layer.anchor, bool(layer.whole_reason), output_sources])


@memoized
def network_digest(layers: LayerGraph) -> str:
    """Return a digest of the layers' names, signatures and connections, which a retrained network shares."""
    rows = [[layer.name, layer_signature(layers, layer), layer.inputs, layer.outputs] for layer in layers.layers]
    return _digest([rows, layers.inputs, layers.outputs])


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def _tensor_entry(tensor: TensorInfo) -> list[Any]:
    return [tensor.dtype, tensor.shape]


def _input_entry(place: str, tensor: TensorInfo) -> list[Any]:
    """Return the source, type and shape of an input, and the values of small integer constants."""
    whole = tensor.value is not None and tensor.value.dtype.kind in "iub"
    value = tensor.value.tolist() if tensor.value is not None and whole else None
    return ["constant" if tensor.is_constant else place, *_tensor_entry(tensor), value]


def _to_json(value: Any) -> Any:
    """Return an attribute as JSON; tensors and graphs as their bytes."""
    if isinstance(value, list | tuple):
        return [_to_json(element) for element in value]
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "SerializeToString"):
        return value.SerializeToString(deterministic=True).hex()
    return value
