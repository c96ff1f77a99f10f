"""Weights, tensors and traffic of all possible stages of a pipeline, as arrays.

A stage consists of consecutive blocks. A block is one layer, or several consecutive layers of a large network. Block b
begins at the layer `positions[b]`. Entry [i, j] of an array is for the stage of the blocks i to j - 1; it is 0 if i ≥
j.
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
    """Messages and bytes of all possible stages (consecutive layers on a device), as arrays.

    Attributes:
        messages: Number of messages.
        nbytes: Bytes of the messages.
    """

    messages: Floats
    nbytes: Floats

    def weighted(self, message: float, byte: float) -> Floats:
        """Return `message` · (number of messages) + `byte` · (bytes) for each stage.

        If the arguments are the seconds of one message and of one byte, the result is in seconds.
        """
        result: Floats = message * self.messages + byte * self.nbytes
        return result


def block_of_layers(positions: Sequence[int]) -> tuple[int, ...]:
    """Return the number of each layer's block. Block b has the layers positions[b] to positions[b + 1] - 1."""
    return tuple(block for block, (start, stop) in enumerate(pairwise(positions)) for _ in range(start, stop))


def crossing_bytes(flows: NetworkFlows, layers: int) -> Floats:
    """Return, for each position between layers, the bytes of tensors that later layers read from earlier layers.

    Args:
        flows: The tensors with their readers.
        layers: Number of layers.
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
    """The tensors that enter and leave each possible stage (consecutive layers on one device or on several in turn).

    Attributes:
        received: Tensors of earlier stages that the stage reads.
        received_outputs: Those tensors of `received` that are outputs of the network.
        sent: Tensors of the stage that later stages read. Each counts once, even if several stages read it.
        sent_to_readers: The same tensors, counted once for each later layer that reads them.
        inputs: Inputs of the network that the stage reads.
        other_inputs: Inputs of the network that other stages read. Each counts once.
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
        producer: Index of the block (consecutive layers) that computes them; INPUT_PRODUCER for a network input.
        readers: Indices of the blocks that read them, ascending.
        is_output: True if a sink reads them.
        nbytes: Number of bytes.
    """

    producer: int
    readers: tuple[int, ...]
    is_output: bool
    nbytes: int


def interval_sums(values: Sequence[float], positions: Sequence[int]) -> Floats:
    """Return the sum of `values`, one for each layer, over the layers of each possible stage (consecutive layers).

    Entry [i, j] of the result is for the layers positions[i] to positions[j] - 1.
    """
    total = np.concatenate(([0.0], np.cumsum(np.asarray(values, np.float64))))[list(positions)]
    return np.triu(total[None, :] - total[:, None])


def interval_weights(flows: NetworkFlows, positions: Sequence[int]) -> Floats:
    """Return the bytes of constants of each possible stage (consecutive layers).

    A constant that several layers of a stage share counts once. Entry [i, j] of the result is for the layers
    positions[i] to positions[j] - 1.
    """
    layers, block = len(positions) - 1, block_of_layers(positions)
    total = np.zeros((layers + 1, layers + 1))
    for nbytes, owners in flows.weights:
        _add_if_any(total, sorted({block[owner] for owner in owners}), 0, layers, nbytes)
    return total


def interval_traffic(flows: NetworkFlows, positions: Sequence[int]) -> IntervalTraffic:
    """Return the tensors that enter and leave each possible stage (consecutive layers).

    Entry [i, j] of each array is for the layers positions[i] to positions[j] - 1.
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
    """Return the largest number of bytes of tensors that the device of each possible stage stores at once.

    Entry [i, j] of the result is for the layers positions[i] to positions[j] - 1. It may be too large if several layers
    are between two positions, because all their tensors count as stored at the same time.

    Args:
        flows: The tensors with their readers.
        positions: Positions between layers at which a stage may begin or end.
        is_source: True if the device stores the network's inputs, even if it only sends them.
        is_sink: True if the device stores the network's outputs to the end of the frame.
    """
    layers, block = len(positions) - 1, block_of_layers(positions)
    pieces = _list_pieces(flows, block)
    # The loop below goes over `start`. inner[b, e] then has the bytes of tensors that the stage of blocks `start` to
    # e - 1 computes itself and stores while it computes block b.
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
                # A sink stores received outputs of the network during the whole frame.
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
    """Add a tensor's bytes to `live` for each block (consecutive layers) during whose execution it is stored.

    Entry [b, e] of `live` has the bytes that are stored while block b is computed, if its stage (sequence of blocks on
    one device) ends before block e. Only stages that compute the tensor are counted.
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

    `readers` are the blocks (consecutive layers) that read a tensor, ascending. Entry [i, j] of `total` is for the
    stage of the blocks i to j - 1.
    """
    start = first
    for reader in readers:
        if reader >= first:
            total[start : reader + 1, reader + 1 : layers + 1] += amount
            start = reader + 1


def _list_pieces(flows: NetworkFlows, block: Sequence[int]) -> list[_TrafficPiece]:
    """Return the pieces (bytes with the same readers) of all tensors.

    `block` has, for each layer, the index of the block (consecutive layers) that contains it.
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
