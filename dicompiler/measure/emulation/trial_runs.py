"""Runs of the plans that `measure.tune` tries: on emulated boards, or on the boards of a cluster."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.driver.artifact import install, open_service, run
from dicompiler.driver.run_log import run_document
from dicompiler.ir.platform import Platform
from dicompiler.measure.emulation.emulate import emulate
from dicompiler.measure.tune import Runner
from dicompiler.target.manifest import load_artifact
from dicompiler.target.run_records import RunOptions

log = logging.getLogger("dicompiler")


def make_emulated_runner(truth: Platform, frames: int, options: RunOptions) -> Runner:
    """Return a function that runs artifacts on emulated boards, which needs root.

    Args:
        truth: The emulated platform. Its rates and links may differ from those of the artifact's platform.
        frames: Number of frames of each run.
        options: Options of the runs.
    """

    def run_emulated(artifact: Path, log: Path) -> Mapping[str, Any]:
        found = emulate(artifact, truth, frames=frames, options=replace(options, kept_frames=0))
        # The log does not name the emulated platform `truth`, because `calibrate` would then reject the log.
        document = run_document(artifact, found.result, options, log, found.expected.document(), runtime=found.runtime)
        return document | {"location": "emulated"}

    return run_emulated


@contextmanager
def open_cluster_runner(frames: int, options: RunOptions) -> Iterator[Runner]:
    """Open a context with a function that copies artifacts to the boards of a cluster and runs them there.

    The devices keep running between the artifacts, of which the directories must have the same name.

    Args:
        frames: Number of frames of each run.
        options: Options of the runs, with the hosts and keys.
    """
    devices = _KeptDevices(options)

    def run_on_cluster(artifact: Path, log: Path) -> Mapping[str, Any]:
        with devices.prepare_devices(artifact):
            result = run(artifact, None, frames, options=replace(options, kept_frames=0))
        return run_document(artifact, result, options, log)

    try:
        yield run_on_cluster
    finally:
        devices.stop()


class _KeptDevices:
    """Devices that keep running from one artifact to the next, so that only the new artifact must be loaded."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._artifacts: list[Path] = []

    @contextmanager
    def prepare_devices(self, artifact: Path) -> Iterator[None]:
        """Copy an artifact and let the devices load it. An error in the `with` block stops the devices."""
        try:
            service = open_service(artifact, self._options)
        except UsageError:  # The target does not support resident devices, so each run starts its own devices.
            install(artifact, self._options)
            yield
            return
        try:
            if not self._artifacts:
                service.stop()  # An earlier tuning that was interrupted may have left devices running.
            elif self._artifacts[-1] != artifact:
                open_service(self._artifacts[-1], self._options).hand_over(artifact)
            self._artifacts.append(artifact)
            install(artifact, self._options)
            service.start()
            yield
        except DicompilerError:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop all devices, including those that only an earlier artifact uses."""
        stopped = set[str]()
        for artifact in reversed(self._artifacts):
            devices = load_artifact(artifact)["devices"]
            if stopped.issuperset(devices):
                continue
            try:
                open_service(artifact, self._options).stop()
            except DicompilerError as error:
                log.warning("tune: %s", error)
            stopped.update(devices)
        self._artifacts = []
