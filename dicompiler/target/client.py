"""Using a compiled network from a program: `connect(directory)` starts its devices once; frames then go through them.

    with dicompiler.connect("build") as session:
        outputs = session.infer({"input": image})
        for outputs in session.stream(images):
            ...
        async for outputs in session.astream(camera):
            ...

Arrays by name go in and come out. This needs numpy and nothing of ONNX; what computes are the devices' processes. The
one device of an artifact on this host is no process: it is played in the caller's, which then needs onnxruntime.
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
"""The entry points of targets whose artifacts can be connected to: the target's name = "module:function", which is
called with a directory (Path) and RunOptions, and returns a Session."""
BUILTIN_CLIENTS = {"sockets": "dicompiler_targets.sockets.open_session:open_session"}
"""Those of an uninstalled checkout: the same as in pyproject.toml."""


class Session(Protocol):
    """Devices that have been started and wait for frames. Use it from one thread at a time, and close it.

    Whatever fails raises RunError, which names the device and the cause; all devices are ended then. `reports`: what
    each device measured, once the session was closed in good order.
    """

    reports: tuple[DeviceReport, ...]

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """One frame: its outputs by name. DicompilerError for inputs that do not fit."""

    def stream(self, frames: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, NDArray[Any]]]:
        """The outputs of each frame, in the order of `frames`, which are read in a thread of their own.

        Several frames are on their way at once, so that the devices work at the same time; never more than
        `RunOptions.in_flight`, those whose outputs were not taken yet included. What reading the frames raises, or a
        frame that does not fit, is raised after the outputs of the frames before it; the session goes on.
        """

    def reset(self) -> None:
        """States begin anew, as zeros, with the frame that is given next; one that gives states begins with those."""

    async def astream(
        self, frames: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]
    ) -> AsyncIterator[dict[str, NDArray[Any]]]:
        """`stream` for `async for`: it waits in another thread, and the frames may come from an async iterator, which
        is awaited in the caller's loop. Who leaves it early waits until the frame that is on its way is there."""
        from dicompiler.target.async_stream import stream_async

        async for outputs in stream_async(self.stream, frames):
            yield outputs

    def close(self) -> None:
        """Finishes what is on its way and ends the devices."""

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
    """Starts the devices of the artifact in `directory`, or joins those that `dicompiler deploy --keep` left running,
    and waits until they are ready.

    options: by default three frames in flight for each device. timeout: seconds that starting may take,
    and that each frame may, by default those of `options`. hosts: a hosts.toml: devices run there, and what the hosts
    lack of the artifact and of the keys is copied first; keys: the directory that `dicompiler keys` made (both by
    default those of `options`). DicompilerError for what is no artifact, RunError where a device does not start,
    UsageError for values of other types.
    """
    from dicompiler.target.remote.hosts import Hosts

    check_type(directory, (str, Path), "connect: directory", "a path")
    check_type(options, (RunOptions, NoneType), "connect: options", "RunOptions")
    check_type(timeout, (int, float, NoneType), "connect: timeout", "seconds")
    check_type(hosts, (str, Path, Hosts, NoneType), "connect: hosts", "the path of a hosts.toml")
    check_type(keys, (str, Path, NoneType), "connect: keys", "a path")
    path, how = Path(directory), (options or RunOptions(in_flight=0)).with_timeout(timeout)
    start = _find_client(path)
    if hosts is not None:
        how = replace(how, hosts=hosts if isinstance(hosts, Hosts) else Hosts.load(hosts))
    return start(path, how if keys is None else replace(how, keys=Path(keys)))


def _find_client(path: Path) -> Callable[[Path, RunOptions], Session]:
    """What connects to the artifacts of the target that wrote this one."""
    document = load_artifact(path)
    name = str(document.get("target"))
    known = BUILTIN_CLIENTS | {
        point.name: point.value for point in metadata.entry_points(group=CLIENT_ENTRY_POINT_GROUP)
    }
    if name not in known:
        raise DicompilerError(f"{path}: one cannot connect to what target {name!r} wrote{did_you_mean(name, known)}")
    if name not in BUILTIN_CLIENTS:  # those compare the files themselves
        check_files(path, document["files"], document["files"])
    module, _, function = known[name].partition(":")
    found: Callable[[Path, RunOptions], Session] = getattr(importlib.import_module(module), function)
    return found
