"""The target `sockets`: its options, and how it writes and runs artifacts."""

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
"""Measured on the reference host: fitted to exchanges between emulated boards (docs/understand/cost-models.md)."""
PROCESS_BYTES = 63 << 20
"""Memory of Python, numpy, onnxruntime and the runtime's threads.

Measured on x86-64 Linux with glibc, Python 3.11, numpy 2.4 and onnxruntime 1.31. Other versions differ mainly in it.
"""


@dataclass(frozen=True)
class SocketsTarget(Target):
    """A directory per device with its segments, its weights and a small Python runtime; devices communicate over TCP.

    Attributes:
        threads: Threads of a segment; 0: as many as the device has cores.
        optimization: onnxruntime's optimization level for segments. "all", its default, is the fastest. "extended" is
            the highest one at which convolutions compute the same bits however the network is split.
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
        """Write artifact.json and a directory per device, in the formats of the schemas `artifact` and `manifest`."""
        from dicompiler_targets.sockets.emit import write_artifact

        assert compilation.program is not None
        cores = {d.name: d.cores for d in compilation.platform.devices} if compilation.platform else {}
        devices = compilation.program.devices
        threads = {d.device: self.threads or cores.get(d.device, 1) for d in devices}
        write_artifact(compilation.program, threads, self.optimization, directory)

    def run(self, directory: Path, frames: Sequence[Mapping[str, NDArray[Any]]], options: RunOptions) -> RunResult:
        """Run a process per device: on this host, which they share evenly, or on `options.hosts`."""
        from dicompiler_targets.sockets.open_session import run_artifact

        return run_artifact(directory, frames, options)

    @property
    def reference_optimization(self) -> Optimization:
        return self.optimization

    def segment_calls(self, device: DeviceProgram) -> tuple[SegmentCall, ...]:
        """Return the calls of a device; slices and concatenations at segment boundaries are copies of the runtime."""
        from dicompiler_targets.segment_io import make_segment_calls

        return make_segment_calls(device)

    @property
    def runtime_costs(self) -> RuntimeCosts:
        """Overheads of the Python runtime on an idle host, without TLS."""
        return RUNTIME_COSTS

    @property
    def benchmark_player(self) -> Mapping[str, bytes]:
        """The benchmark player and a copy of the runtime, which it uses to communicate with the devices."""
        from dicompiler_targets.bundled_runtime import read_benchmark_player

        return read_benchmark_player("sockets", (".py",))

    def install(self, directory: Path, options: RunOptions) -> tuple[InstalledDevice, ...]:
        """Copy each device's directory and keys to its host, and check that its Python has numpy and onnxruntime."""
        from dicompiler_targets.sockets.deploy import install

        return install(directory, options)

    def service(self, directory: Path, options: RunOptions) -> Service:
        """Return the control of resident devices, which keep their sessions between runs."""
        from dicompiler_targets.sockets.daemon_control import ResidentDevices

        return ResidentDevices(directory, options)

    def memory_overhead(self, program: Program) -> Mapping[str, int]:
        """Return the memory of a Python process with onnxruntime and its sessions, while they are made or run."""
        from dicompiler_targets.ort_memory import predict_memory_overhead

        return predict_memory_overhead(program, PROCESS_BYTES, self.optimization)
