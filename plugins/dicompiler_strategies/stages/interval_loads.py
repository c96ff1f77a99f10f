"""Loads of all possible stages of a pipeline as arrays: weights, tensors, and bytes that are sent and received.

A stage is a sequence of consecutive blocks. A block is one layer, or several consecutive layers of a large network.
Block b begins at the layer `positions[b]`. Entry [i, j] of an array is the load of the stage of the blocks i to j - 1,
in the order of the layer graph. Entries with i ≥ j are 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dicompiler_strategies.genetic.tensor_flows import INPUT_PRODUCER, SINK_READER, NetworkFlows, TensorFlow

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Traffic:
    """Messages and bytes of a stage, as arrays over stages.

    A stage is a sequence of consecutive layers on one device, or on several devices that take frames in turn.

    Attributes:
        messages: Number of messages.
        nbytes: Bytes of the messages.
    """

    messages: Floats
    nbytes: Floats

    def weighted(self, message: float, byte: float) -> Floats:
        """Return `message` times the number of messages plus `byte` times the bytes, for each stage.

        With the seconds of one message and of one byte as arguments, the result is in seconds.
        """
        result: Floats = message * self.messages + byte * self.nbytes
        return result


def block_of_layers(positions: Sequence[int]) -> tuple[int, ...]:
    """Return the number of each layer's block (sequence of consecutive layers).

    Blocks begin at the layers `positions`. The last one of `positions` is the number of layers.
    """
    return tuple(block for block, (start, stop) in enumerate(pairwise(positions)) for _ in range(start, stop))


def crossing_bytes(flows: NetworkFlows, layers: int) -> Floats:
    """Return, for each position between layers, the bytes of tensors that later layers read from earlier layers.

    `layers` is the number of layers.
    """
    changes = np.zeros(layers + 2)
    for flow in flows.flows:
        readers = _layer_positions(flow.readers)
        if flow.producer != INPUT_PRODUCER and readers:
            changes[flow.producer + 1] += flow.nbytes
            changes[readers[-1] + 1] -= flow.nbytes
    result: Floats = np.cumsum(changes)[: layers + 1]
    return result


@dataclass(frozen=True)
class IntervalTraffic:
    """The tensors that enter and leave a stage (consecutive layers on one device or on several in turn).

    Attributes:
        received: Tensors of earlier stages that the stage reads. Each is received once.
        received_outputs: The tensors of `received` that are outputs of the network. A sink receives these tensors even
            if its stage does not read them.
        sent: Tensors of the stage that later stages read. Each is counted once, even if several stages read it.
        sent_to_readers: The same tensors, counted once for each later layer that reads them.
        inputs: Inputs of the network that the stage reads.
        other_inputs: Inputs of the network that other stages read. Each is counted once.
        outputs: Outputs of the network that the stage computes.
        other_outputs: Outputs of the network that other stages compute.
    """

    received: Traffic
    received_outputs: Traffic
    sent: Traffic
    sent_to_readers: Traffic
    inputs: Traffic
    other_inputs: Traffic
    outputs: Traffic
    other_outputs: Traffic


@dataclass(frozen=True)
class _TrafficPiece:
    """Some bytes of a tensor, all of which have the same readers.

    Attributes:
        producer: Number of the block (consecutive layers) that computes the tensor; INPUT_PRODUCER for an input of the
            network.
        readers: Numbers of the blocks that read the bytes, in order.
        is_output: True if a sink reads them.
        nbytes: Number of bytes.
    """

    producer: int
    readers: tuple[int, ...]
    is_output: bool
    nbytes: int


def interval_sums(values: Sequence[float], positions: Sequence[int]) -> Floats:
    """Return, for each stage (consecutive layers), the sum of the `values` of its layers.

    `values` has one number for each layer. Stages begin and end at the layers `positions`. Entry [i, j] of the result
    is for the stage of the layers positions[i] to positions[j] - 1.
    """
    total = np.concatenate(([0.0], np.cumsum(np.asarray(values, np.float64))))[list(positions)]
    return np.triu(total[None, :] - total[:, None])


def interval_weights(flows: NetworkFlows, positions: Sequence[int]) -> Floats:
    """Return the bytes of constants of each stage (consecutive layers).

    A constant that several layers of a stage share counts once. Entry [i, j] of the result is for the stage of the
    layers positions[i] to positions[j] - 1.
    """
    layers, block = len(positions) - 1, block_of_layers(positions)
    total = np.zeros((layers + 1, layers + 1))
    for nbytes, owners in flows.weights:
        _add_if_any(total, sorted({block[owner] for owner in owners}), 0, layers, nbytes)
    return total


def interval_traffic(flows: NetworkFlows, positions: Sequence[int]) -> IntervalTraffic:
    """Return the tensors that enter and leave each stage (sequence of consecutive layers).

    A stage may begin and end at each of the layers `positions`.
    """
    layers = len(positions) - 1
    counters = [_TrafficCounter(layers) for _ in range(8)]
    received, received_outputs, sent, sent_to_readers, inputs, other_inputs, outputs, other_outputs = counters
    for piece in _list_pieces(flows, block_of_layers(positions)):
        if piece.producer == INPUT_PRODUCER:
            inputs.add_if_any(piece.readers, 0, layers, piece.nbytes)
            if piece.readers:
                other_inputs.add_where(piece.readers[0] < inputs.starts, piece.nbytes)
                other_inputs.add_where(
                    (piece.readers[0] >= inputs.starts) & (piece.readers[-1] >= inputs.ends), piece.nbytes
                )
            continue
        received.add_if_any(piece.readers, piece.producer + 1, layers, piece.nbytes)
        if piece.is_output:
            received_outputs.add_if_any(piece.readers, piece.producer + 1, layers, piece.nbytes)
        inside = (inputs.starts <= piece.producer) & (piece.producer < inputs.ends)
        if piece.readers:
            sent.add_where(inside & (piece.readers[-1] >= inputs.ends), piece.nbytes)
        for reader in piece.readers:
            sent_to_readers.add_where(inside & (reader >= inputs.ends), piece.nbytes)
        if piece.is_output:
            outputs.add_where(inside, piece.nbytes)
            other_outputs.add_where(~inside, piece.nbytes)
    return IntervalTraffic(*(counter.traffic() for counter in counters))


def interval_activations(flows: NetworkFlows, positions: Sequence[int], is_source: bool, is_sink: bool) -> Floats:
    """Return the largest number of bytes of tensors that the device of each stage stores at once.

    A tensor that the stage computes is stored until its last reader in the stage. A received tensor is stored from the
    start of the frame to its last reader. A sink stores the outputs of the network to the end of the frame. A source
    stores the inputs of the network, even if it only sends them.

    A stage consists of consecutive blocks of layers. Block b has the layers positions[b] to positions[b + 1] - 1. All
    tensors of a block count as stored at the same time. If a block has several layers, the result can therefore be too
    large.
    """
    layers, block = len(positions) - 1, block_of_layers(positions)
    pieces = _list_pieces(flows, block)
    # inner[b, e] is for the stage from block `start` to block e - 1, where a block has one or more consecutive layers.
    # It is the number of bytes of tensors computed in the stage that are stored while block b is computed.
    inner = np.zeros((layers, layers + 1))
    own: dict[int, list[TensorFlow]] = {}
    for flow in flows.flows:
        if flow.producer != INPUT_PRODUCER:
            own.setdefault(block[flow.producer], []).append(flow)
    peaks = np.zeros((layers + 1, layers + 1))
    ends = np.arange(layers + 1)
    for start in reversed(range(layers)):
        for flow in own.get(start, ()):
            _add_own_tensor(inner, flow, block, layers, is_sink)
        live = inner.copy()
        constant, first = np.zeros(layers + 1), np.zeros(layers + 1)
        for piece in pieces:
            if piece.is_output and is_sink and (piece.producer != INPUT_PRODUCER or not is_source):
                # Received outputs of the network are stored from the start to the end of the frame, so that they add
                # to the bytes at every time.
                constant += piece.nbytes * ((piece.producer < start) | (piece.producer >= ends))
                continue
            if piece.producer >= start:
                continue
            readers = [reader for reader in piece.readers if reader >= start]
            for reader, following in pairwise((*readers, layers)):
                live[start : reader + 1, reader + 1 : following + 1] += piece.nbytes
                first[reader + 1 : following + 1] += piece.nbytes
            if piece.producer == INPUT_PRODUCER and is_source and piece.readers:
                first += piece.nbytes * ((readers[0] if readers else layers) >= ends)
        highest = np.maximum.accumulate(np.where(ends[None, :] > np.arange(layers)[:, None], live, 0.0)[start:], axis=0)
        peaks[start, start + 1 :] = np.maximum(highest[-1], first)[start + 1 :] + constant[start + 1 :]
    return peaks


def _add_own_tensor(live: Floats, flow: TensorFlow, block: Sequence[int], layers: int, is_sink: bool) -> None:
    """Add a tensor's bytes to the stages (consecutive layers) that compute it, for each block in which it is stored.

    Entry [b, e] of `live` is for block b in the stages that end before block e. A sink stores an output of the network
    until the last layer of its stage.
    """
    producer = block[flow.producer]
    if is_sink and SINK_READER in flow.readers:
        live[producer:, producer + 1 :] += flow.nbytes
        return
    readers = sorted({block[reader] for reader in flow.readers if reader != SINK_READER} - {producer})
    for reader, following in pairwise((producer, *readers, layers)):
        live[producer : reader + 1, reader + 1 : following + 1] += flow.nbytes


class _TrafficCounter:
    def __init__(self, layers: int) -> None:
        self.messages, self.nbytes = np.zeros((2, layers + 1, layers + 1))
        positions = np.arange(layers + 1)
        self.starts, self.ends = positions[:, None], positions[None, :]

    def add_if_any(self, readers: Sequence[int], first: int, layers: int, nbytes: int) -> None:
        _add_if_any(self.messages, readers, first, layers, 1)
        _add_if_any(self.nbytes, readers, first, layers, nbytes)

    def add_where(self, mask: NDArray[np.bool_], nbytes: int) -> None:
        self.messages += mask
        self.nbytes += nbytes * mask

    def traffic(self) -> Traffic:
        return Traffic(np.triu(self.messages, 1), np.triu(self.nbytes, 1))


def _add_if_any(total: Floats, readers: Sequence[int], first: int, layers: int, amount: float) -> None:
    """Add `amount` to the stages in `total` that begin at block `first` or later and contain at least one reader.

    A block consists of consecutive layers. `readers` are the blocks of the readers, in ascending order.
    """
    start = first
    for reader in readers:
        if reader >= first:
            total[start : reader + 1, reader + 1 : layers + 1] += amount
            start = reader + 1


def _list_pieces(flows: NetworkFlows, block: Sequence[int]) -> list[_TrafficPiece]:
    """Return the pieces (bytes with the same readers) of all tensors.

    `block` has, for each layer, the number of the block (consecutive layers) that contains it.
    """
    pieces = []
    for flow in flows.flows:
        for group in flow.groups:
            for shared in group.shared_bytes:
                readers = [flow.readers[i] for i in shared.readers]
                blocks = tuple(sorted({block[reader] for reader in _layer_positions(readers)}))
                producer = flow.producer if flow.producer == INPUT_PRODUCER else block[flow.producer]
                pieces.append(_TrafficPiece(producer, blocks, SINK_READER in readers, shared.nbytes))
    return pieces


def _layer_positions(readers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({reader for reader in readers if reader != SINK_READER}))
