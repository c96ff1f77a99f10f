"""The class and the options of the target `sockets`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
"""Seconds that the runtime adds to computing and sending, measured with emulated boards on the reference host.

docs/understand/cost-models.md describes the measurement.
"""
PROCESS_BYTES = 63 << 20
"""Memory of a device process with Python, numpy, onnxruntime and the runtime's threads, but without any segment.

Measured on x86-64 Linux with glibc, Python 3.11, numpy 2.4 and onnxruntime 1.31.
"""


@dataclass(frozen=True)
class SocketsTarget(Target):
    """A directory per device with its segments, its weights and a small Python runtime; devices communicate over TCP.

    The methods import the modules that they need only when they are called.
    """

    name: ClassVar[str] = "sockets"
    can_run_replicas: ClassVar[bool] = True
    can_keep_states: ClassVar[bool] = True
    can_tolerate_failures: ClassVar[bool] = True
    can_check_files: ClassVar[bool] = True
    can_emulate: ClassVar[bool] = True
    can_use_engines: ClassVar[bool] = True

    threads: int = field(default=0, metadata={"help": "threads that compute a segment; 0: the device's cores"})
    optimization: Optimization = field(
        default="all",
        metadata={
            "help": "optimization level of onnxruntime: all is the fastest; extended is the highest level at which "
            "convolutions give the same bits for every split of the network"
        },
    )

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ValueError(f"threads must be 0 or more, not {self.threads}")

    def emit(self, compilation: PipelineState, directory: Path) -> None:
        """Write artifact.json and a directory per device, in the formats of the schemas `artifact` and `manifest`."""
        from dicompiler_targets.sockets.emit import write_program

        assert compilation.program is not None
        cores = {d.name: d.cores for d in compilation.platform.devices} if compilation.platform else {}
        threads = {d.device: self.threads or cores.get(d.device, 1) for d in compilation.program.devices}
        write_program(compilation.program, threads, self.optimization, directory)

    def run(self, directory: Path, frames: Sequence[Mapping[str, NDArray[Any]]], options: RunOptions) -> RunResult:
        """Run the artifact with one process per device, on this host or on `options.hosts`.

        The processes on this host get equal shares of its cores.
        """
        from dicompiler_targets.sockets.open_session import run_artifact

        return run_artifact(directory, frames, options)

    @property
    def reference_optimization(self) -> Optimization:
        return self.optimization

    def segment_calls(self, device: DeviceProgram) -> tuple[SegmentCall, ...]:
        """Return each segment's model, and the copies that the runtime makes before and after the segment.

        The copies are slices and concatenations that were removed from the model.
        """
        from dicompiler_targets.artifact_files import make_segment_calls

        return make_segment_calls(device)

    @property
    def runtime_costs(self) -> RuntimeCosts:
        """The seconds that the Python runtime adds to messages, calls and copies, on an idle host without TLS."""
        return RUNTIME_COSTS

    @property
    def benchmark_player(self) -> Mapping[str, bytes]:
        """The files of the program that measures runtime costs, by file name; they include the runtime itself."""
        from dicompiler_targets.bundled_runtime import read_benchmark_player

        return read_benchmark_player("sockets", (".py",))

    def install(self, directory: Path, options: RunOptions) -> tuple[InstalledDevice, ...]:
        """Copy each device's directory and TLS keys to its host, whose Python must have numpy and onnxruntime."""
        from dicompiler_targets.sockets.deploy import install

        return install(directory, options)

    def uninstall(self, directory: Path, options: RunOptions) -> Mapping[str, bool]:
        """Stop the resident devices, and remove the directories, TLS keys and logs of all devices from their hosts."""
        from dicompiler_targets.sockets.daemon_control import uninstall

        return uninstall(directory, options)

    def service(self, directory: Path, options: RunOptions) -> Service:
        """Return the artifact's resident devices: daemons that keep their onnxruntime sessions between runs."""
        from dicompiler_targets.sockets.daemon_control import ResidentDevices

        return ResidentDevices(directory, options)

    def memory_overhead(self, program: Program) -> Mapping[str, int]:
        """Predict the peak memory in bytes that Python, the engines and the sessions need on each device."""
        from dicompiler_targets.engine_segments import predict_engine_bytes
        from dicompiler_targets.ort_memory import predict_memory_overhead

        overhead = predict_memory_overhead(program, PROCESS_BYTES, self.optimization)
        return {name: overhead[name] + count for name, count in predict_engine_bytes(program).items()}
