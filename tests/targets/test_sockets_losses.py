"""Devices that are lost in the middle of frames, with real processes: no frame is lost, twice or wrong."""

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
from support.hostile import Hostile
from support.losing import DEVICES, Survivor, kinds, survivor
from support.running import LIMIT_S, by_hand, pids, wait_until

import dicompiler
from dicompiler.base.errors import DicompilerError, RunError, UsageError
from dicompiler.base.schema import validate
from dicompiler.driver.run_log import run_document
from dicompiler.search.constraints import check_target_support
from dicompiler.target.remote.certificates import make_keys
from dicompiler.target.run_records import RunEvent, RunOptions
from dicompiler_targets.sockets import SocketsTarget
from dicompiler_targets.sockets.artifact import SocketsArtifact
from dicompiler_targets.sockets.cluster_state import ClusterState
from dicompiler_targets.sockets.device_process import DeviceProcess
from dicompiler_targets.sockets.failures import (
    RANK_CAUSE,
    RANK_DISCONNECTED,
    DeviceFailure,
    EventLog,
    FailedProcesses,
)
from dicompiler_targets.sockets.rendezvous import ANY_LOOPBACK_PORT, RunAcceptor
from dicompiler_targets.sockets.runtime.device import DeviceRun
from dicompiler_targets.sockets.runtime.handshake import RunCredentials
from dicompiler_targets.sockets.runtime.mailbox import Mailbox
from dicompiler_targets.sockets.runtime.peers import ConnectionSettings
from dicompiler_targets.sockets.runtime.protocol import (
    FrameWindow,
    MessageHeader,
    MessageType,
    ProtocolError,
    ReceiveFilter,
)
from dicompiler_targets.sockets.runtime.role_schedule import RoleSchedule
from dicompiler_targets.sockets.session import ClusterSession
from dicompiler_targets.tflm import TflmTarget

BEAT_S = 0.3
FOUND_S = 3.75 * BEAT_S
EACH = [(name,) for name in DEVICES]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Survivor:
    """Any one of its devices may be lost; source and sink are other devices then."""
    return survivor(1, EACH, tmp_path_factory.mktemp("one") / "artifact")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Survivor:
    """b may be lost, and c beside it."""
    return survivor(2, [("b",), ("b", "c")], tmp_path_factory.mktemp("two") / "artifact")


def connect(made: Survivor, **options: Any) -> ClusterSession:
    found = dicompiler.connect(made.directory, RunOptions(**{"in_flight": 4, **options}), 60)
    assert isinstance(found, ClusterSession)
    return found


def hit(made: Survivor, device: str, how: int) -> float:
    os.kill(pids(made.directory)[device], how)
    return time.monotonic()


def frames(count: int) -> Iterator[None]:
    for _ in range(count):
        yield


def until(happened: Callable[[], object], seconds: float = 20.0) -> Iterator[None]:
    """AssertionError where that does not happen while frames go on."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        yield


@pytest.mark.parametrize("victims", [(*DEVICES, "a"), "b"], ids=["clear", "tls"])
def test_every_device_may_die_and_comes_back(victims: str, one: Survivor, tmp_path: Path) -> None:
    rng, heard, options = Random(5), list[RunEvent](), dict[str, Any]()
    if len(victims) == 1:
        make_keys(DEVICES, tmp_path / "keys")
        options["keys"] = tmp_path / "keys"

    def plot() -> Iterator[None]:
        for i, victim in enumerate(victims):
            yield from frames(rng.randint(1, 40))
            hit(one, victim, signal.SIGKILL)
            yield from until(lambda i=i: len(heard) > 3 * i + 2)
        yield from frames(20)

    with connect(one, on_event=heard.append, **options) as session:
        count = one.stream(session, plot())
    assert kinds(session) == [(kind, name) for name in victims for kind in ("failure", "takeover", "return")]
    assert session.events == heard
    assert [report.device for report in session.reports] == list(DEVICES)
    assert pids(one.directory) == {}
    for event in heard:
        assert event.reason.startswith("its process was ended by signal 9 (SIGKILL)") == (event.kind == "failure")
        assert event.down == (() if event.kind == "return" else (event.device,))
        assert event.interruption_s < LIMIT_S and event.replayed_frames <= 4 and event.finished_frames <= count


@pytest.mark.parametrize("victim", ["a", "d"])
def test_a_device_that_hangs_is_lost_after_its_heartbeats(victim: str, one: Survivor) -> None:
    with connect(one, heartbeat_s=BEAT_S) as session:

        def plot() -> Iterator[None]:
            yield from frames(10)
            stopped = hit(one, victim, signal.SIGSTOP)
            yield from until(lambda: session.events)
            assert time.monotonic() - stopped < FOUND_S + LIMIT_S
            yield from until(lambda: len(session.events) > 2)
            yield from frames(10)

        one.stream(session, plot())
    assert kinds(session) == [("failure", victim), ("takeover", victim), ("return", victim)]
    assert (
        "has stopped, or the network to it is down" in session.events[0].reason
        or "was lost" in session.events[0].reason
    )


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@dataclass
class Noting:
    """A channel that notes what is posted."""

    peer: str
    words: list[tuple[str, MessageType, int]]

    def post(self, kind: MessageType, payload: Any = b"", index: int = 0, frame: int = 0, keep: Any = None) -> None:  # noqa: ARG002
        self.words.append((self.peer, kind, frame))


class Held:
    """A channel that notes how often it is released."""

    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


class Told(logging.Handler):
    """What the runs of this process say, while it is open: `words`. It starts devices by hand as they say."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words: list[str] = []
        self.started: list[subprocess.Popen[bytes]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())

    def how(self, device: str) -> str:
        """Waits for the words that tell how to start a device."""
        start = f"start {device} in its directory"
        found = wait_until(lambda: next((words for words in self.words if words.startswith(start)), ""))
        return str(found)

    def start(self, made: Survivor, device: str) -> subprocess.Popen[bytes]:
        self.started.append(by_hand(made.directory, self.how(device)))
        return self.started[-1]

    def soon(self, made: Survivor, device: str) -> None:
        """Starts it once the run has begun."""
        threading.Thread(target=self.start, args=(made, device), daemon=True).start()


@pytest.fixture
def told() -> Iterator[Told]:
    found, log = Told(), logging.getLogger("dicompiler")
    level = log.level
    log.addHandler(found)
    log.setLevel(logging.WARNING)
    yield found
    log.removeHandler(found)
    log.setLevel(level)
    for process in found.started:
        process.kill()
        process.wait()


def test_who_was_stopped_for_long_disturbs_nobody_when_it_goes_on(told: Told, one: Survivor) -> None:
    """It is not ours to end: it ends by itself, and another one takes its place."""
    told.soon(one, "c")
    with connect(one, heartbeat_s=BEAT_S, start_manually=("c",)) as session:

        def plot() -> Iterator[None]:
            yield from frames(10)
            old = pids(one.directory)["c"]
            os.kill(old, signal.SIGSTOP)
            yield from until(lambda: len(session.events) > 1)
            told.start(one, "c")
            yield from until(lambda: len(session.events) > 2)
            os.kill(old, signal.SIGCONT)
            yield from until(lambda: ended(old))
            yield from frames(20)

        one.stream(session, plot())
    assert kinds(session) == [("failure", "c"), ("takeover", "c"), ("return", "c")]


def test_two_losses_in_turn_and_the_one_that_is_not_covered_ends_the_run(told: Told, two: Survivor) -> None:
    for name in "bc":
        told.soon(two, name)
    with connect(two, start_manually=("b", "c")) as session:

        def plot() -> Iterator[None]:
            for name in "bc":
                yield from frames(10)
                hit(two, name, signal.SIGKILL)
                yield from until(lambda name=name: kinds(session)[-1:] == [("takeover", name)])
            assert session.events[-1].down == ("b", "c")
            yield from frames(10)
            hit(two, "d", signal.SIGKILL)
            yield from until(lambda: False)

        with pytest.raises(RunError, match=r"^device 'd': its process was ended by signal 9 \(SIGKILL\)$"):
            two.stream(session, plot())
    assert pids(two.directory).keys() <= {"b", "c"}  # not yet waited for


def test_a_loss_that_a_plan_for_more_covers_goes_by_that(told: Told, two: Survivor) -> None:
    """There is none for c alone: b is there, has nothing to do, and would refuse to hear of a frame until c is back."""
    told.soon(two, "c")
    with connect(two, start_manually=("c",)) as session:
        assert [{"b", "c"} & role.active_devices for role in session.artifact.roles] == [{"b", "c"}, {"c"}, set()]

        def plot() -> Iterator[None]:
            for count in (2, 5):
                yield from frames(10)
                hit(two, "c", signal.SIGKILL)
                yield from until(lambda count=count: len(session.events) == count)
                yield from frames(10)
                if count == 2:
                    told.start(two, "c")
                    yield from until(lambda: len(session.events) == 3)

        two.stream(session, plot())
    assert kinds(session) == [(kind, "c") for kind in ("failure", "takeover", "return", "failure", "takeover")]


def test_devices_of_a_host_that_dies_are_taken_over_once(told: Told, tmp_path: Path) -> None:
    """The plan for the first of them does without the second: nothing is given twice."""
    made = survivor(3, [("b", "c")], tmp_path / "artifact")
    for name in "bc":
        told.soon(made, name)
    with connect(made, start_manually=("b", "c")) as session:

        def plot() -> Iterator[None]:
            yield from frames(10)
            found = pids(made.directory)
            for name in "bc":
                os.kill(found[name], signal.SIGKILL)
            yield from until(lambda: len(session.events) > 2)
            yield from frames(10)

        made.stream(session, plot())
    found = kinds(session)
    assert sorted(one for one in found if one[0] != "takeover") == [("failure", "b"), ("failure", "c")]
    assert found[-1][0] == "takeover"
    assert [event.replayed_frames for event in session.events if event.replayed_frames][1:] == [] and session.events[
        -1
    ].replayed_frames <= 4


def test_the_loss_of_a_device_without_a_part_drops_nothing(told: Told, two: Survivor) -> None:
    for name in "bc":
        told.soon(two, name)
    with connect(two, start_manually=("b", "c")) as session:

        def plot() -> Iterator[None]:
            for name in "cb":  # the plan for both is in force once c is lost
                yield from frames(10)
                hit(two, name, signal.SIGKILL)
                yield from until(lambda name=name: kinds(session)[-1:] == [("takeover", name)])
            yield from frames(10)

        two.stream(session, plot())
    assert session.events[-1].device == "b" and session.events[-1].replayed_frames == 0


def test_what_is_not_on_its_way_is_not_dropped_either(two: Survivor) -> None:
    """A number that no frame has, as changes come in a row, would go by roles in which the device has a part."""
    telling = EventLog(None)
    crew = ClusterState(
        SocketsArtifact.load(two.directory), RunOptions(), 4, cast(Any, None), 0, lambda *_: None, telling.set_reason
    )
    crew.schedule.change(("b", "c"), 0, 0)
    frames = [crew.window.open() for _ in range(2)]
    crew.schedule.change((), 2, 0)  # both are back, and lost again before a frame is given
    crew.window.finish(crew.window.open())
    crew.schedule.change(("b", "c"), 3, 0)
    assert not crew._is_needed_in_flight("c") and crew._is_needed_in_flight("a")
    crew.window.finish(frames[0])
    assert not crew._is_needed_in_flight("c")
    crew.loop.close()


def test_numbers_that_no_frame_has_are_passed_over_in_a_row() -> None:
    """Changes in a row, none of which drops anything, while a device is in a segment."""
    box = Mailbox()
    for number in (5, 6):
        box.put_order(("skip", number), number + 1)
    assert (box.skip_frames(5), box.skip_frames(7)) == (7, 7)


def test_each_change_has_a_number_of_its_own(told: Told, two: Survivor) -> None:
    """Two in a row with no frame between: an answer to the first is none to the second."""
    for name in "bc":
        told.soon(two, name)
    with connect(two, start_manually=("b", "c")) as session:
        numbers = [session._cluster.schedule.last_change]
        for name in "bc":
            hit(two, name, signal.SIGKILL)
            wait_until(lambda name=name: session._handle_events([]) or ("takeover", name) in kinds(session))
            numbers.append(session._cluster.schedule.last_change)
        assert numbers == sorted(set(numbers))
        two.stream(session, frames(10))


@pytest.mark.parametrize(
    ("kind", "frame", "words"),
    [
        (MessageType.READY, 0, "received READY twice"),
        (MessageType.ROLES_CHANGED, 0, "received ROLES_CHANGED twice for frame 0"),
        (MessageType.ROLES_CHANGED, 1, "received ROLES_CHANGED for frame 1, at which no roles change"),
        (MessageType.DONE, 0, "received DONE twice for frame 0"),
    ],
)
def test_a_device_says_once_what_it_may_say_once(
    kind: MessageType, frame: int, words: str, told: Told, one: Survivor
) -> None:
    player = sorted(one.roles()[0].active_devices)[0]

    def act() -> None:
        device = Hostile(one.directory, player, told.how(player))
        device.take_part(one.peers(player))
        device.heard(MessageType.BEGIN_FRAME)
        for _ in range(3):
            device.control.send(kind, frame=frame)

    threading.Thread(target=act, daemon=True).start()
    with (
        pytest.raises(RunError, match=f"^device '{player}': it sent invalid data: {words}$"),
        connect(one, start_manually=(player,)) as session,
    ):
        one.stream(session, frames(1))
    while Hostile.there:
        Hostile.there.pop().close()


def test_what_comes_late_is_not_kept_while_the_user_is_away(told: Told, one: Survivor) -> None:
    """Of a device that sends it without end, as of frames that were given again."""
    outputs = one.roles()[0].outputs
    sink = next(name for name, values in outputs.items() if values)
    index, value = next(iter(outputs[sink].items()))
    victim, played = next(name for name in DEVICES if name != sink), list[Hostile]()

    def act() -> None:
        played.append(Hostile(one.directory, sink, told.how(sink)))
        played[0].take_part(one.peers(sink))

    threading.Thread(target=act, daemon=True).start()
    session = connect(one, start_manually=(sink,))
    hit(one, victim, signal.SIGKILL)
    wait_until(lambda: session._handle_events([]) or kinds(session))
    device, since = played[0], session._cluster.schedule.last_change
    device.heard(MessageType.CHANGE_ROLES)
    session._loop.let_helper_run(60.0)
    for _ in range(100):
        device.control.send(MessageType.OUTPUT, bytes(value["bytes"]), index)
        device.control.send(MessageType.DONE)
        device.control.send(MessageType.ROLES_CHANGED)
    device.control.send(MessageType.ROLES_CHANGED, frame=since)
    heard = session._cluster._messages.events
    last = wait_until(lambda: [event for event in tuple(heard) if event.device == sink])
    assert [event.header.frame for event in last] == [since]
    device.control.send(MessageType.ROLES_CHANGED, frame=since)
    with pytest.raises(RunError, match="received ROLES_CHANGED twice"), session._guarded():
        wait_until(lambda: session._handle_events([]))
    while Hostile.there:
        Hostile.there.pop().close()


def test_a_run_begins_without_devices(one: Survivor) -> None:
    program = one.compilation.program
    assert program is not None
    for lost in (("b",), ("e",)):
        role = next(role for role in program.roles if role.failed == lost)
        first = sum(len(other.transfers) for other in program.roles[: program.roles.index(role)])
        result = SocketsTarget().run(one.directory, one.frames(3), RunOptions(timeout_s=60, start_without=lost))
        sent = {index: count for report in result.reports for index, count in report.sent_bytes.items()}
        assert sent == {first + t.index: 3 * t.value.nbytes for t in role.transfers}
    two = "the artifact has no plan without 'b', 'c': compile with failure plans \\(--tolerate-failures 2\\)"
    for without, words in ((("b", "c"), two), (("x",), "no device 'x'")):
        with pytest.raises(UsageError, match=words):
            SocketsTarget().run(one.directory, one.frames(1), RunOptions(start_without=without))


@pytest.mark.parametrize("how", ["ends", "never comes"])
def test_who_is_lost_before_all_are_ready_is_lost(how: str, told: Told, one: Survivor) -> None:
    """It ends while others call it or wait for it, or does not come in time."""

    def act() -> None:
        device = Hostile(one.directory, "c", told.how("c"), beat_s=BEAT_S)
        device.greet()
        device.heard(MessageType.PEERS)
        device.welcome()  # who waits for c itself is still to hear of it
        device.control.close()

    if how == "ends":
        threading.Thread(target=act, daemon=True).start()
    options = RunOptions(in_flight=4, heartbeat_s=BEAT_S, start_manually=("c",))
    with dicompiler.connect(one.directory, options, 3 if how == "never comes" else 60) as session:
        assert isinstance(session, ClusterSession)
        assert kinds(session) == [("failure", "c")]
        one.stream(session, frames(10))
    assert kinds(session) == [("failure", "c"), ("takeover", "c")]
    assert session.events[0].finished_frames == session.events[1].replayed_frames == 0
    while Hostile.there:
        Hostile.there.pop().close()


def test_a_device_that_never_comes_leaves_half_of_the_time_for_frames(one: Survivor) -> None:
    result = SocketsTarget().run(one.directory, one.frames(3), RunOptions(timeout_s=6, start_manually=("c",)))
    assert len(result.outputs) == 3 and [event.kind for event in result.events] == ["failure", "takeover"]


class Deadly(Sequence[Any]):
    """Frames: `strike` is called when the one of that number is read, and the run has begun."""

    def __init__(self, frames: list[Any], number: int, strike: Callable[[], object]) -> None:
        self.frames, self.number, self.strike = frames, number, strike

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, place: Any) -> Any:
        if place == self.number:
            self.strike()
        return self.frames[place]


def test_a_log_tells_what_befell_the_run(one: Survivor) -> None:
    """What `dicompiler run` writes of one that goes on for a while after b has died."""
    struck = list[float]()

    def strike() -> None:
        if "b" in pids(one.directory):  # frames are also looked at before
            struck.append(hit(one, "b", signal.SIGKILL))

    wait_until(lambda: not pids(one.directory))  # of runs before
    given = Deadly(one.frames(3) * 200, 100, strike)
    result = SocketsTarget().run(one.directory, given, RunOptions(timeout_s=60, in_flight=4))
    assert len(result.outputs) == len(given) and len(struck) == 1
    log = json.loads(json.dumps(run_document(one.directory, result, RunOptions(in_flight=4))))
    validate(log, "run", "log")
    assert [event["kind"] for event in log["events"]][:2] == ["failure", "takeover"]
    assert log["replays"] == sum(event.replayed_frames for event in result.events) and log["interrupted_s"] > 0


def test_who_others_have_lost_is_lost(told: Told, one: Survivor) -> None:
    def act() -> None:
        device = Hostile(one.directory, "c", told.how("c"))
        device.take_part(one.peers("c"))
        device.heard(MessageType.BEGIN_FRAME)
        device.channels[0].close()

    threading.Thread(target=act, daemon=True).start()
    with connect(one, start_manually=("c",)) as session:
        one.stream(session, frames(30))
    assert kinds(session) == [("failure", "c"), ("takeover", "c")]
    assert "reports: the connection to 'c' was lost" in session.events[0].reason
    while Hostile.there:
        Hostile.there.pop().close()


def test_who_comes_back_with_another_artifact_is_refused_and_the_run_goes_on(
    told: Told, one: Survivor, two: Survivor
) -> None:
    told.soon(one, "b")
    with connect(one, start_manually=("b",)) as session:

        def plot() -> Iterator[None]:
            yield from frames(5)
            hit(one, "b", signal.SIGKILL)
            yield from until(lambda: len(session.events) > 1)
            other = told.start(two, "b")
            yield from until(lambda: any("belongs to another artifact" in words for words in told.words))
            yield from until(lambda: other.poll() == 1)
            yield from frames(10)

        one.stream(session, plot())
    assert kinds(session) == [("failure", "b"), ("takeover", "b")]


@pytest.mark.parametrize("harm", ["file", "certificate"])
def test_who_comes_back_damaged_is_left_out_until_it_is_whole(
    harm: str, told: Told, one: Survivor, tmp_path: Path
) -> None:
    if harm == "file":
        victim, words = max((one.directory / "b").glob("*.onnx"), key=lambda path: path.stat().st_size), "is damaged"
        wrong, options = bytearray(victim.read_bytes()), dict[str, Any]()
        wrong[-1] ^= 1
    else:
        options = {"keys": tmp_path / "keys"}
        make_keys(DEVICES, tmp_path / "keys")
        victim, other = (tmp_path / "keys" / "devices" / name / "cert.pem" for name in "bc")
        wrong, words = bytearray(other.read_bytes()), "keys: "
    right = victim.read_bytes()

    def put(content: bytes) -> None:
        new = victim.with_suffix(".new")  # who has mapped the old one keeps it
        new.write_bytes(content)
        os.replace(new, victim)

    with connect(one, **options) as session:

        def plot() -> Iterator[None]:
            yield from frames(5)
            put(wrong)
            hit(one, "b", signal.SIGKILL)
            yield from until(lambda: any(words in line for line in told.words))
            yield from frames(10)
            put(right)
            yield from until(lambda: len(session.events) > 2)
            yield from frames(10)

        try:
            one.stream(session, plot())
        finally:
            put(right)
    assert kinds(session) == [("failure", "b"), ("takeover", "b"), ("return", "b")]
    assert sum(words in line for line in told.words) == 1  # though it was tried again and again


def test_targets_that_cannot_survive_refuse(one: Survivor) -> None:
    plan = one.compilation.plan
    assert plan is not None
    with pytest.raises(DicompilerError, match="target 'tflm' does not support failure plans"):
        check_target_support(plan, TflmTarget())
    check_target_support(plan, SocketsTarget())


def test_frames_go_by_the_roles_in_force() -> None:
    schedule = RoleSchedule([(), (), ("b",), ("b", "c"), ("b", "c")])
    assert [schedule.role_index(frame) for frame in range(4)] == [0, 1, 0, 1]
    schedule.change(("b", "c"), 5, 2)
    assert [schedule.role_index(frame) for frame in range(2, 8)] == [0, 1, 0, 4, 3, 4]
    schedule.change((), 7, 5)
    assert [schedule.role_index(frame) for frame in range(5, 9)] == [4, 3, 1, 0]
    assert [schedule.find_failed_set(away) for away in ((), "b", "c", "d")] == [
        frozenset(), {"b"}, {"b", "c"}, None
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no role for the failure of"):
        schedule.change(("d",), 9, 0)


def test_a_schedule_has_a_last_change_at_any_time() -> None:
    """Threads ask for it that do not wait for each other."""

    class Watched(RoleSchedule):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "_changes":
                seen.append(self.last_change)

    seen = list[int]()
    schedule = Watched([(), ("b",)])
    schedule.change(("b",), 5, 5)  # nothing of before is asked for again
    assert seen == [0, 5]


def make_device(survivor: Survivor) -> DeviceRun:
    manifest = json.loads((survivor.directory / "c" / "manifest.json").read_bytes())
    settings = ConnectionSettings(time.monotonic() + 5)
    return DeviceRun(survivor.directory / "c", manifest, settings, RunCredentials())


def test_a_peer_that_hears_of_a_loss_sooner_waits_to_be_heard(one: Survivor) -> None:
    device = make_device(one)
    admit, deliver, _ = device._make_peer_callbacks("a")
    word = MessageHeader(MessageType.ROLES_CHANGED, 0, 5, 0)
    admit(word)
    assert deliver(word, b"") is True
    device._last_change = 5
    assert deliver(word, b"") is False
    device._loop.close()


def test_a_peer_that_hears_of_two_losses_sooner_is_heard_after_the_second(one: Survivor) -> None:
    device, channel = make_device(one), Held()
    _, deliver, _ = device._make_peer_callbacks("a")
    device.peers.channels["a"] = cast(Any, channel)
    assert (
        deliver(MessageHeader(MessageType.ROLES_CHANGED, 0, 6, 0), b"") is True
    )  # it was told of both before it had anything to send
    released = []
    for first, lost in ((5, "b"), (6, "d")):
        device._change_roles({"down": [lost], "failed": [lost], "first": first, "drop": True})
        released.append(channel.released)
    assert released == [0, 1]
    device._loop.close()


def test_peers_are_told_of_a_change_once_before_the_next_tensor(one: Survivor) -> None:
    device, words = make_device(one), list[tuple[str, MessageType, int]]()
    for peer in ("a", "b"):
        device.peers.channels[peer] = cast(Any, Noting(peer, words))
    device._last_change, device._peers_to_notify = 7, {"a", "b"}
    for index, receiver in enumerate(("b", "b", "a")):
        device._post_value({"receiver": receiver, "index": index}, 7, b"", None)
    assert words == [
        ("b", MessageType.ROLES_CHANGED, 7), ("b", MessageType.TENSOR, 7), ("b", MessageType.TENSOR, 7), ("a", MessageType.ROLES_CHANGED, 7),
        ("a", MessageType.TENSOR, 7),
    ]  # fmt: skip
    device._loop.close()


class Waiting:
    """An entrance at which one device waits."""

    def __init__(self, process: DeviceProcess) -> None:
        self.here, self.closed = process, False

    def take(self, _: float) -> Any:
        return self.here, self, ("127.0.0.1", 1)

    def close(self) -> None:
        self.closed = True


def test_who_was_given_up_while_it_waited_at_the_door_is_not_let_in() -> None:
    door = RunAcceptor(ANY_LOOPBACK_PORT, None, False)
    before, now = DeviceProcess({"device": "b"}), DeviceProcess({"device": "b"})
    waiting = Waiting(before)
    door._processes, door._acceptor = {"b": now}, cast(Any, waiting)
    assert door.next_process(0) is None
    assert waiting.closed and before.channel is None
    waiting.here = now
    assert door.next_process(0) is now and now.address == ("127.0.0.1", 1)
    door.close()


def event(kind: Any, device: str) -> RunEvent:
    return RunEvent(kind, device, "its connection was lost", (device,), 0.0, 0)


def test_a_loss_is_told_with_its_reason_and_before_what_follows() -> None:
    heard = list[RunEvent]()
    telling = EventLog(heard.append)
    leaving = FailedProcesses(telling.set_reason)
    process = DeviceProcess({"device": "b"}, subprocess.Popen(["sleep", "60"]))
    leaving.add(process, DeviceFailure("b", "its connection was lost", "b", RANK_DISCONNECTED, is_gone=True))
    telling.add(event("failure", "b"), is_final=False)
    telling.add(event("takeover", "b"))
    leaving.poll()
    assert telling and leaving and not heard
    assert process.popen is not None
    process.popen.kill()
    process.popen.wait()
    leaving.poll()
    assert [(one.kind, one.reason) for one in heard] == [
        ("failure", "its process was ended by signal 9 (SIGKILL)"), ("takeover", "its connection was lost")
    ]  # fmt: skip
    assert telling.events == heard and not telling and not leaving


def test_a_lost_process_that_does_not_end_is_ended_and_the_loss_told() -> None:
    telling = EventLog(None)
    leaving = FailedProcesses(telling.set_reason)
    process = DeviceProcess({"device": "b"}, subprocess.Popen(["sleep", "60"]))
    telling.add(event("failure", "b"), is_final=False)
    leaving.add(process, DeviceFailure("b", "nothing was heard of it", "b", RANK_CAUSE, is_gone=True))
    leaving.poll()
    assert [one.reason for one in telling.events] == ["nothing was heard of it"]
    assert process.popen is not None and process.popen.wait(LIMIT_S) == -signal.SIGKILL
    leaving.end_all(())


def test_what_is_late_is_let_in_only_as_planned() -> None:
    window = FrameWindow(4)
    gate = ReceiveFilter(
        {3: {"name": "t", "bytes": 8}}, window, [{4: {"name": "t", "bytes": 4}}], RoleSchedule([(), ("b",)])
    )
    gate.check(MessageHeader(MessageType.TENSOR, 3, 1, 8))
    window.drop(6)
    window.finish(2)  # it ended after all
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
