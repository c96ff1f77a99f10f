"""Draw the picture of README.md, docs/architecture.svg: `python tests/support/architecture.py`.

It shows model → passes → plan → programs → boards. Its colours are readable on light and dark pages, and its bytes are
the same each time.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

PICTURE = Path(__file__).parents[2] / "docs" / "architecture.svg"
WIDTH, HEIGHT, BOX_WIDTH, STAGE_STEP = 976, 290, 158, 199
STAGES = (
    ("model.onnx", ("a trained network;", "cluster.toml: boards", "and their network")),
    ("passes", ("normalise, infer shapes,", "form layers; a rule", "for each operator")),
    ("plan", ("device and region of", "each layer's parts: by a", "strategy, or by you")),
    ("programs", ("per board: segments", "of the network, sends", "and receives")),
    ("boards", ("processes over TLS,", "MPI and C++, or", "microcontrollers")),
)
ARROWS = ("load", "decide", "partition", "deploy")
CHECKS = (
    (1, 1, ("after each pass:", "valid ONNX")),
    (2, 1, ("simulated; compared with", "the best single board")),
    (3, 2, ("verify: bit-equal on integers,", "outputs equal to onnxruntime's,", "bytes as predicted")),
)


def draw() -> str:
    """Return the picture as SVG."""
    parts = [_box(index, *stage) for index, stage in enumerate(STAGES)]
    parts += [_arrow(index, label) for index, label in enumerate(ARROWS)]
    parts += [_check(*check) for check in CHECKS]
    body = "\n".join(parts)
    title = "From a model through passes and a plan to programs on boards, with the checks at each stage"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        f' role="img" font-family="sans-serif">\n<title>{title}</title>\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#f7f8fa"/>\n{body}\n</svg>\n'
    )


def _left(index: int) -> int:
    return 11 + index * STAGE_STEP


def _text(x: float, y: float, text: str, size: int = 13, weight: str = "normal", fill: str = "#333a45") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="middle">'
        f"{escape(text)}</text>"
    )


def _box(index: int, name: str, lines: tuple[str, ...]) -> str:
    x, middle = _left(index), _left(index) + BOX_WIDTH / 2
    box = (
        f'<rect x="{x}" y="70" width="{BOX_WIDTH}" height="118" rx="8" fill="#ffffff" stroke="#3566b8"'
        ' stroke-width="2"/>'
    )
    texts = [_text(middle, 128 + 19 * row, line, 12) for row, line in enumerate(lines)]
    return "\n".join([box, _text(middle, 99, name, 17, "bold", "#1f4a94"), *texts])


def _arrow(index: int, label: str) -> str:
    x, end = _left(index) + BOX_WIDTH + 4, _left(index + 1) - 4
    path = f'<path d="M{x} 129H{end - 7}M{end - 9} 123l9 6l-9 6" fill="none" stroke="#333a45" stroke-width="2"/>'
    return f"{path}\n{_text((x + end) / 2, 52, label, 12, 'bold', '#8a4a00')}"


def _check(first: int, boxes: int, lines: tuple[str, ...]) -> str:
    """Return the description of a check, below the boxes that it concerns."""
    x, end = _left(first), _left(first + boxes - 1) + BOX_WIDTH
    rows = [_text((x + end) / 2, 240 + 19 * row, line, fill="#1c6b3a") for row, line in enumerate(lines)]
    return "\n".join([f'<path d="M{x} 208v8H{end}v-8" fill="none" stroke="#1c6b3a" stroke-width="2"/>', *rows])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
