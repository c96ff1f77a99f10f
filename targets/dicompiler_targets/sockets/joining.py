"""The door of a run: where devices connect, who is let in, and who is sent away in words.

In: the address to listen at, keys. Out: channels of devices that have greeted.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dicompiler.plugin_api import RunError, UsageError
from dicompiler_targets.sockets.processes import Process
from dicompiler_targets.sockets.runtime.frames import Kind, ProtocolError, Refused
from dicompiler_targets.sockets.runtime.line import (
    DEVICE,
    Keys,
    check_identity,
    check_open,
    join_address,
    secured,
    split_address,
)
from dicompiler_targets.sockets.runtime.wire import Channel

LOOPBACK = "127.0.0.1:0"
"""Where to listen for devices on this host: any port."""
GREETING_S = 5.0
"""Seconds in which a connection must say who it is."""


class Door:
    """Listens at `listen` (HOST:PORT, port 0: any) for the devices that hold the artifact with that digest.

    keys: the directory that `dicompiler keys` made, or None. UsageError for an address that must not be used in the
    clear, or cannot be told to devices; RunError for one that is taken. `refused`: why somebody was sent away last.
    """

    def __init__(self, listen: str, keys: Path | None, insecure: bool, digest: str) -> None:
        self.digest, self.refused = digest, ""
        try:
            self.keys = None if keys is None else Keys(keys / "coordinator")
            host, port = split_address(listen)
            self._listener = _listener(host, port)
        except ValueError as error:
            raise UsageError(f"run: {error}") from None
        try:
            bound = self._listener.getsockname()
            check_open(bound[0], self.keys, insecure)
            if ipaddress.ip_address(bound[0].partition("%")[0]).is_unspecified:
                raise ValueError(f"{bound[0]} cannot be told to devices: listen at the address at which they reach us")
        except ValueError as error:
            self._listener.close()
            raise UsageError(f"run: {error}") from None
        self.address = join_address(*bound[:2])

    def close(self) -> None:
        """Nobody is let in any more."""
        self._listener.close()

    def admit(self, processes: Mapping[str, Process], deadline: float, wait_s: float) -> Process | None:
        """Waits for at most `wait_s` for someone to connect: the device that came, now with channel and address.

        None if nobody came, or a stranger. RunError if it is one of ours that must be refused.
        """
        self._listener.settimeout(wait_s)
        try:
            connection, address = self._listener.accept()
        except TimeoutError:
            return None
        end = min(deadline, time.monotonic() + GREETING_S)
        try:
            channel = Channel(secured(connection, self.keys, True, end))
        except (OSError, ProtocolError, Refused) as error:
            self.refused = f"{address[0]}: {error}"
            return None
        return self._meet(channel, address[0], processes, end)

    def _meet(self, channel: Channel, host: str, processes: Mapping[str, Process], end: float) -> Process | None:
        process = None
        try:
            hello = channel.greeting(end)
            process = processes.get(str(hello.get("device")))
            if process is None or process.channel is not None:
                process = None
                raise ProtocolError(f"device {hello.get('device')!r} is not awaited")
            check_identity(channel.identity, DEVICE.format(process.device), f"device {process.device!r}")
            if hello.get("digest") != self.digest:
                raise ProtocolError("its directory belongs to another artifact: copy it again from this one")
            process.address = _address(hello.get("address"))
        except (OSError, ProtocolError, Refused) as error:
            self.refused = f"{host}: {error}"
            with contextlib.suppress(OSError):  # it may be gone already
                channel.greet(Kind.ERROR, {"message": str(error)}, end)
            channel.close()
            # Without keys anybody can say any name: a stranger must not end the run.
            if process is not None and isinstance(error, ProtocolError):
                raise RunError(f"{process.title}: {error}") from None
            return None
        process.channel = channel
        return process


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RunError(f"{host}:{port}: the port is taken: choose another one, or 0 for any (--listen)") from None
        cause = error.strerror or str(error)
        raise RunError(f"{host}:{port}: cannot listen there: {cause}: give an address of this host") from None


def _address(value: Any) -> tuple[str, int]:
    """The address that a device says its peers reach it at."""
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str) or type(value[1]) is not int:
        raise ProtocolError("its greeting tells no address")
    return value[0], value[1]
