"""Reader of AutoDiCE's files `platform.txt` and `mapping.json`.

`platform.txt` has one line for each host. `mapping.json` lists layers under keys such as `nx01_gpu`, one for each
device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dicompiler.plugin_api import Device, DicompilerError, Host, Network, Platform
from dicompiler.plugin_api.utilities import did_you_mean, load_json, read_text

# AutoDiCE's files contain no compute rates and no memory sizes. These values are those of the boards in its paper.
CORE_FLOPS = 91e9 / 6
GPU_FLOPS = 342e9
MEMORY_BYTES = 8 * 2**30
ASSUMED_NETWORK = Network("switch", 1e9)
ASSUMPTION_NOTE = (
    "From AutoDiCE's files, which contain no rates. Assumed for every host: a Jetson Xavier NX (15.2 GFLOP/s for each"
    " core, 342 GFLOP/s for a GPU, 8 GiB) on a gigabit switch."
)


@dataclass(frozen=True)
class AutodiceHost:
    """One line of platform.txt, such as `nx01, arm, slots=0-5, gpu=NVIDIAVolta (CUDA)`.

    Attributes:
        name: Name of the host.
        architecture: Architecture of the processor, such as "arm".
        cores: Numbers of the cores that may be used ("slots").
        gpu: Name of the GPU; None if there is none.
    """

    name: str
    architecture: str
    cores: range
    gpu: str | None


@dataclass(frozen=True)
class MappingKey:
    """A key of mapping.json: `nx01_arm012` means the cores 0, 1 and 2 of host nx01, `nx01_gpu` means its GPU.

    Attributes:
        text: The key as it is written.
        host: Name of the host.
        kind: "gpu", "arm" or "cpu".
        cores: Numbers of the cores; empty for a GPU.
    """

    text: str
    host: str
    kind: str
    cores: tuple[int, ...]

    @property
    def is_gpu(self) -> bool:
        return self.kind == "gpu"

    @property
    def device(self) -> str:
        """Name of the device: the key with `-` instead of commas, because device names must not contain commas."""
        return self.text.replace(",", "-")


def parse_key(text: str, place: str) -> MappingKey:
    """Parse a key of mapping.json: `nx01_arm012` (one digit per core), `nx01_cpu10,11` (a list) or `nx01_gpu`.

    Args:
        text: The key.
        place: Beginning of error messages.
    """
    match = re.fullmatch(r"(.+)_(?:(gpu)|(arm|cpu)(\d+(?:,\d+)*,?))", text)
    if match is None:
        raise DicompilerError(
            f"{place}: key {text!r} does not name a resource: write <host>_gpu, <host>_arm012 (each digit a core) or "
            "<host>_cpu10,11 (a list of cores)"
        )
    host, gpu, kind, digits = match.groups()
    if gpu:
        return MappingKey(text, host, gpu, ())
    listed = [part for part in digits.split(",") if part] if "," in digits else digits
    cores = tuple(int(core) for core in listed)
    if len(set(cores)) < len(cores):
        raise DicompilerError(f"{place}: key {text!r} names a core twice: write cores above 9 as a list, arm10,11")
    return MappingKey(text, host, kind, cores)


def load_mapping(path: str | Path) -> dict[MappingKey, tuple[str, ...]]:
    """Return the names of the layers under each key of AutoDiCE's mapping.json, in file order.

    Raises:
        DicompilerError: The file or a key is invalid.
    """
    document: Any = load_json(path)
    if not isinstance(document, dict) or not document:
        raise DicompilerError(f'{path}: expected an object such as {{"nx01_arm012": ["conv1"]}}')
    mapping = {}
    for text, names in document.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DicompilerError(f"{path}: key {text!r}: expected a list of layers' names")
        mapping[parse_key(text, str(path))] = tuple(names)
    return mapping


def load_hosts(path: str | Path) -> tuple[AutodiceHost, ...]:
    """Return the hosts of AutoDiCE's platform.txt, without empty lines and comments (#)."""
    hosts: list[AutodiceHost] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        host = _parse_host(line, f"{path}:{number}")
        if host.name in [other.name for other in hosts]:
            raise DicompilerError(f"{path}:{number}: host {host.name!r} is listed twice: remove one line")
        hosts.append(host)
    if not hosts:
        raise DicompilerError(f"{path}: no hosts: write lines such as 'nx01, arm, slots=0-5, gpu=NVIDIAVolta (CUDA)'")
    return tuple(hosts)


def _parse_host(line: str, place: str) -> AutodiceHost:
    match = re.fullmatch(
        r"\s*([^\s,]+)\s*,\s*([^\s,=]+)\s*,\s*slots=(\d+)(?:-(\d+))?\s*(?:,\s*gpu=([^,]+?)\s*)?,?\s*", line
    )
    if match is None:
        raise DicompilerError(
            f"{place}: {line.strip()!r} is not a host: write 'name, architecture, slots=0-5' and, for a GPU, "
            "', gpu=NVIDIAVolta (CUDA)'"
        )
    name, architecture, first, last, gpu = match.groups()
    cores = range(int(first), int(last or first) + 1)
    if not cores:
        raise DicompilerError(f"{place}: slots={first}-{last}: the first core comes after the last")
    return AutodiceHost(name, architecture, cores, gpu)


def platform_from_mapping(mapping: str | Path, platform_txt: str | Path) -> Platform:
    """Return a platform with the hosts of AutoDiCE's platform.txt and one device for each key of its mapping.json.

    The files contain no compute rates, memory sizes or network, so ASSUMPTION_NOTE lists the assumed ones.
    """
    hosts = load_hosts(platform_txt)
    keys = tuple(load_mapping(mapping))
    by_name = {host.name: host for host in hosts}
    for key in keys:
        _check_key(key, by_name, f"{mapping}: key {key.text!r}")
    return _build_platform(Path(platform_txt).stem, hosts, keys)


def platform_from_hosts(platform_txt: str | Path) -> Platform:
    """Return AutoDiCE's platform with one device for all CPU cores of each host, and one for each GPU."""
    hosts = load_hosts(platform_txt)
    keys = []
    for host in hosts:
        kind = "arm" if host.architecture.startswith("arm") else "cpu"
        listed = "".join(map(str, host.cores)) if host.cores[-1] < 10 else "".join(f"{core}," for core in host.cores)
        keys.append(parse_key(f"{host.name}_{kind}{listed.rstrip(',') if len(host.cores) > 1 else listed}", "key"))
        if host.gpu is not None:
            keys.append(parse_key(f"{host.name}_gpu", "key"))
    return _build_platform(Path(platform_txt).stem, hosts, keys)


def _build_platform(name: str, hosts: Sequence[AutodiceHost], keys: Sequence[MappingKey]) -> Platform:
    devices = tuple(
        Device(key.device, key.host, GPU_FLOPS, gpu=True)
        if key.is_gpu
        else Device(key.device, key.host, CORE_FLOPS * len(key.cores), len(key.cores))
        for key in keys
    )
    return Platform(
        name, tuple(Host(host.name, MEMORY_BYTES) for host in hosts), devices, ASSUMED_NETWORK, ASSUMPTION_NOTE
    )


def _check_key(key: MappingKey, hosts: Mapping[str, AutodiceHost], place: str) -> None:
    if key.host not in hosts:
        raise DicompilerError(f"{place}: unknown host {key.host!r}{did_you_mean(key.host, hosts)}")
    host = hosts[key.host]
    if key.is_gpu and host.gpu is None:
        raise DicompilerError(
            f"{place}: host {key.host!r} has no GPU in the platform file (it has {_describe_cores(host)})"
        )
    if key.kind == "arm" and not host.architecture.lower().startswith(("arm", "aarch")):
        raise DicompilerError(
            f"{place}: the processor of host {key.host!r} is {host.architecture}, not arm: write 'cpu' instead of 'arm'"
        )
    for core in key.cores:
        if core not in host.cores:
            raise DicompilerError(f"{place}: host {key.host!r} has no core {core} (it has {_describe_cores(host)})")


def _describe_cores(host: AutodiceHost) -> str:
    return f"cores {host.cores[0]} to {host.cores[-1]}" if len(host.cores) > 1 else f"core {host.cores[0]}"


def find_device(key: MappingKey, platform: Platform, place: str) -> Device:
    """Return the platform's device for a key of mapping.json, such as `nx01_arm012` (host nx01, cores 0 to 2).

    It is the device with the key's name. If there is none, it is the host's only device of the key's kind (CPU or GPU).
    Error messages begin with `place`.
    """
    by_name = {device.name: device for device in platform.devices}
    if key.device in by_name:
        return by_name[key.device]
    hosts = [host.name for host in platform.hosts]
    if key.host not in hosts:
        known = did_you_mean(key.host, hosts)
        raise DicompilerError(f"{place}: key {key.text!r}: platform {platform.name!r} has no host {key.host!r}{known}")
    computing = [device for device in platform.devices if device.host == key.host and device.can_compute]
    fitting = [device for device in computing if device.gpu == key.is_gpu]
    if len(fitting) != 1:
        kind = "GPU" if key.is_gpu else "CPU device"
        names = ", ".join(device.name for device in computing) or "none that computes"
        found = f"several {kind}s" if fitting else f"no {kind}"
        raise DicompilerError(
            f"{place}: key {key.text!r}: host {key.host!r} has {found} on platform {platform.name!r} (its devices: "
            f"{names})"
        )
    return fitting[0]
