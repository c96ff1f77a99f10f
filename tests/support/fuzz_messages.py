"""Seeded streams of invalid messages, made from valid ones by mutation.

A device's manifest and a seed ⇒ bytes of a connection, and the outcome of the real parser with the real filters.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dicompiler_targets.sockets.runtime.channel import CheckHeader, DeliverMessage
from dicompiler_targets.sockets.runtime.device import ConnectionSettings, DeviceRun
from dicompiler_targets.sockets.runtime.executor import Mailbox
from dicompiler_targets.sockets.runtime.handshake import RunCredentials
from dicompiler_targets.sockets.runtime.protocol import (
    HEADER_STRUCT,
    MAGIC,
    MAX_JSON_BYTES,
    PROTOCOL_VERSION,
    ConnectionClosed,
    FrameWindow,
    MessageReader,
    MessageType,
    ProtocolError,
    ReceiveFilter,
)

IN_FLIGHT = 3
NUMBERS = (0, 1, 2, 3, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
TEXTS = (
    b"{}",
    b"[]",
    b"",
    b"null",
    b'{"addresses": 5}',
    b'{"a": ' * 20_000,
    b"[" * 100_000,
    b"\xff\xfe",
    b"1" * 9999,
    b"NaN",
)


@dataclass
class RawMessage:
    """A message's header fields and payload; `length` may differ from the payload's length."""

    kind: int
    index: int = 0
    frame: int = 0
    payload: bytes = b""
    magic: bytes = MAGIC
    version: int = PROTOCOL_VERSION
    flags: int = 0
    length: int | None = None

    def pack(self) -> bytes:
        length = len(self.payload) if self.length is None else self.length
        index, frame = self.index % (1 << 32), self.frame % (1 << 64)
        head = HEADER_STRUCT.pack(self.magic, self.version, self.kind, self.flags, index, frame, length)
        return head + self.payload


def valid_messages(expected: Mapping[int, Mapping[str, Any]], kind: MessageType) -> list[RawMessage]:
    """Return the valid messages: each expected value once per frame in flight."""
    return [RawMessage(kind, i, f, bytes(v["bytes"] or 16)) for f in range(IN_FLIGHT) for i, v in expected.items()]


def mutate_stream(messages: list[RawMessage], rng: random.Random) -> bytes:
    """Return the bytes of the messages with one to three mutations."""
    chosen = [RawMessage(**vars(message)) for message in messages]
    for _ in range(rng.randint(1, 3)):
        _mutate_messages(chosen, rng)
    data = bytearray(b"".join(message.pack() for message in chosen))
    if rng.random() < 0.4 and data:
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.3:
        del data[rng.randrange(len(data) + 1) :]
    if rng.random() < 0.05:
        data[:0] = rng.randbytes(rng.randint(1, 100))
    return bytes(data)


def _mutate_messages(messages: list[RawMessage], rng: random.Random) -> None:
    mutation = rng.randrange(8)
    if mutation == 0 or not messages:
        text = rng.choice(TEXTS)
        messages.insert(
            rng.randint(0, len(messages)),
            RawMessage(rng.choice(list(MessageType)), rng.choice(NUMBERS), rng.randrange(4), text),
        )
        return
    at = rng.randrange(len(messages))
    message = messages[at]
    if mutation == 1:
        message.length = rng.choice((*NUMBERS, len(message.payload) + 1, max(0, len(message.payload) - 1)))
    elif mutation == 2:
        message.index = rng.choice((*NUMBERS, message.index + 1))
    elif mutation == 3:
        message.frame = rng.choice((*NUMBERS, message.frame + 1, message.frame + IN_FLIGHT))
    elif mutation == 4:
        message.kind = rng.choice((*MessageType, rng.randrange(256)))
    elif mutation == 5:
        messages.insert(rng.randint(0, len(messages)), message)
    elif mutation == 6:
        del messages[at]
    else:
        message.flags, message.version = rng.choice(((1, PROTOCOL_VERSION), (0, rng.randrange(256))))


@dataclass
class Memory:
    """A byte source that returns at most `step` bytes at once."""

    data: bytes
    step: int
    done: int = 0
    turns: int = 0
    is_drained: bool = False

    def receive_into(self, view: memoryview) -> int | None:
        self.turns += 1
        if self.turns % 3 == 0:  # Every third call finds no data, like a socket that has not received any.
            return None
        count = min(len(view), self.step, len(self.data) - self.done)
        view[:count] = self.data[self.done : self.done + count]
        self.done += count
        return count

    def expect_bytes(self, count: int) -> None:
        pass


@dataclass
class Receiver:
    """The receiving side of a device without a network.

    Attributes:
        largest: Bytes that the largest stream allocated.
        outcomes: Number of streams by outcome.
    """

    directory: Path
    manifest: Mapping[str, Any]
    largest: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = DeviceRun(self.directory, self.manifest, ConnectionSettings(0.0), RunCredentials())
        self.device._loop.close()
        self.inputs = self.device._inputs_by_role[0]
        name, transfers = self.manifest["device"], self.manifest["transfers"]
        self.peers = {t["sender"]: {} for t in transfers if t["receiver"] == name}  # type: dict[str, dict[int, Any]]
        for transfer in transfers:
            if transfer["receiver"] == name:
                self.peers[transfer["sender"]][transfer["index"]] = transfer

    def streams(self) -> list[tuple[str | None, list[RawMessage]]]:
        """Return valid streams: from the coordinator (None) and from each peer."""
        run = [RawMessage(MessageType.BEGIN_FRAME, 1000, f) for f in range(IN_FLIGHT)]
        control = [
            *run,
            *valid_messages(self.inputs, MessageType.INPUT),
            RawMessage(MessageType.HEARTBEAT),
            RawMessage(MessageType.FINISH, 0, IN_FLIGHT),
        ]
        peers = [
            (
                n,
                [
                    *valid_messages(e, MessageType.TENSOR),
                    RawMessage(MessageType.HEARTBEAT),
                    RawMessage(MessageType.BYE),
                ],
            )
            for n, e in self.peers.items()
        ]
        return [(None, control), *peers]

    def take(self, data: bytes, peer: str | None, step: int) -> str:
        """Let the device read a stream, and return the outcome.

        Unexpected errors, and allocations beyond the plan, are raised."""
        device = self.device
        device._window, device._mailbox, device._next_announced = FrameWindow(IN_FLIGHT), Mailbox(), 0
        device._peers_done = set()
        device._input_filter = ReceiveFilter([self.inputs], device._window)
        expected = self.inputs if peer is None else self.peers[peer]
        # In total, payloads may have at most the bytes of the frames in flight. JSON messages are not counted.
        most = IN_FLIGHT * sum(v["bytes"] for v in expected.values())
        taken = 0

        def allocate(length: int) -> Any:
            nonlocal taken
            is_message = peer is None and length not in {v["bytes"] for v in expected.values()}
            taken += 0 if is_message else length
            if length > MAX_JSON_BYTES or taken > most:
                raise AssertionError(f"{length} bytes were allocated, {taken} in total, the plan allows {most}")
            return np.empty(length, np.uint8)

        admit: CheckHeader = device._check_control
        deliver: DeliverMessage = device._deliver_control
        if peer is not None:
            admit, deliver, _ = device._make_peer_callbacks(peer)
        try:
            reader = MessageReader(Memory(data, step), allocate)
            while True:
                message = reader.read_message(admit)
                if message is not None and message[0].type is not MessageType.HEARTBEAT:
                    deliver(*message)
        except ConnectionClosed:
            outcome = "all taken"
        except ProtocolError:
            outcome = "refused"
        except ConnectionError:
            outcome = "cut short"
        self.largest = max(self.largest, taken)
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        return outcome


def fuzz(receiver: Receiver, seeds: range) -> None:
    """Give the receiver one mutated stream per seed."""
    streams = receiver.streams()
    for seed in seeds:
        rng = random.Random(seed)
        peer, messages = rng.choice(streams)
        receiver.take(mutate_stream(messages, rng), peer, rng.choice((1, 7, 4096, 1 << 20)))
