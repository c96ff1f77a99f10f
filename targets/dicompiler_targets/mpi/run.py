"""Runs an artifact on this host: builds its program and starts all ranks (MPI processes) with mpirun."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dicompiler.plugin_api import RunOptions, RunResult, UsageError
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
from dicompiler_targets.mpi.fetch_ncnn import get_ncnn_directory
from dicompiler_targets.mpi.toolchain import find_toolchain


def run_here(directory: Path, frames: Sequence[Mapping[str, NDArray[Any]]], options: RunOptions) -> RunResult:
    """Build the program and run it on this host, for `Target.run`. The timeout does not include the build."""
    artifact = MpiArtifact.load(directory)
    mpirun.check_options(artifact, options)
    toolchain = find_toolchain()
    if "ncnn" in artifact.program:
        toolchain = replace(toolchain, ncnn=get_ncnn_directory(artifact.program["ncnn"]))
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
    """Run mpirun once, and return the report of rank 0 and the outputs of the frames.

    `roles` are the index of the first role and the number of roles. A role is the normal plan, a failure plan, or a
    replica of either.

    Raises:
        failover.UnfinishedRun: A rank failed.
    """
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
            rank_commands = _make_emulation_arguments(artifact, options.emulation, scratch, program_command)
            environment = mpirun.write_launch_agent(scratch, _make_launch_commands(artifact, options.emulation))
            # The emulated boards share the directories of this host, so they use the directory of this run too.
            environment["PRTE_MCA_prte_remote_tmpdir_base"] = str(scratch)
        try:
            report = mpirun.run_mpirun(artifact, [*command, *rank_commands], scratch, options.timeout_s, environment)
        except mpirun.RankFailure as failure:
            finished = read_finished_outputs(artifact, scratch / "outputs", kept_frames, roles[0])
            raise failover.UnfinishedRun(failure, finished) from None
        return report, read_outputs(artifact, scratch / "outputs", kept_frames)


def _make_emulation_arguments(
    artifact: MpiArtifact, emulation: Emulation, scratch: Path, program_command: Sequence[str]
) -> list[str]:
    """Return the arguments of mpirun that start a rank on each emulated board (a network namespace of this host).

    They contain the minimum duration of each segment (an ONNX submodel), so that a rank is as slow as its board.
    """
    if emulation.speeds:
        raise UsageError("emulate: boards of target 'mpi' cannot change their speed: compile for target sockets")
    subnet = str(ip_network(f"{next(iter(emulation.addresses.values()))}/16", strict=False))
    arguments = ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", subnet]
    arguments += ["--mca", "oob_tcp_if_include", subnet]
    for device, package in artifact.packages.items():
        arguments += [":"] if device != artifact.devices[0] else []
        arguments += ["-n", "1", "--host", package.name, "--wdir", str(scratch), *program_command]
        arguments += ["--min-seconds", ",".join(map(repr, emulation.min_segments_s[device]))]
    return arguments


def _make_launch_commands(artifact: MpiArtifact, emulation: Emulation) -> dict[str, str]:
    """Return, by host name, the shell command that starts a process in an emulated board's network namespace.

    The command also sets the board's host name, because Open MPI would otherwise treat all boards as one host.
    """
    commands = {}
    for device, package in artifact.packages.items():
        enter = f"nsenter --net=/run/netns/{emulation.namespaces[device]} unshare --uts"
        commands[package.name] = f'{enter} sh -c "hostname {shlex.quote(package.name)}; $*"'
    return commands
