"""SVG of the layer graph: boxes for layers, with bars that show how devices share the work, and edges between boxes.

The graph is cut into bands, i.e. groups of rows, so that page breaks do not split boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dicompiler.analysis.report.graph_layout import GraphLayout, layout_graph
from dicompiler.analysis.report.html import Markup, element, replace_unprintable, svg
from dicompiler.analysis.report.report_data import ReportData
from dicompiler.base.units import format_bytes, format_flops, format_seconds
from dicompiler.cost.workload import task_flops, task_seconds
from dicompiler.ir.layers import Layer
from dicompiler.ir.regions import volume
from dicompiler.ir.routing import Task, task_id
from dicompiler.partition.routing import format_region

BOX_WIDTH_PX, BOX_HEIGHT_PX, ROW_HEIGHT_PX = 136.0, 32.0, 48.0
"""Width and height of the box of a layer, and vertical distance from one row of boxes to the next."""
BAR_HEIGHT_PX = 13.0
ROWS_PER_BAND = 3
"""Number of rows of a band, which a page break never splits."""
MAX_UNBROKEN_ROWS = 14
"""A layer graph with at most this number of rows is not cut into bands."""
MAX_LABEL_LETTERS = 22
"""Maximum number of letters of a layer's name in its box."""
MARGIN_PX = 8.0
"""Free space on the left and right of the layer graph."""


def draw_layer_graph(data: ReportData) -> Markup:
    """Return the layer graph as SVG, with the layers coloured by device."""
    layers = data.routing.layers
    names = [*layers.inputs, *(layer.name for layer in layers.layers), *layers.delivered_outputs]
    first, end = len(layers.inputs), len(layers.inputs) + len(layers.layers)
    node = {name: i for i, name in enumerate(layers.inputs)}
    node |= {tensor: first + i for i, layer in enumerate(layers.layers) for tensor in layer.outputs}
    edges = [(node[t], first + i) for i, layer in enumerate(layers.layers) for t in layer.inputs if t in node]
    edges += [(node[tensor], end + i) for i, tensor in enumerate(layers.delivered_outputs) if tensor in node]
    layout = layout_graph([BOX_WIDTH_PX] * len(names), list(dict.fromkeys(edges)))
    boxes: list[Markup] = [_draw_terminal(name, "input", data.compilation.plan.source) for name in layers.inputs]  # type: ignore[union-attr]
    boxes += [_draw_layer(data, layer) for layer in layers.layers]
    boxes += [_draw_terminal(name, "output", data.compilation.plan.sink) for name in layers.delivered_outputs]  # type: ignore[union-attr]
    place_of = {layer.name: first + i for i, layer in enumerate(layers.layers)}
    moving = {(node[t], place_of[name]) for t, name in data.remote_reads if t in node}
    width = max(layout.width, BOX_WIDTH_PX) + 2 * MARGIN_PX
    band = ROWS_PER_BAND if layout.rows > MAX_UNBROKEN_ROWS else layout.rows
    bands = [
        _draw_band(layout, boxes, moving, start, min(start + band, layout.rows), width)
        for start in range(0, layout.rows, band)
    ]
    return element("div", bands, class_="graph wide", style=f"--w:{width:.0f}px", tabindex="0", role="region",
                   aria_label="layers")  # fmt: skip


def _draw_band(
    layout: GraphLayout, boxes: Sequence[Markup], moving: set[tuple[int, int]], start: int, stop: int, width: float
) -> Markup:
    """Return a band of the layer graph: its rows `start` to `stop` - 1, and the edges that end in them.

    Args:
        layout: Positions of nodes and edges.
        boxes: The drawn box of each node.
        moving: Edges of tensors that are sent between devices, as pairs of nodes.
        start: The first row.
        stop: The row after the last one.
        width: Width in pixels.
    """
    top = start * ROW_HEIGHT_PX - (ROW_HEIGHT_PX - BOX_HEIGHT_PX)
    lines: list[Markup] = []
    for (x0, row0, x1, row1), source, reader in layout.edge_pieces:
        if start <= row1 < stop:
            y0, y1 = row0 * ROW_HEIGHT_PX + BOX_HEIGHT_PX - top, row1 * ROW_HEIGHT_PX - top
            lines.append(_draw_edge(x0 + MARGIN_PX, y0, x1 + MARGIN_PX, y1, (source, reader) in moving))
    for x, row in layout.edge_gaps:
        if start <= row < stop:
            lines.append(
                _draw_edge(
                    x + MARGIN_PX,
                    row * ROW_HEIGHT_PX - top,
                    x + MARGIN_PX,
                    row * ROW_HEIGHT_PX + BOX_HEIGHT_PX - top,
                    False,
                )
            )
    drawn = [
        element(
            "g",
            boxes[i],
            transform=f"translate({x + MARGIN_PX - BOX_WIDTH_PX / 2:.1f} {row * ROW_HEIGHT_PX - top:.0f})",
        )
        for i, (x, row) in enumerate(zip(layout.x, layout.row, strict=True))
        if start <= row < stop
    ]
    height = (stop - start) * ROW_HEIGHT_PX
    return svg(
        f"layers, rows {start + 1} to {stop} of {layout.rows}",
        "a box for each layer with the devices' shares of its operations",
        width, height, lines, drawn, width=width, height=height,
    )  # fmt: skip


def _draw_edge(x0: float, y0: float, x1: float, y1: float, moves: bool) -> Markup:
    half = (y1 - y0) / 2
    path = f"M{x0:.1f} {y0:.0f}V{y1:.0f}" if x0 == x1 else (
        f"M{x0:.1f} {y0:.0f}c0 {half:.0f} {x1 - x0:.1f} {half:.0f} {x1 - x0:.1f} {y1 - y0:.0f}"
    )  # fmt: skip
    return element("path", d=path, class_="moves" if moves else "edge")


def shorten(name: str, letters: int = MAX_LABEL_LETTERS) -> str:
    """Return a name with at most `letters` characters, without its start if it is longer."""
    # Names of layers differ mostly at the end.
    return name if len(name) <= letters else "…" + name[1 - letters :]


def _draw_terminal(name: str, what: str, devices: Sequence[str]) -> Markup:
    """Return the box of a graph input or output. `what` is "input" or "output"."""
    text = f"{what} {replace_unprintable(name)}\non {', '.join(devices)}"
    return element(
        "g",
        element("rect", x=0.5, y=0.5, width=BOX_WIDTH_PX - 1, height=BOX_HEIGHT_PX - 1, rx=15, class_="end"),
        element(
            "text",
            shorten(f"{what} {replace_unprintable(name)}"),
            x=BOX_WIDTH_PX / 2,
            y=BOX_HEIGHT_PX / 2 + 4,
            text_anchor="middle",
        ),
        class_="node",
        tabindex="0",
        data_d=text,
    )


def _draw_layer(data: ReportData, layer: Layer) -> Markup:
    """Return the box of a layer: its name, and a bar that shows how the devices share its work."""
    shares = _work_by_device(data, layer)
    bar: list[Any] = []
    left, total = 3.0, sum(shares.values())
    for device, share in shares.items():
        width = (BOX_WIDTH_PX - 6) * share / total
        number = data.device_number[device]
        bar.append(
            element(
                "rect",
                x=left,
                y=BOX_HEIGHT_PX - BAR_HEIGHT_PX - 3,
                width=width,
                height=BAR_HEIGHT_PX,
                class_=colour_class(number),
            )
        )
        label = device if width > 7 * len(device) else str(number + 1) if width > 7 * len(str(number + 1)) else ""
        if label:
            place = {"x": left + width / 2, "y": BOX_HEIGHT_PX - 6.5, "text_anchor": "middle"}
            bar.append(element("text", label, class_=f"on {colour_class(number)}", **place))
        left += width
    return element(
        "g",
        element("rect", x=0.5, y=0.5, width=BOX_WIDTH_PX - 1, height=BOX_HEIGHT_PX - 1, rx=4, class_="box"),
        element("text", shorten(replace_unprintable(layer.name)), x=4, y=12),
        bar,
        class_="node layer",
        tabindex="0",
        data_d=_describe_layer(data, layer),
    )


def colour_class(number: int) -> str:
    """Return the CSS class of device number `number`; from the ninth device on, colours repeat with hatching."""
    return f"d{number % 8}" + (" again" if number >= 8 else "")


def device_chip(number: int) -> Markup:
    return element("b", number + 1, class_=f"chip {colour_class(number)}")


def device_label(data: ReportData, name: str) -> Markup:
    return element("span", device_chip(data.device_number[name]), " ", replace_unprintable(name))


def _work_by_device(data: ReportData, layer: Layer) -> dict[str, float]:
    """Return each device's work on a layer, in FLOPs or, if the layer has none, in output elements."""
    tasks = data.tasks[layer.name]
    by_flops = [float(task_flops(data.routing, task)) for task in tasks]
    sizes = by_flops if sum(by_flops) else [float(_output_elements(task)) for task in tasks]
    shares: dict[str, float] = {}
    for task, size in zip(tasks, sizes, strict=True):
        shares[task.device] = shares.get(task.device, 0.0) + (size if sum(sizes) else 1.0)
    return {device: shares[device] for device in data.devices if device in shares}


def _output_elements(task: Task) -> int:
    return sum(volume(region) for region in task.outputs.values() if region is not None)


def _describe_layer(data: ReportData, layer: Layer) -> str:
    """Return a text with the layer's operators and shape, and the region, time and bytes of each device's part."""
    tensor = data.routing.layers.tensors[layer.output]
    shape = "unknown" if tensor.shape is None else "×".join(map(str, tensor.shape)) or "a number"
    tasks = data.tasks[layer.name]
    total = sum(task_flops(data.routing, task) for task in tasks)
    head = [replace_unprintable(layer.name), " + ".join(node.op for node in layer.nodes)]
    head.append(f"output {shape}, {format_flops(total)} in {len(tasks)} part{'' if len(tasks) == 1 else 's'}")
    if layer.whole_reason:
        head.append(f"whole: {layer.whole_reason}")
    return "\n".join([*head, *(_describe_part(data, task) for task in tasks)]) + (
        "" if tasks else "\nits output is not read"
    )


def _describe_part(data: ReportData, task: Task) -> str:
    (key, region), *_ = task.outputs.items()
    seconds = task_seconds(data.routing, data.platform, data.problem.cost_model, task)
    texts = [f"{task.device}: {'all' if region is None else format_region(region)}"]
    if key.reduce is not None:
        texts.append(f"partial sum over inputs {key.reduce[0]}:{key.reduce[1]}")
    if task.kind == "merger":
        texts.append("adds the partial sums")
    if task.lane:
        texts.append(f"lane {task.lane}")
    texts += [format_flops(task_flops(data.routing, task)), format_seconds(seconds)]
    received = data.received_bytes_by_part.get(task_id(task), 0)
    return ", ".join([*texts, f"receives {format_bytes(received)}"] if received else texts)
