"""Swaps of artifacts in sessions: each frame is computed by one artifact, and the old one stays if a swap fails."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import queue
import re
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support.onnx_models import parsed
from support.running import pids, wait_until
from support.swapping import artifact_changes, compile_times, factor_of, frame, frames, times
from support.tampering import reseal

import dicompiler
from dicompiler.base.errors import DicompilerError, RunError, UsageError
from dicompiler.driver.artifact import verify_session
from dicompiler.driver.swap import SPARE_FRAMES_AT_SWITCH, Swap, SwappableSession, hosts_of_artifact
from dicompiler.target.remote.hosts import parse_hosts
from dicompiler.target.run_records import RunEvent, RunOptions


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_times(3, tmp_path_factory.mktemp("three") / "three")


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with another network and plan than `three`: it multiplies by five."""
    return compile_times(5, tmp_path_factory.mktemp("five") / "five", strategy="pipeline", objective="throughput")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with one device, which runs in the process of the session."""
    return compile_times(7, tmp_path_factory.mktemp("seven") / "seven", strategy="single")


def in_thread(call: Any, *arguments: Any, **options: Any) -> Any:
    """Run a call in another thread until the end of the test; return the future."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call, *arguments, **options)
    pool.shutdown(wait=False)
    return future


def stream_until(session: SwappableSession, is_done: Any, more: int = 20) -> list[dict[str, Any]]:
    """Stream frames until `is_done` returns True, and `more` frames after that; return the outputs."""
    left, outputs = [more], []

    def endless() -> Any:
        for given in frames():
            left[0] -= bool(is_done())
            if left[0] < 0:
                return
            yield given

    outputs += session.stream(endless())
    return outputs


def check_swap_in_stream(old: Path, new: Path, factors: tuple[int, int], **options: Any) -> None:
    events: list[RunEvent] = []
    with dicompiler.connect_swappable(old, on_event=events.append) as session:
        swaps: list[Any] = []

        def is_done() -> bool:
            return bool(swaps) and swaps[0].done()

        def start() -> None:
            wait_until(lambda: session._frame_count > 20)
            swaps.append(in_thread(session.swap, new, **options))

        starter = in_thread(start)
        outputs = stream_until(session, is_done)
        starter.result()
        assert session.events == events
        swap: Swap = swaps[0].result()
        assert artifact_changes(outputs) == [(0, factors[0]), (swap.first_frame, factors[1])]
        assert (swap.old, swap.new, session.directory, session.swaps) == (old, new, new, [swap])
        assert [(event.kind, event.reason, event.finished_frames) for event in events] == [
            ("swap", str(new), swap.first_frame)
        ]
        assert f"{new} computes all frames from number {swap.first_frame} on" == events[0].message
        wait_until(lambda: not pids(old))
    assert not pids(new)
    assert sum(report.compute_s for report in session.reports) > 0


@pytest.mark.parametrize("options", [{}, {"verify": False}, {"pause": True}], ids=str)
def test_swap_in_stream_loses_and_mixes_no_frame(three: Path, five: Path, options: dict[str, bool]) -> None:
    check_swap_in_stream(three, five, (3, 5), **options)


@pytest.mark.parametrize("pause", [False, True])
def test_swap_between_device_in_this_process_and_cluster(three: Path, single: Path, pause: bool) -> None:
    check_swap_in_stream(three, single, (3, 7), pause=pause)
    check_swap_in_stream(single, three, (7, 3), pause=pause)


@pytest.mark.parametrize("collect", [iter, list])
def test_few_frames_are_in_flight_while_the_new_devices_are_verified(
    collect: Any, three: Path, five: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_verifying, in_flight, received = threading.Event(), list[int](), 0

    def verify(directory: Path, stream: Any, inputs: Any) -> Any:
        wait_until(lambda: session._frame_count - received <= 4 + SPARE_FRAMES_AT_SWITCH)
        is_verifying.set()
        wait_until(lambda: len(in_flight) > 20)
        is_verifying.clear()
        return verify_session(directory, stream, inputs)

    monkeypatch.setattr("dicompiler.driver.swap.verify_session", verify)
    with dicompiler.connect_swappable(three, in_flight=16) as session:
        swap = in_thread(session.swap, five)
        for _ in session.stream(collect(frames(10_000))):
            received += 1
            if is_verifying.is_set():
                in_flight.append(session._frame_count - received)
            if swap.done():
                break
        assert swap.result() and max(in_flight) <= 4 + SPARE_FRAMES_AT_SWITCH
        assert sum(1 for _ in session.stream(frames(40))) == 40 and session._max_in_flight == math.inf


@pytest.mark.parametrize("collect", [iter, list])
def test_loop_over_stream_can_swap(collect: Any, three: Path, five: Path) -> None:
    with dicompiler.connect_swappable(three, in_flight=4) as session:
        outputs = []
        for number, found in enumerate(session.stream(collect(frames(40))), 1):
            outputs.append(found)
            if number == 10:
                swap = session.swap(five, verify=False)
            if number == 25:
                back = session.swap_back(verify=False)
        # The session reads up to 4 frames ahead of the outputs that the test has received.
        assert 10 <= swap.first_frame <= 15 and 25 <= back.first_frame <= 30
        assert artifact_changes(outputs) == [(0, 3), (swap.first_frame, 5), (back.first_frame, 3)]
        assert (back.old, back.new) == (five, three)


def test_reads_list_without_another_thread(three: Path) -> None:
    def has_reader() -> bool:
        return any(thread.name == "frame reader" for thread in set(threading.enumerate()) - before)

    before = set(threading.enumerate())
    with dicompiler.connect_swappable(three) as session:
        assert True not in [has_reader() for _ in session.stream(list(frames(100)))]
        assert True in [has_reader() for _ in session.stream(frames(100))]


def test_frame_that_is_read_during_swap_belongs_to_new_artifact(three: Path, five: Path) -> None:
    camera = queue.SimpleQueue[Any]()
    with dicompiler.connect_swappable(three) as session:
        outputs = session.stream(iter(camera.get, None))
        camera.put(frame(1))
        assert factor_of(next(outputs), 1) == 3
        later = in_thread(next, outputs)
        swap = session.swap(five)
        # `first_frame` counts only frames of the stream, not the frame that verifies the new artifact.
        assert swap.first_frame == 1
        camera.put(frame(2))
        assert factor_of(later.result(60), 2) == 5
        camera.put(None)
        assert list(outputs) == []


@pytest.mark.slow
def test_calls_of_threads_use_artifact_in_force(three: Path, five: Path) -> None:
    factors, begun, ended, stop = (3, 5, 3, 5), [0], [0], threading.Event()
    with dicompiler.connect_swappable(three) as session:

        def work() -> int:
            for number in range(1, 100_000):
                if stop.is_set():
                    return number
                earliest = ended[0]
                factor = factor_of(session.infer(frame(number)), number)
                assert factor in factors[earliest : begun[0] + 1]
            return 0

        with ThreadPoolExecutor(3) as pool:
            workers = [pool.submit(work) for _ in range(3)]
            try:
                for directory in (five, three, five):
                    begun[0] += 1
                    session.swap(directory, verify=False)
                    ended[0] += 1
            finally:
                stop.set()
        assert all(worker.result() > 1 for worker in workers)


def check_refusal(session: SwappableSession, directory: Path, message: str, **options: bool) -> None:
    """Check that a swap is refused with this message, and that the artifact in force stays in force."""
    before = session.directory
    with pytest.raises(DicompilerError) as caught:
        session.swap(directory, **options)
    assert str(caught.value) == message
    assert session.directory == before and factor_of(session.infer(frame(2)), 2) == 3


@pytest.mark.parametrize("pause", [pytest.param(False, marks=pytest.mark.slow), True])
def test_artifact_that_cannot_be_used_leaves_old_one_in_force(three: Path, tmp_path: Path, pause: bool) -> None:
    wrong, damaged = (compile_times(5, tmp_path / name) for name in ("wrong", "damaged"))
    shutil.copytree(three / "reference", wrong / "reference", dirs_exist_ok=True)
    reseal(wrong)
    (damaged / "pi02" / "segment000.onnx").write_bytes(b"cut")
    with dicompiler.connect_swappable(three) as session:
        outputs = session.stream(frames(12))
        found = [next(outputs)] if not pause else []
        with pytest.raises(RunError, match=r"swap: .*wrong: its devices compute other outputs than onnxruntime: y: .*"):
            session.swap(wrong, pause=pause)
        with pytest.raises(RunError, match=r"device 'pi02': .*segment000\.onnx"):
            session.swap(damaged, pause=pause)
        assert session.directory == three and session.swaps == []
        assert artifact_changes([*found, *outputs]) == [(0, 3)]
        assert not pids(wrong) and not pids(damaged)
        session.swap(wrong, verify=False)
        assert factor_of(session.infer(frame(1)), 1) == 5


@pytest.mark.slow
def test_int8_artifact_is_verified_with_the_last_frame(three: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "samples.npz", x=np.stack([frame(number)["x"] for number in (1, 2)]))
    int8 = compile_times(5, tmp_path / "int8", wire_dtype="int8", wire_samples=tmp_path / "samples.npz")
    with dicompiler.connect_swappable(three) as session:
        random = (
            r"values outside the samples' range were clipped, because the inputs were random: compute a frame [^:]*$"
        )
        with pytest.raises(RunError, match=random):
            session.swap(int8)
        assert sum(1 for _ in session.stream([frame(1), frame(2)])) == 2
        session.swap(int8)
        session.swap_back()
        session.infer(frame(9))
        with pytest.raises(RunError, match=r"were clipped: compile with samples that cover these inputs [^:]*$"):
            session.swap(int8)


def test_device_killed_during_start_leaves_old_artifact_in_force(three: Path, tmp_path: Path) -> None:
    five = compile_times(5, tmp_path / "five")
    with dicompiler.connect_swappable(three) as session:
        swap = in_thread(session.swap, five)
        os.kill(wait_until(lambda: pids(five).get("pi03")), signal.SIGKILL)
        with pytest.raises(RunError, match=r"device 'pi03': its process was ended by signal 9"):
            swap.result(60)
        wait_until(lambda: not pids(five))
        assert session.directory == three
        assert artifact_changes(session.stream(frames(12))) == [(0, 3)]


def test_rejects_artifacts_that_cannot_replace_it(three: Path, tmp_path: Path) -> None:
    big, types = (tmp_path / name for name in ("big", "types"))
    dicompiler.compile(times(3, 14), "rpi4x4", "modnn", output=big)
    renamed = parsed(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[1, 2, 12, 12] x) => (float[1, 2, 12, 12] z) { z = Relu (x) }"""
    )
    dicompiler.compile(renamed, "rpi4x4", "single", output=types)
    remedy = "a swap needs the inputs and outputs of"
    with dicompiler.connect_swappable(three) as session:
        check_refusal(
            session, three, f"swap: the session already runs {three}: compile the new artifact into another directory"
        )
        shapes = "[1, 2, 14, 14] instead of [1, 2, 12, 12]"
        check_refusal(
            session,
            big,
            f"swap: {big}: input 'x' has shape {shapes}: {remedy} {three}; open a new session for other ones",
        )
        check_refusal(
            session, types, f"swap: {types}: output 'y' is missing: {remedy} {three}; open a new session for other ones"
        )
        with pytest.raises(UsageError, match="no artifact was replaced"):
            session.swap_back()
        with pytest.raises(DicompilerError, match="not an artifact of dicompiler"):
            session.swap(tmp_path)
        with pytest.raises(UsageError, match=r"swap: directory must be a path, not 5"):
            session.swap(5)  # type: ignore[arg-type]


def test_rejects_second_swap_and_pause_in_own_loop(three: Path, five: Path) -> None:
    refused: list[str] = []

    def swap_again(_event: RunEvent) -> None:
        refused.append("event")

    with dicompiler.connect_swappable(three, on_event=swap_again) as session:
        outputs = session.stream(frames())
        next(outputs)
        with pytest.raises(UsageError, match=r"call swap\(pause=True\) in another thread"):
            session.swap(five, pause=True)
        first = in_thread(session.swap, five)
        wait_until(session._swap_lock.locked)
        with pytest.raises(UsageError, match="another swap of this session is under way"):
            session.swap(five)
        first.result(60)
        outputs.close()
    assert refused == ["event"]


def test_swap_with_pause_gives_up_if_nobody_reads_outputs(three: Path, five: Path) -> None:
    with dicompiler.connect_swappable(three, timeout=2) as session:
        outputs = session.stream(frames(12))
        found = [next(outputs)]
        with pytest.raises(RunError, match="the frames in flight were not finished within 2 s"):
            in_thread(session.swap, five, pause=True).result(60)
        assert artifact_changes([*found, *outputs]) == [(0, 3)]


def test_directory_during_a_pause_is_that_of_the_old_artifact(three: Path, five: Path) -> None:
    found = set[Path]()
    with dicompiler.connect_swappable(three) as session:
        done = in_thread(session.swap, five, pause=True)
        while not done.done():
            found.add(session.directory)
        done.result()
        assert found <= {three, five} and three in found and session.directory == five


def test_rejects_devices_of_another_platform(three: Path, tmp_path: Path) -> None:
    other = compile_times(5, tmp_path / "other", "rpi4x5")
    with dicompiler.connect_swappable(three) as session:
        check_refusal(
            session,
            other,
            f"swap: {other}: device 'pi05' is not in the cluster of {three}: compile it for the same platform "
            f"(--platform {three}/platform.toml)",
        )


def test_rejects_platform_without_a_running_device(tmp_path: Path) -> None:
    """If such a swap were allowed, `swap_back` would be refused; but each swap must keep the way back."""
    two = compile_times(3, tmp_path / "two", "rpi4x2")
    one = compile_times(5, tmp_path / "one", "rpi4x1")
    with dicompiler.connect_swappable(two) as session:
        check_refusal(
            session,
            one,
            f"swap: {one}: its cluster lacks the device 'pi02' of {two}, so swapping back would fail: compile it for "
            f"the same platform (--platform {two}/platform.toml)",
        )


def test_rejects_artifact_without_memory_for_both(tmp_path: Path) -> None:
    """With a pause, the swap is possible, because only one of the artifacts needs memory at a time."""
    platform = 'rpi4x2{memory="100 MiB"}'
    old, new = (compile_times(factor, tmp_path / str(factor), platform) for factor in (3, 5))
    with dicompiler.connect_swappable(old) as session:
        with pytest.raises(DicompilerError) as caught:
            session.swap(new)
        sizes = r"[\d.]+ MB"
        assert re.fullmatch(
            rf"swap: host 'pi01' needs {sizes} for {new} in addition to {sizes} for {old}, {sizes} more than it "
            rf"has \({sizes}\): end the old devices first \(pause=True\)",
            str(caught.value),
        )
        assert factor_of(session.infer(frame(2)), 2) == 3
        session.swap(new, pause=True)
        assert factor_of(session.infer(frame(2)), 2) == 5


def test_rejects_artifacts_with_states(three: Path, tmp_path: Path) -> None:
    model = parsed(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[1, 2] x, float[1, 2] s) => (float[1, 2] y, float[1, 2] t) { t = Add (x, s)  y = Relu (t) }"""
    )
    dicompiler.compile(model, "rpi4x4", "single", state="s=t", output=tmp_path / "a")
    refusal = pytest.raises(UsageError, match=r"a keeps states between frames, which a swap would lose: use connect")
    with refusal:
        dicompiler.connect_swappable(tmp_path / "a")
    with dicompiler.connect_swappable(three) as session, refusal:
        session.swap(tmp_path / "a")


@pytest.mark.parametrize("share", [0, 1.5])
def test_rejects_impossible_share_of_link(three: Path, five: Path, share: float) -> None:
    with (
        dicompiler.connect_swappable(three) as session,
        pytest.raises(UsageError, match=f"link_share must be above 0 and at most 1, not {share}"),
    ):
        session.swap(five, link_share=share)


def test_closed_session_refuses_calls(three: Path, five: Path) -> None:
    session = dicompiler.connect_swappable(three)
    outputs = session.stream(frames())
    next(outputs)
    session.swap(five)
    session.close()
    assert not pids(three) and not pids(five)
    for call in (lambda: session.swap(three), lambda: session.infer(frame(1)), lambda: list(outputs)):
        with pytest.raises(RunError, match="the session has ended: it was closed"):
            call()
    session.close()


def test_error_in_context_ends_devices(three: Path) -> None:
    with pytest.raises(ZeroDivisionError), dicompiler.connect_swappable(three):
        raise ZeroDivisionError
    assert not pids(three)


def test_session_that_has_lost_its_devices_can_swap(three: Path, five: Path) -> None:
    with dicompiler.connect_swappable(three) as session:
        os.kill(pids(three)["pi02"], signal.SIGKILL)
        with pytest.raises(RunError, match="device 'pi02'"):
            list(session.stream(frames(20)))
        session.swap(five)
        assert artifact_changes(session.stream(frames(12))) == [(0, 5)]


def test_forked_child_cannot_swap(three: Path, five: Path) -> None:
    with dicompiler.connect_swappable(three) as session:
        if (child := os.fork()) == 0:
            code = 1
            try:
                session.swap(five)
            except RunError as error:
                code = 0 if "is a fork" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert factor_of(session.infer(frame(1)), 1) == 3


def test_asynchronous_stream_with_swap(three: Path, five: Path) -> None:
    async def read(session: SwappableSession) -> list[Any]:
        outputs = []
        async for found in session.astream(frames(30)):
            outputs.append(found)
            if len(outputs) == 5:
                await asyncio.to_thread(session.swap, five)
        return outputs

    with dicompiler.connect_swappable(three, in_flight=2) as session:
        outputs = asyncio.run(read(session))
        assert artifact_changes(outputs) == [(0, 3), (session.swaps[0].first_frame, 5)]


def test_error_of_frames_is_raised_after_earlier_outputs(three: Path, five: Path) -> None:
    def broken() -> Any:
        yield from frames(6)
        raise ZeroDivisionError

    with dicompiler.connect_swappable(three) as session:
        session.swap(five)
        outputs = []
        with pytest.raises(ZeroDivisionError):
            outputs += session.stream(broken())
        assert artifact_changes(outputs) == [(0, 5)] and len(outputs) == 6
        with pytest.raises(DicompilerError, match="input 'x' is missing"):
            list(session.stream([{}]))


def test_each_artifact_has_its_own_directory_on_boards() -> None:
    text = """format = "dicompiler.hosts/1"
        [defaults]
        directory = "nets/a/"
        [[host]]
        name = "pi01"
        ssh = "pi@10.0.0.1"
        [[host]]
        name = "pi02"
        ssh = "pi@10.0.0.2"
        directory = "/srv/a" """
    hosts = hosts_of_artifact(parse_hosts(text), "b")
    assert [hosts.locate_device(name, name, "b").directory for name in ("pi01", "pi02")] == [
        "nets/a.b/pi01",
        "/srv/a.b/pi02",
    ]
    assert hosts_of_artifact(parse_hosts(text.replace("directory", "python")), "b") == parse_hosts(
        text.replace("directory", "python")
    )


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "count"), [(0, 4), (1, 8)])
def test_swaps_with_killed_devices_lose_no_frame(seed: int, count: int, tmp_path: Path) -> None:
    """Devices of the old or the new artifact are killed before, during or after a third of the swaps."""
    rng = Random(seed)
    directories = {factor: compile_times(factor, tmp_path / str(factor), tolerate_failures=1) for factor in (3, 5)}
    options, swapped, refused = RunOptions(in_flight=0), [3], []

    def swap_often(session: SwappableSession) -> None:
        for number in range(count):
            factor = 8 - swapped[-1]
            killer = None
            if number % 3 == 0:
                victims = directories[rng.choice((3, 5))], rng.choice(("pi01", "pi02", "pi03", "pi04"))
                killer = threading.Timer(rng.uniform(0, 1.5), kill_device, victims)
                killer.start()
            try:
                session.swap(directories[factor])
                swapped.append(factor)
            except RunError as error:
                refused.append(error)
            if killer is not None:
                killer.join()

    with dicompiler.connect_swappable(directories[3], options) as session:
        done = in_thread(swap_often, session)
        outputs = stream_until(session, done.done)
        done.result()
        first_frames = [0, *(swap.first_frame for swap in session.swaps)]
        assert artifact_changes(outputs) == list(zip(first_frames, swapped, strict=True))
    assert len(session.swaps) + len(refused) == count and len(session.swaps) >= count // 2


def kill_device(directory: Path, name: str) -> None:
    if (pid := pids(directory).get(name)) is not None:
        os.kill(pid, signal.SIGKILL)


def test_session_follows_symbolic_link(three: Path, five: Path, single: Path, tmp_path: Path) -> None:
    """A target without an artifact, and one that cannot be used, leave the old artifact in force."""
    link, other, messages = tmp_path / "current", tmp_path / "other", list[str]()
    with pytest.raises(UsageError, match="only a symbolic link can be followed: create one"):
        dicompiler.connect_swappable(three, follow=True)
    dicompiler.compile(times(3, size=8), "rpi4x4", "single", output=other)

    def point_to(target: Path) -> None:
        (tmp_path / "new").symlink_to(target)
        (tmp_path / "new").replace(link)

    point_to(three)
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dicompiler").addHandler(handler)
    try:
        with dicompiler.connect_swappable(link, follow=True) as session:
            point_to(five)
            outputs = stream_until(session, lambda: session.directory == five.resolve())
            assert artifact_changes(outputs)[-1][1] == 5
            point_to(tmp_path)
            stream_until(session, lambda: any("is not an artifact (yet)" in message for message in messages))
            point_to(other)
            stream_until(session, lambda: any("which is not used" in message for message in messages))
            point_to(single)
            outputs = stream_until(session, lambda: session.directory == single.resolve())
            assert artifact_changes(outputs)[-1][1] == 7
            assert [found.new for found in session.swaps] == [five.resolve(), single.resolve()]
    finally:
        logging.getLogger("dicompiler").removeHandler(handler)
    (refusal,) = [event for event in session.events if event.kind == "refusal"]
    assert refusal.message.startswith(f"the followed link points to {other}: swap: {other}: input 'x' has shape")
    assert refusal.message.endswith("; the session keeps its artifact") and refusal.finished_frames > 0
    warning = f"swap: {link} points to {other}, which is not used: swap: {other}: input 'x' has shape"
    assert any(message.startswith(warning) for message in messages)
