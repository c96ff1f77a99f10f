"""What `dicompiler.connect` calls for artifacts of this target: opens a session. Needs numpy and nothing of ONNX."""

from __future__ import annotations

from pathlib import Path

from dicompiler.plugin_api import RunOptions
from dicompiler_targets.sockets.artifact import Artifact
from dicompiler_targets.sockets.guarded import Guarded
from dicompiler_targets.sockets.kept import Kept
from dicompiler_targets.sockets.session import Session, check_elsewhere


def connect(directory: Path, options: RunOptions) -> Guarded:
    """Starts the artifact's devices, on other hosts after what they lack was copied there, or joins those that are kept
    running; one that has no other to talk with is played here: see dicompiler.connect."""
    artifact = Artifact.load(directory)
    check_elsewhere(options, artifact)
    if Kept.load(directory) is not None:
        from dicompiler_targets.sockets.keeping import joined

        if (calls := joined(artifact, options)) is not None:
            return Session(artifact, calls.options, calls)
    if options.hosts is not None:
        from dicompiler_targets.sockets.deploy import Remote, install

        install(directory, options)
        remote = Remote(artifact, options)
        return Session(artifact, remote.options, remote)
    apart = options.keys or options.listen or options.elsewhere or options.without or options.pin or options.emulation
    if len(artifact.devices) == 1 and not apart:
        from dicompiler_targets.sockets.alone import Alone  # and with it onnxruntime, which clients do without

        return Alone(artifact, options)
    return Session(artifact, options)
