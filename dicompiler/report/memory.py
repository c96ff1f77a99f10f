"""The pictures of memory: for each device what it holds against its limit, and what comes and goes over a frame.

Facts → markup. Weights and what the target adds are there all the time: what changes has a scale of its own.
"""

from __future__ import annotations

from dicompiler.base.units import format_bytes
from dicompiler.cost.memory import MemoryCourse
from dicompiler.report.facts import Facts
from dicompiler.report.graph import chip, colour
from dicompiler.report.markup import Markup, element, picture

WIDTH, HEIGHT, LEFT, TOP = 300.0, 96.0, 4.0, 16.0
NEAR = 3.0
"""A limit is drawn to scale where it is at most so many times what is held."""


def memory(facts: Facts) -> Markup:
    """A card for each device."""
    return element("div", [_card(facts, name) for name in facts.devices], class_="cards")


def _card(facts: Facts, name: str) -> Markup:
    course, added, host = facts.courses[name], facts.added[name], facts.platform.host_of[name]
    others = [other for other in facts.devices if other != name and facts.platform.host_of[other] == host]
    taken = sum(facts.courses[other].peak + facts.added[other] for other in others)
    limit = facts.platform.host(host).memory
    total = course.peak + added
    shared = f", shared with {', '.join(others)} ({format_bytes(taken)})" if others else ""
    percent = 100 * (total + taken) / limit
    head = element("h3", chip(facts.number[name]), " ", name)
    words = f"{format_bytes(total)} of {format_bytes(limit)} ({percent:.3g} %){shared}"
    return element(
        "section",
        head,
        element("p", words),
        _bar(name, course, added, limit - taken, facts.number[name]),
        _course(name, course, limit - taken - added - course.weights, facts.number[name]),
        class_="card",
    )


def _bar(name: str, course: MemoryCourse, added: int, limit: int, number: int) -> Markup:
    """All that is held at most, side by side, and the limit."""
    live = course.peak - course.weights
    parts = (("weights", course.weights, colour(number)), ("buffers and activations", live, f"{colour(number)} live"),
             ("added by the target", added, "added"))  # fmt: skip
    total = sum(size for _, size, _ in parts)
    end = max(total, limit) if limit <= NEAR * total else total * 1.2
    drawn, left = [], 0.0
    for what, size, kind in parts:
        wide = WIDTH * size / end
        drawn.append(
            element(
                "rect", x=left, y=4, width=wide, height=14, class_=kind, data_d=f"{name}: {what}\n{format_bytes(size)}"
            )
        )
        left += wide
    at = min(WIDTH - 1, WIDTH * limit / end)
    drawn.append(element("line", x1=at, x2=at, y1=0, y2=22, class_="limit" if limit <= NEAR * total else "limit far"))
    words = "; ".join(f"{what} {format_bytes(size)}" for what, size, _ in parts)
    texts = [element("text", f"weights {format_bytes(course.weights)} · added {format_bytes(added)}", x=0, y=34)]
    if limit > NEAR * total:
        texts.append(element("text", "limit ›", x=WIDTH - 4, y=34, text_anchor="end", class_="limit"))
    return picture(f"memory of {name}", f"{words}; limit {format_bytes(limit)}", WIDTH, 40.0, drawn, texts)


def _course(name: str, course: MemoryCourse, room: int, number: int) -> Markup:
    """Buffers and activations over the steps of a frame; the limit, where it is near, is what is left for them."""
    both = [a + b for a, b in zip(course.buffers, course.activations, strict=True)]
    most = max(both)
    near = 0 <= room <= NEAR * most
    end = max(most, room if near else 0, 1)
    count = len(both) // 2
    segments = f"{count} segment{'' if count == 1 else 's'}"
    base, wide = TOP + HEIGHT, WIDTH - 2 * LEFT

    def area(values: list[int], kind: str) -> Markup:
        step = wide / len(values)
        path = f"M{LEFT:.0f} {base:.0f}"
        for i, value in enumerate(values):
            path += f"V{base - HEIGHT * value / end:.1f}H{LEFT + (i + 1) * step:.1f}"
        return element("path", d=f"{path}V{base:.0f}Z", class_=kind)

    drawn = [
        area(both, f"{colour(number)} live"),
        area(list(course.buffers), colour(number)),
        element("line", x1=LEFT, x2=WIDTH - LEFT, y1=base, y2=base, class_="tick"),
        element("text", f"at most {format_bytes(most)}", x=LEFT, y=11),
        element("text", f"{segments} →", x=WIDTH - LEFT, y=base + 13, text_anchor="end"),
        element("text", "start of the frame", x=LEFT, y=base + 13),
    ]
    if near:
        y = base - HEIGHT * room / end
        drawn.append(element("line", x1=LEFT, x2=WIDTH - LEFT, y1=y, y2=y, class_="limit"))
        drawn.append(
            element("text", f"limit {format_bytes(room)}", x=WIDTH - LEFT, y=11, text_anchor="end", class_="limit")
        )
    else:
        drawn.append(element("text", f"room for {format_bytes(room)}", x=WIDTH - LEFT, y=11, text_anchor="end"))
    return picture(
        f"buffers and activations of {name} over a frame",
        f"at most {format_bytes(most)}, in {segments}; room for {format_bytes(room)}",
        WIDTH, TOP + HEIGHT + 18, drawn,
    )  # fmt: skip
