"""Charts of memory: use and limit of each device, and the course over a frame.

    ReportData ⇒ Markup

Weights and the memory that the target adds are constant, so the rest has its own scale.
"""

from __future__ import annotations

from dicompiler.base.units import format_bytes
from dicompiler.cost.memory import MemoryTimeline
from dicompiler.report.html import Markup, element, svg
from dicompiler.report.layer_graph_svg import colour_class, device_chip
from dicompiler.report.report_data import ReportData

CHART_WIDTH_PX, CHART_HEIGHT_PX, CHART_MARGIN_PX, CHART_TOP_PX = 300.0, 96.0, 4.0, 16.0
MAX_LIMIT_RATIO = 3.0
"""A limit up to this multiple of the use is drawn to scale."""


def draw_memory(facts: ReportData) -> Markup:
    """Return a card for each device."""
    return element("div", [_draw_card(facts, name) for name in facts.devices], class_="cards")


def _draw_card(facts: ReportData, name: str) -> Markup:
    course, added, host = facts.memory_courses[name], facts.target_memory[name], facts.platform.host_of[name]
    others = [other for other in facts.devices if other != name and facts.platform.host_of[other] == host]
    taken = sum(facts.memory_courses[other].peak_bytes + facts.target_memory[other] for other in others)
    limit = facts.platform.host(host).memory
    total = course.peak_bytes + added
    shared = f", shared with {', '.join(others)} ({format_bytes(taken)})" if others else ""
    percent = 100 * (total + taken) / limit
    head = element("h3", device_chip(facts.device_number[name]), " ", name)
    words = f"{format_bytes(total)} of {format_bytes(limit)} ({percent:.3g} %){shared}"
    return element(
        "section",
        head,
        element("p", words),
        _draw_peak(name, course, added, limit - taken, facts.device_number[name]),
        _draw_course(name, course, limit - taken - added - course.weights, facts.device_number[name]),
        class_="card",
    )


def _draw_peak(name: str, course: MemoryTimeline, added: int, limit: int, number: int) -> Markup:
    """Return a bar of the peak memory, with the limit."""
    live = course.peak_bytes - course.weights
    parts = (("weights", course.weights, colour_class(number)), ("buffers and activations", live, f"{colour_class(number)} live"),
             ("added by the target", added, "added"))  # fmt: skip
    total = sum(size for _, size, _ in parts)
    end = max(total, limit) if limit <= MAX_LIMIT_RATIO * total else total * 1.2
    drawn, left = [], 0.0
    for what, size, kind in parts:
        wide = CHART_WIDTH_PX * size / end
        drawn.append(
            element(
                "rect", x=left, y=4, width=wide, height=14, class_=kind, data_d=f"{name}: {what}\n{format_bytes(size)}"
            )
        )
        left += wide
    at = min(CHART_WIDTH_PX - 1, CHART_WIDTH_PX * limit / end)
    drawn.append(
        element("line", x1=at, x2=at, y1=0, y2=22, class_="limit" if limit <= MAX_LIMIT_RATIO * total else "limit far")
    )
    words = "; ".join(f"{what} {format_bytes(size)}" for what, size, _ in parts)
    texts = [element("text", f"weights {format_bytes(course.weights)} · added {format_bytes(added)}", x=0, y=34)]
    if limit > MAX_LIMIT_RATIO * total:
        texts.append(element("text", "limit ›", x=CHART_WIDTH_PX - 4, y=34, text_anchor="end", class_="limit"))
    return svg(f"memory of {name}", f"{words}; limit {format_bytes(limit)}", CHART_WIDTH_PX, 40.0, drawn, texts)


def _draw_course(name: str, course: MemoryTimeline, room: int, number: int) -> Markup:
    """Return buffers and activations over the steps of a frame, and the remaining limit if it is near."""
    both = [a + b for a, b in zip(course.buffers, course.activations, strict=True)]
    most = max(both)
    near = 0 <= room <= MAX_LIMIT_RATIO * most
    end = max(most, room if near else 0, 1)
    count = len(both) // 2
    segments = f"{count} segment{'' if count == 1 else 's'}"
    base, wide = CHART_TOP_PX + CHART_HEIGHT_PX, CHART_WIDTH_PX - 2 * CHART_MARGIN_PX

    def area(values: list[int], kind: str) -> Markup:
        step = wide / len(values)
        path = f"M{CHART_MARGIN_PX:.0f} {base:.0f}"
        for i, value in enumerate(values):
            path += f"V{base - CHART_HEIGHT_PX * value / end:.1f}H{CHART_MARGIN_PX + (i + 1) * step:.1f}"
        return element("path", d=f"{path}V{base:.0f}Z", class_=kind)

    drawn = [
        area(both, f"{colour_class(number)} live"),
        area(list(course.buffers), colour_class(number)),
        element("line", x1=CHART_MARGIN_PX, x2=CHART_WIDTH_PX - CHART_MARGIN_PX, y1=base, y2=base, class_="tick"),
        element("text", f"at most {format_bytes(most)}", x=CHART_MARGIN_PX, y=11),
        element("text", f"{segments} →", x=CHART_WIDTH_PX - CHART_MARGIN_PX, y=base + 13, text_anchor="end"),
        element("text", "start of the frame", x=CHART_MARGIN_PX, y=base + 13),
    ]
    if near:
        y = base - CHART_HEIGHT_PX * room / end
        drawn.append(
            element("line", x1=CHART_MARGIN_PX, x2=CHART_WIDTH_PX - CHART_MARGIN_PX, y1=y, y2=y, class_="limit")
        )
        drawn.append(
            element(
                "text",
                f"limit {format_bytes(room)}",
                x=CHART_WIDTH_PX - CHART_MARGIN_PX,
                y=11,
                text_anchor="end",
                class_="limit",
            )
        )
    else:
        drawn.append(
            element(
                "text", f"{format_bytes(room)} available", x=CHART_WIDTH_PX - CHART_MARGIN_PX, y=11, text_anchor="end"
            )
        )
    return svg(
        f"buffers and activations of {name} over a frame",
        f"at most {format_bytes(most)}, in {segments}; {format_bytes(room)} available",
        CHART_WIDTH_PX, CHART_TOP_PX + CHART_HEIGHT_PX + 18, drawn,
    )  # fmt: skip
