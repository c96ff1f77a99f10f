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
    """How a plan was made.

    Attributes:
        strategy: Name of the strategy; "" if the plan was given.
        objective: The objective.
        cost_model: Name of the cost model.
        chosen_strategy: Strategy that made the plan, if `strategy` compares several.
    """

    strategy: str
    objective: str
    cost_model: str
    chosen_strategy: str = ""


@dataclass(frozen=True)
class PipelineState:
    """State of a compilation between two passes.

    A pass returns a new one (`dataclasses.replace`). None: not yet known.

    Attributes:
        model: The ONNX model.
        layers: Its layers.
        platform: The cluster.
        plan: Plan of the annotating passes or of a strategy.
        routing: Routing of the plan, set by the pass `partition`.
        reference: The model before `partition`.
        program: Steps of each device.
        metrics: Predicted metrics of the plan.
        single_device_metrics: Predicted metrics of the best single device.
        failure_metrics: Metrics of the plan itself and of each failure plan; () without failure plans.
        decision: How the plan was made.
        footprints: RAM and flash of each device as measured by the target; () if it does not measure them.
        single_device_footprints: The same for one device that computes everything.
        artifact_directory: Directory that the target wrote.
        loaded_graph: The graph before the first pass, with the node names that users know (see `ir.node_origins`).
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
