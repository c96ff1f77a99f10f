"""MobileNetV2 0.35 in int8 within 256 KiB of RAM: on one board in tiles one after another, and on several boards.

The table is printed on stdout. The exit code is 1 if a network does not fit, or if its outputs are not bit-equal to
those of the unsplit network in TFLite Micro.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from support.fitting import boards, fitted, quantised, same_bits

from dicompiler import networks
from dicompiler.base.units import format_bytes
from dicompiler.cli.table import print_table
from dicompiler.cost.op_counts import count_macs, count_task_macs
from dicompiler.ir.pipeline_state import PipelineState

RAM = 256 * 1024
ROWS = ((160, 1, "fit"), (160, 8, "fit"), (224, 1, "fit"), (224, 8, "fit"))
"""(image size, available boards, strategy) of each row."""


@dataclass(frozen=True)
class Row:
    """The result of one compilation, for an image size and a number of boards.

    Attributes:
        size: Height and width of the image.
        boards: Number of boards used.
        tiles: Largest number of tiles of a layer.
        ram: Bytes of RAM of the fullest board.
        uncut: Bytes of RAM of the unsplit network on one board.
        multiplications: Multiply-adds relative to the unsplit network.
        seconds: Compile time in seconds.
        same: True if the outputs are bit-equal to those of the unsplit network.
    """

    size: int
    boards: int
    tiles: int
    ram: int
    uncut: int
    multiplications: float
    seconds: float
    same: bool

    @property
    def passed(self) -> bool:
        return self.same and self.ram <= RAM


def row(size: int, count: int, strategy: str, directory: Path) -> Row:
    """Compile MobileNetV2 for `count` boards, run it, and compare it with the unsplit network on one board.

    `size` is the height and width of the image.
    """
    model = quantised(networks.build("mobilenet_v2", width=0.35, size=size))
    fitted(model, boards(1, "4 MiB"), directory / "whole", "single")
    start = time.perf_counter()
    found = fitted(model, boards(count, "256 KiB"), directory / "parts", strategy)
    seconds = time.perf_counter() - start
    assert found.plan is not None
    return Row(
        size,
        len(found.footprints),
        max(map(len, found.plan.layers.values())),
        max(one.ram for one in found.footprints),
        max(one.ram for one in found.single_device_footprints),
        _multiplications(found),
        seconds,
        same_bits(model, directory / "parts", directory / "whole"),
    )


def _multiplications(found: PipelineState) -> float:
    assert found.layers is not None and found.routing is not None
    whole = sum(count_macs(found.layers, layer) for layer in found.layers.layers)
    return sum(count_task_macs(found.layers, task) for task in found.routing.tasks) / whole


def main() -> int:
    # Hide dicompiler's warning that one board would be faster: the network does not fit on one board.
    logging.disable(logging.WARNING)
    rows = []
    for size, count, strategy in ROWS:
        with tempfile.TemporaryDirectory(prefix="dicompiler-fit-") as place:
            rows.append(row(size, count, strategy, Path(place)))
    headers = (
        "image",
        "boards",
        "tiles of a layer",
        "RAM",
        "uncut on one",
        "multiplications",
        "same bits",
        "compile s",
    )
    print_table(
        headers,
        [
            (
                f"{one.size}×{one.size}",
                str(one.boards),
                str(one.tiles),
                format_bytes(one.ram),
                format_bytes(one.uncut),
                f"{one.multiplications:.3f}×",
                "yes" if one.same else "NO",
                f"{one.seconds:.1f}",
            )
            for one in rows
        ],
        right=range(1, len(headers)),
    )
    return 0 if all(one.passed for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
