"""Streams with failing and returning devices: every frame ends once, and in-flight frames are replayed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.workloads import cluster, job, work

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.cost.failure_timeline import FAILURE_DETECTION_S, FailureCase, Outage, parse_outage, simulate_outages

NAMES = ("d0", "d1", "d2")


def case(away: tuple[str, ...]) -> FailureCase:
    """Return the case: 1 s per frame with all devices, 2 s without one, 3 s without both; d0 never fails."""
    lost = tuple(name for name in NAMES[1:] if name in away)
    return FailureCase(lost, work([], ((), [job(1.0 + len(lost), outputs=1)]), ((), []), ((), [])), cluster(3))


def test_replays_in_flight_frame_after_detection() -> None:
    first, second = simulate_outages(case, [Outage("d1", 2.5)], 5, 1)
    assert first.frames == ((0, 0.0, 1.0), (1, 1.0, 2.0)) and first.replayed == (2,)
    begin = 2.5 + FAILURE_DETECTION_S
    assert second.frames == tuple((2 + i, begin + 2 * i, begin + 2 * i + 2) for i in range(3))
    assert (second.down, second.changed_at) == (("d1",), 2.5)
    assert second.interruption_s == pytest.approx(FAILURE_DETECTION_S + 2)
    assert (first.period_s, second.period_s) == (pytest.approx(1), pytest.approx(2))


def test_device_rejoins_between_frames() -> None:
    _, second, third = simulate_outages(case, [Outage("d1", 0.5, 5.0)], 6, 1)
    assert [frame[0] for frame in second.frames] == [0, 1, 2] and second.replayed == ()
    assert third.resumed_at == second.frames[-1][2] and [frame[0] for frame in third.frames] == [3, 4, 5]
    assert third.down == () and third.period_s == pytest.approx(1)


def test_change_to_same_plan_has_no_effect() -> None:
    assert simulate_outages(lambda _: case(()), [Outage("d2", 1.5)], 4, 2) == simulate_outages(case, [], 4, 2)


TIMES = st.floats(0, 20).map(lambda t: round(t, 2))
AWAYS = st.tuples(st.sampled_from(NAMES[1:]), TIMES, TIMES).map(lambda one: Outage(one[0], one[1], sum(one[1:], 0.01)))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(AWAYS, max_size=4), st.integers(30, 60), st.integers(1, 5))
def test_every_frame_ends_once_in_order(aways: list[Outage], frames: int, in_flight: int) -> None:
    stretches = simulate_outages(case, aways, frames, in_flight, keep_spans=True)
    assert [number for one in stretches for number, _, _ in one.frames] == list(range(frames))
    ends = [end for one in stretches for _, _, end in one.frames]
    assert ends == sorted(ends)
    for one, other in itertools.pairwise(stretches):
        assert all(end <= other.resumed_at for _, _, end in one.frames)
        assert all(span.end <= max(other.changed_at, other.resumed_at) for span in one.spans)
        again = {number for number, _, _ in other.frames}
        assert not one.replayed or not again or min(one.replayed) == min(again)
        assert len(one.replayed) <= in_flight
    assert all(lost == tuple(n for n in NAMES if n in away) for lost, away in ((s.failed, s.down) for s in stretches))


def test_rejects_stream_that_ends_before_failure() -> None:
    with pytest.raises(DicompilerError, match=r"simulate: the stream of 2 frames ends after 2.00 s, before d1 fails"):
        simulate_outages(case, [Outage("d1", 2.5)], 2, 1)


@pytest.mark.parametrize("text", ["d1", "d1@", "@2s", "d1@2", "d1@2s-1s", "d1@2s-2s", "d1@-2s", "d1@2s-x", "d1@2s-"])
def test_rejects_invalid_outage(text: str) -> None:
    with pytest.raises(UsageError, match=r"^fail "):
        parse_outage(text)


def test_parses_outages() -> None:
    assert parse_outage("pi03@2.5s") == Outage("pi03", 2.5)
    assert parse_outage("a@b@500ms-6s") == Outage("a@b", 0.5, 6.0)
