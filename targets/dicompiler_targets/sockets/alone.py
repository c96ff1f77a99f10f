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

from dicompiler.plugin_api import DeviceReport, RunError, RunEvent, RunOptions, expect
from dicompiler_targets.sockets.artifact import Artifact, from_payload, piece, to_payload
from dicompiler_targets.sockets.feed import Feed
from dicompiler_targets.sockets.guarded import Guarded, overdue
from dicompiler_targets.sockets.processes import read_report
from dicompiler_targets.sockets.runtime.device import checked_sessions, reported
from dicompiler_targets.sockets.runtime.files import Files
from dicompiler_targets.sockets.runtime.lines import Lines
from dicompiler_targets.sockets.runtime.mailbox import Mailbox
from dicompiler_targets.sockets.runtime.play import Player
from dicompiler_targets.sockets.runtime.values import one_line
from dicompiler_targets.sockets.session import in_flight


class Alone(Guarded):
    """Frames are computed one after another in the thread that asks for them, as those of onnxruntime itself: an
    interrupt is heard between two of them, a frame's time ends between two operators, that of the start is not limited,
    and a crash of the engine is one of this process. Errors as of Session."""

    def __init__(self, artifact: Artifact, options: RunOptions) -> None:
        self.artifact, self.options = artifact, options
        self.in_flight = in_flight(options, 1)
        self.reports: tuple[DeviceReport, ...] = ()
        self.events: list[RunEvent] = []
        (self._manifest,), (self._role,) = artifact.manifests, artifact.roles
        self._device: str = self._manifest["device"]
        self._mailbox, self._lines = Mailbox(), Lines(options.heartbeat_s)
        self._lines.end()  # there is nothing to move
        self._anew, self._number, self._outputs = False, 0, dict[str, Any]()
        self._due, self._ring = math.inf, threading.Event()
        with self._guarded(), self._told():
            directory = artifact.directory / self._device
            files = Files(directory, self._manifest)
            threads = min(len(os.sched_getaffinity(0)), self._manifest["threads"])
            sessions = checked_sessions(files, directory, self._manifest, threads)
            files.check()
            self._player = Player(self._manifest, sessions, self._mailbox, self._lines, self._take, halts=True)
        threading.Thread(target=self._watch, daemon=True).start()

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """As of Session."""
        given = self.artifact.arrays(inputs)
        with self._guarded():
            return self._play(given)

    def reset(self) -> None:
        """As of Session."""
        self._anew = True

    def stream(self, frames: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """As of Session: a thread reads the next frames while one is computed."""
        expect(frames, (Iterable,), "stream: frames", "an iterable of inputs by name")
        came = threading.Event()
        feed = Feed(frames, self.in_flight, came.set, self.artifact.copies)
        try:
            while True:
                while not feed.tells():
                    came.wait()
                    came.clear()
                with self._guarded():
                    inputs = feed.take() if feed.given else None
                    outputs = None if inputs is None else self._play(inputs)
                if outputs is None:
                    if feed.error is not None:
                        raise feed.error
                    return
                yield outputs
                feed.release()
        finally:
            feed.stop()

    def close(self) -> None:
        """As of Session."""
        if self._ended is None:
            self.reports = (read_report(self._device, reported(self._player)),)
            self._end("it was closed")

    def _stop(self) -> None:
        self._ring.set()

    def _watch(self) -> None:
        """Ends a frame that takes too long. None begins that is due before the end of a sleep."""
        while self._ended is None:
            if (seconds := self._due - time.monotonic()) <= 0:
                self._player.halt(sys.maxsize)
                return
            self._ring.wait(min(seconds, self.options.timeout_s))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Whatever the runtime raises, in the words that a device's process would send."""
        try:
            yield
        except Exception as error:
            raise RunError(f"device {self._device!r}: {one_line(error)}") from error

    def _play(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A frame's outputs by name."""
        number, states = self._number, self._role.states[self._device]
        self._number += 1
        begins = any(state["name"] in given for state in self.artifact.states)
        if states and (begins or self._anew):
            self._mailbox.put(("anew", number), begins)
        self._anew = False
        for value in self._role.inputs[self._device]:
            self._mailbox.put((number, value["name"]), to_payload(given[value["name"]], value))
        for state in states if begins else ():
            self._mailbox.put((number, state["name"]), to_payload(piece(given[state["state"]], state), state))
        self._due = time.monotonic() + self.options.timeout_s
        with self._told():
            self._player.begin(number, time.perf_counter(), math.inf)
            self._player.advance(lambda _: None)
        self._due = math.inf
        if self._player.frames:
            raise overdue(f"device {self._device!r}", self.options)
        return self.artifact.first({self._device: self._outputs})

    def _take(self, value: Mapping[str, Any], _frame: int, payload: Any, _keep: Any) -> None:
        """An output, whose memory the engine uses again."""
        self._outputs[value["name"]] = from_payload(np.array(payload, np.uint8), value)
