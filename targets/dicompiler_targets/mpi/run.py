"""Runs an artifact on this host: builds its program and starts all ranks with mpirun.

In: an artifact's directory, frames. Out: outputs, times, and what each rank reported.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dicompiler.plugin_api import RunOptions, RunResult
from dicompiler.plugin_api.artifacts import Emulation
from dicompiler_targets.mpi import build, failover, mpirun
from dicompiler_targets.mpi import toolchain as tools
from dicompiler_targets.mpi.artifact import (
    DeliveredFrames,
    MpiArtifact,
    read_finished_outputs,
    read_outputs,
    write_inputs,
)


def run_here(directory: Path, frames: Sequence[Mapping[str, NDArray[Any]]], options: RunOptions) -> RunResult:
    """Runs the artifact for `frames`: see Target.run. The time of building does not count."""
    artifact = MpiArtifact.load(directory)
    mpirun.check_options(artifact, options)  # before anything is built
    toolchain = tools.find_toolchain()
    program = build.build_program(next(iter(artifact.packages.values())), toolchain)
    line = [str(toolchain.mpirun), "--oversubscribe", "--bind-to", "none"]
    return failover.run_with_failover(artifact, frames, options, partial(_run_once, artifact, line, program))


def _run_once(
    artifact: MpiArtifact,
    line: Sequence[str],
    program: Path,
    frames: failover.Frames,
    options: RunOptions,
    _: Collection[str],
    roles: tuple[int, int],
) -> tuple[Mapping[str, Any], DeliveredFrames]:
    """See restart.Call: the rank of a device that is away is there, and has nothing to do."""
    count, keep = len(artifact.devices), mpirun.count_kept_frames(len(frames), options)
    share = max(1, len(os.sched_getaffinity(0)) // count) if options.emulation is None else 1
    words = mpirun.make_arguments(artifact, len(frames), options, roles)
    words += ["--threads", str(share), *["--pin"] * options.pin]
    with tempfile.TemporaryDirectory(prefix="dicompiler-mpi-") as temporary:
        scratch = Path(temporary)
        (scratch / "data").mkdir()
        for device, package in artifact.packages.items():
            (scratch / "data" / device).symlink_to(package / device)
        write_inputs(scratch / "inputs", frames)
        places, more = ["--data", "data", "--inputs", "inputs", "--outputs", "outputs"], dict[str, str]()
        if options.emulation is None:
            rest = ["-n", str(count), str(program), *places, *words]
        else:
            rest = make_emulation_arguments(artifact, options.emulation, scratch, [str(program), *places, *words])
            more = write_launch_agent(artifact, options.emulation, scratch)
        try:
            report = mpirun.run_mpirun(artifact, [*line, *rest], scratch, options.timeout_s, more)
        except mpirun.RankFailure as lost:
            done = read_finished_outputs(artifact, scratch / "outputs", keep, roles[0])
            raise failover.UnfinishedRun(lost, done) from None
        return report, read_outputs(artifact, scratch / "outputs", keep)


def make_emulation_arguments(
    artifact: MpiArtifact, emulation: Emulation, scratch: Path, words: Sequence[str]
) -> list[str]:
    """What mpirun is told to start a rank on each emulated board, whose calls take as long as there."""
    net = str(ip_network(f"{next(iter(emulation.addresses.values()))}/16", strict=False))
    line = ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", net, "--mca", "oob_tcp_if_include", net]
    for device, package in artifact.packages.items():
        line += [":"] if device != artifact.devices[0] else []
        line += ["-n", "1", "--host", package.name, "--wdir", str(scratch), *words]
        line += ["--least", ",".join(map(repr, emulation.min_segments_s[device]))]
    return line


def write_launch_agent(artifact: MpiArtifact, emulation: Emulation, scratch: Path) -> dict[str, str]:
    """A script that mpirun calls in place of ssh, as its environment: it enters a board's network, under the board's
    name, or Open MPI would take all of them for this host."""
    cases = []
    for device, package in artifact.packages.items():
        name = shlex.quote(package.name)
        enter = f"nsenter --net=/run/netns/{emulation.namespaces[device]} unshare --uts"
        cases.append(f'{name}) exec {enter} sh -c "hostname {name}; $*" ;;')
    body = "\n".join(dict.fromkeys(cases))
    script = scratch / "agent"
    script.write_text(f"#!/bin/sh\nname=$1; shift\ncase $name in\n{body}\nesac\nexit 1\n", encoding="utf-8")
    script.chmod(0o700)
    return {name: str(script) for name in ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent")}
