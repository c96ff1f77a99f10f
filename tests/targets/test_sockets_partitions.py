"""Networks that are cut in part, in one direction or for moments: the right device is left out, and the run goes on."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from random import Random

import pytest
from support.failing_devices import DEVICES, Survivor, frames, frames_until, kinds, survivor
from support.partitioned_network import PartitionedNetwork, partitioned_network

from dicompiler.base.errors import RunError
from dicompiler_targets.sockets.failures import (
    RANK_EXIT,
    RANK_SUSPECTED,
    DeviceFailure,
    Suspicions,
    choose_excluded_devices,
)

HEARTBEAT_S = 0.7
VICTIM = "c"
PEERS = [name for name in DEVICES if name != VICTIM]


@pytest.fixture(scope="module")
def network() -> Iterator[PartitionedNetwork]:
    with partitioned_network(DEVICES) as network:
        yield network


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Survivor:
    """Any one device but a can fail."""
    made = survivor(1, [(name,) for name in DEVICES[1:]], tmp_path_factory.mktemp("cut") / "artifact")
    assert made.peers(VICTIM) == PEERS
    return made


CUTS: dict[str, tuple[list[tuple[str, str]], set[str]]] = {
    "from all peers": ([*itertools.product(VICTIM, PEERS), *itertools.product(PEERS, VICTIM)], {VICTIM}),
    "not heard by its peers": ([*itertools.product(VICTIM, PEERS)], {VICTIM}),
    "not hearing its peers": ([*itertools.product(PEERS, VICTIM)], {VICTIM}),
    "one link": ([("b", "d"), ("d", "b")], {"b", "d"}),
    "one link in one direction": ([("d", "e")], {"d", "e"}),
    "link to a device without failure plan": ([("a", "e"), ("e", "a")], {"e"}),
    "two links of one device": ([("d", "b"), ("e", "d")], {"d"}),
}
"""The links that are cut (senders and receivers), and the devices that may be left out."""


@pytest.mark.parametrize(
    "case", [case if case == "one link" else pytest.param(case, marks=pytest.mark.slow) for case in CUTS]
)
def test_leaves_out_cut_device(case: str, network: PartitionedNetwork, net: Survivor) -> None:
    links, expected = CUTS[case]
    with network.inside(), network.connect(net.directory, heartbeat_s=HEARTBEAT_S) as session:

        def scenario() -> Iterator[None]:
            yield from frames(10)
            for link in links:
                network.cut(*link)
            try:
                yield from frames_until(lambda: len(session.events) > 1, 60)
                yield from frames(10)
            finally:
                for link in links:
                    network.mend(*link)
            yield from frames_until(lambda: session.events[-1].kind == "return", 60)
            yield from frames(10)

        net.stream(session, scenario())
    assert kinds(session)[0][1] in expected
    found = kinds(session)
    assert found == [(kind, found[0][1]) for kind in ("failure", "takeover", "return")]


@pytest.mark.slow
def test_two_cables_are_cut_in_turn(network: PartitionedNetwork, net: Survivor) -> None:
    with network.inside(), network.connect(net.directory, heartbeat_s=HEARTBEAT_S) as session:

        def scenario() -> Iterator[None]:
            for turn, name in enumerate("be"):
                yield from frames(10)
                network.set_cable(name, "down")
                try:
                    yield from frames_until(lambda turn=turn: len(session.events) > 3 * turn + 1, 60)
                finally:
                    network.set_cable(name, "up")
                yield from frames_until(lambda turn=turn: len(session.events) > 3 * turn + 2, 60)

        net.stream(session, scenario())
    assert kinds(session) == [(kind, name) for name in "be" for kind in ("failure", "takeover", "return")]


def test_bursts_of_lost_packets_lose_no_frame(network: PartitionedNetwork, net: Survivor) -> None:
    """The heartbeat is so short that a burst can look like a failure. All bursts are on the links of one device."""
    links = [*itertools.product(VICTIM, PEERS), *itertools.product(PEERS, VICTIM)]
    with network.inside(), network.connect(net.directory, heartbeat_s=HEARTBEAT_S) as session:

        def scenario() -> Iterator[None]:
            with network.losing(links, Random(3), 2 * HEARTBEAT_S):
                yield from frames(150)

        net.stream(session, scenario())
    assert {name for _, name in kinds(session)} <= {VICTIM}


def test_ends_at_cut_device_that_no_plan_covers(network: PartitionedNetwork, net: Survivor) -> None:
    links = [*itertools.product("a", "bcde"), *itertools.product("bcde", "a")]
    with network.inside(), network.connect(net.directory, heartbeat_s=HEARTBEAT_S) as session:

        def scenario() -> Iterator[None]:
            yield from frames(10)
            for link in links:
                network.cut(*link)
            try:
                yield from frames_until(lambda: False, 60)
            finally:
                for link in links:
                    network.mend(*link)

        with pytest.raises(
            RunError, match=r"^device 'a': device '.' reports: the connection to 'a' was lost: .*no plan for"
        ):
            net.stream(session, scenario())


def report(reporter: str, device: str) -> DeviceFailure:
    return DeviceFailure(device, f"device {reporter!r} reports: no data", reporter, RANK_SUSPECTED, is_unreachable=True)


def is_single(names: Collection[str]) -> bool:
    return len(names) < 2 and "a" not in names


def is_any_two(names: Collection[str]) -> bool:
    return len(names) < 3


def test_chooses_devices_without_which_all_others_reach_each_other() -> None:
    by_victim = [report("c", name) for name in "abde"]
    by_peers = [report(name, "c") for name in "abde"]
    for reports in (by_victim, by_peers, by_victim[:2], [*by_victim, *by_peers], [by_victim[0], *by_peers[1:3]]):
        assert choose_excluded_devices(reports, is_single) == ("c",)
    assert choose_excluded_devices([report("e", "a"), report("a", "e")], is_single) == ("e",)
    assert choose_excluded_devices([report("e", "d"), report("d", "e")], is_single) == ("d",)
    assert choose_excluded_devices([report("e", "d"), report("b", "c")], is_single) == ()
    assert choose_excluded_devices([report("e", "d"), report("b", "c")], is_any_two) == ("d", "c")
    assert choose_excluded_devices([report("b", "a"), report("c", "a")], is_single) == ()
    ended = DeviceFailure("d", "its process ended", "d", RANK_EXIT, is_unreachable=True)
    assert choose_excluded_devices([ended], is_single) == ("d",)
    assert choose_excluded_devices([ended, report("b", "c")], is_single) == ()


def test_waits_for_other_end_of_link_unless_all_peers_report() -> None:
    suspicions = Suspicions(1000.0, {name: [other for other in "abcd" if other != name] for name in "abcd"})
    suspicions.add(report("c", "a"))
    suspicions.add(report("a", "c"))
    suspicions.add(report("b", "c"))
    assert suspicions and suspicions.find_due("abcd") == []
    suspicions.add(report("d", "c"))
    assert {failure.device for failure in suspicions.find_due("abcd")} == {"a", "c"}
    suspicions.forget("c")
    assert not suspicions and suspicions.find_due("abd") == []
