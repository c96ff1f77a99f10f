"""The daemon of a resident device: creates the onnxruntime sessions once, and then serves one client after another.

A client is a coordinator (a process that supplies frames), which must prove that it belongs to the cluster. While the
daemon runs, a state file next to the device's directory has its process ID and address.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import queue
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from . import MANIFEST_FORMAT
from .addresses import bind_socket, find_local_host, join_address
from .channel import MessageChannel
from .device import ConnectionSettings, DeviceRun, make_checked_sessions
from .handshake import (
    COORDINATOR_NAME,
    GREETING_TIMEOUT_S,
    TOKEN_VARIABLE,
    ConnectionAcceptor,
    ConnectionQueue,
    RunCredentials,
    derive_token,
)
from .integrity import FileIntegrity, read_manifest
from .protocol import MessageType, ProtocolError
from .segments import one_line, peak_memory_bytes
from .transport import COORDINATOR_IDENTITY, TlsKeys, check_encryption, check_identity

BUSY_WAIT_S = 2.0
"""Seconds to wait until the previous client has disconnected, before the next client is refused."""
MAX_LOG_BYTES = 1 << 20
"""Size above which a log's content is moved to FILE.1, and the log is emptied."""


class DaemonLog:
    """The messages of a daemon and all output of its process, in a file if a path is given."""

    def __init__(self, path: Path | None) -> None:
        # The lock is needed, because several threads write to the log.
        self._path, self._lock = path, threading.RLock()
        if path is not None:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.close(file)

    def write(self, message: str) -> None:
        with self._lock:
            print(time.strftime("%Y-%m-%d %H:%M:%S"), message, file=sys.stderr, flush=True)
            if self._path is not None and os.fstat(2).st_size > MAX_LOG_BYTES:
                # The file is copied and truncated instead of renamed, because this process and its libraries continue
                # to write to the open file.
                shutil.copyfile(self._path, f"{self._path}.1")
                os.truncate(self._path, 0)


class DeviceDaemon:
    """The daemon of one device, which serves one client (coordinator) after another by a DeviceRun.

    Attributes:
        address: Host and port at which clients and other devices connect.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Mapping[str, Any],
        listener: socket.socket,
        keys: TlsKeys | None,
        token: str,
        is_insecure: bool,
        log: DaemonLog,
    ) -> None:
        """Check the settings of a device.

        `listener` is bound to an address already. Without TLS `keys`, clients and other devices prove by the secret
        `token` that they belong to the cluster. Raise ValueError if there is neither, or if other hosts could connect
        without TLS and `is_insecure` is false.
        """
        self.address = listener.getsockname()[:2]
        check_encryption(self.address[0], keys, is_insecure)
        if keys is None and not token:
            raise ValueError(
                f"clients cannot prove that they belong to the cluster: pass keys (--keys), or set {TOKEN_VARIABLE}"
            )
        self._directory, self._manifest, self._listener = directory, manifest, listener
        self._keys, self._token, self._is_insecure, self._log = keys, "" if keys else token, is_insecure, log
        self._name: str = manifest["device"]
        self._started_at, self._last_error = time.time(), ""
        self._counters = dict.fromkeys(("runs", "frames", "replayed_frames", "failures"), 0)
        self._condition = threading.Condition()
        self._client, self._client_since = "", 0.0
        self._device: DeviceRun | None = None
        self._arriving_peers = ConnectionQueue()
        self._requests: queue.SimpleQueue[tuple[MessageChannel, RunCredentials, float, float] | None] = (
            queue.SimpleQueue()
        )

    def prepare(self, threads: int) -> None:
        """Create the onnxruntime sessions, check the files and accept connections.

        `threads` is the number of computing threads; 0 means the number in the manifest. Raise ValueError for a damaged
        file.
        """
        self._threads = threads
        self._create_sessions()
        self._acceptor = ConnectionAcceptor(self._listener, self._keys, self._greet_connection, self._is_member_host)

    def _create_sessions(self) -> None:
        files = FileIntegrity(self._directory, self._manifest)
        threads = self._threads or min(self._manifest["threads"], os.cpu_count() or 1)
        self._sessions = make_checked_sessions(files, self._directory, self._manifest, threads)
        files.check()

    def _load_artifact(self) -> None:
        """Load the artifact that has replaced the old one in the device's directory.

        If that fails, raise ProtocolError and let the daemon end.
        """
        try:
            manifest = read_manifest(self._directory / "manifest.json")
            if (manifest.get("format"), manifest.get("device")) != (MANIFEST_FORMAT, self._name):
                raise ValueError("its manifest is of another version or device")
            # The old sessions are released first, because the board may not have memory for both.
            self._manifest, self._sessions = manifest, []
            self._create_sessions()
        except Exception as error:  # Exception is the only class that all errors of onnxruntime have in common.
            self._log.write(f"the new artifact cannot be loaded: {one_line(error)}")
            self._requests.put(None)
            raise ProtocolError(f"the new artifact cannot be loaded: {one_line(error)}") from None
        self._log.write(f"loaded the artifact with the digest {self._manifest['digest']}")

    def run(self) -> None:
        """Serve one client after another; return if a new artifact (compiled program) could not be loaded."""
        self._log.write(f"{self._name} waits for clients at {join_address(*self.address)}")
        while (request := self._requests.get()) is not None:
            self._run_device(*request)

    def _run_device(
        self, channel: MessageChannel, credentials: RunCredentials, timeout_s: float, heartbeat_s: float
    ) -> None:
        settings = ConnectionSettings(time.monotonic() + timeout_s, self._keys, self._is_insecure, heartbeat_s)
        device = DeviceRun(self._directory, self._manifest, settings, credentials, is_resident=True)
        with self._condition:
            self._device, self._arriving_peers = device, ConnectionQueue()
        result = "finished"
        try:
            device.serve(channel, self.address, self._arriving_peers, self._sessions)
        except Exception as error:
            device.send_error(error)
            result = self._last_error = one_line(error)
        with self._condition:
            self._device = None
            self._add_counters(self._counters, device)
        device.close()
        self._log.write(f"run of {self._client}, {device.finished_frames} frames: {result}")
        self._release_client()

    @staticmethod
    def _add_counters(counters: dict[str, int], device: DeviceRun) -> None:
        counters["runs"] += 1
        counters["frames"] += device.finished_frames
        counters["replayed_frames"] += device.replayed_frames
        counters["failures"] += device.failed_peers

    def status(self) -> dict[str, Any]:
        """Return the daemon's status as a JSON object, whose keys are fields of `DeviceStatus`."""
        with self._condition:
            counters, device = dict(self._counters), self._device
            client = {"client": self._client, "client_since": self._client_since} if self._client else {}
        if device is not None:
            self._add_counters(counters, device)
        with open("/proc/self/statm", encoding="ascii") as file:
            memory = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {
            "device": self._name,
            "digest": self._manifest["digest"],
            "pid": os.getpid(),
            "since": self._started_at,
            **counters,
            "memory": memory,
            "memory_peak": peak_memory_bytes(),
            "error": self._last_error,
            **client,
        }

    # -- handshakes, each in its own thread

    def _is_member_host(self, host: str) -> bool:
        device = self._device
        return host == self._client or (device is not None and device.peers.is_member_host(host))

    def _greet_connection(self, channel: MessageChannel, host: str, deadline: float) -> None:
        hello = channel.receive_greeting(deadline)
        if hello.get("device") == COORDINATOR_NAME:
            self._greet_client(hello, channel, host, deadline)
            return
        with self._condition:
            device, arriving = self._device, self._arriving_peers
        if device is None:
            raise ProtocolError("the device takes part in no run at present")
        try:
            accepted = device.peers.accept(hello, channel, deadline)
        except ProtocolError as error:
            arriving.last_refusal = f"{host}: {error}"
            raise
        except Exception as error:
            arriving.put(error)
            return
        if accepted is not None:
            arriving.put(accepted)

    def _greet_client(self, hello: Mapping[str, Any], channel: MessageChannel, host: str, deadline: float) -> None:
        check_identity(channel.identity, COORDINATOR_IDENTITY, "the client")
        # Each end sends a new random number (nonce), so that an attacker cannot replay a recorded handshake.
        own_nonce, client_nonce = secrets.token_hex(16), str(hello.get("nonce"))[:64]
        credentials = RunCredentials("", derive_token(self._token, client_nonce, own_nonce))
        proof = credentials.make_proof(self._name, COORDINATOR_NAME)
        channel.send_greeting(MessageType.HELLO, {"device": self._name, "nonce": own_nonce, **proof}, deadline)
        request = channel.receive_greeting(deadline)
        credentials.check(request, COORDINATOR_NAME, self._name)
        if request.get("request") == "status":
            channel.send_greeting(MessageType.HELLO, self.status(), deadline)
            channel.close()
            return
        if request.get("request") == "load":
            self._take_client(host)
            try:
                self._load_artifact()
            finally:
                self._release_client()
            channel.send_greeting(MessageType.HELLO, self.status(), time.monotonic() + GREETING_TIMEOUT_S)
            channel.close()
            return
        if request.get("digest") != self._manifest["digest"]:
            raise ProtocolError("the device runs another artifact: stop the device first ('dicompiler deploy --stop')")
        try:
            run, times = str(request["run"]), (float(request["timeout"]), float(request["heartbeat"]))
            if not all(0 < seconds < math.inf for seconds in times):
                raise ValueError(times)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"invalid request: {error!r}") from None
        self._take_client(host)
        self._requests.put((channel, RunCredentials(run, derive_token(self._token, run)), *times))

    def _take_client(self, host: str) -> None:
        """Reserve the device for a client, after the previous client has disconnected.

        Raise ProtocolError if the previous client stays connected for BUSY_WAIT_S.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: not self._client, BUSY_WAIT_S):
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._client_since))
                raise ProtocolError(
                    f"the device serves another client, {self._client}, since {since}: wait until that client ends"
                )
            self._client, self._client_since = host, time.time()

    def _release_client(self) -> None:
        with self._condition:
            self._client = ""
            self._condition.notify_all()


class DaemonLockFile:
    """The state file of a daemon, with its process ID and address; it is locked while the daemon runs."""

    def __init__(self, directory: Path, name: str) -> None:
        """Lock the state file of the device `name`; raise ValueError if another daemon of this device runs."""
        directory.mkdir(mode=0o700, exist_ok=True)
        self._path = directory / f"{name}.json"
        self._file: IO[str] = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115  (open as long as the process)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                "the device is running already: stop the device first ('dicompiler deploy --stop')"
            ) from None
        self.write({"pid": os.getpid()})

    def write(self, content: Mapping[str, Any]) -> None:
        self._file.truncate(0)
        self._file.write(json.dumps(content))
        self._file.flush()

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def bind_listener(listen: tuple[str, int] | None, coordinator: tuple[str, int] | None) -> socket.socket:
    """Return a socket that is bound to the address `listen`, but does not accept connections yet.

    By default, it is bound to a free port of the local address from which the coordinator is reached. Raise ValueError
    if neither address is given, or if `listen` cannot be used.
    """
    if listen is None and coordinator is None:
        raise ValueError("no address given: add --listen HOST:PORT")
    if listen is None:
        assert coordinator is not None
        listen = find_local_host(*coordinator), 0
    return bind_socket(*listen, listens=False)


def _call_at_signals(end: Callable[[], object]) -> None:
    """Call `end` in its own thread when SIGTERM or SIGINT arrives.

    The main thread cannot call it, because it may be computing or blocked in a system call.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(sender.detach())

    def wait() -> None:
        receiver.recv(1)
        end()

    threading.Thread(target=wait, daemon=True).start()


def run_daemon(
    daemon: DeviceDaemon, lock_file: DaemonLockFile, threads: int, log: DaemonLog, announce: int | None
) -> int:
    """Run the daemon until a signal ends it, or until a new artifact (compiled program) cannot be loaded.

    `threads` is the number of computing threads; 0 means the number in the manifest. When clients can connect, the
    process ID and the address are written to the file descriptor `announce`.
    """

    def end() -> None:
        log.write("ended by a signal")
        lock_file.remove()
        os._exit(0)

    _call_at_signals(end)
    try:
        daemon.prepare(threads)
        state = {"pid": os.getpid(), "address": list(daemon.address)}
        lock_file.write(state)
        if announce is not None:
            with os.fdopen(announce, "w", encoding="utf-8") as pipe:
                pipe.write(json.dumps(state))
        daemon.run()
    finally:
        lock_file.remove()
    return 0
