"""Emulated network: a network namespace for each host of a platform, with rate-limited links between them.

    host ──out──► router ──medium──► router ──in──► host

The arrows are links, with their names. A host's link is limited in both directions. The medium is a link that all hosts
share, or a relay that delays packets. Without a medium, both routers are the same namespace.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.platform import Platform
from dicompiler.measure.emulation import relay

EMULATED_SUBNET = ipaddress.ip_network("10.77.0.0/16")
UPLINK_ROUTER_ADDRESS, DOWNLINK_ROUTER_ADDRESS = "10.77.255.1", "10.77.255.2"
"""Addresses of the router to which hosts send, and of the router from which they receive."""
MAX_HOSTS = 4096
"""Largest number of emulated hosts. More would take too long to create."""
NAMESPACES = Path("/run/netns")
"""Directory in which `ip netns` keeps the names of namespaces."""
SBIN_PATH = ":/usr/sbin:/sbin"
"""Directories of ip and tc on Debian, appended to PATH."""

ETHERNET_FRAME_BYTES = 1514
MAX_PIECE_BYTES = 8 * 65535
"""Largest number of bytes that the kernel can pass to a network device at once."""
MAX_BURST_S = 250e-6
"""Maximum seconds that a link needs to send the data that the kernel passes to it at once (at least one packet)."""
TIMER_DELAY_S = 80e-6
"""Seconds by which the kernel's timers may be late. A link may send data for this time without waiting for a timer."""

CONGESTION_CONTROL = "reno"
"""TCP's congestion control in the emulated network.

Every kernel permits it. Boards use cubic by default, which behaves like reno on links with short round trips (RFC 9438,
section 4.3). This host may use another one: with bbr, links are idle at times.
"""


@dataclass(frozen=True)
class RateLimit:
    """A limit of the rate at which a network device sends.

    Attributes:
        tc: Path of the command tc.
        namespace: Network namespace of the device.
        device: Name of the network device.
        rate: The limit in bit/s.
    """

    tc: str
    namespace: str
    device: str
    rate: float

    @property
    def piece_bytes(self) -> int:
        """Largest number of bytes that the kernel passes to the network device at once."""
        return min(MAX_PIECE_BYTES, max(ETHERNET_FRAME_BYTES, int(self.rate / 8 * MAX_BURST_S)))

    def set_rate(self, rate: float) -> None:
        """Limit the device to `rate` bit/s by a token bucket filter (tbf), which replaces the previous one."""
        # After a pause, a token bucket sends a burst at full speed, unlike a cable, so the burst must be small. But if
        # it were hardly larger than a piece, the link would be idle while it waits for the kernel's late timers.
        burst = self.piece_bytes + int(rate / 8 * TIMER_DELAY_S)
        limit = min(2_000_000, max(64_000, int(rate / 8 * 0.05)))
        arguments = ("root", "tbf", "rate", f"{rate:.0f}bit", "burst", str(burst), "limit", str(limit))
        _run_command(self.tc, "-n", self.namespace, "qdisc", "replace", "dev", self.device, *arguments)


@dataclass(frozen=True)
class EmulatedNetwork:
    """The hosts of an emulated network.

    Attributes:
        namespaces: Network namespaces by host name.
        addresses: IP addresses by host name.
        limits: Rate limits of a host's links, by host name; the key `*` is for a medium that all hosts share.
    """

    namespaces: dict[str, str] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    limits: dict[str, list[RateLimit]] = field(default_factory=dict)

    def scale_links(self, host: str, speed: float) -> None:
        """Limit the links of a host, or the shared medium if `host` is `*`, to `speed` times their original rates.

        Raises:
            DicompilerError: The kernel refuses the limit.
        """
        for limit in self.limits[host]:
            limit.set_rate(speed * limit.rate)

    @contextlib.contextmanager
    def enter_host(self, host: str) -> Iterator[None]:
        """Move this thread to the network of a host, until the end of the `with` block.

        Processes that the thread starts in the block use this network too.
        """
        with open("/proc/thread-self/ns/net") as before, open(NAMESPACES / self.namespaces[host]) as namespace:
            _enter_namespace(namespace.fileno())
            try:
                yield
            finally:
                _enter_namespace(before.fileno())


def _enter_namespace(descriptor: int) -> None:
    try:
        relay.enter_namespace(descriptor)
    except OSError as error:
        cause = error.strerror
        raise DicompilerError(f"emulate: a network namespace cannot be entered: {cause}: run it as root") from error


@contextlib.contextmanager
def emulate_network(platform: Platform) -> Iterator[EmulatedNetwork]:
    """Create the emulated network of a platform, and remove it at the end of the `with` block.

    Raises:
        DicompilerError: This host cannot emulate the network.
    """
    if os.geteuid() != 0:
        raise DicompilerError("emulate: network namespaces and rate limits need root: run it as root")
    path = f"{os.environ.get('PATH', '')}{SBIN_PATH}"
    tools = {name: shutil.which(name, path=path) for name in ("ip", "tc")}
    for name, tool in tools.items():
        if tool is None:
            raise DicompilerError(f"emulate: {name!r} is missing: install iproute2")
    if len(platform.hosts) > MAX_HOSTS:
        raise DicompilerError(f"emulate: {len(platform.hosts)} hosts are too many: use at most {MAX_HOSTS}")
    _remove_abandoned_networks(str(tools["ip"]))
    with _NamespaceBuilder(str(tools["ip"]), str(tools["tc"]), platform) as network:
        yield network


def _remove_abandoned_networks(ip: str) -> None:
    for path in NAMESPACES.glob("dc*x*"):
        # The digits in the namespace's name are the id of the process that created it.
        match = re.fullmatch(r"dc(\d+)x\w+", path.name)
        if match and not Path("/proc", match[1]).exists():
            subprocess.run([ip, "netns", "del", path.name], capture_output=True)


class _NamespaceBuilder:
    """A context manager that creates the namespaces and links of an emulated network, and removes them at its end."""

    def __init__(self, ip: str, tc: str, platform: Platform) -> None:
        self.ip, self.tc, self.platform = ip, tc, platform
        self.namespace_prefix = f"dc{os.getpid()}x"
        hosts = zip(platform.hosts, EMULATED_SUBNET.hosts(), strict=False)
        self.addresses = {host.name: str(address) for host, address in hosts}
        self.rules = relay.make_relay_rules(platform, self.addresses)
        self.is_shared = platform.network.kind != "switch"
        self.uplink_router = f"{self.namespace_prefix}u"
        self.downlink_router = f"{self.namespace_prefix}d" if self.rules or self.is_shared else self.uplink_router
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
        for namespace in self.created_namespaces:
            subprocess.run([self.ip, "netns", "del", namespace], capture_output=True)

    def _create(self) -> EmulatedNetwork:
        network = EmulatedNetwork()
        for router in dict.fromkeys((self.uplink_router, self.downlink_router)):
            self._add_namespace(router, forward=True)
        for index, host in enumerate(self.platform.hosts):
            address = network.addresses[host.name] = self.addresses[host.name]
            network.namespaces[host.name] = f"{self.namespace_prefix}{index}"
            network.limits[host.name] = self._add_host(index, address, self._host_rate(host.bandwidth))
        if self.uplink_router != self.downlink_router:
            network.limits["*"] = self._add_medium()
        return network

    def _host_rate(self, own_rate: float | None) -> float | None:
        """Return the rate limit of a host's link in bit/s; None if there is no limit."""
        rates = [] if own_rate is None else [own_rate]
        network = self.platform.network
        if network.kind == "switch":
            # A platform can state links between two hosts. A host is limited to the fastest of them, and the relay
            # process limits each pair of hosts to its own link.
            rates.append(max([network.bandwidth, *(link.bandwidth for link in network.links)]))
        return min(rates, default=None)

    def _add_namespace(self, name: str, forward: bool = False) -> None:
        _run_command(self.ip, "netns", "add", name)
        self.created_namespaces.append(name)
        settings = ["net.ipv4.conf.all.rp_filter", "net.ipv4.conf.default.rp_filter"]
        values = dict.fromkeys(settings, "0") | {"net.ipv4.tcp_congestion_control": CONGESTION_CONTROL}
        if forward:
            values["net.ipv4.ip_forward"] = "1"
        with EmulatedNetwork({"": name}).enter_host(""):
            for setting, value in values.items():
                Path("/proc/sys", setting.replace(".", "/")).write_text(value)
        self._run_ip(name, "link set lo up")

    def _add_host(self, index: int, address: str, rate: float | None) -> list[RateLimit]:
        """Add a host with a link to the uplink router and a link from the downlink router; return their rate limits.

        Args:
            index: Number of the host, for the names of its namespace and links.
            address: IP address of the host.
            rate: Limit of each link in bit/s; None for no limit.
        """
        namespace, out, into = f"{self.namespace_prefix}{index}", f"o{index}", f"i{index}"
        self._add_namespace(namespace)
        self._run_ip(
            namespace,
            f"link add out type veth peer name {out} netns {self.uplink_router}",
            f"link add in type veth peer name {into} netns {self.downlink_router}",
            "link set out up",
            "link set in up",
            f"address add {address}/{EMULATED_SUBNET.prefixlen} dev in noprefixroute",
            f"route add default via {UPLINK_ROUTER_ADDRESS} dev out onlink src {address}",
        )
        self._run_ip(self.uplink_router, f"link set {out} up", f"address add {UPLINK_ROUTER_ADDRESS}/32 dev {out}")
        self._run_ip(
            self.downlink_router,
            f"link set {into} up",
            f"address add {DOWNLINK_ROUTER_ADDRESS}/32 dev {into}",
            f"route add {address}/32 dev {into}",
        )
        if rate is None:
            return []
        return [self._limit_rate(namespace, "out", rate), self._limit_rate(self.downlink_router, into, rate)]

    def _add_medium(self) -> list[RateLimit]:
        """Connect the two routers by a link that all hosts share, or by a relay that delays packets.

        Returns:
            The rate limit of the shared link, if there is one.
        """
        uplink, downlink = self.uplink_router, self.downlink_router
        if self.rules:
            self.relay = relay.start_relay(self.rules, uplink, downlink)
        else:
            self._run_ip(uplink, f"link add medium type veth peer name medium netns {downlink}", "link set medium up")
            self._run_ip(downlink, "link set medium up", "address add 10.77.254.2/30 dev medium")
            self._run_ip(uplink, "address add 10.77.254.1/30 dev medium")
        limits = []
        if self.is_shared:
            limits.append(self._limit_rate(uplink, "medium", self.platform.network.bandwidth))
        self._run_ip(uplink, "route add default dev medium" + ("" if self.rules else " via 10.77.254.2"))
        return limits

    def _limit_rate(self, namespace: str, device: str, rate: float) -> RateLimit:
        limit = RateLimit(self.tc, namespace, device, rate)
        limit.set_rate(rate)
        self._run_ip(namespace, f"link set {device} gso_max_size {limit.piece_bytes}")
        return limit

    def _run_ip(self, namespace: str, *lines: str) -> None:
        _run_command(self.ip, "-n", namespace, "-batch", "-", stdin="\n".join(lines))


def _run_command(*arguments: str, stdin: str = "") -> None:
    result = subprocess.run(arguments, input=stdin, capture_output=True, text=True)
    if result.returncode:
        cause = (result.stderr.strip().splitlines() or ["no error message"])[0]
        raise DicompilerError(
            f"emulate: this host cannot create the network ({' '.join(arguments[:6])}: {cause}): use a kernel with "
            "network namespaces, veth and tbf"
        )
