"""Layout of a layered graph: rows from top to bottom, branches side by side, gaps through which long edges pass.

The method is Sugiyama's:

1. The row of a node is the length of the longest path to the node.
2. The nodes of a row are sorted by the mean position of their neighbours (barycentres).
3. Horizontal positions minimize the weighted squared distances between neighbours (isotonic regression).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BOX_GAP_PX, EDGE_GAP_WIDTH_PX = 16.0, 12.0
"""Distance between two boxes of a row, and width of a gap between boxes through which a long edge passes."""
SWEEP_COUNT = 8
EDGE_GAP_WEIGHT = 1e-6
"""Weight of a gap for a long edge when positions are optimized. Boxes have weight 1, so gaps hardly move them."""

RowItem = tuple[int, int]
"""(node, row): the node's box if this is its row; otherwise an edge gap, a gap through which its long edges pass."""
EdgePiece = tuple[float, int, float, int]
"""A piece of an edge between two adjacent rows: x and row of its upper end, x and row of its lower end."""


@dataclass(frozen=True)
class GraphLayout:
    """Positions of nodes and edges in pixels.

    Attributes:
        x: Horizontal centre of each node.
        row: Row of each node.
        edge_gaps: (x, row) of each gap between boxes through which an edge over several rows passes.
        edge_pieces: Pieces of edges between adjacent rows, each with the node at which the edge begins and the node at
            which the piece ends (-1 for an edge gap).
        width: Width of the graph.
        rows: Number of rows.
    """

    x: tuple[float, ...]
    row: tuple[int, ...]
    edge_gaps: tuple[tuple[float, int], ...]
    edge_pieces: tuple[tuple[EdgePiece, int, int], ...]
    width: float
    rows: int


def layout_graph(widths: Sequence[float], edges: Sequence[tuple[int, int]]) -> GraphLayout:
    """Return the layout of a graph with nodes 0, 1, … in topological order.

    Args:
        widths: Width of each node in pixels.
        edges: Pairs of nodes (from, to), each once.
    """
    rows = _assign_rows(len(widths), edges)
    last_row: dict[int, int] = {}
    for a, b in edges:
        last_row[a] = max(last_row.get(a, 0), rows[b] - 1)
    items: list[list[RowItem]] = [[] for _ in range(max(rows, default=-1) + 1)]
    for node, row in enumerate(rows):
        items[row].append((node, row))
    above: dict[RowItem, list[RowItem]] = {}
    for node, row in enumerate(rows):
        for lower in range(row + 1, last_row.get(node, row) + 1):
            items[lower].append((node, lower))
            above[node, lower] = [(node, lower - 1)]
    for a, b in edges:
        above.setdefault((b, rows[b]), []).append((a, rows[b] - 1))
    below: dict[RowItem, list[RowItem]] = {}
    for item, parents in above.items():
        for parent in parents:
            below.setdefault(parent, []).append(item)
    _order_rows(items, above, below)
    size = {
        item: widths[item[0]] if rows[item[0]] == item[1] else EDGE_GAP_WIDTH_PX for level in items for item in level
    }
    x = _place_items(items, above, below, size, rows)
    return _make_layout(x, size, rows, above, len(items))


def _assign_rows(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the row of each of `count` nodes: one row below the lowest of the node's predecessors."""
    rows = [0] * count
    for a, b in sorted(edges, key=lambda edge: edge[1]):
        rows[b] = max(rows[b], rows[a] + 1)
    return rows


def _order_rows(
    items: Sequence[list[RowItem]],
    above: Mapping[RowItem, Sequence[RowItem]],
    below: Mapping[RowItem, Sequence[RowItem]],
) -> None:
    """Sort the items (boxes, and gaps for edges) of each row by the mean position of their neighbours.

    Args:
        items: The items of each row.
        above: The neighbours of each item in the row above.
        below: The neighbours of each item in the row below.
    """
    at = {item: float(i) for row in items for i, item in enumerate(row)}
    for sweep in range(SWEEP_COUNT):
        near = above if sweep % 2 == 0 else below
        for row in items if sweep % 2 == 0 else reversed(items):
            mean = {i: sum(at[n] for n in near[i]) / len(near[i]) if near.get(i) else at[i] for i in row}
            row.sort(key=lambda item: (mean[item], at[item]))
            at.update((item, float(i)) for i, item in enumerate(row))


def _place_items(
    items: Sequence[Sequence[RowItem]],
    above: Mapping[RowItem, Sequence[RowItem]],
    below: Mapping[RowItem, Sequence[RowItem]],
    size: Mapping[RowItem, float],
    rows: Sequence[int],
) -> dict[RowItem, float]:
    """Return the horizontal centre of every item (a box, or a gap for an edge).

    Args:
        items: The items of each row, from left to right.
        above: The neighbours of each item in the row above.
        below: The neighbours of each item in the row below.
        size: Width of each item.
        rows: Row of each node.
    """
    x: dict[RowItem, float] = {}
    for row in items:
        left = 0.0
        for item in row:
            x[item] = left + size[item] / 2
            left += size[item] + BOX_GAP_PX
    for sweep in range(SWEEP_COUNT):
        near = above if sweep % 2 == 0 else below
        for row in items if sweep % 2 == 0 else reversed(items):
            wanted = [_find_wanted_position(item, near.get(item, ()), x, rows) for item in row]
            # An item in another row than its node is a gap for an edge. Its small weight lets it make room for boxes.
            weights = [EDGE_GAP_WEIGHT if rows[item[0]] != item[1] else 1.0 for item in row]
            x.update(zip(row, _separate_items(wanted, weights, [size[item] for item in row]), strict=True))
    return x


def _find_wanted_position(
    item: RowItem, near: Sequence[RowItem], x: Mapping[RowItem, float], rows: Sequence[int]
) -> float:
    """Return the mean position of the neighbours with which an item should be aligned.

    Boxes are aligned with boxes, and gaps for an edge with gaps and boxes of the same edge, if there are any.

    Args:
        item: A box or a gap for an edge.
        near: All neighbours of the item.
        x: Horizontal centre of each item.
        rows: Row of each node.
    """
    is_edge_gap = rows[item[0]] != item[1]
    preferred = [
        neighbour
        for neighbour in near
        if (neighbour[0] == item[0] if is_edge_gap else rows[neighbour[0]] == neighbour[1])
    ] or near
    return sum(x[neighbour] for neighbour in preferred) / len(preferred) if preferred else x[item]


def _separate_items(wanted: Sequence[float], weights: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Return the positions nearest to `wanted` at which the items keep their order and do not overlap.

    Args:
        wanted: Wanted centre of each item.
        weights: Weight of each item's squared distance from it.
        sizes: Width of each item.
    """
    offsets, left = [], 0.0
    for size in sizes:
        offsets.append(left + size / 2)
        left += size + BOX_GAP_PX
    # Pool-adjacent-violators algorithm. A block is a group of items that touch each other, as (mean position, total
    # weight, number of items).
    blocks: list[tuple[float, float, int]] = []
    for target, weight, offset in zip(wanted, weights, offsets, strict=True):
        mean, total, count = target - offset, weight, 1
        while blocks and blocks[-1][0] >= mean:
            other, more, number = blocks.pop()
            mean = (mean * total + other * more) / (total + more)
            total, count = total + more, count + number
        blocks.append((mean, total, count))
    means = [mean for mean, _, count in blocks for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _make_layout(
    x: Mapping[RowItem, float],
    size: Mapping[RowItem, float],
    rows: Sequence[int],
    above: Mapping[RowItem, Sequence[RowItem]],
    count: int,
) -> GraphLayout:
    low = min((x[item] - size[item] / 2 for item in x), default=0.0)
    at = {item: round(place - low, 1) for item, place in x.items()}
    width = max((at[item] + size[item] / 2 for item in at), default=0.0)
    pieces = []
    for item, parents in sorted(above.items(), key=lambda entry: (entry[0][1], entry[0][0])):
        reader = item[0] if rows[item[0]] == item[1] else -1
        pieces += [((at[parent], parent[1], at[item], item[1]), parent[0], reader) for parent in parents]
    edge_gaps = sorted(
        ((at[item], item[1]) for item in at if rows[item[0]] != item[1]), key=lambda edge_gap: edge_gap[::-1]
    )
    return GraphLayout(
        tuple(at[node, row] for node, row in enumerate(rows)),
        tuple(rows),
        tuple(edge_gaps),
        tuple(pieces),
        width,
        count,
    )
