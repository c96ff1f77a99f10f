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
    from dicompiler.base.bounding import bounded_memory
    from dicompiler.base.errors import DicompilerError, PluginError, RunError, UsageError, expect, nearest, one_line
    from dicompiler.base.given import check_rows, given_array
    from dicompiler.base.objectives import OBJECTIVES, objective_terms
    from dicompiler.base.remembering import Remembers, remembered
    from dicompiler.base.schema import load_json, read_text, validate
    from dicompiler.base.specs import Spec
    from dicompiler.base.units import format_bytes
    from dicompiler.base.version import version
    from dicompiler.base.written import Written

    # What a plan comes to
    from dicompiler.cost.counting import Count, count, flops, macs, task_macs, weight_regions
    from dicompiler.cost.memory import constant_sizes, peak, program_memory, segment_values
    from dicompiler.cost.model import Analytic, CostModel
    from dicompiler.cost.runtime import FREE, RuntimeCosts
    from dicompiler.cost.workload import look_ups

    # Layers, plans, platforms
    from dicompiler.ir.compilation import Compilation
    from dicompiler.ir.devices import Device, Host, Link, Network
    from dicompiler.ir.drawing import draws
    from dicompiler.ir.layers import Layer, LayerGraph
    from dicompiler.ir.lineage import Lineage
    from dicompiler.ir.metrics import DeviceMetrics, Metrics, Occupied

    # Models
    from dicompiler.ir.onnx.file import without
    from dicompiler.ir.onnx.graph import ConstantValues, Graph, HeldAttribute, Variable, names_read
    from dicompiler.ir.onnx.graph_export import export_node
    from dicompiler.ir.onnx.model import Model
    from dicompiler.ir.onnx.names import unique
    from dicompiler.ir.onnx.soundness import check_size
    from dicompiler.ir.onnx.structure import captures
    from dicompiler.ir.onnx.weights import (
        LARGE,
        Weight,
        array_dtype,
        dense,
        dtype_name,
        hollow,
        is_hollow,
        raw_nbytes,
        sized,
    )
    from dicompiler.ir.plan import Part, Plan, Share, load_plan
    from dicompiler.ir.platform import Platform, PlatformFamily, PlatformFormat

    # From a plan to a program
    from dicompiler.ir.program import DeviceProgram, Program, Segment, State, Step, Transfer, Value

    # Regions
    from dicompiler.ir.regions import (
        Interval,
        Region,
        Shape,
        bounding,
        contains,
        full,
        intersect,
        is_empty,
        shape_of,
        shares,
        shift,
        slices,
        volume,
        with_interval,
    )
    from dicompiler.ir.routing import Box, Routing, leaves
    from dicompiler.ir.rule import (
        STAND_IN_DOMAIN,
        CostFunction,
        Effort,
        Node,
        Operation,
        OperatorRule,
        Piece,
        PieceFunction,
        Tensor,
        counted,
        each,
        free,
        taken,
        whole,
    )
    from dicompiler.ir.states import set_states, states_of
    from dicompiler.ir.tasks import Key, ShareTask, Task, TaskId, Work
    from dicompiler.ir.wire import Wire, sent_dtype, sent_nbytes
    from dicompiler.partition.annotations import part_of, unannotated
    from dicompiler.partition.bounds_inference import align, cuttable, output_shape, reduction, share_task
    from dicompiler.partition.lowering import partition, split
    from dicompiler.partition.routing import route_on
    from dicompiler.partition.tiling import (
        Label,
        aligned_cuts,
        axis_of,
        cut_axis,
        exit_of,
        fused_regions,
        grid_tiles,
        named_axes,
        read_within,
        tile,
        whole_plan,
    )
    from dicompiler.plugin.hookspecs import API_VERSION, hookimpl
    from dicompiler.plugin.pass_manager import PassManager, pipeline
    from dicompiler.plugin.passes import Instrument, Pass, PassFailure
    from dicompiler.plugin.registry import registry
    from dicompiler.search.allowance import BUDGET, Allowance, Spent
    from dicompiler.search.constraints import (
        check_constraints,
        check_occupied,
        fits_constraints,
        free_memory,
        memory_lacking,
        memory_needed,
        memory_used,
    )
    from dicompiler.search.fronts import AUTODICE, Front, Measurement, Point, Tell, check_objectives, objective_values
    from dicompiler.search.problem import WORTH, Problem, RemoteEvaluator
    from dicompiler.search.strategy import INTERRUPTED, Strategy

    # Artifacts and their runs
    from dicompiler.target.client import Session
    from dicompiler.target.digests import file_digest, file_record
    from dicompiler.target.interface import Service, Target
    from dicompiler.target.manifest import (
        ARTIFACT,
        TYPES,
        Json,
        artifact_document,
        json_text,
        transfer_document,
        value_document,
    )
    from dicompiler.target.records import (
        Call,
        Copying,
        DeviceReport,
        DeviceStatus,
        Emulation,
        Installed,
        RunEvent,
        RunOptions,
        RunResult,
        Timed,
    )
    from dicompiler.target.remote import ssh
    from dicompiler.target.remote.certificates import DEVICES
    from dicompiler.target.remote.hosts import Hosts, Place
    from dicompiler.target.seal import check_files, open_artifact, read_sealed, sealed_text
    from dicompiler.verify.comparison import Check, compare, graph_inputs, random_inputs
    from dicompiler.verify.executor import Executor, run_model
    from dicompiler.verify.levels import Optimization
    from dicompiler.verify.samples import Samples, read_samples
    from dicompiler.verify.tolerances import Tolerance, in_steps

__all__ = [
    "API_VERSION", "ARTIFACT", "AUTODICE", "BUDGET", "DEVICES", "FREE", "INTERRUPTED", "LARGE", "OBJECTIVES",
    "STAND_IN_DOMAIN", "TYPES", "WORTH", "Allowance", "Analytic", "Box", "Call", "Check", "Compilation",
    "ConstantValues", "Copying", "CostFunction", "CostModel", "Count", "Device", "DeviceMetrics", "DeviceProgram",
    "DeviceReport", "DeviceStatus", "DicompilerError", "Effort", "Emulation", "Executor", "Front", "Graph",
    "HeldAttribute", "Host", "Hosts", "Installed", "Instrument", "Interval", "Json", "Key", "Label", "Layer",
    "LayerGraph", "Lineage", "Link", "Measurement", "Metrics", "Model", "Network", "Node", "Occupied", "Operation",
    "OperatorRule", "Optimization", "Part", "Pass", "PassFailure", "PassManager", "Piece", "PieceFunction", "Place",
    "Plan", "Platform", "PlatformFamily", "PlatformFormat", "PluginError", "Point", "Problem", "Program", "Region",
    "Remembers", "RemoteEvaluator", "Routing", "RunError", "RunEvent", "RunOptions", "RunResult", "RuntimeCosts",
    "Samples", "Segment", "Service", "Session", "Shape", "Share", "ShareTask", "Spec", "Spent", "State", "Step",
    "Strategy", "Target", "Task", "TaskId", "Tell", "Tensor", "Timed", "Tolerance", "Transfer", "UsageError", "Value",
    "Variable", "Weight", "Wire", "Work", "Written", "align", "aligned_cuts", "array_dtype", "artifact_document",
    "axis_of", "bounded_memory", "bounding", "captures", "check_constraints", "check_files", "check_objectives",
    "check_occupied", "check_rows", "check_size", "compare", "constant_sizes", "contains", "count", "counted",
    "cut_axis", "cuttable", "dense", "draws", "dtype_name", "each", "exit_of", "expect", "export_node", "file_digest",
    "file_record", "fits_constraints", "flops", "format_bytes", "free", "free_memory", "full", "fused_regions",
    "given_array", "graph_inputs", "grid_tiles", "hollow", "hookimpl", "in_steps", "intersect", "is_empty", "is_hollow",
    "json_text", "leaves", "load_json", "load_plan", "look_ups", "macs", "memory_lacking", "memory_needed",
    "memory_used", "named_axes", "names_read", "nearest", "objective_terms", "objective_values", "one_line",
    "open_artifact", "output_shape", "part_of", "partition", "peak", "pipeline", "program_memory", "random_inputs",
    "raw_nbytes", "read_samples", "read_sealed", "read_text", "read_within", "reduction", "registry", "remembered",
    "route_on", "run_model", "sealed_text", "segment_values", "sent_dtype", "sent_nbytes", "set_states", "shape_of",
    "share_task", "shares", "shift", "sized", "slices", "split", "ssh", "states_of", "taken", "task_macs", "tile",
    "transfer_document", "unannotated", "unique", "validate", "value_document", "version", "volume", "weight_regions",
    "whole", "whole_plan", "with_interval", "without",
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
