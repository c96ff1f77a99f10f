"""The strategy `stahl` (Stahl et al., SAMOS 2019): an integer linear program (ILP) chooses how each layer is split.

There are three schemes. LOP splits the output channels of a layer, and LIP its input channels. FUSE is a layer in LOP
and the next one in LIP, between which nothing is sent. `solve_ilp` finds the schemes with the least communication
between N devices. Letters and equation numbers are those of the paper.

Eq. (9), the cost of FUSE, does not subtract inputs that devices already have, as eq. (7) for LOP does. Eq. (9) as
printed is the default here, and was used for Table 2 of the paper. With it, the optimum of the paper's example is 26.
The paper states 22, which is the optimum if eq. (9) subtracts these inputs too (option `reuse`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from dicompiler.plugin_api import DicompilerError, Interval, Layer, LayerGraph, Part, Plan, Problem, Strategy
from dicompiler.plugin_api.regions import (
    full_region,
    is_read_only_within,
    output_shape,
    reduction_length,
    split_axis,
    split_proportionally,
    tile_layer,
    volume,
)
from dicompiler_strategies.tables.choices import find_cuttable_axis

PartitionScheme = Literal["o", "i", "f", "s"]
"""How layer l is split: the letters of o_l, i_l, f_l and s_l in the paper's eq. (11).

- "o": LOP (by output channels).
- "i": LIP (by input channels).
- "f", "s": as the first or the second layer of a fused pair (FUSE).
"""

MAX_SOLVER_S = 60.0
"""Limit in CP-SAT's deterministic seconds. A network of tens of layers needs much less than one."""


@dataclass(frozen=True)
class IlpLayer:
    """Layer l of the integer linear program (ILP), with sizes in elements.

    Attributes:
        name: Name of the layer.
        M: Number of input elements.
        K: Number of output elements.
        Q: Number of weights.
        previous: Position of the layer l − 1 that computes the inputs, as in the paper's eq. (7) and (12); None if
            there is none.
        can_fuse: True if the layer can be fused with layer l − 1.
        has_split_inputs: True if the layer has no layer l − 1 and each device stores an equal part of its inputs at the
            start (o_0 = 1 in the paper).
    """

    name: str
    M: int
    K: int
    Q: int = 0
    previous: int | None = None
    can_fuse: bool = True
    has_split_inputs: bool = False


@dataclass(frozen=True)
class IlpSolution:
    """A solution of the integer linear program (ILP), which chooses how each layer is split.

    Attributes:
        schemes: Scheme of each layer: LOP, LIP, or one of the two layers of FUSE.
        communication: Number of elements that all devices send for one frame (C of the paper's eq. 10).
        is_proven: True if no other solution needs less communication.
    """

    schemes: tuple[PartitionScheme, ...]
    communication: float
    is_proven: bool


def scaled_cost(layer: IlpLayer, scheme: PartitionScheme, reused: bool, N: int) -> int:
    """Return N · C_l, where C_l is the number of elements that are sent for layer l, and N the number of devices.

    The layer has M inputs and K outputs. o_{l−1} is 1 if `reused` is True: each device then has an N-th of the inputs,
    because layer l − 1 is in LOP (split by output channels). The factor N makes the result an integer.

    - LOP, eq. (7): C_l = (M − o_{l−1} M / N)(N − 1) + K (N − 1) / N
    - LIP, eq. (8): C_l = M (N − 1) / N + K (N − 1)
    - FUSE, eq. (9): first layer M (N − 1), second layer K (N − 1). If `reused` is True, M − M / N replaces M.
    """
    M, K = layer.M, layer.K
    inputs = (N * M - reused * M) * (N - 1)
    return {"o": inputs + K * (N - 1), "i": M * (N - 1) + N * K * (N - 1), "f": inputs, "s": N * K * (N - 1)}[scheme]


def solve_ilp(
    layers: Sequence[IlpLayer], N: int, reuse: bool = False, lip: bool = True, fuse: bool = True
) -> IlpSolution:
    """Return the schemes (LOP, LIP or FUSE) of all layers with which the fewest elements are sent.

    CP-SAT solves the paper's integer linear program (ILP), eq. (10) to (13), or finds a good solution within
    MAX_SOLVER_S.

    Args:
        layers: Layers of the ILP, in network order.
        N: Number of devices.
        reuse: True to subtract inputs that devices already have in FUSE too, and not only in LOP.
        lip: True to allow LIP for layers that are not fused.
        fuse: True to allow fused pairs.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    x: list[dict[PartitionScheme, Any]] = [
        {scheme: model.new_bool_var(f"{scheme}{at}") for scheme in ("o", "i", "f", "s")} for at in range(len(layers))
    ]
    terms: list[Any] = []
    seconds = {layer.previous: at for at, layer in enumerate(layers) if layer.previous is not None and layer.can_fuse}
    for at, layer in enumerate(layers):
        # Eq. (11): each layer has exactly one scheme.
        model.add_exactly_one(x[at].values())
        if not lip:
            model.add(x[at]["i"] == 0)
        if at in seconds and fuse:
            # Eq. (12): both layers of a pair are fused, or neither.
            model.add(x[seconds[at]]["s"] == x[at]["f"])
        else:
            # Eq. (13): a layer without a next layer to fuse with is not the first of a fused pair.
            model.add(x[at]["f"] == 0)
        if at not in seconds.values() or not fuse:
            model.add(x[at]["s"] == 0)
        terms += [scaled_cost(layer, scheme, False, N) * variable for scheme, variable in x[at].items()]
        for scheme in ("o", "f") if reuse else ("o",):
            saved = scaled_cost(layer, scheme, False, N) - scaled_cost(layer, scheme, True, N)
            if layer.previous is not None:
                both = model.new_bool_var(f"o{layer.previous}{scheme}{at}")
                model.add_implication(both, x[layer.previous]["o"])
                model.add_implication(both, x[at][scheme])
                terms.append(-saved * both)
            elif layer.has_split_inputs:
                terms.append(-saved * x[at][scheme])
    model.minimize(sum(terms))
    return _run_ilp(model, x, N)


def _run_ilp(model: Any, x: Sequence[Mapping[PartitionScheme, Any]], N: int) -> IlpSolution:
    from ortools.sat.python import cp_model

    from dicompiler_strategies.joint.cpsat_solver import run_solver

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = MAX_SOLVER_S
    status, interrupted = run_solver(solver, model)
    if interrupted:
        raise KeyboardInterrupt
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise DicompilerError("stahl: the solver found no solution within its limit: use strategy 'dp'")
    schemes = tuple(next(s for s, variable in row.items() if solver.boolean_value(variable)) for row in x)
    return IlpSolution(schemes, round(solver.objective_value) / N, status == cp_model.OPTIMAL)


@dataclass(frozen=True)
class Stahl(Strategy):
    """Method of Stahl et al.: each layer in LOP or LIP, or two layers fused (FUSE), with the least communication.

        conv5 LOP · conv6 LOP → conv7 LIP (FUSE) · fc8 LOP

    LOP splits the output channels of a layer, and LIP its input channels. FUSE is LOP, then LIP of the next layer.
    Channels are split equally, even if devices have different speeds.

    For every objective, an integer linear program (ILP) minimises the communication as the paper counts it: every
    device sends all its outputs and receives all its inputs. The plans here send less, because they send only missing
    elements.

    Layers that the paper does not mention are split by channels if their inputs are split by channels. Otherwise they
    are computed whole on the fastest device.
    """

    name: ClassVar[str] = "stahl"
    devices: int = field(
        default=0, metadata={"help": "number N of devices to use, the fastest ones; 0: all that compute"}
    )
    reuse: bool = field(default=False, metadata={"help": "do not count inputs that devices already have, in FUSE too"})
    lip: bool = field(default=True, metadata={"help": "allow LIP for layers that are not fused"})
    fuse: bool = field(default=True, metadata={"help": "allow fused pairs"})

    def __post_init__(self) -> None:
        if self.devices < 0:
            raise ValueError("devices must be positive, or 0 for all devices that compute")

    def plan(self, problem: Problem) -> Plan:
        """Return the plan with the least communication as the paper counts it.

        Raises:
            DicompilerError: `devices` is larger than the number of devices that compute.
        """
        computing = problem.platform.computing_devices
        if self.devices > len(computing):
            raise DicompilerError(
                f"stahl: devices={self.devices}, but only {len(computing)} devices of platform "
                f"{problem.platform.name!r} compute: use 0 (all of them) to {len(computing)}"
            )
        fastest = sorted(computing, key=lambda device: -device.rate)[: self.devices or len(computing)]
        names = tuple(device.name for device in computing if device in fastest)
        sizes = build_ilp_layers(problem.layers)
        schemes: tuple[PartitionScheme, ...] = tuple("o" for _ in sizes)
        if len(names) > 1 and sizes:
            schemes = solve_ilp(sizes, len(names), self.reuse, self.lip, self.fuse).schemes
        chosen = {size.name: scheme for size, scheme in zip(sizes, schemes, strict=True)}
        return problem.build_plan(network_parts(problem.layers, chosen, names, fastest[0].name))


def build_ilp_layers(layers: LayerGraph) -> tuple[IlpLayer, ...]:
    """Return the layers of the integer linear program (ILP): those with input and output channels that can be split.

    The layer l − 1 of a layer computes its input, directly or through pools and similar layers. Both can be fused if no
    other layer reads a tensor in between, and all layers in between can be split by channels.
    """
    places: dict[str, int] = {}
    sizes: list[IlpLayer] = []
    for layer in layers.layers:
        length = reduction_length(layers, layer)
        if length is not None and find_cuttable_axis(layers, layer, "channel") is not None:
            before, fusable = _previous_layer(layers, layer, length, places)
            input_shape = layers.tensors[layer.inputs[0]].shape or ()
            kernels = [layers.tensors[name] for name in layer.nodes[layer.anchor].inputs if name]
            weights = max(
                (volume(full_region(tensor.shape or ())) for tensor in kernels if tensor.is_constant), default=0
            )
            outputs = volume(full_region(output_shape(layers, layer)))
            places[layer.name] = len(sizes)
            sizes.append(IlpLayer(layer.name, volume(full_region(input_shape)), outputs, weights, before, fusable))
    return tuple(sizes)


def _previous_layer(
    layers: LayerGraph, layer: Layer, length: int, places: Mapping[str, int]
) -> tuple[int | None, bool]:
    """Return the position of the ILP layer that computes the input of `layer`, or None, and True if both can be fused.

    Args:
        layers: The layer graph.
        layer: The layer.
        length: Number of its input channels.
        places: Positions of the layers of the integer linear program (ILP) so far, by name.
    """
    at = layers.producer.get(layer.inputs[0])
    fusable = at is not None and _has_output_channels(layers, at, length)
    name = layer.name
    while at is not None:
        fusable = (
            fusable
            and is_read_only_within(layers, at, (name,))
            and find_cuttable_axis(layers, at, "channel") is not None
        )
        if at.name in places:
            return places[at.name], fusable
        fusable = fusable and len(at.inputs) == 1
        name = at.name
        at = layers.producer.get(at.inputs[0]) if at.inputs and not at.whole_reason else None
    return None, False


def _has_output_channels(layers: LayerGraph, before: Layer, length: int) -> bool:
    """Return True if layer `before` has exactly `length` output channels.

    `length` is the number of input channels that the next layer sums over.
    """
    axis = find_cuttable_axis(layers, before, "channel")
    return axis is not None and output_shape(layers, before)[axis] == length


def network_parts(
    layers: LayerGraph, schemes: Mapping[str, PartitionScheme], names: Sequence[str], leader: str
) -> dict[str, tuple[Part, ...]]:
    """Return the parts of each layer, by layer name.

    Args:
        layers: The layer graph.
        schemes: Scheme of each layer of the integer linear program, by layer name.
        names: Devices over which layers are split.
        leader: Device that adds up partial sums, and computes the layers that are not split.
    """
    result: dict[str, tuple[Part, ...]] = {}
    cut: set[str] = set()
    equal = (1.0,) * len(names)
    for layer in layers.layers:
        scheme = schemes.get(layer.name)
        if scheme in ("i", "s"):
            merged = zip(names, _input_ranges(layers, layer, scheme == "s", equal), strict=True)
            partial = [Part(name, None, reduce) for name, reduce in merged if reduce[0] < reduce[1]]
            result[layer.name] = (*partial, Part(leader))
        elif scheme is not None or _is_cut_by_channels(layers, layer, cut):
            result[layer.name] = tile_layer(layers, layer, "channel", equal, names)
            cut.add(layer.name)
        else:
            result[layer.name] = (Part(leader),)
    return result


def _is_cut_by_channels(layers: LayerGraph, layer: Layer, cut: set[str]) -> bool:
    """Return True if a layer outside the integer linear program (ILP) is split by channels.

    These are grouped convolutions, and layers with an input that is split by channels. `cut` has the names of the
    layers that are split by channels so far.
    """
    producers = [layers.producer[name].name for name in layer.inputs if name in layers.producer]
    heavy = layer.nodes[layer.anchor].op in ("Conv", "ConvTranspose")
    return find_cuttable_axis(layers, layer, "channel") is not None and (
        heavy or any(name in cut for name in producers)
    )


def _input_ranges(layers: LayerGraph, layer: Layer, fused: bool, equal: Sequence[float]) -> Sequence[Interval]:
    """Return the range of input channels that each device sums over.

    Args:
        layers: The layer graph.
        layer: The layer.
        fused: True if the layer is the second of a fused pair. Its ranges are then the channels that each device has
            computed in the first layer.
        equal: The weight of each device; all weights are equal.
    """
    length = reduction_length(layers, layer)
    assert length is not None
    if not fused:
        return split_proportionally(length, equal)
    before = layers.producer[layer.inputs[0]]
    axis = find_cuttable_axis(layers, before, "channel")
    assert axis is not None
    return split_axis(layers, before, axis, equal)
