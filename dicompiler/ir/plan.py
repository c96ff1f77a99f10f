"""Plan: the assignment of regions of each layer's output to devices, chosen by a strategy or written by a user.

Plans are stored as JSON (schema: `base/schemas/plan.schema.json`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from dicompiler.base.errors import DicompilerError
from dicompiler.base.schema import format_key_path, load_json, validate
from dicompiler.ir.regions import Interval, Region
from dicompiler.ir.wire_dtype import WireFormat, wire_format_from_json, wire_format_to_json

PLAN_FORMAT = "dicompiler.plan/2"

Json = Mapping[str, Any]


class LayerShare(NamedTuple):
    """Piece of a layer that is not yet assigned to a device; by default the whole layer.

    Attributes:
        region: Region of the layer's output (one interval per axis); None: all of it.
        reduce: Range of the reduction axis (input channels), if the piece is a partial sum.
        merge_count: Number of partial sums of other pieces that this piece adds up; 0: none.
    """

    region: Region | None = None
    reduce: Interval | None = None
    merge_count: int = 0


@dataclass(frozen=True)
class Part:
    """Piece of a layer on one device.

    Attributes:
        device: Name of the device.
        region: Region of the layer's output that the part computes (one interval per axis); None: all of it.
        reduce: Range of the reduction axis (input channels), if the part computes a partial sum.
        lane: Number of a group of the device's parts. The device computes one group (lane) after another. This saves
            memory, because only the tensors of one lane are stored at a time. The results of a lane are sent while the
            next one is computed.
    """

    device: str
    region: Region | None = None
    reduce: Interval | None = None
    lane: int = 0


@dataclass(frozen=True)
class FailurePlan:
    """Plan that is used while exactly the devices in `failed` are down.

    Attributes:
        failed: Names of the failed devices.
        plan: A plan that uses none of these devices.
    """

    failed: tuple[str, ...]
    plan: Plan


@dataclass(frozen=True)
class Plan:
    """Parts of all layers, sources and sinks; optionally replicas and failure plans.

    Attributes:
        layers: By layer name, the parts (pieces of the layer on devices).
        source: Names of the devices that have every model input in full.
        sink: Names of the devices that receive every model output in full.
        model_digest: Structural digest of the model that the plan was made for; '' in a plan written by hand.
        note: Reason why the strategy may return another plan for the same problem: measurements or a time limit.
        replicas: For each of the n replicas, a mapping from the name of a device in `layers` to the name of the device
            that replaces it. Devices without an entry, sources and sinks are not replaced. Frame i of a stream uses
            replica i mod n. (): all frames use the plan itself.
        wire_format: Element types in which tensors are sent.
        failures: Plans that are used while certain devices are down. Each gets the digest, the wire format and the
            engines of this plan, and cannot have failure plans of its own.
        engines: Name of the engine of each device that does not compute with onnxruntime, by device name.
        chosen_strategy: Name of the strategy that made the plan, if another strategy chose it among several plans. It
            is not stored in files.
    """

    layers: Mapping[str, tuple[Part, ...]]
    source: tuple[str, ...]
    sink: tuple[str, ...]
    model_digest: str = ""
    note: str = ""
    replicas: tuple[Mapping[str, str], ...] = ()
    wire_format: WireFormat = field(default_factory=WireFormat)
    failures: tuple[FailurePlan, ...] = ()
    engines: Mapping[str, str] = field(default_factory=dict)
    chosen_strategy: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.failures:
            shared: Json = {
                "model_digest": self.model_digest,
                "wire_format": self.wire_format,
                "engines": self.engines,
            }
            failures = [
                FailurePlan(entry.failed, replace(entry.plan, **shared, note="", failures=()))
                for entry in self.failures
            ]
            object.__setattr__(self, "failures", tuple(failures))

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of all devices that the plan, its replicas (copies on other devices) or its failure plans use.

        They are in the order of first mention: sources, devices that compute layers, sinks, devices of failure plans.
        """
        unrenamed = tuple(dict.fromkeys(part.device for parts in self.layers.values() for part in parts))
        computing = [renaming.get(name, name) for renaming in self.replicas or ({},) for name in unrenamed]
        in_failures = [name for failure in self.failures for name in failure.plan.devices]
        return tuple(dict.fromkeys([*self.source, *computing, *self.sink, *in_failures]))

    @property
    def roles(self) -> tuple[Plan, ...]:
        """Plan of each role (one way in which the devices can compute a frame).

        The order is: the replicas (copies on other devices) of this plan, or else the plan itself; then the failure
        plans. The returned plans themselves have no replicas and no failure plans.
        """
        plans = (self, *(failure.plan for failure in self.failures))
        return tuple(role_plan for plan in plans for role_plan in plan.replica_roles)

    @property
    def role_failures(self) -> tuple[tuple[str, ...], ...]:
        """Names of the failed devices for which each plan in `roles` is used; () for the plans without a failure."""
        entries = (FailurePlan((), self), *self.failures)
        return tuple(entry.failed for entry in entries for _ in entry.plan.replica_roles)

    @property
    def replica_roles(self) -> tuple[Plan, ...]:
        """Plan of each of the n replicas (copies on other devices); without replicas, the plan itself.

        While no device is down, frame i uses entry i mod n.
        """
        if not self.replicas:
            return (replace(self, failures=()) if self.failures else self,)
        return tuple(self._rename_devices(renaming) for renaming in self.replicas)

    def _rename_devices(self, renaming: Mapping[str, str]) -> Plan:
        layers = {
            name: tuple(replace(part, device=renaming.get(part.device, part.device)) for part in parts)
            for name, parts in self.layers.items()
        }
        return replace(self, layers=layers, replicas=(), failures=())


def _part_to_json(part: Part) -> dict[str, Any]:
    region = "all" if part.region is None else [list(interval) for interval in part.region]
    reduce = {} if part.reduce is None else {"reduce": list(part.reduce)}
    return {"device": part.device, "region": region, **reduce, **({"lane": part.lane} if part.lane else {})}


def _part_from_json(record: Mapping[str, Any]) -> Part:
    region = None if record["region"] == "all" else tuple((start, stop) for start, stop in record["region"])
    start, stop = record.get("reduce", (0, 0))
    return Part(record["device"], region, (start, stop) if "reduce" in record else None, record.get("lane", 0))


def plan_from_json(document: Any, place: str = "plan") -> Plan:
    """Return the plan in a JSON document. Error messages start with `place`, such as the file name.

    Raises:
        DicompilerError: The document violates the schema. The message names the key and the allowed values.
    """
    validate(document, "plan", place)
    failures = [FailurePlan(tuple(entry["failed"]), _plan_from_record(entry)) for entry in document.get("failures", ())]
    return _plan_from_record(document, tuple(failures))


def _plan_from_record(document: Mapping[str, Any], failures: tuple[FailurePlan, ...] = ()) -> Plan:
    return Plan(
        {name: tuple(_part_from_json(r) for r in parts) for name, parts in document["layers"].items()},
        tuple(document["source"]),
        tuple(document["sink"]),
        document.get("model_digest", ""),
        document.get("note", ""),
        tuple(document.get("replicas", ())),
        wire_format_from_json(document),
        failures,
        document.get("engines", {}),
    )


def load_plan(path: str | Path) -> Plan:
    """Return the plan in a JSON file.

    Raises:
        DicompilerError: The file cannot be read or violates the schema.
    """
    return plan_from_json(load_json(path), str(path))


def load_user_plan(path: str | Path) -> Plan:
    """Return the plan in a file that a user may have written.

    Args:
        path: The JSON file of the plan.

    Returns:
        The plan.

    Raises:
        DicompilerError: The file cannot be read, violates the schema, or lists a part twice, which is always a mistake.
    """
    plan = load_plan(path)
    for name, parts in plan.layers.items():
        for i, part in enumerate(parts):
            if part in parts[:i]:
                place = format_key_path(("layers", name, i))
                raise DicompilerError(f"{path}: {place}: the part is listed twice: remove one")
    return plan


@contextmanager
def plan_file_in_errors(source: str | Path | Plan | None) -> Iterator[None]:
    """In DicompilerErrors of the `with` block, replace the prefix "plan: " by the name of the plan's file.

    Args:
        source: The file of the plan. Errors are not changed if it is a Plan or None.

    Raises:
        DicompilerError: The error of the block, with the name of the file.
    """
    try:
        yield
    except DicompilerError as error:
        if not isinstance(source, str | Path) or not str(error).startswith("plan: "):
            raise
        raise DicompilerError(f"{source}: {str(error).removeprefix('plan: ')}") from error


def plan_to_text(plan: Plan) -> str:
    details = {"model_digest": plan.model_digest, "note": plan.note}
    last = wire_format_to_json(plan.wire_format) | {"engines": dict(plan.engines)}
    text = _format_plan(plan, {"format": PLAN_FORMAT}, details, last)
    if plan.failures:
        failures = [_format_plan(failure.plan, {"failed": list(failure.failed)}) for failure in plan.failures]
        text = text[:-1] + ',\n "failures": [\n' + ",\n".join(failures) + "]}"
    return text + "\n"


def _format_plan(plan: Plan, first: Json, before_replicas: Json | None = None, last: Json | None = None) -> str:
    """Return the JSON text of a plan or of a failure plan, with one line per part.

    Args:
        plan: The plan.
        first: JSON entries before the sources.
        before_replicas: JSON entries directly before the replicas, without the empty ones.
        last: JSON entries directly after the replicas, without the empty ones.
    """
    replicas = [dict(renaming) for renaming in plan.replicas]
    optional = {**(before_replicas or {}), "replicas": replicas, **(last or {})}
    document = {**first, "source": list(plan.source), "sink": list(plan.sink)}
    head = json.dumps(document | {key: value for key, value in optional.items() if value}, indent=1)[:-2]
    texts = {name: [json.dumps(_part_to_json(part)) for part in parts] for name, parts in plan.layers.items()}
    rows = ["  {}: [\n   {}]".format(json.dumps(name), ",\n   ".join(parts)) for name, parts in texts.items()]
    return head + ',\n "layers": {\n' + ",\n".join(rows) + "}}"
