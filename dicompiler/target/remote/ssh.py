"""Commands on other hosts, and copies to them, by the system's ssh client: its configuration and agents are the user's.

In: places from a hosts.toml, shell scripts, files. Out: what the scripts printed, or one line that names device, host,
cause and remedy. The other end needs sshd, sh and tar.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from dicompiler.base.captured_output import KEPT_BYTES, CapturedOutput
from dicompiler.base.errors import DicompilerError, RunError, one_line
from dicompiler.target.remote.hosts import DeviceLocation

Item = TypeVar("Item")
Result = TypeVar("Result")

CONNECT_TIMEOUT_S = 10
"""Seconds that a host has to accept a connection."""
KEEPALIVE_INTERVAL_S = 5
"""Seconds between ssh's own signs of life; after three without an answer it gives up."""
SSH_ERROR_EXIT_CODE = 255
"""ssh's exit code where it failed itself; any other is that of the script."""
STAMP_FILE = ".dicompiler"
"""The file that says what a copied directory holds; a directory without it is none of ours."""
LINE_PREFIX = "dicompiler: "
"""What our scripts begin a line with, among all that a login on the other host may print."""
_MAX_FILE_NAME_CHARS = 50_000
"""Characters of file names that a command line takes in any case."""
SSH_OPTIONS = {
    "BatchMode": "yes",  # nothing asks for passwords: nobody is there to answer
    "ConnectTimeout": str(CONNECT_TIMEOUT_S),
    "ServerAliveInterval": str(KEEPALIVE_INTERVAL_S),
    "ClearAllForwardings": "yes",  # two connections to one host cannot both forward its ports
    "ControlMaster": "no",  # whoever leads a connection that is shared outlives its own command
    "RemoteCommand": "none",
}
SSH_REMEDIES = (
    ("host key verification failed", "its host key is not known here, or another one than before: connect once by hand"
     " ('ssh {}') and check it"),
    ("permission denied", "let our key in ('ssh-copy-id {}'), or name the right one (identity in {})"),
    ("could not resolve", "check its ssh in {1}"),
    ("no route|unreachable|timed out|refused|not responding", "is it on, and does sshd run there? (ssh, port in {1})"),
)  # fmt: skip
"""Patterns of what ssh says, and what to do about it; {0} is what ssh connected to and {1} the hosts file."""

# The directory is unpacked beside its place and takes it when it is whole: the stamp is the last file to come.
# Arguments: the directory, the stamp's name, the files in it that stay.
UNPACK_SCRIPT = """
set -eu; umask 077; target=$1; stamp=$2;
beside=$(dirname "$1")/.$(basename "$1"); shift 2; new=$beside.new; old=$beside.old;
if [ -e "$target" ] && ! [ -f "$target/$stamp" ] && [ -n "$(ls -A "$target")" ]; then
  echo "$target holds something else: give another directory, or remove it" >&2; exit 1; fi;
trap 'rm -rf "$new"' EXIT; trap 'exit 1' HUP INT TERM PIPE;
rm -rf "$new" "$old"; mkdir -p "$new";
for name in "$@"; do if [ -e "$target/$name" ]; then
  mkdir -p "$(dirname "$new/$name")";
  ln "$target/$name" "$new/$name" 2>/dev/null || cp -pPR "$target/$name" "$new/$name";
fi; done;
tar -xomf - -C "$new";
if ! [ -f "$new/$stamp" ]; then echo "the copy was cut short" >&2; exit 1; fi;
if [ -e "$target" ]; then mv "$target" "$old"; fi;
mv "$new" "$target"; rm -rf "$old"
"""


@dataclass(frozen=True)
class CommandResult:
    """How a script ended on another host: its exit code and what it wrote."""

    exit_code: int
    output: str
    errors: str

    @property
    def prefixed_lines(self) -> list[str]:
        """The lines that our script printed, without their mark."""
        return [line.removeprefix(LINE_PREFIX) for line in self.output.splitlines() if line.startswith(LINE_PREFIX)]


def quote_path(path: str) -> str:
    """A path on the other host as a word for its shell: relative ones start at the user's home there."""
    if path.startswith("/"):
        return shlex.quote(path)
    return f'"$HOME"/{shlex.quote(path.removeprefix("~/"))}'


def build_command(place: DeviceLocation, script: str, words: Iterable[str]) -> list[str]:
    """The command line that runs the sh script on the place's host. words: its arguments, quoted as shell words."""
    program = shutil.which("ssh")
    if program is None:
        raise DicompilerError("ssh is missing on this machine: install the package openssh-client")
    options = [text for name, value in SSH_OPTIONS.items() for text in ("-o", f"{name}={value}")]
    if place.port is not None:
        options += ["-p", str(place.port)]
    if place.identity is not None:
        options += ["-o", "IdentitiesOnly=yes", "-i", str(place.identity)]
    # On one line: not every login shell lets a quoted text go over several.
    remote = " ".join(["exec sh -c", shlex.quote(" ".join(script.split())), "sh", *words])
    return [program, "-T", *options, "--", place.ssh_destination, remote]


def english_environment() -> dict[str, str]:
    """Ours, so that what ssh and the other end say is in English, as far as they let us choose."""
    return os.environ | {"LC_ALL": "C"}


def get_address(place: DeviceLocation) -> str:
    """The address or name at which ssh reaches the place's host, as its own configuration has it."""
    line = build_command(place, "", ())
    done = subprocess.run([*line[:1], "-G", *line[1:-1]], capture_output=True, text=True, env=english_environment())
    match = re.search(r"^hostname (\S+)$", done.stdout, re.MULTILINE)
    if done.returncode or match is None:
        raise DicompilerError(f"{place.title}: {explain_failure(place, done.stderr)}")
    return match[1]


def explain_failure(place: DeviceLocation, errors: str, file: str = "hosts.toml") -> str:
    """Why ssh failed, of all that it said, and what to do about it."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    for pattern, remedy in SSH_REMEDIES:
        for line in lines:
            if re.search(pattern, line, re.IGNORECASE):
                return f"{one_line(line).rstrip('.')}: {remedy.format(place.ssh_destination, file)}"
    return one_line(lines[-1]) if lines else "the ssh connection was lost"


class UnreachableHost(RunError):
    """ssh itself failed. why: in words, without the host."""

    def __init__(self, place: DeviceLocation, why: str) -> None:
        super().__init__(f"{place.title}: {why}")
        self.reason = why


class RemoteCommands:
    """Scripts that run on other hosts; whoever leaves by an error (an interrupt too) ends those that still do.

    deadline: of time.monotonic, for all of them. file: the hosts file, to be named in errors.
    """

    def __init__(self, deadline: float, file: str) -> None:
        self._deadline_s, self._file = deadline, file
        self._running_processes: set[subprocess.Popen[bytes]] = set()
        self._lock, self._is_ended = threading.Lock(), False

    def run_parallel(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """work(item) for all items at once. Where some fail, the rest is ended and the first of the errors raised."""
        with ThreadPoolExecutor(max(1, len(items))) as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                failed = [future for future in futures if future in done and future.exception() is not None]
                return [future.result() for future in (failed or futures)]
            except BaseException:
                self.kill_all()
                raise

    def kill_all(self) -> None:
        """Ends what runs; nothing can be started any more."""
        with self._lock:
            self._is_ended = True
            for popen in self._running_processes:
                popen.kill()

    def run(
        self,
        place: DeviceLocation,
        script: str,
        words: Iterable[str],
        write_input: Callable[[IO[bytes]], object] = lambda _: None,
        max_output_bytes: int = KEPT_BYTES,
    ) -> CommandResult:
        """Runs the script to its end. feed: writes what it reads. kept: bytes that are kept of the beginning of what it
        prints, and of its end. Unreached where ssh itself fails, RunError where time is up."""
        popen = self._start(build_command(place, script, words))
        assert popen.stdin is not None and popen.stdout is not None and popen.stderr is not None
        output, errors = CapturedOutput(popen.stdout, max_output_bytes), CapturedOutput(popen.stderr)
        watch = threading.Timer(max(0.0, self._deadline_s - time.monotonic()), popen.kill)
        watch.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it ended early: it has told why
                try:
                    write_input(popen.stdin)
                finally:
                    popen.stdin.close()
            code = popen.wait()
        finally:
            watch.cancel()
            popen.kill()
            popen.wait()
            with self._lock:
                self._running_processes.discard(popen)
        done = CommandResult(code, output.read().decode(errors="replace"), errors.read().decode(errors="replace"))
        if code == SSH_ERROR_EXIT_CODE:
            raise UnreachableHost(place, explain_failure(place, done.errors, self._file))
        if code < 0:
            raise RunError(f"{place.title}: it did not answer in time: allow more (--timeout)")
        return done

    def _start(self, line: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_ended:
                raise RunError("ended by the failure of another")
            # A session of its own: an interrupt from the terminal is for our process, which then ends it.
            popen = subprocess.Popen(
                line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=english_environment(),
                start_new_session=True,
            )
            self._running_processes.add(popen)
            return popen

    def copy_files(
        self,
        place: DeviceLocation,
        target: str,
        files: Mapping[str, Path],
        stamp: str,
        kept_names: Collection[str] = (),
    ) -> int:
        """Makes `target` on the place's host hold these files (by their path there) and nothing else but `there`: what
        of it stays, files that are not sent again and directories. Returns the bytes that were sent.

        They can be read by their owner only. stamp: what the file STAMP there says afterwards. It appears whole or not
        at all; what it held before is replaced if it has a STAMP. RunError where that is not so, or there is no room.
        """
        kept = sorted(kept_names)
        if sum(map(len, kept)) > _MAX_FILE_NAME_CHARS:
            kept = []
        sent = {name: path for name, path in files.items() if name not in kept}
        words = [quote_path(target), STAMP_FILE, *map(shlex.quote, kept)]
        done = self.run(place, UNPACK_SCRIPT, words, lambda stream: _write_archive(stream, sent, stamp))
        if done.exit_code:
            raise RunError(f"{place.title}: cannot be copied to {target}: {_find_copy_cause(done)}")
        return sum(path.stat().st_size for path in sent.values())


def _write_archive(stream: IO[bytes], files: Mapping[str, Path], stamp: str) -> None:
    """Writes the files as a tar archive, then the stamp. The same files give the same bytes."""
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT, bufsize=1 << 20) as archive:
        for parent in sorted({str(parent) for name in files for parent in Path(name).parents} - {"."}):
            entry = tarfile.TarInfo(parent)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o700
            archive.addfile(entry)
        for name, path in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                entry.size, entry.mode = status.st_size, 0o600 | status.st_mode & 0o100
                archive.addfile(entry, file)
        entry = tarfile.TarInfo(STAMP_FILE)
        entry.size, entry.mode = len(stamp.encode()), 0o600
        archive.addfile(entry, io.BytesIO(stamp.encode()))


def _find_copy_cause(done: CommandResult) -> str:
    """The line that tells most of what tar and sh said."""
    lines = [line.strip() for line in done.errors.splitlines() if line.strip()]
    for line in lines:
        if re.search("no space left|quota exceeded", line, re.IGNORECASE):
            return f"{one_line(line.rpartition(': ')[2])} there: make room, or give another directory"
    return one_line(lines[-1]) if lines else f"exit code {done.exit_code}"
