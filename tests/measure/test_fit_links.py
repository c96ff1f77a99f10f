"""Tests of the link fit: it finds the figures behind simulated pauses, and reports undetermined ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.cost.simulator import simulate
from dicompiler.cost.workload import DeviceWork, Job, Message, Workload
from dicompiler.ir.cluster import Link, Network
from dicompiler.ir.platform import Platform
from dicompiler.measure.fit_links import NetworkParameter, find_pauses, fit_links

COSTS = RuntimeCosts(send=1e-4, receive=1e-4, call=2e-4, per_byte=1e-9)


def cluster(bandwidth: float, latency: float, link: float = 0.0, own: float = 0.0) -> Platform:
    """Return three boards. link: rate between the first two, in bit/s; own: rate of the third."""
    boards = Platform.load("rpi4x3")
    links = (Link(("pi01", "pi02"), link, latency),) if link else ()
    hosts = (*boards.hosts[:2], replace(boards.hosts[2], bandwidth=own)) if own else boards.hosts
    return replace(boards, hosts=hosts, network=Network("switch", bandwidth, latency, links))


def work(*sizes: int) -> Workload:
    """Return a workload: the first board sends a message of each size, and gets an answer of twice the size."""
    count = len(sizes)
    there = [Message(0, 1 + i % 2, size, f"to{i}") for i, size in enumerate(sizes)]
    back = [Message(1 + i % 2, 0, 2 * size, f"from{i}") for i, size in enumerate(sizes)]
    first = [Job(f"a{i}", 1e-3, (count + i - 1,) if i else (), (i,), 0) for i in range(count)]
    first.append(Job("end", 1e-3, (2 * count - 1,), (), 1))
    others = [
        tuple(Job(f"b{i}", 2e-3, (i,), (count + i,), 0) for i in range(count) if 1 + i % 2 == board) for board in (1, 2)
    ]
    devices = [
        DeviceWork(f"pi0{i + 1}", f"pi0{i + 1}", (), jobs, COSTS) for i, jobs in enumerate((tuple(first), *others))
    ]
    return Workload(tuple(devices), (*there, *back))


def seen(truth: Platform, played: Workload, late: float = 0.0) -> dict[str, list[float]]:
    """Return the pauses on boards whose inputs arrive after `late` seconds."""
    spans: dict[str, list[tuple[float, float]]] = {one.device: [] for one in played.devices}
    for span in simulate(played, truth).spans:
        if span.kind == "compute":
            spans[span.device].append((span.start + COSTS.call + late, span.end + late))
    return {name: list(own) for name, own in find_pauses(spans, late).items()}


def fitted(guess: Platform, truth: Platform, played: Workload, late: float = 0.0) -> tuple[Platform, set[str]]:
    found, reasons, left = fit_links(guess, NetworkParameter.of_platform(guess), [played], [seen(truth, played, late)])
    if not reasons:
        assert max(left[0].values()) < 1e-4
    return found, set(reasons)


@pytest.mark.parametrize(
    ("guess", "truth"),
    [
        (cluster(1e8, 1e-3), cluster(2e7, 5e-3)),
        (cluster(1e7, 5e-3), cluster(1e8, 0.0)),
        (cluster(1e8, 1e-3, link=1e8, own=1e8), cluster(4e7, 2e-3, link=1e7, own=2e7)),
    ],
)
def test_finds_figures_behind_pauses(guess: Platform, truth: Platform) -> None:
    found, _ = fitted(guess, truth, work(500_000, 20_000, 1_000, 200_000, 80_000, 3_000), late=0.003)
    # Pauses of a device do not show if a link, its host or the network limits the speed, so only links are compared.
    for peer in ("pi02", "pi03"):
        made, due = found.link("pi01", peer), truth.link("pi01", peer)
        assert made is not None and due is not None
        assert made.bandwidth == pytest.approx(due.bandwidth, rel=0.02)
        assert made.latency == pytest.approx(due.latency, rel=0.02, abs=5e-5)


def test_reports_undetermined_figures() -> None:
    guess = cluster(1e8, 1e-3)
    found, untold = fitted(guess, cluster(1e8, 4e-3), work(10, 20, 30, 10))
    assert untold == {"network bandwidth"} and found.network.bandwidth == 1e8
    assert found.network.latency == pytest.approx(4e-3, rel=0.02)
    found, untold = fitted(guess, cluster(2e7, 1e-3), work(100_000, 100_000))
    assert found.network.bandwidth == pytest.approx(2e7, rel=0.2)
    silent = Workload((work(1).devices[0],), ())
    lonely = replace(silent, devices=(replace(silent.devices[0], jobs=(Job("a", 1e-3, (), (), 1),)),))
    assert fitted(guess, cluster(1e7, 1.0), lonely) == (guess, {"network bandwidth", "network latency"})
