"""The relaxation over tables: each layer's choice becomes a row of probabilities, and those go downhill.

Landscape + Descent → selections (restarts, layers). Many restarts are one array: W (restarts, Σ choices).

The loss is DIAPASON's equation 16 with one W_l for each layer, whose opportunities are the tables' choices: a choice
names its devices, so that no W_dev is left (nor superposition to punish) and L_l and L_mov are exact:
L = Σ_a p_a · node_a + Σ_(a,b) p_a · edge_ab · p_b with p = softmax(W).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dicompiler.plugin_api.search import WorkBudget
from dicompiler_strategies.gradient.objective_tables import ObjectiveTables, Selections
from dicompiler_strategies.tables.choice_footprints import Floats

FIRST_TEMPERATURE, LAST_TEMPERATURE = 1.0, 0.2  # the softmax's temperature at the first and the last iteration
MULTIPLICATIONS_PER_READ = 10  # multiplications of a product in the time of an element that is read
_MAX_SERIAL_MULTIPLICATIONS = (
    1 << 18
)  # multiplications of a product that linear algebra libraries do not spread over threads


@dataclass(frozen=True)
class DescentSettings:
    """How to go downhill. rate: of learning, in units of the normalised loss; bias: what a restart's own family of
    choices has above the others at the start, noise: the most that is drawn on top; memory: what an excess of 1 over
    a host's limit adds to the normalised loss of a layer."""

    learning_rate: float = 0.4
    iterations: int = 60
    restarts: int = 64
    seed: int = 0
    is_biased: bool = True
    bias: float = 2.0
    noise: float = 1.0
    memory_penalty: float = 10.0


@dataclass(frozen=True, eq=False)
class FlatTables:
    """A landscape whose choices are laid out in one row of n columns, a segment of it for each layer."""

    tables: ObjectiveTables

    @cached_property
    def first_columns(self) -> Selections:
        """The first column of each layer (layers,)."""
        return np.cumsum([0, *(len(costs) for costs in self.tables.node)])[:-1].astype(np.intp)

    @cached_property
    def column_layers(self) -> Selections:
        """The layer of each column (n,)."""
        return np.repeat(np.arange(len(self.tables.node)), [len(costs) for costs in self.tables.node])

    @cached_property
    def layer_columns(self) -> tuple[slice, ...]:
        """The columns of each layer."""
        return tuple(
            slice(int(start), int(start) + len(costs))
            for start, costs in zip(self.first_columns, self.tables.node, strict=True)
        )

    @cached_property
    def _node(self) -> Floats:
        return np.concatenate(self.tables.node)

    @cached_property
    def _weights(self) -> Floats:
        return np.concatenate(self.tables.weights)

    def softmax(self, W: Floats, temperature: float = 1.0) -> Floats:
        """p (restarts, n): W (restarts, n) as probabilities within each layer."""
        Z = W / temperature
        e: Floats = np.exp(Z - np.maximum.reduceat(Z, self.first_columns, axis=1)[:, self.column_layers])
        e /= np.add.reduceat(e, self.first_columns, axis=1)[:, self.column_layers]
        return e

    def loss_gradient(self, p: Floats, memory: float = 0.0) -> Floats:
        """∂L/∂p (restarts, n): node_a + Σ_b edge_ab p_b + Σ_z p_z edge_za, and the weights of the hosts that are too
        full."""
        g = np.repeat(self._node[None], len(p), axis=0)
        for (a, b), table in self.tables.edge.items():
            g[:, self.layer_columns[a]] += multiply_in_blocks(p[:, self.layer_columns[b]], table.T)
            g[:, self.layer_columns[b]] += multiply_in_blocks(p[:, self.layer_columns[a]], table)
        if memory and len(self.tables.limits):
            full = (multiply_in_blocks(p, self._weights) > self.tables.limits) / np.maximum(self.tables.limits, 1.0)
            g += memory * multiply_in_blocks(full, self._weights.T)
        return g

    def centre_gradient(self, p: Floats, g: Floats) -> Floats:
        """g less its mean under p in each layer: ∂L/∂W is p times this (at temperature 1)."""
        centred: Floats = g - np.add.reduceat(p * g, self.first_columns, axis=1)[:, self.column_layers]
        return centred

    def likeliest_choices(self, p: Floats) -> Selections:
        """The likeliest choice of each layer, of equals the first: (restarts, layers)."""
        return np.stack([p[:, span].argmax(axis=1) for span in self.layer_columns], axis=1)


def multiply_in_blocks(p: Floats, table: Floats) -> Floats:
    """p @ table, some rows at a time: products of this size would be spread over threads, which costs many times what
    it gains while other processes want the cores, and adds up in another order."""
    step = max(1, _MAX_SERIAL_MULTIPLICATIONS // table.size)
    return np.concatenate([p[start : start + step] @ table for start in range(0, len(p), step)])


class DescentInterrupted(KeyboardInterrupt):
    """Ctrl-C, with the selections (restarts, layers) that there are by then."""

    def __init__(self, selections: Selections) -> None:
        super().__init__()
        self.selections = selections


def minimise_relaxation(land: ObjectiveTables, how: DescentSettings, allowance: WorkBudget | None = None) -> Selections:
    """Selections (restarts, layers), decoded from where the restarts came to by the last step or the allowance's end.

    The step is natural: ∂L/∂W without its factor p, which is the gradient in the softmax's own (Fisher) metric. With
    the factor a choice that has become unlikely never comes back, which is what plain descent is stuck on. Ctrl-C
    raises Interrupted.
    """
    flat = FlatTables(land)
    W = initial_logits(land, flat, how)
    memory, allowance = how.memory_penalty * land.loss_scale, allowance or WorkBudget()
    multiplied = 2 * how.restarts * sum(table.size for table in land.edge.values()) / MULTIPLICATIONS_PER_READ
    try:
        for step in range(how.iterations):
            if not allowance.try_steps(multiplied + how.restarts * len(flat.column_layers), 4 * len(land.edge)):
                break
            temperature = FIRST_TEMPERATURE * (LAST_TEMPERATURE / FIRST_TEMPERATURE) ** (
                step / max(1, how.iterations - 1)
            )
            p = flat.softmax(W, temperature)
            W -= how.learning_rate / land.loss_scale * flat.centre_gradient(p, flat.loss_gradient(p, memory))
    except KeyboardInterrupt:
        raise DescentInterrupted(flat.likeliest_choices(flat.softmax(W))) from None
    return flat.likeliest_choices(flat.softmax(W))


def initial_logits(land: ObjectiveTables, flat: FlatTables, how: DescentSettings) -> Floats:
    """W (restarts, n) to begin with: noise, and a bias for one family of choices in each restart, the family that is
    best alone first; after the last family the first again, with noise (there is none in the first round)."""
    random = np.random.default_rng(how.seed)
    W = random.uniform(0.0, how.noise, (how.restarts, len(flat.column_layers)))
    if how.is_biased:
        families = np.concatenate(land.families)
        order = families_by_value(land)
        favoured = np.resize(order, how.restarts)
        W[: len(order)] = 0.0
        W += how.bias * (families[None] == favoured[:, None])
    return W


def families_by_value(land: ObjectiveTables) -> Selections:
    """The families in the order of the value of a selection that takes each of them wherever there is a choice of it
    (without extra rows) and the cheapest choice elsewhere."""
    numbers: Sequence[int] = sorted({int(number) for families in land.families for number in families})
    columns = []
    for node, families in zip(land.node, land.families, strict=True):
        there = families[None] == np.array(numbers)[:, None]
        columns.append(np.where(there.any(axis=1), there.argmax(axis=1), node.argmin()))
    values = land.values(np.stack(columns, axis=1))
    return np.array(numbers)[np.argsort(values, kind="stable")]
