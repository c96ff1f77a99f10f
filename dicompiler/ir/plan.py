"""Plan: which device computes which region of which layer's output.

Strategies return it; it is stored as JSON.

The schema is `base/schemas/plan.schema.json`. `partition.plan_validation` checks a plan against a model's layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from dicompiler.base.schema import load_json, validate
from dicompiler.ir.regions import Interval, Region
from dicompiler.ir.wire_dtype import WireFormat, wire_format_from_json, wire_format_to_json

FORMAT = "dicompiler.plan/2"

Json = Mapping[str, Any]


class LayerShare(NamedTuple):
    """Part of a layer without a device; by default the whole layer.

    Attributes:
        region: Region of the layer's output; None: all of it.
        reduce: Range of the reduction axis, for a partial sum.
        merge_count: Number of partial sums that the part adds; 0: none.
    """

    region: Region | None = None
    reduce: Interval | None = None
    merge_count: int = 0


@dataclass(frozen=True)
class Part:
    """Piece of a layer on one device.

    Attributes:
        device: Name of the device.
        region: Region of the layer's output that the part computes; None: all of it.
        reduce: Range of the reduction axis (input channels), if the part computes a partial sum.
        lane: Lane of the device. Lanes run one after another and share the device's memory.
    """

    device: str
    region: Region | None = None
    reduce: Interval | None = None
    lane: int = 0


@dataclass(frozen=True)
class FailurePlan:
    """Plan that is used while exactly the devices `failed` are down.

    Attributes:
        failed: Names of the failed devices.
        plan: A plan that uses none of them.
    """

    failed: tuple[str, ...]
    plan: Plan


@dataclass(frozen=True)
class Plan:
    """Parts of all layers, sources and sinks; optionally replicas and failure plans.

    Attributes:
        layers: Parts by layer name.
        source: Devices that hold every model input in full.
        sink: Devices that receive every model output in full.
        model_digest: Structural digest of the model that the plan was made for; '' in a plan written by hand.
        note: Reason why the strategy may return another plan next time: measurements or a time limit.
        replicas: Renamings of the parts' devices (device: device that does its work); devices that are not named stay.
            Frame i of a stream uses renaming i mod n. Source and sink are never renamed. (): no renaming.
        wire_format: Element types in which tensors are sent.
        failures: Failure plans. They have no failure plans themselves, and use this plan's digest and wire format.
        chosen_strategy: Strategy that made the plan, if another strategy chose it. It is not stored in files.
    """

    layers: Mapping[str, tuple[Part, ...]]
    source: tuple[str, ...]
    sink: tuple[str, ...]
    model_digest: str = ""
    note: str = ""
    replicas: tuple[Mapping[str, str], ...] = ()
    wire_format: WireFormat = field(default_factory=WireFormat)
    failures: tuple[FailurePlan, ...] = ()
    chosen_strategy: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.failures:
            failures = [FailurePlan(entry.failed, self._with_shared_fields(entry.plan)) for entry in self.failures]
            object.__setattr__(self, "failures", tuple(failures))

    def _with_shared_fields(self, plan: Plan) -> Plan:
        return replace(plan, model_digest=self.model_digest, note="", wire_format=self.wire_format, failures=())

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices of all roles in order of first mention.

        The order is source, layers role by role, sink, failure plans.
        """
        parts = tuple(dict.fromkeys(p.device for parts in self.layers.values() for p in parts))
        named = [renaming.get(name, name) for renaming in self.replicas or ({},) for name in parts]
        spare = [name for failure in self.failures for name in failure.plan.devices]
        return tuple(dict.fromkeys([*self.source, *named, *self.sink, *spare]))

    @property
    def roles(self) -> tuple[Plan, ...]:
        """Plan of each role (replica or failure plan), without replicas and failure plans of its own."""
        return tuple(role.plan for role in self.roles_by_failure)

    @property
    def roles_by_failure(self) -> tuple[FailurePlan, ...]:
        """Each role with the failed devices for which it is used.

        First come the replicas of the plan itself, then those of its failure plans.
        """
        return tuple(
            FailurePlan(entry.failed, role)
            for entry in (FailurePlan((), self), *self.failures)
            for role in entry.plan.replica_roles
        )

    @property
    def replica_roles(self) -> tuple[Plan, ...]:
        """Plan of each replica, used while no device is down: frame i uses entry i mod n."""
        roles: list[Plan] = []
        own = self.layers.items()
        for new in self.replicas:
            moved = {name: tuple(replace(p, device=new.get(p.device, p.device)) for p in parts) for name, parts in own}
            roles.append(replace(self, layers=moved, replicas=(), failures=()))
        return tuple(roles) or (replace(self, failures=()) if self.failures else self,)


def _part_to_json(part: Part) -> dict[str, Any]:
    region = "all" if part.region is None else [list(interval) for interval in part.region]
    reduce = {} if part.reduce is None else {"reduce": list(part.reduce)}
    return {"device": part.device, "region": region, **reduce, **({"lane": part.lane} if part.lane else {})}


def _part_from_json(record: Mapping[str, Any]) -> Part:
    region = None if record["region"] == "all" else tuple((start, stop) for start, stop in record["region"])
    start, stop = record.get("reduce", (0, 0))
    return Part(record["device"], region, (start, stop) if "reduce" in record else None, record.get("lane", 0))


def plan_from_json(document: Any, place: str = "plan") -> Plan:
    """Return the plan in a JSON document.

    Args:
        document: The document.
        place: Name of the file, as prefix of error messages.

    Returns:
        The plan.

    Raises:
        DicompilerError: The document violates the schema. The message names the key and the allowed values.
    """
    validate(document, "plan", place)
    return _plan_from_record(
        document,
        tuple(FailurePlan(tuple(entry["failed"]), _plan_from_record(entry)) for entry in document.get("failures", ())),
    )


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
    )


def load_plan(path: str | Path) -> Plan:
    """Return the plan in a file.

    Args:
        path: The file.

    Returns:
        The plan.

    Raises:
        DicompilerError: The file cannot be read or violates the schema.
    """
    return plan_from_json(load_json(path), str(path))


def dumps(plan: Plan) -> str:
    """Return the text of a plan file, with one line per part.

    Args:
        plan: The plan.

    Returns:
        JSON text that `load_plan` reads as an equal plan.
    """
    named = {"model_digest": plan.model_digest, "note": plan.note}
    text = _format_plan(plan, {"format": FORMAT}, named, wire_format_to_json(plan.wire_format))
    if plan.failures:
        failures = [_format_plan(failure.plan, {"failed": list(failure.failed)}) for failure in plan.failures]
        text = text[:-1] + ',\n "failures": [\n' + ",\n".join(failures) + "]}"
    return text + "\n"


def _format_plan(plan: Plan, first: Json, named: Json | None = None, wire: Json | None = None) -> str:
    """Return the text of one plan.

    `first` precedes its source; `named` and `wire` surround its replicas if not empty.
    """
    optional = {**(named or {}), "replicas": [dict(names) for names in plan.replicas], **(wire or {})}
    document = {**first, "source": list(plan.source), "sink": list(plan.sink)}
    head = json.dumps(document | {key: value for key, value in optional.items() if value}, indent=1)[:-2]
    texts = {name: [json.dumps(_part_to_json(part)) for part in parts] for name, parts in plan.layers.items()}
    rows = ["  {}: [\n   {}]".format(json.dumps(name), ",\n   ".join(parts)) for name, parts in texts.items()]
    return head + ',\n "layers": {\n' + ",\n".join(rows) + "}}"
