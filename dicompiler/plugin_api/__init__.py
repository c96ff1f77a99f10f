"""Public API for plugin authors: hooks, base classes, records and errors.

    from dicompiler.plugin_api import Part, Plan, Problem, Strategy, hookimpl

Functions and less common records are in submodules by topic:

    regions     regions of tensors, tilings of layers, and a plan's computations and transfers
    costs       operation counts, cost models, memory, metrics, simulated times, wire formats
    onnx        ONNX graphs and weights; running models and comparing their outputs
    artifacts   files of artifacts, engines, run records, and access to remote devices
    search      work budgets, memory constraints, objectives and Pareto fronts
    utilities   error texts, captured output of processes, memoization, the registry of plugins

The other public packages are `dicompiler`, `dicompiler.testing` and `dicompiler.networks`. All other modules are
internal and may change at any time. A name is imported when it is first used, so that plugins load fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dicompiler.base.lazy_module import lazy_module

if TYPE_CHECKING:
    from dicompiler.base.errors import DicompilerError, PluginError, RunError, UsageError
    from dicompiler.cost.cost_model import CostModel
    from dicompiler.ir.cluster import Device, Host, Link, Network
    from dicompiler.ir.layers import Layer, LayerGraph
    from dicompiler.ir.onnx.model import Model
    from dicompiler.ir.operator_rule import Operation, OperatorRule, Piece
    from dicompiler.ir.pipeline_state import PipelineState
    from dicompiler.ir.plan import LayerShare, Part, Plan
    from dicompiler.ir.platform import Platform, PlatformFamily, PlatformFormat
    from dicompiler.ir.program import DeviceProgram, Program, Segment, TensorSpec, Transfer
    from dicompiler.ir.regions import Interval, Region, Shape
    from dicompiler.plugin.hookspecs import API_VERSION, hookimpl
    from dicompiler.plugin.pass_base import Instrument, Pass, PassError
    from dicompiler.plugin.pass_manager import PassManager, make_pipeline
    from dicompiler.plugin.registry import registry
    from dicompiler.search.problem import Problem
    from dicompiler.search.strategy import Strategy
    from dicompiler.target.client import Session
    from dicompiler.target.engine import Engine
    from dicompiler.target.run_records import DeviceReport, RunOptions, RunResult
    from dicompiler.target.target_base import Service, Target

__all__ = [
    "API_VERSION", "CostModel", "Device", "DeviceProgram", "DeviceReport", "DicompilerError", "Engine", "Host",
    "Instrument", "Interval", "Layer", "LayerGraph", "LayerShare", "Link", "Model", "Network", "Operation",
    "OperatorRule", "Part", "Pass", "PassError", "PassManager", "Piece", "PipelineState", "Plan", "Platform",
    "PlatformFamily", "PlatformFormat", "PluginError", "Problem", "Program", "Region", "RunError", "RunOptions",
    "RunResult", "Segment", "Service", "Session", "Shape", "Strategy", "Target", "TensorSpec", "Transfer",
    "UsageError", "hookimpl", "make_pipeline", "registry",
]  # fmt: skip

if not TYPE_CHECKING:  # Type checkers must not see `__getattr__`, because they would then accept unknown names.
    __getattr__, __dir__ = lazy_module(__name__)
