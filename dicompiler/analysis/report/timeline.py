"""Timeline of a frame: computing, sending and waiting of each device, as simulated and as measured.

Each device has a row of simulated and a row of measured times. The upper half of a row shows computing and waiting, the
lower half sending in the colour of the receiver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dicompiler.analysis.report.html import Markup, element, replace_unprintable
from dicompiler.analysis.report.layer_graph_svg import colour_class, device_chip
from dicompiler.analysis.report.report_data import ReportData
from dicompiler.base.units import format_bytes, format_seconds

ROW_HEIGHT_PX, COMPUTE_HEIGHT_PX, SEND_HEIGHT_PX = 36, 18, 9
"""Height of a row, of its computing bars and of its sending bars."""
MAX_TICKS = 8
ZOOM_FACTORS = (1, 3, 10)


@dataclass(frozen=True)
class TimelineBar:
    """One activity of a device, drawn as a bar.

    Attributes:
        kind: "run" (computes a submodel), "handle" (handles a message), "send" or "wait".
        device: Name of the device.
        start: Start in seconds.
        end: End in seconds.
        text: Description of the activity.
        peer: The device at the other end of a message; "" if there is none.
        is_current_frame: Whether the activity belongs to the shown frame, and not to another in-flight frame.
    """

    kind: Literal["run", "handle", "send", "wait"]
    device: str
    start: float
    end: float
    text: str
    peer: str = ""
    is_current_frame: bool = True


def predicted_bars(data: ReportData) -> list[TimelineBar]:
    """Return bars for the activities of all devices in the simulation of one frame."""
    bars = []
    for span in data.simulation.spans:
        if span.kind == "compute":
            text = f"computes {data.segment_layers.get(span.name, span.name)}"
            bars.append(TimelineBar("run", span.device, span.start, span.end, text))
        elif span.kind == "message":
            bars.append(
                TimelineBar("send", span.device, span.start, span.end, f"sends {span.name} to {span.peer}", span.peer)
            )
        elif span.kind == "handle":
            text = f"handles {span.name} (peer {span.peer})"
            bars.append(TimelineBar("handle", span.device, span.start, span.end, text, span.peer))
        else:
            cause = f"waits for {span.name} from {span.peer}" if span.peer else f"waits for {span.name}"
            bars.append(TimelineBar("wait", span.device, span.start, span.end, cause, span.peer))
    return bars


def measured_bars(data: ReportData) -> list[TimelineBar]:
    """Return bars for the measured activities in the last frame of a run; empty if the target measures none."""
    bars: list[TimelineBar] = []
    log = data.run_log or {"devices": ()}
    transfers = data.program.all_transfers
    names = {
        device: [segment.name for role in data.program.roles for segment in role.devices[i].segments]
        for i, device in enumerate(data.devices)
    }
    last_frame = max((span["frame"] for device in log["devices"] for span in device["timeline"]), default=0)
    for entry in log["devices"]:
        device = entry["device"]
        for span in entry["timeline"]:
            index, kind = span["index"], span["kind"]
            peer = ""
            if kind == "run":
                name = names[device][index] if index < len(names[device]) else ""
                text = f"computes {data.segment_layers.get(name, name)}"
            elif 0 <= index < len(transfers):
                transfer = transfers[index]
                sends = kind == "send"
                peer = transfer.receiver if sends else transfer.sender
                text = f"{'sends' if sends else 'waits for'} {transfer.value.name} {'to' if sends else 'from'} {peer}"
            else:
                text = "waits for an input"
            current = span["frame"] == last_frame
            text += "" if current else f" (frame {span['frame']})"
            bars.append(TimelineBar(kind, device, span["start"], span["end"], text, peer, current))
    return bars


def draw_timeline(data: ReportData, bars_by_row_name: Mapping[str, Sequence[TimelineBar]], name: str) -> Markup:
    """Return the timeline of all devices, with buttons that widen the chart.

    Args:
        data: The report's data.
        bars_by_row_name: Activities of all devices by the name of a row, such as "predicted". Each device has a row for
            each name.
        name: Title of the chart.
    """
    end = max((bar.end for bars in bars_by_row_name.values() for bar in bars), default=0.0) or 1.0
    scale = 1e6 / end  # SVG units per second: the chart is always a million units wide.
    height = ROW_HEIGHT_PX * len(data.devices) * len(bars_by_row_name)
    drawn: list[Markup] = []
    labels: list[Markup] = []
    for i, device in enumerate(data.devices):
        for k, (row_name, bars) in enumerate(bars_by_row_name.items()):
            row = i * len(bars_by_row_name) + k
            shade = "row" if i % 2 else "row odd"
            drawn.append(
                element("rect", x=0, y=row * ROW_HEIGHT_PX, width=1_000_000, height=ROW_HEIGHT_PX, class_=shade)
            )
            drawn += [_draw_bar(data, bar, row, scale) for bar in bars if bar.device == device]
            label = (
                [element("span", row_name, class_="note")]
                if k
                else [device_chip(i), element("span", replace_unprintable(device))]
            )
            labels.append(element("div", label))
    title = f"{name}: {'a row' if len(bars_by_row_name) == 1 else 'rows'} for each device"
    lines = [element("line", x1=x, x2=x, y1=0, y2=height, class_="tick") for x, _ in _find_ticks(end)]
    description = ". ".join(f"{row_name}: {_describe_bars(data, bars)}" for row_name, bars in bars_by_row_name.items())
    svg = element(
        "svg", element("title", title), element("desc", description), drawn, lines,
        viewBox=f"0 0 1000000 {height}", preserveAspectRatio="none", height=height, role="img", aria_label=title,
    )  # fmt: skip
    axis = element("div", [_tick_label(x, text) for x, text in _find_ticks(end)], class_="axis")
    inner = element("div", axis, svg, class_="stretch")
    buttons = [element("button", f"{zoom}×", type="button", data_zoom=zoom) for zoom in ZOOM_FACTORS]
    return element(
        "div",
        element("div", buttons, class_="zoom", aria_label="width"),
        element("div", labels, class_="names"),
        element("div", inner, class_="wide", tabindex="0", role="region", aria_label=title),
        class_="timeline",
    )


def _draw_bar(data: ReportData, bar: TimelineBar, row: int, scale: float) -> Markup:
    lower = bar.kind == "send"
    places = {
        "run": (3, COMPUTE_HEIGHT_PX),
        "handle": (3, COMPUTE_HEIGHT_PX),
        "wait": (2 + COMPUTE_HEIGHT_PX // 2, 2),
        "send": (COMPUTE_HEIGHT_PX + 5, SEND_HEIGHT_PX),
    }
    y, height = places[bar.kind]
    device_number = data.device_number[bar.peer if lower else bar.device]
    kind = "" if bar.kind == "wait" else " " + colour_class(device_number)
    text = f"{bar.device} {replace_unprintable(bar.text)}\n{format_seconds(bar.start)} to {format_seconds(bar.end)}: "
    return element(
        "rect",
        x=round(bar.start * scale),
        y=row * ROW_HEIGHT_PX + y,
        width=max(1, round((bar.end - bar.start) * scale)),
        height=height,
        class_=f"{bar.kind}{kind}" + ("" if bar.is_current_frame else " other"),
        data_d=text + format_seconds(bar.end - bar.start),
    )


def _tick_label(x: int, text: str) -> Markup:
    return element("span", text, style=f"left:{x / 1e4:.2f}%", class_="last" if x > 920_000 else None)


def _find_ticks(end: float) -> list[tuple[int, str]]:
    """Return at most MAX_TICKS ticks at round times, each with its position (in millionths of the width) and label."""
    step = 10.0**-9
    while end / step > MAX_TICKS:
        step *= 2.5 if f"{step:e}".startswith("2") else 2
    count = int(end / step + 1e-9)
    return [(round(1e6 * i * step / end), format_seconds(round(i * step, 12))) for i in range(count + 1)]


def _describe_bars(data: ReportData, bars: Sequence[TimelineBar]) -> str:
    """Return a text for screen readers with the seconds of computing, sending and waiting per device."""
    texts = []
    for device in data.devices:
        sums = [
            format_seconds(sum(bar.end - bar.start for bar in bars if (bar.device, bar.kind) == (device, kind)))
            for kind in ("run", "send", "wait")
        ]
        texts.append(f"{device} computes {sums[0]}, sends {sums[1]}, waits {sums[2]}")
    return "; ".join(texts)


def device_rows(data: ReportData) -> list[tuple[str, ...]]:
    """Return a table row for each device: its share of the network, and predicted and measured times per frame."""
    rows = []
    flops = sum(data.device(name).flops for name in data.devices) or 1
    for name in data.devices:
        metrics = data.device(name)
        layers = sum(any(task.device == name for task in tasks) for tasks in data.tasks.values())
        row = [
            str(layers),
            f"{100 * metrics.flops / flops:.1f} %",
            format_seconds(metrics.compute_s),
            format_seconds(metrics.wait_s),
        ]
        if data.run_log is not None:
            entry = next(entry for entry in data.run_log["devices"] if entry["device"] == name)
            frames = max(1, len(data.run_log["frames_s"]))
            row += [format_seconds(entry["compute_s"] / frames), format_seconds(entry["wait_s"] / frames)]
        rows.append(
            (name, *row, format_bytes(metrics.weights), format_bytes(metrics.sent), format_bytes(metrics.received))
        )
    return rows
