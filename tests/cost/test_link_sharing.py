"""Sharing of links: concurrent flows get equal parts, and a link is fully used."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dicompiler.cost.simulator import Flow, LinkScheduler


def links_of(sender: int, receiver: int, switch: bool) -> dict[str, float]:
    return {f"out {sender}": 1.0, f"in {receiver}": 1.0} if switch else {"medium": 1.0}


def played(
    sent: list[tuple[float, int, int, float]], switch: bool, ranks: dict[int, int] | None = None
) -> list[tuple[float, float]]:
    """Return the start and end of each message (ready time, sender, receiver, seconds without sharing), in order.

    `ranks` gives nonzero ranks by message number.
    """
    lines: LinkScheduler[int] = LinkScheduler()
    found = [(0.0, 0.0)] * len(sent)
    due: list[tuple[float, Flow[int], int]] = []
    ready = sorted(range(len(sent)), key=lambda i: sent[i][0])
    while ready or due:
        at = min(due, key=lambda one: one[0], default=None)
        if ready and (at is None or sent[ready[0]][0] <= at[0]):
            number = ready.pop(0)
            now, sender, receiver, seconds = sent[number]
            way = lines.flow((sender, receiver), links_of(sender, receiver, switch))
            lines.enqueue(now, way, number, seconds, (ranks or {}).get(number, 0))
        else:
            assert at is not None
            due.remove(at)
            if at[1].version == at[2]:
                number, begun = lines.finish_message(at[0], at[1])
                found[number] = begun, at[0]
        due += lines.departures
        lines.departures.clear()
    return found


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**48), switch=st.booleans(), hosts=st.integers(2, 6))
def test_links_are_neither_overloaded_nor_idle(seed: int, switch: bool, hosts: int) -> None:
    rng = Random(seed)
    sent = []
    for _ in range(30):
        sender, receiver = rng.sample(range(hosts), 2)
        sent.append((rng.uniform(0, 5), sender, receiver, rng.choice([0.0, 0.5, 1.0, 2.0])))
    found = played(sent, switch)
    for (ready, sender, receiver, seconds), (begun, end) in zip(sent, found, strict=True):
        assert begun >= ready and end - begun >= seconds - 1e-9
        ways = [(s, r) for (_, s, r, _), (a, b) in zip(sent, found, strict=True) if a < end and b > begun]
        shared = max(len({w for w in ways if not switch or w[k] == (sender, receiver)[k]}) for k in (0, 1))
        # `shared` messages share the link at some time. A message takes at most as long as if they always shared it.
        assert end - begun <= seconds * shared + 1e-9
    if not switch:  # A shared medium is never idle while a message is ready.
        clock = 0.0
        for ready, _, _, seconds in sorted(sent):
            clock = max(clock, ready) + seconds
        assert max(end for _, end in found) == pytest.approx(clock)
    for pair in {(s, r) for _, s, r, _ in sent}:
        own = sorted((one[0], *times) for one, times in zip(sent, found, strict=True) if one[1:3] == pair)
        assert all(earlier[2] <= later[1] + 1e-9 for earlier, later in pairwise(own))


def test_lower_rank_overtakes_waiting_messages() -> None:
    sent = [(float(k), 0, 1, 10.0) for k in range(4)]
    found = played(sent, switch=True, ranks={0: 5, 1: 2, 2: 2, 3: 1})
    assert [begun for begun, _ in found] == [0.0, 20.0, 30.0, 10.0]
