"""A device that stays: it makes its sessions once, then takes part in one run after another, for whoever of the cluster
calls.

In: calls of clients that show that they belong here, one at a time. Out: runs, each as if there was no other; answers
to who asks how it does; a log. Beside the device's directory lies a file for as long as it runs: who it is.
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

from .channel import MessageChannel
from .device import DeviceRun, make_checked_sessions
from .handshake import COORDINATOR_NAME, ConnectionAcceptor, ConnectionQueue, RunCredentials, derive_token
from .heap import peak_memory_bytes
from .integrity import FileIntegrity
from .protocol import MessageType, ProtocolError
from .transport import (
    COORDINATOR_IDENTITY,
    TlsKeys,
    check_encryption,
    check_identity,
    join_address,
    listen_error,
)
from .values import one_line

BUSY_WAIT_S = 2.0
"""Seconds in which a client that has gone can be forgotten before the next one is sent away."""
MAX_LOG_BYTES = 1 << 20
"""Bytes of a log: then it becomes the one before, of which there is one."""


class DaemonLog:
    """What this process writes, also its libraries, goes to the end of the file at `path`, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, threading.RLock()  # a signal may come while a line is written
        if path is not None:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.close(file)

    def write(self, words: str) -> None:
        """A line with the time."""
        with self._lock:
            print(time.strftime("%Y-%m-%d %H:%M:%S"), words, file=sys.stderr, flush=True)
            if self._path is not None and os.fstat(2).st_size > MAX_LOG_BYTES:
                # What else writes there holds the same file open.
                shutil.copyfile(self._path, f"{self._path}.1")
                os.truncate(self._path, 0)


class DeviceDaemon:
    """Device of `manifest` in `directory`, called at `listener`, which is bound. token: what shows who belongs here
    where there are no keys. ValueError where connections would go in the clear to other hosts, or nothing tells who
    belongs here."""

    def __init__(
        self,
        directory: Path,
        manifest: Mapping[str, Any],
        listener: socket.socket,
        keys: TlsKeys | None,
        token: str,
        insecure: bool,
        log: DaemonLog,
    ) -> None:
        self.address = listener.getsockname()[:2]
        check_encryption(self.address[0], keys, insecure)
        if keys is None and not token:
            raise ValueError("without keys there must be a token, which shows who belongs to the cluster")
        self._directory, self._manifest, self._listener = directory, manifest, listener
        self._keys, self._token, self._insecure, self._log = keys, "" if keys else token, insecure, log
        self._name: str = manifest["device"]
        self._started_at, self._last_error = time.time(), ""
        self._counters = dict.fromkeys(("runs", "frames", "replays", "losses"), 0)
        self._condition = threading.Condition()
        self._client, self._client_since = "", 0.0
        self._device: DeviceRun | None = None
        self._peers = ConnectionQueue()
        self._requests: queue.SimpleQueue[tuple[MessageChannel, RunCredentials, float, float]] = queue.SimpleQueue()

    def prepare(self, threads: int) -> None:
        """Makes the sessions and checks the files; from then on it can be called. ValueError, OSError."""
        files = FileIntegrity(self._directory, self._manifest)
        self._sessions = make_checked_sessions(files, self._directory, self._manifest, threads)
        files.check()
        self._listener.listen(64)
        self._entrance = ConnectionAcceptor(self._listener, self._keys, self._greet_connection)

    def run(self) -> None:
        """One run after another, for ever."""
        self._log.write(f"{self._name} waits for clients at {join_address(*self.address)}")
        while True:
            self._run_device(*self._requests.get())

    def _run_device(
        self, channel: MessageChannel, member: RunCredentials, timeout_s: float, heartbeat_s: float
    ) -> None:
        until = time.monotonic() + timeout_s
        device = DeviceRun(
            self._directory, self._manifest, until, self._keys, None, self._insecure, heartbeat_s, member, stays=True
        )
        with self._condition:
            self._device, self._peers = device, ConnectionQueue()
        why = "it has ended"
        try:
            device.serve(channel, self.address, self._peers, self._sessions)
        except Exception as error:
            device.send_error(error)
            why = self._last_error = one_line(error)
        with self._condition:
            self._device = None
            self._add_counters(self._counters, device)
        device.close()
        self._log.write(f"the run of {self._client}, {device.finished_frames} frames: {why}")
        with self._condition:
            self._client = ""
            self._condition.notify_all()

    @staticmethod
    def _add_counters(told: dict[str, int], device: DeviceRun) -> None:
        told["runs"] += 1
        told["frames"] += device.finished_frames
        told["replays"] += device.replayed_frames
        told["losses"] += device.failed_peers

    def status(self) -> dict[str, Any]:
        """How it does: what StatusReport in the documentation says."""
        with self._condition:
            told, device = dict(self._counters), self._device
            client = {"client": self._client, "client_since": self._client_since} if self._client else {}
        if device is not None:
            self._add_counters(told, device)
        with open("/proc/self/statm", encoding="ascii") as file:
            memory = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        known = {
            "device": self._name,
            "digest": self._manifest["digest"],
            "pid": os.getpid(),
            "since": self._started_at,
        }
        return {
            **known,
            **told,
            "memory": memory,
            "memory_peak": peak_memory_bytes(),
            "error": self._last_error,
            **client,
        }

    # -- who calls, each in a thread of its own: see greeting.Meet

    def _greet_connection(self, channel: MessageChannel, host: str, deadline: float) -> None:
        hello = channel.receive_greeting(deadline)
        if hello.get("device") == COORDINATOR_NAME:
            self._greet_client(hello, channel, host, deadline)
            return
        with self._condition:
            device, guests = self._device, self._peers
        if device is None:
            raise ProtocolError("no run is on")
        try:
            guest = device.accept_peer(hello, channel, deadline)
        except ProtocolError as error:
            guests.last_refusal = f"{host}: {error}"
            raise
        except Exception as error:
            guests.put(error)
            return
        if guest is not None:
            guests.put(guest)

    def _greet_client(self, hello: Mapping[str, Any], channel: MessageChannel, host: str, deadline: float) -> None:
        check_identity(channel.identity, COORDINATOR_IDENTITY, "the client")
        # Of both ends something new, so that nobody can say again what was once said.
        own, theirs = secrets.token_hex(16), str(hello.get("nonce"))[:64]
        member = RunCredentials("", derive_token(self._token, theirs, own))
        answer = {"device": self._name, "nonce": own, **member.hello(self._name, COORDINATOR_NAME)}
        channel.send_greeting(MessageType.HELLO, answer, deadline)
        wish = channel.receive_greeting(deadline)
        member.check(wish, COORDINATOR_NAME, self._name)
        if wish.get("wants") == "status":
            channel.send_greeting(MessageType.HELLO, self.status(), deadline)
            channel.close()
            return
        if wish.get("digest") != self._manifest["digest"]:
            raise ProtocolError("it is kept running with another artifact: stop it first ('dicompiler deploy --stop')")
        try:
            run, times = str(wish["run"]), (float(wish["timeout"]), float(wish["heartbeat"]))
            if not all(0 < one < math.inf for one in times):
                raise ValueError(times)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"its wish is not as agreed: {error!r}") from None
        with self._condition:
            if not self._condition.wait_for(lambda: not self._client, BUSY_WAIT_S):
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._client_since))
                raise ProtocolError(f"it serves another client, {self._client}, since {since}: wait until that ends")
            self._client, self._client_since = host, time.time()
        self._requests.put((channel, RunCredentials(run, derive_token(self._token, run)), *times))


class DaemonLockFile:
    """The file that says that the device of that name runs, in `place`. ValueError where another process has it."""

    def __init__(self, place: Path, name: str) -> None:
        place.mkdir(mode=0o700, exist_ok=True)
        self._path = place / f"{name}.json"
        self._file: IO[str] = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115  (held as long as the process)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError("it is kept running already: stop it first ('dicompiler deploy --stop')") from None
        self.write({"pid": os.getpid()})

    def write(self, words: Mapping[str, Any]) -> None:
        """What it says."""
        self._file.truncate(0)
        self._file.write(json.dumps(words))
        self._file.flush()

    def release(self) -> None:
        """Takes it away."""
        self._path.unlink(missing_ok=True)


def bind_listener(listen: tuple[str, int] | None, control: tuple[str, int] | None) -> socket.socket:
    """A socket bound to `listen`; without, to any port of the address by which `control` is reached. Nobody can connect
    yet. ValueError where there is neither."""
    if listen is None and control is None:
        raise ValueError("say where it is reached (--listen)")
    family = socket.AF_INET6 if ":" in (listen or control or ("", 0))[0] else socket.AF_INET
    if listen is None:
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            assert control is not None
            way.connect((control[0], 9))  # sends nothing: it finds the way
            listen = way.getsockname()[0], 0
    found = socket.socket(family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(listen)
    except OSError as error:
        raise listen_error(listen, error) from None
    return found


def _call_at_signals(end: Callable[[], object]) -> None:
    """Calls `end` from a thread of its own at SIGTERM and SIGINT: the main thread may be computing, or asleep, as it is
    where the signal went to another thread, which happens to a process that has just been continued."""
    told, teller = socket.socketpair()
    teller.setblocking(False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(teller.detach())

    def wait() -> None:
        told.recv(1)
        end()

    threading.Thread(target=wait, daemon=True).start()


def run_daemon(service: DeviceDaemon, held: DaemonLockFile, threads: int, log: DaemonLog, announce: int | None) -> int:
    """Runs it until it is told to end. announce: a descriptor that is told when it can be called."""

    def end() -> None:
        log.write("it was told to end")
        held.release()
        os._exit(0)

    _call_at_signals(end)
    try:
        service.prepare(threads)
        words = {"pid": os.getpid(), "address": list(service.address)}
        held.write(words)
        if announce is not None:
            with os.fdopen(announce, "w", encoding="utf-8") as pipe:
                pipe.write(json.dumps(words))
        service.run()
    finally:
        held.release()
    return 0
