"""Scripts on other hosts, and copies to them, by the system's ssh client with the user's configuration and keys.

The other host needs sshd, sh and tar. After a failure, a one-line error names the device, the host, the cause and the
remedy.
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
"""The exit code of ssh if ssh itself fails. All other exit codes come from the script on the other host."""
STAMP_FILE = ".dicompiler"
"""The file that identifies the content of a copied directory. A directory without this file is never replaced."""
LINE_PREFIX = "dicompiler: "
"""The prefix of lines that our scripts print. Lines without it come from the login shell of the other host."""
_MAX_FILE_NAME_CHARS = 50_000
"""Total length of file names that a command line can contain on all systems."""
SSH_OPTIONS = {
    "BatchMode": "yes",  # Never ask for a password.
    "ConnectTimeout": str(CONNECT_TIMEOUT_S),
    "ServerAliveInterval": str(KEEPALIVE_INTERVAL_S),
    "ClearAllForwardings": "yes",  # Two connections to one host cannot both forward the same port.
    "ControlMaster": "no",  # A shared connection would keep this ssh process running after its command has ended.
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

# The archive is unpacked into a new directory next to the target directory. The new directory replaces the target only
# if the archive is complete, that is, if the new directory contains the stamp file, which is the archive's last file.
# Arguments: the target directory, the name of the stamp file, and the names of files of the target that are kept.
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
    """The exit code of a script on another host, and the text on its stdout (`output`) and stderr (`errors`)."""

    exit_code: int
    output: str
    errors: str

    @property
    def prefixed_lines(self) -> list[str]:
        """The lines of `output` that start with LINE_PREFIX, without the prefix."""
        lines = self.output.splitlines()
        return [line.removeprefix(LINE_PREFIX) for line in lines if line.startswith(LINE_PREFIX)]


def quote_path(path: str) -> str:
    """Quote a path on another host for that host's shell. Relative paths are relative to the user's home there."""
    if path.startswith("/"):
        return shlex.quote(path)
    return f'"$HOME"/{shlex.quote(path.removeprefix("~/"))}'


def build_command(location: DeviceLocation, script: str, words: Iterable[str]) -> list[str]:
    """Build the ssh command line that runs an sh script on a device's host.

    `words` are the script's arguments, quoted for the shell. Raise DicompilerError if ssh is not installed.
    """
    program = shutil.which("ssh")
    if program is None:
        raise DicompilerError("ssh is missing on this machine: install the package openssh-client")
    options = [text for name, value in SSH_OPTIONS.items() for text in ("-o", f"{name}={value}")]
    if location.port is not None:
        options += ["-p", str(location.port)]
    if location.identity is not None:
        options += ["-o", "IdentitiesOnly=yes", "-i", str(location.identity)]
    # The script is sent as one line, because some login shells do not accept quoted text of several lines.
    remote = " ".join(["exec sh -c", shlex.quote(" ".join(script.split())), "sh", *words])
    return [program, "-T", *options, "--", location.ssh_destination, remote]


def english_environment() -> dict[str, str]:
    """Return this process's environment with a locale that makes ssh's messages English."""
    return os.environ | {"LC_ALL": "C"}


def get_address(location: DeviceLocation) -> str:
    """Return the address or name of a device's host according to ssh's configuration.

    Raise DicompilerError if ssh rejects the destination.
    """
    command = build_command(location, "", ())
    command = [command[0], "-G", *command[1:-1]]  # With -G, ssh prints its configuration and does not connect.
    result = subprocess.run(command, capture_output=True, text=True, env=english_environment())
    match = re.search(r"^hostname (\S+)$", result.stdout, re.MULTILINE)
    if result.returncode or match is None:
        raise DicompilerError(f"{location.title}: {explain_failure(location, result.stderr)}")
    return match[1]


def explain_failure(location: DeviceLocation, errors: str, file: str = "hosts.toml") -> str:
    """Return the cause of a failure of ssh, and the remedy if it is known, in one line.

    `errors` are ssh's messages, and `file` is the path of the hosts file, which the remedy names.
    """
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    for pattern, remedy in SSH_REMEDIES:
        for line in lines:
            if re.search(pattern, line, re.IGNORECASE):
                return f"{one_line(line).rstrip('.')}: {remedy.format(location.ssh_destination, file)}"
    return one_line(lines[-1]) if lines else "the ssh connection was lost"


class UnreachableHost(RunError):
    """The error for a failure of ssh itself. The attribute `reason` is the cause without the name of the host."""

    def __init__(self, location: DeviceLocation, reason: str) -> None:
        super().__init__(f"{location.title}: {reason}")
        self.reason = reason


class RemoteCommands:
    """Runs scripts on other hosts. An error of one script, or an interrupt, ends all other scripts.

    All scripts together must end before `deadline_s`, a time of time.monotonic. `file` is the path of the hosts file,
    which error messages name.
    """

    def __init__(self, deadline_s: float, file: str) -> None:
        self._deadline_s, self._file = deadline_s, file
        self._running_processes: set[subprocess.Popen[bytes]] = set()
        self._lock, self._is_ended = threading.Lock(), False

    def run_parallel(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Call the function `work` for all items at the same time, and return its results in the order of the items.

        If a call raises an error, all running scripts are ended, and the error of the first failed item is raised.
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
        """Kill all running scripts, and refuse to start further ones."""
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
        """Run an sh script on a device's host until it ends.

        Args:
            location: How to reach the host.
            script: The sh script.
            words: The script's arguments, quoted for the shell.
            write_input: Function that writes the script's standard input to the given stream.
            max_output_bytes: If the output is longer than this, only its beginning and its end are kept.

        Returns:
            The exit code and the output.

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
            # The pipe breaks if the script ends before it has read all input. Its output then has the reason.
            with contextlib.suppress(BrokenPipeError):
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
        texts = [captured.read().decode(errors="replace") for captured in (output, errors)]
        result = CommandResult(exit_code, *texts)
        if exit_code == SSH_ERROR_EXIT_CODE:
            raise UnreachableHost(location, explain_failure(location, result.errors, self._file))
        if exit_code < 0:
            raise RunError(f"{location.title}: its host did not answer in time: allow more time (--timeout)")
        return result

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_ended:
                raise RunError("ssh: stopped because a command on another host has failed")
            # ssh gets its own session, so that Ctrl-C interrupts only this process. This process then ends ssh.
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
        """Replace the content of a directory on a device's host by local files. Return the number of bytes sent.

        The directory is replaced as a whole or not at all. Only its owner can read the files. RunError is raised if the
        directory exists without a STAMP_FILE, or if the disk is full.

        Args:
            location: How to reach the host.
            target: The directory on the host.
            files: Local files by their path in the directory.
            stamp: Text that identifies the content. It is written into the directory's STAMP_FILE.
            kept_names: Paths of files and directories in the directory that are kept, and are not sent again.
        """
        kept = sorted(kept_names)
        if sum(map(len, kept)) > _MAX_FILE_NAME_CHARS:
            kept = []
        sent = {name: path for name, path in files.items() if name not in kept}
        words = [quote_path(target), STAMP_FILE, *map(shlex.quote, kept)]
        result = self.run(location, UNPACK_SCRIPT, words, lambda stream: _write_archive(stream, sent, stamp))
        if result.exit_code:
            raise RunError(f"{location.title}: files cannot be copied to {target}: {_find_copy_cause(result)}")
        return sum(path.stat().st_size for path in sent.values())


def _write_archive(stream: IO[bytes], files: Mapping[str, Path], stamp: str) -> None:
    """Write the files as a tar archive that ends with a STAMP_FILE, which contains the text `stamp`.

    The same files and stamp give the same bytes.
    """
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT, bufsize=1 << 20) as archive:
        for parent in sorted({str(parent) for name in files for parent in Path(name).parents} - {"."}):
            entry = tarfile.TarInfo(parent)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o700
            archive.addfile(entry)
        for name, path in sorted(files.items()):
            entry, status = tarfile.TarInfo(name), path.stat()
            entry.size, entry.mode = status.st_size, 0o600 | status.st_mode & 0o100
            with path.open("rb") as file:
                archive.addfile(entry, file)
        entry = tarfile.TarInfo(STAMP_FILE)
        entry.size, entry.mode = len(stamp.encode()), 0o600
        archive.addfile(entry, io.BytesIO(stamp.encode()))


def _find_copy_cause(result: CommandResult) -> str:
    """Return the most informative line among the error messages of tar and sh."""
    lines = [line.strip() for line in result.errors.splitlines() if line.strip()]
    for line in lines:
        if re.search("no space left|quota exceeded", line, re.IGNORECASE):
            return f"{one_line(line.rpartition(': ')[2])}: free disk space on that host, or give another directory"
    return one_line(lines[-1]) if lines else f"exit code {result.exit_code}"
