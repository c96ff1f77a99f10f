"""What a target is: it writes a Program as a directory of files, and runs such a directory on this host.

In: a Compilation with its program, later frames of input arrays. Out: files, then output arrays and device reports.
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

    from dicompiler.ir.onnx.model import Model
    from dicompiler.ir.pipeline_state import PipelineState
    from dicompiler.ir.program import DeviceProgram, Program
    from dicompiler.verify.comparison import Check
    from dicompiler.verify.executor import Optimization
    from dicompiler.verify.tolerances import Tolerance


class Service(Protocol):
    """The devices of an artifact that stay: runs of it, and `dicompiler.connect`, join them instead of starting them.

    Errors as of `Target.run`.
    """

    def start(self) -> Sequence[str]:
        """Starts those that do not run, and keeps all of them running; their names."""

    def stop(self) -> Mapping[str, bool]:
        """Ends them, whatever they do; by device whether it ran. Nothing of them is left behind but what was copied,
        and logs."""

    def status(self) -> Sequence[DeviceStatus]:
        """How each does."""


@dataclass(frozen=True)
class Target(ABC):
    """The base of all targets. A subclass is a frozen dataclass too: its fields are its options.

    The first line of its docstring is its summary in `dicompiler list targets`; `name` is its name in specs.
    """

    name: ClassVar[str]
    can_run_replicas: ClassVar[bool] = False
    """Whether it emits all roles of a plan with replicas (`Program.roles`); a compilation with such a plan is refused
    otherwise."""
    can_tolerate_failures: ClassVar[bool] = False
    """Whether it emits the roles of a plan's losses, goes on by them when devices are lost, and begins in them
    (`RunOptions.without`); a compilation with such a plan is refused otherwise."""
    can_keep_states: ClassVar[bool] = False
    """Whether its devices keep states from frame to frame (`DeviceProgram.states`); a network with declared states is
    refused otherwise, and none are sought by their names."""
    can_check_files: ClassVar[bool] = False
    """Whether its `run` and `install` compare the artifact's files with the digests in artifact.json by themselves, as
    programs can while they load them; they are compared before otherwise."""
    can_emulate: ClassVar[bool] = False
    """Whether its `run` plays boards, as `RunOptions.emulation` says; `dicompiler emulate` refuses its artifacts
    otherwise."""

    @abstractmethod
    def emit(self, compilation: PipelineState, directory: Path) -> None:
        """Writes the artifact of `compilation.program` into `directory`, which exists and is empty.

        The same compilation gives the same bytes. DicompilerError where the target cannot express the program.
        """

    @abstractmethod
    def run(self, directory: Path, frames: Sequence[Mapping[str, NDArray[Any]]], options: RunOptions) -> RunResult:
        """Runs an emitted artifact, by default on this host; `options.timeout_s` bounds the whole run.

        Each frame holds the graph's inputs by name. RunError names the device that failed and the cause; nothing of
        the run is left behind then, and no outputs are returned. UsageError for options that the target cannot take.
        """

    def tolerances(self, model: Model) -> Mapping[str, Tolerance]:  # noqa: ARG002
        """What outputs of its artifacts may differ by from what onnxruntime makes of `model`, by the output's name.

        An output that is not in it may differ by its type's tolerance (`tolerances.TOLERANCE`), one of a
        quantised network by so many steps (`tolerances.STEPS`), as all do by default.
        """
        return {}

    @property
    def reference_optimization(self) -> Optimization:
        """onnxruntime's level of optimisation at which the whole model is run to compare outputs with."""
        return "extended"

    def extra_checks(
        self,
        model: Model,  # noqa: ARG002
        make_uncut_program: Callable[[], Program],  # noqa: ARG002
        inputs: Mapping[str, NDArray[Any]],  # noqa: ARG002
        result: RunResult,  # noqa: ARG002
    ) -> tuple[Check, ...]:
        """Checks of its own that `verify` makes beside the comparison with onnxruntime, such as with another runtime.

        whole: makes the program of `model` uncut on one device. result: of a run in which every frame was `inputs`.
        None by default.
        """
        return ()

    def install(self, directory: Path, options: RunOptions) -> tuple[InstalledDevice, ...]:  # noqa: ARG002
        """Copies an emitted artifact to `options.hosts` and checks that it can be run there as `options` say; `run`
        with the same options then starts it there. `options.timeout_s` bounds all of it.

        What is there already is not copied again. RunError names the device, its host and the cause; UsageError for
        options that the target cannot take, and for a target that cannot do this at all, as by default.
        """
        raise UsageError(f"deploy: target {self.name!r} cannot be started on other hosts from here")

    def service(self, directory: Path, options: RunOptions) -> Service:  # noqa: ARG002
        """The devices of an emitted artifact as a service that stays between runs, on `options.hosts`, where `install`
        has put it. UsageError for options that the target cannot take, and for a target that cannot do this, as by
        default."""
        raise UsageError(f"deploy: what target {self.name!r} writes cannot be kept running")

    def memory_overhead(self, program: Program) -> Mapping[str, int]:
        """Device → bytes that running the program takes beyond its weights, activations and buffers (see
        cost.memory.program_memory) at the worst moment: the process itself, sessions, what loading needs for a while.

        0 unless the target knows better. Memory limits count it.
        """
        return {device.device: 0 for device in program.devices}

    def segment_calls(self, device: DeviceProgram) -> tuple[SegmentCall, ...]:
        """What its runtime does for each segment of the device, in order: timed to know what these take. By default the
        engine computes all of it."""
        return tuple(map(SegmentCall, device.segments))

    @property
    def runtime_costs(self) -> RuntimeCosts:
        """What its runtime takes for messages, calls and copies on the host whose core computes
        `cost.runtime.REFERENCE_RATE`; nothing unless the target knows better. Predictions scale it for each device
        (`cost.runtime.slowness`), unless a profile has measured it there."""
        return FREE_RUNTIME

    @property
    def benchmark_player(self) -> Mapping[str, bytes]:
        """What measures `costs` on a host that has Python, numpy and onnxruntime: files by name, among them play.py.

        `python3 play.py SECONDS ARTIFACT …` plays each of these directories, which `emit` wrote, for about that long
        with zeros as inputs, and prints a line of JSON for each: {"frames": seconds of each frame, "send": seconds of
        handing one message to the system, null where nobody tells}. Else it says why not in its last line, and exits
        with a code that is not 0. Without files, as by default, the runtime cannot be measured.
        """
        return {}

    def device_footprints(self, program: Program) -> tuple[DeviceFootprint, ...]:  # noqa: ARG002
        """What each device needs of RAM and flash, measured. () where the target has no measure of its own, as by
        default; where it has, memory limits count this alone. DicompilerError where it cannot express the program.
        """
        return ()

    @property
    def spec(self) -> Spec:
        """The text form: name and the options that differ from their defaults."""
        return spec_of(self)
