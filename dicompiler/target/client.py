"""Sessions, which run a compiled network from your own program.

    with dicompiler.connect("build") as session:
        outputs = session.infer({"input": image})
        for outputs in session.stream(images):
            ...
        async for outputs in session.astream(camera):
            ...

Inputs and outputs are arrays by name. Devices run in separate processes, so your program needs numpy but neither onnx
nor onnxruntime. The exception is an artifact with a single device: on this host, that device runs inside your process,
which then needs onnxruntime.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from dicompiler.base.errors import DicompilerError, UsageError, check_type, did_you_mean
from dicompiler.target.manifest import check_files, load_artifact
from dicompiler.target.run_records import DeviceReport, RunEvent, RunOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.target.remote.hosts import Hosts

CLIENT_ENTRY_POINT_GROUP = "dicompiler.clients"
"""Group of entry points of targets that support sessions: TARGET = "module:function".

The function is called with the artifact's directory (Path) and RunOptions, and returns a Session.
"""
BUILTIN_CLIENTS = {"sockets": "dicompiler_targets.sockets.open_session:open_session"}
"""The entry points of built-in targets, which a checkout of the repository that is not installed lacks."""


class ReadyFrames(ABC):
    """Frames of which reading never waits, so that `Session.stream` can read them without a separate thread.

    Sessions that do not know this class iterate over the frames instead. The iteration may wait.
    """

    @property
    @abstractmethod
    def is_exhausted(self) -> bool:
        """True if no frames follow."""

    @property
    @abstractmethod
    def has_frame(self) -> bool:
        """True if a frame can be taken now. While it is False, frames that follow wait for frames in flight to end."""

    @abstractmethod
    def take(self) -> Mapping[str, Any] | None:
        """Remove the next frame.

        Returns:
            The inputs by name; None if another thread has just ended the frames.
        """

    @abstractmethod
    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...


class Session(Protocol):
    """Running devices of an artifact that wait for frames. `connect` creates a session.

    A session must be closed. Several threads may use it, but a forked child of the process must not. If a device fails
    and the artifact has no plan for the remaining devices, the session ends all devices and raises a RunError.

    Attributes:
        reports: Measurements of each device. The tuple is empty until the session has been closed without an error.
        events: Failures of devices, takeovers by the remaining devices, and returns of devices so far.
    """

    reports: tuple[DeviceReport, ...]
    events: list[RunEvent]

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
        """Compute a sequence of frames, several at a time, so that all devices work at the same time.

        Frames are read in advance, at most `RunOptions.in_flight` of them. If a frame cannot be read or has wrong
        inputs, the error is raised after the outputs of all earlier frames. The session stays usable after such an
        error.

        Args:
            frames: Inputs of each frame by name. A separate thread reads the frames, unless they are a list, a tuple
                or `ReadyFrames`.

        Returns:
            An iterator over the outputs of each frame, in the order of `frames`.

        Raises:
            RunError: A device has failed.
        """

    def reset(self) -> None:
        """Reset all states (tensors that one frame passes to the next) to zeros before the next frame.

        A state that is among the inputs of the next frame starts from this input instead.
        """

    async def astream(
        self, frames: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]
    ) -> AsyncIterator[dict[str, NDArray[Any]]]:
        """Compute a sequence of frames as `stream` does, for use in `async for`.

        If you leave the loop early, the frame that is being computed is finished first.

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
        """Finish the frames in flight and end the devices.

        Resident devices (processes that stay up between runs) do not end, but wait for the next session.
        """

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
    in_flight: int | None = None,
    on_event: Callable[[RunEvent], None] | None = None,
) -> Session:
    """Start the devices of an artifact and wait until they are ready.

    If the artifact has resident devices, which `dicompiler deploy --resident` has left running, the session uses those.

    Args:
        directory: The artifact's directory.
        options: Options of the run. Default: `RunOptions()`.
        timeout: Seconds allowed for the start, and for each frame. Default: `options.timeout_s`.
        hosts: A hosts.toml, or its parsed content. The devices are started on these hosts, after missing files and keys
            were copied there. Default: `options.hosts`.
        keys: Directory made by `dicompiler keys`. Default: `options.keys`.
        in_flight: Maximum number of frames in flight. Default: `options.in_flight`.
        on_event: Function that is called with each RunEvent, such as the failure or the return of a device, in the
            thread that uses the session. Default: `options.on_event`.

    Returns:
        The session. Use it as a context manager, or close it.

    Raises:
        DicompilerError: The directory is not a valid artifact, or its target does not support sessions.
        RunError: A device cannot be started.
        UsageError: An argument has the wrong type.
    """
    check_type(directory, (str, Path), "connect: directory", "a path")
    resolved = resolve_connect_options(options, timeout, hosts, keys, in_flight, on_event)
    return _find_client(Path(directory))(Path(directory), resolved)


def resolve_connect_options(
    options: RunOptions | None,
    timeout: float | None,
    hosts: str | Path | Hosts | None,
    keys: str | Path | None,
    in_flight: int | None,
    on_event: Callable[[RunEvent], None] | None,
) -> RunOptions:
    """Combine the arguments of `connect` into the options of a session.

    Each argument that is not None replaces a field of `options`.

    Raises:
        DicompilerError: The hosts file is invalid.
        UsageError: An argument has the wrong type.
    """
    from dicompiler.target.remote.hosts import Hosts

    check_type(options, (RunOptions, NoneType), "connect: options", "RunOptions")
    check_type(timeout, (int, float, NoneType), "connect: timeout", "seconds")
    check_type(hosts, (str, Path, Hosts, NoneType), "connect: hosts", "the path of a hosts.toml")
    check_type(keys, (str, Path, NoneType), "connect: keys", "a path")
    check_type(in_flight, (int, NoneType), "connect: in_flight", "a number of frames")
    if on_event is not None and not callable(on_event):
        raise UsageError(f"connect: on_event must be a function that takes a RunEvent, not {on_event!r}")
    run_options = (options or RunOptions()).with_timeout(timeout)
    if hosts is not None:
        run_options = replace(run_options, hosts=hosts if isinstance(hosts, Hosts) else Hosts.load(hosts))
    given = {"keys": None if keys is None else Path(keys), "in_flight": in_flight, "on_event": on_event}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(run_options, **changes)


def _find_client(path: Path) -> Callable[[Path, RunOptions], Session]:
    document = load_artifact(path)
    name = str(document.get("target"))
    points = metadata.entry_points(group=CLIENT_ENTRY_POINT_GROUP)
    clients = BUILTIN_CLIENTS | {point.name: point.value for point in points}
    if name not in clients:
        raise DicompilerError(
            f"{path}: target {name!r} does not support sessions{did_you_mean(name, clients)}: use dicompiler.run"
        )
    # Sessions of built-in targets check the artifact's files themselves when they load them.
    if name not in BUILTIN_CLIENTS:
        check_files(path, document["files"], document["files"])
    module, _, function = clients[name].partition(":")
    open_session: Callable[[Path, RunOptions], Session] = getattr(importlib.import_module(module), function)
    return open_session
