"""Frames in flight and the client: order, limits, back-pressure, failures, and imported modules."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.handmade import Made, endless, failing, halo, integers, partial, unknown_shape
from support.running import WAIT_S, by_hand, emit, pids, wait_until

import dicompiler
from dicompiler import networks
from dicompiler.base.errors import DicompilerError, RunError, UsageError
from dicompiler.cli.command_line import main
from dicompiler.target.run_records import FrameTimes, RunOptions
from dicompiler.verify.executor import run_model
from dicompiler_targets.sockets import session as session_module
from dicompiler_targets.sockets.artifact import SocketsArtifact
from dicompiler_targets.sockets.cluster_state import ClusterState
from dicompiler_targets.sockets.device_connections import DeviceEvent
from dicompiler_targets.sockets.runtime.protocol import MessageType
from dicompiler_targets.sockets.session import ClusterSession
from dicompiler_targets.sockets.target import SocketsTarget


def frames(made: Made, count: int) -> list[dict[str, Any]]:
    """Return different small integers for each frame."""
    return [{n: integers(x.shape, 100 + i, x.dtype) for n, x in made[2].items()} for i in range(count)]


def check(made: Made, given: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
    assert np.array_equal(outputs["out"], run_model(made[1], given)["out"])


@pytest.mark.parametrize("in_flight", [0, 2, 5])
@pytest.mark.parametrize("made", [halo, partial], ids=["halo", "partial"])
def test_outputs_keep_order_of_frames(made: Any, in_flight: int, tmp_path: Path) -> None:
    one = made()
    given = frames(one, 60)
    result = SocketsTarget().run(emit(one, tmp_path), given, RunOptions(timeout_s=60, in_flight=in_flight))
    for inputs, outputs in zip(given, result.outputs, strict=True):
        check(one, inputs, outputs)
    sent = {index: count for report in result.reports for index, count in report.sent_bytes.items()}
    assert sent == {t.index: 60 * t.value.nbytes for t in one[0].transfers}
    assert max(result.frames_s) <= result.total_s


def test_shapes_can_differ_between_frames_in_flight(tmp_path: Path) -> None:
    made = unknown_shape()
    given = [{"x": integers(shape, 1)} for shape in [(2, 5), (2, 0), (2, 1)] * 5]
    result = SocketsTarget().run(emit(made, tmp_path), given, RunOptions(timeout_s=60, in_flight=3))
    for inputs, outputs in zip(given, result.outputs, strict=True):
        check(made, inputs, outputs)


def test_keeps_requested_number_of_outputs(tmp_path: Path) -> None:
    made = partial()
    result = SocketsTarget().run(emit(made, tmp_path), [made[2]] * 5, RunOptions(timeout_s=60, kept_frames=1))
    assert (len(result.outputs), len(result.outputs_by_device), len(result.frames_s)) == (1, 1, 5)


def test_client_starts_devices_once(tmp_path: Path) -> None:
    made = halo()
    given = frames(made, 8)
    with dicompiler.connect(emit(made, tmp_path)) as session:
        found = pids(tmp_path)
        check(made, given[0], session.infer(given[0]))
        for inputs, outputs in zip(given, session.stream(given), strict=True):
            check(made, inputs, outputs)
        # During a stream, other calls are allowed. A stream can also end early.
        stream = session.stream(iter(given))
        check(made, given[0], next(stream))
        check(made, given[5], session.infer(given[5]))
        check(made, given[1], next(stream))
        stream.close()  # type: ignore[attr-defined]
        check(made, given[7], session.infer(given[7]))
        assert pids(tmp_path) == found
    assert pids(tmp_path) == {}
    assert [report.device for report in session.reports] == ["a", "b", "c"]
    with pytest.raises(RunError, match=r"^the session has ended: it was closed$"):
        session.infer(given[0])


def test_reads_no_more_frames_than_can_be_in_flight(tmp_path: Path) -> None:
    made, read = partial(), []

    def source() -> Iterator[dict[str, Any]]:
        for i in range(30):
            read.append(i)
            yield made[2]

    with dicompiler.connect(emit(made, tmp_path), RunOptions(in_flight=3)) as session:
        for taken, _ in enumerate(session.stream(source())):
            time.sleep(0.02)
            assert len(read) <= taken + 3
    assert len(read) == 30


def test_slow_caller_limits_frames_of_list(tmp_path: Path) -> None:
    made = partial()
    with dicompiler.connect(emit(made, tmp_path), in_flight=2) as session:
        assert isinstance(session, ClusterSession)
        for count, _ in enumerate(session.stream(frames(made, 12)), 1):
            time.sleep(0.02)
            # `_window.end` is the number of frames that were sent to the devices.
            assert session._window.end <= count + 2


def test_yields_outputs_before_next_frame_is_available(tmp_path: Path) -> None:
    made, taken = partial(), threading.Semaphore(1)

    def camera() -> Iterator[dict[str, Any]]:
        for _ in range(5):
            assert taken.acquire(timeout=20)
            yield made[2]

    with dicompiler.connect(emit(made, tmp_path)) as session:
        for _ in session.stream(camera()):
            taken.release()


def test_source_can_reuse_arrays(tmp_path: Path) -> None:
    made, buffers = (
        partial(rows=20_000),
        {name: np.zeros_like(array) for name, array in partial(rows=20_000)[2].items()},
    )

    def camera() -> Iterator[dict[str, Any]]:
        for i in range(12):
            for array in buffers.values():
                array.fill(i)
            yield buffers

    with dicompiler.connect(emit(made, tmp_path)) as session:
        for i, outputs in enumerate(session.stream(camera())):
            check(made, {name: np.full_like(array, i) for name, array in made[2].items()}, outputs)
    assert i == 11


def test_raises_error_of_source_after_earlier_outputs(tmp_path: Path) -> None:
    made, got = halo(), list[Any]()
    given = frames(made, 3)

    def camera() -> Iterator[dict[str, Any]]:
        yield from given
        raise OSError("the camera is gone")

    with dicompiler.connect(emit(made, tmp_path)) as session:
        for source, error in ((camera(), OSError), ([*given, {"x": 1}], DicompilerError), (5, UsageError)):
            got.clear()
            with pytest.raises(error):
                got.extend(session.stream(source))  # type: ignore[arg-type]
            assert len(got) == (0 if source == 5 else 3)
        check(made, given[0], session.infer(given[0]))


def test_async_streams(tmp_path: Path) -> None:
    made = halo()
    given = frames(made, 6)

    async def camera(count: int) -> AsyncIterator[dict[str, Any]]:
        for one in given[:count]:
            await asyncio.sleep(0)
            yield one
        await asyncio.sleep(3600 if count < 6 else 0)

    async def use(session: ClusterSession) -> None:
        for source in (given, camera(6)):
            got = [outputs async for outputs in session.astream(source)]
            for one, outputs in zip(given, got, strict=True):
                check(made, one, outputs)
        # After two frames, the camera sends nothing more. The cancelled stream must not take the frame of `infer`.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_all(session.astream(camera(2))), 1)
        check(made, given[0], session.infer(given[0]))

    async def _all(outputs: AsyncIterator[Any]) -> None:
        async for _ in outputs:
            pass

    with dicompiler.connect(emit(made, tmp_path)) as session:
        asyncio.run(use(session))  # type: ignore[arg-type]


def test_wrong_inputs_do_not_end_session(tmp_path: Path) -> None:
    made = halo()
    with dicompiler.connect(emit(made, tmp_path)) as session:
        for inputs, words in (
            ({}, "input 'x' is missing"),
            ({"y": 1}, "the network has no input 'y'"),
            ({"x": made[2]["x"].astype(float)}, "input 'x' must be of type float32, not float64"),
            ({"x": made[2]["x"][:, :2]}, r"input 'x' must have the shape \(1, 3, 16, 16\), not"),
            ({"x": [[1.0], [2.0, 3.0]]}, "input 'x' is not an array"),
        ):
            with pytest.raises(DicompilerError, match=rf"^{words}"):
                session.infer(inputs)
        check(made, made[2], session.infer(made[2]))
        # `infer` accepts lists instead of arrays, like dicompiler.run.
        check(made, made[2], session.infer({"x": made[2]["x"].tolist()}))


def test_names_device_that_failed_while_idle(tmp_path: Path) -> None:
    made = halo()
    session = dicompiler.connect(emit(made, tmp_path))
    session.infer(made[2])
    os.kill(pids(tmp_path)["b"], signal.SIGKILL)
    with pytest.raises(RunError, match=r"^device 'b': its process was ended by signal 9"):
        session.infer(made[2])
    assert pids(tmp_path) == {}


def test_measures_time_of_each_frame(tmp_path: Path) -> None:
    session = dicompiler.connect(emit(endless(), tmp_path), timeout=3)
    begun = time.monotonic()
    with pytest.raises(RunError, match=r"^device 'b': did not finish within 3 s"), session:
        session.infer(endless()[2])
    assert 3 <= time.monotonic() - begun < 8
    assert pids(tmp_path) == {}


@pytest.mark.parametrize("target", ["sockets", "mpi"])
def test_separates_queue_wait_from_frame_time(target: str, tmp_path: Path) -> None:
    """Six frames are sent to one device at once: each waits for the earlier ones, and then takes the same time."""
    text = """<ir_version: 8, opset_import: ["" : 17]> squares (float[640, 640] x) => (float[640, 640] y) {
        a = MatMul (x, x)
        b = MatMul (a, a)
        y = MatMul (b, b)
    }"""
    dicompiler.compile(onnx.parser.parse_model(text), "rpi4x2", "single", target=target, output=tmp_path / "net")

    def separates() -> bool:
        at_once = dicompiler.run(tmp_path / "net", frames=6, options=RunOptions(in_flight=6))
        own = [took - waited for took, waited in zip(at_once.frames_s, at_once.queue_wait_s, strict=True)]
        by_itself = dicompiler.run(tmp_path / "net", frames=3)
        return (
            # The first frame starts at once, but later frames wait for the device.
            at_once.queue_wait_s[0] < statistics.median(at_once.queue_wait_s[1:])
            and at_once.queue_wait_s[-1] > 2 * statistics.median(own) > 0
            and statistics.median(by_itself.queue_wait_s) < 0.75 * statistics.median(by_itself.frames_s)
        )

    # On a busy host, the first frame may wait too, so several attempts are allowed.
    assert any(separates() for _ in range(5))


def test_reports_segment_that_fails_in_stream(tmp_path: Path) -> None:
    good, bad = failing()[2], {"x": np.array([9], np.int64)}
    with pytest.raises(RunError, match=r"^device 'b': segment 'b0': onnxruntime cannot run it: "):
        SocketsTarget().run(emit(failing(), tmp_path), [good, good, bad, good], RunOptions(timeout_s=60, in_flight=4))


def test_devices_can_be_started_manually(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = halo()
    artifact = SocketsArtifact.load(emit(made, tmp_path))
    with pytest.raises(UsageError, match=r"no device 'x'"):
        SocketsTarget().run(tmp_path, [made[2]], RunOptions(timeout_s=60, start_manually=("x",)))

    started: list[subprocess.Popen[bytes]] = []
    hand = threading.Thread(target=lambda: started.append(by_hand(tmp_path, wait_until(lambda: caplog.messages)[0])))
    hand.start()
    with (
        caplog.at_level("WARNING", "dicompiler"),
        ClusterSession(artifact, RunOptions(timeout_s=20, start_manually=("b",))) as session,
    ):
        check(made, made[2], session.infer(made[2]))
    hand.join()
    assert started[0].wait(WAIT_S) == 0


def test_pins_processes(tmp_path: Path) -> None:
    with dicompiler.connect(emit(partial(), tmp_path), RunOptions(pin=True)):
        own = [os.sched_getaffinity(pid) for _, pid in sorted(pids(tmp_path).items())]
    everywhere = os.sched_getaffinity(0)
    assert all(len(cores) == max(1, len(everywhere) // 2) for cores in own)
    assert own[0] | own[1] == everywhere or len(everywhere) % 2 or len(everywhere) == 1


def test_command_streams_frames(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "artifact"
    dicompiler.compile(networks.build("tiny"), platform="rpi4x2", strategy="modnn", output=directory)
    assert main(["keys", str(directory)]) == 0
    capsys.readouterr()
    arguments = ["run", str(directory), "--frames", "9", "--in-flight", "3", "--pin", "--heartbeat", "1"]
    assert main([*arguments, "--keys", f"{directory}.keys", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["frames_s"]) == 9
    assert max(printed["frames_s"]) <= printed["total_s"]
    assert main([*arguments, "--outputs", str(tmp_path / "y.npz")]) == 0
    assert "\nframes per second: " in capsys.readouterr().out
    assert (tmp_path / "y.npz").is_file()
    assert main(["run", str(directory), "--listen", "nowhere:x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dicompiler: error: run: 'nowhere:x' is not an address: expected HOST or HOST:PORT, with ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (RunOptions(in_flight=2000), "frames in flight must be 1 to 1024, or 0 for the default, not 2000"),
        (RunOptions(heartbeat_s=0), r"the heartbeat must be between 0\.05 and 3600 s, not 0"),
        (RunOptions(listen="nowhere:x"), "'nowhere:x' is not an address: expected HOST or HOST:PORT"),
        (RunOptions(listen="0.0.0.0:0"), r"0\.0\.0\.0 is not a loopback address and there are no keys: .*--insecure"),
        (
            RunOptions(listen="0.0.0.0:0", insecure=True),
            r"devices cannot connect to the address 0\.0\.0\.0: pass an address of this host",
        ),
    ],
)
def test_rejects_invalid_options(options: RunOptions, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"^run: {words}"):
        dicompiler.connect(emit(partial(), tmp_path), options)
    assert pids(tmp_path) == {}


def test_times_of_each_frame_are_reported(tmp_path: Path) -> None:
    times: list[FrameTimes] = []
    options = RunOptions(in_flight=3, on_frame=times.append)
    with dicompiler.connect(emit(halo(), tmp_path), options) as session:
        list(session.stream([halo()[2]] * 7))
        session.infer(halo()[2])
    assert len(times) == 8
    for report in session.reports:
        assert sum(found.compute_s[report.device] for found in times) == pytest.approx(report.compute_s)
    assert all(found.frame_s > max(found.compute_s.values()) > 0 for found in times)


def test_times_that_arrive_after_the_outputs_are_reported_before_the_next_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, real_events = list[DeviceEvent](), ClusterState.events

    def events(cluster: ClusterState, *arguments: Any) -> Iterator[DeviceEvent]:
        """Yield the devices' messages, but each message DONE only in the next call."""
        if held:
            yield from [held.pop() for _ in range(len(held))]
            return
        for event in real_events(cluster, *arguments):
            if event.header is not None and event.header.type is MessageType.DONE:
                held.append(event)
            else:
                yield event

    monkeypatch.setattr(session_module, "MAX_TIMES_WAIT_S", 60)
    monkeypatch.setattr(ClusterState, "events", events)
    times: list[FrameTimes] = []
    with dicompiler.connect(emit(halo(), tmp_path), RunOptions(on_frame=times.append)) as session:
        for count in range(1, 6):
            session.infer(halo()[2])
            assert len(times) == count
        gate = threading.Semaphore(1)
        for count, _ in enumerate(session.stream(halo()[2] for _ in range(5) if gate.acquire()), 6):
            assert len(times) == count
            gate.release()
