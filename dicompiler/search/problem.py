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

from dicompiler.base.errors import DicompilerError
from dicompiler.base.objectives import objective_terms
from dicompiler.base.process import gc_paused
from dicompiler.cost.cost_model import AnalyticModel, CostModel
from dicompiler.cost.memory import MemoryUse, program_memory
from dicompiler.cost.metrics import estimate_metrics, metrics_of_simulation
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.cost.simulation_result import SimulationResult
from dicompiler.cost.simulator import simulate
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
"""Number of kinds of devices that are simulated to find the best single device; the others are only estimated."""
MIN_SPLIT_GAIN = 1.03
"""Least predicted gain over the best single device that makes several devices worthwhile.

Predictions are a few percent off. On emulated clusters, all plans from this factor on kept their promise.
"""


@dataclass(frozen=True)
class Problem:
    """The layers to place, the platform to place them on, and the objective to minimise.

    A problem is immutable. It estimates and simulates plans, and it builds plans from parts.

    Attributes:
        layers: Layers of the network with their tensors.
        platform: Hosts, devices and network.
        cost_model: Model of the seconds that a part takes on a device.
        objective: Objective to minimise: latency, throughput, energy, memory, communication, or a weighted sum of them.
        source: Devices that hold the inputs; empty means the first device of the platform, which may have no compute.
        sink: Devices that receive the outputs; empty means the first device of the platform.
        model: Model that the layers were formed from. `evaluate` and `simulate` need it.
        executor: Executor for `evaluate_all`. Strategies may also use it for their own parallel work.
        target: Target that will run the plan, if it is known. The memory that it adds is then counted.
        file_graph: Graph as it is in the model file, whose node names users write (see `lineage`).
        runtime_costs: Device → costs of messages, calls and copies in the target's runtime; devices that are missing
            cost nothing.

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
        objective_terms(self.objective)  # Raises if the objective is invalid.
        for name in (*self.source, *self.sink):
            self.platform.device(name)

    def build_plan(self, parts: Mapping[str, Sequence[Part]]) -> Plan:
        """Return the plan with these parts, in layer order, with this problem's source, sink and wire type.

        A layer that draws random numbers stays whole on the device of its first part, because its parts would draw
        different numbers.

        Args:
            parts: Layer name → parts of the layer, for every layer.

        Returns:
            The plan.
        """
        first = (self.platform.devices[0].name,)
        ordered = {layer.name: tuple(parts[layer.name]) for layer in self.layers.layers}
        for name in self._random_layers:
            ordered[name] = (replace(ordered[name][0], region=None, reduce=None),)
        return Plan(ordered, self.source or first, self.sink or first, wire_format=WireFormat(self.layers.wire_dtypes))

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

        Bytes and operations are exact. Times assume a barrier after each layer, so that nothing overlaps.

        Args:
            plan: The plan.

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
        """Map from nodes of the model file to the nodes and layers that they have become.

        Returns:
            The map.
        """
        return NodeOrigins(self.layers, self.file_graph)

    @cached_property
    def target_overhead(self) -> Mapping[str, int]:
        """Bytes that the target adds at least, whatever a device computes.

        Returns:
            Device → bytes.
        """
        if self.target is None:
            return {device.name: 0 for device in self.platform.devices}
        idle = tuple(DeviceProgram(device.name, device.host, (), (), (), {}) for device in self.platform.devices)
        return self.target.memory_overhead(Program(idle, (), (), (), {}, ()))

    def evaluate(self, plan: Plan) -> Metrics:
        """Simulate the program of a plan and return its metrics.

        This is the measure by which plans are compared. It takes 2 to 150 ms. The program is only written as ONNX if
        the problem has a target, which is then asked for the memory that it adds.

        Args:
            plan: The plan.

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
        """The plan on the one device that is best by the objective, with its simulated metrics.

        Every other plan is compared with it. Of equally good devices the first is taken. If there are many kinds of
        devices, estimates choose the ones to simulate: almost nothing overlaps on a single device, so that estimates
        are close.

        Returns:
            The plan and its metrics.
        """
        kinds: dict[object, str] = {}
        for device in self.platform.computing_devices:
            kinds.setdefault(self._device_kind(device), device.name)
        plans = [self.single_device_plan(name) for name in kinds.values()]
        if len(plans) > MAX_SIMULATED_DEVICE_KINDS:
            estimates = [self._estimate_metrics(plan) for plan in plans]
            order = sorted(
                range(len(plans)), key=lambda i: (estimates[i].objective_value(self.objective), estimates[i].latency_s)
            )
            plans = [plans[i] for i in order[:MAX_SIMULATED_DEVICE_KINDS]]
        with gc_paused():
            rated = [(plan, self._single_device_metrics(plan)) for plan in plans]
        plan, metrics = min(rated, key=lambda pair: (pair[1].objective_value(self.objective), pair[1].latency_s))
        return plan, metrics if self.target is None else metrics.with_overhead(self.target_overhead)

    def _device_kind(self, device: Device) -> tuple[object, ...]:
        """Return a key that is equal for devices on which the whole network costs the same.

        The key holds the seconds of every layer and the links to the source and the sink.
        """
        shares = [
            (layer, LayerShare(None if layer.whole_reason else full_region(output_shape(self.layers, layer))))
            for layer in self.layers.layers
        ]
        seconds = tuple(self.cost_model.seconds(self.layers, *share, device) for share in shares)
        first = (self.platform.devices[0].name,)
        ends = [self.platform.link(end, device.name) for end in (*(self.source or first), *(self.sink or first))]
        return replace(device, name="", host=""), seconds, *(link and replace(link, hosts=("", "")) for link in ends)

    def _single_device_metrics(self, plan: Plan) -> Metrics:
        return self._estimate_metrics(plan) if self.model is None else self._simulate_metrics(plan)

    def _estimate_metrics(self, plan: Plan) -> Metrics:
        return estimate_metrics(self.layers, self.platform, self.cost_model, plan, self.runtime_costs)

    def _simulate_metrics(self, plan: Plan) -> Metrics:
        routing, work = self.workload(plan)
        return _simulated_metrics(work, routing, self.platform, plan)

    def evaluate_all(self, plans: Sequence[Plan]) -> list[Metrics | DicompilerError]:
        """Evaluate many plans, in parallel if the problem has an executor.

        The executor's workers receive plans and shapes, but no weights.

        Args:
            plans: The plans.

        Returns:
            For each plan, in order, its metrics or the error that `evaluate` raised.
        """
        attempt = self._evaluator.evaluate_or_error
        return list(map(attempt, plans) if self.executor is None else self.executor.map(attempt, plans))

    @cached_property
    def _evaluator(self) -> RemoteEvaluator:
        return RemoteEvaluator(self)  # Cached, because it pickles the problem only once.

    def simulate(self, plan: Plan, frames: int = 1, in_flight: int = 1) -> SimulationResult:
        """Simulate the program of a plan for a stream of frames.

        Args:
            plan: The plan.
            frames: Number of frames.
            in_flight: Number of frames that are computed at the same time.

        Returns:
            The simulated times.

        Raises:
            DicompilerError: The plan does not fit the layers or names an unknown device, or the problem has no model.
        """
        return simulate(self.workload(plan)[1], self.platform, frames, in_flight)

    def workload(self, plan: Plan) -> tuple[Routing, Workload]:
        """Return the routing of a plan and the workload for the simulator.

        The program is not written as ONNX.

        Args:
            plan: The plan.

        Returns:
            The routing and the workload.

        Raises:
            DicompilerError: The plan does not fit the layers, or the problem has no model.
        """
        routing, program = build_program_only(self._model_facts, self.layers, self.platform, plan)
        return routing, build_workload(program, routing, self.platform, self.cost_model, self.runtime_costs)

    def simulate_compilation(
        self, compilation: PipelineState, frames: int = 1, in_flight: int = 1, spans: bool = True
    ) -> SimulationResult:
        """Simulate the program of a compilation of this problem.

        Args:
            compilation: The compilation with its program.
            frames: Number of frames.
            in_flight: Number of frames that are computed at the same time.
            spans: Keep the spans of computing and sending.

        Returns:
            The simulated times.
        """
        return simulate(self._compilation_workload(compilation), self.platform, frames, in_flight, spans)

    def program_metrics(self, compilation: PipelineState, memory: Mapping[str, MemoryUse] | None = None) -> Metrics:
        """Return the metrics of a compilation's program by simulation of one frame of each role.

        Args:
            compilation: The compilation with its program.
            memory: Device → memory use (see `program_memory_use`), if the target's overhead is to be counted.

        Returns:
            The simulated metrics.
        """
        assert compilation.routing is not None and compilation.plan is not None
        metrics = _simulated_metrics(
            self._compilation_workload(compilation), compilation.routing, self.platform, compilation.plan
        )
        if memory is None:
            return metrics
        return metrics.with_overhead(
            {entry.device: memory[entry.device].total - entry.memory for entry in metrics.devices}
        )

    def _compilation_workload(self, compilation: PipelineState) -> Workload:
        assert compilation.program is not None and compilation.routing is not None
        return build_workload(
            compilation.program, compilation.routing, self.platform, self.cost_model, self.runtime_costs
        )

    def draft_program(self, plan: Plan) -> PipelineState:
        """Return the routing and the program of a plan, without writing the segments as ONNX files.

        Args:
            plan: The plan.

        Returns:
            The compilation with routing and program.

        Raises:
            DicompilerError: The plan does not fit the layers, or the problem has no model.
        """
        return lower_unchecked(
            PipelineState(model=self._required_model, layers=self.layers, platform=self.platform, plan=plan)
        )

    def program_memory_use(self, compilation: PipelineState) -> dict[str, MemoryUse]:
        """Return the memory that each device needs to run a compilation's program, one frame at a time.

        Args:
            compilation: The compilation with its program.

        Returns:
            Device → memory use, including the target's overhead if the problem has a target.
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


@dataclass(frozen=True)
class RemoteEvaluator:
    """`Problem.evaluate` in a form that can be sent to other processes.

    Without a model, it is `Problem.estimate`. Weights are not sent: metrics do not depend on their values, and there
    may be gigabytes of them.

    Attributes:
        problem: The problem.
    """

    problem: Problem

    def __call__(self, plan: Plan) -> Metrics:
        """Return the metrics of a plan.

        Args:
            plan: The plan.

        Returns:
            The metrics.

        Raises:
            DicompilerError: The plan does not fit the layers or names an unknown device.
        """
        return self.problem.estimate(plan) if self.problem.model is None else self.problem.evaluate(plan)

    def evaluate_or_error(self, plan: Plan) -> Metrics | DicompilerError:
        """Return the metrics of a plan, or the error if it cannot be evaluated.

        Args:
            plan: The plan.

        Returns:
            The metrics or the error.
        """
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
        if model is None:
            return pickle.dumps((problem, None, {}))
        weights = {name: (weight.dtype, weight.shape) for name, weight in model.weights.items()}
        return pickle.dumps((problem, model.proto.SerializeToString(), weights))


@lru_cache(maxsize=4)  # Facts about the layers are memoised in the problem; searches use only a few problems.
def _restore_evaluator(parcel: bytes) -> RemoteEvaluator:
    """Return the evaluator in another process.

    Its weights are zeros, which take no memory until they are read.
    """
    problem, proto, weights = pickle.loads(parcel)
    if proto is None:
        return RemoteEvaluator(problem)
    hollow = {
        name: Weight(dtype, shape, np.zeros(raw_nbytes(dtype, shape), np.uint8).data)
        for name, (dtype, shape) in weights.items()
    }
    return RemoteEvaluator(replace(problem, model=Model(onnx.ModelProto.FromString(proto), hollow)))


def _simulated_metrics(work: Workload, routing: Routing, platform: Platform, plan: Plan) -> Metrics:
    """Return the metrics by simulation of one frame of each role."""
    return metrics_of_simulation(
        simulate(work, platform, frames=len(work.roles), keep_spans=False), work, routing, platform, plan
    )
