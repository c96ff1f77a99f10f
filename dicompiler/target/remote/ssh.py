"""Commands on other hosts, and copies to them, by the system's ssh client with the user's configuration and agents.

The other host needs sshd, sh and tar. A failure is one line that names the device, the host, the cause and the remedy.
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
"""Seconds allowed for a host to accept a connection."""
KEEPALIVE_INTERVAL_S = 5
"""Seconds between ssh's own keepalive messages. ssh gives up after three without an answer."""
SSH_ERROR_EXIT_CODE = 255
"""The exit code of ssh if ssh itself fails. Other exit codes are those of the script."""
STAMP_FILE = ".dicompiler"
"""The file that identifies the content of a copied directory. Directories without it are never replaced."""
LINE_PREFIX = "dicompiler: "
"""The prefix of lines that our scripts print. Other lines come from the login on the other host."""
_MAX_FILE_NAME_CHARS = 50_000
"""Total length of file names that fits on a command line on all systems."""
SSH_OPTIONS = {
    "BatchMode": "yes",  # never prompt for a password
    "ConnectTimeout": str(CONNECT_TIMEOUT_S),
    "ServerAliveInterval": str(KEEPALIVE_INTERVAL_S),
    "ClearAllForwardings": "yes",  # two connections to one host cannot both forward its ports
    "ControlMaster": "no",  # the master of a shared connection outlives its own command
    "RemoteCommand": "none",
}
SSH_REMEDIES = (
    ("host key verification failed", "its host key is unknown here or has changed: connect once by hand ('ssh {}') and"
     " check it"),
    ("permission denied", "authorize your key ('ssh-copy-id {}'), or name the right one (identity in {})"),
    ("could not resolve", "check its ssh in {1}"),
    ("no route|unreachable|timed out|refused|not responding", "is it on, and does sshd run there? (ssh, port in {1})"),
)  # fmt: skip
"""Patterns of ssh's messages, and the remedy for each; {0}: the ssh destination, {1}: the hosts file."""

# The archive is unpacked next to the target directory. The unpacked directory replaces the target only if it is
# complete, that is, if it contains the stamp, which is the archive's last file. Arguments: the target directory, the
# name of the stamp file, the files of the target that are kept.
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
    """The result of a script on another host.

    Attributes:
        exit_code: Exit code of the script.
        output: Text that it wrote to stdout.
        errors: Text that it wrote to stderr.
    """

    exit_code: int
    output: str
    errors: str

    @property
    def prefixed_lines(self) -> list[str]:
        """The lines that the script printed with LINE_PREFIX, without the prefix."""
        lines = self.output.splitlines()
        return [line.removeprefix(LINE_PREFIX) for line in lines if line.startswith(LINE_PREFIX)]


def quote_path(path: str) -> str:
    """Quote a path on another host for its shell.

    Args:
        path: The path; relative paths are relative to the user's home on that host.

    Returns:
        A word for the shell.
    """
    if path.startswith("/"):
        return shlex.quote(path)
    return f'"$HOME"/{shlex.quote(path.removeprefix("~/"))}'


def build_command(location: DeviceLocation, script: str, words: Iterable[str]) -> list[str]:
    """Build the ssh command line that runs a script on a device's host.

    Args:
        location: How to reach the host.
        script: The sh script.
        words: Its arguments, quoted for the shell.

    Returns:
        The command line.

    Raises:
        DicompilerError: ssh is not installed.
    """
    program = shutil.which("ssh")
    if program is None:
        raise DicompilerError("ssh is missing on this machine: install the package openssh-client")
    options = [text for name, value in SSH_OPTIONS.items() for text in ("-o", f"{name}={value}")]
    if location.port is not None:
        options += ["-p", str(location.port)]
    if location.identity is not None:
        options += ["-o", "IdentitiesOnly=yes", "-i", str(location.identity)]
    # The script is put on one line, because some login shells do not accept quoted text of several lines.
    remote = " ".join(["exec sh -c", shlex.quote(" ".join(script.split())), "sh", *words])
    return [program, "-T", *options, "--", location.ssh_destination, remote]


def english_environment() -> dict[str, str]:
    """Return the environment for ssh, with a locale that makes ssh's messages English.

    Returns:
        This process's environment with LC_ALL=C.
    """
    return os.environ | {"LC_ALL": "C"}


def get_address(location: DeviceLocation) -> str:
    """Return the address or name by which ssh reaches a host, according to ssh's configuration.

    Args:
        location: How to reach the host.

    Returns:
        The address or name.

    Raises:
        DicompilerError: ssh rejects the destination.
    """
    command = build_command(location, "", ())
    done = subprocess.run(
        [*command[:1], "-G", *command[1:-1]], capture_output=True, text=True, env=english_environment()
    )
    match = re.search(r"^hostname (\S+)$", done.stdout, re.MULTILINE)
    if done.returncode or match is None:
        raise DicompilerError(f"{location.title}: {explain_failure(location, done.stderr)}")
    return match[1]


def explain_failure(location: DeviceLocation, errors: str, file: str = "hosts.toml") -> str:
    """Explain a failure of ssh in one line.

    Args:
        location: How to reach the host.
        errors: ssh's messages.
        file: Path of the hosts file, for the remedy.

    Returns:
        The cause, and the remedy if it is known.
    """
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    for pattern, remedy in SSH_REMEDIES:
        for line in lines:
            if re.search(pattern, line, re.IGNORECASE):
                return f"{one_line(line).rstrip('.')}: {remedy.format(location.ssh_destination, file)}"
    return one_line(lines[-1]) if lines else "the ssh connection was lost"


class UnreachableHost(RunError):
    """The error for a failure of ssh itself.

    Attributes:
        reason: The cause, without the host.
    """

    def __init__(self, location: DeviceLocation, reason: str) -> None:
        super().__init__(f"{location.title}: {reason}")
        self.reason = reason


class RemoteCommands:
    """Scripts on other hosts. An error in one of them, or an interrupt, ends the others.

    Attributes:
        deadline_s: End of the time allowed for all of them, by time.monotonic.
        file: Path of the hosts file, for messages.
    """

    def __init__(self, deadline_s: float, file: str) -> None:
        self._deadline_s, self._file = deadline_s, file
        self._running_processes: set[subprocess.Popen[bytes]] = set()
        self._lock, self._is_ended = threading.Lock(), False

    def run_parallel(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Call a function for all items at once. If some calls fail, end the others and raise the first error.

        Args:
            work: The function.
            items: Its arguments.

        Returns:
            The results, in the order of the items.
        """
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
        """End all running scripts. No further ones can be started."""
        with self._lock:
            self._is_ended = True
            for process in self._running_processes:
                process.kill()

    def run(
        self,
        location: DeviceLocation,
        script: str,
        words: Iterable[str],
        write_input: Callable[[IO[bytes]], object] = lambda _: None,
        max_output_bytes: int = KEPT_BYTES,
    ) -> CommandResult:
        """Run a script to its end.

        Args:
            location: How to reach the host.
            script: The sh script.
            words: Its arguments, quoted for the shell.
            write_input: Writes the script's standard input.
            max_output_bytes: Bytes of the output that are kept, from its beginning and from its end.

        Returns:
            Its exit code and output.

        Raises:
            UnreachableHost: ssh itself has failed.
            RunError: The script did not end in time.
        """
        process = self._start(build_command(location, script, words))
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        output, errors = CapturedOutput(process.stdout, max_output_bytes), CapturedOutput(process.stderr)
        timer = threading.Timer(max(0.0, self._deadline_s - time.monotonic()), process.kill)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # a script that ends early has printed the reason
                try:
                    write_input(process.stdin)
                finally:
                    process.stdin.close()
            exit_code = process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
            with self._lock:
                self._running_processes.discard(process)
        result = CommandResult(
            exit_code, output.read().decode(errors="replace"), errors.read().decode(errors="replace")
        )
        if exit_code == SSH_ERROR_EXIT_CODE:
            raise UnreachableHost(location, explain_failure(location, result.errors, self._file))
        if exit_code < 0:
            raise RunError(f"{location.title}: it did not answer in time: allow more (--timeout)")
        return result

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_ended:
                raise RunError("ended by another failure")
            # With its own session, ssh does not receive an interrupt from the terminal. This process handles it.
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=english_environment(),
                start_new_session=True,
            )
            self._running_processes.add(process)
            return process

    def copy_files(
        self,
        location: DeviceLocation,
        target: str,
        files: Mapping[str, Path],
        stamp: str,
        kept_names: Collection[str] = (),
    ) -> int:
        """Copy files into a directory on a device's host, and remove all others from it.

        The directory is replaced as a whole or not at all. Only its owner can read the files.

        Args:
            location: How to reach the host.
            target: The directory.
            files: Files by their path in the directory.
            stamp: Text that is written into the directory's STAMP_FILE.
            kept_names: Files, which are not sent again, and directories that are kept.

        Returns:
            The number of bytes sent.

        Raises:
            RunError: The directory exists without a STAMP_FILE, or there is not enough room.
        """
        kept = sorted(kept_names)
        if sum(map(len, kept)) > _MAX_FILE_NAME_CHARS:
            kept = []
        sent = {name: path for name, path in files.items() if name not in kept}
        words = [quote_path(target), STAMP_FILE, *map(shlex.quote, kept)]
        done = self.run(location, UNPACK_SCRIPT, words, lambda stream: _write_archive(stream, sent, stamp))
        if done.exit_code:
            raise RunError(f"{location.title}: cannot be copied to {target}: {_find_copy_cause(done)}")
        return sum(path.stat().st_size for path in sent.values())


def _write_archive(stream: IO[bytes], files: Mapping[str, Path], stamp: str) -> None:
    """Write the files, and finally the stamp, as a tar archive. The same files give the same bytes."""
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


def _find_copy_cause(result: CommandResult) -> str:
    """Return the most informative line of the messages of tar and sh."""
    lines = [line.strip() for line in result.errors.splitlines() if line.strip()]
    for line in lines:
        if re.search("no space left|quota exceeded", line, re.IGNORECASE):
            return f"{one_line(line.rpartition(': ')[2])} there: make room, or give another directory"
    return one_line(lines[-1]) if lines else f"exit code {result.exit_code}"
