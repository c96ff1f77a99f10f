"""Charts of memory: use and limit of each device, and the use over the steps of a frame."""

from __future__ import annotations

from dicompiler.analysis.report.html import Markup, element, svg
from dicompiler.analysis.report.layer_graph_svg import colour_class, device_chip
from dicompiler.analysis.report.report_data import ReportData
from dicompiler.base.units import format_bytes, format_number
from dicompiler.cost.memory import MemoryTimeline

CHART_WIDTH_PX, CHART_HEIGHT_PX, CHART_MARGIN_PX, CHART_TOP_PX = 300.0, 96.0, 4.0, 16.0
MAX_LIMIT_RATIO = 3.0
"""If the limit exceeds the used memory by more than this factor, it is drawn at the edge of a chart, or omitted."""


def draw_memory(data: ReportData) -> Markup:
    return element("div", [_draw_card(data, name) for name in data.devices], class_="cards")


def _draw_card(data: ReportData, name: str) -> Markup:
    timeline, added, host = data.memory_timelines[name], data.target_memory[name], data.platform.host_of[name]
    others = [other for other in data.devices if other != name and data.platform.host_of[other] == host]
    used_by_others = sum(data.memory_timelines[other].peak_bytes + data.target_memory[other] for other in others)
    limit = data.platform.host(host).memory
    total = timeline.peak_bytes + added
    shared = f", shared with {', '.join(others)} ({format_bytes(used_by_others)})" if others else ""
    percent = 100 * (total + used_by_others) / limit
    head = element("h3", device_chip(data.device_number[name]), " ", name)
    summary = f"{format_bytes(total)} of {format_bytes(limit)} ({format_number(percent, 3)} %){shared}"
    return element(
        "section",
        head,
        element("p", summary),
        _draw_peak(name, timeline, added, limit - used_by_others, data.device_number[name]),
        _draw_timeline(name, timeline, limit - used_by_others - added - timeline.weights, data.device_number[name]),
        class_="card",
    )


def _draw_peak(name: str, timeline: MemoryTimeline, added: int, limit: int, number: int) -> Markup:
    """Return a bar of a device's peak memory, with a mark at its limit.

    Args:
        name: Name of the device.
        timeline: Memory of the device over a frame.
        added: Bytes that the target adds.
        limit: Bytes that the device may use.
        number: Index of the device, which determines the colour.
    """
    live = timeline.peak_bytes - timeline.weights
    colour = colour_class(number)
    parts = (("weights", timeline.weights, colour), ("buffers and activations", live, f"{colour} live"),
             ("runtime of the target", added, "added"))  # fmt: skip
    total = sum(size for _, size, _ in parts)
    end = max(total, limit) if limit <= MAX_LIMIT_RATIO * total else total * 1.2
    drawn, left = [], 0.0
    for name_of_part, size, kind in parts:
        width = CHART_WIDTH_PX * size / end
        drawn.append(
            element(
                "rect",
                x=left,
                y=4,
                width=width,
                height=14,
                class_=kind,
                data_d=f"{name}: {name_of_part}\n{format_bytes(size)}",
            )
        )
        left += width
    limit_x = min(CHART_WIDTH_PX - 1, CHART_WIDTH_PX * limit / end)
    drawn.append(
        element(
            "line",
            x1=limit_x,
            x2=limit_x,
            y1=0,
            y2=22,
            class_="limit" if limit <= MAX_LIMIT_RATIO * total else "limit far",
        )
    )
    description = "; ".join(f"{name_of_part} {format_bytes(size)}" for name_of_part, size, _ in parts)
    texts = [element("text", f"weights {format_bytes(timeline.weights)} · runtime {format_bytes(added)}", x=0, y=34)]
    if limit > MAX_LIMIT_RATIO * total:
        texts.append(element("text", "limit ›", x=CHART_WIDTH_PX - 4, y=34, text_anchor="end", class_="limit"))
    return svg(f"memory of {name}", f"{description}; limit {format_bytes(limit)}", CHART_WIDTH_PX, 40.0, drawn, texts)


def _draw_timeline(name: str, timeline: MemoryTimeline, available: int, number: int) -> Markup:
    """Return a chart of a device's buffers and activations over the steps of a frame.

    Args:
        name: Name of the device.
        timeline: Memory of the device over a frame.
        available: Limit for both in bytes. A line shows it if it is not far above the use.
        number: Index of the device, which determines the colour.
    """
    live_bytes = [a + b for a, b in zip(timeline.buffers, timeline.activations, strict=True)]
    peak = max(live_bytes)
    limit_is_near = 0 <= available <= MAX_LIMIT_RATIO * peak
    end = max(peak, available if limit_is_near else 0, 1)
    count = len(live_bytes) // 2
    segments = f"{count} segment{'' if count == 1 else 's'}"
    base, width = CHART_TOP_PX + CHART_HEIGHT_PX, CHART_WIDTH_PX - 2 * CHART_MARGIN_PX

    def area(values: list[int], kind: str) -> Markup:
        step = width / len(values)
        path = f"M{CHART_MARGIN_PX:.0f} {base:.0f}"
        for i, value in enumerate(values):
            path += f"V{base - CHART_HEIGHT_PX * value / end:.1f}H{CHART_MARGIN_PX + (i + 1) * step:.1f}"
        return element("path", d=f"{path}V{base:.0f}Z", class_=kind)

    drawn = [
        area(live_bytes, f"{colour_class(number)} live"),
        area(list(timeline.buffers), colour_class(number)),
        element("line", x1=CHART_MARGIN_PX, x2=CHART_WIDTH_PX - CHART_MARGIN_PX, y1=base, y2=base, class_="tick"),
        element("text", f"at most {format_bytes(peak)}", x=CHART_MARGIN_PX, y=11),
        element("text", f"{segments} →", x=CHART_WIDTH_PX - CHART_MARGIN_PX, y=base + 13, text_anchor="end"),
        element("text", "start of the frame", x=CHART_MARGIN_PX, y=base + 13),
    ]
    if limit_is_near:
        y = base - CHART_HEIGHT_PX * available / end
        drawn.append(
            element("line", x1=CHART_MARGIN_PX, x2=CHART_WIDTH_PX - CHART_MARGIN_PX, y1=y, y2=y, class_="limit")
        )
        drawn.append(
            element(
                "text",
                f"limit {format_bytes(available)}",
                x=CHART_WIDTH_PX - CHART_MARGIN_PX,
                y=11,
                text_anchor="end",
                class_="limit",
            )
        )
    else:
        drawn.append(
            element(
                "text",
                f"{format_bytes(available)} available",
                x=CHART_WIDTH_PX - CHART_MARGIN_PX,
                y=11,
                text_anchor="end",
            )
        )
    return svg(
        f"buffers and activations of {name} over a frame",
        f"at most {format_bytes(peak)}, in {segments}; {format_bytes(available)} available",
        CHART_WIDTH_PX, CHART_TOP_PX + CHART_HEIGHT_PX + 18, drawn,
    )  # fmt: skip
