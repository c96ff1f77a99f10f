"""The reports of docs/gallery.md. `python tests/support/gallery.py` makes them anew (as root: it emulates boards).

In: networks with seeded weights, built-in platforms. Out: docs/gallery/NAME.html, as `dicompiler report` writes it, and
NAME.png, what a browser shows of it first.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from PIL import Image
from support.browser import browser

from dicompiler.cli import main as dicompiler
from dicompiler.networks import build

PLACE = Path(__file__).parents[2] / "docs" / "gallery"
WIDTH, HEIGHT, COLOURS = 1080, 960, 64


@dataclass(frozen=True)
class Case:
    """A network on a platform. command: what compiles or explores it, with its options. frames: how many are emulated,
    whose log the report shows; compared: strategies whose table it shows."""

    network: str
    platform: str
    command: tuple[str, ...]
    frames: int = 0
    compared: str = ""


CASES = {
    "pays": Case("resnet18", "rpi4x4", ("compile", "--strategy", "cpsat{tries=0}"), 12, "single,pipeline,modnn,dp"),
    "does-not-pay": Case("mobilenet_v2", "rpi4x4", ("compile", "--strategy", "modnn"), compared="single,modnn,dp"),
    "stream": Case("resnet18", "rpi4x4", ("compile", "--strategy", "replicate", "--objective", "throughput")),
    "front": Case("resnet18", "rpi4x4", ("explore", "--generations", "30", "--population", "40")),
}


def page(name: str, place: Path) -> bytes:
    """The report of a case, made in a directory that is empty."""
    case = CASES[name]
    model, made, log, report = place / f"{case.network}.onnx", place / name, place / "run.json", place / "report.html"
    onnx.save(build(case.network), model)
    _run(*case.command, model, "--platform", case.platform, "-o", made)
    more: list[object] = ["--strategies", case.compared] if case.compared else []
    if case.frames:
        _run("emulate", made, "--frames", case.frames, "--log", log)
        more += ["--log", log]
    _run("report", made, *more, "-o", report)
    return report.read_bytes()


def _run(*words: object) -> None:
    code = dicompiler([str(word) for word in words])
    if code:
        raise SystemExit(f"gallery.py: dicompiler {' '.join(map(str, words))}: exit code {code}")


def pictures() -> Iterator[tuple[str, bytes]]:
    """Of each report that is there what a browser shows first, in few colours."""
    with browser() as chromium:
        for name in CASES:
            chromium.open(PLACE / f"{name}.html", WIDTH, HEIGHT)
            shown = Image.open(io.BytesIO(chromium.screenshot(whole=False))).convert("RGB").quantize(COLOURS)
            written = io.BytesIO()
            shown.save(written, "PNG", optimize=True)
            yield name, written.getvalue()


def main() -> None:
    """Makes all of them."""
    PLACE.mkdir(exist_ok=True)
    for name in CASES:
        with tempfile.TemporaryDirectory() as place:
            (PLACE / f"{name}.html").write_bytes(page(name, Path(place)))
    for name, picture in pictures():
        (PLACE / f"{name}.png").write_bytes(picture)


if __name__ == "__main__":
    main()
