"""dicompiler splits a trained ONNX network over a cluster of edge devices, and verifies the result.

    result = dicompiler.compile("model.onnx", platform="rpi4x4", strategy="modnn", target="sockets", output="build")
    result.plan, result.program, result.metrics, result.artifacts; result.verify()
    dicompiler.run("build").outputs
    with dicompiler.connect("build") as session: session.infer({"input": array})

All names are imported on first use, so that `dicompiler --help` is fast.
"""

from __future__ import annotations

import os

# onnxruntime 1.32 stores an identifier of the device and reports its use, unless this is set before it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

TYPE_CHECKING = False  # Importing `typing` would take longer than the rest of this module.
if TYPE_CHECKING:
    from dicompiler.analysis.compare import Comparison, StrategyResult, compare
    from dicompiler.analysis.prediction_error import DeviceTiming, ExpectedTiming, RunTiming
    from dicompiler.analysis.report.write_report import write_report
    from dicompiler.base.errors import DicompilerError, PluginError, RunError, UsageError
    from dicompiler.driver.artifact import run
    from dicompiler.driver.compile_options import CompileOptions
    from dicompiler.driver.compile_result import CompileResult, CompileSummary
    from dicompiler.driver.compiler import compile, plan
    from dicompiler.driver.deployment import Deployment, deploy
    from dicompiler.driver.executors import open_executor
    from dicompiler.driver.metrics_server import MetricsServer
    from dicompiler.driver.optimize import opt
    from dicompiler.driver.swap import Swap, SwappableSession, connect_swappable
    from dicompiler.ir.onnx.model import Model
    from dicompiler.ir.pipeline_state import PipelineState
    from dicompiler.ir.plan import Part, Plan
    from dicompiler.ir.platform import Platform
    from dicompiler.measure.adapt import Adaptation, AdaptiveSession, AdaptOptions, connect_adaptive
    from dicompiler.measure.emulation.emulate import EmulationResult, emulate
    from dicompiler.target.client import Session, connect
    from dicompiler.target.run_records import FrameTimes, RunEvent, RunOptions, RunResult
    from dicompiler.verify.comparison import Verification

    __version__: str

__all__ = [
    "AdaptOptions", "Adaptation", "AdaptiveSession", "Comparison", "CompileOptions", "CompileResult",
    "CompileSummary", "Deployment", "DeviceTiming", "DicompilerError", "EmulationResult", "ExpectedTiming",
    "FrameTimes", "MetricsServer", "Model", "Part", "PipelineState", "Plan", "Platform", "PluginError", "RunError",
    "RunEvent", "RunOptions", "RunResult", "RunTiming", "Session", "StrategyResult", "Swap", "SwappableSession",
    "UsageError", "Verification", "__version__", "compare", "compile", "connect", "connect_adaptive",
    "connect_swappable", "deploy", "emulate", "open_executor", "opt", "plan", "run", "write_report",
]  # fmt: skip

# If type checkers saw `__getattr__`, they would accept every name as an attribute of this module.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from dicompiler.base.version import package_version

            return package_version()
        from dicompiler.base.lazy_module import lazy_module

        return lazy_module(__name__)[0](name)

    def __dir__() -> list[str]:
        from dicompiler.base.lazy_module import lazy_module

        return lazy_module(__name__)[1]()
