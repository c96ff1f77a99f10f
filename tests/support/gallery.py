"""Create the reports of docs/use/gallery.md: `python tests/support/gallery.py` (as root, because it emulates boards).

networks with seeded weights, built-in platforms ⇒ docs/gallery/NAME.html and a picture of its top, NAME.png
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
WIDTH_PX, HEIGHT_PX, COLOUR_COUNT = 1080, 960, 64


@dataclass(frozen=True)
class Case:
    """A network on a platform.

    Attributes:
        network: Name of a built-in network.
        platform: Name of a built-in platform.
        command: The command that compiles or explores it, with its options.
        frames: Number of emulated frames whose log the report shows; 0: no emulation.
        compared: Strategies in the report's table, separated by commas.
    """

    network: str
    platform: str
    command: tuple[str, ...]
    frames: int = 0
    compared: str = ""


CASES = {
    "pays": Case("resnet18", "rpi4x4", ("compile", "--strategy", "cpsat{tries=0}"), 12, "single,pipeline,modnn,dp"),
    "does-not-pay": Case(
        "mobilenet_v2", "rpi4-gateway-x4", ("compile", "--strategy", "modnn"), compared="single,modnn,dp"
    ),
    "stream": Case("resnet18", "rpi4x4", ("compile", "--strategy", "replicate", "--objective", "throughput")),
    "front": Case("resnet18", "rpi4x4", ("explore", "--generations", "30", "--population", "40")),
}


def make_report(name: str, directory: Path) -> bytes:
    """Return the HTML report of a case, created in an empty directory."""
    case = CASES[name]
    model, artifact = directory / f"{case.network}.onnx", directory / name
    log, report = directory / "run.json", directory / "report.html"
    onnx.save(build(case.network), model)
    _run(*case.command, model, "--platform", case.platform, "-o", artifact)
    report_options: list[object] = ["--strategies", case.compared] if case.compared else []
    if case.frames:
        _run("emulate", artifact, "--frames", case.frames, "--log", log)
        report_options += ["--log", log]
    _run("report", artifact, *report_options, "-o", report)
    return report.read_bytes()


def _run(*words: object) -> None:
    code = dicompiler([str(word) for word in words])
    if code:
        raise SystemExit(f"gallery.py: dicompiler {' '.join(map(str, words))}: exit code {code}")


def make_pictures() -> Iterator[tuple[str, bytes]]:
    """Yield the name of each existing report, and a PNG of its top in few colours."""
    with browser() as chromium:
        for name in CASES:
            chromium.open(PLACE / f"{name}.html", WIDTH_PX, HEIGHT_PX)
            screenshot = Image.open(io.BytesIO(chromium.screenshot(whole=False)))
            png = io.BytesIO()
            screenshot.convert("RGB").quantize(COLOUR_COUNT).save(png, "PNG", optimize=True)
            yield name, png.getvalue()


def main() -> None:
    """Create all reports and pictures."""
    PLACE.mkdir(exist_ok=True)
    for name in CASES:
        with tempfile.TemporaryDirectory() as temporary:
            (PLACE / f"{name}.html").write_bytes(make_report(name, Path(temporary)))
    for name, picture in make_pictures():
        (PLACE / f"{name}.png").write_bytes(picture)


if __name__ == "__main__":
    main()
