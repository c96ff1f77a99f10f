"""The class of target `mpi`, which writes C++ programs for MPI, with its options."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
"""Costs in seconds, or seconds per byte, fitted to measured exchanges between emulated boards.

docs/understand/cost-models.md describes the fit.
"""
RANK_BASE_BYTES = 40 << 20
"""Bytes of a rank (MPI process) without sessions, measured on x86-64 Linux with Open MPI 5.0 and onnxruntime 1.31."""


@dataclass(frozen=True)
class MpiTarget(Target):
    """A C++ program for MPI with one rank (process) per device.

    For each host, there is a package: a directory with the sources and models that the host needs to build and run it.
    """

    name: ClassVar[str] = "mpi"
    can_run_replicas: ClassVar[bool] = True
    can_keep_states: ClassVar[bool] = True
    can_tolerate_failures: ClassVar[bool] = True
    can_check_files: ClassVar[bool] = True
    can_emulate: ClassVar[bool] = True
    can_use_engines: ClassVar[bool] = True
    usable_engines: ClassVar[tuple[str, ...]] = ("ncnn",)

    threads: int = field(default=0, metadata={"help": "threads that compute a segment; 0: the device's cores"})
    optimization: Optimization = field(
        default="all",
        metadata={
            "help": "optimization level of onnxruntime: all is the fastest; extended is the highest level at which "
            "convolutions give the same bits for every split of the network"
        },
    )
    provider: str = field(
        default="CUDA",
        metadata={
            "help": "execution provider of onnxruntime for devices that are GPUs; the program checks it when it "
            "starts on the device"
        },
    )
    channels: Literal["RGB", "BGR", "GRAY"] = field(
        default="RGB", metadata={"help": "order of the channels of images that the program reads"}
    )
    mean: tuple[float, ...] = field(
        default=(0.0,),
        metadata={"help": "value that is subtracted from pixels (0 to 255): one number, or one for each channel"},
    )
    scale: tuple[float, ...] = field(
        default=(1.0 / 255,),
        metadata={"help": "factor for pixels after `mean` was subtracted: one number, or one for each channel"},
    )

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ValueError(f"threads must be 0 or more, not {self.threads}")
        count = 1 if self.channels == "GRAY" else 3
        for name, values in (("mean", self.mean), ("scale", self.scale)):
            if len(values) not in (1, count) or not all(math.isfinite(value) for value in values):
                raise ValueError(f"{name} must be one number, or {count} numbers (one for each channel)")

    def emit(self, compilation: PipelineState, directory: Path) -> None:
        """Write artifact.json and a package for each host. The rank of a device is its index in the program."""
        from dicompiler_targets.mpi.codegen import ImagePreprocessing
        from dicompiler_targets.mpi.emit import write_program
        from dicompiler_targets.mpi.package_files import place_ranks

        program = compilation.program
        assert program is not None
        placements = place_ranks(program, compilation.platform, self.threads)
        images = ImagePreprocessing(self.channels, self.mean, self.scale)
        write_program(program, placements, self.optimization, self.provider, images, directory)

    def run(self, directory: Path, frames: Sequence[Mapping[str, NDArray[Any]]], options: RunOptions) -> RunResult:
        """Start the program with mpirun: on `options.hosts`, on which `install` has built it, or else on this host."""
        if options.hosts is not None:
            from dicompiler_targets.mpi.deploy import run_on_hosts

            return run_on_hosts(directory, frames, options)
        from dicompiler_targets.mpi.run import run_here

        return run_here(directory, frames, options)

    @property
    def reference_optimization(self) -> Optimization:
        return self.optimization

    def segment_calls(self, device: DeviceProgram) -> tuple[SegmentCall, ...]:
        from dicompiler_targets.artifact_files import make_segment_calls

        return make_segment_calls(device)

    @property
    def runtime_costs(self) -> RuntimeCosts:
        """The time that the C++ program and Open MPI over TCP add to messages, calls and copies."""
        return RUNTIME_COSTS

    @property
    def benchmark_player(self) -> Mapping[str, bytes]:
        """The files of the program that times benchmark artifacts. It needs dicompiler and the build tools."""
        from dicompiler_targets.bundled_runtime import read_benchmark_player

        return read_benchmark_player("mpi")

    def install(self, directory: Path, options: RunOptions) -> tuple[InstalledDevice, ...]:
        from dicompiler_targets.mpi.deploy import install

        return install(directory, options)

    def uninstall(self, directory: Path, options: RunOptions) -> Mapping[str, bool]:
        from dicompiler_targets.mpi.deploy import uninstall

        return uninstall(directory, options)

    def memory_overhead(self, program: Program) -> Mapping[str, int]:
        """Predict the bytes that each device's process adds: MPI, onnxruntime, its sessions, and retained tensors.

        Tensors that are sent or are outputs are retained until the end of the frame (inference request).
        """
        from dicompiler_targets.engine_segments import predict_engine_bytes
        from dicompiler_targets.ort_memory import count_retained_bytes, predict_memory_overhead

        overhead = predict_memory_overhead(program, RANK_BASE_BYTES, self.optimization)
        engines = predict_engine_bytes(program)
        return {
            device.device: overhead[device.device] + engines[device.device] + count_retained_bytes(program, device)
            for device in program.devices
        }
