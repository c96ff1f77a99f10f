"""The client of resident devices (running daemons): connects runs to them, and asks for their status.

`daemon_control` starts the daemons, and lists them in a file next to the artifact.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dicompiler.plugin_api import DicompilerError, RunError, RunOptions, UsageError
from dicompiler.plugin_api.artifacts import DeviceStatus
from dicompiler.plugin_api.utilities import one_line, resolve_host
from dicompiler_targets.sockets.artifact import Manifest, SocketsArtifact
from dicompiler_targets.sockets.device_connections import DeviceProcess, load_coordinator_keys, read_status
from dicompiler_targets.sockets.runtime.addresses import PORT_HINT, connect, is_loopback, join_address
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
    CertificateError,
    TlsKeys,
    check_encryption,
    check_identity,
    open_connection,
    seconds_left,
)

log = logging.getLogger("dicompiler")

RESIDENT_FORMAT = "dicompiler.resident/1"


@dataclass(frozen=True)
class ResidentCluster:
    """The resident devices (running daemons) of an artifact, as listed in the file ARTIFACT.resident.json.

    Attributes:
        directory: The artifact's directory.
        digest: Digest of the artifact that the devices run.
        addresses: Host and port of each device.
        token: Secret with which clients and devices prove their identities; '' if they use TLS keys.
        keys: The directory that 'dicompiler keys' created; None if TLS is not used.
        insecure: True if connections to other hosts are allowed without TLS.
    """

    directory: Path
    digest: str
    addresses: Mapping[str, tuple[str, int]]
    token: str = ""
    keys: str | None = None
    insecure: bool = False

    @staticmethod
    def state_file(directory: Path) -> Path:
        absolute = directory.absolute()
        return absolute.with_name(f"{absolute.name}.resident.json")

    @classmethod
    def load(cls, directory: Path) -> ResidentCluster | None:
        """Return the resident devices (running daemons) of an artifact; None if there are none.

        Raise DicompilerError if the file that lists them is invalid.
        """
        path = cls.state_file(directory)
        try:
            document = json.loads(path.read_bytes())
            if (found := document.pop("format")) != RESIDENT_FORMAT:
                cause = f"format {found} is not supported (this version reads {RESIDENT_FORMAT})"
                remedy = "stop the devices with the version that started them, and remove the file"
                raise DicompilerError(f"{path}: {cause}: {remedy}")
            addresses = {str(name): (str(host), int(port)) for name, (host, port) in document.pop("addresses").items()}
            return cls(directory, addresses=addresses, **document)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise DicompilerError(f"{path}: invalid list of resident devices ({error!r}): remove the file") from None

    @classmethod
    def load_for(cls, artifact: SocketsArtifact) -> ResidentCluster | None:
        """Return the resident devices (running daemons) of an artifact; None if there are none.

        Raise RunError if the devices run another artifact.
        """
        cluster = cls.load(artifact.directory)
        if cluster is not None and cluster.digest != artifact.digest:
            raise RunError(
                f"{artifact.directory}: its resident devices run another artifact: stop them first "
                "('dicompiler deploy --stop')"
            )
        return cluster

    def save(self) -> None:
        """Write the file that lists the resident devices; only its owner can read it, because it has the token."""
        document = {"format": RESIDENT_FORMAT, **asdict(self)}
        del document["directory"]
        path = self.state_file(self.directory)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                file.write(json.dumps(document, indent=1) + "\n")
            os.replace(temporary, path)
        except OSError as error:
            raise DicompilerError(f"{path}: cannot be written: {error.strerror or error}") from None
        finally:
            temporary.unlink(missing_ok=True)

    def remove(self) -> None:
        self.state_file(self.directory).unlink(missing_ok=True)

    @property
    def is_remote(self) -> bool:
        return not all(is_loopback(host) for host, _ in self.addresses.values())

    def run_options(self, options: RunOptions) -> RunOptions:
        """Return `options` for a run, with the TLS keys of the resident devices unless others are given.

        Raise UsageError if an option needs new processes.
        """
        for name in ("start_manually", "pin"):
            if getattr(options, name):
                raise UsageError(
                    f"run: the devices of {self.directory} are resident: omit --{name.replace('_', '-')}, or stop them "
                    "first ('dicompiler deploy --stop')"
                )
        keys = options.keys or (None if self.keys is None else Path(self.keys))
        return replace(options, keys=keys, insecure=options.insecure or self.insecure)

    def load_keys(self, options: RunOptions) -> TlsKeys | None:
        return load_coordinator_keys(options.keys)

    def describe_error(self, error: Exception) -> str:
        """Return the text of an error of a connection to a device, with a remedy."""
        if isinstance(error, CertificateError | PeerRefused):  # The text ends with its own remedy.
            return _error_text(error)
        command = f"dicompiler deploy {self.directory} --hosts HOSTS --resident"
        return f"{_error_text(error)}: start the device again ('{command}')"

    def status(self, options: RunOptions) -> tuple[DeviceStatus, ...]:
        """Ask all devices for their status. A device that does not answer gets a status with an `error`."""
        options = self.run_options(options)
        keys = self.load_keys(options)

        def ask(name: str) -> DeviceStatus:
            address = join_address(*self.addresses[name])
            try:
                request = {"request": "status"}
                deadline = time.monotonic() + min(GREETING_TIMEOUT_S, options.timeout_s)
                channel, report = call_daemon(
                    name, self.addresses[name], keys, options.insecure, self.token, request, deadline
                )
                channel.close()
                return read_status(address, report)
            except (OSError, ValueError, TypeError, ProtocolError, PeerRefused) as error:
                return DeviceStatus(device=name, address=address, error=self.describe_error(error))

        with ThreadPoolExecutor(max(1, len(self.addresses))) as pool:
            return tuple(pool.map(ask, sorted(self.addresses)))


def call_daemon(
    name: str,
    address: tuple[str, int],
    keys: TlsKeys | None,
    is_insecure: bool,
    token: str,
    request: Mapping[str, Any],
    deadline: float,
) -> tuple[MessageChannel, dict[str, Any]]:
    """Connect to a device's daemon and send a request; return the connection and the answer.

    Raises:
        OSError: The device cannot be reached.
        ProtocolError: The answer is invalid or does not prove the device's identity.
        PeerRefused: The device refuses the request.
        ValueError: TLS keys are missing.
    """
    connection = connect(*address, min(GREETING_TIMEOUT_S, seconds_left(deadline)), PORT_HINT)
    try:
        check_encryption(connection.getpeername()[0], keys, is_insecure)
    except ValueError:
        connection.close()
        raise
    channel = MessageChannel(open_connection(connection, keys, False, deadline))
    try:
        check_identity(channel.identity, DEVICE_IDENTITY.format(name), f"device {name!r}")
        nonce, greeting_deadline = secrets.token_hex(16), min(deadline, time.monotonic() + GREETING_TIMEOUT_S)
        channel.send_greeting(MessageType.HELLO, {"device": COORDINATOR_NAME, "nonce": nonce}, greeting_deadline)
        hello = channel.receive_greeting(greeting_deadline)
        credentials = RunCredentials("", "" if keys else derive_token(token, nonce, str(hello.get("nonce"))))
        credentials.check(hello, name, COORDINATOR_NAME)
        proof = credentials.make_proof(COORDINATOR_NAME, name)
        channel.send_greeting(MessageType.HELLO, {**proof, **request}, greeting_deadline)
        return channel, channel.receive_greeting(deadline)
    except BaseException:
        channel.close()
        raise


def _error_text(error: Exception) -> str:
    if isinstance(error, TimeoutError) and error.args == ("timed out",):
        return "the device does not answer"
    return one_line(getattr(error, "strerror", None) or str(error))


@dataclass
class DaemonProcess(DeviceProcess):
    """A resident device (a running daemon) in a run.

    `failure` is the reason why the device cannot be reached; '' as long as it can be reached.
    """

    failure: str = field(default="", kw_only=True)

    def exit_code(self) -> int | None:
        return 1 if self.failure else None

    def describe_exit(self) -> str | None:
        return f"the device cannot be reached{self.failure}" if self.failure else None


class DaemonConnector:
    """Connects a run to resident devices (running daemons).

    `ClusterState` uses it as the function that starts devices and as the acceptor of their connections. The optional
    function `restart` starts the daemon of a device that does not answer, and returns its host and port.

    Attributes:
        cluster: The resident devices and their addresses.
        options: The options of the run.
        credentials: ID and token of the run, with which coordinator and devices prove their identities.
    """

    address = ""

    def __init__(
        self,
        cluster: ResidentCluster,
        options: RunOptions,
        restart: Callable[[str], tuple[str, int]] | None = None,
    ) -> None:
        self.cluster, self.options, self._restart = cluster, options, restart
        self._keys, run = cluster.load_keys(options), secrets.token_hex(8)
        self.credentials = RunCredentials(run, "" if options.keys else derive_token(cluster.token, run))
        self._connections, self._closed, self._lock = ConnectionQueue(), False, threading.Lock()
        self._previous_call = threading.Event()
        self._previous_call.set()

    @property
    def refusal_text(self) -> str:
        """Always '', because no device connects to this process."""
        return ""

    def start_accepting(self, processes: Mapping[str, DeviceProcess], digest: str) -> None:
        self._processes, self._digest = processes, digest

    def allow_again(self, device: str) -> None:
        """Do nothing, because the coordinator can always connect to a resident device again."""

    def close(self) -> None:
        self._closed = True

    def __call__(self, manifest: Manifest, _: Sequence[str]) -> DeviceProcess:
        """Start a thread that connects to a device, and return the device's process.

        The threads connect one after another. Otherwise, two clients that start at the same time could each get some of
        the devices and be refused by the others.
        """
        address = self.cluster.addresses.get(manifest["device"])
        location = "" if address is None else f" at {join_address(*address)}"
        process, previous, done = DaemonProcess(manifest, location=location), self._previous_call, threading.Event()
        self._previous_call = done
        threading.Thread(target=self._connect, args=(process, previous, done), daemon=True).start()
        return process

    def next_process(self, seconds: float) -> DeviceProcess | None:
        """Wait for the next device that answers; return its process, or None after `seconds`.

        Raise RunError if a device refused the run.
        """
        while (answer := self._connections.take(seconds)) is not None:
            process: DaemonProcess = answer[0]
            if self._processes.get(process.device) is process:
                process.channel, process.address = answer[1:]
                return process
            answer[1].close()  # The connection is not used, because its device failed while it waited in the queue.
        return None

    def _connect(self, process: DaemonProcess, previous: threading.Event, done: threading.Event) -> None:
        name = process.device
        try:
            previous.wait(min(GREETING_TIMEOUT_S, self.options.timeout_s / 4))
            try:
                channel = self._request_run(name)
            except OSError:
                if self._restart is None or self._closed:
                    raise
                self._update_address(name, self._restart(name))
                channel = self._request_run(name)
            if self._closed:
                channel.close()
            host, port = self.cluster.addresses[name]
            # Users may have written host names into the list of devices. Other boards may be unable to resolve them, so
            # they get an IP address.
            self._connections.put((process, channel, (resolve_host(host), port)))
        except PeerRefused as error:
            self._connections.put(RunError(f"{process.title}: {error}"))
        except Exception as error:
            process.failure = f": {self.cluster.describe_error(error)}"
        finally:
            done.set()

    def _update_address(self, name: str, address: tuple[str, int]) -> None:
        with self._lock:
            self.cluster = replace(self.cluster, addresses={**self.cluster.addresses, name: address})
            try:
                self.cluster.save()
            except DicompilerError as error:
                log.warning("%s: other clients cannot find the restarted device %r", error, name)

    def _request_run(self, name: str) -> MessageChannel:
        if name not in self.cluster.addresses:
            raise ConnectionError("the device is not running")
        options, cluster = self.options, self.cluster
        request: dict[str, Any] = {"request": "run", "run": self.credentials.run_id, "digest": self._digest}
        request |= {"timeout": options.timeout_s, "heartbeat": options.heartbeat_s}
        # The deadline leaves at least half of the timeout for a run without this device, if it does not answer.
        deadline = time.monotonic() + min(2 * GREETING_TIMEOUT_S, options.timeout_s / 2)
        address, token = cluster.addresses[name], cluster.token
        return call_daemon(name, address, self._keys, options.insecure, token, request, deadline)[0]
