"""Validation of a plan against a model's layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dicompiler.base.errors import DicompilerError, did_you_mean
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.random_ops import random_layers
from dicompiler.ir.regions import Region, contains, full_region, intersect, is_empty
from dicompiler.partition.bounds_inference import align_region, cuttable_axes, output_shape, reduction_length


def check_plan(layers: LayerGraph, plan: Plan) -> None:
    """Raise DicompilerError for the first rule that a plan violates.

    The next step, routing, checks that each region that is read is also computed.
    """
    if not plan.source or not plan.sink:
        raise DicompilerError("plan: source and sink must each name at least one device")
    _check_replicas(plan)
    if layers.states and (plan.replicas or plan.failures):
        key, option = ("replicas", "strategy") if plan.replicas else ("failures", "tolerate-failures")
        raise DicompilerError(
            f"plan: {key}: state {layers.states[0][0]!r} is kept on its device, and other devices do not have "
            f"it: remove '{key}' (--{option}), or use no states (--state none)"
        )
    for name in plan.layers:
        if name not in layers.layer_by_name:
            raise DicompilerError(
                f"plan: layers.{name}: the model has no such layer{did_you_mean(name, layers.layer_by_name)}: "
                "use a plan of this model"
            )
    random = random_layers(layers)
    for layer in layers.layers:
        parts = plan.layers.get(layer.name)
        if not parts:
            raise DicompilerError(f"plan: layers.{layer.name}: missing: give every layer at least one part")
        if len(parts) > 1 and layer.name in random:
            fault = f"{random[layer.name].op} draws different random numbers in each of its {len(parts)} parts"
            raise DicompilerError(f"plan: layers.{layer.name}: {fault}: give the layer to one device")
        for i, part in enumerate(parts):
            _check_part(layers, layer, part, f"plan: layers.{layer.name}[{i}]")
        _check_merge(layers, layer, parts)
    for i, failure in enumerate(plan.failures):
        with failure_plan_in_errors(plan, failure.failed):
            if frozenset(failure.failed) in [frozenset(other.failed) for other in plan.failures[:i]]:
                raise DicompilerError("plan: failed: two entries name the same devices: remove one")
            if failed_devices := [name for name in failure.plan.devices if name in failure.failed]:
                device = failed_devices[0]
                fault = f"the plan uses {device!r}, which is one of the failed devices"
                raise DicompilerError(f"plan: {fault}: give the parts of {device!r} to other devices")
            check_plan(layers, failure.plan)


@contextmanager
def failure_plan_in_errors(plan: Plan, failed: tuple[str, ...]) -> Iterator[None]:
    """Add the place of a failure plan ("failures[0]") to the DicompilerErrors of the block.

    `failed` are the failed devices of the failure plan. If it is empty, errors are not changed.
    """
    try:
        yield
    except DicompilerError as error:
        if not failed:
            raise
        place = f"plan: failures[{[failure.failed for failure in plan.failures].index(failed)}]: "
        raise type(error)(place + str(error).removeprefix("plan: ")) from None


def _check_replicas(plan: Plan) -> None:
    """Check that the replicas rename only devices of the plan, and no two devices to the same one.

    A replica is the plan with some devices replaced (renamed); the frames of a stream use the replicas in turn.
    """
    devices = dict.fromkeys(part.device for parts in plan.layers.values() for part in parts)
    names = [*plan.source, *devices, *plan.sink]
    for i, renaming in enumerate(plan.replicas):
        for name in renaming:
            if name not in names:
                fault = f"the plan uses no device {name!r}{did_you_mean(name, names)}"
                raise DicompilerError(f"plan: replicas[{i}]: {fault}: a replica can replace only devices of the plan")
        old_names: dict[str, str] = {}
        for name in dict.fromkeys([*devices, *renaming]):
            new = renaming.get(name, name)
            if new in old_names:
                fault = f"{old_names[new]!r} and {name!r} both become {new!r}"
                raise DicompilerError(f"plan: replicas[{i}]: {fault}: map each device of the plan to another device")
            old_names[new] = name


def _check_part(layers: LayerGraph, layer: Layer, part: Part, place: str) -> None:
    if layer.whole_reason:
        shape = layers.tensors[layer.output].shape
        is_whole = part.region is None or (shape is not None and part.region == full_region(shape))
        if part.reduce is not None or not is_whole:
            raise DicompilerError(
                f"{place}: this layer cannot be split ({layer.whole_reason}): set its region to 'all', omit 'reduce'"
            )
        return
    shape = output_shape(layers, layer)
    region = full_region(shape) if part.region is None else part.region
    if len(region) != len(shape):
        fault = f"{len(region)} intervals for an output of rank {len(shape)} {shape}"
        raise DicompilerError(f"{place}.region: {fault}: give one interval for each axis")
    if is_empty(region) or not contains(full_region(shape), region):
        fault = f"{_format_intervals(region)} is empty or outside the layer's output {shape}"
        raise DicompilerError(f"{place}.region: {fault}: give intervals within the output")
    allowed = cuttable_axes(layers, layer)
    for axis, interval in enumerate(region):
        if interval != (0, shape[axis]) and axis not in allowed:
            axes = f"only the axes {', '.join(map(str, allowed))}" if allowed else "none of its axes"
            raise DicompilerError(f"{place}.region: axis {axis} of this layer cannot be cut: cut {axes}")
    if part.reduce is None:
        return
    extent = reduction_length(layers, layer)
    if extent is None:
        op = layer.nodes[layer.anchor].op
        fault = f"this {op} has no input channels to sum over (it has groups, or no weights)"
        raise DicompilerError(f"{place}.reduce: {fault}: remove 'reduce'")
    if not 0 <= part.reduce[0] < part.reduce[1] <= extent:
        fault = f"{list(part.reduce)} is empty or outside 0..{extent}"
        raise DicompilerError(f"{place}.reduce: {fault}: give a range of input channels")


def _check_merge(layers: LayerGraph, layer: Layer, parts: Sequence[Part]) -> None:
    """Raise DicompilerError unless the ranges of the partial sums cover the reduction axis exactly once."""
    partials = [part for part in parts if part.reduce is not None]
    if not partials:
        return
    whole = full_region(output_shape(layers, layer))
    mergers = [align_region(layers, layer, part.region or whole) for part in parts if part.reduce is None]
    if not mergers:
        raise DicompilerError(
            f"plan: layers.{layer.name}: all parts are partial sums, and no part merges them: append a part "
            'without \'reduce\' (for instance {"device": …, "region": "all"})'
        )
    extent = reduction_length(layers, layer)
    for region in mergers:
        covered, requirement = 0, f"they must cover 0..{extent} for the region {_format_intervals(region)}"
        aligned = ((part.reduce, align_region(layers, layer, part.region or whole)) for part in partials)
        for start, stop in sorted({reduce for reduce, of in aligned if reduce and intersect(of, region) is not None}):
            if start != covered:
                fault = f"{'overlap' if start < covered else 'leave a gap'} at {min(covered, start)}"
                raise DicompilerError(
                    f"plan: layers.{layer.name}: reduce ranges {fault}, but {requirement} exactly once"
                )
            covered = stop
        if covered != extent:
            raise DicompilerError(f"plan: layers.{layer.name}: reduce ranges end at {covered}, but {requirement}")


def _format_intervals(region: Region) -> str:
    return str([list(interval) for interval in region])
