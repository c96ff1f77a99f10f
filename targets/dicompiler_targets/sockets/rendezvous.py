"""The rendezvous of a run: the socket on which the coordinator accepts the devices of the run.

Listening address, keys and credentials of the run ⇒ message channels of the devices that completed the handshake.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dicompiler.plugin_api import RunError, UsageError
from dicompiler.plugin_api.utilities import one_line
from dicompiler_targets.sockets.device_process import DeviceProcess
from dicompiler_targets.sockets.runtime.channel import MessageChannel
from dicompiler_targets.sockets.runtime.handshake import COORDINATOR_NAME, ConnectionAcceptor, RunCredentials
from dicompiler_targets.sockets.runtime.protocol import ProtocolError
from dicompiler_targets.sockets.runtime.transport import (
    DEVICE_IDENTITY,
    TlsKeys,
    check_encryption,
    check_identity,
    join_address,
    listen_error,
    split_address,
)

ANY_LOOPBACK_PORT = "127.0.0.1:0"

JoinedDevice = tuple[DeviceProcess, MessageChannel, tuple[str, int]]
"""A device's process, its channel, and the address at which peers reach it."""


class RunAcceptor:
    """Accepts connections of the devices of a run.

    `ClusterSession` creates the acceptor, and `ClusterState` asks it for the devices that have connected. For resident
    devices, `daemon_client.DaemonConnector` is used instead.

    Attributes:
        address: HOST:PORT at which devices connect.
        credentials: Credentials of the run, which devices must prove to know.
    """

    def __init__(self, listen: str, keys: Path | None, is_insecure: bool) -> None:
        """Listen at HOST:PORT; port 0 means any free port.

        With `keys`, the directory that 'dicompiler keys' created, connections use TLS. Without keys, connections to
        other hosts are allowed only if `is_insecure`. Raise UsageError if the address or the keys cannot be used, and
        RunError if the address is in use.
        """
        # Without keys, a token proves that a device belongs to the run. With keys, certificates prove it.
        self.credentials = RunCredentials(secrets.token_hex(8), "" if keys else secrets.token_hex(16))
        self._acceptor: ConnectionAcceptor | None = None
        self._joined_devices: set[str] = set()
        self._lock = threading.Lock()
        try:
            self._keys = None if keys is None else TlsKeys(keys / "coordinator")
            host, port = split_address(listen)
        except ValueError as error:
            raise UsageError(f"run: {error}") from None
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            raise RunError(f"{listen_error((host, port), error)} (--listen)") from None
        try:
            bound = self._listener.getsockname()
            check_encryption(bound[0], self._keys, is_insecure)
            if ipaddress.ip_address(bound[0].partition("%")[0]).is_unspecified:
                raise ValueError(f"{bound[0]}: devices cannot connect to it: pass an address of this host (--listen)")
        except ValueError as error:
            self._listener.close()
            raise UsageError(f"run: {error}") from None
        self.address = join_address(*bound[:2])

    def close(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        self._listener.close()

    def start_accepting(self, processes: Mapping[str, DeviceProcess], digest: str) -> None:
        """Accept the devices of `processes` that have the artifact with this digest."""
        self._processes, self._digest = processes, digest
        self._acceptor = ConnectionAcceptor(self._listener, self._keys, self._greet_device)

    @property
    def refusal_text(self) -> str:
        """The reason why the last connection was refused, as the end of a message; '' if none was refused."""
        reason = one_line(self._acceptor.last_refusal) if self._acceptor else ""
        return f"; last refused connection: {reason}" if reason else ""

    def allow_again(self, device: str) -> None:
        """Allow a device that has connected before to connect again."""
        with self._lock:
            self._joined_devices.discard(device)

    def next_process(self, seconds: float) -> DeviceProcess | None:
        """Wait for the next device and return its process; None if no device connected in time.

        Raise RunError if a device of this run was refused.
        """
        assert self._acceptor is not None
        joined: JoinedDevice | None = self._acceptor.take(seconds)
        if joined is None:
            return None
        process, channel, address = joined
        # The device may have failed while its connection waited in the queue.
        if self._processes[process.device] is not process:
            channel.close()
            return None
        process.channel, process.address = channel, address
        return process

    def _greet_device(self, channel: MessageChannel, host: str, deadline: float) -> JoinedDevice:
        """Identify a connecting device, as the callback of `handshake.ConnectionAcceptor`.

        Raise ProtocolError to refuse the connection. Raise RunError to end the run, but only if the other end has
        proven that it is a device of this run.
        """
        hello = channel.receive_greeting(deadline)
        name = str(hello.get("device"))
        process = self._processes.get(name)
        if process is None:
            raise ProtocolError(f"device {name[:100]!r} is not expected")
        check_identity(channel.identity, DEVICE_IDENTITY.format(name), f"device {name!r}")
        self.credentials.check(hello, name, COORDINATOR_NAME)
        try:
            if hello.get("digest") != self._digest:
                raise ProtocolError("its directory belongs to another artifact: copy it again from this one")
            address = _check_address(hello.get("address"), {host, *process.allowed_hosts})
        except ProtocolError as error:
            channel.refuse(str(error), deadline)
            raise RunError(f"{process.title}: {error}") from None
        with self._lock:
            if name in self._joined_devices:
                raise ProtocolError(f"device {name!r} is connected already")
            self._joined_devices.add(name)
        return process, channel, address


def _check_address(value: Any, allowed_hosts: set[str]) -> tuple[str, int]:
    """Return the address at which peers can reach a device, after a check of the address that the device sent.

    The address's host must be in `allowed_hosts`, which are known to be the device's. Otherwise a device could direct
    its peers to any other host.
    """
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str) or type(value[1]) is not int:
        raise ProtocolError("its greeting has no valid address")
    with contextlib.suppress(ValueError):
        if 0 < value[1] < 1 << 16 and _without_scope(value[0]) in map(_without_scope, allowed_hosts):
            return value[0], value[1]
    raise ProtocolError(
        f"its address for peers is {value[0][:100]!r}, port {value[1]}, but it connected from {min(allowed_hosts)}: "
        "let it listen at that address, or set its address in the hosts file"
    )


def _without_scope(host: str) -> str:
    """Return an IP address without the interface name after %, which is valid on one host only."""
    return str(ipaddress.ip_address(host.partition("%")[0]))
