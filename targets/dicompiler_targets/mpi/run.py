"""Runs an artifact on this host: builds its program and starts all ranks with mpirun."""

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
from dicompiler_targets.mpi import failover, mpirun
from dicompiler_targets.mpi.artifact import (
    DeliveredFrames,
    MpiArtifact,
    read_finished_outputs,
    read_outputs,
    write_inputs,
)
from dicompiler_targets.mpi.build import build_program
from dicompiler_targets.mpi.toolchain import find_toolchain


def run_here(directory: Path, frames: Sequence[Mapping[str, NDArray[Any]]], options: RunOptions) -> RunResult:
    """Run an artifact; see `Target.run`. The time of building the program does not count."""
    artifact = MpiArtifact.load(directory)
    mpirun.check_options(artifact, options)  # before the program is built
    toolchain = find_toolchain()
    program = build_program(next(iter(artifact.packages.values())), toolchain)
    command = [str(toolchain.mpirun), "--oversubscribe", "--bind-to", "none"]
    return failover.run_with_failover(artifact, frames, options, partial(_run_once, artifact, command, program))


def _run_once(
    artifact: MpiArtifact,
    command: Sequence[str],
    program: Path,
    frames: failover.Frames,
    options: RunOptions,
    _: Collection[str],
    roles: tuple[int, int],
) -> tuple[Mapping[str, Any], DeliveredFrames]:
    """Run mpirun once; see `failover.RunOnce`. The rank of a device that is down is started, but has no steps."""
    ranks, kept_frames = len(artifact.devices), mpirun.count_kept_frames(len(frames), options)
    threads = max(1, len(os.sched_getaffinity(0)) // ranks) if options.emulation is None else 1
    arguments = mpirun.make_arguments(artifact, len(frames), options, roles)
    arguments += ["--threads", str(threads), *["--pin"] * options.pin]
    with tempfile.TemporaryDirectory(prefix="dicompiler-mpi-") as temporary:
        scratch = Path(temporary)
        (scratch / "data").mkdir()
        for device, package in artifact.packages.items():
            (scratch / "data" / device).symlink_to(package / device)
        write_inputs(scratch / "inputs", frames)
        program_command = [
            str(program), "--data", "data", "--inputs", "inputs", "--outputs", "outputs", *arguments
        ]  # fmt: skip
        environment = dict[str, str]()
        if options.emulation is None:
            rank_commands = ["-n", str(ranks), *program_command]
        else:
            rank_commands = make_emulation_arguments(artifact, options.emulation, scratch, program_command)
            environment = write_launch_agent(artifact, options.emulation, scratch)
        try:
            report = mpirun.run_mpirun(artifact, [*command, *rank_commands], scratch, options.timeout_s, environment)
        except mpirun.RankFailure as failure:
            finished = read_finished_outputs(artifact, scratch / "outputs", kept_frames, roles[0])
            raise failover.UnfinishedRun(failure, finished) from None
        return report, read_outputs(artifact, scratch / "outputs", kept_frames)


def make_emulation_arguments(
    artifact: MpiArtifact, emulation: Emulation, scratch: Path, program_command: Sequence[str]
) -> list[str]:
    """Return the arguments of mpirun that start a rank on each emulated board, with the board's segment durations."""
    subnet = str(ip_network(f"{next(iter(emulation.addresses.values()))}/16", strict=False))
    arguments = ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", subnet]
    arguments += ["--mca", "oob_tcp_if_include", subnet]
    for device, package in artifact.packages.items():
        arguments += [":"] if device != artifact.devices[0] else []
        arguments += ["-n", "1", "--host", package.name, "--wdir", str(scratch), *program_command]
        arguments += ["--min-seconds", ",".join(map(repr, emulation.min_segments_s[device]))]
    return arguments


def write_launch_agent(artifact: MpiArtifact, emulation: Emulation, scratch: Path) -> dict[str, str]:
    """Write a script that mpirun calls instead of ssh, and return the environment variables for it.

    The script enters a board's network, and sets the board's host name. Without it, Open MPI would treat all boards as
    this host.
    """
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
