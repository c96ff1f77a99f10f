"""A Problem: what a strategy is given.

LayerGraph + Platform + CostModel + objective → Problem;   Problem → Plan;   Problem + Plan → Metrics.
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
"""How many kinds of devices are simulated to find the one that is best alone."""
MIN_SPLIT_GAIN = 1.03
"""How many times as good as one device alone several must be predicted to be to be worth it: predictions are some per
cent off. Emulated clusters gave all of what was promised from there on (docs/prediction.md)."""


@dataclass(frozen=True)
class Problem:
    """Layers to place, the platform to place them on, what a piece costs there, and what is to be made small.

    source, sink: the devices that hold the inputs and want the outputs; the platform's first device by default (it
    may be compute-less). model: what the layers were formed of; `evaluate` and `simulate` need it. executor: whom
    `evaluate_all` gives its work; strategies ask it for what can be done at once. target: what will run the plan, if
    that is known: what it adds counts as memory then. loaded: the graph as the file has it, by whose names users call
    nodes (see `lineage`). runtime: device → what messages, calls and copies cost there; nothing where it is not in it.
    Raises UsageError for an unknown objective, DicompilerError for an unknown device.
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
        objective_terms(self.objective)  # raises where it is none
        for name in (*self.source, *self.sink):
            self.platform.device(name)

    def build_plan(self, parts: Mapping[str, Sequence[Part]]) -> Plan:
        """The plan with these parts by layer name, its layers in layer order, and this problem's source, sink and
        wire. Of a layer that draws random numbers the device of its first part has all: others would draw
        others."""
        first = (self.platform.devices[0].name,)
        ordered = {layer.name: tuple(parts[layer.name]) for layer in self.layers.layers}
        for name in self._random_layers:
            ordered[name] = (replace(ordered[name][0], region=None, reduce=None),)
        return Plan(ordered, self.source or first, self.sink or first, wire_format=WireFormat(self.layers.wire_dtypes))

    @cached_property
    def _random_layers(self) -> frozenset[str]:
        return frozenset(random_layers(self.layers))

    def single_device_plan(self, device: str) -> Plan:
        """The plan that gives one device every layer."""
        return self.build_plan({layer.name: (Part(device),) for layer in self.layers.layers})

    def estimate(self, plan: Plan) -> Metrics:
        """What `plan` comes to by an estimate of milliseconds, see `metrics.measure`: exact bytes and operations, but
        times that suppose barriers between layers. Raises DicompilerError where the plan does not fit the layers or
        names an unknown device."""
        with gc_paused():
            metrics = self._estimate_metrics(plan)
        return metrics if self.target is None else metrics.with_overhead(self.target_overhead)

    @cached_property
    def lineage(self) -> NodeOrigins:
        """Which nodes and layers the nodes of the file have become."""
        return NodeOrigins(self.layers, self.file_graph)

    @cached_property
    def target_overhead(self) -> Mapping[str, int]:
        """Device → bytes that the target adds there at least, whatever the device does."""
        if self.target is None:
            return {device.name: 0 for device in self.platform.devices}
        idle = tuple(DeviceProgram(device.name, device.host, (), (), (), {}) for device in self.platform.devices)
        return self.target.memory_overhead(Program(idle, (), (), (), {}, ()))

    def evaluate(self, plan: Plan) -> Metrics:
        """What `plan` comes to when its program is played by the simulator, which decides between plans. Takes
        2 to 150 ms: it is not written as ONNX, unless there is a target to ask. Raises as `estimate`."""
        with gc_paused():
            if self.target is not None:
                compilation = self.draft_program(plan)
                return self.program_metrics(compilation, self.program_memory_use(compilation))
            return self._simulate_metrics(plan)

    @cached_property
    def best_single_device(self) -> tuple[Plan, Metrics]:
        """The whole network on the one device where that is best by the objective, and what it comes to by the same
        simulation: the candidate that every plan is reported beside. Of equals the first.

        Where there are many kinds of devices, estimates choose whom to simulate: where one device has all, next to
        nothing overlaps.
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
            tried = [(plan, self._single_device_metrics(plan)) for plan in plans]
        plan, metrics = min(tried, key=lambda one: (one[1].objective_value(self.objective), one[1].latency_s))
        return plan, metrics if self.target is None else metrics.with_overhead(self.target_overhead)

    def _device_kind(self, device: Device) -> tuple[object, ...]:
        """Devices of one kind come to the same where each has the whole network: what a layer takes there, and the way
        there from the ends, tell them apart."""
        shares = [
            (one, LayerShare(None if one.whole_reason else full_region(output_shape(self.layers, one))))
            for one in self.layers.layers
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
        """`evaluate` of many plans, in their order and spread over `executor` where there is one (processes, or another
        host's: plans and shapes travel there, weights do not). A plan that cannot be evaluated gives its error."""
        attempt = self._evaluator.evaluate_or_error
        return list(map(attempt, plans) if self.executor is None else self.executor.map(attempt, plans))

    @cached_property
    def _evaluator(self) -> RemoteEvaluator:
        return RemoteEvaluator(self)  # one, so that what travels is written once

    def simulate(self, plan: Plan, frames: int = 1, in_flight: int = 1) -> SimulationResult:
        """Plays the plan's program for a stream of frames, see `simulator.simulate`. Raises as `estimate`."""
        return simulate(self.workload(plan)[1], self.platform, frames, in_flight)

    def workload(self, plan: Plan) -> tuple[Routing, Workload]:
        """The plan's routing, and what the simulator plays of its program, which is not written. DicompilerError where
        the problem has no model."""
        routing, program = build_program_only(self._model_facts, self.layers, self.platform, plan)
        return routing, build_workload(program, routing, self.platform, self.cost_model, self.runtime_costs)

    def simulate_compilation(
        self, compilation: PipelineState, frames: int = 1, in_flight: int = 1, spans: bool = True
    ) -> SimulationResult:
        """Plays the program of a compilation of this problem, as `simulate`. spans: whether to keep them."""
        return simulate(self._compilation_workload(compilation), self.platform, frames, in_flight, spans)

    def program_metrics(self, compilation: PipelineState, memory: Mapping[str, MemoryUse] | None = None) -> Metrics:
        """What a compilation of this problem that has a program comes to, by simulation of one frame of each role;
        memory: what its devices hold (`Problem.memory`), if what the target adds is to count."""
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
        """The plan's routing and program. DicompilerError where the problem has no model."""
        return lower_unchecked(
            PipelineState(model=self._required_model, layers=self.layers, platform=self.platform, plan=plan)
        )

    def program_memory_use(self, compilation: PipelineState) -> dict[str, MemoryUse]:
        """Device → what it holds when the compilation's program runs, one frame at a time, with what the target adds
        (nothing where the problem has none)."""
        assert compilation.program is not None
        added = None if self.target is None else self.target.memory_overhead(compilation.program)
        return program_memory(compilation.program, added=added)

    @cached_property
    def _model_facts(self) -> ModelFacts:
        return ModelFacts.from_model(self._required_model)

    @property
    def _required_model(self) -> Model:
        if self.model is None:
            raise DicompilerError("problem: it was made without a model: give one, or use `estimate`")
        return self.model


@dataclass(frozen=True)
class RemoteEvaluator:
    """`Problem.evaluate`, or without a model `Problem.estimate`, in a form that can be sent to other processes.

    Weights stay at home: what a plan comes to does not depend on their values, and there may be gigabytes.
    """

    problem: Problem

    def __call__(self, plan: Plan) -> Metrics:
        """What `plan` comes to. Raises as `Problem.evaluate`."""
        return self.problem.estimate(plan) if self.problem.model is None else self.problem.evaluate(plan)

    def evaluate_or_error(self, plan: Plan) -> Metrics | DicompilerError:
        """The same, but what cannot be evaluated gives its error."""
        try:
            return self(plan)
        except DicompilerError as error:
            return error

    def __reduce__(self) -> tuple[object, ...]:
        return _restore_evaluator, (self._pickled,)

    @cached_property
    def _pickled(self) -> bytes:
        """What travels, the same for every plan."""
        model = self.problem.model
        problem = replace(self.problem, executor=None, model=None, file_graph=None)
        if model is None:
            return pickle.dumps((problem, None, {}))
        weights = {name: (weight.dtype, weight.shape) for name, weight in model.weights.items()}
        return pickle.dumps((problem, model.proto.SerializeToString(), weights))


@lru_cache(maxsize=4)  # so that what one plan makes known of the layers serves the next one; searches have few problems
def _restore_evaluator(parcel: bytes) -> RemoteEvaluator:
    """The evaluator in another process, with zeros for weights (which take no memory until somebody reads them)."""
    problem, proto, weights = pickle.loads(parcel)
    if proto is None:
        return RemoteEvaluator(problem)
    hollow = {
        name: Weight(dtype, shape, np.zeros(raw_nbytes(dtype, shape), np.uint8).data)
        for name, (dtype, shape) in weights.items()
    }
    return RemoteEvaluator(replace(problem, model=Model(onnx.ModelProto.FromString(proto), hollow)))


def _simulated_metrics(work: Workload, routing: Routing, platform: Platform, plan: Plan) -> Metrics:
    """By simulation of one frame of each role."""
    return metrics_of_simulation(
        simulate(work, platform, frames=len(work.roles), keep_spans=False), work, routing, platform, plan
    )
