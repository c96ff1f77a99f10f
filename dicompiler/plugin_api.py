"""The one door of those who write plugins: all that implementing a hook needs, under names that stay.

    from dicompiler.plugin_api import Part, Plan, Problem, Strategy, hookimpl

Beside it there are `dicompiler` itself (compile, connect, run …) and `dicompiler.testing`; every other module is
internal and may change at any time. Nothing is imported before it is used, so that looking for plugins stays quick.
"""

from __future__ import annotations

import ast
import inspect
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

# For type checkers; at run time each name comes, when it is first used, from where these say.
if TYPE_CHECKING:
    # The hooks, and what they yield
    # Errors, options, files, numbers
    from dicompiler.base.captured_output import CapturedOutput
    from dicompiler.base.errors import (
        DicompilerError,
        PluginError,
        RunError,
        UsageError,
        check_type,
        did_you_mean,
        one_line,
    )
    from dicompiler.base.input_arrays import check_index_range, coerce_input
    from dicompiler.base.memoize import Memoizing, memoized
    from dicompiler.base.objectives import OBJECTIVES, objective_terms
    from dicompiler.base.option_specs import Spec
    from dicompiler.base.process import memory_limit
    from dicompiler.base.schema import load_json, read_text, validate
    from dicompiler.base.units import format_bytes
    from dicompiler.base.version import package_version
    from dicompiler.cost.cost_model import AnalyticModel, CostModel
    from dicompiler.cost.memory import constant_sizes, peak_nbytes, program_memory, segment_value_sizes

    # What a plan comes to
    from dicompiler.cost.op_counts import (
        OpCounts,
        count_flops,
        count_macs,
        count_operations,
        count_task_macs,
        weight_regions,
    )
    from dicompiler.cost.runtime_overhead import FREE_RUNTIME, RuntimeCosts
    from dicompiler.cost.workload import count_lookup_copies
    from dicompiler.ir.cluster import Device, Host, Link, Network
    from dicompiler.ir.layers import Layer, LayerGraph
    from dicompiler.ir.metrics import DeviceFootprint, DeviceMetrics, Metrics
    from dicompiler.ir.node_origins import NodeOrigins
    from dicompiler.ir.onnx.graph import ConstantValues, ModelGraph, OpaqueAttribute, Variable, names_read
    from dicompiler.ir.onnx.graph_export import export_node
    from dicompiler.ir.onnx.graph_structure import captured_names
    from dicompiler.ir.onnx.model import Model
    from dicompiler.ir.onnx.names import unique_name

    # Models
    from dicompiler.ir.onnx.protobuf_io import copy_without
    from dicompiler.ir.onnx.sanity_checks import check_tensor_size
    from dicompiler.ir.onnx.weights import (
        MIN_WEIGHT_BYTES,
        Weight,
        array_dtype,
        dtype_name,
        is_fixed_size,
        is_placeholder,
        make_placeholder,
        raw_nbytes,
        to_dense,
    )
    from dicompiler.ir.operator_rule import (
        STAND_IN_DOMAIN,
        CostFunction,
        Node,
        OpCost,
        Operation,
        OperatorRule,
        Piece,
        PieceFunction,
        TensorInfo,
        cost_per_input,
        cost_per_output,
        counted_rules,
        whole_tensor,
        zero_cost,
    )

    # Layers, plans, platforms
    from dicompiler.ir.pipeline_state import PipelineState
    from dicompiler.ir.plan import LayerShare, Part, Plan, load_plan
    from dicompiler.ir.platform import Platform, PlatformFamily, PlatformFormat

    # From a plan to a program
    from dicompiler.ir.program import DeviceProgram, DeviceState, Program, Segment, Step, TensorSpec, Transfer
    from dicompiler.ir.random_ops import is_random
    from dicompiler.ir.recurrent_states import read_states, write_states

    # Regions
    from dicompiler.ir.regions import (
        Interval,
        Region,
        Shape,
        bounding_region,
        contains,
        full_region,
        intersect,
        is_empty,
        region_shape,
        relative_to,
        split_proportionally,
        to_slices,
        volume,
        with_interval,
    )
    from dicompiler.ir.routing import Box, Routing, assembly_leaves
    from dicompiler.ir.tasks import ShareTask, Task, TaskId, TaskNode, TensorKey
    from dicompiler.ir.wire_dtype import WireFormat, sent_dtype, sent_nbytes
    from dicompiler.partition.annotations import read_part, remove_annotations
    from dicompiler.partition.bounds_inference import (
        align_region,
        cuttable_axes,
        make_share_task,
        output_shape,
        reduction_length,
    )
    from dicompiler.partition.lowering import lower, partition
    from dicompiler.partition.routing import route_on_platform
    from dicompiler.partition.tiling import (
        AxisLabel,
        align_cuts,
        exit_layer,
        fused_regions,
        grid_tiles,
        is_read_only_within,
        labelled_axis,
        named_axes,
        single_device_plan,
        split_axis,
        tile_layer,
    )
    from dicompiler.plugin.hookspecs import API_VERSION, hookimpl
    from dicompiler.plugin.pass_base import Instrument, Pass, PassError
    from dicompiler.plugin.pass_manager import PassManager, make_pipeline
    from dicompiler.plugin.registry import registry
    from dicompiler.search.constraints import (
        check_constraints,
        check_measured_memory,
        fits_constraints,
        free_memory,
        missing_memory,
        needed_memory,
        used_memory,
    )
    from dicompiler.search.pareto_front import (
        AUTODICE_OBJECTIVES,
        MeasuredMetrics,
        ParetoFront,
        ParetoPoint,
        ProgressCallback,
        check_objectives,
        objective_values,
    )
    from dicompiler.search.problem import MIN_SPLIT_GAIN, Problem, RemoteEvaluator
    from dicompiler.search.strategy import INTERRUPTED_NOTE, Strategy
    from dicompiler.search.work_budget import DEFAULT_BUDGET_S, BudgetExceeded, WorkBudget

    # Artifacts and their runs
    from dicompiler.target.client import Session
    from dicompiler.target.digests import file_digest, make_file_record
    from dicompiler.target.integrity import check_files, format_checksummed_json, load_artifact, read_checksummed_json
    from dicompiler.target.manifest import (
        ARTIFACT_FORMAT,
        SENDABLE_TYPES,
        Json,
        describe_artifact,
        describe_transfer,
        describe_value,
        format_json,
    )
    from dicompiler.target.remote import ssh
    from dicompiler.target.remote.certificates import DEVICES_DIRECTORY
    from dicompiler.target.remote.hosts import DeviceLocation, Hosts
    from dicompiler.target.run_records import (
        CopyFunction,
        DeviceReport,
        DeviceStatus,
        Emulation,
        InstalledDevice,
        RunEvent,
        RunOptions,
        RunResult,
        SegmentCall,
        TimelineEntry,
    )
    from dicompiler.target.target_base import Service, Target
    from dicompiler.verify.calibration_samples import Samples, read_samples
    from dicompiler.verify.comparison import Check, compare_value, graph_inputs, random_inputs
    from dicompiler.verify.executor import ProgramExecutor, run_model
    from dicompiler.verify.levels import Optimization
    from dicompiler.verify.tolerances import Tolerance, quantized_tolerances

__all__ = [
    "API_VERSION",
    "ARTIFACT_FORMAT",
    "AUTODICE_OBJECTIVES",
    "DEFAULT_BUDGET_S",
    "DEVICES_DIRECTORY",
    "FREE_RUNTIME",
    "INTERRUPTED_NOTE",
    "MIN_SPLIT_GAIN",
    "MIN_WEIGHT_BYTES",
    "OBJECTIVES",
    "SENDABLE_TYPES",
    "STAND_IN_DOMAIN",
    "AnalyticModel",
    "AxisLabel",
    "Box",
    "BudgetExceeded",
    "CapturedOutput",
    "Check",
    "ConstantValues",
    "CopyFunction",
    "CostFunction",
    "CostModel",
    "Device",
    "DeviceFootprint",
    "DeviceLocation",
    "DeviceMetrics",
    "DeviceProgram",
    "DeviceReport",
    "DeviceState",
    "DeviceStatus",
    "DicompilerError",
    "Emulation",
    "Host",
    "Hosts",
    "InstalledDevice",
    "Instrument",
    "Interval",
    "Json",
    "Layer",
    "LayerGraph",
    "LayerShare",
    "Link",
    "MeasuredMetrics",
    "Memoizing",
    "Metrics",
    "Model",
    "ModelGraph",
    "Network",
    "Node",
    "NodeOrigins",
    "OpCost",
    "OpCounts",
    "OpaqueAttribute",
    "Operation",
    "OperatorRule",
    "Optimization",
    "ParetoFront",
    "ParetoPoint",
    "Part",
    "Pass",
    "PassError",
    "PassManager",
    "Piece",
    "PieceFunction",
    "PipelineState",
    "Plan",
    "Platform",
    "PlatformFamily",
    "PlatformFormat",
    "PluginError",
    "Problem",
    "Program",
    "ProgramExecutor",
    "ProgressCallback",
    "Region",
    "RemoteEvaluator",
    "Routing",
    "RunError",
    "RunEvent",
    "RunOptions",
    "RunResult",
    "RuntimeCosts",
    "Samples",
    "Segment",
    "SegmentCall",
    "Service",
    "Session",
    "Shape",
    "ShareTask",
    "Spec",
    "Step",
    "Strategy",
    "Target",
    "Task",
    "TaskId",
    "TaskNode",
    "TensorInfo",
    "TensorKey",
    "TensorSpec",
    "TimelineEntry",
    "Tolerance",
    "Transfer",
    "UsageError",
    "Variable",
    "Weight",
    "WireFormat",
    "WorkBudget",
    "align_cuts",
    "align_region",
    "array_dtype",
    "assembly_leaves",
    "bounding_region",
    "captured_names",
    "check_constraints",
    "check_files",
    "check_index_range",
    "check_measured_memory",
    "check_objectives",
    "check_tensor_size",
    "check_type",
    "coerce_input",
    "compare_value",
    "constant_sizes",
    "contains",
    "copy_without",
    "cost_per_input",
    "cost_per_output",
    "count_flops",
    "count_lookup_copies",
    "count_macs",
    "count_operations",
    "count_task_macs",
    "counted_rules",
    "cuttable_axes",
    "describe_artifact",
    "describe_transfer",
    "describe_value",
    "did_you_mean",
    "dtype_name",
    "exit_layer",
    "export_node",
    "file_digest",
    "fits_constraints",
    "format_bytes",
    "format_checksummed_json",
    "format_json",
    "free_memory",
    "full_region",
    "fused_regions",
    "graph_inputs",
    "grid_tiles",
    "hookimpl",
    "intersect",
    "is_empty",
    "is_fixed_size",
    "is_placeholder",
    "is_random",
    "is_read_only_within",
    "labelled_axis",
    "load_artifact",
    "load_json",
    "load_plan",
    "lower",
    "make_file_record",
    "make_pipeline",
    "make_placeholder",
    "make_share_task",
    "memoized",
    "memory_limit",
    "missing_memory",
    "named_axes",
    "names_read",
    "needed_memory",
    "objective_terms",
    "objective_values",
    "one_line",
    "output_shape",
    "package_version",
    "partition",
    "peak_nbytes",
    "program_memory",
    "quantized_tolerances",
    "random_inputs",
    "raw_nbytes",
    "read_checksummed_json",
    "read_part",
    "read_samples",
    "read_states",
    "read_text",
    "reduction_length",
    "region_shape",
    "registry",
    "relative_to",
    "remove_annotations",
    "route_on_platform",
    "run_model",
    "segment_value_sizes",
    "sent_dtype",
    "sent_nbytes",
    "single_device_plan",
    "split_axis",
    "split_proportionally",
    "ssh",
    "tile_layer",
    "to_dense",
    "to_slices",
    "unique_name",
    "used_memory",
    "validate",
    "volume",
    "weight_regions",
    "whole_tensor",
    "with_interval",
    "write_states",
    "zero_cost",
]  # fmt: skip


def _homes() -> dict[str, tuple[str, str]]:
    """Name → (module, the name that it has there), as the imports above say."""
    imports = ast.walk(ast.parse(inspect.getsource(sys.modules[__name__])))
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in imports
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("dicompiler.")
        for alias in node.names
    }


_HOMES = _homes()


def __getattr__(name: str) -> Any:
    """Imports a name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, inside = _HOMES[name]
    try:
        value = getattr(import_module(module), inside)
    except AttributeError:  # a module itself
        value = import_module(f"{module}.{inside}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
