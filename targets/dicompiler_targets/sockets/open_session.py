"""What `dicompiler.connect` calls for artifacts of this target: opens a session. Needs numpy and nothing of ONNX."""

from __future__ import annotations

from pathlib import Path

from dicompiler.plugin_api import RunOptions
from dicompiler_targets.sockets.artifact import SocketsArtifact
from dicompiler_targets.sockets.daemon_client import ResidentCluster
from dicompiler_targets.sockets.guarded import FailOnceSession
from dicompiler_targets.sockets.session import ClusterSession, check_device_options


def open_session(directory: Path, options: RunOptions) -> FailOnceSession:
    """Starts the artifact's devices, on other hosts after what they lack was copied there, or joins those that are kept
    running; one that has no other to talk with is played here: see dicompiler.connect."""
    artifact = SocketsArtifact.load(directory)
    check_device_options(options, artifact)
    if ResidentCluster.load(directory) is not None:
        from dicompiler_targets.sockets.daemon_control import make_connector

        if (calls := make_connector(artifact, options)) is not None:
            return ClusterSession(artifact, calls.options, calls)
    if options.hosts is not None:
        from dicompiler_targets.sockets.deploy import RemoteStarter, install

        install(directory, options)
        remote = RemoteStarter(artifact, options)
        return ClusterSession(artifact, remote.options, remote)
    apart = (
        options.keys
        or options.listen
        or options.start_manually
        or options.start_without
        or options.pin
        or options.emulation
    )
    if len(artifact.devices) == 1 and not apart:
        from dicompiler_targets.sockets.in_process_session import (
            InProcessSession,  # and with it onnxruntime, which clients do without
        )

        return InProcessSession(artifact, options)
    return ClusterSession(artifact, options)
