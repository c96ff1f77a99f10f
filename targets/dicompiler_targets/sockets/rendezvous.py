"""The door of a run: where devices connect, who is let in, and who is sent away in words.

In: the address to listen at, keys, the run's number and token. Out: channels of devices that have greeted.
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
"""Where to listen for devices on this host: any port."""

JoinedDevice = tuple[DeviceProcess, MessageChannel, tuple[str, int]]


class RunAcceptor:
    """Listens at `listen` (HOST:PORT, port 0: any) for a run's devices.

    `membership`: what its devices know. keys: the directory that `dicompiler keys` made, or None. UsageError for an
    address that must not be used in the clear, or cannot be told to devices; RunError for one that is taken.
    """

    def __init__(self, listen: str, keys: Path | None, insecure: bool) -> None:
        # With keys, certificates tell who is who.
        self.credentials = RunCredentials(secrets.token_hex(8), "" if keys else secrets.token_hex(16))
        self._acceptor: ConnectionAcceptor | None = None
        self._joined_devices: set[str] = set()
        self._lock = threading.Lock()
        try:
            self._keys = None if keys is None else TlsKeys(keys / "coordinator")
            host, port = split_address(listen)
            self._listener = _make_listener(host, port)
        except ValueError as error:
            raise UsageError(f"run: {error}") from None
        try:
            bound = self._listener.getsockname()
            check_encryption(bound[0], self._keys, insecure)
            if ipaddress.ip_address(bound[0].partition("%")[0]).is_unspecified:
                raise ValueError(f"{bound[0]} cannot be told to devices: listen at the address at which they reach us")
        except ValueError as error:
            self._listener.close()
            raise UsageError(f"run: {error}") from None
        self.address = join_address(*bound[:2])

    def close(self) -> None:
        """Nobody is let in any more."""
        if self._acceptor is not None:
            self._acceptor.close()
        self._listener.close()

    def start_accepting(self, processes: Mapping[str, DeviceProcess], digest: str) -> None:
        """Lets in the devices of `processes` that hold the artifact with that digest, and nobody else."""
        self._processes, self._digest = processes, digest
        self._acceptor = ConnectionAcceptor(self._listener, self._keys, self._greet_device)

    @property
    def refusal_text(self) -> str:
        """Why somebody was sent away last, as the end of a message; '' if nobody was."""
        why = one_line(self._acceptor.last_refusal) if self._acceptor else ""
        return f"; refused meanwhile: {why}" if why else ""

    def allow_again(self, device: str) -> None:
        """It may come again."""
        with self._lock:
            self._joined_devices.discard(device)

    def next_process(self, seconds: float) -> DeviceProcess | None:
        """The next device that came, now with channel and address; None if none came in that time.

        RunError if it is one of ours that must be refused.
        """
        assert self._acceptor is not None
        joined: JoinedDevice | None = self._acceptor.take(seconds)
        if joined is None:
            return None
        process, channel, address = joined
        if self._processes[process.device] is not process:  # it was given up while it waited here
            channel.close()
            return None
        process.channel, process.address = channel, address
        return process

    def _greet_device(self, channel: MessageChannel, host: str, deadline: float) -> JoinedDevice:
        """See greeting.Meet. Only who has shown that it is a device of this run can end the run."""
        hello = channel.receive_greeting(deadline)
        name = str(hello.get("device"))
        process = self._processes.get(name)
        if process is None:
            raise ProtocolError(f"device {name[:100]!r} is not awaited")
        check_identity(channel.identity, DEVICE_IDENTITY.format(name), f"device {name!r}")
        self.credentials.check(hello, name, COORDINATOR_NAME)
        try:
            if hello.get("digest") != self._digest:
                raise ProtocolError("its directory belongs to another artifact: copy it again from this one")
            address = _check_address(hello.get("address"), {host, *process.allowed_addresses})
        except ProtocolError as error:
            channel.refuse(str(error), deadline)
            raise RunError(f"{process.title}: {error}") from None
        with self._lock:
            if name in self._joined_devices:
                raise ProtocolError(f"device {name!r} is there already")
            self._joined_devices.add(name)
        return process, channel, address


def _make_listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        raise RunError(f"{listen_error((host, port), error)} (--listen)") from None


def _check_address(value: Any, known: set[str]) -> tuple[str, int]:
    """The address that a device says its peers reach it at: one that it is known to have, or it could send them
    anywhere."""
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str) or type(value[1]) is not int:
        raise ProtocolError("its greeting tells no address")
    with contextlib.suppress(ValueError):
        if 0 < value[1] < 1 << 16 and _without_scope(value[0]) in map(_without_scope, known):
            return value[0], value[1]
    raise ProtocolError(
        f"it names {value[0][:100]!r}, port {value[1]}, to its peers, and came from {min(known)}: let it listen where "
        "it reaches us, or give its address in the hosts file"
    )


def _without_scope(host: str) -> str:
    """The address without the interface, whose name each host chooses."""
    return str(ipaddress.ip_address(host.partition("%")[0]))
