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
from typing import Any, NamedTuple

from dicompiler.base.errors import DicompilerError
from dicompiler.base.memoize import Memoizing, memoized
from dicompiler.base.units import format_seconds
from dicompiler.cost.cost_model import LocalBytes
from dicompiler.cost.op_counts import count_operations
from dicompiler.cost.piecewise_linear import TimeCurve
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.ir.cluster import DEFAULT_ENGINE, Device, Link, engine_name
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.operator_rule import TensorInfo
from dicompiler.ir.plan import LayerShare
from dicompiler.ir.regions import full_region
from dicompiler.partition.bounds_inference import output_shape

log = logging.getLogger("dicompiler")

MAX_MEDIAN_TO_MIN = 2.0
"""Largest ratio of an idle host: the sum of the median times of all layers, divided by that of the shortest times.

A larger ratio shows that other processes slowed down the measurement.
"""
MIN_COMPUTE_FACTOR, MAX_COMPUTE_FACTOR = 0.25, 4.0
"""Limits of the factor by which layers compute longer in the whole network than alone.

Times without transfers are differences of measurements, so they are inexact if transfers take most of the time.
"""
Cut = str
"""The way in which a measured piece is cut from its layer.

"whole": not cut. "axis 2": a range of this output axis. "reduce": a partial sum over a range of the reduction axis.
"merge": an addition of partial sums; the size is their number.
"""


def axis_cut(axis: int) -> Cut:
    return f"axis {axis}"


@dataclass(frozen=True)
class PieceMeasurement:
    """The measured times of one piece of a layer.

    Attributes:
        cut: How the piece is cut from the layer: "whole" (not cut), "axis 2" (a range of this output axis), "reduce" (a
            partial sum) or "merge" (the addition of partial sums).
        size: Extent of the piece along the cut axis (rows, channels), or the number of partial sums.
        flops: Floating-point operations of the piece.
        moved_bytes: Bytes that the piece reads and writes.
        median_s: Median seconds of one run, including the call of onnxruntime.
        min_s: Seconds of the shortest run.
        max_s: Seconds of the longest run.
    """

    cut: Cut
    size: int
    flops: int
    moved_bytes: int
    median_s: float
    min_s: float
    max_s: float


def is_whole_layer(layers: LayerGraph, layer: Layer, share: LayerShare) -> bool:
    everything = share.region is None or share.region == full_region(output_shape(layers, layer))
    return everything and share.reduce is None and not share.merge_count


@dataclass(frozen=True)
class LayerProfile:
    """The measurements of all layers that have the same signature and therefore take the same time.

    Attributes:
        signature: Digest of operators, attributes, types, shapes and connections.
        kind: Main operator of the layers, such as "Conv"; "GroupConv" if it has channel groups.
        names: Names of the layers.
        measurements: Times of the whole layer and of pieces of it.
    """

    signature: str
    kind: str
    names: tuple[str, ...]
    measurements: tuple[PieceMeasurement, ...]

    @property
    def whole(self) -> PieceMeasurement:
        return next(piece for piece in self.measurements if piece.cut == "whole")


@dataclass(frozen=True)
class EngineMeasurements:
    """The times of a network's layers in an engine other than onnxruntime.

    Attributes:
        call_s: Seconds of a call that computes nothing; every measurement includes it.
        whole_model_s: Seconds of the whole network in one call; None if the engine cannot compute it as a whole.
        layers: Times of pieces by layer signature; layers that the engine cannot compute are missing.
        cold_costs: Additional seconds in a frame, in which layers find less data in caches: `weight_byte_s`,
            `read_byte_s` and `cold_call_s` of `Profile`, by name. Those that are missing are the same as with
            onnxruntime.
        transfers: Seconds of a call that computes almost nothing, by the bytes of the tensor that it reads and returns.
            Every measurement includes such transfers.
    """

    call_s: float
    whole_model_s: float | None
    layers: Mapping[str, tuple[PieceMeasurement, ...]]
    cold_costs: Mapping[str, Any] = field(default_factory=dict)
    transfers: Mapping[int, float] = field(default_factory=dict)

    def has_whole_layer(self, signature: str) -> bool:
        """Return True if the engine has computed the whole layer with this signature."""
        return any(piece.cut == "whole" for piece in self.layers.get(signature, ()))


# With `eq=False`, profiles are hashed by identity. This is fast, and memoized methods hash the profile at each call.
@dataclass(frozen=True, eq=False)
class Profile(Memoizing):
    """The content of a profile file.

    Attributes:
        place: Path of the file, for messages.
        model_digest: Structural digest of the network.
        device: Name or name pattern of the devices for which the profile is valid.
        threads: Number of threads.
        call_s: Seconds of a call that computes nothing; every measurement includes it.
        layers: Measurements by layer signature.
        unmeasured: Reasons why layers could not be measured, by layer name.
        links: Measured links between hosts.
        runtime_costs: Measured costs of targets' runtimes in seconds, by target name and field of `RuntimeCosts`. A
            cost that was not measured is missing.
        unmeasured_runtimes: Reasons why targets' runtimes could not be measured, by target name.
        whole_model_s: Seconds of the whole network in one session, including the call; None if not measured.
        weight_byte_s: Additional seconds for each byte of weights in a frame, in which weights are read from memory and
            not from caches.
        read_byte_s: Additional seconds for each byte of other inputs in a frame, for the same reason.
        cold_call_s: Additional seconds of a call in a frame, if the device has computed other layers since the previous
            call.
        transfers: Seconds of a call that computes almost nothing, by the bytes of the tensor that it reads and returns;
            empty for onnxruntime.
        engines: Measurements of engines other than onnxruntime, by name.
        engine: Name of the engine that `call_s`, `layers` and `whole_model_s` were measured with. Layers that it does
            not compute have the times of onnxruntime.
    """

    place: str
    model_digest: str
    device: str
    threads: int
    call_s: float
    layers: Mapping[str, LayerProfile]
    unmeasured: Mapping[str, str]
    links: tuple[Link, ...]
    runtime_costs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    unmeasured_runtimes: Mapping[str, str] = field(default_factory=dict)
    whole_model_s: float | None = None
    weight_byte_s: float = 0.0
    read_byte_s: float = 0.0
    cold_call_s: float = 0.0
    transfers: Mapping[int, float] = field(default_factory=dict)
    engines: Mapping[str, EngineMeasurements] = field(default_factory=dict)
    engine: str = DEFAULT_ENGINE

    @memoized
    def of_engine(self, engine: str) -> Profile:
        """Return the profile with the times of an engine.

        Layers and pieces that were not measured with the engine keep the times of onnxruntime.
        """
        # The engine's name may have options, such as a precision. Profiles have only fp32 times, which are used for all
        # precisions.
        engine = engine_name(engine)
        if engine not in self.engines:
            return self
        measured = self.engines[engine]
        layers = {
            signature: _with_engine_pieces(layer, measured.layers.get(signature, ()), measured.call_s - self.call_s)
            for signature, layer in self.layers.items()
        }
        return replace(
            self,
            call_s=measured.call_s,
            whole_model_s=measured.whole_model_s,
            layers=layers,
            transfers=measured.transfers,
            engine=engine,
            **measured.cold_costs,
        )

    def samples(self) -> Iterator[tuple[str, float, float, float]]:
        """Yield the layer kind, FLOPs, bytes and seconds (without those of an empty call) of each measured piece."""
        for layer in self.layers.values():
            for piece in layer.measurements:
                yield layer.kind, piece.flops, piece.moved_bytes, max(0.0, piece.median_s - self.call_s)

    @cached_property
    def byte_s(self) -> float:
        """Smallest ratio of seconds to moved bytes (bytes read and written) among all measured pieces."""
        return min((seconds / nbytes for _, _, nbytes, seconds in self.samples() if nbytes > 0 < seconds), default=0.0)

    def whole_layer_s(self, signature: str) -> float:
        """Return the seconds of a whole layer without those of an empty call; KeyError if it was not measured."""
        return max(0.0, self.layers[signature].whole.median_s - self.call_s)

    @cached_property
    def isolated_s(self) -> float:
        """Sum of the seconds of all layers, each measured on its own, without those of empty calls."""
        return sum(len(layer.names) * self.whole_layer_s(layer.signature) for layer in self.layers.values())

    @memoized
    def unmeasured_layers(self, layers: LayerGraph) -> Mapping[str, Layer]:
        return {layer.name: layer for layer in layers.layers if layer_signature(layers, layer) not in self.layers}

    def seconds_in_frame(
        self,
        layers: LayerGraph,
        layer: Layer,
        share: LayerShare,
        isolated_s: float,
        local: LocalBytes,
        unmeasured_s: float,
    ) -> float:
        """Return the seconds of a share (a piece of a layer) in a frame, given those that it takes when it runs alone.

        In a frame, weights and inputs are read from memory, which takes longer than from caches. On the other hand,
        layers of one call exchange tensors faster, because engines fuse layers and keep tensors in their own layout. If
        the profile has the times of transfers, they are counted only for the bytes that enter or leave the call.
        Otherwise, each byte that the share reads from another layer of the call saves `fusing_s`.

        Args:
            layers: The layers of the network.
            layer: Layer of which the share is a part.
            share: The share of the layer.
            isolated_s: Seconds of the share if it runs repeatedly on its own.
            local: Bytes that the share exchanges with other layers in the same call.
            unmeasured_s: Predicted seconds of all layers that were not measured.
        """
        wait_s = self._memory_wait_s(layers, layer, share, local.inputs)
        if self.transfers and not self.engines[self.engine].has_whole_layer(layer_signature(layers, layer)):
            # onnxruntime computes the layer in a call of its own, so the layer's times contain no transfers.
            return isolated_s + wait_s
        if self.transfers:
            transfers = self._transfer_times(layers, layer, share)
            compute_s = max(0.0, isolated_s - transfers.total_s) * self._compute_factor(layers, unmeasured_s)
            return wait_s + compute_s + transfers.remaining_s(local)
        saved_byte_s = 0.0
        if local.inputs:
            saved_byte_s = self.fusing_s(layers, unmeasured_s) * self._saved_fraction(layers, layer, share, isolated_s)
        return max(0.0, isolated_s + wait_s - saved_byte_s * local.inputs)

    @cached_property
    def _transfer_curve(self) -> TimeCurve:
        """Seconds in which a call reads a tensor from the caller's memory or writes it there, by the tensor's bytes."""
        # A measured call reads the tensor and writes it. Both are assumed to take equally long.
        return TimeCurve.fit({nbytes: (seconds - self.call_s) / 2 for nbytes, seconds in self.transfers.items()})

    @memoized
    def _transfer_times(self, layers: LayerGraph, layer: Layer, share: LayerShare) -> _TransferTimes:
        counts = count_operations(layers, layer, *share)
        sizes = counts.input_bytes, counts.moved_bytes - counts.weight_bytes - counts.input_bytes
        times = [self._transfer_curve.seconds_at(nbytes) if nbytes else 0.0 for nbytes in sizes]
        return _TransferTimes(*sizes, *times)

    @memoized
    def _compute_factor(self, layers: LayerGraph, unmeasured_s: float) -> float:
        """Return the factor by which layers compute longer in the whole network than alone, without transfers.

        It is at least MIN_COMPUTE_FACTOR and at most MAX_COMPUTE_FACTOR, and 1 if the whole network was not measured.
        `unmeasured_s` is the predicted part of the layers without measurement.
        """
        if self.whole_model_s is None:
            return 1.0
        compute_s, other_s = 0.0, self.call_s + unmeasured_s
        for layer in layers.layers:
            if (signature := layer_signature(layers, layer)) in self.layers:
                transfers = self._transfer_times(layers, layer, LayerShare())
                local = LocalBytes.of_whole_layer(layers, layer)
                compute_s += max(0.0, self.whole_layer_s(signature) - transfers.total_s)
                other_s += transfers.remaining_s(local) + self._memory_wait_s(layers, layer, LayerShare(), local.inputs)
        factor = (self.whole_model_s - other_s) / compute_s if compute_s else 1.0
        return min(MAX_COMPUTE_FACTOR, max(MIN_COMPUTE_FACTOR, factor))

    def _saved_fraction(self, layers: LayerGraph, layer: Layer, share: LayerShare, isolated_s: float) -> float:
        """Return the fraction of `fusing_s` that a share saves for each byte: 1 for a whole layer.

        A share that takes less time for each input byte than its layer also saves less. For example, an engine that
        allocates memory for its outputs needs more time for each byte if they are large.
        """
        whole_s = self.whole_layer_s(layer_signature(layers, layer))
        share_bytes = count_operations(layers, layer, *share).input_bytes
        if not whole_s or not share_bytes:
            return 1.0
        return min(1.0, isolated_s / whole_s * count_operations(layers, layer).input_bytes / share_bytes)

    def _memory_wait_s(self, layers: LayerGraph, layer: Layer, share: LayerShare, local_input_bytes: int) -> float:
        """Return the additional seconds of a piece of a layer that reads data from memory instead of caches.

        `local_input_bytes` of its inputs are still in caches, because the same call has just computed them.
        """
        counts = count_operations(layers, layer, *share)
        read_bytes = max(0, counts.input_bytes - local_input_bytes)
        return self.weight_byte_s * counts.weight_bytes + self.read_byte_s * read_bytes

    @memoized
    def fusing_s(self, layers: LayerGraph, unmeasured_s: float) -> float:
        """Return the seconds saved for each byte that two layers exchange, if both run in one session.

        The predicted seconds of all layers, minus these savings, add up to those of the whole network. The result is
        negative if the network takes longer than the sum of its layers, and 0 if it is unknown. `unmeasured_s` is the
        part of the layers without measurement.
        """
        whole_s = max(0.0, (self.whole_model_s or 0.0) - self.call_s)
        if self.whole_model_s is None or 0 < whole_s <= unmeasured_s:
            return 0.0
        pieces = [
            (self.whole_layer_s(signature) + self._memory_wait_s(layers, layer, LayerShare(), local_bytes), local_bytes)
            for layer in layers.layers
            if (signature := layer_signature(layers, layer)) in self.layers
            for local_bytes in (LocalBytes.of_whole_layer(layers, layer).inputs,)
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
        """Ratio of the median seconds to the shortest seconds, over all layers; infinite if nothing was measured."""
        layers = self.layers.values()
        shortest_s = sum(len(layer.names) * layer.whole.min_s for layer in layers)
        return sum(len(layer.names) * layer.whole.median_s for layer in layers) / shortest_s if shortest_s else math.inf

    @property
    def busy_message(self) -> str:
        """Error message if the host was busy while the profile was measured; empty if it was idle."""
        if self.median_to_min <= MAX_MEDIAN_TO_MIN:
            return ""
        layers = sorted(
            self.layers.values(), key=lambda layer: len(layer.names) * (layer.whole.min_s - layer.whole.median_s)
        )
        examples = ", ".join(
            f"{layer.names[0]} {format_seconds(layer.whole.median_s)} against {format_seconds(layer.whole.min_s)}"
            for layer in layers[:3]
            if layer.whole.median_s > MAX_MEDIAN_TO_MIN * layer.whole.min_s
        )
        return (
            f"{self.place}: its host was busy: medians are {self.median_to_min:.3g} times the shortest times (allowed: "
            f"{MAX_MEDIAN_TO_MIN:g}; most of all {examples}): measure it again on an idle host"
        )

    @memoized
    def curve(self, signature: str, cut: Cut, extent: int | None = None) -> TimeCurve | None:
        """Return the seconds of a layer's pieces by their size, minus those of an empty call; None if not measured.

        Args:
            signature: Signature of the layer.
            cut: How the pieces are cut: "axis 2" (a range of this output axis), "reduce" (a partial sum) or "merge"
                (the addition of partial sums).
            extent: Size of the whole layer, which becomes the last point.
        """
        points = {m.size: m.median_s - self.call_s for m in self.layers[signature].measurements if m.cut == cut}
        if not points:
            return None
        return TimeCurve.fit(points | ({} if extent is None else {extent: self.whole_layer_s(signature)}))


class _TransferTimes(NamedTuple):
    """The times in which a call reads the inputs of a share (a piece of a layer) and writes its outputs.

    Attributes:
        input_bytes: Bytes of all inputs.
        output_bytes: Bytes of all outputs.
        inputs_s: Seconds to read the inputs.
        outputs_s: Seconds to write the outputs.
    """

    input_bytes: int
    output_bytes: int
    inputs_s: float
    outputs_s: float

    @property
    def total_s(self) -> float:
        return self.inputs_s + self.outputs_s

    def remaining_s(self, local: LocalBytes) -> float:
        """Return the seconds for the bytes that the share does not exchange with other layers in the same call."""
        sizes = self.input_bytes, self.output_bytes
        times = zip((self.inputs_s, self.outputs_s), sizes, local, strict=True)
        return sum(seconds * max(0.0, 1 - local_bytes / nbytes) for seconds, nbytes, local_bytes in times if nbytes)


def _with_engine_pieces(layer: LayerProfile, pieces: Sequence[PieceMeasurement], extra_call_s: float) -> LayerProfile:
    """Return a layer with the times of an engine, and those of onnxruntime for kinds of pieces without engine times.

    `extra_call_s`, the time of an empty call of the engine minus that of onnxruntime, is added to the times of
    onnxruntime, because the engine's empty call is later subtracted from all times.
    """
    cuts = {piece.cut for piece in pieces} if any(piece.cut == "whole" for piece in pieces) else set[Cut]()
    kept = [
        replace(piece, median_s=piece.median_s + extra_call_s, min_s=piece.min_s + extra_call_s)
        for piece in layer.measurements
        if piece.cut not in cuts
    ]
    return replace(layer, measurements=(*(piece for piece in pieces if piece.cut in cuts), *kept))


_MEASURED_COSTS = ("latency", "send", "receive", "per_byte", "call", "per_copy", "per_copied_byte")
"""Fields of `RuntimeCosts` that `dicompiler profile` measures, and that are never 0 on a real device."""
_COLD_COSTS = ("weight_byte_s", "read_byte_s", "cold_call_s")
"""Keys of the additional seconds in a frame, in a profile document and in its entries of engines."""
_SCALAR_KEYS = ("model_digest", "device", "threads", "call_s", "whole_model_s", *_COLD_COSTS)
"""Keys of a profile document that have the same names as fields of `Profile`."""


def parse_profile(document: Any, place: str) -> Profile:
    """Return the profile in a JSON document that was read from `place`.

    Raises:
        DicompilerError: The document does not match the schema.
    """
    from dicompiler.base.schema import validate

    validate(document, "profile", place)
    _check_runtime_costs(document.get("runtime_costs", {}), place)
    layers = {
        entry["signature"]: _parse_layer(entry, f"{place}: layers[{i}]") for i, entry in enumerate(document["layers"])
    }
    return Profile(
        place,
        layers=layers,
        unmeasured={entry["name"]: entry["reason"] for entry in document["unmeasured"]},
        links=tuple(
            Link((link["hosts"][0], link["hosts"][1]), link["bandwidth"], link["latency"]) for link in document["links"]
        ),
        runtime_costs=document.get("runtime_costs", {}),
        unmeasured_runtimes={entry["target"]: entry["reason"] for entry in document.get("unmeasured_runtimes", ())},
        engines={entry["name"]: _parse_engine(entry) for entry in document.get("engines", ())},
        **{key: document[key] for key in _SCALAR_KEYS if key in document},
    )


def _check_runtime_costs(costs_by_target: Mapping[str, Mapping[str, float]], place: str) -> None:
    """Raise DicompilerError if a measured cost of a target's runtime is 0, because no cost really is 0."""
    for target, costs in costs_by_target.items():
        zero = [name for name, value in costs.items() if name in _MEASURED_COSTS and not value]
        if zero:
            raise DicompilerError(
                f"{place}: runtime_costs.{target}: {', '.join(zero)}: 0 s cannot be a measured cost: measure the "
                f"device again on an idle host ('dicompiler profile --target {target}')"
            )


def _parse_engine(entry: Mapping[str, Any]) -> EngineMeasurements:
    layers = {layer["signature"]: _parse_pieces(layer["measurements"]) for layer in entry["layers"]}
    cold_costs = {key: entry[key] for key in _COLD_COSTS if key in entry}
    transfers = {transfer["nbytes"]: transfer["median_s"] for transfer in entry.get("transfers", ())}
    return EngineMeasurements(entry["call_s"], entry.get("whole_model_s"), layers, cold_costs, transfers)


def _parse_pieces(records: Sequence[Mapping[str, Any]]) -> tuple[PieceMeasurement, ...]:
    keys = ("cut", "size", "flops", "moved_bytes", "median_s", "min_s", "max_s")
    return tuple(PieceMeasurement(*(record[key] for key in keys)) for record in records)


def _parse_layer(entry: Mapping[str, Any], place: str) -> LayerProfile:
    if all(record["cut"] != "whole" for record in entry["measurements"]):
        raise DicompilerError(f"{place}.measurements: the time of the whole layer is missing: measure the device again")
    return LayerProfile(entry["signature"], entry["kind"], tuple(entry["names"]), _parse_pieces(entry["measurements"]))


def load_profile(path: str | Path) -> Profile:
    from dicompiler.base.schema import load_json

    return parse_profile(load_json(path), str(path))


@dataclass(frozen=True)
class ProfileSet:
    """Profiles of several kinds of devices.

    Attributes:
        profiles: The profiles.
        others: Whether the first profile is also used for devices that no profile names.
    """

    profiles: tuple[Profile, ...]
    others: bool = False

    @classmethod
    def load(cls, files: Sequence[str], others: bool, force: bool = False) -> ProfileSet:
        """Read profile files. With `others`, the first one is also used for devices that no profile names.

        Raises:
            DicompilerError: A file is missing or invalid, has no measured layer, or (without `force`) was measured on a
                busy host.
        """
        profiles = tuple(load_profile(file) for file in files)
        for profile in profiles:
            if not profile.layers:
                raise DicompilerError(
                    f"{profile.place}: no layer has been measured yet: run profile_run.py of the package on the device"
                )
            if profile.busy_message and not force:
                raise DicompilerError(f"{profile.busy_message}, or accept it (force=true)")
        return cls(profiles, others)

    def runtime_costs(self, device: Device, scaled: RuntimeCosts, target: str) -> RuntimeCosts:
        """Return the measured costs of a target's runtime on a device.

        `scaled`, the target's stated costs scaled to the device, supplies costs that were not measured.
        """
        profile = self._find(device)
        if profile is None:
            return scaled
        profile = profile.of_engine(device.engine)
        costs = profile.runtime_costs.get(target, {})
        if missing := [name for name in _MEASURED_COSTS if name not in costs and getattr(scaled, name)]:
            names = ", ".join(missing) if costs else "costs"
            _warn_unmeasured(profile.place, target, names, profile.unmeasured_runtimes.get(target, ""))
        measured: dict[str, Any] = {**costs, "cold_call": profile.cold_call_s}
        return replace(scaled, **measured)

    def _find(self, device: Device) -> Profile | None:
        named = (p for p in self.profiles if fnmatch.fnmatchcase(device.name, p.device))
        return next(named, self.profiles[0] if self.others else None)

    def for_device(self, layers: LayerGraph, device: Device) -> Profile:
        """Return the first profile that is valid for a device.

        Raises:
            DicompilerError: No profile is valid for the device, or the profile is of another network.
        """
        profile = self._find(device)
        if profile is None:
            names = ", ".join(f"{p.place} of {p.device!r}" for p in self.profiles)
            raise DicompilerError(
                f"profile: no profile is for device {device.name!r}; the profiles are {names}: measure the device with "
                f"--device {device.name}, or use the first profile for all devices (others=true)"
            )
        digest = network_digest(layers)
        if profile.model_digest != digest:
            raise DicompilerError(
                f"{profile.place}: the profile is of another network (structural digest {profile.model_digest[:12]} "
                f"instead of {digest[:12]}): measure this network with 'dicompiler profile'"
            )
        return profile.of_engine(device.engine)

    def has_engine(self, device: Device, engine: str) -> bool:
        profile = self._find(device)
        return profile is not None and (engine == DEFAULT_ENGINE or engine_name(engine) in profile.engines)

    def has_layer(self, layers: LayerGraph, layer: Layer, device: Device, engine: str) -> bool:
        """Return True if the profile of a device has the time of a whole layer in an engine."""
        profile, signature = self._find(device), layer_signature(layers, layer)
        if profile is None or signature not in profile.layers:
            return False
        if engine == DEFAULT_ENGINE:
            return True
        measured = profile.engines.get(engine_name(engine))
        return measured is not None and measured.has_whole_layer(signature)


@cache
def _warn_unmeasured(place: str, target: str, costs: str, reason: str) -> None:
    log.warning(
        "%s: not measured: %s of the runtime of target %s%s; the target's own costs are scaled to the device: "
        "measure the device again with 'dicompiler profile --target %s'",
        place,
        costs,
        target,
        f" ({reason})" if reason else "",
        target,
    )


@memoized
def layer_signature(layers: LayerGraph, layer: Layer) -> str:
    """Return a SHA-256 digest of all properties of a layer that its time depends on, except the device.

    It covers operators, attributes, types, shapes and connections, and the values of small integer constants, but no
    names and no other weight values.
    """
    sources: dict[str, str] = {name: f"in {i}" for i, name in enumerate(layer.inputs)}
    rows = []
    for i, node in enumerate(layer.nodes):
        inputs = [_input_entry(sources.get(name, ""), layers.tensors[name]) if name else None for name in node.inputs]
        sources |= {name: f"node {i} {k}" for k, name in enumerate(node.outputs)}
        tensors = [layers.tensors[name] if name else None for name in node.outputs]
        outputs = [None if tensor is None else [tensor.dtype, tensor.shape] for tensor in tensors]
        attributes = {key: _to_json(value) for key, value in sorted(node.attributes.items())}
        rows.append([node.domain, node.op, node.opset, attributes, inputs, outputs])
    output_sources = [sources[name] for name in layer.outputs]
    return _digest([rows, layer.anchor, bool(layer.whole_reason), output_sources])


@memoized
def network_digest(layers: LayerGraph) -> str:
    """Return a digest of the layers' names, signatures and connections, which does not depend on weights."""
    rows = [[layer.name, layer_signature(layers, layer), layer.inputs, layer.outputs] for layer in layers.layers]
    return _digest([rows, layers.inputs, layers.outputs])


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def _input_entry(source: str, tensor: TensorInfo) -> list[Any]:
    """Return the source, type, shape and small integer values of a node's input, for the signature of its layer.

    `source` says which input or node of the layer supplies the tensor.
    """
    has_integers = tensor.value is not None and tensor.value.dtype.kind in "iub"
    value = tensor.value.tolist() if tensor.value is not None and has_integers else None
    return ["constant" if tensor.is_constant else source, tensor.dtype, tensor.shape, value]


def _to_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_to_json(element) for element in value]
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "SerializeToString"):
        return value.SerializeToString(deterministic=True).hex()
    return value
