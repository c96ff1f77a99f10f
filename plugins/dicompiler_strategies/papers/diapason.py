"""The strategy `diapason`: DIAPASON (DATE 2024) as printed, equations (1) to (16) with gradients in closed form.

    OpportunitySpace + W_l, W_dev → loss L, ∂L/∂W_l and ∂L/∂W_dev, for R restarts at once

A partition opportunity (PO) is one way to split a layer into sublayers, each on one device. Gradient descent changes
the probabilities of opportunities and devices so that the expected cost (the loss L) falls. At the end, the most
probable ones are chosen. The probabilities are the softmax of two kinds of logits:

- W_l, a vector for each layer, has one logit for each opportunity.
- W_dev, a matrix for each group of opportunities, has one logit for each sublayer and device.

Some equations need an interpretation:

- Eq. (13) and (15), the costs of the network's inputs and outputs, have W_l instead of softmax(W_l). The softmax is
  meant, because the loss would otherwise have no lower bound.
- Eq. (4) compares the device probabilities of two sublayers by a function sim. It is the Euclidean distance divided by
  √2, so that it is at most 1.
- The loss is in ms or mJ.
- The overlap in eq. (9) to (14) is the number of bytes that one sublayer needs of another sublayer's output. No element
  is counted twice.

The loss adds up all costs, although some layers and transfers run at once. A cost model must evaluate the chosen plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import Plan, Problem, Strategy
from dicompiler.plugin_api.search import missing_memory
from dicompiler_strategies.gradient.objective_tables import check_objective
from dicompiler_strategies.gradient.strategy import Initialisation, Partition, check_descent_options, memory_error
from dicompiler_strategies.papers.partition_opportunities import OpportunitySpace, build_space
from dicompiler_strategies.tables.choice_footprints import Floats

Picks = NDArray[np.intp]


@dataclass(frozen=True)
class Diapason(Strategy):
    """The algorithm of the DIAPASON paper: gradient descent over whole layers, slices and fused slices.

        conv1: whole (0.2) | 4 slices (0.3) | fused with conv2 (0.5)      ⇒  conv1: fused with conv2

    The objective is latency or energy. The strategy `gradient` uses the same relaxation with more kinds of splits.
    """

    name: ClassVar[str] = "diapason"
    partition: Partition = field(
        default="equal",
        metadata={"help": "height of each device's slice: equal, proportional to its rate, or both kinds (all)"},
    )
    fusion_limit: int = field(
        default=4, metadata={"help": "largest number of later layers that a layer is fused with (0: no fusion)"}
    )
    initialisation: Initialisation = field(
        default="heuristics", metadata={"help": "begin with each sublayer on its own device (heuristics), or at random"}
    )
    learning_rate: float = field(default=0.8, metadata={"help": "learning rate"})
    iterations: int = field(default=20, metadata={"help": "number of steps of the gradient descent"})
    restarts: int = field(default=1, metadata={"help": "number of runs of the descent from different initial values"})
    seed: int = field(default=0, metadata={"help": "seed of the random numbers"})

    def __post_init__(self) -> None:
        check_descent_options(self, self.learning_rate)

    def plan(self, problem: Problem) -> Plan:
        """Return the plan of the most probable splits and devices after gradient descent.

        Of several restarts, the plan with the best estimated objective is returned.

        Raises:
            UsageError: The objective is neither latency nor energy.
            DicompilerError: No restart has a plan that fits into the hosts' memory, which the method ignores.
        """
        check_objective(self.name, problem.objective)
        energy = problem.objective == "energy"
        kinds = ("equal", "proportional") if self.partition == "all" else (self.partition,)
        space = build_space(problem, kinds, self.fusion_limit, energy)
        W = initial_weights(space, self.restarts, self.seed, self.initialisation == "heuristics")
        W = gradient_descent(space, W, self.learning_rate, self.iterations, penalty=not energy)
        names = [layer.name for layer in problem.layers.layers]
        decoded = dict.fromkeys(decode_weights(space, W, restart) for restart in range(self.restarts))
        plans = [
            problem.build_plan({name: space.sublayer_parts(i, *pick) for i, (name, pick) in enumerate(pairs)})
            for pairs in (zip(names, picks, strict=True) for picks in decoded)
        ]
        rated = [(plan, problem.estimate(plan)) for plan in plans]
        fitting = [(plan, metrics) for plan, metrics in rated if not missing_memory(problem, plan)]
        if not fitting:
            note = ", because the paper's method does not consider memory"
            raise memory_error(self.name, problem, rated[0][0], note)
        return min(fitting, key=lambda entry: entry[1].objective_value(problem.objective))[0]


@dataclass(frozen=True, eq=False)
class RelaxationWeights:
    """The logits that gradient descent changes. The values of all R restarts are stored together.

    Attributes:
        W_l: For each layer, the logits of its P partition opportunities (ways to split it), shape (R, P).
        W_dev: Logits of the device of each sublayer (piece of a layer on one device), shape (R, groups, S sublayers, D
            devices). The opportunities of a group have the same logits.
    """

    W_l: tuple[Floats, ...]
    W_dev: Floats


@dataclass(frozen=True, eq=False)
class RelaxedLoss:
    """The loss L of each of R restarts in ms or mJ, shape (R,), and the gradient of L by the logits."""

    L: Floats
    gradient: RelaxationWeights


def softmax(W: Floats) -> Floats:
    e: Floats = np.exp(W - W.max(axis=-1, keepdims=True))
    e /= e.sum(axis=-1, keepdims=True)
    return e


def softmax_gradient(p: Floats, g: Floats) -> Floats:
    """Return ∂L/∂W = p · (g − Σ p g), for p = softmax(W) over the last axis and g = ∂L/∂p."""
    centred: Floats = p * (g - (p * g).sum(axis=-1, keepdims=True))
    return centred


def initial_weights(space: OpportunitySpace, restarts: int, seed: int, heuristics: bool) -> RelaxationWeights:
    """Return the initial logits: random numbers in [0, 1], or the paper's heuristics.

    With `heuristics`, W_dev is 1 for sublayer s (piece of a layer) on device s and 0 elsewhere, and W_l is 0 in the
    first restart.
    """
    random = np.random.default_rng(seed)
    W_l = tuple(random.uniform(0, 1, (restarts, len(pos))) for pos in space.opportunities)
    D = len(space.devices)
    W_dev = random.uniform(0, 1, (restarts, len(space.group_sizes), D, D))
    if heuristics:
        # The paper does not define the initial W_l. If it is random, results for 7 and more devices depend on the seed.
        for w in W_l:
            w[0] = 0.0
        W_dev = np.repeat(np.broadcast_to(np.eye(D), W_dev.shape[1:])[None], restarts, axis=0)
    return RelaxationWeights(W_l, W_dev)


def relaxed_loss(space: OpportunitySpace, W: RelaxationWeights, penalty: bool = True) -> RelaxedLoss:
    """Return the expected cost L of the network in ms or mJ for each restart, with its gradient by the logits W.

    By eq. (16) of the DIAPASON paper, L = L_mov_in + Σ_i (L_i + Σ_j L_mov_{i,j}) + L_mov_out. L_i is the cost of layer
    i, L_mov_{i,j} of sending its output to layer j, and L_mov_in and L_mov_out of sending the network's inputs and
    outputs.

    Args:
        space: The opportunities (ways to split a layer).
        W: The logits.
        penalty: True (for latency) to subtract the superposition penalty as in eq. (1), False (for energy) as in eq.
            (2).
    """
    # Probabilities of devices, shape (R, G, S, D): restarts, groups of opportunities, sublayers, devices.
    sigma = softmax(W.W_dev)
    p = [softmax(W_l) for W_l in W.W_l]
    total = np.zeros(len(sigma))
    g_sigma = np.zeros_like(sigma)
    g_p = [np.zeros_like(p_l) for p_l in p]
    for i, group in enumerate(space.group):
        # The same for the opportunities of layer i, shape (R, P, S, D).
        s = sigma[:, group]
        L_part, g_part = partition_loss(space, i, s, penalty)
        # Eq. (7), the layer's expected cost: L_l = softmax(W_l) · L_part.
        total += (p[i] * L_part).sum(axis=1)
        g_p[i] += L_part
        _add_to_groups(g_sigma, group, p[i][:, :, None, None] * g_part)
        for moved, byte in ((space.inputs, space.B_in), (space.outputs, space.B_out)):
            if i in moved:
                # Eq. (12) or (14), the cost of sending the network's inputs or outputs for opportunity n (a way to
                # split the layer): L^n = Σ_j softmax(W_dev^j) · (overlap_j · B). Eq. (13) or (15), the layer's cost:
                # softmax(W_l) · L.
                L_end = s @ byte
                L_comb = (L_end * moved[i]).sum(axis=2)
                total += (p[i] * L_comb).sum(axis=1)
                g_p[i] += L_comb
                _add_to_groups(g_sigma, group, (p[i][:, :, None] * moved[i])[..., None] * byte)
    for (a, b), overlap in space.overlap.items():
        s_a, s_b = sigma[:, space.group[a]], sigma[:, space.group[b]]
        L_mov, pushed = movement_loss(space, overlap, s_a, s_b)
        # Eq. (11), the expected cost of sending data from layer a to layer b, over their opportunities m and n:
        # L_mov_{a,b} = Σ_m Σ_n softmax(W_l^a)_m · softmax(W_l^b)_n · L_mov^{m,n}.
        total += np.einsum("rm,rmn,rn->r", p[a], L_mov, p[b])
        g_p[a] += np.einsum("rmn,rn->rm", L_mov, p[b])
        g_p[b] += np.einsum("rmn,rm->rn", L_mov, p[a])
        weighted = overlap[None] * p[a][:, :, None, None, None] * p[b][:, None, None, :, None]
        _add_to_groups(g_sigma, space.group[a], _contract_product(weighted, s_b @ space.B.T))
        _add_to_groups(g_sigma, space.group[b], _contract_product(weighted.transpose(0, 3, 4, 1, 2), pushed))
    W_l = tuple(softmax_gradient(p_l, g) for p_l, g in zip(p, g_p, strict=True))
    return RelaxedLoss(total, RelaxationWeights(W_l, softmax_gradient(sigma, g_sigma)))


def movement_loss(space: OpportunitySpace, overlap: Floats, s_m: Floats, s_n: Floats) -> tuple[Floats, Floats]:
    """Return the expected cost of sending data between two layers, for each pair of their opportunities m and n.

    An opportunity is one of P ways to split a layer into S sublayers, each on one of D devices. P' and S' belong to the
    second layer, and R is the number of restarts. By eq. (8) to (10) of the DIAPASON paper, L_mov^{m,n} = Σ_{i,j}
    overlap_{i,j} · softmax(W_dev_m^i)ᵀ B softmax(W_dev_n^j).

    Args:
        space: The opportunities, with the cost B of a byte between each pair of devices.
        overlap: The bytes that sublayer j needs of sublayer i, shape (P, S, P', S').
        s_m: Probabilities softmax(W_dev) of the devices of the sublayers i, shape (R, P, S, D).
        s_n: Probabilities softmax(W_dev) of the devices of the sublayers j, shape (R, P', S', D).

    Returns:
        The costs L_mov^{m,n}, shape (R, P, P'), and the product s_m B, shape (R, P, S, D), which the gradient needs.
    """
    pushed = s_m @ space.B
    return np.einsum("rmid,rnjd,minj->rmn", pushed, s_n, overlap, optimize=True), pushed


def partition_loss(space: OpportunitySpace, i: int, sigma: Floats, penalty: bool) -> tuple[Floats, Floats]:
    """Return the expected cost L_part of layer i, shape (R, P), and its gradient by `sigma`, shape (R, P, S, D).

    The cost of sublayer j is L_sub^j = softmax(W_dev^j) · L_dev^j by eq. (3) of the DIAPASON paper. Then L_part = Σ_j
    L_sub^j − L_pen by eq. (1), with the superposition penalty L_pen, or without it by eq. (2).

    Args:
        space: The opportunities (P ways to split a layer into S sublayers) and D devices.
        i: Position of the layer.
        sigma: Probabilities softmax(W_dev) of each sublayer's device in R restarts, shape (R, P, S, D).
        penalty: True (for latency) to subtract L_pen.
    """
    L_dev, real = space.cost[i], space.has_sublayer[i]
    L_sub = (sigma * L_dev).sum(axis=3)
    g = np.broadcast_to(L_dev, sigma.shape).copy()
    if not penalty:
        return L_sub.sum(axis=2), g
    L_pen, g_sub, g_X = superposition_penalty(sigma, L_sub, real)
    g -= g_sub[..., None] * L_dev
    both = g_X + g_X.swapaxes(2, 3)
    g -= both.sum(axis=3)[..., None] * sigma - both @ sigma
    return L_sub.sum(axis=2) - L_pen, g


def superposition_penalty(sigma: Floats, L_sub: Floats, real: NDArray[np.bool_]) -> tuple[Floats, Floats, Floats]:
    """Return the superposition penalty L_pen: the time that sublayers save because they run at once.

    X_ij is the distance between the device probabilities a and b of sublayers i and j (pieces of a layer). V_ij is the
    time for which both run at once. The minimum is over j > i. Equations of the DIAPASON paper:

    - eq. (4): X_ij = sim[a, b] = ‖a − b‖ / √2
    - eq. (5): V_ij = X_ij · min(L_sub_i, L_sub_j)
    - eq. (6): L_pen = Σ_i min_j V_ij

    Args:
        sigma: Probabilities softmax(W_dev) of each sublayer's device, shape (R, P, S, D), for R restarts, P ways to
            split the layer, S sublayers and D devices.
        L_sub: Expected cost of each sublayer, shape (R, P, S).
        real: True for the sublayers that exist, shape (P, S).

    Returns:
        L_pen, shape (R, P); ∂L_pen/∂L_sub, shape (R, P, S); and (∂L_pen/∂X_ij) / (2 X_ij), shape (R, P, S, S). The last
        one times a − b is ∂L_pen/∂a, because ∂X_ij/∂a = (a − b) / (2 X_ij).
    """
    S = sigma.shape[2]
    # Pairs (i, j) of existing sublayers with j > i, shape (P, S, S).
    later = np.triu(np.ones((S, S), bool), 1) & real[:, :, None] & real[:, None, :]
    squares = (sigma**2).sum(axis=3)
    distance = squares[..., :, None] + squares[..., None, :] - 2 * sigma @ sigma.swapaxes(2, 3)
    X = np.sqrt(np.maximum(distance, 0.0) / 2)
    first, second = L_sub[..., :, None], L_sub[..., None, :]
    low = np.minimum(first, second)
    V = np.where(later, X * low, np.inf)
    least = (np.arange(S) == V.argmin(axis=3)[..., None]) & later
    L_pen = np.where(least, V, 0.0).sum(axis=(2, 3))
    taken = X * least
    g_sub = (taken * (first <= second)).sum(axis=3) + (taken * (first > second)).sum(axis=2)
    g_X = np.divide(low * least, 2 * X, out=np.zeros_like(X), where=X > 1e-9)
    return L_pen, g_sub, g_X


def _contract_product(weighted: Floats, by: Floats) -> Floats:
    """Return Σ_{n,j} weighted[R, m, i, n, j] · by[R, n, j, D], shape (R, m, i, D)."""
    R, P, S = weighted.shape[:3]
    flat = weighted.reshape(R, P * S, -1) @ by.reshape(R, -1, by.shape[3])
    return flat.reshape(R, P, S, -1)


def _add_to_groups(g_sigma: Floats, group: NDArray[np.int64], g: Floats) -> None:
    """Add the gradients of a layer's opportunities to the gradients of their groups, in place.

    The opportunities (ways to split a layer) of a group have the same device logits W_dev.

    Args:
        g_sigma: Gradient by the device probabilities of each group, shape (R, groups, S, D). It is changed.
        group: Number of the group of each opportunity, shape (P,).
        g: Gradient by the device probabilities of each opportunity, shape (R, P, S, D).
    """
    for place, number in enumerate(group):
        g_sigma[:, number] += g[:, place]


def gradient_descent(
    space: OpportunitySpace, W: RelaxationWeights, rate: float, iterations: int, penalty: bool = True
) -> RelaxationWeights:
    """Return the logits W after `iterations` steps W ← W − rate · ∂L/∂W."""
    for _ in range(iterations):
        g = relaxed_loss(space, W, penalty).gradient
        W_l = tuple(w - rate * step for w, step in zip(W.W_l, g.W_l, strict=True))
        W = RelaxationWeights(W_l, W.W_dev - rate * g.W_dev)
    return W


def decode_weights(
    space: OpportunitySpace, W: RelaxationWeights, restart: int
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return, for each layer, the most probable opportunity (way to split it) and devices of its sublayers.

    An opportunity is given as its number, and a device as its index in `space.devices`.
    """
    chosen = [int(w[restart].argmax()) for w in W.W_l]
    places: Picks = W.W_dev[restart].argmax(axis=2)
    return tuple(
        (pick, tuple(int(place) for place in places[group[pick]]))
        for pick, group in zip(chosen, space.group, strict=True)
    )
