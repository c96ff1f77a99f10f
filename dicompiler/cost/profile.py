"""Profiles: what `dicompiler profile` measured of a network's layers on a device.

A profile file (base/schemas/profile.schema.json) → Profile;   LayerGraph + Device → the profile that holds for them.
"""

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

FORMAT = "dicompiler.profile/1"
MAX_MEDIAN_TO_MIN = 2.0
"""How many times the shortest times the medians of a network's layers may be, all together."""
Cut = str
"""What makes a measured piece smaller than its layer: "whole" (nothing), "axis 2" (of the output), "reduce" (a range of
the reduction axis: a partial sum), "merge" (adding partial sums up; its size is their number)."""


def axis_cut(axis: int) -> Cut:
    """The name of a cut along an axis of the layer's output."""
    return f"axis {axis}"


@dataclass(frozen=True)
class PieceMeasurement:
    """One piece that was timed. size: its extent along the cut; flops, moved: operations and bytes (see
    counting.Count); seconds: the median, low and high the extremes."""

    cut: Cut
    size: int
    flops: int
    moved_bytes: int
    median_s: float
    min_s: float
    max_s: float


def is_whole_layer(layers: LayerGraph, layer: Layer, share: LayerShare) -> bool:
    """Whether a share is all of the layer, and no partial sum nor a merger of some."""
    everything = share.region is None or share.region == full_region(output_shape(layers, layer))
    return everything and share.reduce is None and not share.merge_count


def layer_input_nbytes(layers: LayerGraph, layer: Layer) -> int:
    """Bytes that a whole layer reads of other layers: all but the network's inputs. What has no size counts nothing."""
    given = [layers.tensors[name] for name in layer.inputs if name in layers.inputs]
    sizes = [raw_nbytes(one.dtype, one.shape) for one in given if one.shape is not None and is_fixed_size(one.dtype)]
    return count_operations(layers, layer).input_bytes - sum(sizes)


@dataclass(frozen=True)
class LayerProfile:
    """What was measured of all layers with one signature. kind: see `kind_of`; names: the layers'."""

    signature: str
    kind: str
    names: tuple[str, ...]
    measurements: tuple[PieceMeasurement, ...]


@dataclass(frozen=True, eq=False)  # compared by identity: curves are remembered
class Profile(Memoizing):
    """A profile file. place: its path, for messages; network: the layers' digest; device: the name, or pattern of
    names, of the platform's devices that it holds for; call_s: seconds of an empty call, part of every measurement;
    layers: by signature; unmeasured: layer → why it could not be; links: between hosts; runtime: what targets' runtimes
    cost on it, by the target's name; whole_s: seconds of the whole network in one session, the call too (None: not
    measured); weight_s, read_s: seconds that a byte of weights, and of what a piece reads beside them, takes longer in
    a frame than in a piece that runs again and again, because it comes from memory; cold_s: that any piece takes longer
    there, as the device has computed others since."""

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
        """(layer kind, FLOP, bytes, seconds without the call) of all pieces."""
        for layer in self.layers.values():
            for one in layer.measurements:
                yield layer.kind, one.flops, one.moved_bytes, max(0.0, one.median_s - self.call_s)

    @cached_property
    def byte_s(self) -> float:
        """Seconds that a byte takes to move: those of the piece that moved its bytes the quickest."""
        return min((seconds / moved for _, _, moved, seconds in self.samples() if moved > 0 < seconds), default=0.0)

    def whole_layer_s(self, signature: str) -> float:
        """Seconds of the whole layer, without the call. KeyError where it was not measured."""
        one = next(m for m in self.layers[signature].measurements if m.cut == "whole")
        return max(0.0, one.median_s - self.call_s)

    @cached_property
    def isolated_s(self) -> float:
        """Seconds of all layers, one after another, each alone and without the call."""
        return sum(len(layer.names) * self.whole_layer_s(layer.signature) for layer in self.layers.values())

    @memoized
    def unmeasured_layers(self, layers: LayerGraph) -> Mapping[str, Layer]:
        """The layers that were not measured, by name."""
        return {layer.name: layer for layer in layers.layers if layer_signature(layers, layer) not in self.layers}

    def seconds_in_frame(
        self, layers: LayerGraph, layer: Layer, share: LayerShare, alone_s: float, inside: int, unknown_s: float
    ) -> float:
        """Seconds, in a frame, of a share of a layer that takes `alone_s` alone. Its weights come from memory there,
        however little it computes with them, and so does what it reads, but for the bytes that the device has just
        computed in the same session (`inside`): there layers fuse, and layouts stay. unknown_s: see `fusing_s`."""
        saved = self.fusing_s(layers, unknown_s) * inside
        return max(0.0, alone_s + self._memory_wait_s(layers, layer, share, inside) - saved)

    def _memory_wait_s(self, layers: LayerGraph, layer: Layer, share: LayerShare, inside: int) -> float:
        """Seconds of waiting for memory."""
        counted = count_operations(layers, layer, *share)
        return self.weight_byte_s * counted.weight_bytes + self.read_byte_s * max(0, counted.input_bytes - inside)

    @memoized
    def fusing_s(self, layers: LayerGraph, unknown_s: float) -> float:
        """What a byte between layers costs less in a session than where each runs alone: such that all layers, none
        below 0, take as long as the whole network does, those that were not measured `unknown_s` of it. Below 0 where
        that takes longer; 0 where those are said to take all of it, so that nothing is known of the others."""
        whole_s = max(0.0, (self.whole_model_s or 0.0) - self.call_s)
        if self.whole_model_s is None or 0 < whole_s <= unknown_s:
            return 0.0
        left = [
            (self.whole_layer_s(name) + self._memory_wait_s(layers, layer, LayerShare(), inside), inside)
            for layer in layers.layers
            if (name := layer_signature(layers, layer)) in self.layers
            for inside in (layer_input_nbytes(layers, layer),)
        ]
        while (read := sum(nbytes for _, nbytes in left)) > 0:
            saved = (sum(seconds for seconds, _ in left) - max(0.0, whole_s - unknown_s)) / read
            above = [(seconds, nbytes) for seconds, nbytes in left if seconds >= saved * nbytes]
            if len(above) == len(left):
                return saved
            left = above
        return 0.0

    @cached_property
    def median_to_min(self) -> float:
        """How many times the shortest times the medians are: all layers one after another. Infinite without times."""
        wholes = [
            (m, len(layer.names)) for layer in self.layers.values() for m in layer.measurements if m.cut == "whole"
        ]
        shortest = sum(number * one.min_s for one, number in wholes)
        return sum(number * one.median_s for one, number in wholes) / shortest if shortest else math.inf

    @property
    def busy_message(self) -> str:
        """The line that says that the host was busy while it was measured, with the layers of which that is most true;
        '' where it was not."""
        if self.median_to_min <= MAX_MEDIAN_TO_MIN:
            return ""
        wholes = [(m, one.names) for one in self.layers.values() for m in one.measurements if m.cut == "whole"]
        wholes.sort(key=lambda entry: len(entry[1]) * (entry[0].min_s - entry[0].median_s))
        apart = [(m, names[0]) for m, names in wholes[:3] if m.median_s > MAX_MEDIAN_TO_MIN * m.min_s]
        named = ", ".join(f"{name} {format_seconds(m.median_s)} against {format_seconds(m.min_s)}" for m, name in apart)
        return (
            f"{self.place}: its host was busy: medians are {self.median_to_min:.3g} times the shortest times, and at most "
            f"{MAX_MEDIAN_TO_MIN:g} is taken (above all {named}): measure it again on an idle host"
        )

    @memoized
    def curve(self, signature: str, cut: Cut, extent: int | None = None) -> TimeCurve | None:
        """Seconds, without the call, by size along a cut; None where nothing was measured along it. extent: the size
        at which the piece is the whole layer, where that is so: the last point then."""
        points = {m.size: m.median_s - self.call_s for m in self.layers[signature].measurements if m.cut == cut}
        if not points:
            return None
        return TimeCurve.fit(points | ({} if extent is None else {extent: self.whole_layer_s(signature)}))


def parse_profile(document: Any, place: str) -> Profile:
    """Checks `document` against the schema; an error names `place` (the file), the key and what is allowed."""
    from dicompiler.base.schema import validate

    validate(document, "profile", place)
    layers = {
        entry["signature"]: _parse_layer(entry, f"{place}: layers[{i}]") for i, entry in enumerate(document["layers"])
    }
    links = [Link((e["hosts"][0], e["hosts"][1]), e["bandwidth"], e["latency"]) for e in document["links"]]
    return Profile(
        place,
        document["network"],
        document["device"],
        document["threads"],
        document["call_s"],
        layers,
        {entry["name"]: entry["reason"] for entry in document["unmeasured"]},
        tuple(links),
        {target: RuntimeCosts(**costs) for target, costs in document.get("runtime", {}).items()},
        document.get("whole_s"),
        document.get("weight_s", 0.0),
        document.get("read_s", 0.0),
        document.get("cold_s", 0.0),
    )


def _parse_layer(entry: Mapping[str, Any], place: str) -> LayerProfile:
    keys = ("cut", "size", "flops", "moved", "seconds", "low", "high")
    if all(one["cut"] != "whole" for one in entry["measurements"]):
        raise DicompilerError(f"{place}.measurements: the whole layer is missing: measure it anew")
    measured = tuple(PieceMeasurement(*(one[key] for key in keys)) for one in entry["measurements"])
    return LayerProfile(entry["signature"], entry["kind"], tuple(entry["names"]), measured)


def load_profile(path: str | Path) -> Profile:
    """Reads and checks a profile file."""
    from dicompiler.base.schema import load_json

    return parse_profile(load_json(path), str(path))


@dataclass(frozen=True)
class ProfileSet:
    """Several profiles, one for each kind of device. others: the first holds for devices that none is of."""

    profiles: tuple[Profile, ...]
    others: bool = False

    @classmethod
    def load(cls, files: Sequence[str], others: bool, force: bool = False) -> ProfileSet:
        """Reads all files. DicompilerError for one that is missing, wrong, or without a measured layer, and unless
        `force` for one that was measured on a busy host."""
        profiles = tuple(load_profile(file) for file in files)
        for profile in profiles:
            if not profile.layers:
                raise DicompilerError(f"{profile.place}: no layer has been measured yet: run its package on the device")
            if profile.busy_message and not force:
                raise DicompilerError(f"{profile.busy_message}, or take it as it is (force=true)")
        return cls(profiles, others)

    def runtime_costs(self, device: Device, scaled: RuntimeCosts, target: str) -> RuntimeCosts:
        """What was measured of a target's runtime on `device`, and what was not as in `scaled`: TLS, what leaves
        together and in which order, and the ends of a frame; of older files slices too, or all, which is said once for
        a file that holds for the device."""
        profile = self._find(device)
        if profile is None:
            return scaled
        if target not in profile.runtime_costs:
            _warn_unmeasured(profile.place, target, "costs of the runtime")
            return replace(scaled, cold_call=profile.cold_call_s)
        stated = {
            name: getattr(scaled, name) for name in ("per_io_byte", "per_tls_byte", "coalesced_share", "in_order")
        }
        known = replace(profile.runtime_costs[target], **stated)
        if not known.per_copy and scaled.per_copy:
            _warn_unmeasured(profile.place, target, "cost of slices in the runtime")
            known = replace(known, per_copy=scaled.per_copy)
        return replace(known, cold_call=profile.cold_call_s)

    def _find(self, device: Device) -> Profile | None:
        """The first profile that holds for `device`."""
        named = (p for p in self.profiles if fnmatch.fnmatchcase(device.name, p.device))
        return next(named, self.profiles[0] if self.others else None)

    def for_device(self, layers: LayerGraph, device: Device) -> Profile:
        """The first profile that holds for `device`. DicompilerError, naming both, where none does, and where it is of
        another network than `layers`."""
        profile = self._find(device)
        if profile is None:
            known = ", ".join(f"{p.place} of {p.device!r}" for p in self.profiles)
            raise DicompilerError(
                f"profile: none is of device {device.name!r} (there is {known}): measure on it with "
                f"--device {device.name}, or take the first one for all (others=true)"
            )
        digest = network_digest(layers)
        if profile.model_digest != digest:
            raise DicompilerError(
                f"{profile.place}: it is of another network: measured was {profile.model_digest[:12]}, this one is "
                f"{digest[:12]} (structural digests): make it anew with 'dicompiler profile'"
            )
        return profile


@cache
def _warn_unmeasured(place: str, target: str, what: str) -> None:
    log.warning(
        "%s: it has no %s of %s: what the target states is taken, scaled for the device: "
        "make it anew with 'dicompiler profile --target %s'",
        place,
        what,
        target,
        target,
    )


def layer_kind(layer: Layer) -> str:
    """What kind a layer is of: its anchor's operator, with "Group" before it (GroupConv) for a convolution in groups,
    depthwise ones too, whose operations take longer."""
    anchor = layer.nodes[layer.anchor]
    groups = anchor.attributes.get("group")
    return f"Group{anchor.op}" if isinstance(groups, int) and groups > 1 else anchor.op


@memoized
def layer_signature(layers: LayerGraph, layer: Layer) -> str:
    """A digest of all that a layer's time depends on but the device: operators, attributes, types and shapes, and how
    its nodes hang together; names and values of weights are not in it. 64 hexadecimal digits."""
    place: dict[str, str] = {name: f"in {i}" for i, name in enumerate(layer.inputs)}
    rows = []
    for i, node in enumerate(layer.nodes):
        inputs = [_input_entry(place.get(name, ""), layers.tensors[name]) if name else None for name in node.inputs]
        place |= {name: f"node {i} {k}" for k, name in enumerate(node.outputs)}
        outputs = [_tensor_entry(layers.tensors[name]) if name else None for name in node.outputs]
        attributes = {key: _to_json(value) for key, value in sorted(node.attributes.items())}
        rows.append([node.domain, node.op, node.opset, attributes, inputs, outputs])
    left = [place[name] for name in layer.outputs]
    return _digest([rows, layer.anchor, bool(layer.whole_reason), left])


@memoized
def network_digest(layers: LayerGraph) -> str:
    """A digest of the layers' names, signatures and connections: the same for a retrained network."""
    rows = [[layer.name, layer_signature(layers, layer), layer.inputs, layer.outputs] for layer in layers.layers]
    return _digest([rows, layers.inputs, layers.outputs])


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def _tensor_entry(tensor: TensorInfo) -> list[Any]:
    return [tensor.dtype, tensor.shape]


def _input_entry(place: str, tensor: TensorInfo) -> list[Any]:
    """Where it comes from, type and shape; of a small constant of whole numbers (a shape, axes) the values too."""
    whole = tensor.value is not None and tensor.value.dtype.kind in "iub"
    value = tensor.value.tolist() if tensor.value is not None and whole else None
    return ["constant" if tensor.is_constant else place, *_tensor_entry(tensor), value]


def _to_json(value: Any) -> Any:
    """An attribute as JSON can hold it; tensors and graphs as their bytes."""
    if isinstance(value, list | tuple):
        return [_to_json(one) for one in value]
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "SerializeToString"):
        return value.SerializeToString(deterministic=True).hex()
    return value
