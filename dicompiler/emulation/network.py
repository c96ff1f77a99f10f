"""The network of a platform on this host: a network namespace for each of its hosts, and shaped lines between them.

Platform → namespaces, which last as long as the block:   host ──out──► router ──medium──► router ──in──► host.
A host's own line is shaped at both of its ends, what all hosts share is the medium; where nothing is shared or held up
there both routers are one. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dicompiler.base.errors import DicompilerError
from dicompiler.emulation import relay
from dicompiler.ir.platform import Platform

EMULATED_SUBNET = ipaddress.ip_network("10.77.0.0/16")
"""Where all emulated hosts are."""
UPLINK_ROUTER_ADDRESS, DOWNLINK_ROUTER_ADDRESS = "10.77.255.1", "10.77.255.2"
"""The routers' addresses: to where hosts send, and from where they receive."""
MAX_HOSTS = 4096
"""More namespaces than that no host makes in a reasonable time."""
SBIN_PATH = ":/usr/sbin:/sbin"
"""Where Debian has ip and tc, besides what PATH says."""

ETHERNET_FRAME_BYTES, MAX_BURST_S, TIMER_DELAY_S = 1514, 250e-6, 80e-6
"""Bytes of a frame on the line. For how many seconds it carries what the kernel hands on in one piece, and how late the
kernel's timers may be without the line standing idle."""


@dataclass(frozen=True)
class EmulatedNetwork:
    """Where each host of a platform is: `spaces` (network namespaces) and `addresses`, by the host's name."""

    namespaces: dict[str, str] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def enter_host(self, host: str) -> Iterator[None]:
        """This thread, and the threads and processes that it starts, are on that host's network."""
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self.namespaces[host]}") as there:
            _enter_namespace(there.fileno())
            try:
                yield
            finally:
                _enter_namespace(before.fileno())


def _enter_namespace(space: int) -> None:
    try:
        relay.enter_namespace(space)
    except OSError as error:
        cause = error.strerror
        raise DicompilerError(f"emulate: a network namespace cannot be entered: {cause}: run it as root") from error


@contextlib.contextmanager
def emulate_network(platform: Platform) -> Iterator[EmulatedNetwork]:
    """Makes the platform's network, and takes it away whatever happens. DicompilerError where this host cannot."""
    if os.geteuid() != 0:
        raise DicompilerError("emulate: network namespaces and shaped lines need root: run it as root")
    places = f"{os.environ.get('PATH', '')}{SBIN_PATH}"
    tools = {name: shutil.which(name, path=places) for name in ("ip", "tc")}
    for name, path in tools.items():
        if path is None:
            raise DicompilerError(f"emulate: {name!r} is missing: install iproute2")
    if len(platform.hosts) > MAX_HOSTS:
        raise DicompilerError(f"emulate: {len(platform.hosts)} hosts are more than this host can carry ({MAX_HOSTS})")
    with _NetworkBuilder(str(tools["ip"]), str(tools["tc"]), platform) as made:
        yield made


class _NetworkBuilder:
    """Makes namespaces and lines, and takes them away. `mark` begins the names of all its namespaces."""

    def __init__(self, ip: str, tc: str, platform: Platform) -> None:
        self.ip, self.tc, self.platform = ip, tc, platform
        self.namespace_prefix = f"dc{os.getpid()}x"
        hosts = zip(platform.hosts, EMULATED_SUBNET.hosts(), strict=False)
        self.addresses = {host.name: str(address) for host, address in hosts}
        self.rules = relay.make_relay_rules(platform, self.addresses)
        self.shared = platform.network.kind != "switch"
        self.up = f"{self.namespace_prefix}u"
        self.down = f"{self.namespace_prefix}d" if self.rules or self.shared else self.up
        self.created_namespaces: list[str] = []
        self.relay: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EmulatedNetwork:
        try:
            return self._create()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self.relay is not None:
            self.relay.kill()
            self.relay.wait()
        for space in self.created_namespaces:
            subprocess.run([self.ip, "netns", "del", space], capture_output=True)

    def _create(self) -> EmulatedNetwork:
        emulated = EmulatedNetwork()
        for router in dict.fromkeys((self.up, self.down)):
            self._add_namespace(router, forward=True)
        for index, host in enumerate(self.platform.hosts):
            address = emulated.addresses[host.name] = self.addresses[host.name]
            emulated.namespaces[host.name] = f"{self.namespace_prefix}{index}"
            self._add_host(index, address, self._host_rate(host.bandwidth))
        if self.up != self.down:
            self._add_medium()
        return emulated

    def _host_rate(self, own: float | None) -> float | None:
        """bit/s of a host's own line; None where nothing limits it."""
        line = self.platform.network.bandwidth if self.platform.network.kind == "switch" else None
        widest = max([link.bandwidth for link in self.platform.network.links], default=0.0)
        # What one link may carry, its host's line must carry; what others may not, the relay keeps them from.
        line = None if line is None else max(line, widest)
        return min((rate for rate in (line, own) if rate is not None), default=None)

    def _add_namespace(self, name: str, forward: bool = False) -> None:
        self._run_command(self.ip, "netns", "add", name)
        self.created_namespaces.append(name)
        settings = ["net.ipv4.conf.all.rp_filter", "net.ipv4.conf.default.rp_filter"]
        values = dict.fromkeys(settings, "0") | ({"net.ipv4.ip_forward": "1"} if forward else {})
        with EmulatedNetwork({"": name}).enter_host(""):
            for setting, value in values.items():
                Path("/proc/sys", setting.replace(".", "/")).write_text(value)
        self._run_ip(name, "link set lo up")

    def _add_host(self, index: int, address: str, rate: float | None) -> None:
        """A host with a line to each router: to one it sends, from the other it receives."""
        space, out, into = f"{self.namespace_prefix}{index}", f"o{index}", f"i{index}"
        self._add_namespace(space)
        self._run_ip(
            space,
            f"link add out type veth peer name {out} netns {self.up}",
            f"link add in type veth peer name {into} netns {self.down}",
            "link set out up",
            "link set in up",
            f"address add {address}/{EMULATED_SUBNET.prefixlen} dev in noprefixroute",
            f"route add default via {UPLINK_ROUTER_ADDRESS} dev out onlink src {address}",
        )
        self._run_ip(self.up, f"link set {out} up", f"address add {UPLINK_ROUTER_ADDRESS}/32 dev {out}")
        self._run_ip(
            self.down,
            f"link set {into} up",
            f"address add {DOWNLINK_ROUTER_ADDRESS}/32 dev {into}",
            f"route add {address}/32 dev {into}",
        )
        if rate is not None:
            self._limit_rate(space, "out", rate)
            self._limit_rate(self.down, into, rate)

    def _add_medium(self) -> None:
        """What lies between two routers: one line for all, or a relay that delays."""
        if self.rules:
            self.relay = relay.start_relay(self.rules, self.up, self.down)
        else:
            self._run_ip(self.up, f"link add medium type veth peer name medium netns {self.down}", "link set medium up")
            self._run_ip(self.down, "link set medium up", "address add 10.77.254.2/30 dev medium")
            self._run_ip(self.up, "address add 10.77.254.1/30 dev medium")
        if self.shared:
            self._limit_rate(self.up, "medium", self.platform.network.bandwidth)
        self._run_ip(self.up, "route add default dev medium" + ("" if self.rules else " via 10.77.254.2"))

    def _limit_rate(self, space: str, device: str, rate: float) -> None:
        """Lets a device send at `rate` bit/s. What the kernel hands on in one piece must be small, and no more than a
        piece and a bit be let through at once where the line was idle: a cable would let nothing through. With smaller
        pieces all lines together would take more of the processors than there is; with fewer bytes at once a line
        would wait for the kernel's timers, which are late."""
        piece = max(ETHERNET_FRAME_BYTES, int(rate / 8 * MAX_BURST_S))
        burst = piece + int(rate / 8 * TIMER_DELAY_S)
        limit = min(2_000_000, max(64_000, int(rate / 8 * 0.05)))
        words = ("root", "tbf", "rate", f"{rate:.0f}bit", "burst", str(burst), "limit", str(limit))
        self._run_command(self.tc, "-n", space, "qdisc", "add", "dev", device, *words)
        self._run_ip(space, f"link set {device} gso_max_size {piece}")

    def _run_ip(self, space: str, *lines: str) -> None:
        self._run_command(self.ip, "-n", space, "-batch", "-", given="\n".join(lines))

    def _run_command(self, *words: str, given: str = "") -> None:
        done = subprocess.run(words, input=given, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["it says nothing"])[0]
            raise DicompilerError(
                f"emulate: this host cannot make the network ({' '.join(words[:6])}: {said}): it needs network "
                "namespaces, veth and tbf in its kernel"
            )
