"""Scripts that run on other hosts, and copies of files, by the system's ssh client with the user's configuration.

The other host needs sshd, sh and tar.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
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
from typing import IO, Any, TypeVar, cast

from dicompiler.base.captured_output import KEPT_BYTES, CapturedOutput
from dicompiler.base.errors import ALLOW_MORE_TIME, DicompilerError, RunError, one_line
from dicompiler.target.remote.hosts import DeviceLocation

Item = TypeVar("Item")
Result = TypeVar("Result")

CONNECT_TIMEOUT_S = 10
"""Seconds allowed for a host to accept a connection."""
KEEPALIVE_INTERVAL_S = 5
"""Seconds between ssh's own keepalive messages. ssh gives up after three without an answer."""
SSH_ERROR_EXIT_CODE = 255
"""The exit code of ssh if ssh itself fails. All other exit codes are those of the script on the other host."""
STAMP_FILE = ".dicompiler"
"""The file that identifies the content of a copied directory. A directory without this file is never replaced."""
LINE_PREFIX = "dicompiler: "
"""The prefix of lines that our scripts print. Lines without it are output of the other host's login shell."""
_MAX_FILE_NAME_CHARS = 50_000
"""Total length of file names that a command line can contain on all systems."""
_RATE_STEP_BYTES = 16 << 10
"""Number of bytes that are sent at once if the rate is limited."""
SSH_OPTIONS = {
    "BatchMode": "yes",  # ssh must fail and not ask for a password, because no user may be at a terminal.
    "ConnectTimeout": str(CONNECT_TIMEOUT_S),
    "ServerAliveInterval": str(KEEPALIVE_INTERVAL_S),
    # Two connections to one host cannot both forward the same port, so the forwarding of the user's configuration is
    # off.
    "ClearAllForwardings": "yes",
    "ControlMaster": "no",  # A shared connection would keep this ssh process running after its command has ended.
    "RemoteCommand": "none",
}
PERMISSION_DENIED = "permission denied"
SSH_REMEDIES = (
    (r"permissions \S+ for '(?P<key>.+)' are too open", "ssh ignores a key that others can read: run "
     "'chmod 600 {key}' on this machine"),
    (r"bad owner or permissions on (?P<key>\S+)", "only you may have write access: run 'chmod 600 {key}' on this "
     "machine"),
    (r"host key for \S+ has changed", "if you have installed the host again, remove its old key "
     "('ssh-keygen -R {host}'), and connect once by hand ('ssh {destination}'); otherwise somebody else may answer in "
     "its place"),
    (r"host key verification failed", "its host key is unknown here: connect once by hand "
     "('ssh {destination}') and check it"),
    (r"too many authentication failures", "ssh offers more keys than the host allows: name the right one (identity in "
     "{file})"),
    (r"agent refused operation|signing failed", "the agent does not sign with this key: unlock it, or load the key "
     "again ('ssh-add')"),
    (r"permission denied \((?!.*publickey)", "the host accepts no keys: set 'PubkeyAuthentication yes' in "
     "sshd_config there"),
    (PERMISSION_DENIED, "authorize your key ('ssh-copy-id {destination}'), or name the right one (identity in "
     "{file})"),
    (r"no matching (host key type|key exchange method|cipher|mac)", "its sshd and this ssh have no algorithm in "
     "common: update the older one"),
    (r"could not resolve", "check the value of 'ssh' for this host in {file}"),
    (r"during banner exchange|kex_exchange_identification|^connection (closed|reset) by", "sshd there closes the "
     "connection: look at its log ('journalctl -u ssh'); it may refuse this address or user, or have too many "
     "connections (MaxStartups)"),
    (r"no route|unreachable|timed out|refused|not responding", "is it on, and does sshd run there? (ssh, port in "
     "{file})"),
)  # fmt: skip
"""Patterns of ssh's messages, and the remedy for each, in the order in which they are searched.

A remedy can have placeholders: {destination} (of ssh), {host}, {file} (the hosts file), and {key} (the key file in
ssh's message).
"""
KEY_REMEDIES = (
    (r"incorrect passphrase", "the key {key} has a passphrase, for which ssh cannot ask here: load the key into an "
     "agent ('ssh-add {key}')"),
    (r"invalid format|error in libcrypto|not a .*key file", "{key} is not a private key: name the private key, which "
     "has no suffix .pub (identity in {file})"),
)  # fmt: skip
"""Patterns of ssh-keygen's messages about keys that ssh silently ignores, and the remedy for each."""
SHELL_MARKER = f"{LINE_PREFIX}the shell runs"
"""The line that each script first writes to stderr. Without it, the host ran something else instead of the script."""
SHELL_REMEDIES = (
    (r"not available", "the account has no login shell: set one there ('sudo chsh -s /bin/sh USER')"),
    (r"password change required|password has expired|account has expired", "log in once by hand ('ssh -t "
     "{destination}') and change the password"),
    (r"", "the account's login shell, a ForceCommand in sshd_config or a command= in authorized_keys replaces "
     "commands: allow them for this account, or use another one (ssh in {file})"),
)  # fmt: skip
"""Patterns of the output of hosts that did not run a script, and the remedy for each."""

ASSEMBLED_SUFFIX = ".pieces"
"""Suffix of the directory in which files are assembled before they are moved. UNPACK_SCRIPT removes it in any case."""

# Unpack a tar archive from stdin into a new directory, which replaces the target directory only if the archive is
# complete, i.e. contains the stamp file, which is its last file. Arguments: the target directory, the name of the stamp
# file, and for each file that is on the host already, its path and its name in the target directory.
UNPACK_SCRIPT = f"""
set -eu; umask 077; target=$1; stamp=$2;
beside=$(dirname "$1")/.$(basename "$1"); shift 2; new=$beside.new; old=$beside.old;
trap 'rm -rf "$new" "$beside{ASSEMBLED_SUFFIX}"' EXIT; trap 'exit 1' HUP INT TERM PIPE;
if [ -e "$target" ] && ! [ -f "$target/$stamp" ] && [ -n "$(ls -A "$target")" ]; then
  echo "$target holds something else: give another directory, or remove it" >&2; exit 1; fi;
rm -rf "$new" "$old"; mkdir -p "$new";
while [ $# -gt 1 ]; do if [ -e "$1" ]; then
  mkdir -p "$(dirname "$new/$2")"; ln "$1" "$new/$2" 2>/dev/null || cp -pPR "$1" "$new/$2";
fi; shift 2; done;
tar -xomf - -C "$new";
if ! [ -f "$new/$stamp" ]; then echo "the copy was cut short" >&2; exit 1; fi;
if [ -e "$target" ]; then mv "$target" "$old"; fi;
mv "$new" "$target"; rm -rf "$old"
"""

# Remove directories and files, and print "yes" if any was removed, otherwise "no". Arguments: the name of the stamp
# file, then directories and files. A directory without a stamp file is not removed.
REMOVE_SCRIPT = f"""
stamp=$1; shift; removed=no;
for path in "$@"; do
  if [ -f "$path/$stamp" ] || [ -f "$path" ]; then rm -rf "$path" || exit 1; removed=yes; fi;
  rmdir "$(dirname "$path")" 2>/dev/null;
done;
rmdir "$(dirname "$1")" 2>/dev/null;
echo "{LINE_PREFIX}$removed"; exit 0
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


def assembled_directory(target: str) -> str:
    """Return the directory on another host in which `copy_files` assembles files before it links them into `target`."""
    parent, name = posixpath.split(target)
    return posixpath.join(parent, f".{name}{ASSEMBLED_SUFFIX}")


def quote_path(path: str) -> str:
    """Quote a path on another host for that host's shell. Relative paths are relative to the user's home there."""
    if path.startswith("/"):
        return shlex.quote(path)
    return f'"$HOME"/{shlex.quote(path.removeprefix("~/"))}'


def build_command(location: DeviceLocation, script: str, words: Iterable[str]) -> list[str]:
    """Build the ssh command line that runs an sh script on a device's host.

    `words` are the script's arguments, quoted for the shell.

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
    if location.known_hosts is not None:
        # ssh splits the value at spaces and expands %, so the path is quoted and each % is doubled.
        quoted = str(location.known_hosts).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
        options += ["-o", f'UserKnownHostsFile="{quoted}"']
    # Some login shells do not accept quoted text of several lines, so the script becomes one line.
    remote = " ".join(["exec sh -c", shlex.quote(" ".join(script.split())), "sh", *words])
    return [program, "-T", *options, "--", location.ssh_destination, remote]


def english_environment() -> dict[str, str]:
    """Return this process's environment with a locale that makes ssh's messages English."""
    return os.environ | {"LC_ALL": "C"}


def get_address(location: DeviceLocation) -> str:
    """Return the address or name of a device's host according to ssh's configuration.

    Raises:
        DicompilerError: ssh rejects the destination.
    """
    result = _run_locally(_show_configuration_command(location))
    match = re.search(r"^hostname (\S+)$", result.stdout, re.MULTILINE)
    if result.returncode or match is None:
        raise DicompilerError(f"{location.title}: {explain_failure(location, result.stderr)}")
    return match[1]


def _show_configuration_command(location: DeviceLocation) -> list[str]:
    program, *arguments = build_command(location, "", ())
    return [program, "-G", *arguments[:-1]]  # With -G, ssh prints its configuration for the host and does not connect.


def _run_locally(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program of the ssh client on this host, without a terminal in which it could ask for a passphrase."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=english_environment(),
        start_new_session=True,
        check=False,
    )


def explain_failure(location: DeviceLocation, errors: str, file: str = "hosts.toml") -> str:
    """Return the cause of a failure of ssh, and the remedy if it is known, in one line.

    `errors` are ssh's messages, and `file` is the path of the hosts file, which the remedy names.
    """
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    for pattern, remedy in SSH_REMEDIES:
        for line in lines:
            if match := re.search(pattern, line, re.IGNORECASE):
                key = match.groupdict().get("key")
                if pattern == PERMISSION_DENIED:
                    remedy, key = _find_unusable_key(location) or (remedy, key)
                return f"{one_line(line).rstrip('.')}: {_fill_remedy(remedy, location, file, key)}"
    return one_line(lines[-1]) if lines else "the ssh connection was lost"


def _fill_remedy(remedy: str, location: DeviceLocation, file: str, key: str | None = None) -> str:
    destination = location.ssh_destination
    host = destination.rpartition("@")[2]
    known_host = host if location.port is None else f"[{host}]:{location.port}"
    words = destination if location.port is None else f"-p {location.port} {destination}"
    return remedy.format(destination=words, host=known_host, file=file, key=key)


def _find_unusable_key(location: DeviceLocation) -> tuple[str, str] | None:
    """Return a remedy and the file of a key that ssh has silently ignored; None if ssh had a usable key."""
    if not all(map(shutil.which, ("ssh-add", "ssh-keygen"))):
        return None
    configuration = _run_locally(_show_configuration_command(location)).stdout
    agent = _run_locally(["ssh-add", "-l"]).stdout
    unusable = None
    for file in re.findall(r"^identityfile (.+)$", configuration, re.MULTILINE):
        path = os.path.expanduser(file)
        if not os.path.isfile(path):
            continue
        fingerprint = re.search(r"SHA256:\S+", _run_locally(["ssh-keygen", "-l", "-f", path]).stdout)
        opened = _run_locally(["ssh-keygen", "-y", "-P", "", "-f", path])
        if (fingerprint and fingerprint[0] in agent) or opened.returncode == 0:
            return None
        found = (remedy for pattern, remedy in KEY_REMEDIES if re.search(pattern, opened.stderr))
        unusable = unusable or next(((remedy, path) for remedy in found), None)
    return unusable


def _explain_missing_shell(location: DeviceLocation, result: CommandResult, file: str) -> str:
    """Return why a host did not run a script, and the remedy, in one line.

    `result` has the output of the program that the host ran instead.
    """
    lines = [line.strip() for line in f"{result.output}\n{result.errors}".splitlines() if line.strip()]
    for pattern, remedy in SHELL_REMEDIES:
        line = next((line for line in reversed(lines) if re.search(pattern, line, re.IGNORECASE)), "")
        if line or not pattern:
            answer = f"{one_line(line, 200)!r}" if line else "nothing"
            remedy = _fill_remedy(remedy, location, file)
            return f"it does not run commands, but answers {answer} (exit code {result.exit_code}): {remedy}"
    raise AssertionError(SHELL_REMEDIES)


class UnreachableHost(RunError):
    """The error for a failure of ssh itself. The attribute `reason` is the cause without the name of the host."""

    def __init__(self, location: DeviceLocation, reason: str) -> None:
        super().__init__(f"{location.title}: {reason}")
        self.reason = reason


class RemoteCommands:
    """Runner of scripts on other hosts. An error of one script, or an interrupt, ends all other scripts.

    Args:
        deadline_s: Time of `time.monotonic()` at which all scripts must have ended.
        file: Path of the hosts file, for error messages.
    """

    def __init__(self, deadline_s: float, file: str) -> None:
        self._deadline_s, self._file = deadline_s, file
        self._running_processes: set[subprocess.Popen[bytes]] = set()
        self._lock, self._is_ended = threading.Lock(), False

    def run_parallel(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Call the function `work` for all items at the same time, and return its results in the order of the items.

        If a call fails, all running scripts are ended, and the error of the first failed item is raised.
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
            max_output_bytes: Size of the output above which only its beginning and its end are kept.

        Raises:
            UnreachableHost: ssh itself has failed.
            RunError: The script did not end in time, or the host does not run scripts.
        """
        process = self._start(build_command(location, f"echo {shlex.quote(SHELL_MARKER)} >&2; {script}", words))
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        output, errors = CapturedOutput(process.stdout, max_output_bytes), CapturedOutput(process.stderr)
        timer = threading.Timer(max(0.0, self._deadline_s - time.monotonic()), process.kill)
        timer.start()
        try:
            # The pipe breaks if the script ends before it has read all input. This error is ignored, because the output
            # of the script has the cause.
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
        before_script, marker, script_errors = texts[1].partition(f"{SHELL_MARKER}\n")
        result = CommandResult(exit_code, texts[0], before_script + script_errors)
        if exit_code == SSH_ERROR_EXIT_CODE:
            raise UnreachableHost(location, explain_failure(location, result.errors, self._file))
        if exit_code < 0:
            raise RunError(f"{location.title}: its host did not answer in time: {ALLOW_MORE_TIME}")
        if not marker:
            raise RunError(f"{location.title}: {_explain_missing_shell(location, result, self._file)}")
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
        other_copies: Mapping[str, str] | None = None,
        bytes_per_s: float = 0.0,
    ) -> int:
        """Replace the content of a directory on a device's host by local files. Return the number of bytes sent.

        The directory is replaced as a whole or not at all. Only its owner can read the files.

        Args:
            location: How to reach the host.
            target: The directory on the host.
            files: Local files by their path in the directory.
            stamp: Text that identifies the content. It is written into the directory's STAMP_FILE.
            kept_names: Paths of files and directories in the directory that are kept, and are not sent again.
            other_copies: Paths of equal files elsewhere on the host, by path in the directory. They are linked and not
                sent.
            bytes_per_s: Largest number of bytes that are sent in a second; 0 means no limit.

        Raises:
            RunError: The directory exists without a STAMP_FILE, or the disk is full.
        """
        present = {name: f"{target}/{name}" for name in sorted(kept_names)} | dict(other_copies or {})
        if sum(len(name) + len(path) for name, path in present.items()) > _MAX_FILE_NAME_CHARS:
            present = {}
        sent = {name: path for name, path in files.items() if name not in present}
        words = [quote_path(target), STAMP_FILE]
        words += [word for name, path in present.items() for word in (quote_path(path), shlex.quote(name))]

        def send(stream: IO[bytes]) -> None:
            _write_archive(limit_rate(stream, bytes_per_s), sent, stamp)

        result = self.run(location, UNPACK_SCRIPT, words, send)
        if result.exit_code:
            raise RunError(f"{location.title}: files cannot be copied to {target}: {_find_copy_cause(result)}")
        return sum(path.stat().st_size for path in sent.values())

    def remove_copies(self, location: DeviceLocation, paths: Sequence[str]) -> bool:
        """Remove directories that `copy_files` made, and files, from a device's host. Return True if any existed.

        Directories without a STAMP_FILE are kept. Parent directories are removed if they are then empty.

        Args:
            location: How to reach the host.
            paths: The directories and files on the host. Errors name the first one.

        Raises:
            RunError: A directory cannot be removed.
        """
        result = self.run(location, REMOVE_SCRIPT, [STAMP_FILE, *map(quote_path, paths)])
        if result.exit_code or not result.prefixed_lines:
            cause = one_line(result.errors) or f"exit code {result.exit_code}"
            raise RunError(f"{location.title}: files cannot be removed from {paths[0]}: {cause}")
        return result.prefixed_lines[-1] == "yes"


class _RateLimitedStream(io.RawIOBase):
    """A writable stream that passes its data on to another stream, at most `bytes_per_s` bytes per second."""

    def __init__(self, stream: IO[bytes], bytes_per_s: float) -> None:
        self._stream, self._bytes_per_s = stream, bytes_per_s
        self._start_s, self._passed = time.monotonic(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        for start in range(0, len(view), _RATE_STEP_BYTES):
            self._passed += self._stream.write(view[start : start + _RATE_STEP_BYTES])
            self._stream.flush()
            time.sleep(max(0.0, self._start_s + self._passed / self._bytes_per_s - time.monotonic()))
        return len(view)


def limit_rate(stream: IO[bytes], bytes_per_s: float) -> IO[bytes]:
    """Return a stream that passes data on to `stream`, at most `bytes_per_s` bytes per second; 0 means no limit."""
    return cast("IO[bytes]", _RateLimitedStream(stream, bytes_per_s)) if bytes_per_s else stream


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
    """Return the most informative line among the error messages of tar and sh after a failed copy."""
    lines = [line.strip() for line in result.errors.splitlines() if line.strip()]
    for line in lines:
        if re.search("no space left|quota exceeded", line, re.IGNORECASE):
            return f"{one_line(line.rpartition(': ')[2])}: free disk space on that host, or give another directory"
    return one_line(lines[-1]) if lines else f"exit code {result.exit_code}"
