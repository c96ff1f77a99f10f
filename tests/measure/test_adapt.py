"""Sessions that follow changes of the boards' speed: emulated boards on this host become slower and faster."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from support.onnx_models import parsed

import dicompiler
from dicompiler.analysis.prediction_error import segment_seconds
from dicompiler.base.errors import DicompilerError, RunError, UsageError
from dicompiler.driver.artifact import reopen_artifact
from dicompiler.driver.problem_setup import on_platform
from dicompiler.driver.run_log import load_log, run_document
from dicompiler.measure.adapt import AdaptiveSession, AdaptOptions, _Observation, run_with_swaps
from dicompiler.measure.adapt_search import SearchRequest, _MeasuredCase, expected_seconds
from dicompiler.measure.calibrate import scale_rates
from dicompiler.measure.connection_speeds import name_connection
from dicompiler.measure.emulation.emulate import with_failure_segments
from dicompiler.measure.search_process import SearchProcess
from dicompiler.search.problem import plan_workload
from dicompiler.target.manifest import load_artifact
from dicompiler.target.run_records import Emulation, FrameTimes, ReceivedBytes, RunEvent, RunOptions

PLATFORM = scale_rates(
    dicompiler.Platform.load('rpi4x4{bandwidth="10 Gbit/s" latency="1 us"}'),
    dict.fromkeys(("pi01", "pi02", "pi03", "pi04"), 0.016),
)
"""Boards that are so slow that this host, even if it is busy, computes a frame in a small part of their time."""
FAST = AdaptOptions(frames=8, min_gain=0.03, min_interval_s=0.5, strategy="modnn")


def make_model() -> onnx.ModelProto:
    """Return a chain of convolutions that takes one board about 130 ms."""
    weights = np.random.default_rng(0).standard_normal((32, 32, 3, 3)).astype(np.float32) / 32
    nodes = "".join(f"t{i} = Conv <pads = [1, 1, 1, 1]> ({f't{i - 1}' if i else 'x'}, w) " for i in range(2))
    return parsed(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[1, 32, 28, 28] x) => (float[1, 32, 28, 28] y) {{ {nodes} y = Relu (t1) }}""",
        w=weights,
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapt") / "net"
    dicompiler.compile(make_model(), PLATFORM, "modnn", output=directory)
    return directory


def emulate_speeds(
    speeds: Mapping[str, Sequence[tuple[float, float]]],
) -> Callable[[Path, RunOptions], RunOptions]:
    """Return a function that emulates boards on this host, with their speeds; the network is not emulated."""

    def specialize(directory: Path, options: RunOptions) -> RunOptions:
        compilation, _, problem = reopen_artifact(directory, platform=PLATFORM)
        assert compilation.plan is not None and compilation.program is not None
        seconds = segment_seconds(plan_workload(problem, compilation.plan)[1])
        seconds = with_failure_segments(seconds, compilation.program)
        addresses = dict.fromkeys(seconds, "127.0.0.1")
        emulation = Emulation(lambda _: contextlib.nullcontext(), addresses, addresses, seconds, speeds)
        return replace(options, emulation=emulation)

    return specialize


FRAME = {"x": np.ones((1, 32, 28, 28), np.float32)}


@contextlib.contextmanager
def open_session(
    directory: Path,
    speeds: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    adapt: AdaptOptions = FAST,
    on_event: Callable[[RunEvent], None] | None = None,
) -> Iterator[AdaptiveSession]:
    options = RunOptions(in_flight=4, on_event=on_event)
    with AdaptiveSession(directory, options, adapt, emulate_speeds(speeds or {})) as session:
        yield session


def stream_until(session: AdaptiveSession, is_done: Callable[[], Any], limit_s: float = 300.0) -> int:
    """Stream equal frames until `is_done` returns True, check the outputs, and return their number."""
    end, count = time.monotonic() + limit_s, 0

    def read() -> Iterator[dict[str, Any]]:
        while not is_done():
            assert time.monotonic() < end
            yield FRAME

    first = session.infer(FRAME)["y"]
    for outputs in session.stream(read()):
        assert np.allclose(outputs["y"], first, rtol=1e-4, atol=1e-5)
        count += 1
    return count


def adapted_artifacts(compiled: Path) -> set[str]:
    return {path.name for path in compiled.parent.glob("net.adapted-*")}


@pytest.mark.slow
def test_session_follows_board_that_slows_down_and_recovers(compiled: Path) -> None:
    """On a busy host, other boards may seem slow too, so that there are more searches and swaps than these two."""
    events: list[RunEvent] = []
    now = time.perf_counter()
    with open_session(compiled, {"pi03": [(now + 4, 0.4), (now + 11, 1.0)]}, on_event=events.append) as session:
        stream_until(session, lambda: len(session.swaps) >= 2 and session.directory == compiled)
        changes = [found for found in session.adaptations if found.swap is not None]
    slower = next(found for found in changes if found.ratios.get("pi03", 0) > 1.5)
    assert slower.swap is not None and slower.swap.new.name.startswith("net.adapted-")
    assert slower.new_value < 0.97 * slower.value
    percent = f"{1 - slower.new_value / slower.value:.0%}"
    assert f"pi03 computes {slower.ratios['pi03']:.2f} times as long as predicted" in slower.message
    assert slower.message.endswith(
        f": {slower.swap.new} is predicted to be {percent} better (latency), from frame {slower.swap.first_frame} on"
    )
    assert slower.message in [event.message for event in events if event.kind == "adaptation"]
    # At the end, only the artifact in use is kept.
    assert adapted_artifacts(compiled) == {session.swaps[-1].new.name} - {compiled.name}


EXPECTED = {"a": 0.03, "b": 0.04}


@pytest.fixture
def every_frame_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dicompiler.measure.adapt.OBSERVATION_INTERVAL_S", 0.0)


def observe(observation: _Observation, frames: Iterable[FrameTimes]) -> list[dict[str, float]]:
    """Return the deviations that the observation finds in frames, one entry for each check."""
    found = [observation.add(times) for times in frames]
    return [observation.find_deviations(measured, AdaptOptions()) for measured in found if measured is not None]


def make_frames(count: int, factor: Callable[[str], float], role: int = 0) -> Iterator[FrameTimes]:
    """Return frames in which each device takes a multiple of its expected seconds."""
    return (
        FrameTimes(0.1, {name: factor(name) * seconds for name, seconds in EXPECTED.items()}, role)
        for _ in range(count)
    )


def test_ten_minutes_of_noise_start_no_search() -> None:
    """10 frames a second with a noise of ±15 % on each device."""
    rng = Random(0)
    checks = observe(
        _Observation(Path("net"), EXPECTED, 1, AdaptOptions().frames),
        make_frames(6000, lambda _: rng.uniform(0.85, 1.15)),
    )
    assert len(checks) > 500 and not any(checks)


@pytest.mark.parametrize("factor", [2.5, 0.4, 1.3])
def test_change_of_speed_is_found_and_measured_within_a_window(factor: float) -> None:
    observation = _Observation(Path("net"), EXPECTED, 1, AdaptOptions().frames)
    assert not any(observe(observation, make_frames(50, lambda _: 1.0)))
    checks = observe(observation, make_frames(20, lambda name: factor if name == "b" else 1.0))
    assert checks[-1] == {"b": pytest.approx(factor)}
    # While the window contains frames of both speeds, the check finds either nothing or the right factor.
    assert all(found == {"b": pytest.approx(factor)} for found in checks if found)


@pytest.mark.parametrize("factor", [2.5, 0.4])
def test_large_change_of_speed_is_found_in_three_frames(factor: float) -> None:
    """The other device has noise in these few frames. It is not mistaken for a change of its speed."""
    observation = _Observation(Path("net"), EXPECTED, 1, AdaptOptions().frames)
    assert not any(observe(observation, make_frames(50, lambda _: 1.0)))
    noise = iter((1.0, 1.2, 1.2))
    slow = make_frames(3, lambda name: factor if name == "b" else next(noise, 1.0))
    found = [observation.add(times) for times in slow]
    assert not any(observation.find_deviations(measured, AdaptOptions()) for measured in found[:-1] if measured)
    assert found[-1] == {"a": EXPECTED["a"], "b": pytest.approx(factor * EXPECTED["b"])}


def test_few_slow_frames_start_no_search() -> None:
    """Three frames in a row are slow, but not equally, as on a board with other work."""
    factors = iter((*(1.0 for _ in range(20)), 2.0, 3.0, 1.6, *(1.0 for _ in range(20))))
    frames = (FrameTimes(0.1, {**EXPECTED, "b": factor * EXPECTED["b"]}) for factor in factors)
    assert not any(observe(_Observation(Path("net"), EXPECTED, 1, AdaptOptions().frames), frames))


def test_single_slow_frames_start_no_search() -> None:
    """Every fifth frame takes ten times as long, as on a board with other work."""
    factors = iter((1.0, 1.0, 1.0, 1.0, 10.0) * 100)
    frames = (FrameTimes(0.1, {name: factor * seconds for name, seconds in EXPECTED.items()}) for factor in factors)
    assert not any(observe(_Observation(Path("net"), EXPECTED, 1, AdaptOptions().frames), frames))


def test_frames_of_replicas_are_measured_together_in_any_order() -> None:
    """Replica 0 uses both devices, replica 1 device b. Frames of a slow device finish after later ones."""
    expected = {"a": 0.03, "b": 0.04 + 0.02}
    roles = [FrameTimes(0.1, {"a": 0.03, "b": 0.04}, 0), FrameTimes(0.1, {"b": 0.06}, 1)]
    frames = [roles[i % 2] for i in range(60)]
    Random(1).shuffle(frames)
    checks = observe(_Observation(Path("net"), expected, 2, AdaptOptions().frames), frames)
    assert checks and checks[-1] == {"b": pytest.approx(0.1 / 0.06)}
    assert all(found == checks[-1] for found in checks)


@pytest.mark.parametrize("replica_count", [1, 4])
def test_at_most_40_frames_of_a_second_are_recorded(replica_count: int) -> None:
    observation = _Observation(Path("net"), EXPECTED, replica_count, AdaptOptions().frames)
    start = observation.begun_at
    due = [observation.is_due(i % replica_count, 0.0, start + i / 1000) for i in range(10_000)]
    assert 380 <= sum(due) <= 400 + replica_count
    assert {i % replica_count for i in range(10_000) if due[i]} == set(range(replica_count))


def test_frames_that_began_before_the_observation_are_not_recorded() -> None:
    observation = _Observation(Path("net"), EXPECTED, 1, AdaptOptions().frames)
    start = observation.begun_at
    assert not observation.is_due(0, 0.2, start + 0.1)
    assert observation.is_due(0, 0.2, start + 0.3)


@pytest.mark.slow
def test_difference_that_no_plan_improves_becomes_the_expectation(compiled: Path) -> None:
    """All boards are slower by the same factor, so no other plan is better.

    The search does not replace the artifact of an earlier session.
    """
    (compiled.parent / "net.adapted-1").mkdir(exist_ok=True)
    before = adapted_artifacts(compiled)
    with open_session(compiled) as session:
        observation = session._observation
        measured = {name: 2.5 * seconds for name, seconds in observation.expected_s.items()}
        assert session._can_search.wait(60)
        found = session._search_and_swap(observation, measured, dict.fromkeys(measured, 2.5))
        assert found.swap is None and found.error == ""
        assert re.fullmatch(
            r".*: no swap: the best plan is -?\d+% better \(latency\), and a swap needs more than 3%", found.message
        )
        assert session._observation.expected_s == measured
        assert session.directory == compiled and not session.swaps
    assert adapted_artifacts(compiled) == before
    shutil.rmtree(compiled.parent / "net.adapted-1")


def test_failed_search_is_reported_and_frames_go_on(compiled: Path) -> None:
    adapt = replace(FAST, strategy="modnnn")
    with open_session(compiled, {"pi02": [(0.0, 0.4)]}, adapt) as session:
        stream_until(session, lambda: session.adaptations)
        assert "no other plan: the search failed: " in session.adaptations[0].message
        assert "modnnn" in session.adaptations[0].error
        assert stream_until(session, lambda: True) == 0
        assert session.directory == compiled


@pytest.mark.slow
def test_search_process_is_used_again_and_replaced_if_it_has_ended(compiled: Path) -> None:
    with open_session(compiled) as session:
        assert session._can_search.wait(60)
        observation, process = session._observation, session._search
        measured = {name: 2.5 * seconds for name, seconds in observation.expected_s.items()}
        request = session._make_request(compiled, measured, compiled.with_name("unused"))
        first = process.popen
        assert first is not None  # The search process was started when the session was opened.
        answers = [process.search(request) for _ in range(2)]
        assert process.popen is first and answers[0] == answers[1]
        first.kill()
        first.wait()
        assert process.search(request) == answers[0] and process.popen is not first
    shutil.rmtree(compiled.with_name("unused"))


@pytest.mark.usefixtures("every_frame_is_recorded")
@pytest.mark.slow
def test_frames_are_not_judged_while_the_search_process_prepares_itself(compiled: Path) -> None:
    """The preparation slows down the devices on the coordinator's host."""
    with open_session(compiled) as session:
        on_frame = session._with_observer(session.directory, RunOptions()).on_frame
        assert on_frame is not None
        slow = FrameTimes(0.0, {name: 2 * seconds for name, seconds in session._observation.expected_s.items()})
        for _ in range(100):
            on_frame(slow)
        assert not session._is_adapting and not session.adaptations
        assert session._can_search.wait(60)
        for _ in range(100):
            on_frame(replace(slow, frame_s=60.0))  # These frames began before the preparation ended.
        assert not session._is_adapting
        for _ in range(100):
            on_frame(slow)
        assert session._is_adapting or session.adaptations


def test_process_that_ends_during_a_search_is_reported() -> None:
    process = SearchProcess()
    with pytest.raises(RunError, match=r"the search ended without a result: .*TypeError"):
        process.search(SearchRequest(0, "", "", {}, 1, "", ""))  # type: ignore[arg-type]
    process.close()


@pytest.mark.slow
def test_closing_ends_search(compiled: Path) -> None:
    before = adapted_artifacts(compiled)
    adapt = replace(FAST, strategy="auto{budget=300}")
    with open_session(compiled, {"pi02": [(0.0, 0.4)]}, adapt) as session:
        stream_until(session, lambda: session._is_adapting)
        search = session._search.popen
    assert search is not None and search.returncode is not None
    assert session.adaptations == [] and adapted_artifacts(compiled) <= before


@pytest.mark.slow
def test_slow_device_of_replicas_is_found(tmp_path: Path) -> None:
    directory = tmp_path / "net"
    dicompiler.compile(make_model(), PLATFORM, "replicate", objective="throughput", output=directory)
    with open_session(directory, {"pi03": [(0.0, 0.4)]}, replace(FAST, strategy="fit")) as session:
        stream_until(session, lambda: session.adaptations)
        assert session.adaptations[0].ratios["pi03"] > 2.4


@pytest.mark.usefixtures("every_frame_is_recorded")
def test_failure_plan_in_use_starts_no_search(compiled: Path) -> None:
    """With a failure plan, the remaining devices compute more than predicted."""
    with open_session(compiled) as session:
        assert session._can_search.wait(60)
        options = session._with_observer(session.directory, RunOptions())
        assert options.on_event is not None and options.on_frame is not None
        slow = FrameTimes(0.0, {name: 2 * seconds for name, seconds in session._observation.expected_s.items()})
        options.on_event(RunEvent("failure", "pi04", "", ("pi04",), 0.0, 0))
        for _ in range(100):
            options.on_frame(slow)
        assert not session._is_adapting and not session.adaptations
        options.on_event(RunEvent("return", "pi04", "", (), 0.0, 0))
        for _ in range(100):
            options.on_frame(slow)
        assert session._is_adapting or session.adaptations


def test_rates_are_corrected_to_the_measured_seconds(compiled: Path) -> None:
    compilation, target, problem = reopen_artifact(compiled)
    expected = expected_seconds(compilation, problem, 4)
    computing = [name for name in expected if name in problem.platform.host_of]
    factors = dict(zip(computing, (1, 2.5, 0.5, 1), strict=True))
    measured = {name: expected[name] * factors[name] for name in computing}
    platform = _MeasuredCase(compilation, target, problem, 4).correct_rates(measured)
    corrected = expected_seconds(compilation, on_platform(problem, platform, target), 4)
    assert {name: corrected[name] for name in computing} == pytest.approx(measured, rel=2e-3)


def test_slow_connection_is_found_in_the_frames() -> None:
    expected = {**EXPECTED, name_connection("a", "b"): 1e-6, name_connection("b", "a"): 1e-6}
    observation = _Observation(Path("net"), expected, 1, AdaptOptions().frames)

    def frame(factor: float) -> FrameTimes:
        received = {
            ("a", "b"): ReceivedBytes(30_000, 20_000, factor * 20_000e-6),
            ("b", "a"): ReceivedBytes(30_000, 0, 0.0),
        }
        return FrameTimes(0.1, EXPECTED, 0, received)

    rng = Random(2)
    assert not any(observe(observation, (frame(rng.uniform(0.7, 1.4)) for _ in range(400))))
    # The receiver reads every fifth frame late.
    assert not any(observe(observation, [*[frame(1.0)] * 4, frame(20.0)] * 20))
    assert not any(observe(observation, [frame(1.0)] * 20))
    checks = observe(observation, [frame(3.0)] * 20)
    assert checks[-1] == {"a → b": pytest.approx(3.0)}


def test_connection_that_sends_little_starts_no_search() -> None:
    """7 KB take 0.7 ms instead of 0.2 ms, but device b computes each frame for 40 ms."""
    expected = {**EXPECTED, name_connection("a", "b"): 3e-8}
    received = {("a", "b"): ReceivedBytes(9_000, 7_000, 7_000e-7)}
    assert not any(observe(_Observation(Path("net"), expected, 1, 10), [FrameTimes(0.1, EXPECTED, 0, received)] * 50))


@pytest.mark.slow
def test_swap_by_the_user_changes_the_model_that_is_observed_and_searched(compiled: Path) -> None:
    """A search that began before the swap is discarded, because its artifact has the old model."""
    other = compiled.with_name("other")
    model = make_model()
    model.graph.node[-1].op_type = "LeakyRelu"
    dicompiler.compile(model, PLATFORM, "single", output=other, allow_worse=True)
    try:
        with open_session(compiled) as session:
            observation = session._observation
            session.swap(other)
            assert session._observation.directory == session._first == other
            assert session._observation.expected_s.keys() == {"pi01"}
            measured = {name: 2.5 * seconds for name, seconds in observation.expected_s.items()}
            assert session._can_search.wait(60)
            found = session._search_and_swap(observation, measured, {"pi01": 2.5})
            assert found.error == "the artifact was replaced during the search"
            assert session.directory == other and len(session.swaps) == 1
            session.swap_back()
            assert session._observation.directory == session._first == compiled
    finally:
        shutil.rmtree(other)


def test_log_of_a_run_with_a_swap_describes_the_last_artifact(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, log = tmp_path / "other", tmp_path / "run.json"
    dicompiler.compile(make_model(), PLATFORM, "single", output=other, allow_worse=True)

    class SwappingSession(AdaptiveSession):
        def stream(self, frames: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
            for number, outputs in enumerate(super().stream(frames)):
                yield outputs
                if number == 4:
                    self.swap(other)

    monkeypatch.setattr("dicompiler.measure.adapt.AdaptiveSession", SwappingSession)
    adapt = replace(FAST, deviation=1e9, link_deviation=1e9)
    last, result = run_with_swaps(compiled, frames=30, options=RunOptions(in_flight=2), adapt=adapt)
    (event,) = result.events
    assert last == other and event.kind == "swap" and event.reason == str(other)
    assert 5 <= event.finished_frames <= 8 and len(result.frames_s) == 30 - event.finished_frames
    document = run_document(last, result, log_path=log)
    assert document["artifact_digest"] == load_artifact(other)["digest"]
    log.write_text(json.dumps(document))
    load_log(log, other, load_artifact(other))
    page = tmp_path / "report.html"
    dicompiler.write_report(other, page, run_log=log)
    assert "<td>swap</td>" in page.read_text() and str(other) in page.read_text()
    with pytest.raises(DicompilerError, match=r": use .*other, to which the run changed, or run this artifact with"):
        load_log(log, compiled, load_artifact(compiled))


@pytest.mark.parametrize("adapt", [FAST, pytest.param(None, marks=pytest.mark.slow)])
def test_timeout_limits_the_whole_run(compiled: Path, adapt: AdaptOptions | None) -> None:
    started_at = time.monotonic()
    text = (
        r"run: only \d+ of 1000000 frames were finished within 4 s: allow more time \(--timeout; in Python: timeout\)"
    )
    with pytest.raises(RunError, match=f"^{text}; then: device '"):
        run_with_swaps(compiled, frames=1_000_000, options=RunOptions(in_flight=2, timeout_s=4), adapt=adapt)
    assert time.monotonic() - started_at < 30


def test_rejects_invalid_options_and_states(compiled: Path, tmp_path: Path) -> None:
    for options, words in (
        ({"deviation": -1.0}, "deviation must be 0 or more, not -1.0"),
        ({"min_gain": float("nan")}, "min_gain must be 0 or more, not nan"),
        ({"link_deviation": -0.5}, "link_deviation must be 0 or more, not -0.5"),
        ({"frames": 0}, "frames must be at least 1, not 0"),
        ({"frames": 2.5}, r"frames must be an integer, not 2\.5"),
        ({"min_interval_s": "1 s"}, "min_interval_s must be a number, not '1 s'"),
        ({"strategy": None}, "strategy must be a text such as 'auto{budget=1}', not None"),
    ):
        with pytest.raises(UsageError, match=f"adapt: {words}"):
            AdaptOptions(**options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="devices that you start yourself cannot be swapped"):
        dicompiler.connect_adaptive(compiled, RunOptions(start_manually=("pi01",)))
    model = parsed(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[1, 2] x, float[1, 2] s) => (float[1, 2] y, float[1, 2] t) { t = Add (x, s)  y = Relu (t) }"""
    )
    dicompiler.compile(model, "rpi4x4", "single", state="s=t", output=tmp_path / "a")
    with pytest.raises(UsageError, match="keeps states between frames"):
        dicompiler.connect_adaptive(tmp_path / "a")


def test_session_without_changes_of_speed_computes_frames(compiled: Path) -> None:
    with dicompiler.connect_adaptive(compiled, adapt=replace(FAST, deviation=1e9)) as session:
        assert stream_until(session, lambda: session._frame_count >= 20) >= 19
    assert session.adaptations == [] and session.reports
