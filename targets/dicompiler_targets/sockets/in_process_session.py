"""A session of an artifact with one device, played in the process of who asks: there is nobody to exchange with, and to
give a frame to another process and take back what it made costs as much as a small network's computing.

In: an artifact of one device, frames. Out: outputs, and the report that a device's process gives.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from dicompiler.plugin_api import DeviceReport, RunError, RunOptions
from dicompiler.plugin_api.artifacts import RunEvent
from dicompiler.plugin_api.utilities import check_type
from dicompiler_targets.sockets.artifact import SocketsArtifact, from_payload, state_piece, to_payload
from dicompiler_targets.sockets.device_process import read_report
from dicompiler_targets.sockets.frame_reader import FrameReader
from dicompiler_targets.sockets.guarded import FailOnceSession, timeout_error
from dicompiler_targets.sockets.runtime.device import make_checked_sessions, make_report
from dicompiler_targets.sockets.runtime.event_loop import EventLoop
from dicompiler_targets.sockets.runtime.executor import StepExecutor
from dicompiler_targets.sockets.runtime.integrity import FileIntegrity
from dicompiler_targets.sockets.runtime.mailbox import Mailbox
from dicompiler_targets.sockets.runtime.values import one_line
from dicompiler_targets.sockets.session import check_frames_in_flight


class InProcessSession(FailOnceSession):
    """Frames are computed one after another in the thread that asks for them, as those of onnxruntime itself: an
    interrupt is heard between two of them, a frame's time ends between two operators, that of the start is not limited,
    and a crash of the engine is one of this process. Errors as of Session."""

    def __init__(self, artifact: SocketsArtifact, options: RunOptions) -> None:
        self.artifact, self.options = artifact, options
        self.in_flight = check_frames_in_flight(options, 1)
        self.reports: tuple[DeviceReport, ...] = ()
        self.events: list[RunEvent] = []
        (self._manifest,), (self._role,) = artifact.manifests, artifact.roles
        self._device: str = self._manifest["device"]
        self._mailbox, self._loop = Mailbox(), EventLoop(options.heartbeat_s)
        self._loop.close()  # there is nothing to move
        self._resets_states, self._next_frame, self._outputs = False, 0, dict[str, Any]()
        self._deadline, self._wake_watchdog = math.inf, threading.Event()
        with self._ends_on_error(), self._device_errors_as_run_errors():
            directory = artifact.directory / self._device
            files = FileIntegrity(directory, self._manifest)
            threads = min(len(os.sched_getaffinity(0)), self._manifest["threads"])
            sessions = make_checked_sessions(files, directory, self._manifest, threads)
            files.check()
            self._executor = StepExecutor(
                self._manifest, sessions, self._mailbox, self._loop, self._store_output, halts=True
            )
        threading.Thread(target=self._watch_deadline, daemon=True).start()

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """As of Session."""
        given = self.artifact.check_inputs(inputs)
        with self._ends_on_error():
            return self._run_frame(given)

    def reset(self) -> None:
        """As of Session."""
        self._resets_states = True

    def stream(self, frames: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """As of Session: a thread reads the next frames while one is computed."""
        check_type(frames, (Iterable,), "stream: frames", "an iterable of inputs by name")
        came = threading.Event()
        feed = FrameReader(frames, self.in_flight, came.set, self.artifact.copy_inputs)
        try:
            while True:
                while not feed.has_frame_or_end():
                    came.wait()
                    came.clear()
                with self._ends_on_error():
                    inputs = feed.take() if feed.queue else None
                    outputs = None if inputs is None else self._run_frame(inputs)
                if outputs is None:
                    if feed.error is not None:
                        raise feed.error
                    return
                yield outputs
                feed.release()
        finally:
            feed.close()

    def close(self) -> None:
        """As of Session."""
        if self._end_reason is None:
            self.reports = (read_report(self._device, make_report(self._executor)),)
            self._end("it was closed")

    def _stop(self) -> None:
        self._wake_watchdog.set()

    def _watch_deadline(self) -> None:
        """Ends a frame that takes too long. None begins that is due before the end of a sleep."""
        while self._end_reason is None:
            if (seconds := self._deadline - time.monotonic()) <= 0:
                self._executor.stop_before(sys.maxsize)
                return
            self._wake_watchdog.wait(min(seconds, self.options.timeout_s))

    @contextlib.contextmanager
    def _device_errors_as_run_errors(self) -> Iterator[None]:
        """Whatever the runtime raises, in the words that a device's process would send."""
        try:
            yield
        except Exception as error:
            raise RunError(f"device {self._device!r}: {one_line(error)}") from error

    def _run_frame(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A frame's outputs by name."""
        number, states = self._next_frame, self._role.states[self._device]
        self._next_frame += 1
        begins = any(state["name"] in given for state in self.artifact.states)
        if states and (begins or self._resets_states):
            self._mailbox.put(("anew", number), begins)
        self._resets_states = False
        for value in self._role.inputs[self._device]:
            self._mailbox.put((number, value["name"]), to_payload(given[value["name"]], value))
        for state in states if begins else ():
            self._mailbox.put((number, state["name"]), to_payload(state_piece(given[state["state"]], state), state))
        self._deadline = time.monotonic() + self.options.timeout_s
        with self._device_errors_as_run_errors():
            self._executor.begin_frame(number, time.perf_counter(), math.inf)
            self._executor.advance(lambda _: None)
        self._deadline = math.inf
        if self._executor.frames:
            raise timeout_error(f"device {self._device!r}", self.options)
        return self.artifact.first_outputs({self._device: self._outputs})

    def _store_output(self, value: Mapping[str, Any], _frame: int, payload: Any, _keep: Any) -> None:
        """An output, whose memory the engine uses again."""
        self._outputs[value["name"]] = from_payload(np.array(payload, np.uint8), value)
