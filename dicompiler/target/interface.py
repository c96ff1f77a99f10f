"""What a target is: it writes a Program as a directory of files, and runs such a directory on this host.

In: a Compilation with its program, later frames of input arrays. Out: files, then output arrays and device reports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dicompiler.base.errors import UsageError
from dicompiler.base.specs import Spec, spec_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.ir.compilation import Compilation
    from dicompiler.ir.onnx.model import Model
    from dicompiler.ir.program import Program
    from dicompiler.target.remote.hosts import Hosts
    from dicompiler.verify.comparison import Check, Tolerance

Optimization = Literal["none", "basic", "extended", "all"]
"""onnxruntime's graph optimisation levels. Up to "extended" all of them give the same bits; "all" does not.

In networks in QDQ form "all" alone computes on integers, where onnxruntime finds a pattern to fuse: not always the same
in a network's parts as in the whole, and integers round otherwise.
"""


@dataclass(frozen=True)
class Timed:
    """Something that a device did: `kind` is "run" (a segment: its place in DeviceReport.segments), "send" (a transfer:
    its index) or "wait" (for a transfer: its index; -1: for an input), for a frame. start, end: seconds from the
    beginning of the run's last frame (sockets: from when the device heard of it)."""

    kind: str
    index: int
    frame: int
    start: float
    end: float


@dataclass(frozen=True)
class DeviceReport:
    """What one device measured over all frames of a run.

    compute_s: seconds in segments; wait_s: seconds in which it had no segment whose inputs were there; send_s: seconds
    of sending, beside the computing. sent: payload bytes by index in `Program.all_transfers`. segments: seconds of each
    segment, role by role. memory_peak: largest resident memory of its process, in bytes.
    timeline: what it did from the last frame's beginning on; empty where the target does not tell.
    """

    device: str
    compute_s: float
    wait_s: float
    send_s: float
    sent: Mapping[int, int]
    segments: tuple[float, ...]
    memory_peak: int
    timeline: tuple[Timed, ...] = ()


@dataclass(frozen=True)
class RunResult:
    """outputs: by name, for each frame, as the first sink delivered them. reports: in device order.

    delivered: for each frame and each sink device its outputs by name. frames_s: seconds from giving a frame's inputs
    to having all its outputs. total_s: seconds from giving the first frame's inputs to having the last one's outputs.
    """

    outputs: tuple[dict[str, NDArray[Any]], ...]
    reports: tuple[DeviceReport, ...]
    delivered: tuple[Mapping[str, Mapping[str, NDArray[Any]]], ...] = field(default=(), repr=False)
    frames_s: tuple[float, ...] = ()
    total_s: float = 0.0


@dataclass(frozen=True)
class RunOptions:
    """How an artifact is run.

    in_flight: frames that may be on their way at once (0: twice as many as devices); a device's memory for what it
    receives is that many times what the plan sends it for one. keep: the outputs of how many frames to keep (None:
    all). heartbeat_s: seconds between two signs of life; who misses three of them is lost. keys: the directory that
    `dicompiler keys` made: connections are in TLS. listen: address at which the devices reach this process (port 0:
    any; by default loopback, and with `hosts` the address by which the first of them is reached). insecure: allow
    other addresses than this host's own without keys. elsewhere: devices that someone else starts. pin: each process
    keeps to its share of this host's processors. hosts: where devices are started over ssh, after `Target.install`;
    logs: where what they write is kept then, by default beside the artifact and only where a run fails.
    """

    in_flight: int = 1
    keep: int | None = None
    heartbeat_s: float = 2.0
    keys: Path | None = None
    listen: str = ""
    insecure: bool = False
    elsewhere: tuple[str, ...] = ()
    pin: bool = False
    hosts: Hosts | None = None
    logs: Path | None = None


@dataclass(frozen=True)
class Occupied:
    """What a program takes of a device's host, by the target's own measure, in bytes. ram, flash: in all; where: what
    takes most of the RAM, and of the flash, as an error names it. details: further figures by name, of what they are.
    """

    device: str
    ram: int
    flash: int
    where: tuple[str, str]
    details: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Installed:
    """What `Target.install` did for a device. host: what ssh connected to. directory: the device's on that host.

    copied: bytes; 0 where all was there already. versions: of the programs that it needs there, by their name.
    """

    device: str
    host: str
    directory: str
    copied: int
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Target(ABC):
    """The base of all targets. A subclass is a frozen dataclass too: its fields are its options.

    The first line of its docstring is its summary in `dicompiler list targets`; `name` is its name in specs.
    """

    name: ClassVar[str]
    replicas: ClassVar[bool] = False
    """Whether it emits all roles of a plan with replicas (`Program.roles`); a compilation with such a plan is refused
    otherwise."""

    @abstractmethod
    def emit(self, compilation: Compilation, directory: Path) -> None:
        """Writes the artifact of `compilation.program` into `directory`, which exists and is empty.

        The same compilation gives the same bytes. DicompilerError where the target cannot express the program.
        """

    @abstractmethod
    def run(
        self,
        directory: Path,
        frames: Sequence[Mapping[str, NDArray[Any]]],
        timeout: float,
        options: RunOptions = RunOptions(),
    ) -> RunResult:
        """Runs an emitted artifact, by default on this host; `timeout` in seconds bounds the whole run.

        Each frame holds the graph's inputs by name. RunError names the device that failed and the cause; nothing of
        the run is left behind then, and no outputs are returned. UsageError for options that the target cannot take.
        """

    def tolerances(self, model: Model) -> Mapping[str, Tolerance]:  # noqa: ARG002
        """What outputs of its artifacts may differ by from what onnxruntime makes of `model`, by the output's name.

        An output that is not in it may differ by the tolerance of its type (`verify.TOLERANCE`), as all do by default.
        """
        return {}

    def proofs(
        self,
        model: Model,  # noqa: ARG002
        whole: Callable[[], Program],  # noqa: ARG002
        inputs: Mapping[str, NDArray[Any]],  # noqa: ARG002
        result: RunResult,  # noqa: ARG002
    ) -> tuple[Check, ...]:
        """Checks of its own that `verify` makes beside the comparison with onnxruntime, such as with another runtime.

        whole: makes the program of `model` uncut on one device. result: of a run in which every frame was `inputs`.
        None by default.
        """
        return ()

    def install(self, directory: Path, options: RunOptions, timeout: float) -> tuple[Installed, ...]:  # noqa: ARG002
        """Copies an emitted artifact to `options.hosts` and checks that it can be run there as `options` say; `run`
        with the same options then starts it there. `timeout` in seconds bounds all of it.

        What is there already is not copied again. RunError names the device, its host and the cause; UsageError for
        options that the target cannot take, and for a target that cannot do this at all, as by default.
        """
        raise UsageError(f"deploy: target {self.name!r} cannot be started on other hosts from here")

    def memory(self, program: Program) -> Mapping[str, int]:
        """Device → bytes that running the program takes beyond its weights, activations and buffers (see
        memory.program_memory) at the worst moment: the process itself, sessions, what loading needs for a while.

        0 unless the target knows better. Memory limits count it.
        """
        return {device.device: 0 for device in program.devices}

    def occupied(self, program: Program) -> tuple[Occupied, ...]:  # noqa: ARG002
        """What each device needs of RAM and flash, measured. () where the target has no measure of its own, as by
        default; where it has, memory limits count this alone. DicompilerError where it cannot express the program.
        """
        return ()

    @property
    def spec(self) -> Spec:
        """The text form: name and the options that differ from their defaults."""
        return spec_of(self)
