"""A session of an artifact with one device, which runs in the process of the caller.

For a small network, exchanging a frame with another process takes as long as computing it.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import numpy as np

from dicompiler.plugin_api import DeviceReport, RunError, RunOptions, Session
from dicompiler.plugin_api.artifacts import FrameTimes, RunEvent
from dicompiler.plugin_api.utilities import check_type
from dicompiler_targets.sockets.artifact import SocketsArtifact, from_payload, state_piece, to_payload
from dicompiler_targets.sockets.cluster_state import timeout_error
from dicompiler_targets.sockets.device_connections import read_report
from dicompiler_targets.sockets.frame_reader import make_frame_reader
from dicompiler_targets.sockets.runtime.channel import EventLoop
from dicompiler_targets.sockets.runtime.device import make_checked_sessions, make_report
from dicompiler_targets.sockets.runtime.executor import FrameExecution, Mailbox, StepExecutor
from dicompiler_targets.sockets.runtime.integrity import FileIntegrity, mark_as_used
from dicompiler_targets.sockets.runtime.segments import one_line
from dicompiler_targets.sockets.session import SessionGuard, resolve_frames_in_flight


class InProcessSession(Session):
    """A session that computes frames one after another in the calling thread.

    An interrupt takes effect between two frames, and a timeout between two operators. A crash of onnxruntime ends the
    caller's process.

    Attributes:
        artifact: The artifact that the session runs.
        options: The options of the session.
        in_flight: Maximum number of frames that are read ahead.
        reports: The device's report; empty until the session was closed without an error.
        events: Always empty, because no failure plan can replace a single device.
    """

    def __init__(self, artifact: SocketsArtifact, options: RunOptions) -> None:
        """Create the device's onnxruntime sessions and check its files."""
        self.artifact, self.options = artifact, options
        self.in_flight = resolve_frames_in_flight(options, 1)
        self.reports: tuple[DeviceReport, ...] = ()
        self.events: list[RunEvent] = []
        (self._manifest,), (self._role_io,) = artifact.manifests, artifact.role_ios
        self._device: str = self._manifest["device"]
        assert options.heartbeat_s is not None
        self._mailbox, self._loop = Mailbox(), EventLoop(options.heartbeat_s)
        # The executor needs an event loop object. Its thread is not needed, because there are no connections; closing
        # the loop ends the thread.
        self._loop.close()
        self._resets_states, self._next_frame, self._outputs = False, 0, dict[str, Any]()
        self._deadline, self._wake_watchdog = math.inf, threading.Event()
        self._lock = mark_as_used(artifact.directory)
        self._guard = SessionGuard(self._stop, self._wake_watchdog.set)
        with self._guard.use(), self._device_errors_as_run_errors():
            directory = artifact.directory / self._device
            files = FileIntegrity(directory, self._manifest)
            threads = min(len(os.sched_getaffinity(0)), self._manifest["threads"])
            sessions = make_checked_sessions(files, directory, self._manifest, threads)
            files.check()
            self._executor = StepExecutor(
                self._manifest, sessions, self._mailbox, self._loop, self._store_output, can_stop=True
            )
        threading.Thread(target=self._watch_deadline, daemon=True).start()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.artifact.directory} on {self._device}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._guard.end("an error left its context")

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        checked = self.artifact.check_inputs(inputs)
        with self._guard.use():
            return self._run_frame(checked)

    def reset(self) -> None:
        with self._guard.use():
            self._resets_states = True

    def stream(self, frames: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        check_type(frames, (Iterable,), "stream: frames", "an iterable of inputs by name")
        has_changed = threading.Event()
        reader = make_frame_reader(frames, self.in_flight, has_changed.set, self.artifact.copy_inputs)
        try:
            while True:
                # A forked child has no thread that reads frames, so it would wait forever.
                self._guard.check_process()
                while not reader.has_frame_or_end():
                    has_changed.wait()
                    has_changed.clear()
                with self._guard.use():
                    inputs = reader.take() if reader.has_frame else None
                    outputs = None if inputs is None else self._run_frame(inputs)
                if outputs is None:
                    if reader.error is not None:
                        raise reader.error
                    return
                yield outputs
                reader.release()
        finally:
            reader.close()

    def close(self) -> None:
        """End the session and store the device's report in `reports`."""
        with self._guard.use_exclusively():
            if self._guard.reason is None:
                self.reports = (read_report(self._device, make_report(self._executor)),)
                self._guard.end("it was closed")

    def _stop(self) -> None:
        self._wake_watchdog.set()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _watch_deadline(self) -> None:
        """Stop the executor when a frame misses its deadline or the session ends; runs in its own thread."""
        while self._guard.reason is None and (seconds := self._deadline - time.monotonic()) > 0:
            self._wake_watchdog.wait(min(seconds, self.options.timeout_s))
            self._wake_watchdog.clear()
        self._executor.stop_before(sys.maxsize)

    @contextlib.contextmanager
    def _device_errors_as_run_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise RunError(f"device {self._device!r}: {one_line(error)}") from error

    def _run_frame(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        number, self._next_frame = self._next_frame, self._next_frame + 1
        if not self._executor.runs_on_arrays:
            self._deliver(number, inputs)
        self._deadline, start = self.options.deadline_from_now(), time.perf_counter()
        with self._device_errors_as_run_errors():
            computed = self._compute(number, inputs)
        self._deadline = math.inf
        if computed is None:
            self._guard.check_end()
            raise timeout_error(f"device {self._device!r}", self.options)
        outputs, compute_s = computed
        if self.options.on_frame is not None:
            self.options.on_frame(FrameTimes(time.perf_counter() - start, {self._device: compute_s}))
        return self.artifact.merge_outputs({self._device: outputs})

    def _deliver(self, number: int, inputs: Mapping[str, Any]) -> None:
        """Put the inputs and states of a frame into the mailbox, as messages from a coordinator would."""
        states = self._role_io.states[self._device]
        sets_states = any(state["name"] in inputs for state in self.artifact.states)
        if states and (sets_states or self._resets_states):
            self._mailbox.put(("reset states", number), sets_states)
        self._resets_states = False
        for value in self._role_io.inputs[self._device]:
            self._mailbox.put((number, value["name"]), to_payload(inputs[value["name"]], value))
        for state in states if sets_states else ():
            payload = to_payload(state_piece(inputs[state["state"]], state), state)
            self._mailbox.put((number, state["name"]), payload)

    def _compute(self, number: int, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], float] | None:
        """Return the outputs of a frame and the seconds of its segments; None if the frame was stopped."""
        if self._executor.runs_on_arrays:
            return self._executor.run_on_arrays(number, inputs)
        finished = list[FrameExecution]()
        self._executor.begin_frame(number, time.perf_counter(), math.inf)
        self._executor.advance(finished.append)
        return (self._outputs, finished[0].compute_s) if finished else None

    def _store_output(self, value: Mapping[str, Any], _frame: int, payload: Any, _keep: Any) -> None:
        """Store a copy of an output, because onnxruntime will reuse the memory of `payload`."""
        self._outputs[value["name"]] = from_payload(np.array(payload, np.uint8), value)
