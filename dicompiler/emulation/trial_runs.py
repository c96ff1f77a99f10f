"""Runs of the plans that `measure.tune` tries: on emulated boards, or on the boards of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dicompiler.driver.artifact import install, run
from dicompiler.driver.run_log import run_document
from dicompiler.emulation.emulate import emulate
from dicompiler.ir.platform import Platform
from dicompiler.measure.tune import Runner
from dicompiler.target.run_records import RunOptions


def make_emulated_runner(truth: Platform, frames: int, options: RunOptions) -> Runner:
    """Return a function that runs artifacts on emulated boards.

    Runs need root, because they create network namespaces with rate-limited links.

    Args:
        truth: The emulated platform. Its rates and links may differ from those of the artifact's platform.
        frames: Number of frames of each run.
        options: Options of the runs.
    """

    def run_emulated(artifact: Path, log: Path) -> Mapping[str, Any]:
        found = emulate(artifact, truth, frames=frames, options=replace(options, kept_frames=0))
        # The log omits the emulated platform. `calibrate` corrects the artifact's platform by this run, and would
        # reject a log that names another platform.
        document = run_document(artifact, found.result, options, log, found.expected.document(), runtime=found.runtime)
        return document | {"location": "emulated"}

    return run_emulated


def make_cluster_runner(frames: int, options: RunOptions) -> Runner:
    """Return a function that copies artifacts to the boards of a cluster and runs them there.

    Args:
        frames: Number of frames of each run.
        options: Options of the runs, with the hosts and keys.
    """

    def run_on_cluster(artifact: Path, log: Path) -> Mapping[str, Any]:
        install(artifact, options)
        result = run(artifact, None, frames, options=replace(options, kept_frames=0))
        return run_document(artifact, result, options, log)

    return run_on_cluster
