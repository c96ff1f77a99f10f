"""A cluster that is kept running: where its devices are called, who may, and how a run joins it.

In: the file beside an artifact that says where they are. Out: a `Start` and a door for a session's crew; answers of
devices to who asks how they do.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dicompiler.plugin_api import DicompilerError, RunError, RunOptions, UsageError
from dicompiler.plugin_api.artifacts import DeviceStatus
from dicompiler.plugin_api.utilities import one_line
from dicompiler_targets.sockets.artifact import Manifest, SocketsArtifact
from dicompiler_targets.sockets.device_process import DeviceProcess
from dicompiler_targets.sockets.runtime.channel import MessageChannel
from dicompiler_targets.sockets.runtime.handshake import (
    COORDINATOR_NAME,
    GREETING_TIMEOUT_S,
    ConnectionQueue,
    RunCredentials,
    derive_token,
)
from dicompiler_targets.sockets.runtime.protocol import MessageType, PeerRefused, ProtocolError
from dicompiler_targets.sockets.runtime.transport import (
    DEVICE_IDENTITY,
    TlsKeys,
    check_encryption,
    check_identity,
    is_loopback,
    join_address,
    open_connection,
    seconds_left,
)

log = logging.getLogger("dicompiler")

RESIDENT_FORMAT = "dicompiler.kept/1"
RESTART_HINT = "start it again ('dicompiler deploy --keep')"


@dataclass(frozen=True)
class ResidentCluster:
    """The devices of an artifact that stay. addresses: where each is called. token: what shows that we belong to them,
    '' with keys (the directory that `dicompiler keys` made); insecure: whether they may be on other hosts without."""

    directory: Path
    digest: str
    addresses: Mapping[str, tuple[str, int]]
    token: str = ""
    keys: str | None = None
    insecure: bool = False

    @staticmethod
    def state_file(directory: Path) -> Path:
        """Where that is written down: beside the artifact."""
        beside = directory.absolute()
        return beside.with_name(f"{beside.name}.kept.json")

    @classmethod
    def load(cls, directory: Path) -> ResidentCluster | None:
        """None where none are kept. DicompilerError for a file that is none of ours."""
        path = cls.state_file(directory)
        try:
            document = json.loads(path.read_bytes())
            if document.pop("format") != RESIDENT_FORMAT:
                raise ValueError("another format")
            addresses = {str(name): (str(host), int(port)) for name, (host, port) in document.pop("addresses").items()}
            return cls(directory, addresses=addresses, **document)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise DicompilerError(f"{path}: it does not say what is kept running ({error!r}): remove it") from None

    @classmethod
    def load_for(cls, artifact: SocketsArtifact) -> ResidentCluster | None:
        """As `load`. RunError where another artifact is kept."""
        kept = cls.load(artifact.directory)
        if kept is not None and kept.digest != artifact.digest:
            raise RunError(
                f"{artifact.directory}: its devices are kept running with another artifact than this: stop them first "
                "('dicompiler deploy --stop')"
            )
        return kept

    def save(self) -> None:
        """Writes it down, for the user alone."""
        document = {"format": RESIDENT_FORMAT, **asdict(self)}
        del document["directory"]
        path = self.state_file(self.directory)
        stage = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with open(os.open(stage, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                file.write(json.dumps(document, indent=1) + "\n")
            os.replace(stage, path)
        except OSError as error:
            raise DicompilerError(f"{path}: it cannot be written: {error.strerror or error}") from None
        finally:
            stage.unlink(missing_ok=True)

    @property
    def is_remote(self) -> bool:
        """Whether any of them is on another host than this."""
        return not all(is_loopback(host) for host, _ in self.addresses.values())

    def remove(self) -> None:
        """They are not kept any more."""
        self.state_file(self.directory).unlink(missing_ok=True)

    def run_options(self, options: RunOptions) -> RunOptions:
        """Those of a run that joins them. UsageError for what cannot be said of devices that run already."""
        for name in ("elsewhere", "pin"):
            if getattr(options, name):
                raise UsageError(
                    f"run: the devices of {self.directory} are kept running: leave out --{name}, or stop them first "
                    "('dicompiler deploy --stop')"
                )
        keys = options.keys or (None if self.keys is None else Path(self.keys))
        return replace(options, keys=keys, insecure=options.insecure or self.insecure)

    def load_keys(self, options: RunOptions) -> TlsKeys | None:
        """What shows who we are. UsageError for keys that cannot be used."""
        try:
            return None if options.keys is None else TlsKeys(options.keys / "coordinator")
        except ValueError as error:
            raise UsageError(f"run: {error}") from None

    def status(self, options: RunOptions) -> tuple[DeviceStatus, ...]:
        """How each device does, in the order of their names; an `error` for those that do not answer."""
        options = self.run_options(options)
        keys = self.load_keys(options)

        def ask(name: str) -> DeviceStatus:
            address = join_address(*self.addresses[name])
            try:
                wish = {"wants": "status"}
                deadline = time.monotonic() + min(GREETING_TIMEOUT_S, options.timeout_s)
                channel, told = call_daemon(
                    name, self.addresses[name], keys, options.insecure, self.token, wish, deadline
                )
                channel.close()
                return DeviceStatus(address=address, **told)
            except (OSError, ValueError, TypeError, ProtocolError, PeerRefused) as error:
                return DeviceStatus(device=name, address=address, error=f"{_error_text(error)}: {RESTART_HINT}")

        with ThreadPoolExecutor(max(1, len(self.addresses))) as pool:
            return tuple(pool.map(ask, sorted(self.addresses)))


def call_daemon(
    name: str,
    address: tuple[str, int],
    keys: TlsKeys | None,
    insecure: bool,
    token: str,
    wish: Mapping[str, Any],
    deadline: float,
) -> tuple[MessageChannel, dict[str, Any]]:
    """Calls a device that stays, and says what is wanted of it: the connection, and its answer. OSError where nobody
    is there, ProtocolError for who is not that device, Refused with its words."""
    connection = socket.create_connection(address, min(GREETING_TIMEOUT_S, seconds_left(deadline)))
    try:
        check_encryption(connection.getpeername()[0], keys, insecure)
    except ValueError:
        connection.close()
        raise
    channel = MessageChannel(open_connection(connection, keys, False, deadline))
    try:
        check_identity(channel.identity, DEVICE_IDENTITY.format(name), f"device {name!r}")
        nonce, soon = secrets.token_hex(16), min(deadline, time.monotonic() + GREETING_TIMEOUT_S)
        channel.send_greeting(MessageType.HELLO, {"device": COORDINATOR_NAME, "nonce": nonce}, soon)
        hello = channel.receive_greeting(soon)
        member = RunCredentials("", "" if keys else derive_token(token, nonce, str(hello.get("nonce"))))
        member.check(hello, name, COORDINATOR_NAME)
        channel.send_greeting(MessageType.HELLO, {**member.hello(COORDINATOR_NAME, name), **wish}, soon)
        return channel, channel.receive_greeting(deadline)
    except BaseException:
        channel.close()
        raise


def _error_text(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return one_line(getattr(error, "strerror", None) or str(error))


@dataclass
class DaemonProcess(DeviceProcess):
    """A device that stays. failure: why it could not be called, '' as long as it may be."""

    failure: str = field(default="", kw_only=True)

    def exit_code(self) -> int | None:
        return 1 if self.failure else None

    def describe_exit(self) -> str | None:
        return f"it cannot be called{self.failure}" if self.failure else None


class DaemonConnector:
    """The door of a run that joins devices that stay, and how they are called: a `Start`. See Door.

    revive: starts a device that does not answer; (its name) → its address.
    """

    address = ""

    def __init__(
        self, kept: ResidentCluster, options: RunOptions, revive: Callable[[str], tuple[str, int]] | None = None
    ) -> None:
        self._cluster, self.options, self._restart = kept, options, revive
        self._keys = kept.load_keys(options)
        self.credentials = RunCredentials(secrets.token_hex(8), "")
        if options.keys is None:
            self.credentials = RunCredentials(self.credentials.run, derive_token(kept.token, self.credentials.run))
        self._connections, self._closed, self._lock = ConnectionQueue(), False, threading.Lock()
        self._previous_call = threading.Event()
        self._previous_call.set()

    @property
    def is_remote(self) -> bool:
        """See Kept."""
        return self._cluster.is_remote

    @property
    def refusal_text(self) -> str:
        """Nobody comes here by himself."""
        return ""

    def start_accepting(self, processes: Mapping[str, DeviceProcess], digest: str) -> None:
        """The devices of `processes` may be called."""
        self._processes, self._digest = processes, digest

    def allow_again(self, device: str) -> None:
        """It may be called again."""

    def close(self) -> None:
        """Nobody is called any more."""
        self._closed = True

    def __call__(self, manifest: Manifest, _: Sequence[str]) -> DeviceProcess:
        """Calls a device, in a thread; one after another, so that of two clients the first gets them all."""
        address = self._cluster.addresses.get(manifest["device"])
        where = "" if address is None else f" at {join_address(*address)}"
        process, before, done = DaemonProcess(manifest, location=where), self._previous_call, threading.Event()
        self._previous_call = done
        threading.Thread(target=self._connect, args=(process, before, done), daemon=True).start()
        return process

    def next_process(self, seconds: float) -> DeviceProcess | None:
        """The next device that has answered. RunError for one that refuses."""
        met: tuple[DaemonProcess, MessageChannel, tuple[str, int]] | None
        while (met := self._connections.take(seconds)) is not None:
            process, channel, address = met
            known = self._processes.get(process.device)
            if known is not None and known is process:
                known.channel, known.address = channel, address
                return known
            channel.close()  # it was given up meanwhile
        return None

    def _connect(self, process: DaemonProcess, before: threading.Event, done: threading.Event) -> None:
        name = process.device
        try:
            before.wait(min(GREETING_TIMEOUT_S, self.options.timeout_s / 4))
            try:
                channel = self._request_run(name)
            except OSError:
                if self._restart is None or self._closed:
                    raise
                self._update_address(name, self._restart(name))
                channel = self._request_run(name)
            if self._closed:
                channel.close()
            self._connections.put((process, channel, self._cluster.addresses[name]))
        except PeerRefused as error:
            self._connections.put(RunError(f"{process.title}: {error}"))
        except Exception as error:
            process.failure = f": {_error_text(error)}: {RESTART_HINT}"
        finally:
            done.set()

    def _update_address(self, name: str, address: tuple[str, int]) -> None:
        """A device is called elsewhere from now on, by others too."""
        with self._lock:
            self._cluster = replace(self._cluster, addresses={**self._cluster.addresses, name: address})
            try:
                self._cluster.save()
            except DicompilerError as error:
                log.warning("%s: others do not find device %r, which was started again", error, name)

    def _request_run(self, name: str) -> MessageChannel:
        if name not in self._cluster.addresses:
            raise ConnectionError("it was not started")
        wish = {
            "wants": "run",
            "run": self.credentials.run,
            "digest": self._digest,
            "timeout": self.options.timeout_s,
            "heartbeat": self.options.heartbeat_s,
        }
        address = self._cluster.addresses[name]
        # Where it does not answer, time must be left to go on without it.
        until = time.monotonic() + min(2 * GREETING_TIMEOUT_S, self.options.timeout_s / 2)
        insecure, token = self.options.insecure, self._cluster.token
        return call_daemon(name, address, self._keys, insecure, token, wish, until)[0]
