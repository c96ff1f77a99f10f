"""Operation counts, cost models, memory, metrics, simulated times and wire formats.

This module is part of the public API for plugin authors. A name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dicompiler.base.lazy_module import lazy_module

if TYPE_CHECKING:
    from dicompiler.cost.cost_model import AnalyticModel, LocalBytes
    from dicompiler.cost.memory import MemoryUse, constant_sizes, peak_nbytes, program_memory, segment_value_sizes
    from dicompiler.cost.op_counts import OpCounts, count_macs, count_operations, count_task_macs, weight_regions
    from dicompiler.cost.runtime_overhead import FREE_RUNTIME, RuntimeCosts
    from dicompiler.cost.simulator import SimulationResult, Span
    from dicompiler.cost.workload import CopyCounts, count_lookup_copies
    from dicompiler.ir.cluster import EngineRate
    from dicompiler.ir.frame_prediction import FramePrediction
    from dicompiler.ir.metrics import DeviceFootprint, DeviceMetrics, FailureMetrics, Metrics
    from dicompiler.ir.operator_rule import OpCost, cost_per_input, cost_per_output, whole_tensor, zero_cost
    from dicompiler.ir.wire_dtype import WireFormat, sent_dtype, sent_nbytes

__all__ = [
    "FREE_RUNTIME", "AnalyticModel", "CopyCounts", "DeviceFootprint", "DeviceMetrics", "EngineRate",
    "FailureMetrics", "FramePrediction", "LocalBytes", "MemoryUse", "Metrics", "OpCost", "OpCounts", "RuntimeCosts",
    "SimulationResult", "Span", "WireFormat", "constant_sizes", "cost_per_input", "cost_per_output",
    "count_lookup_copies", "count_macs", "count_operations", "count_task_macs", "peak_nbytes", "program_memory",
    "segment_value_sizes", "sent_dtype", "sent_nbytes", "weight_regions", "whole_tensor", "zero_cost",
]  # fmt: skip

if not TYPE_CHECKING:  # Type checkers must not see `__getattr__`, because they would then accept unknown names.
    __getattr__, __dir__ = lazy_module(__name__)
