"""The layout of a graph: nothing overlaps, every edge leads down to its reader."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from dicompiler.analysis.report.graph_layout import EDGE_GAP_WIDTH_PX, GraphLayout, layout_graph


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[float], list[tuple[int, int]]]:
    count = draw(st.integers(1, 14))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=24)) if pairs else []
    return draw(st.lists(st.floats(20, 150), min_size=count, max_size=count)), edges


def boxes(layout: GraphLayout, widths: list[float]) -> dict[int, list[tuple[float, float]]]:
    """Map each row to the (left, right) ends of its boxes and of the gaps through which edges pass."""
    found: dict[int, list[tuple[float, float]]] = {}
    for x, row, width in zip(layout.x, layout.row, widths, strict=True):
        found.setdefault(row, []).append((x - width / 2, x + width / 2))
    for x, row in layout.edge_gaps:
        found.setdefault(row, []).append((x - EDGE_GAP_WIDTH_PX / 2, x + EDGE_GAP_WIDTH_PX / 2))
    return found


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_boxes_and_edge_gaps_do_not_overlap_and_every_edge_leads_down_to_its_reader(
    graph: tuple[list[float], list[tuple[int, int]]],
) -> None:
    widths, edges = graph
    layout = layout_graph(widths, edges)
    for own in boxes(layout, widths).values():
        ends = sorted(own)
        assert all(left[1] < right[0] for left, right in itertools.pairwise(ends))
        assert all(left >= -0.2 and right <= layout.width + 0.2 for left, right in own)
    # Follow each edge from the node that reads it upwards, through the gaps between nodes, to the node that writes it.
    for a, b in edges:
        at = (layout.x[b], layout.row[b])
        reader = b
        while at != (layout.x[a], layout.row[a]):
            at = next(p[:2] for p, source, r in layout.edge_pieces if p[2:] == at and source == a and r == reader)
            reader = -1
            assert at[1] >= layout.row[a]
