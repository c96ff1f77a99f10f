"""The strategy `dp`: its options, which teams of devices it tries, and memory as a limit. Problem → Plan."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np

from dicompiler.plugin_api import DicompilerError, Plan, Problem, Strategy, UsageError
from dicompiler.plugin_api.onnx import raw_nbytes
from dicompiler.plugin_api.search import DEFAULT_BUDGET_S, INTERRUPTED_NOTE, BudgetExceeded, WorkBudget, needed_memory
from dicompiler.plugin_api.utilities import format_bytes
from dicompiler_strategies.dp.candidate_runs import CandidateRules, build_candidate_runs, run_parts
from dicompiler_strategies.dp.device_team import DeviceTeam, ProblemFacts
from dicompiler_strategies.dp.search import SUMMED_OBJECTIVES, RunPath, RunPricing, find_cheapest_path
from dicompiler_strategies.papers.coopai_plan import block_parts, choose_blocks
from dicompiler_strategies.tables.choice_footprints import Floats

log = logging.getLogger("dicompiler")

# Where memory is short: the first price of all weights in units of the best plan's cost, how it grows, how often.
_FIRST_PRICE_SHARE, _PRICE_GROWTH, _MAX_PRICE_ROUNDS = 0.1, 4.0, 12
# A block has at most so many layers: between these two, about this number over all layers.
_BLOCK_LAYER_LIMITS, _TOTAL_BLOCK_LAYERS = (6, 32), 6000
_LARGE_NETWORK_LAYERS = 300


@dataclass(frozen=True)
class Dp(Strategy):
    """CoopAI's MLS: blocks of layers in fused height tiles, fully connected layers in shares, k devices.

    conv1 conv2 | conv3 conv4 conv5 | fc6 fc7     blocks; in a block each device computes its rows and the halo that
                                                  they need of every earlier layer, so that nothing travels inside

    A dynamic programme chooses the blocks, the form of each layer outside of blocks (its channels in shares, partial
    sums over shares of its input channels, on each device, on one device) and the number of devices. It is optimal over
    these choices for a chain of layers and the barrier model (a block computes, then what is missing travels); with
    branches, blocks are runs of the layer order, and the forms of all open branches are kept in mind, up to a limit.
    With paper=true it decides as the paper has it: equations (1) to (5), a gateway, identical devices, a chain; memory
    is not looked at.
    """

    name: ClassVar[str] = "dp"
    method: Literal["mls", "sls"] = field(
        default="mls", metadata={"help": "mls, or its baseline sls: one layer with weights in a block, no partial sums"}
    )
    devices: int = field(
        default=0, metadata={"help": "cut layers for this many devices, the fastest; 0: the best number"}
    )
    shares: Literal["rate", "equal"] = field(
        default="rate", metadata={"help": "a device's share: in proportion to how fast it computes, or equal"}
    )
    paper: bool = field(default=False, metadata={"help": "decide as CoopAI is printed"})
    max_block_layers: int = field(
        default=0, metadata={"help": "the most layers in a block; 0: 32, fewer where a network has hundreds of layers"}
    )
    channels: bool = field(
        default=False,
        metadata={"help": "layers with rows may be cut by channels too (done anyhow where memory is short)"},
    )
    budget: float = field(
        default=DEFAULT_BUDGET_S, metadata={"help": "seconds of a common computer that its work may come to"}
    )

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise ValueError(f"budget must be more than 0 s, not {self.budget:g}")
        if self.devices < 0:
            raise ValueError("devices must be 0 (the best number) or more")
        if self.max_block_layers < 0:
            raise ValueError("span must be 0 (as many layers in a block as is good) or more")

    def plan(self, problem: Problem) -> Plan:
        """Raises UsageError for an objective that is no sum over layers, DicompilerError for more devices than there
        are, a memory limit that no plan found keeps, and with paper=true for what CoopAI does not speak of."""
        return self.plan_within(problem, WorkBudget(self.budget))

    def plan_within(self, problem: Problem, budget: WorkBudget) -> Plan:
        """The same with what is allowed in the place of the budget: where that is over no larger team is tried."""
        known = ("latency",) if self.paper else SUMMED_OBJECTIVES
        if problem.objective not in known:
            raise UsageError(f"dp: objective {problem.objective!r} is none that it knows (known: {', '.join(known)})")
        facts = ProblemFacts(problem)
        computing = [device.name for device in problem.platform.computing_devices]
        order = sorted(computing, key=lambda name: -facts.speeds[name])
        if self.devices > len(order):
            raise DicompilerError(
                f"dp: devices={self.devices}, and the platform {problem.platform.name!r} has {len(order)} that "
                f"compute: take 0 (the best number) to {len(order)}"
            )
        counts = (self.devices,) if self.devices else candidate_counts(len(order), len(problem.layers.layers))
        if self.paper:
            return self._as_printed(facts, order, counts)
        paths: list[RunPath] = []
        try:
            for k in counts:
                paths.append(self._search_team(facts, order[:k], budget, bool(paths)))
        except BudgetExceeded:
            log.info("dp: the budget is over: %d of %d teams are tried", len(paths), len(counts))
        except KeyboardInterrupt:
            plan = _cheapest_that_fits(problem, paths)
            if plan is None:
                raise
            return replace(plan, note=INTERRUPTED_NOTE)
        best = min(paths, key=lambda path: path.cost)
        plan = _cheapest_that_fits(problem, paths) or self._plan_with_little_memory(facts, order, counts, best, budget)
        return replace(plan, note=plan.note or budget.note())

    def _as_printed(self, facts: ProblemFacts, order: Sequence[str], counts: Sequence[int]) -> Plan:
        everyone = self._build_team(facts, order[: max(counts)], equal=True)
        layers, result = choose_blocks(everyone, counts, self.method == "sls")
        team = self._build_team(facts, order[: result.k], equal=True)
        log.debug("dp: %d devices, %d blocks, %.6g s", result.k, len(result.blocks), result.seconds)
        return facts.problem.build_plan(block_parts(team, layers, result))

    def _build_team(self, facts: ProblemFacts, names: Sequence[str], equal: bool = False) -> DeviceTeam:
        return DeviceTeam.build(facts, names, equal or self.shares == "equal")

    def _candidate_rules(self, layers: int, channels: bool) -> CandidateRules:
        span = self.max_block_layers or max(
            _BLOCK_LAYER_LIMITS[0], min(_BLOCK_LAYER_LIMITS[1], _TOTAL_BLOCK_LAYERS // max(layers, 1))
        )
        return CandidateRules(self.method == "mls", span, channels)

    def _search_team(self, facts: ProblemFacts, names: Sequence[str], allowance: WorkBudget, limited: bool) -> RunPath:
        """The best of a team. limited: Spent where the allowance is over before; else it is spent alone."""
        team = self._build_team(facts, names)
        rules = self._candidate_rules(len(team.layers.layers), self.channels)
        own = allowance if limited else WorkBudget()
        path = find_cheapest_path(team, build_candidate_runs(team, rules, own), RunPricing(facts.problem), own)
        if not limited:
            allowance.spend(own.spent_s)
        return path

    def _plan_with_little_memory(
        self, facts: ProblemFacts, order: Sequence[str], counts: Sequence[int], best: RunPath, allowance: WorkBudget
    ) -> Plan:
        """Layers may be cut by channels now, which cuts their weights; teams of the devices with the most memory are
        tried as well. Weights get a price on the hosts that lack most, a higher one from round to round."""
        platform = facts.problem.platform
        roomy = sorted(order, key=lambda name: -platform.host(platform.host_of[name]).memory)
        unit = (
            _FIRST_PRICE_SHARE * (best.cost or best.seconds or 1.0) / max(1.0, float(sum(facts.weight_bytes.values())))
        )
        fitting: list[tuple[float, int, Plan]] = []
        least = (np.inf, 0)
        teams = dict.fromkeys(tuple(ranking[:k]) for k in counts for ranking in (order, roomy))
        try:
            for number, chosen in enumerate(teams):
                one, lack = self._fit_team(facts, chosen, unit, allowance)
                least = min(least, lack)
                fitting.extend((cost, number, plan) for cost, plan in one)
        except BudgetExceeded:
            log.info("dp: the budget is over: %d plans fit the memory", len(fitting))
        except KeyboardInterrupt:
            if not fitting:
                raise
            return replace(min(fitting)[2], note=INTERRUPTED_NOTE)
        if fitting:
            return min(fitting)[2]
        if allowance.was_exceeded:
            raise DicompilerError(
                "dp: the budget is over before a plan is found that fits the memory: give a larger one"
            )
        host = platform.hosts[least[1]]
        largest = max(facts.weight_bytes, key=lambda layer: facts.weight_bytes[layer])
        raise DicompilerError(
            f"dp: no plan found fits the memory: host {host.name} has {format_bytes(host.memory)} and would need at "
            f"least {format_bytes(host.memory + least[0])}: give it more memory or the platform more devices (layer "
            f"{largest!r} has {format_bytes(facts.weight_bytes[largest])} of weights)"
        )

    def _fit_team(
        self, facts: ProblemFacts, chosen: Sequence[str], unit: float, allowance: WorkBudget
    ) -> tuple[list[tuple[float, Plan]], tuple[float, int]]:
        """(a team's plan that fits, with its cost, if one is found; the least that a host lacked, and which host).
        unit: the first price of a byte. Spent where the allowance is over."""
        team = self._build_team(facts, chosen)
        known = build_candidate_runs(team, self._candidate_rules(len(team.layers.layers), channels=True), allowance)
        hosts = facts.problem.platform.hosts
        price: dict[str, float] = {}
        least = (np.inf, 0)
        for _ in range(_MAX_PRICE_ROUNDS):
            pricing = RunPricing(facts.problem, dict(price))
            path = find_cheapest_path(team, known, pricing, allowance)
            plan, over = _plan_and_excess(facts.problem, path)
            if not over.any():
                return [(path.cost - pricing.weight_price(team, path.weights), plan)], least
            least = min(least, (float(over.max()), int(over.argmax())))
            worst = {host.name for host, lack in zip(hosts, over, strict=True) if 2 * lack > over.max()}
            dear = [name for name in team.member_names if facts.problem.platform.host_of[name] in worst]
            if not dear:  # a source or a sink is too small for what it must hold
                break
            price |= {name: max(price.get(name, 0.0) * _PRICE_GROWTH, unit) for name in dear}
        return [], least


def _cheapest_that_fits(problem: Problem, paths: Sequence[RunPath]) -> Plan | None:
    """The plan of the cheapest path that keeps the memory limits, of equals the one with the fewest devices."""
    for path in sorted(paths, key=lambda path: (path.cost, len(path.team.members))):
        plan, over = _plan_and_excess(problem, path)
        if not over.any():
            log.debug("dp: %d devices, %.6g s by the barrier model", len(path.team.members), path.seconds)
            return plan
    return None


def candidate_counts(most: int, layers: int) -> tuple[int, ...]:
    """The numbers of devices that are tried: all up to 8, then about √2 times as many each; where there are hundreds
    of layers, twice as many each from the first on."""
    few = layers > _LARGE_NETWORK_LAYERS
    counts = [1] if few else list(range(1, min(most, 8) + 1))
    while counts[-1] < most:
        counts.append(min(most, round(counts[-1] * (2 if few else 2**0.5))))
    return tuple(counts)


def _plan_and_excess(problem: Problem, path: RunPath) -> tuple[Plan, Floats]:
    """The plan of a path, and how many bytes each host would need beyond what it has (0: it fits).

    Where the weights alone do not fit, or all activations do as well, nothing more exact is asked for.
    """
    hosts = [host.name for host in problem.platform.hosts]
    limits = np.array([host.memory for host in problem.platform.hosts], np.float64)
    used = np.zeros(len(hosts))
    for device, weights in zip(path.team.problem.platform.devices, path.weights, strict=True):
        used[hosts.index(device.host)] += weights
    plan = problem.build_plan(
        {layer: pieces for move in path.runs for layer, pieces in run_parts(path.team, move).items()}
    )
    tensors = _total_tensor_bytes(problem) * max(1, len(problem.platform.devices) // len(hosts))
    if not (used > limits).any() and (problem.target is not None or (used + tensors > limits).any()):
        exact = needed_memory(problem, plan)
        used = np.array([exact[host] for host in hosts], np.float64)
    return plan, np.maximum(used - limits, 0.0)


def _total_tensor_bytes(problem: Problem) -> float:
    """Bytes of all tensors that are not constants, twice: computed and received."""
    tensors = [
        tensor for tensor in problem.layers.tensors.values() if not tensor.is_constant and tensor.shape is not None
    ]
    return 2.0 * sum(raw_nbytes(tensor.dtype, tensor.shape or ()) for tensor in tensors)
