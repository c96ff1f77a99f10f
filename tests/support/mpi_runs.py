"""Artifacts of the MPI target, and their programs' processes and environment without dicompiler."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.handmade import Made

from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.target.manifest import write_digests_and_checksum
from dicompiler_targets.mpi import MpiTarget, fetch_headers, toolchain


def emit(made: Made, directory: Path, **options: Any) -> Path:
    """Write the artifact of a handwritten program; `options` are those of the MPI target."""
    directory.mkdir(exist_ok=True)
    MpiTarget(**options).emit(PipelineState(model=made[1], program=made[0]), directory)
    write_digests_and_checksum(directory)
    return directory


class Alike(Sequence[Any]):
    """A sequence that repeats one frame `count` times without copies of it."""

    def __init__(self, frame: Any, count: int) -> None:
        self._frame, self._places = frame, range(count)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: Any) -> Any:
        found = self._places[place]
        return Alike(self._frame, len(found)) if isinstance(found, range) else self._frame

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self._frame, len(self))


def ranks(name: str, own: bool = True) -> dict[int, int]:
    """Return the process ID of each rank whose program's path includes `name`.

    With `own`, only descendants of this process are included.
    """
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # The process may have ended already.
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
            rank = re.search(r"OMPI_COMM_WORLD_RANK=(\d+)", (entry / "environ").read_bytes().decode(errors="replace"))
            if name in line.split("\0")[0] and rank is not None and (not own or _ours(int(entry.name))):
                found[int(rank[1])] = int(entry.name)
    return found


def _ours(pid: int) -> bool:
    while pid not in (0, os.getpid()):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid != 0


def environment() -> dict[str, str]:
    """Return this process's environment, extended so that root may start ranks, and programs and headers are found."""
    roots = {f"{name}_ALLOW_RUN_AS_ROOT{end}": "1" for name in ("OMPI", "PRTE") for end in ("", "_CONFIRM")}
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), toolchain.get_search_path()]
    )  # cmake uses the first python3 on the path, which must be this one.
    own = {
        "PATH": path,
        "VIRTUAL_ENV": sys.prefix,
        fetch_headers.INCLUDE_VARIABLE: str(fetch_headers.get_include_directory()),
        "OMPI_MCA_btl": "^ofi",
    }
    return os.environ | roots | own
