"""A Plan: which device computes which region of which layer's output. What every strategy returns; JSON on disk.

The file's schema is `base/schemas/plan.schema.json`; what a plan means for a network is checked where it is routed.
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

FORMAT = "dicompiler.plan/1"

Json = Mapping[str, Any]


class LayerShare(NamedTuple):
    """A part of a layer without its device; all of the layer by default.

    region: of the layer's output (None: all of it); reduce: the range of input channels of a partial sum; merge: how
    many partial sums the part adds up (0: it adds none).
    """

    region: Region | None = None
    reduce: Interval | None = None
    merge_count: int = 0


@dataclass(frozen=True)
class Part:
    """A piece of a layer on one device: the `region` of the layer's OUTPUT that it computes (None: all of it).

    `reduce` is a range of the reduction axis (input channels) where it computes a partial sum. Parts of one device in
    several `lane`s share its memory; what passes between lanes costs no network.
    """

    device: str
    region: Region | None = None
    reduce: Interval | None = None
    lane: int = 0


@dataclass(frozen=True)
class FailurePlan:
    """What is in force while exactly the devices `lost` are away: a plan that names none of them."""

    failed: tuple[str, ...]
    plan: Plan


@dataclass(frozen=True)
class Plan:
    """`layers`: parts by layer name. `source`: devices that each hold every whole graph input. `sink`: devices that
    want every graph output. `network`: the structural digest of the network it was made for ('' in a hand-written one).
    `note`: why it cannot be reproduced by running again, where it rests on measured or time-limited results.
    `replicas`: one-to-one renamings of the parts' devices (device → device; what is not named stays); frame i of a
    stream uses renaming i mod n. Source and sink stay where they are. Empty: every frame goes by the plan as it is.
    `wire`: in which types tensors travel.
    `losses`: plans for when devices are lost, none of which has losses of its own; network and wire are this plan's.
    `chosen`: the strategy whose plan it is, where one that asks others made it; in no file.
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
            losses = [
                FailurePlan(
                    one.failed,
                    replace(
                        one.plan, model_digest=self.model_digest, note="", wire_format=self.wire_format, failures=()
                    ),
                )
                for one in self.failures
            ]
            object.__setattr__(self, "losses", tuple(losses))

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device that takes part in a role, in order of first mention: source, layers role by role, sink; then
        those of the plans for losses."""
        parts = tuple(dict.fromkeys(p.device for parts in self.layers.values() for p in parts))
        named = [renaming.get(name, name) for renaming in self.replicas or ({},) for name in parts]
        spare = [name for loss in self.failures for name in loss.plan.devices]
        return tuple(dict.fromkeys([*self.source, *named, *self.sink, *spare]))

    @property
    def roles(self) -> tuple[Plan, ...]:
        """The plan of every way that a frame can go, itself without replicas and losses."""
        return tuple(way.plan for way in self.roles_by_failure)

    @property
    def roles_by_failure(self) -> tuple[FailurePlan, ...]:
        """Each role with what is lost then: first the plan's own turns, then those of each of its losses."""
        return tuple(
            FailurePlan(one.failed, role)
            for one in (FailurePlan((), self), *self.failures)
            for role in one.plan.replica_roles
        )

    @property
    def replica_roles(self) -> tuple[Plan, ...]:
        """The plan of each renaming, while nothing is lost: frame i goes by entry i mod n."""
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
    """Checks `document` against the schema; an error names `place` (the file), the key and what is allowed."""
    validate(document, "plan", place)
    return _plan_from_record(
        document, tuple(FailurePlan(tuple(one["lost"]), _plan_from_record(one)) for one in document.get("losses", ()))
    )


def _plan_from_record(document: Mapping[str, Any], losses: tuple[FailurePlan, ...] = ()) -> Plan:
    return Plan(
        {name: tuple(_part_from_json(r) for r in parts) for name, parts in document["layers"].items()},
        tuple(document["source"]),
        tuple(document["sink"]),
        document.get("network", ""),
        document.get("note", ""),
        tuple(document.get("replicas", ())),
        wire_format_from_json(document),
        losses,
    )


def load_plan(path: str | Path) -> Plan:
    """Reads and checks a plan file."""
    return plan_from_json(load_json(path), str(path))


def dumps(plan: Plan) -> str:
    """The plan file's text, which reads back as the same plan: one line for each part, so that plans can be compared by
    eye and by diff."""
    named = {"network": plan.model_digest, "note": plan.note}
    text = _format_plan(plan, {"format": FORMAT}, named, wire_format_to_json(plan.wire_format))
    if plan.failures:
        losses = [_format_plan(loss.plan, {"lost": list(loss.failed)}) for loss in plan.failures]
        text = text[:-1] + ',\n "losses": [\n' + ",\n".join(losses) + "]}"
    return text + "\n"


def _format_plan(plan: Plan, first: Json, named: Json | None = None, wire: Json | None = None) -> str:
    """One plan with what stands before its source, and before and behind its replicas where that is something."""
    optional = {**(named or {}), "replicas": [dict(names) for names in plan.replicas], **(wire or {})}
    document = {**first, "source": list(plan.source), "sink": list(plan.sink)}
    head = json.dumps(document | {key: value for key, value in optional.items() if value}, indent=1)[:-2]
    texts = {name: [json.dumps(_part_to_json(part)) for part in parts] for name, parts in plan.layers.items()}
    rows = ["  {}: [\n   {}]".format(json.dumps(name), ",\n   ".join(parts)) for name, parts in texts.items()]
    return head + ',\n "layers": {\n' + ",\n".join(rows) + "}}"
