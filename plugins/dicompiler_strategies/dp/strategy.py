"""The strategy `dp`: its options, the sets of devices (teams) that it tries, and the search under memory limits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np

from dicompiler.plugin_api import DicompilerError, Plan, Problem, Strategy, UsageError
from dicompiler.plugin_api.onnx import raw_nbytes
from dicompiler.plugin_api.search import DEFAULT_BUDGET_S, INTERRUPTED_NOTE, BudgetExceeded, WorkBudget, needed_memory
from dicompiler.plugin_api.utilities import format_bytes, format_needed_bytes
from dicompiler_strategies.dp.candidate_runs import CandidateRules, build_candidate_runs, run_parts
from dicompiler_strategies.dp.device_team import DeviceTeam, ProblemFacts
from dicompiler_strategies.dp.search import SUMMED_OBJECTIVES, RunPath, RunPricing, find_cheapest_path
from dicompiler_strategies.tables.choice_footprints import Floats

log = logging.getLogger("dicompiler")

# If memory is scarce, each byte of weights on a full host gets a price, which is added to the cost of a plan. At the
# first price, all weights of the network together cost _FIRST_PRICE_SHARE of the best plan's cost. Each further round
# multiplies the price by _PRICE_GROWTH.
_FIRST_PRICE_SHARE, _PRICE_GROWTH, _MAX_PRICE_ROUNDS = 0.1, 4.0, 12
# A block (a run of fused layers) has at most _TOTAL_BLOCK_LAYERS / (number of layers of the network) layers, within
# _BLOCK_LAYER_LIMITS, so that the search takes not much longer for large networks.
_BLOCK_LAYER_LIMITS, _TOTAL_BLOCK_LAYERS = (6, 32), 6000
_LARGE_NETWORK_LAYERS = 300


@dataclass(frozen=True)
class Dp(Strategy):
    """Dynamic program that divides the layers into blocks of fused height tiles, and splits other layers by channels.

        conv1 conv2 | conv3 conv4 conv5 | fc6 fc7

    It generalises MLS, the algorithm of the CoopAI paper, which the strategy `coopai` implements as published. Devices
    send nothing within a block. Each device computes its rows of the block's last layer, and the rows of the earlier
    layers that these rows need, including the halo. All other layers are split by channels or into partial sums, or
    computed on one or on each device.

    Times are predicted with the barrier model: a block begins when all devices have finished the block before. For a
    chain of layers, the plan is optimal over these choices. For a network with branches it may not be.
    """

    name: ClassVar[str] = "dp"
    method: Literal["mls", "sls"] = field(
        default="mls",
        metadata={
            "help": "mls (the full method), or sls: only one layer with weights in each block, and no partial sums"
        },
    )
    devices: int = field(default=0, metadata={"help": "number of devices to use, the fastest ones; 0: the best number"})
    shares: Literal["rate", "equal"] = field(
        default="rate",
        metadata={"help": "size of each device's part of a layer: in proportion to its speed (rate), or equal"},
    )
    max_block_layers: int = field(
        default=0,
        metadata={"help": "largest number of layers in a block; 0: 32, or fewer if the network has hundreds of layers"},
    )
    channels: bool = field(
        default=False,
        metadata={
            "help": "also split by channels those layers that can be split by rows (always done if memory is short)"
        },
    )
    budget: float = field(
        default=DEFAULT_BUDGET_S, metadata={"help": "limit of the search's work, in seconds of a reference computer"}
    )

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise ValueError(f"budget must be more than 0 s, not {self.budget:g}")
        if self.devices < 0:
            raise ValueError("devices must be positive, or 0 for the best number")
        if self.max_block_layers < 0:
            raise ValueError("max_block_layers must be positive, or 0 for a number that suits the network")

    def plan(self, problem: Problem) -> Plan:
        """Return the cheapest plan that satisfies the memory limits.

        Raises:
            UsageError: The objective is throughput or memory, which are not sums over layers.
            DicompilerError: `devices` is too large, or no plan was found that fits into memory.
        """
        return self.plan_within(problem, WorkBudget(self.budget))

    def plan_within(self, problem: Problem, budget: WorkBudget) -> Plan:
        if problem.objective not in SUMMED_OBJECTIVES:
            known = ", ".join(SUMMED_OBJECTIVES)
            raise UsageError(f"dp: objective {problem.objective!r} is not supported: use one of {known}")
        facts = ProblemFacts(problem)
        order = facts.devices_by_speed
        counts = device_counts(self.name, self.devices, problem)
        paths: list[RunPath] = []
        try:
            for k in counts:
                paths.append(self._search_team(facts, order[:k], budget, bool(paths)))
        except BudgetExceeded:
            log.info("dp: the budget is used up: %d of %d teams were tried", len(paths), len(counts))
        except KeyboardInterrupt:
            plan = _cheapest_that_fits(problem, paths)
            if plan is None:
                raise
            return replace(plan, note=INTERRUPTED_NOTE)
        best = min(paths, key=lambda path: path.cost)
        plan = _cheapest_that_fits(problem, paths) or self._plan_with_little_memory(facts, order, counts, best, budget)
        return replace(plan, note=plan.note or budget.note())

    def _build_team(self, facts: ProblemFacts, names: Sequence[str]) -> DeviceTeam:
        return DeviceTeam.build(facts, names, self.shares == "equal")

    def _candidate_rules(self, layers: int, channels: bool) -> CandidateRules:
        span = self.max_block_layers or max(
            _BLOCK_LAYER_LIMITS[0], min(_BLOCK_LAYER_LIMITS[1], _TOTAL_BLOCK_LAYERS // max(layers, 1))
        )
        return CandidateRules(self.method == "mls", span, channels)

    def _search_team(self, facts: ProblemFacts, names: Sequence[str], budget: WorkBudget, is_limited: bool) -> RunPath:
        """Return the cheapest way to compute all layers on the devices `names`.

        If `is_limited` is False, the search does not stop when the budget is used up, but its work is still counted.
        """
        team = self._build_team(facts, names)
        rules = self._candidate_rules(len(team.layers.layers), self.channels)
        team_budget = budget if is_limited else WorkBudget()
        path = find_cheapest_path(
            team, build_candidate_runs(team, rules, team_budget), RunPricing(facts.problem), team_budget
        )
        if not is_limited:
            budget.spend(team_budget.spent_s)
        return path

    def _plan_with_little_memory(
        self, facts: ProblemFacts, order: Sequence[str], counts: Sequence[int], best: RunPath, budget: WorkBudget
    ) -> Plan:
        """Return a plan for hosts with little memory.

        Every layer may be split by channels, because this splits its weights. A growing price for weights on the
        fullest hosts makes the search store fewer weights there.

        Args:
            facts: Facts about the problem.
            order: Names of the devices, the fastest first.
            counts: Numbers of devices to try.
            best: The cheapest solution without memory limits; its cost determines the first price.
            budget: The work that the search may do.
        """
        platform = facts.problem.platform
        by_memory = sorted(order, key=lambda name: -platform.host(platform.host_of[name]).memory)
        unit = (
            _FIRST_PRICE_SHARE * (best.cost or best.seconds or 1.0) / max(1.0, float(sum(facts.weight_bytes.values())))
        )
        fitting: list[tuple[float, int, Plan]] = []
        least = (np.inf, 0)
        teams = dict.fromkeys(tuple(ranking[:k]) for k in counts for ranking in (order, by_memory))
        try:
            for number, chosen in enumerate(teams):
                fitted, excess = self._fit_team(facts, chosen, unit, budget)
                least = min(least, excess)
                fitting.extend((cost, number, plan) for cost, plan in fitted)
        except BudgetExceeded:
            log.info("dp: the budget is used up: %d plans fit into memory", len(fitting))
        except KeyboardInterrupt:
            if not fitting:
                raise
            return replace(min(fitting)[2], note=INTERRUPTED_NOTE)
        if fitting:
            return min(fitting)[2]
        if budget.was_exceeded:
            raise DicompilerError(
                "dp: the budget was used up before a plan was found that fits into memory: use a larger budget"
            )
        host = platform.hosts[least[1]]
        largest = max(facts.weight_bytes, key=lambda layer: facts.weight_bytes[layer])
        raise DicompilerError(
            f"dp: no plan found fits into memory: host {host.name} has {format_bytes(host.memory)} and would need at "
            f"least {format_needed_bytes(int(host.memory + least[0]))}: use more memory or more devices (layer "
            f"{largest!r} has {format_bytes(facts.weight_bytes[largest])} of weights)"
        )

    def _fit_team(
        self, facts: ProblemFacts, chosen: Sequence[str], unit: float, budget: WorkBudget
    ) -> tuple[list[tuple[float, Plan]], tuple[float, int]]:
        """Search for a plan on the devices `chosen` that fits into memory.

        `unit` is the first price of a byte of weights on a host that lacks memory. The first result is [(cost, plan)],
        or [] if no plan fits. The second result is the least excess of all rounds: the missing bytes, and the index of
        the host.

        Raises:
            BudgetExceeded: The budget is exceeded.
        """
        team = self._build_team(facts, chosen)
        candidates = build_candidate_runs(team, self._candidate_rules(len(team.layers.layers), channels=True), budget)
        hosts = facts.problem.platform.hosts
        price: dict[str, float] = {}
        least = (np.inf, 0)
        for _ in range(_MAX_PRICE_ROUNDS):
            pricing = RunPricing(facts.problem, dict(price))
            path = find_cheapest_path(team, candidates, pricing, budget)
            plan, excess = _plan_and_excess(facts.problem, path)
            if not excess.any():
                return [(path.cost - pricing.weight_price(team, path.weights), plan)], least
            least = min(least, (float(excess.max()), int(excess.argmax())))
            worst = {host.name for host, missing in zip(hosts, excess, strict=True) if 2 * missing > excess.max()}
            priced = [name for name in team.member_names if facts.problem.platform.host_of[name] in worst]
            # The hosts that lack the most memory store no weights: they are sources or sinks. Prices of weights cannot
            # help.
            if not priced:
                break
            price |= {name: max(price.get(name, 0.0) * _PRICE_GROWTH, unit) for name in priced}
        return [], least


def _cheapest_that_fits(problem: Problem, paths: Sequence[RunPath]) -> Plan | None:
    """Return the cheapest plan that fits into memory, and of equally cheap ones that with the fewest devices.

    The result is None if no plan fits.
    """
    for path in sorted(paths, key=lambda path: (path.cost, len(path.team.members))):
        plan, excess = _plan_and_excess(problem, path)
        if not excess.any():
            log.debug("dp: %d devices, %.6g s by the barrier model", len(path.team.members), path.seconds)
            return plan
    return None


def device_counts(strategy: str, devices: int, problem: Problem) -> tuple[int, ...]:
    """Return the numbers of devices to try: only `devices`, or several numbers if it is 0."""
    most = len(problem.platform.computing_devices)
    if devices > most:
        raise DicompilerError(
            f"{strategy}: devices={devices}, but only {most} devices of platform {problem.platform.name!r} compute: "
            f"use 0 (the best number) to {most}"
        )
    return (devices,) if devices else candidate_counts(most, len(problem.layers.layers))


def candidate_counts(most: int, layers: int) -> tuple[int, ...]:
    """Return numbers of devices to try: 1 to 8, then numbers that grow by a factor of √2 up to `most`.

    For networks of over 300 layers, the numbers grow by a factor of 2 from the start.
    """
    few = layers > _LARGE_NETWORK_LAYERS
    counts = [1] if few else list(range(1, min(most, 8) + 1))
    while counts[-1] < most:
        counts.append(min(most, round(counts[-1] * (2 if few else 2**0.5))))
    return tuple(counts)


def _plan_and_excess(problem: Problem, path: RunPath) -> tuple[Plan, Floats]:
    """Return the plan of a path (a sequence of runs of layers), and the bytes that each host lacks for it."""
    hosts = [host.name for host in problem.platform.hosts]
    limits = np.array([host.memory for host in problem.platform.hosts], np.float64)
    used = np.zeros(len(hosts))
    for device, weights in zip(path.team.problem.platform.devices, path.weights, strict=True):
        used[hosts.index(device.host)] += weights
    plan = problem.build_plan(
        {layer: layer_parts for run in path.runs for layer, layer_parts in run_parts(path.team, run).items()}
    )
    tensors = _total_tensor_bytes(problem) * max(1, len(problem.platform.devices) // len(hosts))
    if not (used > limits).any() and (problem.target is not None or (used + tensors > limits).any()):
        exact = needed_memory(problem, plan)
        used = np.array([exact[host] for host in hosts], np.float64)
    return plan, np.maximum(used - limits, 0.0)


def _total_tensor_bytes(problem: Problem) -> float:
    """Return twice the bytes of all tensors except constants.

    A device may compute a part of each tensor and receive another one, hence the factor 2.
    """
    tensors = [
        tensor for tensor in problem.layers.tensors.values() if not tensor.is_constant and tensor.shape is not None
    ]
    return 2.0 * sum(raw_nbytes(tensor.dtype, tensor.shape or ()) for tensor in tensors)
