"""The event loop: the main thread runs it while it waits, and a helper thread while the main thread computes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.handmade import integers, partial
from support.running import WAIT_S, emit, fake

from dicompiler.cli.command_line import main
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.executor import run_model
from dicompiler_targets.sockets.runtime.channel import EventLoop, MessageChannel
from dicompiler_targets.sockets.runtime.protocol import (
    HEADER_STRUCT,
    PROTOCOL_VERSION,
    MessageHeader,
    MessageReader,
    MessageType,
    ProtocolError,
)
from dicompiler_targets.sockets.runtime.transport import Connection, TlsKeys, open_connection
from dicompiler_targets.sockets.target import SocketsTarget

LARGE = 24 << 20
"""Bytes that no connection holds."""


class End:
    """One end of a connection, with its own event loop.

    `received` has index and payload of each tensor, and `lost` has the error that ended the connection. The channel is
    held after the tensor with index `hold_index`.
    """

    def __init__(self, connection: socket.socket, keys: TlsKeys | None, server: bool) -> None:
        self.received: list[tuple[int, Any]] = []
        self.lost: list[Exception] = []
        self.hold_index = -1
        self.threads: set[int] = set()
        self.loop = EventLoop(60)
        self.channel = MessageChannel(open_connection(connection, keys, server, time.monotonic() + WAIT_S))

    def start(self) -> End:
        self.channel.start(self.loop, self._admit, self._deliver, self.lost.append)
        return self

    def _admit(self, header: MessageHeader) -> None:
        if header.type is not MessageType.TENSOR:
            raise ProtocolError("only tensors may come")

    def _deliver(self, header: MessageHeader, payload: Any) -> bool:
        self.threads.add(threading.get_ident())
        self.received.append((header.index, payload))
        return header.index == self.hold_index

    def run_in_main_thread(self) -> None:
        """Run the loop in this thread from here on."""
        self.loop.run_until(lambda: False, time.monotonic())

    def send(self, *payloads: Any) -> None:
        for index, payload in enumerate(payloads):
            self.channel.post(MessageType.TENSOR, payload, index)
        self.loop.push()

    def wait(self, count: int) -> None:
        assert self.loop.run_until(lambda: len(self.received) >= count or self.lost, time.monotonic() + WAIT_S)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> TlsKeys:
    directory = emit(partial(), tmp_path_factory.mktemp("keys") / "artifact")
    assert main(["keys", str(directory)]) == 0
    return TlsKeys(Path(f"{directory}.keys") / "devices" / "a")


@pytest.fixture(params=["clear", "TLS"])
def secrets(request: pytest.FixtureRequest) -> TlsKeys | None:
    return request.getfixturevalue("keys") if request.param == "TLS" else None


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]


@contextlib.contextmanager
def met(connection: socket.socket, accepted: socket.socket, keys: TlsKeys | None) -> Iterator[tuple[End, End]]:
    net: list[End] = []
    greeter = threading.Thread(target=lambda: net.append(End(accepted, keys, True)))
    greeter.start()
    net.insert(0, End(connection, keys, False))
    greeter.join(WAIT_S)
    near_end, far_end = sorted(net, key=lambda end: end.channel._connection._socket is accepted)
    yield near_end.start(), far_end.start()
    for end in net:
        end.loop.close()
        end.channel.close()


@pytest.fixture
def ends(secrets: TlsKeys | None) -> Iterator[tuple[End, End]]:
    with met(*connected(), secrets) as net:
        yield net


def numbers(count: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def check(received: list[tuple[int, Any]], payloads: list[Any]) -> None:
    assert [index for index, _ in received] == list(range(len(payloads)))
    for (_, found), payload in zip(received, payloads, strict=True):
        assert np.array_equal(found, payload)


def test_tensors_of_earlier_frames_overtake_later_ones(ends: tuple[End, End]) -> None:
    """Tensors that are partly sent, and tensors behind other messages, are not overtaken."""
    near_end, far_end = ends
    first = numbers(LARGE, 0)
    near_end.channel.post(MessageType.TENSOR, first, 0, frame=9)
    near_end.loop.push()
    for index, frame in ((1, 4), (2, 3), (3, 4), (4, 3)):
        near_end.channel.post(MessageType.TENSOR, numbers(5, index), index, frame)
    near_end.channel.post(MessageType.HEARTBEAT)
    for index, frame in ((5, 2), (6, 1)):
        near_end.channel.post(MessageType.TENSOR, numbers(5, index), index, frame)
    near_end.loop.push()
    far_end.wait(7)
    assert [index for index, _ in far_end.received] == [0, 2, 4, 1, 3, 6, 5]
    assert np.array_equal(far_end.received[0][1], first)
    assert all(np.array_equal(payload, numbers(5, index)) for index, payload in far_end.received[1:])


def test_timeline_of_last_frame_is_complete(ends: tuple[End, End]) -> None:
    near_end, far_end = ends
    for index, frame in enumerate((9, 10, 9, 10, 8)):
        near_end.channel.post(MessageType.TENSOR, numbers(5, index), index, frame)
        near_end.loop.push()
    far_end.wait(5)
    assert [(index, frame) for index, frame, *_ in near_end.channel.timeline] == [(1, 10), (2, 9), (3, 10), (4, 8)]


def test_held_channel_stops_reading(ends: tuple[End, End]) -> None:
    near_end, far_end = ends
    payloads = [numbers(size, size) for size in (3, 5, 1 << 20)]
    far_end.hold_index = 0
    near_end.send(*payloads)
    far_end.wait(1)
    far_end.loop.run_until(lambda: len(far_end.received) > 1, time.monotonic() + 0.1)
    assert len(far_end.received) == 1
    with far_end.loop.lock:
        far_end.channel.release()
    far_end.wait(3)
    check(far_end.received, payloads)


class Counted(socket.socket):
    """A socket that counts system calls."""

    sends = receives = 0

    def sendmsg(self, *arguments: Any) -> int:
        self.sends += 1
        return super().sendmsg(*arguments)

    def send(self, *arguments: Any) -> int:
        self.sends += 1
        return super().send(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        self.receives += 1
        return super().recv_into(*arguments)


def test_small_message_takes_one_system_call_per_end(secrets: TlsKeys | None) -> None:
    """This includes TLS, and several messages that are queued together."""
    near_end, far_end = (Counted(fileno=end.detach()) for end in connected())
    with met(near_end, far_end, secrets) as (sender, receiver):
        for end in (sender, receiver):
            end.run_in_main_thread()
            # Receive the session tickets, which TLS sends after its handshake, so that they are not counted below.
            end.loop.run_until(lambda: False, time.monotonic() + 0.1)
        for payloads in ([numbers(1000, 1)], [numbers(0, 2)], [numbers(700, 3), numbers(300, 4)]):
            near_end.sends = far_end.receives = 0
            receiver.received.clear()
            sender.send(*payloads)
            receiver.wait(len(payloads))
            assert (near_end.sends, far_end.receives) == (1, 1)
            check(receiver.received, payloads)


def send_slowly(source: socket.socket, target: socket.socket, size: int) -> None:
    """Forward the data in pieces until the source ends."""
    with contextlib.suppress(OSError):
        while piece := source.recv(size):
            target.sendall(piece)
            time.sleep(0.0005)


def test_reads_data_that_arrives_in_small_pieces(secrets: TlsKeys | None) -> None:
    """TLS records can end anywhere, so their overhead must not count as part of the message."""
    (connection, near), (far, accepted) = connected(), connected()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for source, target in ((near, far), (far, near)):
        threading.Thread(target=send_slowly, args=(source, target, 1448), daemon=True).start()
    with met(connection, accepted, secrets) as (near_end, far_end), near, far:
        far_end.run_in_main_thread()
        payloads = [numbers(size, i) for i, size in enumerate([16_000, 20_000, 33_000, 70_000, 3, 17_000])]
        for i, payload in enumerate(payloads):
            near_end.send(payload)
            far_end.wait(i + 1)
        assert all(np.array_equal(found, sent) for (_, found), sent in zip(far_end.received, payloads, strict=True))


def test_messages_arrive_complete_and_in_order(ends: tuple[End, End]) -> None:
    near_end, far_end = ends
    far_end.run_in_main_thread()
    sizes = [0, 1, 7, 100, 16_000, 20_000, 0, 70_000, 1 << 20, 3, LARGE, 5, *range(200)]
    payloads = [numbers(size, i) for i, size in enumerate(sizes)]
    near_end.send(*payloads)
    sender = threading.Thread(target=lambda: near_end.channel.flush(time.monotonic() + WAIT_S))
    sender.start()
    far_end.wait(len(sizes))
    sender.join()
    check(far_end.received, payloads)
    assert near_end.channel.sent == dict(enumerate(sizes))
    assert far_end.threads == {threading.get_ident()}  # All messages were delivered by the test's own thread.


def test_slow_long_message_causes_few_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shaped link delivers one packet at a time. A short message behind a long one arrives at once."""
    reads: list[int] = []
    receive = Connection._receive
    monkeypatch.setattr(Connection, "_receive", lambda line, view: (reads.append(len(view)), receive(line, view))[1])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        accepted = listener.accept()[0]
    end = End(accepted, None, True).start()
    payloads = [numbers(200_000, 1), numbers(10, 2)]
    frames = [
        HEADER_STRUCT.pack(b"DICO", PROTOCOL_VERSION, MessageType.TENSOR, 0, i, 0, len(p)) + bytes(p)
        for i, p in enumerate(payloads)
    ]
    pieces = [frames[0][at : at + 1000] for at in range(0, len(frames[0]), 1000)]

    def send_slowly() -> None:
        for drop in (*pieces, frames[1]):
            connection.sendall(drop)
            time.sleep(0.001)

    sender = threading.Thread(target=send_slowly)
    sender.start()
    end.wait(2)
    sender.join()
    check(end.received, payloads)
    assert len(reads) < len(pieces) / 4
    end.loop.close()
    end.channel.close()
    connection.close()


def test_helper_sends_large_messages_while_both_ends_compute(ends: tuple[End, End]) -> None:
    payloads = [numbers(LARGE, 1), numbers(9, 2)]
    for end in ends:
        end.run_in_main_thread()
        end.send(*payloads)
        end.loop.let_helper_run(3600)
    deadline = time.monotonic() + WAIT_S
    while any(len(end.received) < 2 for end in ends) and time.monotonic() < deadline:
        sum(range(10_000))  # Keep this thread busy, so that only the helper thread runs the event loop.
    for end in ends:
        check(end.received, payloads)
        assert threading.get_ident() not in end.threads


def test_helper_sends_backlog_during_short_segment(ends: tuple[End, End]) -> None:
    near_end, far_end = ends
    near_end.run_in_main_thread()
    near_end.send(numbers(LARGE, 3))
    near_end.loop.let_helper_run(0.0)
    far_end.wait(1)
    check(far_end.received, [numbers(LARGE, 3)])


def test_failure_in_helper_reaches_main_thread(ends: tuple[End, End]) -> None:
    near_end, far_end = ends
    far_end.loop.let_helper_run(3600)
    near_end.channel.send(MessageType.FINISH)
    far_end.wait(1)
    assert str(far_end.lost[0]) == "only tensors may come"
    far_end.channel.close()
    near_end.wait(1)
    assert isinstance(near_end.lost[0], ConnectionError)
    assert (len(near_end.lost), len(far_end.lost)) == (1, 1)


def test_sends_heartbeats_while_main_thread_waits_or_computes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        accepted = listener.accept()[0]
    loop, lost = EventLoop(0.1), list[Exception]()
    channel = MessageChannel(open_connection(connection, None, False, time.monotonic() + WAIT_S))
    channel.start(loop, lambda _: None, lambda *_: None, lost.append)
    message_types: list[MessageType] = []
    accepted.settimeout(WAIT_S)
    for busy in (
        lambda: loop.run_until(lambda: len(message_types) >= 4, time.monotonic() + WAIT_S),
        lambda: loop.let_helper_run(0.0),
    ):
        player = threading.Thread(target=busy)
        player.start()
        for _ in range(4):
            frame = MessageReader(BlockingSource(accepted)).read_message(lambda _: None)
            assert frame is not None
            message_types.append(frame[0].type)
            accepted.sendall(HEADER_STRUCT.pack(b"DICO", PROTOCOL_VERSION, MessageType.HEARTBEAT, 0, 0, 0, 0))
        player.join()
    assert message_types == [MessageType.HEARTBEAT] * 8
    assert not lost
    # The peer sends nothing from now on, so the connection must be lost.
    assert loop.run_until(lambda: lost, time.monotonic() + WAIT_S)
    assert "no data received for 0.3 s" in str(lost[0])
    loop.close()
    with contextlib.suppress(OSError):
        accepted.close()


class BlockingSource:
    is_drained = False

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def receive_into(self, view: memoryview) -> int:
        return self._connection.recv_into(view[: HEADER_STRUCT.size])


def test_does_not_reuse_buffers_with_unsent_data(tmp_path: Path) -> None:
    """b does not read until a has computed all frames, so the queued tensors of a must not change."""
    net, count = partial(rows=64), 40
    frames = [{n: integers(x.shape, 100 + i, x.dtype) for n, x in net[2].items()} for i in range(count)]
    with fake(emit(net, tmp_path)) as (device, listener):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        device.in_flight = count
        with device.meet(listener, {"device": "b", "digest": device.digest}) as peer:
            for frame, inputs in enumerate(frames):
                peer.sendall(
                    HEADER_STRUCT.pack(b"DICO", PROTOCOL_VERSION, MessageType.TENSOR, 0, 2, frame, 64 * 24 * 4)
                    + bytes(64 * 24 * 4)
                )
                device.control.post(MessageType.BEGIN_FRAME, index=60_000, frame=frame)
                for index, array in enumerate(inputs.values()):
                    device.control.post(MessageType.INPUT, array.reshape(-1).view(np.uint8), index, frame)
            device.loop.push()
            end = time.monotonic() + WAIT_S
            while (
                sum(header.type is MessageType.DONE for header, _ in device.messages) < count and time.monotonic() < end
            ):
                time.sleep(0.01)
            found = _tensors(peer, 2 * count)
    for frame, inputs in enumerate(frames):
        assert np.array_equal(found[0, frame].view(np.float32), inputs["x2"].reshape(-1))
        product = inputs["x"] @ integers((32, 24), 4)[:16]
        assert np.array_equal(found[1, frame].view(np.float32), product.reshape(-1))


def _tensors(peer: socket.socket, count: int) -> dict[tuple[int, int], Any]:
    """Return received payloads by index and frame."""
    peer.settimeout(WAIT_S)
    reader, found = MessageReader(SocketSource(peer)), {}
    while len(found) < count:
        frame = reader.read_message(lambda _: None)
        assert frame is not None
        if frame[0].type is MessageType.TENSOR:
            found[frame[0].index, frame[0].frame] = frame[1]
    return found


class SocketSource(BlockingSource):
    def receive_into(self, view: memoryview) -> int:
        return self._connection.recv_into(view)


def test_frames_in_flight_match_single_frames(tmp_path: Path) -> None:
    net = partial(rows=64)
    frames = [{n: integers(x.shape, 200 + i, x.dtype) for n, x in net[2].items()} for i in range(60)]
    directory = emit(net, tmp_path)
    many, single = (
        SocketsTarget().run(directory, frames, RunOptions(timeout_s=60, in_flight=n)).outputs for n in (12, 1)
    )
    for inputs, outputs, expected in zip(frames, many, single, strict=True):
        assert np.array_equal(outputs["out"], expected["out"])
        assert np.array_equal(outputs["out"], run_model(net[1], inputs)["out"])


def test_arrival_of_the_rest_of_a_tensor_is_timed() -> None:
    """The first bytes of a tensor are not timed, nor are bytes that arrive while this process does not wait."""
    connection, accepted = connected()
    end = End(accepted, None, True).start()
    rest = 1 << 20

    def send_in_two_pieces(pause_s: float) -> None:
        header = HEADER_STRUCT.pack(b"DICO", PROTOCOL_VERSION, MessageType.TENSOR, 0, 0, 0, 1000 + rest)
        connection.sendall(header + bytes(1000))
        time.sleep(pause_s)
        connection.sendall(bytes(rest))

    with connection:
        end.run_in_main_thread()
        sender = threading.Thread(target=send_in_two_pieces, args=(0.3,))
        sender.start()
        end.wait(1)
        sender.join()
        received = end.channel.take_received()
        assert received is not None
        assert received.nbytes == 1000 + rest and received.timed_bytes == rest and received.timed_s >= 0.29
        assert end.channel.take_received() is None
        sender = threading.Thread(target=send_in_two_pieces, args=(0.0,))
        sender.start()
        time.sleep(0.5)  # Simulate a device that computes while the message arrives.
        sender.join()
        end.wait(2)
        received = end.channel.take_received()
        assert received is not None and received.nbytes == 1000 + rest
        assert received.timed_s < 0.5
    end.loop.close()
    end.channel.close()
