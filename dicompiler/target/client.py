"""Sessions: use a compiled network from your own program.

    with dicompiler.connect("build") as session:
        outputs = session.infer({"input": image})
        for outputs in session.stream(images):
            ...
        async for outputs in session.astream(camera):
            ...

Inputs and outputs are arrays by name. The client needs numpy and neither onnx nor onnxruntime, because the devices are
processes of their own. If the artifact has a single device on this host, that device runs inside the client's process,
which then needs onnxruntime.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from dicompiler.base.errors import DicompilerError, check_type, did_you_mean
from dicompiler.target.integrity import check_files, load_artifact
from dicompiler.target.run_records import DeviceReport, RunOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.target.remote.hosts import Hosts

CLIENT_ENTRY_POINT_GROUP = "dicompiler.clients"
"""Entry points of targets that support sessions: the target's name = "module:function". The function takes a directory
(Path) and RunOptions, and returns a Session."""
BUILTIN_CLIENTS = {"sockets": "dicompiler_targets.sockets.open_session:open_session"}
"""The built-in entry points, as in pyproject.toml, for a checkout that is not installed."""


class Session(Protocol):
    """A running set of devices that waits for frames. Use it from one thread at a time, and close it.

    Any failure raises RunError, which names the device and the cause, and ends all devices.

    Attributes:
        reports: Measurements of each device. They are available once the session has been closed without an error.
    """

    reports: tuple[DeviceReport, ...]

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Compute one frame.

        Args:
            inputs: Inputs of the network by name.

        Returns:
            Outputs of the network by name.

        Raises:
            DicompilerError: An input is missing or has the wrong type or shape.
            RunError: A device has failed.
        """

    def stream(self, frames: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, NDArray[Any]]]:
        """Compute several frames at once, so that all devices work at the same time.

        Up to `RunOptions.in_flight` frames are in flight, including those whose outputs have not been taken yet. If
        reading a frame raises an error, or a frame has wrong inputs, the error is raised after the outputs of the
        frames before it, and the session stays usable.

        Args:
            frames: Inputs of each frame by name. They are read in a thread of their own.

        Returns:
            An iterator over the outputs of each frame, in the order of `frames`.

        Raises:
            RunError: A device has failed.
        """

    def reset(self) -> None:
        """Reset all states to zeros, or to those that the next frame gives, before the next frame."""

    async def astream(
        self, frames: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]
    ) -> AsyncIterator[dict[str, NDArray[Any]]]:
        """Compute several frames at once, for `async for`.

        If you leave the loop early, it waits for the frame in flight.

        Args:
            frames: Inputs of each frame by name. An asynchronous iterator is awaited in the caller's event loop.

        Yields:
            The outputs of each frame by name.

        Raises:
            RunError: A device has failed.
        """
        from dicompiler.target.async_stream import stream_async

        async for outputs in stream_async(self.stream, frames):
            yield outputs

    def close(self) -> None:
        """Finish the frames in flight and end the devices."""

    def __enter__(self) -> Session: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def connect(
    directory: str | Path,
    options: RunOptions | None = None,
    timeout: float | None = None,
    *,
    hosts: str | Path | Hosts | None = None,
    keys: str | Path | None = None,
) -> Session:
    """Start the devices of an artifact, or join its resident devices, and wait until they are ready.

    Resident devices are those that `dicompiler deploy --resident` has left running.

    Args:
        directory: The artifact's directory.
        options: Options of the run. Default: three frames in flight for each device.
        timeout: Seconds allowed for the start, and for each frame. Default: `options.timeout_s`.
        hosts: A hosts.toml. The devices run on these hosts; missing files of the artifact and keys are copied first.
            Default: `options.hosts`.
        keys: Directory made by `dicompiler keys`. Default: `options.keys`.

    Returns:
        The session. Use it as a context manager, or close it.

    Raises:
        DicompilerError: The directory is not a valid artifact, or its target does not support sessions.
        RunError: A device cannot be started.
        UsageError: An argument has the wrong type.
    """
    from dicompiler.target.remote.hosts import Hosts

    check_type(directory, (str, Path), "connect: directory", "a path")
    check_type(options, (RunOptions, NoneType), "connect: options", "RunOptions")
    check_type(timeout, (int, float, NoneType), "connect: timeout", "seconds")
    check_type(hosts, (str, Path, Hosts, NoneType), "connect: hosts", "the path of a hosts.toml")
    check_type(keys, (str, Path, NoneType), "connect: keys", "a path")
    path = Path(directory)
    run_options = (options or RunOptions(in_flight=0)).with_timeout(timeout)
    open_session = _find_client(path)
    if hosts is not None:
        run_options = replace(run_options, hosts=hosts if isinstance(hosts, Hosts) else Hosts.load(hosts))
    return open_session(path, run_options if keys is None else replace(run_options, keys=Path(keys)))


def _find_client(path: Path) -> Callable[[Path, RunOptions], Session]:
    """Return the function that opens a session for the artifact's target."""
    document = load_artifact(path)
    name = str(document.get("target"))
    known = BUILTIN_CLIENTS | {
        point.name: point.value for point in metadata.entry_points(group=CLIENT_ENTRY_POINT_GROUP)
    }
    if name not in known:
        raise DicompilerError(
            f"{path}: artifacts of target {name!r} do not support sessions{did_you_mean(name, known)}"
        )
    if name not in BUILTIN_CLIENTS:  # the built-in clients check the files themselves
        check_files(path, document["files"], document["files"])
    module, _, function = known[name].partition(":")
    open_session: Callable[[Path, RunOptions], Session] = getattr(importlib.import_module(module), function)
    return open_session
