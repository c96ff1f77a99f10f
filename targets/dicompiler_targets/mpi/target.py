"""The MPI target's options, and the two things a target does: writing an artifact and running one on this host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dicompiler.plugin_api import RunOptions, RunResult, Target
from dicompiler.plugin_api.artifacts import InstalledDevice
from dicompiler.plugin_api.costs import RuntimeCosts
from dicompiler.plugin_api.onnx import Optimization

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.plugin_api import DeviceProgram, PipelineState, Program
    from dicompiler.plugin_api.artifacts import SegmentCall

RUNTIME_COSTS = RuntimeCosts(
    latency=80e-6,
    send=40e-6,
    receive=70e-6,
    per_byte=0.7e-9,
    call=40e-6,
    per_copy=0.5e-6,
    per_copied_byte=0.08e-9,
    header_share=0.05,
    coalesced_share=0.1,
    in_order=True,
)
"""On the reference host, fitted to exchanges of boards that it emulated (docs/prediction.md)."""


@dataclass(frozen=True)
class MpiTarget(Target):
    """A C++ program for MPI with a rank per device, and a package for each host to build and start it.

    threads: threads of a segment (0: as many as the device has cores). engine: what computes segments. optimization:
    onnxruntime's level for segments: "all" is its own default and the fastest, "extended" the last that changes no bit
    of what a convolution computes, however the network is split. provider: what onnxruntime's provider for devices that
    are GPUs is called, such as CUDA. channels, mean, scale: how images become inputs, value = (pixel - mean) * scale
    with pixels from 0 to 255; mean and scale for all channels or one for each.
    """

    name: ClassVar[str] = "mpi"
    can_run_replicas: ClassVar[bool] = True
    can_keep_states: ClassVar[bool] = True
    can_tolerate_failures: ClassVar[bool] = True
    can_check_files: ClassVar[bool] = True
    can_emulate: ClassVar[bool] = True

    threads: int = 0
    engine: Literal["onnxruntime"] = "onnxruntime"
    optimization: Optimization = "all"
    provider: str = "CUDA"
    channels: Literal["RGB", "BGR", "GRAY"] = "RGB"
    mean: tuple[float, ...] = (0.0,)
    scale: tuple[float, ...] = (1.0 / 255,)

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ValueError(f"threads must be 0 or more, not {self.threads}")
        count = 1 if self.channels == "GRAY" else 3
        for name, values in (("mean", self.mean), ("scale", self.scale)):
            if len(values) not in (1, count) or not all(math.isfinite(value) for value in values):
                raise ValueError(f"{name} must be one number or {count}, one for each channel")

    def emit(self, compilation: PipelineState, directory: Path) -> None:
        """Writes artifact.json and a package per host; rank i is the program's device i."""
        from dicompiler_targets.mpi.codegen import ImagePreprocessing
        from dicompiler_targets.mpi.emit import write_artifact
        from dicompiler_targets.mpi.package_files import place_ranks

        program = compilation.program
        assert program is not None
        places = place_ranks(program, compilation.platform, self.threads)
        images = ImagePreprocessing(self.channels, self.mean, self.scale)
        write_artifact(program, places, self.optimization, self.provider, images, directory)

    def run(self, directory: Path, frames: Sequence[Mapping[str, NDArray[Any]]], options: RunOptions) -> RunResult:
        """Builds the program, unless that was done before, and starts it with mpirun on this host; with `options.hosts`
        on those, where `install` has built it."""
        if options.hosts is not None:
            from dicompiler_targets.mpi.deploy import run_on_hosts

            return run_on_hosts(directory, frames, options)
        from dicompiler_targets.mpi.run import run_here

        return run_here(directory, frames, options)

    @property
    def reference_optimization(self) -> Optimization:
        """That of its segments; the usual one is onnxruntime's own."""
        return self.optimization

    def segment_calls(self, device: DeviceProgram) -> tuple[SegmentCall, ...]:
        """As the interface says: slices and joins at the ends are the runtime's."""
        from dicompiler_targets.calls import make_segment_calls

        return make_segment_calls(device)

    @property
    def runtime_costs(self) -> RuntimeCosts:
        """Of the C++ program with Open MPI over TCP on an idle host."""
        return RUNTIME_COSTS

    @property
    def benchmark_player(self) -> Mapping[str, bytes]:
        """The player, where this target and its tools are."""
        from dicompiler_targets.bundled_runtime import read_benchmark_player

        return read_benchmark_player("mpi")

    def install(self, directory: Path, options: RunOptions) -> tuple[InstalledDevice, ...]:
        """Each host's package on that host, where its program is built."""
        from dicompiler_targets.mpi.deploy import install

        return install(directory, options)

    def memory_overhead(self, program: Program) -> Mapping[str, int]:
        """A process with MPI and onnxruntime, its sessions, and what making them takes for a while: see mpi.memory."""
        from dicompiler_targets.mpi.memory import predict_rank_memory

        return predict_rank_memory(program, self.optimization)
