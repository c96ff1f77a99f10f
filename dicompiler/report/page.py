"""The page: Facts, or a front alone, become one HTML document, style and script inside. Same input, same bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from dicompiler.base.units import format_bytes, format_flops, format_joules, format_seconds
from dicompiler.driver.summary import bottleneck
from dicompiler.report.facts import Facts
from dicompiler.report.graph import chip, device_name, graph
from dicompiler.report.markup import Markup, clean, element, joined, table
from dicompiler.report.memory import memory
from dicompiler.report.tables import comparison, front, links, losses, reasons
from dicompiler.report.timeline import devices, measured, predicted, timeline

NAMELESS = ("", "main", "main_graph", "graph", "torch_jit", "torch_jit_export", "tf2onnx")
# Nothing is fetched, whatever the names in a model are.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def report(facts: Facts) -> str:
    """The page of an artifact."""
    sections = [
        _summary(facts),
        _section("devices", "Devices", _devices(facts)),
        _section("layers", "Layers", _key(facts), _notes(facts), graph(facts)),
        _section("timeline", "A frame in time", _timelines(facts)),
        _section("memory", "Memory", _memory_key(), memory(facts)),
        _section("links", "Bytes between devices", links(facts)),
    ]
    if facts.compilation.losses:
        sections.append(_section("losses", "When devices are lost", losses(facts)))
    if facts.comparison is not None:
        sections.append(_section("strategies", "Strategies", _bound_of(facts.comparison), comparison(facts.comparison)))
        if "why" in facts.comparison:
            sections.append(_section("why", "Why layers stay whole", reasons(facts.comparison["why"])))
    if facts.front is not None:
        sections.append(_section("front", "Pareto front", _front_note(facts.front), front(facts.front, facts)))
    return _page(_title(facts), sections)


def front_report(name: str, document: Mapping[str, Any]) -> str:
    """The page of a front alone."""
    head = element("header", element("h1", name), element("p", f"explored on {document['platform']}"))
    return _page(name, [head, _section("front", "Pareto front", _front_note(document), front(document))])


def _page(name: str, sections: list[Markup]) -> str:
    style, script = (
        resources.files("dicompiler.report").joinpath(f"page.{kind}").read_text() for kind in ("css", "js")
    )
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("link", rel="icon", href="data:,"),
        element("title", f"{name}: dicompiler report"),
        element("style", Markup(style)),
    ]
    detail = element("div", element("button", "×", type="button", aria_label="close"), element("pre"), id="detail",
                     role="status", hidden="hidden")  # fmt: skip
    body = [element("main", sections), detail, element("script", Markup(script))]
    page = element("html", element("head", head), element("body", body), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _section(anchor: str, title: str, *children: Any) -> Markup:
    return element("section", element("h2", title), children, id=anchor)


def _summary(facts: Facts) -> Markup:
    """What was compiled for what, who decided, and the plan's numbers beside those of one device alone."""
    lines = [[element("dt", name), element("dd", text)] for name, text in _lines(facts)]
    return element(
        "header", element("h1", _title(facts)), element("dl", lines), element("div", _tiles(facts), class_="tiles")
    )


def _title(facts: Facts) -> str:
    """The network's name, or the directory's where exporters gave it a name that they give to all."""
    name = clean(facts.compilation.model.proto.graph.name)
    network = facts.name if name.lower().replace("-", "_") in NAMELESS else name
    return f"{network} on {facts.platform.name}"


def _lines(facts: Facts) -> list[tuple[str, str]]:
    platform, plan = facts.platform, facts.compilation.plan
    assert plan is not None
    flops = sum(device.flops for device in facts.single.devices)
    weights = sum(device.weights for device in facts.single.devices)
    size = f"{len(facts.routing.layers.layers)} layers, {format_flops(flops)}, {format_bytes(weights)} of weights"
    replicas = f", frames dealt out to {len(plan.replicas)} replicas in turn" if plan.replicas else ""
    part = f"{len(facts.devices)} of {len(platform.devices)} devices take part{replicas}"
    lines = [
        ("network", size),
        ("platform", part),
        ("plan", _decided(facts) + (f" ({plan.note})" if plan.note else "")),
        ("predicted", f"by simulation, cost model {facts.problem.cost.name}{_bound(facts)}"),
        ("held back", bottleneck(platform, facts.metrics, facts.problem.objective)[1]),
        *([("wire", f"tensors travel between devices as {clean(str(plan.wire))}")] if plan.wire.types else []),
        ("artifact", f"{clean(facts.name)}, target {facts.target.name}"),
    ]
    if facts.log is not None:
        host, count = facts.log["host"], len(facts.log["frames_s"])
        where = f"{host['system']}, {host['machine']}, {host['processors']} processors"
        lines.append(("measured", f"{count} frame{'' if count == 1 else 's'}, started on a host with {where}"))
    return lines


def _decided(facts: Facts) -> str:
    decision = facts.compilation.decision
    if decision is None:
        return "who decided is not recorded in this artifact"
    who = f"of strategy {decision.strategy}" if decision.strategy else "given as a file"
    who += f", which chose {decision.chosen}" if decision.chosen else ""
    return f"{who}, for {decision.objective}"


def _bound(facts: Facts) -> str:
    """How near the plan is to what no plan can beat."""
    if not facts.bound:
        return ""
    objective = facts.problem.objective
    times = facts.metrics.value(objective) / facts.bound
    return f"; {_limit(objective, facts.bound)}: this one is {times:.2f} times that"


def _limit(objective: str, seconds: float) -> str:
    what = "latency" if objective == "latency" else "time between frames"
    return f"no plan's {what} is below {format_seconds(seconds)}"


def _tiles(facts: Facts) -> list[Markup]:
    plan, one = facts.metrics, facts.single
    rates = [1 / metrics.period_s if metrics.period_s else 0.0 for metrics in (plan, one)]
    tiles = [
        _tile("latency", format_seconds(plan.latency_s), format_seconds(one.latency_s), one.latency_s, plan.latency_s),
        _tile("frames a second", _rate(rates[0]), _rate(rates[1]), rates[0], rates[1]),
        _tile("memory, fullest host", format_bytes(plan.memory), format_bytes(one.memory), one.memory, plan.memory),
        _tile("sent a frame", format_bytes(plan.total_bytes), format_bytes(one.total_bytes), 0, 0),
    ]
    if plan.energy_j:  # the platform gives powers
        joules = format_joules(plan.energy_j), format_joules(one.energy_j)
        tiles.insert(2, _tile("energy a frame", *joules, one.energy_j, plan.energy_j))
    times = () if facts.log is None else facts.log["frames_s"]
    if times:
        small = f"the fastest of {len(times)}" if len(times) > 1 else "a single frame"
        tiles.append(_box("measured latency", format_seconds(min(times)), small))
    return tiles


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _tile(what: str, value: str, alone: str, worse: float, better: float) -> Markup:
    """A number of the plan beside that of one device; `worse` / `better`: how many times better it is."""
    times = worse / better if better else 0.0
    more = f" ({times:.2f}× better)" if times > 1.005 else f" ({1 / times:.2f}× worse)" if 0 < times < 0.995 else ""
    return _box(what, value, f"one device: {alone}{more}")


def _box(what: str, value: str, small: str) -> Markup:
    return element("div", element("span", what), element("strong", value), element("small", small), class_="tile")


def _devices(facts: Facts) -> Markup:
    heads = ["device", "layers", "FLOP", "computes", "waits"]
    if facts.log is not None:
        heads += ["computed", "waited"]
    rows = [(device_name(facts, name), *rest) for name, *rest in devices(facts)]
    note = "computed, waited: measured, mean of a frame" if facts.log is not None else ""
    overview = table([*heads, "weights", "sends", "receives"], rows, "predicted for a frame")
    return joined((overview, element("p", note, class_="note") if note else ""))


def _key(facts: Facts) -> Markup:
    """Which number and colour stand for which device."""
    chips = [element("li", chip(i), " ", clean(name)) for i, name in enumerate(facts.devices)]
    return element(
        "ul", chips, element("li", element("i", class_="moving"), " data comes from other devices"), class_="key"
    )


def _notes(facts: Facts) -> Markup:
    text = "Hover over a layer, tap it or go to it with the tab key for its parts, regions, times and bytes."
    notes = [element("p", text, class_="note screen")]
    count = len(facts.program.turns)
    if count > 1:
        text = f"Of {count} replicas the first one is shown; the others do the same on other devices."
        notes.append(element("p", text, class_="note"))
    return joined(notes)


def _timelines(facts: Facts) -> list[Markup]:
    keys = {"run": "computes", "handle": "handles messages", "wait": "waits", "send": "sends, in the receiver's colour"}
    head = f"predicted: {format_seconds(facts.simulation.latency_s)}"
    courses, note = {"predicted": predicted(facts)}, ""
    if facts.log is not None and (bars := measured(facts)):
        courses["measured"] = bars
        head += (
            f"; measured, the last frame: {format_seconds(facts.log['frames_s'][-1] if facts.log['frames_s'] else 0)}"
        )
        note = (
            "The upper row of each device is predicted, the lower one measured, from when the frame began, or the "
            "device heard of it; sending ends when the system has taken the bytes. Pale: another frame that was on its "
            "way."
        )
    elif facts.log is not None:
        note = f"Target {facts.log['target']} measures sums only: they stand in the table of devices."
    samples = [element("li", element("i", class_=f"sample {kind}"), text) for kind, text in keys.items()]
    charts = [element("ul", samples, class_="key"), element("h3", head)]
    charts.append(timeline(facts, courses, " and ".join(courses)))
    charts += [element("p", note, class_="note")] if note else []
    return charts + ([] if facts.log is None or "events" not in facts.log else [_events(facts.log["events"])])


def _events(events: Sequence[Mapping[str, Any]]) -> Markup:
    """Losses, take-overs and returns of the run."""
    rows = [
        (
            format_seconds(one["at_s"]),
            one["kind"],
            clean(one["device"]),
            ", ".join(map(clean, one["away"])) or "nobody",
            str(one["frames"]),
            f"{one['replays']} frames again, none for {format_seconds(one['interruption_s'])}"
            if one["kind"] == "take-over"
            else clean(one["why"]),
        )
        for one in events
    ]
    return table(("after", "what", "device", "away then", "frames by then", ""), rows, "devices lost and back")


def _memory_key() -> Markup:
    kinds = (("weights", "weights"), ("live", "buffers and activations"), ("added", "added by the target"))
    items = [element("li", element("i", class_=f"sample m-{kind}"), text) for kind, text in kinds]
    text = "The bar: what is held at most. Below it, over a frame: buffers (dark) and activations (light)."
    return joined((element("ul", items, class_="key"), element("p", text, class_="note")))


def _bound_of(document: Mapping[str, Any]) -> Markup:
    if not document["bound"]:
        return Markup("")
    text = _limit(document["objective"], document["bound"])
    return element("p", f"{text[0].upper()}{text[1:]}.", class_="note")


def _front_note(document: Mapping[str, Any]) -> Markup:
    level = "each plan's own evaluation" if document["level"] == "measured" else "those of the search's fast model"
    text = (
        f"{len(document['points'])} plans of which none is better than another in everything, of "
        f"{document['evaluations']} that were looked at on {document['platform']}. The numbers are {level}; smaller is "
        "better."
    )
    return element("p", text + (" The search was interrupted." if document["interrupted"] else ""), class_="note")
