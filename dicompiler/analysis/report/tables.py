"""Tables of a report: bytes between devices, plans after failures, and strategies; also charts of a Pareto front."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dicompiler.analysis.explain import break_even_text
from dicompiler.analysis.report.html import Markup, element, html_table, join_markup, replace_unprintable, svg
from dicompiler.analysis.report.layer_graph_svg import device_label
from dicompiler.analysis.report.report_data import ReportData
from dicompiler.base.objectives import describe_objective, speed_metric
from dicompiler.base.units import format_bytes, format_joules, format_seconds
from dicompiler.search.pareto_front import objective_values

FRONT_SIZE_PX, FRONT_LEFT_PX, FRONT_BOTTOM_PX = 250.0, 62.0, 38.0
"""Size of a chart of a Pareto front in pixels, and of the space for labels to the left of it and below it."""
MAX_LISTED_PLANS = 40
"""Maximum number of points of a Pareto front that are listed."""
MAX_UNFOLDED_PLANS = 12
"""If a Pareto front has more points, their list is folded."""


def link_table(data: ReportData) -> Markup:
    """Return a table of the bytes that devices send in a frame, with senders as rows and receivers as columns."""
    count = len(data.program.replica_roles)
    sent: dict[tuple[str, str], int] = {}
    for transfer in (transfer for role in data.program.replica_roles for transfer in role.transfers):
        key = transfer.sender, transfer.receiver
        sent[key] = sent.get(key, 0) + transfer.value.nbytes
    largest = max(sent.values(), default=1)
    rows = []
    for a in data.devices:
        cells = []
        for b in data.devices:
            size = sent.get((a, b), 0)
            tooltip = f"{a} to {b}: {size // count} bytes per frame"
            text = "" if not size else format_bytes(size / count)
            cells.append(
                element("td", text, style=f"--v:{size / largest:.3f}", class_="heat", title=tooltip if size else None)
            )
        total = sum(size for (sender, _), size in sent.items() if sender == a)
        rows.append((device_label(data, a), *cells, element("td", format_bytes(total / count), class_="total")))
    heads = [device_label(data, name) for name in data.devices]
    return html_table(("from \\ to", *heads, "all"), rows, "bytes per frame", class_="links")


def failure_table(data: ReportData) -> Markup:
    """Return a table with the metrics of the plan and of each failure plan (plan for the remaining devices)."""
    rows = [
        (
            ", ".join(map(replace_unprintable, failure.failed)) or "none",
            format_seconds(failure.metrics.latency_s),
            format_seconds(failure.metrics.period_s),
            format_bytes(failure.metrics.memory),
            format_bytes(failure.extra_weight_bytes),
        )
        for failure in data.compilation.failure_metrics
    ]
    heads = ("failed", "latency", "frame period", "memory, fullest host", "extra weights")
    return html_table(heads, rows, "each plan on its own", class_="failures")


def explanation_tables(document: Mapping[str, Any]) -> Markup:
    """Return tables that explain why the best plan does not split more layers.

    One table has the plans that are slower than one device, the other one the layers that are not split.

    Args:
        document: The explanation in the output of `dicompiler compare --json`.
    """
    splits = [
        (replace_unprintable(entry["strategy"]), break_even_text(entry["break_even_bandwidth"], entry["wire_dtypes"]))
        for entry in document["splits"]
    ]
    rows = [
        (
            replace_unprintable(entry["layer"]),
            replace_unprintable(entry["operator"]),
            replace_unprintable(entry["reason"]),
            break_even_text(entry["break_even_bandwidth"], entry["wire_dtypes"]) if entry["saved_s"] else "",
        )
        for entry in document["layers"]
    ]
    tables = [html_table(("strategy", "pays off"), splits, "splits that are slower than one device")] if splits else []
    heads = ("layer", "operator", "reason", "splitting it pays off")
    return join_markup([*tables, html_table(heads, rows, "layers that are not split")])


def comparison_table(document: Mapping[str, Any]) -> Markup:
    """Return a table with a row for each strategy and a bar of its latency. The best strategy is marked."""
    planned = [row for row in document["results"] if row["metrics"] is not None]
    longest = max([row["metrics"]["latency_s"] for row in planned], default=1.0)
    speed = speed_metric(document["objective"])
    alone = document["single_device"][speed]
    powered = any(row["metrics"]["energy_j"] for row in planned)
    heads = ["strategy", "latency", "speed-up", "frame period", "energy", "memory", "sent", "search"]
    if not powered:
        heads.remove("energy")
    rows: list[tuple[Any, ...]] = []
    for row in document["results"]:
        metrics, best = row["metrics"], row["strategy"] == document["best"]
        name = element(
            "span", replace_unprintable(row["strategy"]), " ★ best" if best else "", class_="best" if best else None
        )
        if metrics is None:
            rows.append(
                (
                    name,
                    element(
                        "td", replace_unprintable(row["error"] or "no plan"), colspan=len(heads) - 1, class_="text"
                    ),
                )
            )
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
    return html_table(heads, rows, f"strategies, optimized for {document['objective']}", class_="compare")


def render_front_points(document: Mapping[str, Any], data: ReportData | None = None) -> Markup:
    """Return charts and a list of the points (plans) of a Pareto front.

    Args:
        document: Content of front.json.
        data: Data of an artifact, of which the plan is marked.
    """
    units: Mapping[str, str] = document["objectives"]
    first, *others = units
    plan = None if data is None else objective_values(data.platform, data.metrics, units)
    pictures = [_draw_scatter(document, first, other, plan) for other in others or [first]]
    rows = [
        (str(i), str(point["devices"]), *(_format_quantity(point[name], units[name]) for name in units))
        for i, point in enumerate(document["points"][:MAX_LISTED_PLANS])
    ]
    if plan is not None:
        rows.insert(
            0,
            (
                "◆ this plan",
                str(len(data.devices) if data else 0),
                *(_format_quantity(plan[n], units[n]) for n in units),
            ),
        )
    plan_list = element(
        "details", element("summary", f"{len(document['points'])} plans"),
        html_table(("plan", "devices", *map(describe_objective, units)), rows, "Pareto-optimal plans"),
        open="" if len(rows) <= MAX_UNFOLDED_PLANS else None,
    )  # fmt: skip
    key = element("p", element("b", "◆", class_="mark"), " this plan", class_="note") if plan is not None else ""
    return element("div", key, element("div", pictures, class_="cards"), plan_list)


def _draw_scatter(document: Mapping[str, Any], x: str, y: str, plan: Mapping[str, float] | None) -> Markup:
    """Return a chart of objective `y` against objective `x` for all points (plans) of a Pareto front.

    Args:
        document: Content of front.json.
        x: Name of an objective.
        y: Name of an objective.
        plan: Values by objective of a plan that is marked in the chart.
    """
    units, points = document["objectives"], document["points"]
    all_points = [*points, plan] if plan is not None else points
    width, height = FRONT_SIZE_PX - FRONT_LEFT_PX - 10, FRONT_SIZE_PX - FRONT_BOTTOM_PX - 10
    low = {name: min(point[name] for point in all_points) for name in (x, y)}
    span = {name: max(point[name] for point in all_points) - low[name] or abs(low[name]) or 1.0 for name in (x, y)}

    def at(point: Mapping[str, float]) -> tuple[float, float]:
        return (
            FRONT_LEFT_PX + 6 + (width - 12) * (point[x] - low[x]) / span[x],
            FRONT_SIZE_PX - FRONT_BOTTOM_PX - 6 - (height - 12) * (point[y] - low[y]) / span[y],
        )

    drawn = [
        element(
            "path",
            d=f"M{FRONT_LEFT_PX:.0f} 10V{FRONT_SIZE_PX - FRONT_BOTTOM_PX:.0f}H{FRONT_SIZE_PX - 10:.0f}",
            class_="frame",
        )
    ]
    for i, point in enumerate(points):
        cx, cy = at(point)
        description = "\n".join(
            [f"plan {i}", *(f"{name}: {_format_quantity(point[name], unit)}" for name, unit in units.items())]
        )
        drawn.append(element("circle", cx=cx, cy=cy, r=4, class_="point", data_d=description))
        if len(points) <= MAX_LISTED_PLANS:
            drawn.append(element("text", i, x=cx + 5, y=cy - 4, class_="small"))
    if plan is not None:
        cx, cy = at(plan)
        drawn.append(element("path", d=f"M{cx:.1f} {cy - 7:.1f}l7 7l-7 7l-7 -7Z", class_="own", data_d="this plan"))
    end = {name: _format_quantity(low[name] + span[name], units[name]) for name in (x, y)}
    base, right = FRONT_SIZE_PX - FRONT_BOTTOM_PX, FRONT_SIZE_PX - 10
    texts = [
        element("text", _format_quantity(low[x], units[x]), x=FRONT_LEFT_PX, y=base + 14),
        element("text", end[x], x=right, y=base + 14, text_anchor="end"),
        element("text", f"{x} →", x=(FRONT_LEFT_PX + right) / 2, y=base + 30, text_anchor="middle", class_="name"),
        element("text", _format_quantity(low[y], units[y]), x=FRONT_LEFT_PX - 4, y=base, text_anchor="end"),
        element("text", end[y], x=FRONT_LEFT_PX - 4, y=18, text_anchor="end"),
        element("text", f"{y} →", transform=f"translate(12 {base / 2 + 5:.0f}) rotate(-90)", text_anchor="middle",
                class_="name"),
    ]  # fmt: skip
    description = f"{len(points)} plans; {x} from {_format_quantity(low[x], units[x])} to {end[x]}"
    return svg(f"{y} against {x}", description, FRONT_SIZE_PX, FRONT_SIZE_PX, drawn, texts, class_="card scatter")


def _format_quantity(value: float, unit: str) -> str:
    if unit == "s":
        return format_seconds(value)
    return format_bytes(value) if unit == "bytes" else format_joules(value)
