"""The sockets target's options, and the two things a target does: writing an artifact and running one on this host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dicompiler.plugin_api import RunOptions, RunResult, Service, Target
from dicompiler.plugin_api.artifacts import InstalledDevice
from dicompiler.plugin_api.costs import RuntimeCosts
from dicompiler.plugin_api.onnx import Optimization

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.plugin_api import DeviceProgram, PipelineState, Program
    from dicompiler.plugin_api.artifacts import SegmentCall

RUNTIME_COSTS = RuntimeCosts(
    latency=80e-6,
    send=80e-6,
    receive=100e-6,
    per_byte=0.7e-9,
    call=50e-6,
    per_copy=0.5e-6,
    per_copied_byte=0.08e-9,
    per_io_byte=1.4e-9,
    per_tls_byte=0.8e-9,
    header_share=0.05,
    coalesced_share=0.1,
)
"""On the reference host, fitted to exchanges of boards that it emulated (docs/prediction.md)."""


@dataclass(frozen=True)
class SocketsTarget(Target):
    """A directory per device with its segments, its weights and a small Python runtime; tensors go over TCP.

    threads: threads of a segment (0: as many as the device has cores). optimization: onnxruntime's level for segments:
    "all" is its own default and the fastest, "extended" the last that changes no bit of what a convolution computes,
    however the network is split.
    """

    name: ClassVar[str] = "sockets"
    can_run_replicas: ClassVar[bool] = True
    can_keep_states: ClassVar[bool] = True
    can_tolerate_failures: ClassVar[bool] = True
    can_check_files: ClassVar[bool] = True
    can_emulate: ClassVar[bool] = True

    threads: int = 0
    optimization: Optimization = "all"

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ValueError(f"threads must be 0 or more, not {self.threads}")

    def emit(self, compilation: PipelineState, directory: Path) -> None:
        """Writes artifact.json and a directory per device; their formats are in the schemas artifact and manifest."""
        from dicompiler_targets.sockets.emit import write_artifact

        assert compilation.program is not None
        cores = {d.name: d.cores for d in compilation.platform.devices} if compilation.platform else {}
        devices = compilation.program.devices
        threads = {d.device: self.threads or cores.get(d.device, 1) for d in devices}
        write_artifact(compilation.program, threads, self.optimization, directory)

    def run(self, directory: Path, frames: Sequence[Mapping[str, NDArray[Any]]], options: RunOptions) -> RunResult:
        """One process per device: on this host, each with its share of the host's cores, or on `options.hosts`."""
        from dicompiler_targets.sockets.coordinator import run_artifact

        return run_artifact(directory, frames, options)

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
        """Of the Python runtime on an idle host, in the clear."""
        return RUNTIME_COSTS

    @property
    def benchmark_player(self) -> Mapping[str, bytes]:
        """The player beside a copy of the runtime, which it uses to speak with the devices."""
        from dicompiler_targets.bundled_runtime import read_benchmark_player

        return read_benchmark_player("sockets", (".py",))

    def install(self, directory: Path, options: RunOptions) -> tuple[InstalledDevice, ...]:
        """Each device's directory on its host, and its keys; there is a Python with numpy and onnxruntime."""
        from dicompiler_targets.sockets.deploy import install

        return install(directory, options)

    def service(self, directory: Path, options: RunOptions) -> Service:
        """Its devices stay between clients, with their sessions made."""
        from dicompiler_targets.sockets.daemon_control import ResidentDevices

        return ResidentDevices(directory, options)

    def memory_overhead(self, program: Program) -> Mapping[str, int]:
        """A Python process with onnxruntime, its sessions, and what making them takes: see sockets.memory."""
        from dicompiler_targets.sockets.memory import added_memory

        return added_memory(program, self.optimization)
