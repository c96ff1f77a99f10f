"""CoopAI (Yang et al., 2020) as printed: the algorithm MLS and its baseline SLS, on a chain of layers.

    LayerGraph → Chain
    Chain + F + G + k → CoopaiResult: the fastest sequence of blocks, for k identical devices behind one gateway

A block is a sequence of layers that the devices compute in one round, without an exchange in between. MLS chooses
blocks of any length, and SLS blocks of one layer. Letters and equation numbers are those of the paper: F is the compute
rate of a device in FLOP/s, G the bandwidth of the gateway in bit/s, and T_L^k the time of all L layers on k devices.

The paper leaves some details to a technical report; the following choices reproduce its figures:

- A multiply-accumulate counts as two FLOPs, and an element has 32 bits. Pools cost nothing and are computed together
  with the convolution before them.
- A grid is a range of rows of a block's last layer. If k devices compute H rows, the first H mod k grids have one more
  row. The FLOPs of a fully connected layer are divided equally.
- A device is sent only the rows that it lacks, and each row is uploaded to the gateway once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dicompiler.plugin_api import DicompilerError, Layer, LayerGraph
from dicompiler.plugin_api.costs import count_macs
from dicompiler.plugin_api.regions import named_axes, output_shape, reduction_length, split_proportionally
from dicompiler_strategies.dp.row_maps import RowIntervals, RowMap, build_row_maps, row_counts
from dicompiler_strategies.tables.choice_footprints import Ints

ELEMENT_BITS = 32
"""Bits of a tensor element."""
Mode = Literal["grids", "grids+data", "model", "data", "hybrid", "device"]
"""How a block is computed.

- "grids": convolutional layers, each device a range of rows (a grid).
- "grids+data": as "grids", and then a fully connected layer as in "data".
- "model": a fully connected layer, each device a range of the outputs.
- "data": a fully connected layer, each device a partial sum over a range of the inputs.
- "hybrid": a fully connected layer as in "model", and the next one as in "data".
- "device": everything on one device.
"""
DataState = Literal["gateway", "rows", "outputs", "sums"]
"""Where the data is stored between two rounds.

- "gateway": no data is on a device.
- "rows": each device has a range of rows.
- "outputs": each device has a range of a fully connected layer's outputs.
- "sums": the gateway has the sums of the devices' partial sums.
"""


@dataclass(frozen=True, eq=False)
class ConvolutionalLayer:
    """A convolution with the pools that follow it (CL in the paper).

    Attributes:
        names: Names of the layers, the convolution first.
        inputs: Input tensor of each layer.
        maps: Row map of each layer: the input rows that it reads for given output rows.
        row_flops: FLOPs of one row of the convolution.
        rows_in: Number of input rows.
        rows_out: Number of rows of the pooled output.
        row_in: Elements of an input row (channels · width).
        row_out: Elements of an output row.
    """

    names: tuple[str, ...]
    inputs: tuple[str, ...]
    maps: tuple[RowMap, ...]
    row_flops: int
    rows_in: int
    rows_out: int
    row_in: int
    row_out: int

    def computed_rows(self, rows: RowIntervals) -> RowIntervals:
        """Return the rows of the convolution's output that the pools need for `rows` of the pooled output."""
        for name, row_map in zip(reversed(self.inputs[1:]), reversed(self.maps[1:]), strict=True):
            need = row_map.read_rows(name, rows)
            assert need is not None
            rows = need
        return rows

    def read_rows(self, rows: RowIntervals) -> RowIntervals:
        need = self.maps[0].read_rows(self.inputs[0], rows)
        assert need is not None
        return need


@dataclass(frozen=True)
class FullyConnectedLayer:
    """A fully connected layer (FL in the paper).

    Attributes:
        names: The name of the layer, as a tuple like the names of a `ConvolutionalLayer`.
        Ni: Number of inputs.
        No: Number of outputs.
    """

    names: tuple[str, ...]
    Ni: int
    No: int


@dataclass(frozen=True)
class LayerBlock:
    """Consecutive layers i to j of the chain that k devices compute in one round (b_{i,j}^k in the paper).

    Positions count from 0, and layer j is included. In a round, devices receive missing inputs, compute, and send
    results.

    Attributes:
        i: Position of the first layer.
        j: Position of the last layer.
        mode: How the block is computed.
    """

    i: int
    j: int
    mode: Mode


@dataclass(frozen=True)
class CoopaiResult:
    """The least time in which k devices compute the network, and the blocks of layers that lead to it.

    Attributes:
        k: Number of devices.
        seconds: The least time in seconds (T_L^k in the paper).
        blocks: The blocks (layers that are computed in one round), in order.
    """

    k: int
    seconds: float
    blocks: tuple[LayerBlock, ...]


Chain = tuple[ConvolutionalLayer | FullyConnectedLayer, ...]
_RoundOption = tuple[LayerBlock, DataState, float]
"""A round, in which devices compute one block of layers: the block, the place of its results, and the seconds."""


def build_chain(layers: LayerGraph, path: Sequence[Layer] = ()) -> Chain:
    """Return the network in CoopAI's form: convolutions with their pools, and fully connected layers.

    Other layers (Flatten, LRN, Softmax) cost nothing and are omitted.

    Args:
        layers: The layer graph, a chain unless `path` is given.
        path: Layers that represent a network with branches, such as its longest path. Each layer keeps all its input
            channels, even those that layers outside the path compute.

    Raises:
        DicompilerError: The network is not a chain, or has a layer that is neither convolutional nor fully connected.
    """
    for i, layer in enumerate(() if path else layers.layers):
        before = layers.layers[i - 1] if i else None
        if len(layer.inputs) != 1 or layers.producer.get(layer.inputs[0]) is not before:
            raise DicompilerError(
                f"coopai: the network must be a chain, but layer {layer.name!r} is on a branch: use strategy 'dp'"
            )
    maps, labels = build_row_maps(layers), named_axes(layers)
    result: list[ConvolutionalLayer | FullyConnectedLayer] = []
    for layer in path or layers.layers:
        if layer.whole_reason or not count_macs(layers, layer):
            last = result[-1] if result else None
            if (
                layer.name in maps
                and isinstance(last, ConvolutionalLayer)
                and len(layer.inputs) == 1
                and _reads_from(layers, last, layer)
            ):
                result[-1] = _with_pool(layers, last, layer, maps[layer.name])
        elif layer.name in maps:
            result.append(_convolutional_layer(layers, layer, maps[layer.name], labels[layer.inputs[0]]["height"]))
        elif (length := reduction_length(layers, layer)) is not None:
            result.append(FullyConnectedLayer((layer.name,), length, int(np.prod(output_shape(layers, layer)))))
        else:
            raise DicompilerError(
                f"coopai: layer {layer.name!r} ({layer.nodes[layer.anchor].op}) is neither convolutional nor fully "
                "connected: use strategy 'dp'"
            )
    if not result:
        raise DicompilerError("coopai: the network has no convolutional or fully connected layer: use strategy 'dp'")
    return tuple(result)


def _reads_from(layers: LayerGraph, last: ConvolutionalLayer, layer: Layer) -> bool:
    return layers.producer[layer.inputs[0]].name == last.names[-1]


def _convolutional_layer(layers: LayerGraph, layer: Layer, row_map: RowMap, height: int) -> ConvolutionalLayer:
    shape = layers.tensors[layer.inputs[0]].shape
    assert shape is not None
    shape_out = output_shape(layers, layer)
    return ConvolutionalLayer(
        (layer.name,),
        (layer.inputs[0],),
        (row_map,),
        2 * count_macs(layers, layer) // row_map.height,
        shape[height],
        row_map.height,
        int(np.prod(shape)) // shape[height],
        int(np.prod(shape_out)) // row_map.height,
    )


def _with_pool(layers: LayerGraph, cl: ConvolutionalLayer, layer: Layer, row_map: RowMap) -> ConvolutionalLayer:
    shape_out = output_shape(layers, layer)
    return ConvolutionalLayer(
        (*cl.names, layer.name),
        (*cl.inputs, layer.inputs[0]),
        (*cl.maps, row_map),
        cl.row_flops,
        cl.rows_in,
        row_map.height,
        cl.row_in,
        int(np.prod(shape_out)) // row_map.height,
    )


def balanced_rows(rows: int, k: int) -> RowIntervals:
    return split_proportionally(rows, (1.0,) * k)


def _equal_shares(count: int, k: int) -> Ints:
    """Return how many of `count` inputs or outputs each of k devices gets, as equal as possible, shape (k,)."""
    return np.array(row_counts(balanced_rows(count, k)), np.int64)


def minimise_latency(layers: Chain, F: float, G: float, k: int, single: bool = False) -> CoopaiResult:
    """Return the fastest sequence of blocks (layers that are computed in one round) for the chain on k devices.

    T_i^k is the least time of the first i layers, and e_{r+1,i}^k that of a round with layers r + 1 to i. By eq. (2) of
    the CoopAI paper, T_i^k = min over r of T_r^k + e_{r+1,i}^k.

    Args:
        layers: The chain.
        F: Compute rate of a device in FLOP/s.
        G: Bandwidth of the gateway in bit/s.
        k: Number of devices.
        single: True for the baseline SLS: one layer in a block, and fully connected layers split only by outputs.
    """
    if k == 1:
        return CoopaiResult(1, _single_device_latency(layers, F, G), (LayerBlock(0, len(layers) - 1, "device"),))
    rounds = _Rounds(layers, F, G, k, single)
    # e depends on the data that devices store before the round, so there is one T for each DataState.
    best: list[dict[DataState, tuple[float, tuple[LayerBlock, ...]]]] = [{} for _ in range(len(layers) + 1)]
    best[0]["gateway"] = (0.0, ())
    for i in range(len(layers)):
        for state, (seconds, blocks) in best[i].items():
            for block, after, e in rounds.round_options(i, state):
                known = best[block.j + 1].get(after)
                if known is None or _order_key(seconds + e, blocks) < _order_key(known[0], known[1][:-1]):
                    best[block.j + 1][after] = (seconds + e, (*blocks, block))
    seconds, blocks = min(best[-1].values(), key=lambda entry: _order_key(*entry))
    return CoopaiResult(k, seconds, blocks)


def _order_key(seconds: float, blocks: Sequence[LayerBlock]) -> tuple[float, int]:
    return round(seconds, 12), len(blocks)


def best_k(results: Sequence[CoopaiResult]) -> CoopaiResult:
    """Return the fastest of the results for several numbers k of devices; of equal ones, that with the least k.

    This is eq. (1) of the CoopAI paper: T_L^* = min over k of T_L^k, where T_L^k is the least time of all L layers.
    """
    return min(results, key=lambda result: (result.seconds, result.k))


def _single_device_latency(layers: Chain, F: float, G: float) -> float:
    """Return T_L^1: the seconds in which one device receives the input, computes all layers and sends the output.

    F is the compute rate of the device in FLOP/s, and G the bandwidth of the gateway in bit/s.
    """
    first, last = layers[0], layers[-1]
    inputs = first.Ni if isinstance(first, FullyConnectedLayer) else first.rows_in * first.row_in
    outputs = last.No if isinstance(last, FullyConnectedLayer) else last.rows_out * last.row_out
    flops = sum(
        2 * at.Ni * at.No if isinstance(at, FullyConnectedLayer) else at.row_flops * at.maps[0].height for at in layers
    )
    return flops / F + (inputs + outputs) * ELEMENT_BITS / G


@dataclass(frozen=True)
class _Rounds:
    """The possible rounds, and the time of each round.

    In a round, each device receives missing inputs, computes its part of a block of layers, and sends results. The time
    for layers i to j is e_{i,j}^k of eq. (3) to (5) of the CoopAI paper. It depends on the DataState, the place of the
    results of the previous round.

    Attributes:
        layers: The chain.
        F: Compute rate of a device in FLOP/s.
        G: Bandwidth of the gateway in bit/s.
        k: Number of devices.
        single: True for the baseline SLS, with one layer in a block.
    """

    layers: Chain
    F: float
    G: float
    k: int
    single: bool

    def round_options(self, i: int, state: DataState) -> list[_RoundOption]:
        """Return each round that can begin with layer i: its layers, the DataState after it, and its seconds.

        `state` says where the input of layer i is stored before the round.
        """
        return (
            self._convolutional(i, state)
            if isinstance(self.layers[i], ConvolutionalLayer)
            else self._connected(i, state)
        )

    def _e(self, zeta: Ints, phi: Ints) -> float:
        """Return the seconds of a round, those of the slowest device, by eq. (3) of the CoopAI paper.

        e_{i,j}^k = max over d of ζ(d) / F + 32 φ(d) / (G / k). Device d computes ζ(d) FLOPs (`zeta`) and transfers φ(d)
        elements (`phi`) of 32 bits, with a k-th of the gateway's bandwidth.
        """
        return float(np.max(zeta / self.F + phi * ELEMENT_BITS * self.k / self.G))

    def _convolutional(self, i: int, state: DataState) -> list[_RoundOption]:
        """Return the rounds that begin at the convolutional layer i, one or two for each possible last layer j.

        Each device computes a range of rows of layer j (a grid), and the rows of layers i to j - 1 that it depends on.
        A fully connected layer after layer j may be included in data form: each device sums over its own results.
        """
        rounds: list[_RoundOption] = []
        for j in range(i, i + 1 if self.single else len(self.layers)):
            last = self.layers[j]
            if not isinstance(last, ConvolutionalLayer):
                break
            rows = balanced_rows(last.rows_out, self.k)
            zeta, needs = self._grid_work(i, j, rows)
            ti, tau = self._missing_rows(i, needs, state)
            after = self.layers[j + 1] if j + 1 < len(self.layers) else None
            out = np.array(row_counts(rows), np.int64) * last.row_out
            to = np.zeros_like(out) if isinstance(after, ConvolutionalLayer) else out
            rounds.append((LayerBlock(i, j, "grids"), "rows", self._e(zeta, ti + tau + to)))
            if isinstance(after, FullyConnectedLayer) and not self.single:
                more = 2 * _equal_shares(after.Ni, self.k) * after.No
                e = self._e(zeta + more, ti + tau + after.No)
                rounds.append((LayerBlock(i, j + 1, "grids+data"), "sums", e))
        return rounds

    def _grid_work(self, i: int, j: int, rows: RowIntervals) -> tuple[Ints, RowIntervals]:
        """Return the FLOPs of each device for layers i to j, and the rows of layer i's input that each device reads.

        By eq. (4) of the CoopAI paper, the FLOPs are ζ(d) = Σ_{r ∈ [i,j]} p_r(d), with p_r(d) in layer r. `rows` are
        the output rows of layer j that each device computes.
        """
        zeta = np.zeros(self.k, np.int64)
        for r in range(j, i - 1, -1):
            layer = self.layers[r]
            assert isinstance(layer, ConvolutionalLayer)
            computed = layer.computed_rows(rows)
            zeta += np.array(row_counts(computed), np.int64) * layer.row_flops
            rows = layer.read_rows(computed)
        return zeta, rows

    def _missing_rows(self, i: int, needs: RowIntervals, state: DataState) -> tuple[Ints, Ints]:
        """Return the elements that each device downloads before a round, and uploads for others: ti and τo of eq. (5).

        Args:
            i: Position of the first layer of the round.
            needs: Rows of its input that each device reads.
            state: "rows" if each device already stores a range of these rows. Otherwise the gateway stores all of them.
        """
        layer = self.layers[i]
        assert isinstance(layer, ConvolutionalLayer)
        if state != "rows":
            return np.array(row_counts(needs), np.int64) * layer.row_in, np.zeros(self.k, np.int64)
        reads = np.zeros((self.k, layer.rows_in), np.bool_)
        owns = np.zeros_like(reads)
        for d, (need, held) in enumerate(zip(needs, balanced_rows(layer.rows_in, self.k), strict=True)):
            reads[d, need[0] : need[1]] = True
            owns[d, held[0] : held[1]] = True
        missing = reads & ~owns
        up = owns & missing.any(axis=0)
        return missing.sum(axis=1) * layer.row_in, up.sum(axis=1) * layer.row_in

    def _connected(self, i: int, state: DataState) -> list[_RoundOption]:
        """Return the rounds that begin at the fully connected layer i.

        - model form: each device computes a range of the outputs from all inputs.
        - data form: each device computes partial sums of all outputs from a range of the inputs.
        - hybrid form: layer i in model form, and the next fully connected layer in data form.

        The baseline SLS (`single`) has only the model form.
        """
        layer = self.layers[i]
        assert isinstance(layer, FullyConnectedLayer)
        inputs, outputs = _equal_shares(layer.Ni, self.k), _equal_shares(layer.No, self.k)
        missing = np.maximum(layer.Ni - self._held_inputs(i, state), 0)
        model = 2 * layer.Ni * outputs
        rounds: list[_RoundOption] = [(LayerBlock(i, i, "model"), "outputs", self._e(model, missing + outputs))]
        if self.single:
            return rounds
        ti = np.zeros_like(inputs) if state == "outputs" else inputs
        rounds.append((LayerBlock(i, i, "data"), "sums", self._e(2 * inputs * layer.No, ti + layer.No)))
        after = self.layers[i + 1] if i + 1 < len(self.layers) else None
        if isinstance(after, FullyConnectedLayer):
            e = self._e(model + 2 * outputs * after.No, missing + after.No)
            rounds.append((LayerBlock(i, i + 1, "hybrid"), "sums", e))
        return rounds

    def _held_inputs(self, i: int, state: DataState) -> Ints:
        """Return how many elements of layer i's input each device has computed itself, shape (k,)."""
        before = self.layers[i - 1] if i else None
        if state == "rows" and isinstance(before, ConvolutionalLayer):
            return _equal_shares(before.rows_out, self.k) * before.row_out
        if state == "outputs" and isinstance(before, FullyConnectedLayer):
            return _equal_shares(before.No, self.k)
        return np.zeros(self.k, np.int64)
