"""Lines between hosts: of the messages that could go the one that was ready first goes, whatever waits beside."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from dicompiler.cost.lines import Lines


def first_that_can(waiting: list[tuple[int, int, int]], held: set[tuple[str, int]], switch: bool) -> list[int]:
    """What is said, word for word: (message, from, to) that wait, in the order in which they were ready."""
    gone = []
    for one in list(waiting):
        message, sender, receiver = one
        ends = {("out", sender), ("in", receiver)} if switch else {("all", 0)}
        if not ends & held:
            held |= ends
            waiting.remove(one)
            gone.append(message)
    return gone


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**48), switch=st.booleans(), hosts=st.integers(2, 7))
def test_the_one_that_was_ready_first_goes(seed: int, switch: bool, hosts: int) -> None:
    rng = Random(seed)
    lines: Lines[int] = Lines(switch)
    waiting: list[tuple[int, int, int]] = []
    held: set[tuple[str, int]] = set()
    under_way: dict[int, tuple[int, int]] = {}
    ends: dict[int, tuple[int, int]] = {}
    for message in range(150):
        if under_way and rng.random() < 0.45:
            left = rng.choice(sorted(under_way))
            sender, receiver = under_way.pop(left)
            held -= {("out", sender), ("in", receiver), ("all", 0)}
            lines.free(lines.way(str(sender), str(receiver)))
        else:
            sender, receiver = rng.sample(range(hosts), 2)
            ends[message] = sender, receiver
            waiting.append((message, sender, receiver))
            lines.queue(lines.way(str(sender), str(receiver)), message)
        gone = first_that_can(waiting, held, switch)
        assert lines.going == gone
        under_way |= {one: ends[one] for one in gone}
        lines.going.clear()
