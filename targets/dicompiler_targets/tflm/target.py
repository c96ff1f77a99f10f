"""The class of target `tflm`, which writes firmware for microcontrollers, with its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dicompiler.plugin_api import RunOptions, RunResult, Target
from dicompiler.plugin_api.costs import DeviceFootprint

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.plugin_api import Model, PipelineState, Program
    from dicompiler.plugin_api.onnx import Check, Tolerance


@dataclass(frozen=True)
class TflmTarget(Target):
    """Firmware for microcontrollers: TFLite-micro models, C++ sources, memory sizes (needs the extra `tflm`).

    Inputs, outputs and sent tensors with four axes have channels last (N, H, W, C). All other tensors have ONNX's order
    of axes.
    """

    name: ClassVar[str] = "tflm"

    margin: float = field(
        default=0.05,
        metadata={
            "help": "additional size of the arenas (memory of TFLite-micro), as a share of the smallest possible size"
        },
    )

    def __post_init__(self) -> None:
        if not 0 <= self.margin <= 10:
            raise ValueError(f"margin must be between 0 and 10, not {self.margin:g}")

    def emit(self, compilation: PipelineState, directory: Path) -> None:
        from dicompiler_targets.tflm.emit import write_program

        program, platform = compilation.program, compilation.platform
        assert program is not None
        boards = {} if platform is None else {name: platform.host(host) for name, host in platform.host_of.items()}
        write_program(program, self.margin, boards, directory)

    def device_footprints(self, program: Program) -> tuple[DeviceFootprint, ...]:
        """Measure the RAM and flash that each device needs.

        Arenas (working memory of TFLite-micro) are measured by trials on this host.
        """
        from dicompiler_targets.tflm.emit import compile_devices
        from dicompiler_targets.tflm.memory_report import make_footprint

        return tuple(
            make_footprint(compiled.program, compiled.sizes, compiled.models, compiled.model_files)
            for compiled in compile_devices(program, self.margin)
        )

    def tolerances(self, model: Model) -> Mapping[str, Tolerance]:
        """Return the tolerance of each output in `verify`.

        In float32, the tolerance is 1e-4 of the largest magnitude in the reference. In a quantized network, it is
        MAX_QUANTIZATION_STEPS quantization steps of the output.
        """
        from dicompiler_targets.tflm.reference_checks import make_tolerances

        return make_tolerances(model)

    def extra_checks(
        self,
        model: Model,
        make_uncut_program: Callable[[], Program],
        inputs: Mapping[str, NDArray[Any]],
        result: RunResult,
    ) -> tuple[Check, ...]:
        from dicompiler_targets.tflm.reference_checks import check_quantized

        return check_quantized(model, make_uncut_program, inputs, result)

    def run(self, directory: Path, frames: Sequence[Mapping[str, NDArray[Any]]], options: RunOptions) -> RunResult:
        from dicompiler_targets.tflm.run import run_artifact

        return run_artifact(directory, frames, options)
