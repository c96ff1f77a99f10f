"""The HTML page of a report, with embedded style and script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from dicompiler.analysis.report.html import Markup, element, html_table, join_markup, replace_unprintable
from dicompiler.analysis.report.layer_graph_svg import device_chip, device_label, draw_layer_graph
from dicompiler.analysis.report.memory_charts import draw_memory
from dicompiler.analysis.report.report_data import ReportData
from dicompiler.analysis.report.tables import (
    comparison_table,
    explanation_tables,
    failure_table,
    link_table,
    render_front_points,
)
from dicompiler.analysis.report.timeline import device_rows, draw_timeline, measured_bars, predicted_bars
from dicompiler.base.objectives import describe_objective, format_objective
from dicompiler.base.units import format_bytes, format_flops, format_joules, format_number, format_seconds
from dicompiler.driver.compile_result import describe_engines, find_bottleneck
from dicompiler.ir.frame_prediction import HOST_COSTS_NOTE
from dicompiler.ir.metrics import MEMORY_LABEL

GENERIC_GRAPH_NAMES = ("", "main", "main_graph", "graph", "torch_jit", "torch_jit_export", "tf2onnx")
# The page shows names from the model. If one of them contained markup that is not escaped, this policy would prevent
# the browser from loading anything.
CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def render_report(data: ReportData) -> str:
    sections = [
        _render_summary(data),
        _section("devices", "Devices", _render_devices(data)),
        _section("layers", "Layers", _render_device_key(data), _layer_notes(data), draw_layer_graph(data)),
        _section("timeline", "Timeline of a frame", _render_timelines(data)),
        _section("memory", "Memory", _render_memory_key(), draw_memory(data)),
        _section("links", "Bytes between devices", link_table(data)),
    ]
    if data.compilation.failure_metrics:
        sections.append(_section("failures", "Failed devices", failure_table(data)))
    if data.comparison is not None:
        sections.append(
            _section("strategies", "Strategies", _bound_note(data.comparison), comparison_table(data.comparison))
        )
        if "explanation" in data.comparison:
            sections.append(
                _section("explanation", "Why layers are not split", explanation_tables(data.comparison["explanation"]))
            )
    if data.front is not None:
        sections.append(
            _section("front", "Pareto front", _front_note(data.front), render_front_points(data.front, data))
        )
    return _render_page(_title(data), sections)


def render_front(name: str, document: Mapping[str, Any]) -> str:
    """Return the page of a Pareto front without an artifact.

    Args:
        name: Title of the page.
        document: Content of front.json.
    """
    head = element("header", element("h1", name), element("p", f"explored on {document['platform']}"))
    return _render_page(
        name, [head, _section("front", "Pareto front", _front_note(document), render_front_points(document))]
    )


def _render_page(name: str, sections: list[Markup]) -> str:
    style, script = (
        resources.files("dicompiler.analysis.report").joinpath(f"page.{kind}").read_text() for kind in ("css", "js")
    )
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=CONTENT_SECURITY_POLICY),
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


def _render_summary(data: ReportData) -> Markup:
    lines = [[element("dt", name), element("dd", text)] for name, text in _summary_entries(data)]
    return element(
        "header",
        element("h1", _title(data)),
        element("dl", lines),
        element("div", _render_tiles(data), class_="tiles"),
    )


def _title(data: ReportData) -> str:
    """Return the title of the report: the network and the platform."""
    name = replace_unprintable(data.compilation.model.proto.graph.name)
    # Exporters give generic names to graphs, so the name of the artifact's directory is used instead.
    network = data.name if name.lower().replace("-", "_") in GENERIC_GRAPH_NAMES else name
    return f"{network} on {data.platform.name}"


def _summary_entries(data: ReportData) -> list[tuple[str, str]]:
    platform, plan = data.platform, data.compilation.plan
    assert plan is not None
    flops = sum(device.flops for device in data.single.devices)
    weights = sum(device.weights for device in data.single.devices)
    size = f"{len(data.routing.layers.layers)} layers, {format_flops(flops)}, {format_bytes(weights)} of weights"
    replicas = f", {len(plan.replicas)} replicas take frames in turn" if plan.replicas else ""
    part = f"{len(data.devices)} of {len(platform.devices)} devices are used{replicas}"
    lines = [
        ("network", size),
        ("platform", part),
        ("plan", _describe_decision(data) + (f" ({plan.note})" if plan.note else "")),
        *([("engines", replace_unprintable(describe_engines(plan.engines)))] if plan.engines else []),
        ("predicted", f"a frame takes {data.metrics.frame}, {_describe_origin(data)}"),
        ("bottleneck", find_bottleneck(data.metrics, data.problem.objective)[1]),
        *(
            [("wire", f"tensors are sent between devices as {replace_unprintable(str(plan.wire_format))}")]
            if plan.wire_format.dtypes
            else []
        ),
        ("artifact", f"{replace_unprintable(data.name)}, target {data.target.name}"),
    ]
    if data.run_log is not None:
        host, count = data.run_log["host"], len(data.run_log["frames_s"])
        where = f"{host['system']}, {host['machine']}, {host['processors']} processors"
        lines.append(("measured", f"{count} frame{'' if count == 1 else 's'}, started on a host with {where}"))
    return lines


def _describe_decision(data: ReportData) -> str:
    decision = data.compilation.decision
    if decision is None:
        return "the strategy is not recorded in this artifact"
    text = f"by strategy {decision.strategy}" if decision.strategy else "read from a file"
    text += f", which chose {decision.chosen_strategy}" if decision.chosen_strategy else ""
    return f"{text}, for {decision.objective}"


def _describe_origin(data: ReportData) -> str:
    return f"by simulation, cost model {data.problem.cost_model.name}{_describe_bound(data)}"


def _describe_bound(data: ReportData) -> str:
    """Return a text that says how close the plan is to the lower bound, a value that no plan can beat."""
    if not data.lower_bound:
        return ""
    objective = data.problem.objective
    times = data.metrics.objective_value(objective) / data.lower_bound
    return f"; {_describe_limit(objective, data.lower_bound)}: this plan is {times:.2f} times that"


def _describe_limit(objective: str, bound: float) -> str:
    return f"no plan's {describe_objective(objective)} is below {format_objective(objective, bound)}"


def _render_tiles(data: ReportData) -> list[Markup]:
    plan, single = data.metrics, data.single
    rates = [1 / metrics.period_s if metrics.period_s else 0.0 for metrics in (plan, single)]
    texts = [format_number(rate, 3) for rate in rates]
    tiles = [
        _comparison_tile(
            "latency, in the cluster",
            format_seconds(plan.latency_s),
            format_seconds(single.latency_s),
            single.latency_s,
            plan.latency_s,
        ),
        _comparison_tile("frames per second", texts[0], texts[1], rates[0], rates[1]),
        _comparison_tile(
            MEMORY_LABEL,
            format_bytes(plan.memory),
            format_bytes(single.memory),
            single.memory,
            plan.memory,
        ),
        _comparison_tile("sent per frame", format_bytes(plan.total_bytes), format_bytes(single.total_bytes), 0, 0),
    ]
    if plan.energy_j:  # The energy is 0 if the platform states no powers.
        joules = format_joules(plan.energy_j), format_joules(single.energy_j)
        tiles.insert(2, _comparison_tile("energy per frame", *joules, single.energy_j, plan.energy_j))
    frame_times = () if data.run_log is None else data.run_log["frames_s"]
    if frame_times:
        small = f"the fastest of {len(frame_times)}{_describe_queueing(data)}" if len(frame_times) > 1 else "one frame"
        tiles.append(_render_tile("measured frame, with input and result", format_seconds(min(frame_times)), small))
    return tiles


def _describe_queueing(data: ReportData) -> str:
    """Return a note for measured frame times that include waiting for other frames; "" if they do not."""
    in_flight = 1 if data.run_log is None else data.run_log["in_flight"]
    if in_flight < 2:
        return ""
    others = "1 other frame" if in_flight == 2 else f"{in_flight - 1} other frames"
    return f", including waits for up to {others}; none with --in-flight 1"


def _comparison_tile(quantity: str, value: str, single_value: str, worse: float, better: float) -> Markup:
    """Return a tile (framed number) with a metric of the plan and of one device, and their ratio.

    Args:
        quantity: Name of the metric.
        value: The plan's value as text.
        single_value: The value on one device as text.
        worse: Numerator of the ratio: the value on one device, or the plan's value if larger values are better.
        better: Denominator of the ratio: the other value.
    """
    ratio = worse / better if better else 0.0
    change = f" ({ratio:.2f}× better)" if ratio > 1.005 else f" ({1 / ratio:.2f}× worse)" if 0 < ratio < 0.995 else ""
    return _render_tile(quantity, value, f"one device: {single_value}{change}")


def _render_tile(what: str, value: str, small: str) -> Markup:
    return element("div", element("span", what), element("strong", value), element("small", small), class_="tile")


def _render_devices(data: ReportData) -> Markup:
    heads = ["device", "layers", "FLOP", "computes", "waits"]
    if data.run_log is not None:
        heads += ["computed", "waited"]
    rows = [(device_label(data, name), *rest) for name, *rest in device_rows(data)]
    note = "computed, waited: measured, mean per frame" if data.run_log is not None else ""
    overview = html_table([*heads, "weights", "sends", "receives"], rows, "predicted per frame")
    return join_markup((overview, element("p", note, class_="note") if note else ""))


def _render_device_key(data: ReportData) -> Markup:
    chips = [element("li", device_chip(i), " ", replace_unprintable(name)) for i, name in enumerate(data.devices)]
    return element(
        "ul", chips, element("li", element("i", class_="moving"), " data comes from other devices"), class_="key"
    )


def _layer_notes(data: ReportData) -> Markup:
    text = "Point at a layer, tap it or select it with the tab key to see its parts, regions, times and bytes."
    notes = [element("p", text, class_="note screen")]
    count = len(data.program.replica_roles)
    if count > 1:
        text = f"The first of {count} replicas is shown; the others do the same on other devices."
        notes.append(element("p", text, class_="note"))
    return join_markup(notes)


def _render_timelines(data: ReportData) -> list[Markup]:
    keys = {"run": "computes", "handle": "handles messages", "wait": "waits", "send": "sends (colour of the receiver)"}
    head = f"predicted: {data.simulation.frame}{f', {HOST_COSTS_NOTE}' if data.is_emulated else ''}"
    bars_by_row_name, note = {"predicted": predicted_bars(data)}, ""
    if data.run_log is not None and (bars := measured_bars(data)):
        bars_by_row_name["measured"] = bars
        frames_s = data.run_log["frames_s"]
        last = format_seconds(frames_s[-1] if frames_s else 0)
        head += f"; measured, the last frame: {last}{_describe_queueing(data)}"
        note = (
            "The upper row of each device is predicted, the lower one measured. Measured times begin when the frame "
            "begins or reaches the device. Sending ends when the operating system has taken the bytes. Pale bars "
            "belong to other in-flight frames."
        )
    elif data.run_log is not None:
        note = f"Target {data.run_log['target']} measures only sums: see the table of devices."
    samples = [element("li", element("i", class_=f"sample {kind}"), text) for kind, text in keys.items()]
    charts = [element("ul", samples, class_="key"), element("h3", head)]
    charts.append(draw_timeline(data, bars_by_row_name, " and ".join(bars_by_row_name)))
    charts += [element("p", note, class_="note")] if note else []
    return charts + (
        [] if data.run_log is None or "events" not in data.run_log else [_render_events(data.run_log["events"])]
    )


def _render_events(events: Sequence[Mapping[str, Any]]) -> Markup:
    """Return a table of a run's events, such as failures of devices."""
    rows = [
        (
            format_seconds(event["at_s"]),
            event["kind"],
            replace_unprintable(event["device"]) or "-",
            ", ".join(map(replace_unprintable, event["down"])) or "none",
            str(event["finished_frames"]),
            f"{event['replayed_frames']} frames computed again, no output for {format_seconds(event['interruption_s'])}"
            if event["kind"] == "takeover"
            else replace_unprintable(event["reason"]),
        )
        for event in events
    ]
    return html_table(("time", "event", "device", "devices down", "frames finished", ""), rows, "events")


def _render_memory_key() -> Markup:
    kinds = (
        ("weights", "weights"),
        ("live", "buffers and activations"),
        ("added", "runtime of the target (process and engine)"),
    )
    items = [element("li", element("i", class_=f"sample m-{kind}"), text) for kind, text in kinds]
    text = (
        "The bar shows the peak of the compiled program. Below it: buffers (dark) and activations (light) over a frame."
        f' They include tensors inside layers and buffers of messages, which "{MEMORY_LABEL}" does not count.'
    )
    return join_markup((element("ul", items, class_="key"), element("p", text, class_="note")))


def _bound_note(document: Mapping[str, Any]) -> Markup:
    if not document["lower_bound"]:
        return Markup("")
    text = _describe_limit(document["objective"], document["lower_bound"])
    return element("p", f"{text[0].upper()}{text[1:]}.", class_="note")


def _front_note(document: Mapping[str, Any]) -> Markup:
    level = "a full simulation of each plan" if document["metrics_source"] == "measured" else "the search's fast model"
    text = (
        f"{len(document['points'])} Pareto-optimal plans of "
        f"{document['evaluations']} evaluated ones on {document['platform']}. The values are from {level}; smaller is "
        "better."
    )
    return element("p", text + (" The search was interrupted." if document["interrupted"] else ""), class_="note")
