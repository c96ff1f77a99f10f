"""What passes map to what: one frozen record that grows along the way, from a loaded model to written artifacts."""

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
    """How a plan was decided on: the names of the strategy ("" where the plan was given) and of the cost model, and the
    objective. chosen: whose plan it is, where the strategy asks others."""

    strategy: str
    objective: str
    cost_model: str
    chosen_strategy: str = ""


@dataclass(frozen=True)
class PipelineState:
    """One compilation at one moment; a pass returns a new one (`dataclasses.replace`). None: not made yet.

    model: the ONNX model; layers: its layers; platform: the cluster; plan: what the annotating passes or a strategy
    decided; routing: what follows from layers and plan (set once partition has rewritten the model); reference: the
    model before that; program: steps per device; metrics: the costs that were predicted, and single: those of the
    whole network on one device; losses: those of its plan by itself and of each of
    its plans for losses (() where it has none); decision: how the plan came about;
    occupied, occupied_single: RAM and flash of each device by the target's measure, and those of one device that has
    all (() where the target has none); written: the directory that the target wrote; loaded: the graph before the
    first pass, by whose names users call nodes (see ir.lineage; the pass manager keeps it).
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
