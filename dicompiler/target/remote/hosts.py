"""Where devices are reached by ssh: a hosts.toml goes in; for each device its host, directory, Python and address out.

The file's schema is `base/schemas/hosts.schema.json`; `remote.ssh` connects to what is read here.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dicompiler.base.errors import DicompilerError, did_you_mean
from dicompiler.base.schema import read_text, validate

HOSTS_FORMAT = "dicompiler.hosts/1"
DEFAULT_DIRECTORY = ".cache/dicompiler/{}"
"""Where to copy to by default: below the home of who logs in; the name is that of the artifact's directory."""
DEFAULT_PYTHON = "python3"


@dataclass(frozen=True)
class DeviceLocation:
    """Where a device runs. `ssh`: what ssh connects to; `port` (of sshd) and `identity` (a private key's file): None
    where ssh is to find out itself. directory: the device's own, absolute or relative to the home there; python: a
    command, or such a path. listen: HOST:PORT at which its peers reach it, None: it finds out itself. threads: of a
    segment, None: as the artifact has it. cores: the processors to run on, empty: all.
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

    @property
    def title(self) -> str:
        """What messages call it: `device 'pi01' on pi@192.168.1.11`."""
        return f"device {self.device!r} on {self.ssh_destination}"


@dataclass(frozen=True)
class Hosts:
    """What a hosts.toml says. `file` is named in errors; `entries` by the name of a host or device."""

    file: str
    defaults: Mapping[str, Any]
    entries: Mapping[str, Mapping[str, Any]]

    @staticmethod
    def load(path: str | Path) -> Hosts:
        """The file at `path`. DicompilerError of one line: the file, the key, the cause, what is allowed."""
        missing = "no such file: write one that says where the devices are reached"
        return parse_hosts(read_text(path, missing), str(path))

    def locate_device(self, device: str, host: str, artifact_name: str) -> DeviceLocation:
        """Where the device, which is part of that host of the platform, runs. name: what the artifact is called.

        DicompilerError where the file does not say how to reach it.
        """
        settings = {**self.defaults, **self.entries.get(host, {}), **self.entries.get(device, {})}
        if "ssh" not in settings:
            known = {host, device} & self.entries.keys()
            cause = f"its entry {min(known)!r} has no ssh" if known else self._describe_unknown_host(host)
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
        )

    def _describe_unknown_host(self, host: str) -> str:
        close = did_you_mean(host, self.entries)
        return f'there is no host {host!r}{close}: add [[host]] with this name and ssh = "user@address"'


def parse_hosts(text: str, file: str = "hosts.toml") -> Hosts:
    """What a TOML text says. An error opens with `file`, from whose directory relative paths count."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DicompilerError(f"{file}: not TOML: {error}") from None
    validate(document, "hosts", file)
    entries: dict[str, Mapping[str, Any]] = {}
    for index, entry in enumerate(document["host"]):
        key = f"{file}: host[{index}]"
        if entry["name"] in entries:
            raise DicompilerError(f"{key}.name: {entry['name']!r} stands twice: remove one, or give it another name")
        entries[entry["name"]] = _resolve_entry(entry, key, file)
    return Hosts(file, _resolve_entry(document.get("defaults", {}), f"{file}: defaults", file), entries)


def _resolve_entry(entry: Mapping[str, Any], key: str, file: str) -> Mapping[str, Any]:
    """The entry with paths and addresses as they are used."""
    settings = dict(entry)
    if "identity" in settings:
        path = Path(file).absolute().parent / os.path.expanduser(settings["identity"])
        if not path.is_file():
            raise DicompilerError(f"{key}.identity: {str(path)!r} is no file: name that of a private key")
        settings["identity"] = path
    if "address" in settings:
        settings["address"] = _parse_address(settings["address"], f"{key}.address")
    return settings


def _parse_address(text: str, key: str) -> str:
    """HOST:PORT of an address with or without a port; in brackets for IPv6."""
    host, port = text, "0"
    if not _is_address(text):
        host, _, port = text.rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not _is_address(host) or not port.isdecimal() or int(port) > 65535:
            raise DicompilerError(f'{key}: {text!r} is no address: expected "10.0.0.2", "10.0.0.2:7000" or "fd00::2"')
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_address(text: str) -> bool:
    try:
        return not ipaddress.ip_address(text).is_unspecified
    except ValueError:
        return False
