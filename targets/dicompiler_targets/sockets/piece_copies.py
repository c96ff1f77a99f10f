"""Copying large files to a host without sending those byte ranges that other files on the host have.

`PieceCopier` runs on the sending host, and the module `pieces` on the receiving host. Afterwards,
`ssh.RemoteCommands.copy_files` links the assembled files into their directory.
"""

from __future__ import annotations

import inspect
import itertools
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dicompiler.plugin_api.artifacts import DeviceLocation, ssh
from dicompiler_targets.sockets import pieces

MIN_PIECED_BYTES = 1 << 16
"""Minimum size of a file that is assembled from pieces; smaller files are sent as a whole."""
_MAX_ANSWER_BYTES, _BLOCK_BYTES = 1 << 26, 1 << 20
# The arguments of this script are the Python interpreter and the number of bytes of the program. Standard input has the
# program, followed by the program's own input.
_RUN_PROGRAM_SCRIPT = """cd / && exec "$1" -c 'import sys; exec(sys.stdin.buffer.read(int(sys.argv[1])))' "$2" """


@dataclass
class PieceCopier:
    """Assembles files on a device's host from byte ranges of old files there and ranges that are sent.

    Attributes:
        commands: Runs commands over ssh.
        location: How to reach the host.
        python: The host's Python, quoted for the shell.
        old_files: Absolute paths of files on the host that may share byte ranges with the new files.
        bytes_per_s: Maximum number of bytes that are sent per second; 0 means no limit.
        sent_bytes: Number of bytes that were sent so far.
    """

    commands: ssh.RemoteCommands
    location: DeviceLocation
    python: str
    old_files: Sequence[str]
    bytes_per_s: float
    sent_bytes: int = 0

    def assemble(self, directory: str, files: Mapping[str, Path], digests: Mapping[str, str]) -> list[str]:
        """Assemble files in a directory of the host.

        Args:
            directory: Absolute path of the directory.
            files: The local files, by name.
            digests: SHA-256 of each file, by name.

        Returns:
            The names of the assembled files. A file is missing if the host has no piece of it, or if an old file has
            changed meanwhile.
        """
        found = self._find({name: pieces.cut_file(path) for name, path in files.items()})
        useful = {
            name: ranges for name, ranges in found.items() if any(source != pieces.SENT_SOURCE for source, *_ in ranges)
        }
        if not useful:
            return []
        recipes = [(name, digests[name], ranges) for name, ranges in useful.items()]
        request = {"directory": directory, "old_files": self.old_files, "files": recipes}
        missing = (block for name, ranges in useful.items() for block in _missing_bytes(files[name], ranges))
        answer = self._run(request, missing)
        return [name for name in useful if name in answer]

    def _find(self, wanted: Mapping[str, Sequence[pieces.Piece]]) -> dict[str, list[pieces.Range]]:
        """Return, by file name, the byte ranges that make up each file; {} if the host does not answer.

        Args:
            wanted: The pieces of each file, by file name.
        """
        lengths = [[length for _, length, _ in found] for found in wanted.values()]
        digests = b"".join(digest for found in wanted.values() for _, _, digest in found)
        answer = self._run({"old_files": self.old_files, "wanted": lengths}, [digests])
        ranges = [[(source, offset, length) for source, offset, length in found] for found in answer]
        return dict(zip(wanted, ranges, strict=False))

    def _run(self, request: Mapping[str, Any], content: Iterable[bytes]) -> list[Any]:
        """Run `pieces.main` on the host with a request and `content`; return its answer, or [] if there is none."""
        program = f"{inspect.getsource(pieces)}\nmain({ssh.LINE_PREFIX!r})\n".encode()
        line = f"{json.dumps(request)}\n".encode()

        def send(stream: IO[bytes]) -> None:
            limited = ssh.limit_rate(stream, self.bytes_per_s)
            for block in itertools.chain([program, line], content):
                limited.write(block)
                self.sent_bytes += len(block)

        words = [self.python, shlex.quote(str(len(program)))]
        result = self.commands.run(self.location, _RUN_PROGRAM_SCRIPT, words, send, _MAX_ANSWER_BYTES)
        return json.loads(result.prefixed_lines[-1]) if result.prefixed_lines else []


def is_pieced(path: Path) -> bool:
    return path.stat().st_size >= MIN_PIECED_BYTES


def _missing_bytes(path: Path, ranges: Sequence[pieces.Range]) -> Iterator[bytes]:
    """Yield the bytes of a local file that must be sent, because their ranges have the source SENT_SOURCE.

    Together, `ranges` make up the whole file.
    """
    with path.open("rb") as file:
        for source, _, length in ranges:
            if source != pieces.SENT_SOURCE:
                file.seek(length, 1)
                continue
            for start in range(0, length, _BLOCK_BYTES):
                yield file.read(min(_BLOCK_BYTES, length - start))
