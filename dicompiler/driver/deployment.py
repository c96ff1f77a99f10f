"""Runs of artifacts on boards over ssh: the function behind `dicompiler deploy`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dicompiler.base.errors import UsageError
from dicompiler.driver.artifact import install, open_service, run, verify_run
from dicompiler.target.remote.hosts import Hosts
from dicompiler.target.run_records import InstalledDevice, RunOptions, RunResult
from dicompiler.verify.comparison import Verification

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Deployment:
    """The result of `deploy`, which copies an artifact to boards and runs it there.

    Attributes:
        installed: For each device, its host and directory, and the copied bytes.
        resident: Names of the devices that keep running for later runs.
        result: Outputs and measurements of the run; None if nothing was run.
        verification: Comparison of the outputs with onnxruntime; without any check if `verify` was False.
    """

    installed: tuple[InstalledDevice, ...]
    resident: tuple[str, ...]
    result: RunResult | None
    verification: Verification


def deploy(
    directory: str | Path,
    hosts: str | Path | Hosts,
    *,
    keys: str | Path | None = None,
    inputs: Mapping[str, NDArray[Any]] | None = None,
    frames: int = 1,
    copy_only: bool = False,
    resident: bool = False,
    verify: bool = False,
    options: RunOptions | None = None,
) -> Deployment:
    """Copy an artifact to the boards of a cluster over ssh, and run it there.

    Only missing and changed files are copied. To give each frame other inputs, use `connect` with `hosts` instead.

    Args:
        directory: The artifact.
        hosts: A hosts.toml, or its parsed content.
        keys: Directory made by `dicompiler keys`. Default: `options.keys`.
        inputs: Arrays by the names of the graph inputs. Default: seeded random arrays.
        frames: Number of frames, which all get these inputs.
        copy_only: True to copy and check the files, but run nothing.
        resident: True to keep the devices running for later runs.
        verify: True to compare the outputs with onnxruntime.
        options: Options of the run. Default: `RunOptions()`.

    Returns:
        The copied files, the run and its verification.

    Raises:
        RunError: A host cannot be used, or a device has failed. The message names the device and its host.
        UsageError: `copy_only` is combined with `resident` or `verify`.
    """
    if copy_only and (resident or verify):
        raise UsageError("deploy: with copy_only nothing is run: omit resident and verify")
    options = replace(options or RunOptions(), hosts=hosts if isinstance(hosts, Hosts) else Hosts.load(hosts))
    # With `copy_only`, no tensors are sent, so encryption keys are not required.
    options = replace(
        options, keys=options.keys if keys is None else Path(keys), insecure=options.insecure or copy_only
    )
    installed = install(directory, options)
    running = tuple(open_service(directory, options).start()) if resident else ()
    if copy_only:
        return Deployment(installed, running, None, Verification(()))
    result = run(directory, inputs, frames, options=options)
    return Deployment(installed, running, result, verify_run(directory, result, inputs) if verify else Verification(()))
