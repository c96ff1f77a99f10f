"""The base class of targets, which write a Program as a directory (the artifact) and run that directory.

The steps are:

    PipelineState with its program → Target.emit → artifact → Target.run → RunResult
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dicompiler.base.errors import UsageError
from dicompiler.base.option_specs import Spec, spec_of
from dicompiler.cost.runtime_overhead import FREE_RUNTIME, RuntimeCosts
from dicompiler.ir.metrics import DeviceFootprint
from dicompiler.target.run_records import DeviceStatus, InstalledDevice, RunOptions, RunResult, SegmentCall

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.base.ort_session import Optimization
    from dicompiler.ir.onnx.model import Model
    from dicompiler.ir.pipeline_state import PipelineState
    from dicompiler.ir.program import DeviceProgram, Program
    from dicompiler.verify.comparison import Check
    from dicompiler.verify.tolerances import Tolerance


class Service(Protocol):
    """The resident devices of an artifact: device processes that stay up between runs.

    Runs of the artifact, and `dicompiler.connect`, use them instead of starting new processes.
    """

    def start(self) -> Sequence[str]:
        """Start the devices that are not up, and leave them running.

        Devices that are up with another artifact load this one.

        Returns:
            Names of the devices that were started.

        Raises:
            RunError: A device cannot be started. The message names the device, its host and the cause.
        """

    def hand_over(self, directory: Path) -> None:
        """Record that the devices that are up run another artifact from now on.

        The caller then installs the other artifact over this one, and calls `start` of the other artifact's service.

        Args:
            directory: The other artifact. Its directory must have the same name as that of this artifact.
        """

    def stop(self) -> Mapping[str, bool]:
        """End the devices, even during a run. The files and logs on their hosts are kept.

        Returns:
            For each device, by name, whether the device was up.

        Raises:
            RunError: A host cannot be reached.
        """

    def status(self) -> Sequence[DeviceStatus]:
        """Ask all devices for their status.

        Returns:
            The status of each device, in device order. Devices that do not respond are included.
        """


@dataclass(frozen=True)
class Target(ABC):
    """The base class of all targets. A subclass is a frozen dataclass too; its fields are the target's options.

    The first line of a subclass's docstring is its summary in `dicompiler list targets`.

    Attributes:
        name: The target's name in specs such as `sockets{threads=2}`.
        can_run_replicas: Whether artifacts support replicas (copies of a plan on other devices, which compute alternate
            frames). If not, compiling a plan with replicas is an error.
        can_tolerate_failures: Whether runs can switch to a failure plan (a plan for the remaining devices) when devices
            fail, and can start with one (`RunOptions.start_without`). If not, compiling a plan with failure plans is an
            error.
        can_keep_states: Whether devices keep states, such as key/value caches, from frame to frame
            (`DeviceProgram.states`). If not, compiling with declared states is an error.
        can_check_files: Whether `run` and `install` themselves check the artifact's files against the digests in
            artifact.json. If not, the caller checks all files before each run.
        can_emulate: Whether `run` supports `RunOptions.emulation`. If not, `dicompiler emulate` is an error.
        can_use_engines: Whether devices can compute with other engines than onnxruntime (`DeviceProgram.engine`). If
            not, choosing another engine is an error.
        usable_engines: Names of the engines besides onnxruntime, if `can_use_engines`; empty: all that exist.
    """

    name: ClassVar[str]
    can_run_replicas: ClassVar[bool] = False
    can_tolerate_failures: ClassVar[bool] = False
    can_keep_states: ClassVar[bool] = False
    can_check_files: ClassVar[bool] = False
    can_emulate: ClassVar[bool] = False
    can_use_engines: ClassVar[bool] = False
    usable_engines: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def emit(self, compilation: PipelineState, directory: Path) -> None:
        """Write the artifact of `compilation.program`. The same compilation must give the same bytes.

        Args:
            compilation: The state of the compilation, with its program.
            directory: An existing empty directory.

        Raises:
            DicompilerError: The target does not support a tensor, operator or device name of the program.
        """

    @abstractmethod
    def run(self, directory: Path, frames: Sequence[Mapping[str, NDArray[Any]]], options: RunOptions) -> RunResult:
        """Run an artifact, by default on this host. No process is left behind, even after an error.

        Args:
            directory: The artifact's directory.
            frames: For each frame, the graph's inputs by name.
            options: Options of the run; `options.timeout_s` limits the whole run.

        Returns:
            The outputs and measurements.

        Raises:
            RunError: The run has failed. The message names the device and the cause.
            UsageError: The target does not support an option.
        """

    def tolerances(self, model: Model) -> Mapping[str, Tolerance]:  # noqa: ARG002
        """Return the allowed differences between the outputs of a run and those of onnxruntime.

        Args:
            model: The reference model.

        Returns:
            Tolerances by output name, by default none. `RELATIVE_TOLERANCES` or `MAX_QUANTIZATION_STEPS` apply to all
            other outputs.
        """
        return {}

    @property
    def reference_optimization(self) -> Optimization:
        """onnxruntime's optimization level for the reference model, which computes the expected outputs."""
        return "extended"

    def extra_checks(
        self,
        model: Model,  # noqa: ARG002
        make_uncut_program: Callable[[], Program],  # noqa: ARG002
        inputs: Mapping[str, NDArray[Any]],  # noqa: ARG002
        result: RunResult,  # noqa: ARG002
    ) -> tuple[Check, ...]:
        """Make further checks for `verify`, such as a comparison with another runtime. By default, there are none.

        Args:
            model: The reference model.
            make_uncut_program: Function that builds the program of `model` for a single device.
            inputs: Inputs by name.
            result: The result of a run in which every frame had these inputs.

        Returns:
            The checks and their results.
        """
        return ()

    def install(self, directory: Path, options: RunOptions) -> tuple[InstalledDevice, ...]:  # noqa: ARG002
        """Copy an artifact to other hosts, for `run` with the same options, and check that the artifact can run there.

        Files that a host already has are not copied again.

        Args:
            directory: The artifact's directory.
            options: Options of the run: `hosts`, and `timeout_s` for the whole installation.

        Returns:
            One entry for each device.

        Raises:
            RunError: The installation has failed. The message names the device, its host and the cause.
            UsageError: The target does not support an option, or (by default) does not run on other hosts.
        """
        raise UsageError(
            f"deploy: target {self.name!r} does not support other hosts: compile for another target (--target sockets)"
        )

    def uninstall(self, directory: Path, options: RunOptions) -> Mapping[str, bool]:  # noqa: ARG002
        """End the resident devices of an artifact, and remove all that `install` and runs have left on the hosts.

        Args:
            directory: The artifact's directory.
            options: Options of the run: `hosts`, and `timeout_s` for the whole removal.

        Returns:
            For each device, by name, whether something was removed from its host.

        Raises:
            RunError: A host cannot be reached. The message names the device, its host and the cause.
            UsageError: The target does not run on other hosts (the default).
        """
        raise UsageError(
            f"deploy: target {self.name!r} does not support other hosts: compile for another target (--target sockets)"
        )

    def service(self, directory: Path, options: RunOptions) -> Service:  # noqa: ARG002
        """Return a handle that starts and stops the resident devices of an artifact on `options.hosts`.

        Resident devices are device processes that keep running between runs. `install` has copied the artifact to the
        hosts.

        Args:
            directory: The artifact's directory.
            options: Options of the run.

        Returns:
            The handle. The device processes may be running or not.

        Raises:
            UsageError: The target does not support an option, or (by default) has no resident devices.
        """
        raise UsageError(
            f"deploy: target {self.name!r} does not support resident devices: compile for another target "
            "(--target sockets)"
        )

    def memory_overhead(self, program: Program) -> Mapping[str, int]:
        """Predict the memory that a run needs in addition to weights, activations and buffers. Default: 0.

        It is the memory of the process itself, of the engine's sessions, and of temporary data while they are created.
        Memory limits apply to the sum of all four.

        Args:
            program: The program.

        Returns:
            Bytes by device name.
        """
        return {device.device: 0 for device in program.devices}

    def segment_calls(self, device: DeviceProgram) -> tuple[SegmentCall, ...]:
        """Return a description of the runtime's work for each segment (submodel) of a device, for timing this work.

        By default, it is only the engine's computation, without copies of inputs and outputs.

        Args:
            device: The device's program.

        Returns:
            One entry for each segment, in order.
        """
        return tuple(map(SegmentCall, device.segments))

    @property
    def runtime_costs(self) -> RuntimeCosts:
        """The seconds that the target's runtime adds for messages, calls and copies. Default: none.

        They apply to a host with cores that compute `REFERENCE_FLOPS_PER_S`, and are scaled to each device's speed.
        """
        return FREE_RUNTIME

    @property
    def benchmark_player(self) -> Mapping[str, bytes]:
        """Files, by name, of a program that measures `runtime_costs` on a host with Python, numpy and onnxruntime.

        `python3 play.py SECONDS ARTIFACT …` runs each artifact for about SECONDS seconds, with zeros as inputs. For
        each artifact it prints a line of JSON: `frames` (seconds of each frame) and `send` (seconds for passing one
        message to the operating system; null if unknown). On failure, the last line is the reason, and the exit code is
        not 0.
        """
        return {}

    def device_footprints(self, program: Program) -> tuple[DeviceFootprint, ...]:  # noqa: ARG002
        """Measure the RAM and flash that each device needs. By default, the target cannot measure them.

        Args:
            program: The program.

        Returns:
            One entry for each device, to which memory limits then apply, or an empty tuple if the target cannot
                measure.

        Raises:
            DicompilerError: The target does not support a part of the program.
        """
        return ()

    @property
    def spec(self) -> Spec:
        """The target as text: its name, and the options that differ from their defaults."""
        return spec_of(self)
