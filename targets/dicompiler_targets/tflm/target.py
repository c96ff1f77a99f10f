"""The tflm target's options, and the two things a target does: writing an artifact and running one on this host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dicompiler.target import RunOptions, RunResult, Target
from dicompiler.units import parse_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.compilation import Compilation
    from dicompiler.model import Model
    from dicompiler.program import Program
    from dicompiler.verify import Check, Tolerance

log = logging.getLogger("dicompiler")


@dataclass(frozen=True)
class TflmTarget(Target):
    """What a microcontroller is flashed with: TFLite-micro models, C++ sources, and a table of RAM and flash.

    Tensors of rank 4 travel, and go in and out, channels last (N, H, W, C); all others in ONNX's order.

    margin: how much larger an arena is written than the least that runs. ram, flash: of every device, such as
    "256 KiB"; by default those of the built-in board that the platform is made of, else no limits.
    """

    name: ClassVar[str] = "tflm"

    margin: float = 0.05
    ram: str = ""
    flash: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.margin <= 10:
            raise ValueError(f"margin must be between 0 and 10, not {self.margin:g}")
        if bool(self.ram) != bool(self.flash):
            raise ValueError("ram and flash go together: give both or neither")
        for key in ("ram", "flash"):
            if getattr(self, key):
                parse_bytes(getattr(self, key), key)

    def emit(self, compilation: Compilation, directory: Path) -> None:
        """Writes artifact.json, memory.json and a directory per device."""
        from dicompiler_targets.tflm.emit import write
        from dicompiler_targets.tflm.sizes import table

        assert compilation.program is not None
        memory = write(compilation.program, self.margin, self._limits(compilation), directory)
        (directory / "memory.txt").write_text(table(memory) + "\n", encoding="utf-8")
        log.warning("target tflm: RAM and flash of each device (memory.json):\n%s", table(memory))

    def _limits(self, compilation: Compilation) -> Mapping[str, Any]:
        """Device → what its board has."""
        from dicompiler.boards import microcontroller
        from dicompiler_targets.tflm.sizes import Limits

        assert compilation.program is not None
        names = [device.device for device in compilation.program.devices]
        if self.ram:
            given = Limits(parse_bytes(self.ram, "ram"), parse_bytes(self.flash, "flash"))
            return dict.fromkeys(names, given)
        board = None if compilation.platform is None else microcontroller(compilation.platform.name)
        return {} if board is None else dict.fromkeys(names, Limits(board.ram, board.flash))

    def tolerances(self, model: Model) -> Mapping[str, Tolerance]:
        """1e-4 of the range in float32; of a quantised network so many steps of the output's scale."""
        from dicompiler_targets.tflm.proof import tolerances

        return tolerances(model)

    def proofs(
        self, model: Model, whole: Callable[[], Program], inputs: Mapping[str, NDArray[Any]], result: RunResult
    ) -> tuple[Check, ...]:
        """Of a quantised network: its parts give what it gives uncut, and that is what LiteRT gives."""
        from dicompiler_targets.tflm.proof import proofs

        return proofs(model, whole, inputs, result)

    def run(
        self,
        directory: Path,
        frames: Sequence[Mapping[str, NDArray[Any]]],
        timeout: float,
        options: RunOptions = RunOptions(),  # noqa: B008  (frozen)
    ) -> RunResult:
        """All devices in this process, each model in TFLite-micro, with tensors passed on as on a wire."""
        from dicompiler_targets.tflm.run import run

        return run(directory, frames, timeout, options)
