"""Sessions whose artifact can be replaced while they run.

    with dicompiler.connect_swappable("build") as session:
        for outputs in session.stream(pictures):
            ...  # another thread calls session.swap("build-2")

A swap, i.e. such a replacement, has these steps:

1. The inputs, outputs, devices and memory of the new artifact are checked.
2. The new devices start.
3. The outputs of one frame are compared with onnxruntime. Streams have fewer frames in flight from now on, so that the
   old devices finish these frames soon.
4. The switch: frames that are read later are computed by the new artifact.

If a step before the switch fails, the session continues with the old artifact.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from dicompiler.base.errors import DicompilerError, RunError, UsageError, check_type
from dicompiler.base.units import format_bytes
from dicompiler.driver.artifact import memory_by_host, verify_session
from dicompiler.ir.plan import load_plan
from dicompiler.ir.platform import Platform
from dicompiler.target.client import ReadyFrames, Session, connect, resolve_connect_options
from dicompiler.target.manifest import ARTIFACT_FILE, PLAN_FILE, PLATFORM_FILE, load_artifact
from dicompiler.target.remote.hosts import Hosts
from dicompiler.target.run_records import DeviceReport, RunEvent, RunOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger("dicompiler")

FOLLOW_INTERVAL_S = 0.5
"""Seconds between two checks of the symbolic link that a session follows."""
LINK_SHARE = 0.05
"""Default share of the network's bandwidth for copying a new artifact's files to boards; the rest is for the frames."""
SPARE_FRAMES_AT_SWITCH = 1
"""While new devices are verified, a stream has one frame in flight for each device, and this number in addition.

The old devices must finish the frames in flight, so fewer frames shorten the replacement.
"""


@dataclass(frozen=True)
class Swap:
    """A completed replacement of the artifact that a session runs.

    Attributes:
        old: Directory of the replaced artifact.
        new: Directory of the new artifact.
        first_frame: Number of the first frame that the new artifact computes, counted from 0 in the session.
        seconds: Seconds from the call of `swap` until new frames use the new artifact.
    """

    old: Path
    new: Path
    first_frame: int
    seconds: float


@dataclass(eq=False)
class _Use:
    """A running call of `infer`, `reset` or `stream` of a session.

    Attributes:
        version: The artifact that the call uses.
        thread: The thread that last ran the call.
        in_flight: Inputs of the frames that a call of `stream` has read, and of which the outputs were not yet taken.
    """

    version: _Version
    thread: int = field(default_factory=threading.get_ident)
    in_flight: deque[Mapping[str, Any]] = field(default_factory=deque)


@dataclass(eq=False)
class _Version:
    """An artifact of a session, with its running devices.

    Attributes:
        directory: The artifact.
        options: The options of its session.
        session: The session with the artifact's devices.
        uses: The running calls that use the artifact.
    """

    directory: Path
    options: RunOptions
    session: Session
    uses: set[_Use] = field(default_factory=set)


class SwappableSession(Session):
    """A session whose artifact can be replaced while frames are in flight. `connect_swappable` creates it.

    Attributes:
        reports: Measurements of the last artifact's devices; empty until the session was closed without an error.
        swaps: The completed replacements so far.
        events: Events so far, of all artifacts, as `RunOptions.on_event` receives them.
    """

    reports: tuple[DeviceReport, ...]
    swaps: list[Swap]
    events: list[RunEvent]

    def __init__(
        self,
        directory: Path,
        options: RunOptions,
        specialize: Callable[[Path, RunOptions], RunOptions] | None = None,
        link: Path | None = None,
    ) -> None:
        """Start the devices of an artifact and wait until they are ready.

        Args:
            directory: The artifact.
            options: Options for this artifact and all later ones.
            specialize: Function that returns the options for one artifact, given its directory and the options of the
                session. Default: every artifact uses the options of the session.
            link: A symbolic link to the artifact. When the link points to another artifact, the session swaps to it.

        Raises:
            DicompilerError: The directory is not a valid artifact, or its target does not support sessions.
            RunError: A device cannot be started.
            UsageError: Devices are to be started manually, or the artifact has states.
        """
        _refuse_states(directory, load_artifact(directory))
        if options.start_manually:
            raise UsageError("swap: devices that you start yourself cannot be swapped: use connect")
        self.reports, self.swaps, self.events = (), [], []
        self._on_event = options.on_event
        options = replace(options, on_event=self._record_event)
        self._options, self._opened_at, self._process = options, time.perf_counter(), os.getpid()
        self._swap_lock, self._condition = threading.Lock(), threading.Condition()
        self._frame_count, self._end_reason = 0, ""
        self._retirements: list[threading.Thread] = []
        self._max_in_flight = math.inf
        # The inputs of the last frame that was computed without an error.
        self._last_inputs: Mapping[str, Any] | None = None
        self._first_directory = directory.resolve()
        self._specialize = specialize or (lambda _directory, options: options)
        self._current: _Version | None = self._start_version(directory, self._options_of(directory))
        # During a swap with a pause: the artifact that is being replaced.
        self._paused: _Version | None = None
        self._end_requested = threading.Event()
        self._follower: threading.Thread | None = None
        if link is not None:
            self._follower = threading.Thread(target=self._follow_link, args=(link,), daemon=True)
            self._follower.start()

    @property
    def directory(self) -> Path:
        """The directory of the artifact that computes new frames; during a swap with a pause, of the old artifact."""
        return (self._current or self._paused or self._in_force()).directory

    def _record_event(self, event: RunEvent) -> None:
        self.events.append(event)
        if self._on_event is not None:
            self._on_event(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end("an error left its context", lambda session: session.__exit__(kind, *error))  # type: ignore[arg-type]

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        with self._register_use() as use:
            with self._condition:
                self._frame_count += 1
            outputs = use.version.session.infer(inputs)
            self._last_inputs = inputs
            return outputs

    def reset(self) -> None:
        with self._register_use() as use:
            use.version.session.reset()

    def stream(self, frames: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, NDArray[Any]]]:
        check_type(frames, (Iterable,), "stream: frames", "an iterable of inputs by name")
        source = _FrameSource(frames)
        while not source.is_exhausted:
            with self._register_use() as use:
                frames = self._frames_of_version(source, use)
                for outputs in use.version.session.stream(frames if source.is_ready else iter(frames)):
                    with self._condition:
                        self._last_inputs = use.in_flight.popleft()
                        self._condition.notify_all()
                    yield outputs
                    use.thread = threading.get_ident()

    def _frames_of_version(self, source: _FrameSource, use: _Use) -> _FramesOfVersion:
        """Return the frames of a stream until the artifact of the call `use` is replaced or the call ends."""

        def register(frame: Mapping[str, Any]) -> None:
            self._frame_count += 1
            use.in_flight.append(frame)

        return _FramesOfVersion(
            source,
            self._condition,
            is_in_force=lambda: self._current is use.version and use in use.version.uses,
            is_full=lambda: len(use.in_flight) >= self._max_in_flight,
            register=register,
        )

    def _limit_frames_in_flight(self, count: float) -> None:
        with self._condition:
            self._max_in_flight = count
            self._condition.notify_all()

    # -- methods that replace the running artifact

    def swap(
        self, directory: str | Path, *, verify: bool = True, pause: bool = False, link_share: float = LINK_SHARE
    ) -> Swap:
        """Replace the artifact of the session while frames are computed.

        The old devices finish the frames that they have read, and then end. If the new artifact cannot be used, the
        session continues with the old one.

        Args:
            directory: The new artifact: another plan, other weights or another model with the same inputs and outputs.
            verify: True to compute a frame on the new devices first, and compare its outputs with onnxruntime. The
                inputs are random, or those of the last computed frame if the artifact sends tensors as int8.
            pause: True to end the old devices before the new ones start, for boards without memory for both. Frames
                wait meanwhile.
            link_share: Fraction of the network's bandwidth (as the new artifact's platform states it) for copying files
                to boards.

        Returns:
            The replacement.

        Raises:
            DicompilerError: The new artifact has other inputs, outputs or devices, or needs too much memory.
            RunError: A new device could not be started, or its outputs differ from those of onnxruntime.
            UsageError: Another swap is under way, the artifact has states (outputs that are inputs of the next frame),
                or a swap with a pause is called inside a loop over `stream`.
        """
        check_type(directory, (str, Path), "swap: directory", "a path")
        if not 0 < link_share <= 1:
            raise UsageError(f"swap: link_share must be above 0 and at most 1, not {link_share!r}")
        new, start = Path(directory), time.perf_counter()
        self._check_process()
        if not self._swap_lock.acquire(blocking=False):
            raise UsageError("swap: another swap of this session is under way: wait until it has ended")
        try:
            old = self._in_force()
            options = self._options_of(new)
            check_replacement(old.directory, new, options)
            options = _limit_copy_speed(old, new, options, link_share)
            if pause:
                self._paused = old
                version = self._replace_with_pause(old, new, options, verify)
            else:
                check_memory_of_both(old.directory, new)
                version = self._open_version(new, options, verify)
            with self._condition:
                self._current = version
                first_frame = self._frame_count
                self._condition.notify_all()
            done = Swap(old.directory, new, first_frame, time.perf_counter() - start)
            self.swaps.append(done)
            if not pause:
                self._retire_version(old)
        finally:
            self._paused = None
            self._limit_frames_in_flight(math.inf)
            self._swap_lock.release()
        log.info("swap: %s replaces %s from frame %d on", new, old.directory, first_frame)
        self._report_event("swap", str(new), first_frame)
        return done

    def swap_back(self, *, verify: bool = True, pause: bool = False) -> Swap:
        """Replace the session's artifact by the one that it had before the last swap.

        Args:
            verify: True to compute a frame on the new devices first, and compare its outputs with onnxruntime.
            pause: True to end the running devices before the others start, for boards without memory for both.

        Returns:
            The replacement.

        Raises:
            DicompilerError: The artifact has other inputs, outputs or devices, or needs too much memory.
            RunError: A device could not be started, or its outputs differ from those of onnxruntime.
            UsageError: No artifact was replaced, another swap is under way, or a swap with a pause is called inside a
                loop over `stream`.
        """
        if not self.swaps:
            raise UsageError("swap: no artifact was replaced: call swap() first")
        return self.swap(self.swaps[-1].old, verify=verify, pause=pause)

    def _report_event(self, kind: Literal["swap", "refusal"], reason: str, frame_count: int) -> None:
        self._record_event(RunEvent(kind, "", reason, (), time.perf_counter() - self._opened_at, frame_count))

    def _follow_link(self, link: Path) -> None:
        """Replace the session's artifact each time when the symbolic link points to another one."""
        followed = missing = self._first_directory
        while not self._end_requested.wait(FOLLOW_INTERVAL_S):
            target = link.resolve()
            if target == followed or self._swap_lock.locked():
                continue
            # Users may set the link before they write the artifact to which it points, so it is checked again later.
            if not (target / ARTIFACT_FILE).is_file():
                if target != missing:
                    log.warning("swap: %s points to %s, which is not an artifact (yet)", link, target)
                missing = target
                continue
            # From here on, `target` is not tried again, even if the swap fails.
            followed = target
            try:
                if target != self.directory.resolve():
                    swap = self.swap(target)
                    log.warning("swap: %s computes all frames from number %d on", target, swap.first_frame)
            except DicompilerError as error:
                log.warning("swap: %s points to %s, which is not used: %s", link, target, error)
                self._report_event("refusal", f"{target}: {error}", self._frame_count)

    def _options_of(self, directory: Path) -> RunOptions:
        """Return the run options for one artifact, which needs its own directory on boards."""
        options, path = self._options, directory.resolve()
        if options.hosts is not None and path != self._first_directory:
            options = replace(options, hosts=hosts_of_artifact(options.hosts, path.name))
        return self._specialize(directory, options)

    def _start_version(self, directory: Path, options: RunOptions) -> _Version:
        return _Version(directory, options, connect(directory, options))

    def _open_version(self, directory: Path, options: RunOptions, verify: bool) -> _Version:
        """Start the devices of an artifact; if `verify` is True, compare the outputs of a frame with onnxruntime."""
        on_frame, is_verified = options.on_frame, threading.Event()
        # The user did not send the frame of the verification, so `on_frame` is not called for it.
        if on_frame is not None:
            options = replace(options, on_frame=lambda times: on_frame(times) if is_verified.is_set() else None)
        version = self._start_version(directory, options)
        device_count = len(load_artifact(directory)["devices"])
        self._limit_frames_in_flight(device_count + SPARE_FRAMES_AT_SWITCH)
        try:
            if verify:
                self._verify(version)
        except BaseException:
            _close_quietly(version.session)
            raise
        is_verified.set()
        return version

    def _verify(self, version: _Version) -> None:
        """Raise RunError if the outputs of a frame differ from those of onnxruntime.

        The inputs are random. If the artifact sends tensors as int8, random inputs would often exceed the value ranges
        of its samples. Then the inputs of the last computed frame are used.
        """
        from dicompiler.verify.wire_error import CLIPPING_HINT

        inputs = None
        if load_plan(version.directory / PLAN_FILE).wire_format.ranges:
            # The caller may write the next picture into the same arrays, so they are copied.
            inputs = copy.deepcopy(self._last_inputs)
        verification = verify_session(version.directory, version.session.stream, inputs)
        failed = next((check for check in verification.checks if not check.passed), None)
        if failed is not None:
            remedy = "" if CLIPPING_HINT in failed.detail else ": compile it again"
            raise RunError(
                f"swap: {version.directory}: its devices compute other outputs than onnxruntime: {failed.name}: "
                f"{failed.detail}{remedy}"
            )

    def _replace_with_pause(self, old: _Version, new: Path, options: RunOptions, verify: bool) -> _Version:
        """End the old devices after the frames in flight, then start the new ones; on failure, restart the old ones."""
        with self._condition:
            # This thread cannot wait for its own call of `stream`.
            if any(use.thread == threading.get_ident() for use in old.uses):
                raise UsageError(
                    "swap: pause=True waits until all frames have finished, but this thread is in a loop over "
                    "stream(): call swap(pause=True) in another thread"
                )
            # Calls of other threads wait while there is no current artifact.
            self._current = None
            if not self._condition.wait_for(lambda: not old.uses, self._options.timeout_s):
                self._current = old
                self._condition.notify_all()
                raise RunError(
                    f"swap: the frames in flight were not finished within {self._options.timeout_s:g} s: read all "
                    "outputs of streams, or allow more time (timeout)"
                )
        try:
            _close_quietly(old.session)
            return self._open_version(new, options, verify)
        except BaseException as error:
            try:
                version = self._start_version(old.directory, old.options)
            except DicompilerError as second:
                self._end_reason = f"swap: {error}; and the old artifact could not be started again: {second}"
                version = None
            with self._condition:
                self._current = version
                self._condition.notify_all()
            raise

    def _retire_version(self, version: _Version) -> None:
        """Start a thread that ends the devices of a replaced artifact after their last frame."""

        def run() -> None:
            with self._condition:
                self._condition.wait_for(lambda: not version.uses or self._end_reason)
            _close_quietly(version.session)

        thread = threading.Thread(target=run, daemon=True)
        self._retirements = [*(thread for thread in self._retirements if thread.is_alive()), thread]
        thread.start()

    # -- methods that register calls of the session, and that end it

    @contextmanager
    def _register_use(self) -> Iterator[_Use]:
        """Register a call that uses the current artifact until the `with` block ends.

        If a swap pauses frames, wait for the end of the swap first.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._current is not None or self._end_reason)
            use = _Use(self._in_force())
            use.version.uses.add(use)
        try:
            yield use
        finally:
            with self._condition:
                use.version.uses.remove(use)
                self._condition.notify_all()

    def _in_force(self) -> _Version:
        if self._end_reason or self._current is None:
            raise RunError(f"the session has ended: {self._end_reason}")
        return self._current

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RunError(
                "swap: the session belongs to the process that opened it, and this is a fork of it: open a session in "
                "each process"
            )

    def close(self) -> None:
        """Finish the frames in flight and a running swap, and end the devices."""
        self._end("it was closed", lambda session: session.close())

    def _end(self, reason: str, end_session: Callable[[Session], None]) -> None:
        if os.getpid() != self._process:
            return
        self._end_requested.set()
        if self._follower is not None:
            self._follower.join()
        with self._swap_lock:
            if self._end_reason:
                return
            version = self._in_force()
            try:
                end_session(version.session)
                self.reports = version.session.reports
            finally:
                with self._condition:
                    self._end_reason = reason
                    self._condition.notify_all()
                for thread in self._retirements:
                    thread.join()


def _limit_copy_speed(old: _Version, new: Path, options: RunOptions, link_share: float) -> RunOptions:
    """Return run options that limit how fast a new artifact is copied to boards.

    Args:
        old: The running artifact.
        new: Directory of the new artifact.
        options: The options to change. They stay the same if there are no boards.
        link_share: Fraction of the network's bandwidth that copying may use.
    """
    if old.options.hosts is None:
        return options
    bytes_per_s = link_share * Platform.load(new / PLATFORM_FILE).network.bandwidth / 8
    return replace(options, copy_bytes_per_s=bytes_per_s)


class _FrameSource:
    """The frames of a stream, which the sessions of several artifacts read one after another.

    Attributes:
        is_ready: True if reading a frame never waits, because the frames are a list or tuple.
        is_exhausted: True if all frames were read.
    """

    def __init__(self, frames: Iterable[Mapping[str, Any]]) -> None:
        self.is_ready = isinstance(frames, list | tuple)
        self._frames = iter(frames)
        self._next: Mapping[str, Any] | None = None
        self.is_exhausted = False
        if self.is_ready:
            self.read_next()

    def read_next(self) -> None:
        """Read the next frame, unless `take` has not yet returned the previous one."""
        if self._next is None and not self.is_exhausted:
            try:
                self._next = next(self._frames)
            except StopIteration:
                self.is_exhausted = True

    def take(self) -> Mapping[str, Any]:
        frame, self._next = self._next, None
        assert frame is not None
        if self.is_ready:
            self.read_next()
        return frame


@dataclass(frozen=True)
class _FramesOfVersion(ReadyFrames):
    """The frames of a stream that one artifact computes: those that are read before the artifact is replaced.

    Attributes:
        source: The frames of the stream.
        condition: The condition of the session, which is notified when one of the functions has another result.
        is_in_force: Returns True until the artifact is replaced.
        is_full: Returns True while too many frames are in flight for another one.
        register: Records that a frame is in flight. It is called with the lock of the condition.
    """

    source: _FrameSource
    condition: threading.Condition
    is_in_force: Callable[[], bool]
    is_full: Callable[[], bool]
    register: Callable[[Mapping[str, Any]], None]

    @property
    def is_exhausted(self) -> bool:
        return self.source.is_exhausted or not self.is_in_force()

    @property
    def has_frame(self) -> bool:
        return not self.is_exhausted and not self.is_full()

    def take(self) -> Mapping[str, Any] | None:
        with self.condition:
            if self.is_exhausted:
                return None
            frame = self.source.take()
            self.register(frame)
        return frame

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        while True:
            self.source.read_next()
            with self.condition:
                self.condition.wait_for(lambda: self.is_exhausted or not self.is_full())
                frame = self.take()
            if frame is None:
                return
            yield frame


def connect_swappable(
    directory: str | Path,
    options: RunOptions | None = None,
    timeout: float | None = None,
    *,
    hosts: str | Path | Hosts | None = None,
    keys: str | Path | None = None,
    in_flight: int | None = None,
    on_event: Callable[[RunEvent], None] | None = None,
    follow: bool = False,
) -> SwappableSession:
    """Start the devices of an artifact, as `connect` does, for a session that can change to other artifacts.

    Args:
        directory: The artifact's directory.
        options: Options of the run, for this artifact and all later ones. Default: `RunOptions()`.
        timeout: Seconds allowed for the start, and for each frame. Default: `options.timeout_s`.
        hosts: A hosts.toml, or its parsed content, with the hosts on which the devices are started. If it states the
            directory on a host, the files of later artifacts are copied to a directory next to it.
        keys: Directory made by `dicompiler keys`. Default: `options.keys`.
        in_flight: Maximum number of frames in flight. Default: `options.in_flight`.
        on_event: Function that is called with each failure, takeover and return, in the thread that uses the session.
            It is also called after each swap, in the thread that has called `swap`.
        follow: True to swap to another artifact when `directory` points to it. `directory` must then be a symbolic
            link.

    Returns:
        The session. Use it as a context manager, or close it.

    Raises:
        DicompilerError: The directory is not a valid artifact, or its target does not support sessions.
        RunError: A device cannot be started.
        UsageError: An argument has the wrong type, devices are to be started manually, the artifact has states (outputs
            that are inputs of the next frame), or `directory` is not a symbolic link and `follow` is True.
    """
    check_type(directory, (str, Path), "connect_swappable: directory", "a path")
    artifact, link = resolve_link(Path(directory), follow)
    options = resolve_connect_options(options, timeout, hosts, keys, in_flight, on_event)
    return SwappableSession(artifact, options, link=link)


def resolve_link(directory: Path, follow: bool) -> tuple[Path, Path | None]:
    """Return an artifact, and the symbolic link to follow or None.

    Args:
        directory: The artifact, or a symbolic link to it.
        follow: Whether to follow the link.

    Raises:
        UsageError: `follow` is True, and `directory` is not a symbolic link.
    """
    if not follow:
        return directory, None
    if not directory.is_symlink():
        raise UsageError(f"{directory}: only a symbolic link can be followed: create one (ln -s ARTIFACT {directory})")
    return directory.resolve(), directory


def _refuse_states(directory: Path, document: Mapping[str, Any]) -> None:
    """Raise UsageError if an artifact has states (outputs that are inputs of the next frame).

    `document` is the content of its artifact.json.
    """
    if document.get("states"):
        raise UsageError(f"swap: {directory} keeps states between frames, which a swap would lose: use connect")


def check_replacement(old: Path, new: Path, options: RunOptions) -> None:
    """Check that an artifact can replace another one in a session.

    Raises:
        DicompilerError: The new artifact has other inputs, outputs or devices.
        UsageError: Both are the same artifact, have the same name on the boards, or the new one has states (outputs
            that are inputs of the next frame).
    """
    if old.resolve() == new.resolve():
        raise UsageError(f"swap: the session already runs {new}: compile the new artifact into another directory")
    if options.hosts is not None and old.resolve().name == new.resolve().name:
        raise UsageError(
            f"swap: {new} and {old} would have the same directory on the boards: rename the directory of one of them"
        )
    old_document, new_document = load_artifact(old), load_artifact(new)
    _refuse_states(new, new_document)
    for kind in ("inputs", "outputs"):
        if difference := _first_difference(old_document[kind], new_document[kind]):
            raise DicompilerError(
                f"swap: {new}: {kind.removesuffix('s')} {difference}: a swap needs the inputs and outputs of {old}; "
                "open a new session for other ones"
            )
    old_devices, new_devices = (
        [device.name for device in Platform.load(directory / PLATFORM_FILE).devices] for directory in (old, new)
    )
    remedy = f"compile it for the same platform (--platform {old / PLATFORM_FILE})"
    for name in new_document["devices"]:
        if name not in old_devices:
            raise DicompilerError(f"swap: {new}: device {name!r} is not in the cluster of {old}: {remedy}")
    for name in old_document["devices"]:
        if name not in new_devices:
            raise DicompilerError(
                f"swap: {new}: its cluster lacks the device {name!r} of {old}, so swapping back would fail: {remedy}"
            )


def _first_difference(old: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]]) -> str:
    """Return the first difference between two lists of inputs or outputs as text; "" if they are equal."""
    before, after = ({value["name"]: value for value in values} for values in (old, new))
    for name in dict.fromkeys((*before, *after)):
        if name not in after:
            return f"{name!r} is missing"
        if name not in before:
            return f"{name!r} is new"
        for key in ("dtype", "shape"):
            if before[name][key] != after[name][key]:
                return f"{name!r} has {key} {after[name][key]} instead of {before[name][key]}"
    return ""


def check_memory_of_both(old: Path, new: Path) -> None:
    """Raise DicompilerError if a host has too little memory for the devices of two artifacts at the same time."""
    platform = Platform.load(new / PLATFORM_FILE)
    needed = {directory: memory_by_host(directory) for directory in (old, new)}
    for host in platform.hosts:
        before, after = (needed[directory].get(host.name, 0) for directory in (old, new))
        if before and after and before + after > host.memory:
            raise DicompilerError(
                f"swap: host {host.name!r} needs {format_bytes(after)} for {new} in addition to {format_bytes(before)} "
                f"for {old}, {format_bytes(before + after - host.memory)} more than it has "
                f"({format_bytes(host.memory)}): end the old devices first (pause=True)"
            )


def hosts_of_artifact(hosts: Hosts, artifact_name: str) -> Hosts:
    """Return the hosts with another directory for an artifact, so that it does not overwrite the running one.

    Args:
        hosts: The hosts. Those without a stated directory stay the same.
        artifact_name: Name of the artifact's directory, which is appended to the stated directories.
    """

    def move(settings: Mapping[str, Any]) -> Mapping[str, Any]:
        if "directory" not in settings:
            return settings
        return {**settings, "directory": f"{settings['directory'].rstrip('/')}.{artifact_name}"}

    return replace(
        hosts, defaults=move(hosts.defaults), entries={name: move(entry) for name, entry in hosts.entries.items()}
    )


def _close_quietly(session: Session) -> None:
    """Close a session that is no longer needed, and only log its errors."""
    try:
        session.close()
    except DicompilerError as error:
        log.warning("swap: the devices of a replaced artifact ended with an error: %s", error)
