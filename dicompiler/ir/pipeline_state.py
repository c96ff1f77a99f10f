"""State of the pass pipeline: an immutable record that grows from a loaded model to written artifacts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import onnx

    from dicompiler.ir.layers import LayerGraph
    from dicompiler.ir.metrics import DeviceFootprint, FailureMetrics, Metrics
    from dicompiler.ir.onnx.model import Model
    from dicompiler.ir.plan import Plan
    from dicompiler.ir.platform import Platform
    from dicompiler.ir.program import Program
    from dicompiler.ir.routing import Routing


@dataclass(frozen=True)
class Decision:
    """Names of the strategy, objective and cost model with which a plan was made.

    Attributes:
        strategy: Name of the strategy; "" if the user gave the plan.
        objective: Objective that the strategy minimised.
        cost_model: Name of the cost model.
        chosen_strategy: Name of the strategy that made the plan, if `strategy` compares several strategies.
    """

    strategy: str
    objective: str
    cost_model: str
    chosen_strategy: str = ""


@dataclass(frozen=True)
class PipelineState:
    """Data of a compilation between two passes.

    Each step returns a new object, made with `dataclasses.replace`. A field is None until a step sets it. The object
    has nothing to do with the states of a model (tensors that devices keep from frame to frame).

    Attributes:
        model: The ONNX model.
        layers: Layers of the model: the units that a plan divides.
        platform: Hosts, devices and network of the cluster.
        plan: Plan of a strategy, or of annotating passes, which set the parts of the layers that they name.
        routing: Tasks that the plan requires, and the regions that devices exchange; set by the pass `partition`.
        reference: The model with which outputs are compared: the one before `trim` or, if nothing was trimmed, before
            `partition`.
        program: Steps of each device, and transfers between devices.
        metrics: Predicted metrics of the plan.
        single_device_metrics: Predicted metrics of the best single device.
        failure_metrics: Metrics of the plan itself and of each failure plan; () if there are no failure plans.
        decision: Strategy, objective and cost model with which the plan was made.
        footprints: RAM and flash that each device needs, as measured by the target; () if the target does not measure.
        single_device_footprints: RAM and flash of one device that computes the whole model, as measured by the target.
        artifact_directory: Directory that the target wrote.
        loaded_graph: The graph before the first pass. It has the node names of the user's file.
    """

    model: Model
    layers: LayerGraph | None = None
    platform: Platform | None = None
    plan: Plan | None = None
    routing: Routing | None = None
    reference: Model | None = None
    program: Program | None = None
    metrics: Metrics | None = None
    single_device_metrics: Metrics | None = None
    failure_metrics: tuple[FailureMetrics, ...] = ()
    decision: Decision | None = None
    footprints: tuple[DeviceFootprint, ...] = ()
    single_device_footprints: tuple[DeviceFootprint, ...] = ()
    artifact_directory: Path | None = None
    loaded_graph: onnx.GraphProto | None = field(default=None, repr=False, compare=False)
