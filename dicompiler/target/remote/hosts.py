"""The hosts file (hosts.toml), which says how to reach each device by ssh.

hosts.toml → for each device its host, directory, Python and address. The schema is `hosts`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dicompiler.base.addresses import is_ip_address, join_address, resolve_host, split_address
from dicompiler.base.errors import DicompilerError, did_you_mean
from dicompiler.base.schema import read_text, validate

DEFAULT_DIRECTORY = ".cache/dicompiler/{}"
"""Default directory for copied files, relative to the user's home. {} is the name of the artifact's directory."""
DEFAULT_PYTHON = "python3"


@dataclass(frozen=True)
class DeviceLocation:
    """How to reach a device, and how to start it.

    Attributes:
        device: Name of the device.
        ssh_destination: The destination that ssh connects to: `user@address`, or a name from ssh's configuration.
        directory: Path of the device's own directory on the host, absolute or relative to the user's home.
        python: The Python to start: a command, or a path, absolute or relative to the user's home.
        port: Port of sshd; None means ssh's own default.
        identity: File of a private key; None means ssh's own default.
        listen_address: HOST:PORT at which other devices reach the device. None lets the device determine its address.
        threads: Number of threads that compute a segment (submodel); None means the number in the artifact.
        cores: Cores to run on; empty means all cores.
        known_hosts: File with the keys of hosts; None means ssh's own default.
    """

    device: str
    ssh_destination: str
    directory: str
    python: str = DEFAULT_PYTHON
    port: int | None = None
    identity: Path | None = None
    listen_address: str | None = None
    threads: int | None = None
    cores: tuple[int, ...] = ()
    known_hosts: Path | None = None

    @property
    def title(self) -> str:
        """The device's name in messages: `device 'pi01' on pi@192.168.1.11`."""
        return f"device {self.device!r} on {self.ssh_destination}"

    def resolve_address(self) -> tuple[str, int] | None:
        """Return host and port of `listen_address`, with an IP address instead of a name.

        Boards may not be able to resolve names, so this host does it. A name stays if this host cannot resolve it.

        Returns:
            Host and port; None if `listen_address` is None.
        """
        if self.listen_address is None:
            return None
        host, port = split_address(self.listen_address)
        with contextlib.suppress(OSError):
            host = resolve_host(host)
        return host, port


@dataclass(frozen=True)
class Hosts:
    """The content of a hosts file.

    Attributes:
        file: Path of the file, for messages.
        defaults: Settings that apply to all hosts.
        entries: Settings of single hosts and devices, by name.
    """

    file: str
    defaults: Mapping[str, Any]
    entries: Mapping[str, Mapping[str, Any]]

    @staticmethod
    def load(path: str | Path) -> Hosts:
        """Read a hosts file.

        Args:
            path: The file.

        Returns:
            The content of the file.

        Raises:
            DicompilerError: The file is missing or invalid.
        """
        missing = "no such file: write one with an [[host]] entry for each host"
        return parse_hosts(read_text(path, missing), str(path))

    def locate_device(self, device: str, host: str, artifact_name: str) -> DeviceLocation:
        """Return how to reach a device.

        Settings of the device take precedence over those of its host, and settings of the host over the defaults.

        Args:
            device: Name of the device.
            host: Name of the device's host in the platform.
            artifact_name: Name of the artifact's directory. It is a part of the default directory on the host.

        Returns:
            The location.

        Raises:
            DicompilerError: The file does not say how to reach the device.
        """
        settings = {**self.defaults, **self.entries.get(host, {}), **self.entries.get(device, {})}
        if "ssh" not in settings:
            known = {host, device} & self.entries.keys()
            cause = f"its entry {min(known)!r} has no key ssh" if known else self._describe_unknown_host(host)
            raise DicompilerError(f"{self.file}: device {device!r} cannot be reached: {cause}")
        return DeviceLocation(
            device,
            settings["ssh"],
            f"{settings.get('directory', DEFAULT_DIRECTORY.format(artifact_name)).rstrip('/')}/{device}",
            settings.get("python", DEFAULT_PYTHON),
            settings.get("port"),
            settings.get("identity"),
            settings.get("address"),
            settings.get("threads"),
            tuple(settings.get("cores", ())),
            settings.get("known_hosts"),
        )

    def _describe_unknown_host(self, host: str) -> str:
        hint = did_you_mean(host, self.entries)
        return f'there is no host {host!r}{hint}: add [[host]] with this name and ssh = "user@address"'


def parse_hosts(text: str, file: str = "hosts.toml") -> Hosts:
    """Parse the TOML text of a hosts file. Relative paths in it are relative to the directory of `file`.

    Raises:
        DicompilerError: The text is invalid; the message names `file`.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DicompilerError(f"{file}: not TOML: {error}") from None
    validate(document, "hosts", file)
    entries: dict[str, Mapping[str, Any]] = {}
    for index, entry in enumerate(document["host"]):
        key = f"{file}: host[{index}]"
        if entry["name"] in entries:
            raise DicompilerError(
                f"{key}.name: {entry['name']!r} is used twice: remove one of the two entries, or rename it"
            )
        entries[entry["name"]] = _resolve_entry(entry, key, file)
    return Hosts(file, _resolve_entry(document.get("defaults", {}), f"{file}: defaults", file), entries)


def _resolve_entry(entry: Mapping[str, Any], key: str, file: str) -> Mapping[str, Any]:
    """Return the settings of an entry of the hosts file, checked, with absolute paths and a port in `address`.

    `key` is the place of the entry in error messages.
    """
    settings = dict(entry)
    for name, content in (("identity", "a private key"), ("known_hosts", "the keys of hosts")):
        if name in settings:
            path = Path(file).absolute().parent / os.path.expanduser(settings[name])
            if not path.is_file():
                raise DicompilerError(f"{key}.{name}: {str(path)!r} is not a file: name the file of {content}")
            settings[name] = path
    if "address" in settings:
        settings["address"] = _parse_address(settings["address"], f"{key}.address")
    return settings


def _parse_address(text: str, key: str) -> str:
    """Return HOST:PORT for an address, with port 0 if it has none; IPv6 addresses are put in brackets."""
    expected = 'expected "10.0.0.2", "10.0.0.2:7000", "pi01.local" or "fd00::2"'
    try:
        host, port = split_address(text)
    except ValueError as error:
        raise DicompilerError(f"{key}: {error}: {expected}") from None
    if is_ip_address(host) and ipaddress.ip_address(host).is_unspecified:
        raise DicompilerError(f"{key}: {text!r} is not an address of a single host: {expected}")
    return join_address(host, port)
