"""Sessions that adapt to boards and links that become slower or faster.

Such a session compares the measured seconds of computing and sending with the prediction. If they differ too much, it
does this:

1. It searches for a better plan in another process, with the measured speeds.
2. If the predicted gain is large enough, it swaps to the artifact of this plan, while frames are computed.
3. From then on, it compares measurements with the new prediction.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import queue
import shutil
import statistics
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dicompiler.base.errors import DicompilerError, RunError, UsageError, check_type
from dicompiler.base.objectives import describe_objective
from dicompiler.driver.artifact import check_frame_count, reopen_artifact
from dicompiler.driver.swap import LINK_SHARE, Swap, SwappableSession, resolve_link
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.platform import Platform, platform_from_toml, platform_to_toml
from dicompiler.measure.adapt_search import SearchAnswer, SearchRequest, expected_seconds
from dicompiler.measure.connection_speeds import ARROW, name_connection
from dicompiler.measure.search_process import SearchProcess
from dicompiler.target.client import Session, resolve_connect_options
from dicompiler.target.manifest import PLATFORM_FILE, REFERENCE_FILE
from dicompiler.target.remote.hosts import Hosts
from dicompiler.target.run_records import (
    FrameTimes,
    ReceivedBytes,
    RunEvent,
    RunOptions,
    RunResult,
    default_in_flight,
    describe_unfinished_run,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger("dicompiler")

MIN_FRAMES_OF_REPLICA = 3
"""Least number of frames from which a median is computed, for each replica (copy of the plan on other devices)."""
MIN_TIMED_BYTES = 65536
"""The speed of a connection is compared with its prediction after at least this number of bytes."""
MIN_SENDING_SHARE = 0.25
"""The speed of a connection is compared if its bytes take this fraction of the busiest device's computing, or more.

Other connections hardly delay frames, and their speeds vary more. The seconds are the longer ones of the measured and
the predicted seconds, so that slow connections are compared, and those that have been slow.
"""
MAX_NAMED_CONNECTIONS = 2
CHECKS_PER_WINDOW = 4
"""The window of last frames is checked this number of times until all of its frames are new."""
MAX_DRIFT = 0.1
"""Largest relative difference between a device's seconds of computing in the last frames and in their newer half.

If the difference is larger, the speed of the device is still changing, so the session waits.
"""
MAX_LINK_DRIFT = 0.25
"""Limit like MAX_DRIFT for the seconds per byte of a connection, which vary more, because messages share the links."""
LARGE_DEVIATION = 0.5
"""If a device's seconds of computing deviate by more than this fraction from the prediction, a search starts at once.

Connections vary too much for this rule.
"""
FRAMES_OF_LARGE_DEVIATION = 3
"""Number of last frames that must deviate by more than LARGE_DEVIATION, for each copy of the plan on other devices."""
OBSERVATION_INTERVAL_S = 0.025
"""Seconds between two frames whose times are recorded. If frames are faster, those in between are ignored.

Recording takes up to 0.2 ms, which would be 5 % of a frame of 4 ms.
"""
SEARCH_INTERVALS_AFTER_ERROR = 6
"""After a failed search, the next one waits for this multiple of `AdaptOptions.min_interval_s`."""


@dataclass(frozen=True)
class AdaptOptions:
    """Conditions under which an adaptive session searches for another plan, and under which it uses that plan.

    Attributes:
        deviation: A search starts if a device's seconds of computing and their prediction differ by more than the
            factor 1 + `deviation`.
        link_deviation: A search also starts if a connection's seconds per byte and their prediction differ by more than
            the factor 1 + `link_deviation`.
        frames: Least number of frames from which the median of the measured seconds is computed. Deviations of more
            than 50 % need only three frames.
        min_gain: A plan is used if it lowers the predicted value of the objective by more than this fraction.
        min_interval_s: Least number of seconds between two searches.
        strategy: The strategy that searches, with its options.
    """

    deviation: float = 0.25
    link_deviation: float = 0.5
    frames: int = 10
    min_gain: float = 0.1
    min_interval_s: float = 10.0
    strategy: str = "auto{budget=1}"

    def __post_init__(self) -> None:
        for name in ("deviation", "link_deviation", "min_gain", "min_interval_s"):
            check_type(getattr(self, name), (int, float), f"adapt: {name}", "a number")
            if not 0 <= getattr(self, name) < float("inf"):
                raise UsageError(f"adapt: {name} must be 0 or more, not {getattr(self, name)!r}")
        check_type(self.frames, (int,), "adapt: frames", "an integer")
        check_type(self.strategy, (str,), "adapt: strategy", "a text such as 'auto{budget=1}'")
        if self.frames < 1:
            raise UsageError(f"adapt: frames must be at least 1, not {self.frames!r}")


@dataclass(frozen=True)
class Adaptation:
    """A search for a better plan in an adaptive session, and its result.

    Attributes:
        at_s: Seconds from the opening of the session to the search.
        ratios: Measured seconds divided by predicted seconds, for each deviation. Keys are device names (for computing)
            and connection names such as `pi01 → pi02` (for seconds per byte).
        value: Predicted value of the objective with the artifact in use, at the measured speeds.
        new_value: Predicted value of the objective with the best artifact that was found, at the measured speeds.
        objective: The objective; empty if the search failed.
        swap: The change to that artifact; None if the gain was too small.
        error: Reason why the search or the swap failed; empty if it did not fail.
        min_gain: The session swaps if the gain is above this fraction.
    """

    at_s: float
    ratios: Mapping[str, float]
    value: float = 0.0
    new_value: float = 0.0
    objective: str = ""
    swap: Swap | None = None
    error: str = ""
    min_gain: float = AdaptOptions.min_gain

    @property
    def message(self) -> str:
        """One line with the measured deviations, the reaction of the session, and the predicted gain."""
        seen = ", ".join(_describe_ratios(self.ratios))
        if self.error:
            return f"{seen}: no other plan: {self.error}"
        gain = 1 - self.new_value / self.value if self.value else 0.0
        better = f"{gain:.0%} better ({describe_objective(self.objective)})"
        if self.swap is None:
            return f"{seen}: no swap: the best plan is {better}, and a swap needs more than {self.min_gain:.0%}"
        return f"{seen}: {self.swap.new} is predicted to be {better}, from frame {self.swap.first_frame} on"


@dataclass(frozen=True)
class SpeedTrial:
    """The result of a stream of frames on emulated or simulated boards that change their speed.

    Attributes:
        finished_s: For each frame, the seconds from the start of the stream until its outputs were complete.
        adaptations: The session's searches for a better plan; empty if it does not search.
    """

    finished_s: tuple[float, ...]
    adaptations: tuple[Adaptation, ...]


def _describe_ratios(ratios: Mapping[str, float]) -> Iterator[str]:
    connections = sorted((name for name in ratios if ARROW in name), key=lambda name: -abs(math.log(ratios[name])))
    for name, ratio in ratios.items():
        if name not in connections:
            yield f"{name} computes {ratio:.2f} times as long as predicted"
    for name in connections[:MAX_NAMED_CONNECTIONS]:
        yield f"{name} sends {ratios[name]:.2f} times as long as predicted"
    more = len(connections) - MAX_NAMED_CONNECTIONS
    if more > 0:
        yield f"{more} more connections differ"


class _Observation:
    """Measured seconds of an artifact's last frames, and their prediction.

    Plans may have replicas, i.e. copies on other devices that compute frames in turn. Each replica has its own window
    of last frames.

    Attributes:
        directory: Directory of the artifact.
        expected_s: Predicted seconds of computing by device name, and predicted seconds per byte by connection name.
        replica_count: Number of replicas; 1 if the plan has none.
        begun_at: Time (of `time.monotonic`) of the last call of `clear`, or else of the start.
    """

    def __init__(
        self, directory: Path, expected_s: Mapping[str, float], replica_count: int, min_frame_count: int
    ) -> None:
        self.directory, self.expected_s, self.replica_count = directory, expected_s, replica_count
        size = max(MIN_FRAMES_OF_REPLICA, math.ceil(min_frame_count / replica_count))
        self._frames = [deque[FrameTimes](maxlen=size) for _ in range(replica_count)]
        self._check_interval, self._unchecked_frame_count = math.ceil(size * replica_count / CHECKS_PER_WINDOW), 0
        self._next_frame_at = [0.0] * replica_count
        self.begun_at = time.monotonic()

    def is_due(self, replica: int, frame_s: float, now_s: float) -> bool:
        """Return True if a frame that has just ended shall be recorded.

        Frames that began before the observation are not recorded, because they were partly computed under other
        conditions. After a recorded frame, no other is recorded for OBSERVATION_INTERVAL_S. With several replicas, the
        interval of each is longer, so that the session records as many frames as without.

        Args:
            replica: Index of the replica that computed the frame.
            frame_s: Seconds that the frame took.
            now_s: The time (of `time.monotonic`).
        """
        if now_s - frame_s < self.begun_at or now_s < self._next_frame_at[replica]:
            return False
        self._next_frame_at[replica] = now_s + OBSERVATION_INTERVAL_S * self.replica_count
        return True

    def add(self, times: FrameTimes) -> dict[str, float] | None:
        """Add a frame; return the measured seconds of the last frames if it is time to check them and they are stable.

        They are checked each time that a part of the frames (1 / CHECKS_PER_WINDOW) is new, and at once after a large
        deviation.

        Returns:
            Median seconds of computing by device name, and median seconds per byte by connection name; None if nothing
            is checked.
        """
        self._frames[times.role].append(times)
        self._unchecked_frame_count += 1
        if not all(len(frames) == frames.maxlen for frames in self._frames):
            return None
        windows = [list(frames) for frames in self._frames]
        if changed := self._measure_large_deviations(windows):
            return {**self._measure_computing(windows), **changed}
        if self._unchecked_frame_count < self._check_interval:
            return None
        self._unchecked_frame_count = 0
        measured = self._measure(windows)
        newer = self._measure([frames[len(frames) // 2 :] for frames in windows])
        for name, seconds in measured.items():
            max_drift = MAX_LINK_DRIFT if ARROW in name else MAX_DRIFT
            if name in newer and abs(newer[name] - seconds) > max_drift * seconds:
                return None
        return measured

    def _measure_large_deviations(self, windows: Sequence[Sequence[FrameTimes]]) -> dict[str, float]:
        """Return the seconds of computing of devices that have certainly changed their speed, by device name.

        All last frames of such a device deviate from the prediction by more than LARGE_DEVIATION.
        """
        # Checking the newest frame first saves time, because it nearly always shows no deviation.
        newest = self._measure_computing([frames[-1:] for frames in windows])
        candidates = [name for name, seconds in newest.items() if self._is_large_deviation(name, [seconds])]
        if not candidates:
            return {}
        last = [frames[-FRAMES_OF_LARGE_DEVIATION:] for frames in windows]
        seconds_by_frame = [
            self._measure_computing([[frame] for frame in frames]) for frames in zip(*last, strict=True)
        ]
        measured = self._measure_computing(last)
        return {
            name: measured[name]
            for name in candidates
            if self._is_large_deviation(name, [by_device[name] for by_device in seconds_by_frame])
        }

    def _is_large_deviation(self, device: str, seconds: Sequence[float]) -> bool:
        if max(seconds) - min(seconds) > MAX_DRIFT * max(seconds):
            return False
        limit, expected_s = 1 + LARGE_DEVIATION, self.expected_s[device]
        return min(seconds) > limit * expected_s or limit * max(seconds) < expected_s

    def _measure_computing(self, windows: Sequence[Sequence[FrameTimes]]) -> dict[str, float]:
        return {
            name: sum(statistics.median(times.compute_s.get(name, 0.0) for times in frames) for frames in windows)
            for name in self.expected_s
            if ARROW not in name
        }

    def _measure(self, windows: Sequence[Sequence[FrameTimes]]) -> dict[str, float]:
        timed: dict[str, list[ReceivedBytes]] = {name: [] for name in self.expected_s}
        for times in itertools.chain.from_iterable(windows):
            for devices, received in times.received.items():
                if (name := name_connection(*devices)) in timed and received.timed_bytes > 0:
                    timed[name].append(received)
        computing = self._measure_computing(windows)
        min_s = MIN_SENDING_SHARE * max(computing.values(), default=0.0) * len(windows[0])
        sending = {}
        for name, parts in timed.items():
            nbytes = sum(part.timed_bytes for part in parts)
            seconds = _median_seconds_per_byte(parts) if nbytes >= MIN_TIMED_BYTES else 0.0
            if seconds > 0 and nbytes * max(seconds, self.expected_s[name]) >= min_s:
                sending[name] = seconds
        return {**computing, **sending}

    def find_deviations(self, measured: Mapping[str, float], adapt: AdaptOptions) -> dict[str, float]:
        """Return measured / predicted seconds, by name, of the devices and connections that deviate too much.

        Args:
            measured: Seconds of computing by device name, and seconds per byte by connection name.
            adapt: Options that state the allowed deviations.
        """
        found = {}
        for name, seconds in measured.items():
            ratio = seconds / self.expected_s[name]
            limit = 1 + (adapt.link_deviation if ARROW in name else adapt.deviation)
            if not 1 / limit <= ratio <= limit:
                found[name] = ratio
        return found

    def clear(self) -> None:
        self.begun_at = time.monotonic()
        for frames in self._frames:
            frames.clear()


def _median_seconds_per_byte(received: Sequence[ReceivedBytes]) -> float:
    """Return the seconds per byte that half of the bytes took at most.

    Unlike the mean, it changes little if the receiver read a single frame late.
    """
    by_speed = sorted(received, key=lambda part: part.timed_s / part.timed_bytes)
    ends = list(itertools.accumulate(part.timed_bytes for part in by_speed))
    middle = by_speed[bisect_left(ends, ends[-1] / 2)]
    return middle.timed_s / middle.timed_bytes


class AdaptiveSession(SwappableSession):
    """A session that replaces its artifact by a better one if boards or links become slower or faster.

    `connect_adaptive` creates it.

    Attributes:
        adaptations: The searches so far, with their results.
    """

    adaptations: list[Adaptation]

    def __init__(
        self,
        directory: Path,
        options: RunOptions,
        adapt: AdaptOptions | None = None,
        specialize: Callable[[Path, RunOptions], RunOptions] | None = None,
        link: Path | None = None,
    ) -> None:
        """Start the devices of an artifact and wait until they are ready.

        Args:
            directory: Directory of the artifact with which the session starts.
            options: Options of the session.
            adapt: When to search and to swap.
            specialize: Function that returns the options for one artifact, given its directory and the options of the
                session.
            link: A symbolic link to the artifact. When it points to another artifact, the session swaps to that
                artifact.

        Raises:
            DicompilerError: The directory is not a valid artifact.
            RunError: A device cannot be started.
            UsageError: The artifact has states.
        """
        self.adaptations = []
        self._adapt = adapt or AdaptOptions()
        self._specialize_others = specialize or (lambda _directory, options: options)
        self._measurements = queue.SimpleQueue[tuple[_Observation, Mapping[str, float]] | None]()
        self._is_adapting = self._is_closing = False
        self._next_search_at = 0.0
        self._search, self._can_search = SearchProcess(), threading.Event()
        self._written = list[Path]()
        self._first = directory
        # The lock keeps a search and the user from replacing the artifact at the same time.
        self._adapt_lock = threading.RLock()
        platform = Platform.load(directory / PLATFORM_FILE)
        self._platform = platform_to_toml(platform)
        self._in_flight = options.in_flight or default_in_flight(len(platform.devices))
        self._observation = self._observe_artifact(directory)
        super().__init__(directory, options, self._with_observer, link)
        self._thread = threading.Thread(target=self._adapt_until_closed, daemon=True)
        self._thread.start()

    def _make_observation(self, directory: Path, expected_s: Mapping[str, float], replica_count: int) -> _Observation:
        return _Observation(directory, expected_s, replica_count, self._adapt.frames)

    def _observe_artifact(self, directory: Path) -> _Observation:
        compilation, _, problem = reopen_artifact(directory, platform=platform_from_toml(self._platform))
        assert compilation.plan is not None
        expected_s = expected_seconds(compilation, problem, self._in_flight)
        return self._make_observation(directory, expected_s, len(compilation.plan.replica_roles))

    def swap(
        self, directory: str | Path, *, verify: bool = True, pause: bool = False, link_share: float = LINK_SHARE
    ) -> Swap:
        """Replace the artifact while frames are computed, as `SwappableSession.swap` does.

        Later searches look for plans of the new artifact's model. A running search is discarded.

        Args:
            directory: The new artifact: another plan, other weights or another model with the same inputs and outputs.
            verify: True to compute a frame on the new devices first, and compare its outputs with onnxruntime.
            pause: True to end the old devices before the new ones start, for boards without memory for both.
            link_share: Fraction of the network's bandwidth for copying files to the boards.

        Returns:
            The replacement.

        Raises:
            DicompilerError: The new artifact has other inputs, outputs or devices, or needs too much memory.
            RunError: A new device could not be started, or the outputs are wrong.
            UsageError: Another swap is under way, an artifact has states, or a swap with a pause is called inside a
                loop over `stream`.
        """
        with self._adapt_lock:
            swap = super().swap(directory, verify=verify, pause=pause, link_share=link_share)
            self._first = Path(directory)
            self._observation = self._observe_artifact(self._first)
            return swap

    def _with_observer(self, directory: Path, options: RunOptions) -> RunOptions:
        """Return an artifact's options, with functions that record the times of its frames."""
        on_event, on_frame = options.on_event, options.on_frame
        dilation = 1.0 if options.emulation is None else options.emulation.dilation
        down: list[str] = []

        def record_event(event: RunEvent) -> None:
            down[:] = event.down
            if on_event is not None:
                on_event(event)

        def record(times: FrameTimes) -> None:
            if on_frame is not None:
                on_frame(times)
            observation = self._observation
            if observation.directory != directory:
                return
            # After a failure, other devices compute the frames by a plan without predicted seconds.
            has_prediction = not down and times.role < observation.replica_count
            # While the search process is being prepared, it slows down devices on this host. Frames that began before
            # the end of the preparation are ignored.
            if not has_prediction or not self._can_search.is_set():
                observation.clear()
                return
            if not observation.is_due(times.role, times.frame_s, time.monotonic()):
                return
            measured = observation.add(times.divided_by(dilation))
            if measured is not None and time.monotonic() > self._next_search_at and not self._is_adapting:
                self._is_adapting = True
                self._measurements.put((observation, measured))

        return self._specialize_others(directory, replace(options, on_event=record_event, on_frame=record))

    def _adapt_until_closed(self) -> None:
        # A RunError is ignored, because it means that the session was closed during the preparation.
        with contextlib.suppress(RunError):
            self._search.prepare(self._make_request(self._first, {}, self._first))
        self._observation.clear()
        self._can_search.set()
        while (found := self._measurements.get()) is not None:
            observation, measured = found
            if ratios := observation.find_deviations(measured, self._adapt):
                adaptation = self._search_and_swap(observation, measured, ratios)
                intervals = SEARCH_INTERVALS_AFTER_ERROR if adaptation.error else 1
                self._next_search_at = time.monotonic() + intervals * self._adapt.min_interval_s
                self._report(adaptation)
            self._is_adapting = False

    def _search_and_swap(
        self, observation: _Observation, measured: Mapping[str, float], ratios: Mapping[str, float]
    ) -> Adaptation:
        """Search for a better plan at the measured speeds, and swap to its artifact if the gain is large enough."""
        output = self._name_output()
        adaptation = Adaptation(time.perf_counter() - self._opened_at, ratios, min_gain=self._adapt.min_gain)
        log.info("adapt: searching for another plan")
        try:
            answer = self._search.search(self._make_request(observation.directory, measured, output))
            log.info("adapt: the best plan is that of %s", answer.artifact)
            with self._adapt_lock:
                if self._observation is not observation:
                    raise RunError("the artifact was replaced during the search")
                if self._is_closing:
                    raise RunError("the session was closed during the search")
                return self._apply_answer(answer, measured, adaptation)
        except (DicompilerError, OSError) as error:
            return replace(adaptation, error=str(error))
        finally:
            self._remove_unused_artifacts(output)

    def _name_output(self) -> Path:
        """Return a new directory for the artifact of a search: the artifacts of earlier sessions are not replaced."""
        first = self._first.absolute()
        numbers = itertools.count(len(self.adaptations) + 1)
        paths = (first.with_name(f"{first.name}.adapted-{number}") for number in numbers)
        return next(path for path in paths if not path.exists())

    def _make_request(self, artifact: Path, measured: Mapping[str, float], output: Path) -> SearchRequest:
        return SearchRequest(
            str(artifact),
            str(self._first),
            self._platform,
            measured,
            self._in_flight,
            self._adapt.strategy,
            str(output),
        )

    def _apply_answer(self, answer: SearchAnswer, measured: Mapping[str, float], adaptation: Adaptation) -> Adaptation:
        """Swap to the artifact that a search has found if the gain is large enough."""
        observation = self._observation
        adaptation = replace(adaptation, value=answer.value, new_value=answer.new_value, objective=answer.objective)
        self._platform = answer.platform
        artifact, gain = Path(answer.artifact), 1 - answer.new_value / answer.value
        if artifact == observation.directory or gain <= self._adapt.min_gain:
            # The measured seconds become the prediction. Otherwise the same difference would start the same search
            # again.
            expected_s = {**observation.expected_s, **measured}
            self._observation = self._make_observation(observation.directory, expected_s, observation.replica_count)
            return adaptation
        swap = super().swap(artifact)
        self._observation = self._make_observation(artifact, answer.expected_s, answer.replica_count)
        return replace(adaptation, swap=swap)

    def _remove_unused_artifacts(self, output: Path) -> None:
        """Remove the artifacts of searches, except the artifact in use and the one before it."""
        self._written.append(output)
        self._remove_artifacts_except(
            {self._first, *(path for swap in self.swaps[-1:] for path in (swap.old, swap.new))}
        )

    def _remove_artifacts_except(self, used: Container[Path]) -> None:
        for path in [path for path in self._written if path not in used]:
            shutil.rmtree(path, ignore_errors=True)
            self._written.remove(path)

    def _report(self, adaptation: Adaptation) -> None:
        if self._is_closing:
            return
        self.adaptations.append(adaptation)
        log.warning("adapt: %s", adaptation.message)
        if self._options.on_event is not None:
            device = next((name for name in adaptation.ratios if ARROW not in name), "")
            event = RunEvent("adaptation", device, adaptation.message, (), adaptation.at_s, self._frame_count)
            self._options.on_event(event)

    def _end(self, reason: str, end_session: Callable[[Session], None]) -> None:
        """End the session. A running search is stopped; a running swap is finished first.

        Of the artifacts of searches, the one in use is kept, because logs and reports need it.
        """
        if os.getpid() != self._process:
            return
        self._is_closing = True
        self._measurements.put(None)
        self._search.close()
        self._thread.join()
        try:
            super()._end(reason, end_session)
        finally:
            self._remove_artifacts_except([swap.new for swap in self.swaps[-1:]])


def connect_adaptive(
    directory: str | Path,
    options: RunOptions | None = None,
    timeout: float | None = None,
    *,
    adapt: AdaptOptions | None = None,
    hosts: str | Path | Hosts | None = None,
    keys: str | Path | None = None,
    in_flight: int | None = None,
    on_event: Callable[[RunEvent], None] | None = None,
    follow: bool = False,
) -> AdaptiveSession:
    """Start the devices of an artifact for a session that changes its plan if boards or links change their speed.

    If measured times differ too much from the prediction, the session searches for a better plan in another process. It
    then swaps to the artifact of this plan, which is written next to `directory` as DIRECTORY.adapted-N. At the end of
    the session, only the artifact in use is kept.

    Args:
        directory: Directory of the artifact with which the session starts.
        options: Options of the session. Default: `RunOptions()`.
        timeout: Seconds allowed for the start, and for each frame. Default: `options.timeout_s`.
        adapt: When to search and to swap. Default: `AdaptOptions()`.
        hosts: A hosts.toml, or its parsed content, with the hosts on which the devices are started. If it states the
            directory on a host, the files of later artifacts are copied to a directory next to it. Default:
            `options.hosts`.
        keys: Directory made by `dicompiler keys`. Default: `options.keys`.
        in_flight: Maximum number of frames in flight. Default: `options.in_flight`.
        on_event: Function that is called with each failure, takeover and return, and after each swap and each search
            (in the thread that searches). Default: `options.on_event`.
        follow: True to swap to another artifact when `directory` points to it. `directory` must then be a symbolic
            link.

    Returns:
        The session. Use it as a context manager, or close it.

    Raises:
        DicompilerError: The directory is not a valid artifact, or its target does not support sessions.
        RunError: A device cannot be started.
        UsageError: An argument has the wrong type, the artifact has states, or `directory` is not a symbolic link and
            `follow` is True.
    """
    check_type(directory, (str, Path), "connect_adaptive: directory", "a path")
    artifact, link = resolve_link(Path(directory), follow)
    options = resolve_connect_options(options, timeout, hosts, keys, in_flight, on_event)
    return AdaptiveSession(artifact, options, adapt, link=link)


class _RunRecorder:
    """A recorder of a run's events and of the frame times of each artifact in it.

    Attributes:
        events: The events, with times since the start of the recording.
    """

    events: list[RunEvent]

    def __init__(self) -> None:
        self.events = []
        self._start, self._frame_count = time.perf_counter(), 0
        self._times: dict[Path, list[tuple[float, float]]] = {}

    def specialize(self, directory: Path, options: RunOptions) -> RunOptions:
        """Return an artifact's options, with a function that records its frames."""
        on_frame, found = options.on_frame, list[tuple[float, float]]()
        self._times[directory] = found

        def record_frame(times: FrameTimes) -> None:
            found.append((time.perf_counter(), times.frame_s))
            self._frame_count += 1
            if on_frame is not None:
                on_frame(times)

        return replace(options, on_frame=record_frame)

    def record_event(self, event: RunEvent) -> None:
        is_of_session = event.kind in ("swap", "refusal", "adaptation")
        count = event.finished_frames if is_of_session else self._frame_count
        self.events.append(replace(event, at_s=time.perf_counter() - self._start, finished_frames=count))

    @property
    def finished_at(self) -> list[float]:
        """For each finished frame of all artifacts, the time (of `time.perf_counter`) at which it was finished."""
        return sorted(at for times in self._times.values() for at, _ in times)

    def frames_of(self, directory: Path) -> tuple[tuple[float, ...], float]:
        """Return the seconds of each frame of an artifact, and the seconds of all frames together.

        Frames overlap if several are in flight, so the second value can be smaller than the sum.
        """
        found = self._times[directory]
        frames_s = tuple(seconds for _, seconds in found)
        return frames_s, found[-1][0] - found[0][0] + found[0][1] if found else 0.0


def run_with_swaps(
    directory: str | Path,
    inputs: Mapping[str, NDArray[Any]] | None = None,
    frames: int = 1,
    options: RunOptions | None = None,
    adapt: AdaptOptions | None = None,
    link: Path | None = None,
) -> tuple[Path, RunResult]:
    """Run an artifact in a session that can replace it by another one, and give every frame the same inputs.

    Args:
        directory: Directory of the artifact with which the run starts.
        inputs: Arrays by the names of the graph inputs. Default: seeded random arrays.
        frames: Number of frames.
        options: Options of the run. `options.timeout_s` limits the whole run.
        adapt: When to search for another plan and to swap to it; None: never.
        link: A symbolic link. When it points to another artifact than `directory`, the session swaps to that.

    Returns:
        The last artifact, and a result with the outputs of the first frame, all events, and the times of the last
        artifact's frames and devices.

    Raises:
        DicompilerError: The directory is not a valid artifact, or the inputs do not fit the model.
        RunError: A device failed (the message names it), or the time was too short.
        UsageError: The artifact has states.
    """
    from dicompiler.verify.run_inputs import prepare_inputs

    check_frame_count(frames)
    options = options or RunOptions()
    on_event, recorder = options.on_event, _RunRecorder()

    def record(event: RunEvent) -> None:
        recorder.record_event(event)
        if on_event is not None:
            on_event(event)

    artifact = Path(directory)
    frame = prepare_inputs(Model.load(artifact / REFERENCE_FILE), inputs)
    options = replace(options, on_event=record, deadline=time.monotonic() + options.timeout_s)
    session: SwappableSession
    try:
        if adapt is None:
            session = SwappableSession(artifact, options, recorder.specialize, link)
        else:
            session = AdaptiveSession(artifact, options, adapt, recorder.specialize, link)
        with session:
            outputs = session.stream(itertools.repeat(frame, frames))
            first = next(outputs)
            for _ in outputs:
                pass
    except RunError as error:
        if cause := describe_unfinished_run(options, frames, recorder.finished_at):
            raise RunError(f"{cause}; then: {error}") from error
        raise
    last = session.swaps[-1].new if session.swaps else artifact
    frames_s, total_s = recorder.frames_of(last)
    events = tuple(recorder.events)
    return last, RunResult((first,), session.reports, frames_s=frames_s, total_s=total_s, events=events)
