"""The problem that a strategy solves: layers, platform, cost model and objective.

LayerGraph + Platform + CostModel + objective → Problem
Problem + Plan → Metrics
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import onnx

from dicompiler.base.errors import DicompilerError, did_you_mean, one_line
from dicompiler.base.objectives import objective_terms
from dicompiler.base.process import gc_paused
from dicompiler.cost.cost_model import AnalyticModel, CostModel
from dicompiler.cost.memory import MemoryUse, program_memory
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.cost.simulator import SimulationResult, estimate_metrics, metrics_of_simulation, simulate
from dicompiler.cost.speed_changes import Speeds
from dicompiler.cost.workload import Workload, build_workload
from dicompiler.ir.cluster import Device
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.metrics import Metrics
from dicompiler.ir.node_origins import NodeOrigins
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import Weight, raw_nbytes
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import LayerShare, Part, Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import DeviceProgram, Program
from dicompiler.ir.random_ops import random_layers
from dicompiler.ir.regions import full_region
from dicompiler.ir.wire_dtype import WireFormat
from dicompiler.partition.bounds_inference import output_shape
from dicompiler.partition.lowering import build_program_only, lower_unchecked
from dicompiler.partition.placed_graph import ModelFacts

if TYPE_CHECKING:
    from dicompiler.ir.routing import Routing
    from dicompiler.target.target_base import Target


MAX_SIMULATED_DEVICE_KINDS = 4
"""Maximum number of kinds of devices that are simulated to find the best single device.

Of more kinds, fast estimates select the ones to simulate.
"""
MIN_SPLIT_GAIN = 1.03
"""Smallest predicted speedup over the best single device for which a plan on several devices is worthwhile.

On emulated clusters, every plan with at least this predicted speedup was faster than the best single device.
"""
PICKLING_ERRORS = pickle.PicklingError, AttributeError, TypeError
"""Errors of `pickle.dumps` for an object that cannot be pickled."""


@dataclass(frozen=True)
class Problem:
    """The layers to place, the platform to place them on, and the objective to minimise.

    A problem is immutable. It builds, estimates and simulates plans.

    Attributes:
        layers: Layers of the network with their tensors.
        platform: Hosts, devices and network.
        cost_model: Model of the seconds that a device needs for a piece of a layer.
        objective: Objective to minimise: latency, throughput, energy, memory, communication, or a weighted sum of them.
        source: Devices that have the inputs; empty means the first device of the platform, which may have no compute.
        sink: Devices that receive the outputs; empty means the first device of the platform.
        model: Model that the layers were formed from. `evaluate` and `simulate` need it.
        executor: Executor for `evaluate_all`. Strategies may also use it for their own parallel work.
        target: Target that will run the plan, if it is known. The memory that it adds is then counted.
        file_graph: Graph of the model file, with the node names that users know.
        runtime_costs: Costs of messages, calls and copies in the target's runtime, by device name. Missing devices have
            no such costs.

    Raises:
        UsageError: The objective is unknown.
        DicompilerError: A source or sink is not on the platform.
    """

    layers: LayerGraph = field(repr=False)
    platform: Platform
    cost_model: CostModel = field(default_factory=AnalyticModel)
    objective: str = "latency"
    source: tuple[str, ...] = ()
    sink: tuple[str, ...] = ()
    model: Model | None = field(default=None, repr=False)
    executor: Executor | None = field(default=None, repr=False, compare=False)
    target: Target | None = field(default=None, repr=False)
    file_graph: onnx.GraphProto | None = field(default=None, repr=False, compare=False)
    runtime_costs: Mapping[str, RuntimeCosts] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        # This call raises an error if the objective is invalid.
        objective_terms(self.objective)
        for name in (*self.source, *self.sink):
            self.platform.device(name)

    def build_plan(self, parts: Mapping[str, Sequence[Part]]) -> Plan:
        """Return a plan with these parts and this problem's sources, sinks, wire types and engines.

        A layer that draws random numbers stays whole on the device of its first part, because several parts would draw
        different numbers.

        Args:
            parts: Parts (one device's pieces) of every layer, by layer name.

        Returns:
            The plan, with the layers in graph order.

        Raises:
            ValueError: A layer has no parts in `parts`, or a name in `parts` is not that of a layer.
        """
        known = self.layers.layer_by_name
        if missing := [name for name in known if name not in parts]:
            raise ValueError(f"plan: layers.{missing[0]}: missing: give every layer at least one part")
        if unknown := [name for name in parts if name not in known]:
            hint = did_you_mean(unknown[0], known)
            raise ValueError(f"plan: layers.{unknown[0]}: the model has no such layer{hint}")
        first = (self.platform.devices[0].name,)
        ordered = {layer.name: tuple(parts[layer.name]) for layer in self.layers.layers}
        for name in self._random_layers:
            ordered[name] = (replace(ordered[name][0], region=None, reduce=None),)
        return Plan(
            ordered,
            self.source or first,
            self.sink or first,
            wire_format=WireFormat(self.layers.wire_dtypes),
            engines=self.platform.engines,
        )

    @cached_property
    def _random_layers(self) -> frozenset[str]:
        return frozenset(random_layers(self.layers))

    def single_device_plan(self, device: str) -> Plan:
        """Return the plan that computes all layers on one device.

        Args:
            device: Name of the device.

        Returns:
            The plan.
        """
        return self.build_plan({layer.name: (Part(device),) for layer in self.layers.layers})

    def estimate(self, plan: Plan) -> Metrics:
        """Estimate the metrics of a plan within milliseconds.

        Bytes and operations are exact. Times assume that each layer begins when all devices have finished the previous
        layer.

        Args:
            plan: Plan for the problem's layers.

        Returns:
            The estimated metrics.

        Raises:
            DicompilerError: The plan does not fit the layers or names an unknown device.
        """
        with gc_paused():
            metrics = self._estimate_metrics(plan)
        return metrics if self.target is None else metrics.with_overhead(self.target_overhead)

    @cached_property
    def lineage(self) -> NodeOrigins:
        """The map from the nodes of the model file to the nodes and layers made from them.

        Returns:
            The map.
        """
        return NodeOrigins(self.layers, self.file_graph)

    @cached_property
    def target_overhead(self) -> Mapping[str, int]:
        """The bytes of memory that the target's runtime needs on a device that has no work.

        Returns:
            Bytes by device name.
        """
        if self.target is None:
            return {device.name: 0 for device in self.platform.devices}
        idle = tuple(DeviceProgram(device.name, device.host, (), (), (), {}) for device in self.platform.devices)
        return self.target.memory_overhead(Program(idle, (), (), (), {}, ()))

    def evaluate(self, plan: Plan) -> Metrics:
        """Simulate the program of a plan and return its metrics, by which plans are compared.

        An evaluation takes 2 to 150 ms. If the problem has a target, the metrics include the memory that it adds.

        Args:
            plan: Plan for the problem's layers.

        Returns:
            The simulated metrics.

        Raises:
            DicompilerError: The plan does not fit the layers or names an unknown device, or the problem has no model.
        """
        with gc_paused():
            if self.target is not None:
                compilation = self.draft_program(plan)
                return self.program_metrics(compilation, self.program_memory_use(compilation))
            return self._simulate_metrics(plan)

    @cached_property
    def best_single_device(self) -> tuple[Plan, Metrics]:
        """The plan on the single device that is best by the objective, with its simulated metrics.

        Among equally good devices, the first one is chosen. On platforms with many kinds of devices, only those with
        the best estimates are simulated.

        Returns:
            The plan and its metrics.
        """
        kinds: dict[object, str] = {}
        for device in self.platform.computing_devices:
            kinds.setdefault(self._device_kind(device), device.name)
        plans = [self.single_device_plan(name) for name in kinds.values()]
        if len(plans) > MAX_SIMULATED_DEVICE_KINDS:
            estimates = [self._estimate_metrics(plan) for plan in plans]
            order = sorted(range(len(plans)), key=lambda i: self._rank(estimates[i]))
            plans = [plans[i] for i in order[:MAX_SIMULATED_DEVICE_KINDS]]
        rate = self._estimate_metrics if self.model is None else self._simulate_metrics
        with gc_paused():
            rated = [(plan, rate(plan)) for plan in plans]
        plan, metrics = min(rated, key=lambda pair: self._rank(pair[1]))
        return plan, metrics if self.target is None else metrics.with_overhead(self.target_overhead)

    def _device_kind(self, device: Device) -> tuple[object, ...]:
        """Return a key that is equal for two devices if the whole network takes equally long on them."""
        first = (self.platform.devices[0].name,)
        ends = [self.platform.link(end, device.name) for end in (*(self.source or first), *(self.sink or first))]
        links = (link and replace(link, hosts=("", "")) for link in ends)
        return replace(device, name="", host=""), whole_layer_seconds(self, device), *links

    def _rank(self, metrics: Metrics) -> tuple[float, float]:
        return metrics.objective_value(self.objective), metrics.latency_s

    def _estimate_metrics(self, plan: Plan) -> Metrics:
        return estimate_metrics(self.layers, self.platform, self.cost_model, plan, self.runtime_costs)

    def _simulate_metrics(self, plan: Plan) -> Metrics:
        routing, work = plan_workload(self, plan)
        return _simulated_metrics(work, routing, self.platform, plan)

    def evaluate_all(self, plans: Sequence[Plan]) -> list[Metrics | DicompilerError]:
        """Evaluate many plans, in parallel if the problem has an executor.

        The processes of the executor receive plans and shapes, but no weights.

        Args:
            plans: Plans for the problem's layers.

        Returns:
            For each plan, in order, its metrics or the error that `evaluate` raised.
        """
        attempt = self._evaluator.evaluate_or_error
        return list(map(attempt, plans) if self.executor is None else self.executor.map(attempt, plans))

    @cached_property
    def _evaluator(self) -> RemoteEvaluator:
        # It is cached, because it contains the pickled problem, and pickling is slow.
        return RemoteEvaluator(self)

    def simulate(self, plan: Plan, frames: int = 1, in_flight: int = 1) -> SimulationResult:
        """Simulate the program of a plan for a stream of frames.

        Args:
            plan: Plan for the problem's layers.
            frames: Number of frames.
            in_flight: Number of frames that are computed at the same time.

        Returns:
            The simulated times.

        Raises:
            DicompilerError: The plan does not fit the layers or names an unknown device, or the problem has no model.
        """
        return simulate(plan_workload(self, plan)[1], self.platform, frames, in_flight)

    def simulate_compilation(
        self,
        compilation: PipelineState,
        frames: int = 1,
        in_flight: int = 1,
        spans: bool = True,
        speeds: Mapping[str, Speeds] | None = None,
        link_speeds: Mapping[str, Speeds] | None = None,
    ) -> SimulationResult:
        """Simulate a program that was compiled for this problem.

        Args:
            compilation: A pipeline state with the program.
            frames: Number of frames.
            in_flight: Number of frames that are computed at the same time.
            spans: True if the result must contain the periods in which devices computed, sent and waited.
            speeds: Changes of devices' speeds by device name: pairs (time in seconds, speed from then on as a multiple
                of the normal speed).
            link_speeds: The same pairs for links, by their names in `Platform.occupied_links`.

        Returns:
            The simulated times.
        """
        workload = self._compilation_workload(compilation)
        return simulate(workload, self.platform, frames, in_flight, spans, speeds, link_speeds)

    def program_metrics(self, compilation: PipelineState, memory: Mapping[str, MemoryUse] | None = None) -> Metrics:
        """Simulate one frame of a program, or of each replica (copy on other devices), and return the metrics.

        Args:
            compilation: A pipeline state with the program.
            memory: Memory use by device name, as `program_memory_use` returns it. If it is given, the metrics include
                the target's overhead.

        Returns:
            The simulated metrics.
        """
        assert compilation.routing is not None and compilation.plan is not None
        work = self._compilation_workload(compilation)
        metrics = _simulated_metrics(work, compilation.routing, self.platform, compilation.plan)
        if memory is None:
            return metrics
        overhead = {entry.device: memory[entry.device].total - entry.memory for entry in metrics.devices}
        return metrics.with_overhead(overhead)

    def _compilation_workload(self, compilation: PipelineState) -> Workload:
        assert compilation.program is not None and compilation.routing is not None
        return build_workload(
            compilation.program, compilation.routing, self.platform, self.cost_model, self.runtime_costs
        )

    def draft_program(self, plan: Plan) -> PipelineState:
        """Return the routing and the program of a plan, without the check that the split model is valid ONNX.

        Args:
            plan: Plan for the problem's layers.

        Returns:
            A pipeline state with the routing (exchanged tensor regions) and the program (steps of each device).

        Raises:
            DicompilerError: The plan does not fit the layers, or the problem has no model.
        """
        return lower_unchecked(PipelineState(self._required_model, self.layers, self.platform, plan=plan))

    def program_memory_use(self, compilation: PipelineState) -> dict[str, MemoryUse]:
        """Return the memory that each device needs to run a program, one frame at a time.

        Args:
            compilation: A pipeline state with the program.

        Returns:
            Memory use by device name, including the target's overhead if the problem has a target.
        """
        assert compilation.program is not None
        added = None if self.target is None else self.target.memory_overhead(compilation.program)
        return program_memory(compilation.program, added=added)

    @cached_property
    def _model_facts(self) -> ModelFacts:
        return ModelFacts.from_model(self._required_model)

    @property
    def _required_model(self) -> Model:
        if self.model is None:
            raise DicompilerError("problem: it has no model: pass model=…, or use Problem.estimate")
        return self.model


def plan_workload(problem: Problem, plan: Plan) -> tuple[Routing, Workload]:
    """Return the routing and the workload of a plan for a problem, without writing ONNX models.

    The routing lists the tensor regions that devices exchange. The workload has the seconds and messages of each
    device, for the simulator.

    Raises:
        DicompilerError: The plan does not fit the layers, or the problem has no model.
    """
    routing, program = build_program_only(problem._model_facts, problem.layers, problem.platform, plan)
    return routing, build_workload(program, routing, problem.platform, problem.cost_model, problem.runtime_costs)


@dataclass(frozen=True)
class RemoteEvaluator:
    """A function that evaluates the plans of a problem and that can be sent to other processes.

    It is pickled without the weights of the model, because metrics do not depend on their values.
    """

    problem: Problem

    def __call__(self, plan: Plan) -> Metrics:
        return self.problem.estimate(plan) if self.problem.model is None else self.problem.evaluate(plan)

    def evaluate_or_error(self, plan: Plan) -> Metrics | DicompilerError:
        try:
            return self(plan)
        except DicompilerError as error:
            return error

    def __reduce__(self) -> tuple[object, ...]:
        return _restore_evaluator, (self._pickled,)

    @cached_property
    def _pickled(self) -> bytes:
        """The pickled problem, which is the same for every plan."""
        model = self.problem.model
        problem = replace(self.problem, executor=None, model=None, file_graph=None)
        proto, weights = None, {}
        if model is not None:
            proto = model.proto.SerializeToString()
            weights = {name: (weight.dtype, weight.shape) for name, weight in model.weights.items()}
        try:
            return pickle.dumps((problem, proto, weights))
        except PICKLING_ERRORS as error:
            place, cause = _describe_unpicklable(problem), one_line(str(error))
            raise DicompilerError(
                f"{place} cannot be sent to the processes of the executor ({cause}): "
                "define its functions at the top of a module, or use no executor"
            ) from error


def _describe_unpicklable(problem: Problem) -> str:
    """Return a description of the problem's first operator rule that cannot be pickled, or else of its cost model."""
    for (domain, op), rule in problem.layers.rules.items():
        try:
            pickle.dumps(rule)
        except PICKLING_ERRORS:
            return f"the operator rule of {domain + '::' if domain else ''}{op}"
    return f"the cost model {problem.cost_model.name!r}"


# The last few problems are cached, because they contain computed facts that speed up the evaluation of further plans.
@lru_cache(maxsize=4)
def _restore_evaluator(pickled: bytes) -> RemoteEvaluator:
    """Return the RemoteEvaluator of a pickled problem.

    Weights are not pickled. They are replaced by zeros, which occupy no memory until they are read.
    """
    problem, proto, weights = pickle.loads(pickled)
    if proto is None:
        return RemoteEvaluator(problem)
    zeros = {
        name: Weight(dtype, shape, np.zeros(raw_nbytes(dtype, shape), np.uint8).data)
        for name, (dtype, shape) in weights.items()
    }
    return RemoteEvaluator(replace(problem, model=Model(onnx.ModelProto.FromString(proto), zeros)))


def whole_layer_seconds(problem: Problem, device: Device) -> tuple[float, ...]:
    layers = problem.layers
    regions = (None if layer.whole_reason else full_region(output_shape(layers, layer)) for layer in layers.layers)
    shares = map(LayerShare, regions)
    return tuple(
        problem.cost_model.seconds(layers, layer, share, device)
        for layer, share in zip(layers.layers, shares, strict=True)
    )


def _simulated_metrics(work: Workload, routing: Routing, platform: Platform, plan: Plan) -> Metrics:
    result = simulate(work, platform, frames=len(work.replicas), keep_spans=False)
    return metrics_of_simulation(result, work, routing, platform, plan)
