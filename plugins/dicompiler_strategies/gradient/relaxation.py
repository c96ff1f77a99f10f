"""Continuous relaxation: gradient descent on the probabilities of each layer's choices.

    ObjectiveTables + DescentSettings → selections, shape (restarts, layers)

A choice is one way to split a layer. Layer a has the costs node_a of its choices, and their logits W_a. Connected
layers a and b have the costs edge_ab of pairs of choices. With the probabilities p_a = softmax(W_a), the loss is the
expected cost

    L = Σ_a p_a · node_a + Σ_(a,b) p_aᵀ · edge_ab · p_b

This is eq. (16) of the DIAPASON paper without its logits of devices (W_dev) and its superposition penalty: a choice
also fixes the devices, and its cost accounts for devices that compute at the same time. All restarts are computed
together, in an array W of shape (restarts, n) for the n choices of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dicompiler.plugin_api.search import WorkBudget
from dicompiler_strategies.gradient.objective_tables import ObjectiveTables, Selections
from dicompiler_strategies.tables.choice_footprints import Floats

FIRST_TEMPERATURE, LAST_TEMPERATURE = 1.0, 0.2  # Temperature of the softmax in the first and last iteration.
MULTIPLICATIONS_PER_READ = 25  # This many multiplications of a matrix product take as long as reading an element.
# BLAS libraries use a single thread for matrix products with at most this number of multiplications.
_MAX_SERIAL_MULTIPLICATIONS = 1 << 18


@dataclass(frozen=True)
class DescentSettings:
    """Settings of the gradient descent on logits W of choices (ways to split a layer).

    A family has all choices with the same kind of split and the same number of devices.

    Attributes:
        learning_rate: Learning rate for the normalised loss (the loss divided by `ObjectiveTables.loss_scale`).
        iterations: Number of steps.
        restarts: Number of initial values of W, from which the descent runs independently.
        seed: Seed of the random numbers.
        is_biased: True to let each restart begin near a different family.
        bias: Number that is added to the initial W of this family.
        noise: Largest random number in the initial W.
        memory_penalty: Loss for exceeding a host's memory by 100 %, in units of the normalised loss of a layer.
    """

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
    """Objective tables as flat arrays. The n columns are the choices (ways to split a layer) of all layers."""

    tables: ObjectiveTables

    @cached_property
    def first_columns(self) -> Selections:
        """Column of the first choice (way to split it) of each layer, shape (layers,)."""
        return np.cumsum([0, *(len(costs) for costs in self.tables.node)])[:-1].astype(np.intp)

    @cached_property
    def column_layers(self) -> Selections:
        """Position of the layer of each of the n columns (choices of all layers), shape (n,)."""
        return np.repeat(np.arange(len(self.tables.node)), [len(costs) for costs in self.tables.node])

    @cached_property
    def layer_columns(self) -> tuple[slice, ...]:
        """Range of the columns with the choices (ways to split it) of each layer."""
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
        """Return the probabilities softmax(W / temperature) of each layer's choices, shape (restarts, n) like W."""
        Z = W / temperature
        e: Floats = np.exp(Z - np.maximum.reduceat(Z, self.first_columns, axis=1)[:, self.column_layers])
        e /= np.add.reduceat(e, self.first_columns, axis=1)[:, self.column_layers]
        return e

    def loss_gradient(self, p: Floats, memory: float = 0.0) -> Floats:
        """Return ∂L/∂p for the probabilities `p` of choices, both of shape (restarts, n).

        For the choices of layer a, ∂L/∂p_a = node_a + Σ_b edge_ab p_b + Σ_z p_z edge_za. The layers b read the output
        of layer a, and the layers z produce its inputs.

        Args:
            p: The probabilities.
            memory: Price of memory. On a host with too many weights, a byte of weights costs `memory` / (the limit).
        """
        g = np.repeat(self._node[None], len(p), axis=0)
        for (a, b), table in self.tables.edge.items():
            g[:, self.layer_columns[a]] += multiply_in_blocks(p[:, self.layer_columns[b]], table.T)
            g[:, self.layer_columns[b]] += multiply_in_blocks(p[:, self.layer_columns[a]], table)
        if memory and len(self.tables.limits):
            full = (multiply_in_blocks(p, self._weights) > self.tables.limits) / np.maximum(self.tables.limits, 1.0)
            g += memory * multiply_in_blocks(full, self._weights.T)
        return g

    def centre_gradient(self, p: Floats, g: Floats) -> Floats:
        """Return `g` minus its mean over each layer's choices, weighted with their probabilities `p`.

        If g is ∂L/∂p, p times the result is the gradient ∂L/∂W by the logits (for temperature 1).
        """
        centred: Floats = g - np.add.reduceat(p * g, self.first_columns, axis=1)[:, self.column_layers]
        return centred

    def likeliest_choices(self, p: Floats) -> Selections:
        """Return the most probable choice (way to split it) of each layer, shape (restarts, layers)."""
        return np.stack([p[:, span].argmax(axis=1) for span in self.layer_columns], axis=1)


def multiply_in_blocks(p: Floats, table: Floats) -> Floats:
    """Return the matrix product p @ table, computed a few rows at a time."""
    # Small blocks keep BLAS single-threaded. Threads are slow on busy cores, and change the last bits of the result.
    step = max(1, _MAX_SERIAL_MULTIPLICATIONS // table.size)
    return np.concatenate([p[start : start + step] @ table for start in range(0, len(p), step)])


class DescentInterrupted(KeyboardInterrupt):
    """Raised if Ctrl-C interrupts the descent.

    Attributes:
        selections: The most probable choice (way to split it) of each layer at that time, shape (restarts, layers).
    """

    def __init__(self, selections: Selections) -> None:
        super().__init__()
        self.selections = selections


def minimise_relaxation(
    tables: ObjectiveTables, settings: DescentSettings, budget: WorkBudget | None = None
) -> Selections:
    """Return the most probable choice (way to split it) of each layer after gradient descent, shape (restarts, layers).

    The descent on the expected cost L ends after the last step, or when the budget is used up.

    Raises:
        DescentInterrupted: Ctrl-C was pressed.
    """
    flat = FlatTables(tables)
    W = initial_logits(tables, flat, settings)
    memory, budget = settings.memory_penalty * tables.loss_scale, budget or WorkBudget()
    multiplied = 2 * settings.restarts * sum(table.size for table in tables.edge.values()) / MULTIPLICATIONS_PER_READ
    try:
        for step in range(settings.iterations):
            if not budget.try_steps(multiplied + settings.restarts * len(flat.column_layers), 4 * len(tables.edge)):
                break
            temperature = FIRST_TEMPERATURE * (LAST_TEMPERATURE / FIRST_TEMPERATURE) ** (
                step / max(1, settings.iterations - 1)
            )
            # This is the natural gradient: ∂L/∂W without its factor p. With this factor, a choice that has become
            # improbable would never return.
            p = flat.softmax(W, temperature)
            W -= settings.learning_rate / tables.loss_scale * flat.centre_gradient(p, flat.loss_gradient(p, memory))
    except KeyboardInterrupt:
        raise DescentInterrupted(flat.likeliest_choices(flat.softmax(W))) from None
    return flat.likeliest_choices(flat.softmax(W))


def initial_logits(tables: ObjectiveTables, flat: FlatTables, settings: DescentSettings) -> Floats:
    """Return the initial logits, shape (restarts, n): random noise, plus a bias for one family in each restart.

    A family has all choices with the same kind of split and number of devices. The restarts favour the families in the
    order of `families_by_value`, cyclically. The first restart with each family has no noise.
    """
    random = np.random.default_rng(settings.seed)
    W = random.uniform(0.0, settings.noise, (settings.restarts, len(flat.column_layers)))
    if settings.is_biased:
        families = np.concatenate(tables.families)
        order = families_by_value(tables)
        favoured = np.resize(order, settings.restarts)
        W[: len(order)] = 0.0
        W += settings.bias * (families[None] == favoured[:, None])
    return W


def families_by_value(tables: ObjectiveTables) -> Selections:
    """Return the numbers of all families of choices, the one with the cheapest plan first.

    A family has all choices with the same kind of split and number of devices, such as channels over 3 devices. Its
    plan uses it in every layer that can be split in this way.
    """
    numbers: Sequence[int] = sorted({int(number) for families in tables.families for number in families})
    columns = []
    for node, families in zip(tables.node, tables.families, strict=True):
        has_family = families[None] == np.array(numbers)[:, None]
        columns.append(np.where(has_family.any(axis=1), has_family.argmax(axis=1), node.argmin()))
    values = tables.values(np.stack(columns, axis=1))
    return np.array(numbers)[np.argsort(values, kind="stable")]
