"""Tables of the report: bytes from device to device, strategies side by side, and the front of plans as pictures.

Facts, comparison or front → markup.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dicompiler.base.objectives import speed_key
from dicompiler.base.units import format_bytes, format_joules, format_seconds
from dicompiler.driver.why import pays_from
from dicompiler.report.facts import Facts
from dicompiler.report.graph import device_name
from dicompiler.report.markup import Markup, clean, element, joined, picture, table
from dicompiler.search.fronts import objective_values

SIZE, LEFT, BOTTOM = 250.0, 62.0, 38.0
"""Pixels of a front's picture, and of what stands at its axes."""
SHOWN = 40
"""So many points of a front are listed."""
FEW = 12
"""So many are listed at once."""


def links(facts: Facts) -> Markup:
    """Bytes of a frame by sender (rows) and receiver (columns), darker where there are more."""
    count = len(facts.program.turns)
    sent: dict[tuple[str, str], int] = {}
    for transfer in (transfer for role in facts.program.turns for transfer in role.transfers):
        key = transfer.sender, transfer.receiver
        sent[key] = sent.get(key, 0) + transfer.value.nbytes
    most = max(sent.values(), default=1)
    rows = []
    for a in facts.devices:
        cells = []
        for b in facts.devices:
            size = sent.get((a, b), 0)
            words = f"{a} to {b}: {size // count} bytes a frame"
            text = "" if not size else format_bytes(size / count)
            cells.append(
                element("td", text, style=f"--v:{size / most:.3f}", class_="heat", title=words if size else None)
            )
        total = sum(size for (sender, _), size in sent.items() if sender == a)
        rows.append((device_name(facts, a), *cells, element("td", format_bytes(total / count), class_="total")))
    heads = [device_name(facts, name) for name in facts.devices]
    return table(("from \\ to", *heads, "all"), rows, "bytes of a frame", class_="links")


def losses(facts: Facts) -> Markup:
    """What the plan comes to by itself, and each of its plans for losses."""
    rows = [
        (
            ", ".join(map(clean, one.lost)) or "nothing",
            format_seconds(one.metrics.latency_s),
            format_seconds(one.metrics.period_s),
            format_bytes(one.metrics.memory),
            format_bytes(one.stored),
        )
        for one in facts.compilation.losses
    ]
    heads = ("lost", "latency", "between frames", "memory, fullest host", "extra weights")
    return table(heads, rows, "each plan by itself", class_="losses")


def reasons(document: Mapping[str, Any]) -> Markup:
    """Why layers stay whole, and what splits of a network that stays on one device would take."""
    splits = [(clean(one["strategy"]), pays_from(one["bandwidth"], one["wire"])) for one in document["splits"]]
    rows = [
        (
            clean(one["layer"]),
            clean(one["operator"]),
            clean(one["reason"]),
            pays_from(one["bandwidth"], one["wire"]) if one["saved"] else "",
        )
        for one in document["layers"]
    ]
    shown = [table(("plan of", "would pay"), splits, "splits of a network that stays on one device")] if splits else []
    heads = ("layer", "operator", "why it stays whole", "a split by itself pays")
    return joined([*shown, table(heads, rows, "layers that one device computes")])


def comparison(document: Mapping[str, Any]) -> Markup:
    """The strategies, each with a bar of its latency; the best one is marked."""
    planned = [row for row in document["rows"] if row["metrics"] is not None]
    longest = max([row["metrics"]["latency_s"] for row in planned], default=1.0)
    speed = speed_key(document["objective"])
    alone = document["single"][speed]
    powered = any(row["metrics"]["energy_j"] for row in planned)
    heads = ["strategy", "latency", "faster than one", "between frames", "energy", "memory", "sent", "search"]
    if not powered:
        heads.remove("energy")
    rows: list[tuple[Any, ...]] = []
    for row in document["rows"]:
        metrics, best = row["metrics"], row["strategy"] == document["best"]
        name = element("span", clean(row["strategy"]), " ★ best" if best else "", class_="best" if best else None)
        if metrics is None:
            rows.append((name, element("td", clean(row["error"] or "no plan"), colspan=len(heads) - 1, class_="text")))
            continue
        latency = metrics["latency_s"]
        bar = element("i", style=f"width:{100 * latency / longest:.1f}%")
        rows.append(
            (
                name,
                element("td", bar, element("span", format_seconds(latency)), class_="bar"),
                f"{alone / metrics[speed]:.2f}×",
                format_seconds(metrics["period_s"]),
                *([format_joules(metrics["energy_j"])] if powered else []),
                format_bytes(metrics["memory"]),
                format_bytes(metrics["total_bytes"]),
                f"{row['search_s']:.1f} s",
            )
        )
    return table(heads, rows, f"strategies, made for {document['objective']}", class_="compare")


def front(document: Mapping[str, Any], facts: Facts | None = None) -> Markup:
    """The points of a front, each objective against the first; where `facts` are given, their plan beside them."""
    units: Mapping[str, str] = document["objectives"]
    first, *others = units
    plan = None if facts is None else objective_values(facts.platform, facts.metrics, units)
    pictures = [_scatter(document, first, other, plan) for other in others or [first]]
    rows = [
        (str(i), str(point["devices"]), *(_quantity(point[name], units[name]) for name in units))
        for i, point in enumerate(document["points"][:SHOWN])
    ]
    if plan is not None:
        rows.insert(
            0, ("◆ this plan", str(len(facts.devices) if facts else 0), *(_quantity(plan[n], units[n]) for n in units))
        )
    listed = element(
        "details", element("summary", f"{len(document['points'])} plans"),
        table(("plan", "devices", *units), rows, "plans of which none is better in everything"),
        open="" if len(rows) <= FEW else None,
    )  # fmt: skip
    key = element("p", element("b", "◆", class_="mark"), " this plan", class_="note") if plan is not None else ""
    return element("div", key, element("div", pictures, class_="cards"), listed)


def _scatter(document: Mapping[str, Any], x: str, y: str, plan: Mapping[str, float] | None) -> Markup:
    """One objective against another. Both are better when smaller: the best corner is at the lower left."""
    units, points = document["objectives"], document["points"]
    every = [*points, plan] if plan is not None else points
    wide, high = SIZE - LEFT - 10, SIZE - BOTTOM - 10
    low = {name: min(point[name] for point in every) for name in (x, y)}
    span = {name: max(point[name] for point in every) - low[name] or abs(low[name]) or 1.0 for name in (x, y)}

    def at(point: Mapping[str, float]) -> tuple[float, float]:
        return (
            LEFT + 6 + (wide - 12) * (point[x] - low[x]) / span[x],
            SIZE - BOTTOM - 6 - (high - 12) * (point[y] - low[y]) / span[y],
        )

    drawn = [element("path", d=f"M{LEFT:.0f} 10V{SIZE - BOTTOM:.0f}H{SIZE - 10:.0f}", class_="frame")]
    for i, point in enumerate(points):
        cx, cy = at(point)
        words = "\n".join([f"plan {i}", *(f"{name}: {_quantity(point[name], unit)}" for name, unit in units.items())])
        drawn.append(element("circle", cx=cx, cy=cy, r=4, class_="point", data_d=words))
        if len(points) <= SHOWN:
            drawn.append(element("text", i, x=cx + 5, y=cy - 4, class_="small"))
    if plan is not None:
        cx, cy = at(plan)
        drawn.append(element("path", d=f"M{cx:.1f} {cy - 7:.1f}l7 7l-7 7l-7 -7Z", class_="own", data_d="this plan"))
    end = {name: _quantity(low[name] + span[name], units[name]) for name in (x, y)}
    base, right = SIZE - BOTTOM, SIZE - 10
    texts = [
        element("text", _quantity(low[x], units[x]), x=LEFT, y=base + 14),
        element("text", end[x], x=right, y=base + 14, text_anchor="end"),
        element("text", f"{x} →", x=(LEFT + right) / 2, y=base + 30, text_anchor="middle", class_="name"),
        element("text", _quantity(low[y], units[y]), x=LEFT - 4, y=base, text_anchor="end"),
        element("text", end[y], x=LEFT - 4, y=18, text_anchor="end"),
        element("text", f"{y} →", transform=f"translate(12 {base / 2 + 5:.0f}) rotate(-90)", text_anchor="middle",
                class_="name"),
    ]  # fmt: skip
    words = f"{len(points)} plans; {x} from {_quantity(low[x], units[x])} to {end[x]}"
    return picture(f"{y} against {x}", words, SIZE, SIZE, drawn, texts, class_="card scatter")


def _quantity(value: float, unit: str) -> str:
    if unit == "s":
        return format_seconds(value)
    return format_bytes(value) if unit == "bytes" else format_joules(value)
