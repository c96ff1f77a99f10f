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

from dicompiler.plugin_api import DeviceStatus, DicompilerError, RunError, RunOptions, UsageError, one_line
from dicompiler_targets.sockets.artifact import Artifact, Manifest
from dicompiler_targets.sockets.processes import Process
from dicompiler_targets.sockets.runtime.frames import Kind, ProtocolError, Refused
from dicompiler_targets.sockets.runtime.greeting import CONTROL, GREETING_S, Guests, Membership, derived
from dicompiler_targets.sockets.runtime.line import (
    DEVICE,
    Keys,
    check_identity,
    check_open,
    is_loopback,
    join_address,
    left,
    secured,
)
from dicompiler_targets.sockets.runtime.wire import Channel

log = logging.getLogger("dicompiler")

FORMAT = "dicompiler.kept/1"
AGAIN = "start it again ('dicompiler deploy --keep')"


@dataclass(frozen=True)
class Kept:
    """The devices of an artifact that stay. addresses: where each is called. token: what shows that we belong to them,
    '' with keys (the directory that `dicompiler keys` made); insecure: whether they may be on other hosts without."""

    directory: Path
    digest: str
    addresses: Mapping[str, tuple[str, int]]
    token: str = ""
    keys: str | None = None
    insecure: bool = False

    @staticmethod
    def file(directory: Path) -> Path:
        """Where that is written down: beside the artifact."""
        beside = directory.absolute()
        return beside.with_name(f"{beside.name}.kept.json")

    @classmethod
    def load(cls, directory: Path) -> Kept | None:
        """None where none are kept. DicompilerError for a file that is none of ours."""
        path = cls.file(directory)
        try:
            document = json.loads(path.read_bytes())
            if document.pop("format") != FORMAT:
                raise ValueError("another format")
            addresses = {str(name): (str(host), int(port)) for name, (host, port) in document.pop("addresses").items()}
            return cls(directory, addresses=addresses, **document)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise DicompilerError(f"{path}: it does not say what is kept running ({error!r}): remove it") from None

    @classmethod
    def of(cls, artifact: Artifact) -> Kept | None:
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
        document = {"format": FORMAT, **asdict(self)}
        del document["directory"]
        path = self.file(self.directory)
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
    def apart(self) -> bool:
        """Whether any of them is on another host than this."""
        return not all(is_loopback(host) for host, _ in self.addresses.values())

    def forget(self) -> None:
        """They are not kept any more."""
        self.file(self.directory).unlink(missing_ok=True)

    def options(self, options: RunOptions) -> RunOptions:
        """Those of a run that joins them. UsageError for what cannot be said of devices that run already."""
        for name in ("elsewhere", "pin"):
            if getattr(options, name):
                raise UsageError(
                    f"run: the devices of {self.directory} are kept running: leave out --{name}, or stop them first "
                    "('dicompiler deploy --stop')"
                )
        keys = options.keys or (None if self.keys is None else Path(self.keys))
        return replace(options, keys=keys, insecure=options.insecure or self.insecure)

    def own_keys(self, options: RunOptions) -> Keys | None:
        """What shows who we are. UsageError for keys that cannot be used."""
        try:
            return None if options.keys is None else Keys(options.keys / "coordinator")
        except ValueError as error:
            raise UsageError(f"run: {error}") from None

    def status(self, options: RunOptions) -> tuple[DeviceStatus, ...]:
        """How each device does, in the order of their names; an `error` for those that do not answer."""
        options = self.options(options)
        keys = self.own_keys(options)

        def ask(name: str) -> DeviceStatus:
            address = join_address(*self.addresses[name])
            try:
                wish = {"wants": "status"}
                deadline = time.monotonic() + min(GREETING_S, options.timeout_s)
                channel, told = greet(name, self.addresses[name], keys, options.insecure, self.token, wish, deadline)
                channel.close()
                return DeviceStatus(address=address, **told)
            except (OSError, ValueError, TypeError, ProtocolError, Refused) as error:
                return DeviceStatus(device=name, address=address, error=f"{_words(error)}: {AGAIN}")

        with ThreadPoolExecutor(max(1, len(self.addresses))) as pool:
            return tuple(pool.map(ask, sorted(self.addresses)))


def greet(
    name: str,
    address: tuple[str, int],
    keys: Keys | None,
    insecure: bool,
    token: str,
    wish: Mapping[str, Any],
    deadline: float,
) -> tuple[Channel, dict[str, Any]]:
    """Calls a device that stays, and says what is wanted of it: the connection, and its answer. OSError where nobody
    is there, ProtocolError for who is not that device, Refused with its words."""
    connection = socket.create_connection(address, min(GREETING_S, left(deadline)))
    try:
        check_open(connection.getpeername()[0], keys, insecure)
    except ValueError:
        connection.close()
        raise
    channel = Channel(secured(connection, keys, False, deadline))
    try:
        check_identity(channel.identity, DEVICE.format(name), f"device {name!r}")
        nonce, soon = secrets.token_hex(16), min(deadline, time.monotonic() + GREETING_S)
        channel.greet(Kind.HELLO, {"device": CONTROL, "nonce": nonce}, soon)
        hello = channel.greeting(soon)
        member = Membership("", "" if keys else derived(token, nonce, str(hello.get("nonce"))))
        member.check(hello, name, CONTROL)
        channel.greet(Kind.HELLO, {**member.hello(CONTROL, name), **wish}, soon)
        return channel, channel.greeting(deadline)
    except BaseException:
        channel.close()
        raise


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return one_line(getattr(error, "strerror", None) or str(error))


@dataclass
class Called(Process):
    """A device that stays. failure: why it could not be called, '' as long as it may be."""

    failure: str = field(default="", kw_only=True)

    def exit_code(self) -> int | None:
        return 1 if self.failure else None

    def ending(self) -> str | None:
        return f"it cannot be called{self.failure}" if self.failure else None


class Calls:
    """The door of a run that joins devices that stay, and how they are called: a `Start`. See Door.

    revive: starts a device that does not answer; (its name) → its address.
    """

    address = ""

    def __init__(self, kept: Kept, options: RunOptions, revive: Callable[[str], tuple[str, int]] | None = None) -> None:
        self._kept, self.options, self._revive = kept, options, revive
        self._keys = kept.own_keys(options)
        self.membership = Membership(secrets.token_hex(8), "")
        if options.keys is None:
            self.membership = Membership(self.membership.run, derived(kept.token, self.membership.run))
        self._guests, self._closed, self._lock = Guests(), False, threading.Lock()
        self._before = threading.Event()
        self._before.set()

    @property
    def apart(self) -> bool:
        """See Kept."""
        return self._kept.apart

    @property
    def refused(self) -> str:
        """Nobody comes here by himself."""
        return ""

    def open(self, processes: Mapping[str, Process], digest: str) -> None:
        """The devices of `processes` may be called."""
        self._processes, self._digest = processes, digest

    def forget(self, device: str) -> None:
        """It may be called again."""

    def close(self) -> None:
        """Nobody is called any more."""
        self._closed = True

    def __call__(self, manifest: Manifest, _: Sequence[str]) -> Process:
        """Calls a device, in a thread; one after another, so that of two clients the first gets them all."""
        address = self._kept.addresses.get(manifest["device"])
        where = "" if address is None else f" at {join_address(*address)}"
        process, before, done = Called(manifest, where=where), self._before, threading.Event()
        self._before = done
        threading.Thread(target=self._call, args=(process, before, done), daemon=True).start()
        return process

    def admit(self, seconds: float) -> Process | None:
        """The next device that has answered. RunError for one that refuses."""
        met: tuple[Called, Channel, tuple[str, int]] | None
        while (met := self._guests.take(seconds)) is not None:
            process, channel, address = met
            known = self._processes.get(process.device)
            if known is not None and known is process:
                known.channel, known.address = channel, address
                return known
            channel.close()  # it was given up meanwhile
        return None

    def _call(self, process: Called, before: threading.Event, done: threading.Event) -> None:
        name = process.device
        try:
            before.wait(min(GREETING_S, self.options.timeout_s / 4))
            try:
                channel = self._reach(name)
            except OSError:
                if self._revive is None or self._closed:
                    raise
                self._moved(name, self._revive(name))
                channel = self._reach(name)
            if self._closed:
                channel.close()
            self._guests.put((process, channel, self._kept.addresses[name]))
        except Refused as error:
            self._guests.put(RunError(f"{process.title}: {error}"))
        except Exception as error:
            process.failure = f": {_words(error)}: {AGAIN}"
        finally:
            done.set()

    def _moved(self, name: str, address: tuple[str, int]) -> None:
        """A device is called elsewhere from now on, by others too."""
        with self._lock:
            self._kept = replace(self._kept, addresses={**self._kept.addresses, name: address})
            try:
                self._kept.save()
            except DicompilerError as error:
                log.warning("%s: others do not find device %r, which was started again", error, name)

    def _reach(self, name: str) -> Channel:
        if name not in self._kept.addresses:
            raise ConnectionError("it was not started")
        wish = {
            "wants": "run",
            "run": self.membership.run,
            "digest": self._digest,
            "timeout": self.options.timeout_s,
            "heartbeat": self.options.heartbeat_s,
        }
        address = self._kept.addresses[name]
        # Where it does not answer, time must be left to go on without it.
        until = time.monotonic() + min(2 * GREETING_S, self.options.timeout_s / 2)
        insecure, token = self.options.insecure, self._kept.token
        return greet(name, address, self._keys, insecure, token, wish, until)[0]
