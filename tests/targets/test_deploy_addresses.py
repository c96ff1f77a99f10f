"""Addresses of boards that `deploy` and `profile --hosts` are given: host names, link-local IPv6 with zones, and
ports that a firewall blocks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.boards import Cluster, call, cluster
from support.running import wait_until

import dicompiler
from dicompiler import networks
from dicompiler.target.run_records import RunOptions

NAMES = ("pi01", "pi02")


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two boards with names that this host resolves and the boards do not."""
    with cluster(tmp_path_factory.mktemp("boards"), NAMES) as made:
        made.known([*(f"{name}.local" for name in NAMES), *(board.address for board in made.boards.values())])
        names = Path("/etc/netns", made.space)
        names.mkdir(parents=True)
        try:
            lines = [f"{board.address} {board.name}.local\n" for board in made.boards.values()]
            (names / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
            yield made
        finally:
            shutil.rmtree(names)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("compiled") / "net"
    dicompiler.compile(networks.build("lenet"), platform="rpi4x2", strategy="modnn", output=directory)
    return directory


def run_command(boards: Cluster, *words: str) -> str:
    """Run a command of dicompiler on the hub, with the hub's host names; return its output."""
    done = start_command(boards, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fail_command(boards: Cluster, *words: str) -> tuple[str, float]:
    """Run a command that fails; return its error line and the seconds that it took."""
    since = time.monotonic()
    done = start_command(boards, *words)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1].removeprefix("dicompiler: error: "), time.monotonic() - since


def start_command(boards: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    with boards.inside():
        environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.run(
        ["ip", "netns", "exec", boards.space, sys.executable, "-m", "dicompiler", *words],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )


def link_local_address(space: str, device: str) -> str:
    """Return the link-local address of a network device, when it is usable."""

    def find() -> list[str]:
        listed = call("ip", "-n", space, "-6", "addr", "show", "dev", device, "scope", "link")
        return [] if "tentative" in listed else re.findall(r"inet6 (\S+)/", listed)

    wait_until(lambda: bool(find()))
    return find()[0]


@pytest.mark.slow
def test_boards_get_addresses_instead_of_names(boards: Cluster, net: Path, tmp_path: Path) -> None:
    hosts = boards.hosts(tmp_path / "hosts.toml")
    text = re.sub(
        r'ssh = "root@10\.77\.0\.(\d)"', lambda m: f'ssh = "root@pi0{int(m[1]) - 1}.local"', hosts.read_text()
    )
    hosts.write_text(text.replace('ssh = "root@pi02.local"', 'ssh = "root@pi02.local"\naddress = "pi02.local:7070"'))
    output = run_command(boards, "deploy", str(net), "--hosts", str(hosts), "--insecure", "--verify")
    assert "output on pi01  ok" in output

    network = tmp_path / "lenet.onnx"
    network.write_bytes(networks.build("lenet").SerializeToString())
    options = ["--tiles", "1", "--repeat", "2", "--threads", "1", "--target", "none", "--force", "--json"]
    measured = tmp_path / "measured.toml"
    output = run_command(boards, "profile", str(network), "--hosts", str(hosts), "-o", str(measured), *options)
    (link,) = json.loads(output)["links"]
    assert sorted(link["hosts"]) == list(NAMES) and link["bandwidth"] > 1e6


@pytest.mark.slow
def test_link_local_addresses_need_no_common_names_of_interfaces(boards: Cluster, net: Path, tmp_path: Path) -> None:
    """On the boards, the interface is `net`; on this host it is `bridge`."""
    hosts = boards.hosts(tmp_path / "hosts.toml")
    text = hosts.read_text()
    for board in boards.boards.values():
        address = link_local_address(board.space, "net")
        text = text.replace(f'root@{board.address}"', f'root@{board.address}"\naddress = "{address}%net"')
    hosts.write_text(text)
    listen = f"[{link_local_address(boards.space, 'bridge')}%bridge]:0"
    options = ["--hosts", str(hosts), "--insecure", "--verify", "--listen", listen]
    assert "output on pi01  ok" in run_command(boards, "deploy", str(net), *options)


@pytest.mark.parametrize("listen", ["::1", "[::1]:0", "localhost", "127.0.0.1"])
def test_runs_listen_at_addresses_without_port(listen: str, net: Path) -> None:
    result = dicompiler.run(net, options=RunOptions(listen=listen, timeout_s=60))
    assert result.outputs[0]["output"].shape == (1, 10)


@contextlib.contextmanager
def dropped_packets(space: str, address: str) -> Iterator[None]:
    """Lose all packets from a network namespace to an address, without a sign to the sender, like a firewall."""
    call(
        "ip", "-n", space, "neigh", "replace", address, "lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "net"
    )
    try:
        yield
    finally:
        call("ip", "-n", space, "neigh", "del", address, "dev", "net")


@pytest.mark.slow
def test_firewall_between_boards_is_named_within_seconds(boards: Cluster, net: Path, tmp_path: Path) -> None:
    first, second = boards.boards.values()
    hosts = boards.hosts(tmp_path / "hosts.toml")
    with dropped_packets(first.space, second.address):
        options = ["--hosts", str(hosts), "--insecure", "--timeout", "200"]
        line, seconds = fail_command(boards, "deploy", str(net), *options)
    assert re.match(
        r"device 'pi02' on root@10\.77\.0\.3: device 'pi01' reports: cannot connect to 'pi02' at 10\.77\.0\.3:\d+: no "
        r"answer within 10 s: a firewall may block the connection: allow this port in the firewall there \(the key",
        line,
    )
    assert seconds < 100


@pytest.mark.slow
def test_firewall_of_this_host_is_named_within_seconds(boards: Cluster, net: Path, tmp_path: Path) -> None:
    here = "10.77.0.99"
    call("ip", "-n", boards.space, "address", "add", f"{here}/24", "dev", "bridge")
    hosts = boards.hosts(tmp_path / "hosts.toml")
    with dropped_packets(boards.boards["pi02"].space, here):
        options = ["--hosts", str(hosts), "--insecure", "--timeout", "200", "--listen", f"{here}:7000"]
        line, seconds = fail_command(boards, "deploy", str(net), *options)
    assert re.match(
        r"device 'pi02' on root@10\.77\.0\.3: its process ended with exit code 1: pi02: cannot reach the coordinator "
        r"at 10\.77\.0\.99:7000: no answer within 10 s: a firewall may block the connection: allow this port .*--lis",
        line,
    )
    assert seconds < 100
