"""Devices that fail while frames are in flight, with real processes: each frame is delivered once and correct."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from support.failing_devices import DEVICES, Survivor, frames, frames_until, kinds, survivor
from support.hostile_device import Hostile
from support.running import LIMIT_S, by_hand, pids, wait_until

import dicompiler
from dicompiler import networks
from dicompiler.base.errors import DicompilerError, RunError, UsageError
from dicompiler.base.schema import validate
from dicompiler.driver.run_log import run_document
from dicompiler.search.constraints import check_target_support
from dicompiler.target.remote.certificates import make_keys
from dicompiler.target.run_records import RunEvent, RunOptions
from dicompiler_targets.sockets import failures
from dicompiler_targets.sockets.artifact import SocketsArtifact
from dicompiler_targets.sockets.cluster_state import ClusterState
from dicompiler_targets.sockets.device_connections import ANY_LOOPBACK_PORT, DeviceProcess, RunAcceptor
from dicompiler_targets.sockets.failures import (
    RANK_CAUSE,
    RANK_DISCONNECTED,
    RANK_SUSPECTED,
    DeviceFailure,
    EventLog,
    FailedProcesses,
)
from dicompiler_targets.sockets.runtime.device import ConnectionSettings, DeviceRun
from dicompiler_targets.sockets.runtime.executor import Mailbox
from dicompiler_targets.sockets.runtime.handshake import RunCredentials
from dicompiler_targets.sockets.runtime.protocol import (
    DONE_FIELDS,
    RECEIVED_TENSORS,
    FrameWindow,
    MessageHeader,
    MessageType,
    ProtocolError,
    ReceiveFilter,
    RoleSchedule,
)
from dicompiler_targets.sockets.session import COVERED_HEARTBEAT_S, UNCOVERED_HEARTBEAT_S, ClusterSession
from dicompiler_targets.sockets.target import SocketsTarget
from dicompiler_targets.tflm import TflmTarget

NO_SECONDS = DONE_FIELDS.pack(0.0, 0.0, 0)
"""The payload of DONE of a device that has not computed."""
HEARTBEAT_S, LONG_HEARTBEAT_S = 0.3, 30.0
MAX_DETECTION_S = 3.75 * HEARTBEAT_S
EACH_DEVICE = [(name,) for name in DEVICES]


@pytest.fixture(scope="module")
def single_failures(tmp_path_factory: pytest.TempPathFactory) -> Survivor:
    """Any one device can fail; source and sink are other devices then."""
    return survivor(1, EACH_DEVICE, tmp_path_factory.mktemp("one") / "artifact")


@pytest.fixture(scope="module")
def double_failures(tmp_path_factory: pytest.TempPathFactory) -> Survivor:
    """b can fail, and also b and c together."""
    return survivor(2, [("b",), ("b", "c")], tmp_path_factory.mktemp("two") / "artifact")


def connect(net: Survivor, **options: Any) -> ClusterSession:
    found = dicompiler.connect(net.directory, RunOptions(**{"in_flight": 4, **options}), 60)
    assert isinstance(found, ClusterSession)
    return found


def send_signal(net: Survivor, device: str, number: int) -> float:
    os.kill(pids(net.directory)[device], number)
    return time.monotonic()


@pytest.mark.slow
@pytest.mark.parametrize("victims", [(*DEVICES, "a"), "b"], ids=["clear", "tls"])
def test_each_device_can_fail_and_return(victims: str, single_failures: Survivor, tmp_path: Path) -> None:
    rng, heard, options = Random(5), list[RunEvent](), dict[str, Any]()
    if len(victims) == 1:
        make_keys(DEVICES, tmp_path / "keys")
        options["keys"] = tmp_path / "keys"

    def scenario() -> Iterator[None]:
        for i, victim in enumerate(victims):
            yield from frames(rng.randint(1, 40))
            send_signal(single_failures, victim, signal.SIGKILL)
            yield from frames_until(lambda i=i: len(heard) > 3 * i + 2)
        yield from frames(20)

    with connect(single_failures, on_event=heard.append, **options) as session:
        count = single_failures.stream(session, scenario())
    assert kinds(session) == [(kind, name) for name in victims for kind in ("failure", "takeover", "return")]
    assert session.events == heard
    assert [report.device for report in session.reports] == list(DEVICES)
    assert pids(single_failures.directory) == {}
    for event in heard:
        assert event.reason.startswith("its process was ended by signal 9 (SIGKILL)") == (event.kind == "failure")
        assert event.down == (() if event.kind == "return" else (event.device,))
        assert event.interruption_s < LIMIT_S and event.replayed_frames <= 4 and event.finished_frames <= count


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["a", "d"])
def test_hanging_device_fails_after_missed_heartbeats(victim: str, single_failures: Survivor) -> None:
    with connect(single_failures, heartbeat_s=HEARTBEAT_S) as session:

        def scenario() -> Iterator[None]:
            yield from frames(10)
            stopped = send_signal(single_failures, victim, signal.SIGSTOP)
            yield from frames_until(lambda: session.events)
            assert time.monotonic() - stopped < MAX_DETECTION_S + LIMIT_S
            yield from frames_until(lambda: len(session.events) > 2)
            yield from frames(10)

        single_failures.stream(session, scenario())
    assert kinds(session) == [("failure", victim), ("takeover", victim), ("return", victim)]
    takeover = session.events[1]
    # The interruption includes the time without heartbeats until the failure was noticed.
    assert takeover.interruption_s - takeover.takeover_s >= 2 * HEARTBEAT_S
    silence = f"after {takeover.interruption_s:.2f} s without a finished frame ({takeover.takeover_s:.2f} s after the"
    assert silence in takeover.message
    assert (
        "has stopped, or the network to the device is down" in session.events[0].reason
        or "was lost" in session.events[0].reason
    )


@pytest.mark.slow
def test_heartbeats_are_more_frequent_if_a_failure_plan_covers_a_failure(
    single_failures: Survivor, tmp_path: Path
) -> None:
    with connect(single_failures) as session:
        assert session.options.heartbeat_s == COVERED_HEARTBEAT_S
    with connect(single_failures, heartbeat_s=1.25) as session:
        assert session.options.heartbeat_s == 1.25
    dicompiler.compile(networks.build("lenet", 0), "rpi4x2", "modnn", output=tmp_path / "net")
    with dicompiler.connect(tmp_path / "net") as uncovered:
        assert isinstance(uncovered, ClusterSession) and uncovered.options.heartbeat_s == UNCOVERED_HEARTBEAT_S


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@dataclass
class RecordingChannel:
    """A channel that records posted messages."""

    peer: str
    words: list[tuple[str, MessageType, int]]

    def post(self, kind: MessageType, payload: Any = b"", index: int = 0, frame: int = 0, keep: Any = None) -> None:  # noqa: ARG002
        self.words.append((self.peer, kind, frame))


class ReleaseCounter:
    """A channel that counts its releases."""

    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


class StartMessages(logging.Handler):
    """Captures the messages of runs in this process, and starts devices manually as the messages say."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words: list[str] = []
        self.started: list[subprocess.Popen[bytes]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())

    def find_command(self, device: str) -> str:
        """Wait for the message that tells how to start a device."""
        start = f"start {device} in its directory"
        found = wait_until(lambda: next((words for words in self.words if words.startswith(start)), ""))
        return str(found)

    def start(self, net: Survivor, device: str) -> subprocess.Popen[bytes]:
        self.started.append(by_hand(net.directory, self.find_command(device)))
        return self.started[-1]

    def start_later(self, net: Survivor, device: str) -> None:
        """Start the device in a thread when the run asks for it."""
        threading.Thread(target=self.start, args=(net, device), daemon=True).start()


@pytest.fixture
def start_messages() -> Iterator[StartMessages]:
    found, log = StartMessages(), logging.getLogger("dicompiler")
    level = log.level
    log.addHandler(found)
    log.setLevel(logging.WARNING)
    yield found
    log.removeHandler(found)
    log.setLevel(level)
    for process in found.started:
        process.kill()
        process.wait()


def test_continued_device_does_not_disturb_run(start_messages: StartMessages, single_failures: Survivor) -> None:
    """The run cannot end the stopped process. It ends by itself when it continues, and another one replaces it."""
    start_messages.start_later(single_failures, "c")
    with connect(single_failures, heartbeat_s=HEARTBEAT_S, start_manually=("c",)) as session:

        def scenario() -> Iterator[None]:
            yield from frames(10)
            old = pids(single_failures.directory)["c"]
            os.kill(old, signal.SIGSTOP)
            yield from frames_until(lambda: len(session.events) > 1)
            start_messages.start(single_failures, "c")
            yield from frames_until(lambda: len(session.events) > 2)
            os.kill(old, signal.SIGCONT)
            yield from frames_until(lambda: has_ended(old))
            yield from frames(20)

        single_failures.stream(session, scenario())
    assert kinds(session) == [("failure", "c"), ("takeover", "c"), ("return", "c")]


def test_survives_two_failures_and_ends_at_uncovered_one(
    start_messages: StartMessages, double_failures: Survivor
) -> None:
    for name in "bc":
        start_messages.start_later(double_failures, name)
    with connect(double_failures, start_manually=("b", "c")) as session:

        def scenario() -> Iterator[None]:
            for name in "bc":
                yield from frames(10)
                send_signal(double_failures, name, signal.SIGKILL)
                yield from frames_until(lambda name=name: kinds(session)[-1:] == [("takeover", name)])
            assert session.events[-1].down == ("b", "c")
            yield from frames(10)
            send_signal(double_failures, "d", signal.SIGKILL)
            yield from frames_until(lambda: False)

        cause = r"its process was ended by signal 9 \(SIGKILL\)"
        no_plan = "the artifact has no plan for the failure of 'b', 'c' and 'd' together"
        remedy = r"compile with --tolerate-failures 3 \(in Python: tolerate_failures=3\)"
        with pytest.raises(RunError, match=rf"^device 'd': {cause}; {no_plan}: {remedy}$"):
            double_failures.stream(session, scenario())
    # b and c were started again. Their processes may still run, because the run did not wait for them.
    assert pids(double_failures.directory).keys() <= {"b", "c"}


@pytest.mark.slow
def test_uses_plan_for_more_failures(start_messages: StartMessages, double_failures: Survivor) -> None:
    """There is no plan for c alone, so b is up but idle, and would reject frames until c returns."""
    start_messages.start_later(double_failures, "c")
    with connect(double_failures, start_manually=("c",)) as session:
        assert [{"b", "c"} & role_io.active_devices for role_io in session.artifact.role_ios] == [
            {"b", "c"},
            {"c"},
            set(),
        ]

        def scenario() -> Iterator[None]:
            for count in (2, 5):
                yield from frames(10)
                send_signal(double_failures, "c", signal.SIGKILL)
                yield from frames_until(lambda count=count: len(session.events) == count)
                yield from frames(10)
                if count == 2:
                    start_messages.start(double_failures, "c")
                    yield from frames_until(lambda: len(session.events) == 3)

        double_failures.stream(session, scenario())
    assert kinds(session) == [(kind, "c") for kind in ("failure", "takeover", "return", "failure", "takeover")]


def test_host_failure_causes_one_takeover(start_messages: StartMessages, tmp_path: Path) -> None:
    """The plan for the first failure does without the second device too, so no frame is sent twice."""
    net = survivor(3, [("b", "c")], tmp_path / "artifact")
    for name in "bc":
        start_messages.start_later(net, name)
    with connect(net, start_manually=("b", "c")) as session:

        def scenario() -> Iterator[None]:
            yield from frames(10)
            found = pids(net.directory)
            for name in "bc":
                os.kill(found[name], signal.SIGKILL)
            yield from frames_until(lambda: len(session.events) > 2)
            yield from frames(10)

        net.stream(session, scenario())
    found = kinds(session)
    assert sorted(event for event in found if event[0] != "takeover") == [("failure", "b"), ("failure", "c")]
    assert found[-1][0] == "takeover"
    assert [event.replayed_frames for event in session.events if event.replayed_frames][1:] == [] and session.events[
        -1
    ].replayed_frames <= 4


def test_failure_of_idle_device_drops_no_frame(start_messages: StartMessages, double_failures: Survivor) -> None:
    for name in "bc":
        start_messages.start_later(double_failures, name)
    with connect(double_failures, start_manually=("b", "c")) as session:

        def scenario() -> Iterator[None]:
            # After c has failed, the plan for failures of both b and c is used. So b is idle when it fails too.
            for name in "cb":
                yield from frames(10)
                send_signal(double_failures, name, signal.SIGKILL)
                yield from frames_until(lambda name=name: kinds(session)[-1:] == [("takeover", name)])
            yield from frames(10)

        double_failures.stream(session, scenario())
    assert session.events[-1].device == "b" and session.events[-1].replayed_frames == 0


def test_unused_frame_numbers_do_not_count_as_in_flight(double_failures: Survivor) -> None:
    """Consecutive changes leave a frame number unused, whose role would include the device."""
    event_log = EventLog(None)
    cluster = ClusterState(
        SocketsArtifact.load(double_failures.directory),
        RunOptions(heartbeat_s=60),
        4,
        cast(Any, None),
        cast(Any, None),
        0,
        lambda *_: None,
        event_log.set_reason,
    )
    cluster.schedule.change(("b", "c"), 0, 0)
    frames = [cluster.window.admit_frame() for _ in range(2)]
    cluster.schedule.change((), 2, 0)  # Both devices return for frame 2, and fail again before another frame is sent.
    cluster.window.finish(cluster.window.admit_frame())
    cluster.schedule.change(("b", "c"), 3, 0)
    assert not cluster._is_needed_in_flight("c") and cluster._is_needed_in_flight("a")
    cluster.window.finish(frames[0])
    assert not cluster._is_needed_in_flight("c")
    cluster.loop.close()


def test_skips_several_unused_frame_numbers() -> None:
    """Consecutive changes that drop no frame, while a device computes a segment."""
    box = Mailbox()
    for number in (5, 6):
        box.put_order(("skip", number), number + 1)
    assert (box.skip_frames(5), box.skip_frames(7)) == (7, 7)


def test_items_of_dropped_frames_are_discarded() -> None:
    box, keys = Mailbox(), [(2, "t0"), ("frame", 2), ("reset states", 2), (3, "t0"), ("reset states", 3)]
    for key in keys:
        box.put(key, None)
    box.drop(3)
    assert [key for key in keys if box.has_item(key)] == [(3, "t0"), ("reset states", 3)]


def test_each_change_has_its_own_number(start_messages: StartMessages, double_failures: Survivor) -> None:
    """With two changes and no frame between, the acknowledgement of the first does not count for the second."""
    for name in "bc":
        start_messages.start_later(double_failures, name)
    with connect(double_failures, start_manually=("b", "c")) as session:
        numbers = [session._cluster.schedule.last_change]
        for name in "bc":
            send_signal(double_failures, name, signal.SIGKILL)
            wait_until(lambda name=name: session._handle_events([]) or ("takeover", name) in kinds(session))
            numbers.append(session._cluster.schedule.last_change)
        assert numbers == sorted(set(numbers))
        double_failures.stream(session, frames(10))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "frame", "payload", "words"),
    [
        (MessageType.READY, 0, b"", "received READY twice"),
        (MessageType.ROLES_CHANGED, 0, b"", "received ROLES_CHANGED twice for frame 0"),
        (MessageType.ROLES_CHANGED, 1, b"", "received ROLES_CHANGED for frame 1, at which no roles change"),
        (MessageType.DONE, 0, NO_SECONDS, "received DONE twice for frame 0"),
        (MessageType.DONE, 0, b"123", "received DONE of 3 bytes, which is not the length of a valid one"),
        (MessageType.DONE, 0, NO_SECONDS + b"1", "received DONE of 17 bytes, which is not the length of a valid one"),
        (
            MessageType.DONE,
            0,
            NO_SECONDS + RECEIVED_TENSORS.pack(99, 1, 1, 0.1),
            "field 'received' of the report has an invalid device index 99",
        ),
        (
            MessageType.DONE,
            0,
            NO_SECONDS + RECEIVED_TENSORS.pack(0, 1, 1, float("inf")),
            "field 'timed_s' of the report is inf: .*",
        ),
        (MessageType.DONE, 0, DONE_FIELDS.pack(float("nan"), 0.0, 0), "field 'compute_s' of the report is nan: .*"),
    ],
)
def test_rejects_repeated_and_wrong_device_messages(
    kind: MessageType, frame: int, payload: bytes, words: str, start_messages: StartMessages, single_failures: Survivor
) -> None:
    player = sorted(single_failures.roles()[0].active_devices)[0]

    def act() -> None:
        command = start_messages.find_command(player)
        device = Hostile(single_failures.directory, player, command, heartbeat_s=LONG_HEARTBEAT_S)
        device.take_part(single_failures.peers(player))
        device.heard(MessageType.BEGIN_FRAME)
        for _ in range(3):
            device.control.send(kind, payload, frame=frame)

    threading.Thread(target=act, daemon=True).start()
    no_plan = "failure plans are only for unreachable devices"
    with (
        pytest.raises(RunError, match=f"^device '{player}': sent invalid data: {words}; {no_plan}$"),
        connect(single_failures, heartbeat_s=LONG_HEARTBEAT_S, start_manually=(player,)) as session,
    ):
        single_failures.stream(session, frames(1))
    while Hostile.there:
        Hostile.there.pop().close()


def test_discards_late_messages_while_caller_is_slow(start_messages: StartMessages, single_failures: Survivor) -> None:
    """Late messages of frames that were sent again do not accumulate, even from a device that sends them endlessly."""
    outputs = single_failures.roles()[0].outputs
    sink = next(name for name, values in outputs.items() if values)
    index, value = next(iter(outputs[sink].items()))
    victim, played = next(name for name in DEVICES if name != sink), list[Hostile]()

    def act() -> None:
        command = start_messages.find_command(sink)
        played.append(Hostile(single_failures.directory, sink, command, heartbeat_s=LONG_HEARTBEAT_S))
        played[0].take_part(single_failures.peers(sink))

    threading.Thread(target=act, daemon=True).start()
    session = connect(single_failures, heartbeat_s=LONG_HEARTBEAT_S, start_manually=(sink,))
    send_signal(single_failures, victim, signal.SIGKILL)
    wait_until(lambda: session._handle_events([]) or kinds(session))
    device, since = played[0], session._cluster.schedule.last_change
    device.heard(MessageType.CHANGE_ROLES)
    session._loop.let_helper_run(60.0)
    for _ in range(100):
        device.control.send(MessageType.OUTPUT, bytes(value["bytes"]), index)
        device.control.send(MessageType.DONE, NO_SECONDS)
        device.control.send(MessageType.ROLES_CHANGED)
    device.control.send(MessageType.ROLES_CHANGED, frame=since)
    heard = session._cluster._messages.events
    last = wait_until(lambda: [event for event in tuple(heard) if event.device == sink])
    assert [event.header.frame for event in last] == [since]
    device.control.send(MessageType.ROLES_CHANGED, frame=since)
    with pytest.raises(RunError, match="received ROLES_CHANGED twice"), session._guard_call():
        wait_until(lambda: session._handle_events([]))
    while Hostile.there:
        Hostile.there.pop().close()


def test_starts_without_devices(single_failures: Survivor) -> None:
    program = single_failures.compilation.program
    assert program is not None
    for lost in (("b",), ("e",)):
        role = next(role for role in program.roles if role.failed == lost)
        first = sum(len(other.transfers) for other in program.roles[: program.roles.index(role)])
        result = SocketsTarget().run(
            single_failures.directory, single_failures.frames(3), RunOptions(timeout_s=60, start_without=lost)
        )
        sent = {index: count for report in result.reports for index, count in report.sent_bytes.items()}
        assert sent == {first + t.index: 3 * t.value.nbytes for t in role.transfers}
    double_failures = "start_without: the artifact has no plan for the failure of 'b' and 'c' together: compile with"
    for without, words in ((("b", "c"), double_failures), (("x",), "no device 'x'")):
        with pytest.raises(UsageError, match=words):
            SocketsTarget().run(single_failures.directory, single_failures.frames(1), RunOptions(start_without=without))


@pytest.mark.parametrize("failure", ["ends", "never comes"])
def test_device_can_fail_before_run_starts(
    failure: str, start_messages: StartMessages, single_failures: Survivor
) -> None:
    """The device ends while others connect to it or wait for it, or does not start in time."""

    def act() -> None:
        device = Hostile(single_failures.directory, "c", start_messages.find_command("c"), heartbeat_s=HEARTBEAT_S)
        device.greet()
        device.heard(MessageType.PEERS)
        device.welcome()  # The device that waits for c does not know about the failure yet.
        device.control.close()

    if failure == "ends":
        threading.Thread(target=act, daemon=True).start()
    options = RunOptions(in_flight=4, heartbeat_s=HEARTBEAT_S, start_manually=("c",))
    with dicompiler.connect(single_failures.directory, options, 3 if failure == "never comes" else 60) as session:
        assert isinstance(session, ClusterSession)
        assert kinds(session) == [("failure", "c")]
        single_failures.stream(session, frames(10))
    assert kinds(session) == [("failure", "c"), ("takeover", "c")]
    assert session.events[0].finished_frames == session.events[1].replayed_frames == 0
    while Hostile.there:
        Hostile.there.pop().close()


@pytest.mark.slow
def test_missing_device_leaves_half_of_timeout_for_frames(single_failures: Survivor) -> None:
    result = SocketsTarget().run(
        single_failures.directory, single_failures.frames(3), RunOptions(timeout_s=16, start_manually=("c",))
    )
    assert len(result.outputs) == 3 and [event.kind for event in result.events] == ["failure", "takeover"]


class FailingFrames(Sequence[Any]):
    """Frames that call `strike` when the frame of a given number is read."""

    def __init__(self, frames: list[Any], number: int, strike: Callable[[], object]) -> None:
        self.frames, self.number, self.strike = frames, number, strike

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, place: Any) -> Any:
        if place == self.number:
            self.strike()
        return self.frames[place]


@pytest.mark.slow
def test_run_log_lists_events(single_failures: Survivor) -> None:
    """The log of `dicompiler run` for a run that continues after b has failed."""
    struck = list[float]()

    def strike() -> None:
        # The run checks all frames before it starts, and also calls this function then; b has no process yet.
        if "b" in pids(single_failures.directory):
            struck.append(send_signal(single_failures, "b", signal.SIGKILL))

    wait_until(lambda: not pids(single_failures.directory))  # Wait for the end of processes of earlier runs.
    inputs = FailingFrames(single_failures.frames(3) * 200, 100, strike)
    result = SocketsTarget().run(single_failures.directory, inputs, RunOptions(timeout_s=60, in_flight=4))
    assert len(result.outputs) == len(inputs) and len(struck) == 1
    log = json.loads(json.dumps(run_document(single_failures.directory, result, RunOptions(in_flight=4))))
    validate(log, "run", "log")
    assert [event["kind"] for event in log["events"]][:2] == ["failure", "takeover"]
    assert log["replayed_frames"] == sum(event.replayed_frames for event in result.events)
    # On a busy host, all frames in flight may have finished before the failure. Then nothing was interrupted.
    assert log["interrupted_s"] > 0 or not log["replayed_frames"]


@pytest.mark.slow
def test_device_suspected_by_others_fails(start_messages: StartMessages, single_failures: Survivor) -> None:
    def act() -> None:
        command = start_messages.find_command("c")
        device = Hostile(single_failures.directory, "c", command, heartbeat_s=LONG_HEARTBEAT_S)
        device.take_part(single_failures.peers("c"))
        device.heard(MessageType.BEGIN_FRAME)
        device.channels[0].close()

    threading.Thread(target=act, daemon=True).start()
    with connect(single_failures, heartbeat_s=LONG_HEARTBEAT_S, start_manually=("c",)) as session:
        single_failures.stream(session, frames(30))
    assert kinds(session) == [("failure", "c"), ("takeover", "c")]
    assert "reports: the connection to 'c' was lost" in session.events[0].reason
    while Hostile.there:
        Hostile.there.pop().close()


def test_refuses_returning_device_with_another_artifact(
    start_messages: StartMessages, single_failures: Survivor, double_failures: Survivor
) -> None:
    start_messages.start_later(single_failures, "b")
    with connect(single_failures, start_manually=("b",)) as session:

        def scenario() -> Iterator[None]:
            yield from frames(5)
            send_signal(single_failures, "b", signal.SIGKILL)
            yield from frames_until(lambda: len(session.events) > 1)
            other = start_messages.start(double_failures, "b")
            yield from frames_until(
                lambda: any("belongs to another artifact" in words for words in start_messages.words)
            )
            yield from frames_until(lambda: other.poll() == 1)
            yield from frames(10)

        single_failures.stream(session, scenario())
    assert kinds(session) == [("failure", "b"), ("takeover", "b")]


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["file", "certificate"])
def test_refuses_damaged_returning_device_until_repaired(
    harm: str, start_messages: StartMessages, single_failures: Survivor, tmp_path: Path
) -> None:
    if harm == "file":
        victim, words = (
            max((single_failures.directory / "b").glob("*.onnx"), key=lambda path: path.stat().st_size),
            "is damaged",
        )
        wrong, options = bytearray(victim.read_bytes()), dict[str, Any]()
        wrong[-1] ^= 1
    else:
        options = {"keys": tmp_path / "keys"}
        make_keys(DEVICES, tmp_path / "keys")
        victim, other = (tmp_path / "keys" / "devices" / name / "cert.pem" for name in "bc")
        wrong, words = bytearray(other.read_bytes()), "keys: "
    right = victim.read_bytes()

    def put(content: bytes) -> None:
        # A new file is renamed over the old one, so that processes that mapped the old file keep it.
        new = victim.with_suffix(".new")
        new.write_bytes(content)
        os.replace(new, victim)

    with connect(single_failures, **options) as session:

        def scenario() -> Iterator[None]:
            yield from frames(5)
            put(wrong)
            send_signal(single_failures, "b", signal.SIGKILL)
            yield from frames_until(lambda: any(words in line for line in start_messages.words))
            yield from frames(10)
            put(right)
            yield from frames_until(lambda: len(session.events) > 2)
            yield from frames(10)

        try:
            single_failures.stream(session, scenario())
        finally:
            put(right)
    assert kinds(session) == [("failure", "b"), ("takeover", "b"), ("return", "b")]
    # Several attempts to start the device give only one message.
    assert sum(words in line for line in start_messages.words) == 1


def test_rejects_targets_that_cannot_tolerate_failures(single_failures: Survivor) -> None:
    plan = single_failures.compilation.plan
    assert plan is not None
    with pytest.raises(DicompilerError, match="target 'tflm' does not support failure plans"):
        check_target_support(plan, TflmTarget())
    check_target_support(plan, SocketsTarget())


def test_frames_use_current_roles() -> None:
    schedule = RoleSchedule([(), (), ("b",), ("b", "c"), ("b", "c")])
    assert [schedule.role_index(frame) for frame in range(4)] == [0, 1, 0, 1]
    schedule.change(("b", "c"), 5, 2)
    assert [schedule.role_index(frame) for frame in range(2, 8)] == [0, 1, 0, 4, 3, 4]
    schedule.change((), 7, 5)
    assert [schedule.role_index(frame) for frame in range(5, 9)] == [4, 3, 1, 0]
    assert [schedule.find_failed_set(away) for away in ((), "b", "c", "d")] == [
        frozenset(), {"b"}, {"b", "c"}, None
    ]  # fmt: skip
    with pytest.raises(ValueError, match="the artifact has no plan for the failure of"):
        schedule.change(("d",), 9, 0)


def test_schedule_always_has_last_change() -> None:
    """Threads read the last change without synchronization."""

    class RecordingSchedule(RoleSchedule):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "_changes":
                seen.append(self.last_change)

    seen = list[int]()
    schedule = RecordingSchedule([(), ("b",)])
    schedule.change(("b",), 5, 5)  # Frames before 5 are finished, so earlier changes are not needed.
    assert seen == [0, 5]


def make_device(survivor: Survivor) -> DeviceRun:
    manifest = json.loads((survivor.directory / "c" / "manifest.json").read_bytes())
    settings = ConnectionSettings(time.monotonic() + 5)
    return DeviceRun(survivor.directory / "c", manifest, settings, RunCredentials())


def test_holds_peer_that_changed_roles_earlier(single_failures: Survivor) -> None:
    device = make_device(single_failures)
    admit, deliver, _ = device._make_peer_callbacks("a")
    word = MessageHeader(MessageType.ROLES_CHANGED, 0, 5, 0)
    admit(word)
    assert deliver(word, b"") is True
    device._last_change = 5
    assert deliver(word, b"") is False
    device._loop.close()


def test_holds_peer_until_second_change(single_failures: Survivor) -> None:
    device, channel = make_device(single_failures), ReleaseCounter()
    _, deliver, _ = device._make_peer_callbacks("a")
    device.peers.channels["a"] = cast(Any, channel)
    assert (
        deliver(MessageHeader(MessageType.ROLES_CHANGED, 0, 6, 0), b"") is True
    )  # True stops reading from a, which uses plans that this device does not use yet.
    released = []
    for first, lost in ((5, "b"), (6, "d")):
        device._change_roles({"down": [lost], "failed": [lost], "first": first, "drop": True})
        released.append(channel.released)
    assert released == [0, 1]
    device._loop.close()


def test_notifies_peers_once_before_next_tensor(single_failures: Survivor) -> None:
    device, words = make_device(single_failures), list[tuple[str, MessageType, int]]()
    for peer in ("a", "b"):
        device.peers.channels[peer] = cast(Any, RecordingChannel(peer, words))
    device._last_change, device._peers_to_notify = 7, {"a", "b"}
    for index, receiver in enumerate(("b", "b", "a")):
        device._post_value({"receiver": receiver, "index": index}, 7, b"", None)
    assert words == [
        ("b", MessageType.ROLES_CHANGED, 7),
        ("b", MessageType.TENSOR, 7),
        ("b", MessageType.TENSOR, 7),
        ("a", MessageType.ROLES_CHANGED, 7),
        ("a", MessageType.TENSOR, 7),
    ]
    device._loop.close()


class QueuedConnection:
    """An acceptor with one queued connection."""

    def __init__(self, process: DeviceProcess) -> None:
        self.here, self.closed = process, False

    def take(self, _: float) -> Any:
        return self.here, self, ("127.0.0.1", 1)

    def close(self) -> None:
        self.closed = True


def test_drops_queued_connection_of_replaced_process() -> None:
    acceptor = RunAcceptor(ANY_LOOPBACK_PORT, None, False)
    before, now = DeviceProcess({"device": "b"}), DeviceProcess({"device": "b"})
    waiting = QueuedConnection(before)
    acceptor._processes, acceptor._acceptor = {"b": now}, cast(Any, waiting)
    assert acceptor.next_process(0) is None
    assert waiting.closed and before.channel is None
    waiting.here = now
    assert acceptor.next_process(0) is now and now.address == ("127.0.0.1", 1)
    acceptor.close()


def event(kind: Any, device: str) -> RunEvent:
    return RunEvent(kind, device, "its connection was lost", (device,), 0.0, 0)


def test_reports_failure_with_reason_before_later_events() -> None:
    heard = list[RunEvent]()
    event_log = EventLog(heard.append)
    failed_processes = FailedProcesses(event_log.set_reason)
    process = DeviceProcess({"device": "b"}, subprocess.Popen(["sleep", "60"]))
    failed_processes.add(
        process, DeviceFailure("b", "its connection was lost", "b", RANK_DISCONNECTED, is_unreachable=True)
    )
    event_log.add(event("failure", "b"), is_final=False)
    event_log.add(event("takeover", "b"))
    failed_processes.poll()
    assert event_log and failed_processes and not heard
    assert process.popen is not None
    process.popen.kill()
    process.popen.wait()
    failed_processes.poll()
    assert [(event.kind, event.reason) for event in heard] == [
        ("failure", "its process was ended by signal 9 (SIGKILL)"), ("takeover", "its connection was lost")
    ]  # fmt: skip
    assert event_log.events == heard and not event_log and not failed_processes


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("sleep", "60"), "its process was ended by signal 9 (SIGKILL)"),
        # A device that others suspect may have ended with an error only because its connections were closed.
        (("false",), "device 'd' reports: the connection to 'b' was lost"),
    ],
)
def test_only_a_signal_is_a_better_reason_than_the_report_of_another_device(
    command: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "EXIT_WAIT_S", LIMIT_S)
    event_log = EventLog(None)
    failed_processes = FailedProcesses(event_log.set_reason)
    process = DeviceProcess({"device": "b"}, subprocess.Popen(command))
    event_log.add(event("failure", "b"), is_final=False)
    suspicion = "device 'd' reports: the connection to 'b' was lost"
    failed_processes.add(process, DeviceFailure("b", suspicion, "d", RANK_SUSPECTED, is_unreachable=True))
    assert process.popen is not None
    if reason != suspicion:
        failed_processes.poll()
        process.popen.kill()
    process.popen.wait()
    failed_processes.poll()
    assert [event.reason for event in event_log.events] == [reason]


def test_kills_failed_process_that_does_not_end() -> None:
    event_log = EventLog(None)
    failed_processes = FailedProcesses(event_log.set_reason)
    process = DeviceProcess({"device": "b"}, subprocess.Popen(["sleep", "60"]))
    event_log.add(event("failure", "b"), is_final=False)
    failed_processes.add(process, DeviceFailure("b", "nothing was heard of it", "b", RANK_CAUSE, is_unreachable=True))
    failed_processes.poll()
    assert [event.reason for event in event_log.events] == ["nothing was heard of it"]
    assert process.popen is not None and process.popen.wait(LIMIT_S) == -signal.SIGKILL
    failed_processes.end_all(())


def test_accepts_late_tensors_only_as_planned() -> None:
    window = FrameWindow(4)
    expected_by_role = [{3: {"name": "t", "bytes": 8}}, {4: {"name": "t", "bytes": 4}}]
    gate = ReceiveFilter(expected_by_role, window, RoleSchedule([(), ("b",)]))
    gate.check(MessageHeader(MessageType.TENSOR, 3, 1, 8))
    window.drop(6)
    window.finish(2)  # The process finishes frame 2 after the frame was dropped.
    assert (window.first, window.oldest, window.end) == (6, 6, 10)
    for header in (
        MessageHeader(MessageType.TENSOR, 3, 1, 8),
        MessageHeader(MessageType.TENSOR, 4, 2, 4),
        MessageHeader(MessageType.TENSOR, 3, 6, 8),
    ):
        gate.check(header)
    for header in (
        MessageHeader(MessageType.TENSOR, 5, 1, 8),
        MessageHeader(MessageType.TENSOR, 3, 1, 4),
        MessageHeader(MessageType.TENSOR, 4, 6, 4),
    ):
        with pytest.raises(ProtocolError):
            gate.check(header)
