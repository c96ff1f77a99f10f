"""Plugins with one fault each, which dicompiler.testing must find.

They have a module of their own so that a second process can import them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.base.errors import DicompilerError
from dicompiler.cost.cost_model import AnalyticModel, CostModel
from dicompiler.ir.cluster import Device
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.operator_rule import Operation, OperatorRule, Piece, cost_per_output
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import LayerShare, Part, Plan
from dicompiler.ir.platform import Platform, PlatformFamily
from dicompiler.ir.program import Program
from dicompiler.ir.regions import Interval, Region, Shape, full_region
from dicompiler.partition.operators.conv_pool import pool
from dicompiler.plugin.pass_base import Pass
from dicompiler.plugin.registry import registry
from dicompiler.search.pareto_front import ParetoFront, build_single_point_front
from dicompiler.search.problem import Problem
from dicompiler.search.strategy import ProgressCallback, Strategy
from dicompiler.target.run_records import RunOptions, RunResult
from dicompiler.target.target_base import Target
from dicompiler.testing import make_cluster


@dataclass(frozen=True)
class BadStrategy(Strategy):
    """A strategy that places all layers on the first computing device, except for its fault."""

    name: ClassVar[str] = "bad-strategy"
    fault: str = "none"

    def front(self, problem: Problem, progress: ProgressCallback | None = None) -> ParetoFront:
        if not self.fault.startswith("front-"):
            return super().front(problem, progress)
        front = build_single_point_front(problem, self.plan(problem))
        (point,) = front.points
        if self.fault == "front-empty":
            return replace(front, points=())
        if self.fault == "front-value":
            return replace(front, points=(replace(point, objectives={}),))
        if self.fault == "front-objective":
            return replace(front, objectives=(*front.objectives, "beauty"))
        worse = {name: 2 * value + 1 for name, value in point.objectives.items()}
        return replace(front, points=(point, replace(point, objectives=worse)))

    def plan(self, problem: Problem) -> Plan:
        names = [device.name for device in problem.platform.computing_devices]
        chosen = {layer.name: [Part(names[0])] for layer in problem.layers.layers}
        first = problem.layers.layers[0]
        if self.fault == "half":
            shape = problem.layers.tensors[first.output].shape or ()
            chosen[first.name] = [Part(names[0], ((0, 1), (0, shape[1]), (0, 2), (0, shape[3])))]
        if self.fault == "device":
            chosen[first.name] = [Part("pi99")]
        if self.fault == "camera":
            chosen[first.name] = [Part(problem.platform.devices[0].name)]
        if self.fault == "counts":
            CALLS.append(1)
            chosen[first.name] = [Part(names[len(CALLS) % len(names)])]
        if self.fault == "hash":
            # The hash decides about several layers. For only one, two hash seeds would often give the same plan by
            # chance.
            for layer in problem.layers.layers:
                chosen[layer.name] = [Part(names[hash(layer.name) % len(names)])]
        if self.fault == "third-seed" and os.environ.get("PYTHONHASHSEED") == "3":
            chosen[first.name] = [Part(names[-1])]
        if self.fault == "refuses":
            raise DicompilerError("bad-strategy: no plan today")
        if self.fault == "type":
            return chosen  # type: ignore[return-value]
        if self.fault == "layer":
            del chosen[first.name]
        if self.fault == "unknown":
            chosen["c00"] = chosen[first.name]
        if self.fault == "parts":
            return Plan({first.name: names[0]}, (names[0],), (names[0],))  # type: ignore[dict-item]
        end_or_loop(self.fault)
        if self.fault == "mutates":
            problem.layers.tensors.clear()  # type: ignore[attr-defined]
        plan = problem.build_plan(chosen)
        if self.fault == "memory" or all(host.memory == 2**30 for host in problem.platform.hosts):
            return replace(plan, source=(names[-1],)) if self.fault == "source" else plan
        raise DicompilerError("bad-strategy: too little memory")


CALLS: list[int] = []


def end_or_loop(fault: str) -> None:
    """End this process, or loop without end, if this is the fault."""
    if fault == "exit":
        sys.exit(0)
    if fault == "os-exit":
        os._exit(0)
    if fault == "child-exit" and "DICOMPILER_TESTING_CHILD" in os.environ:
        os.kill(os.getpid(), 9)
    while fault == "loop":
        try:
            sum(range(1000))
        except Exception:
            continue


@dataclass(frozen=True)
class BadTarget(Target):
    """A target that forwards all calls to the sockets target, except for its fault."""

    name: ClassVar[str] = "bad-target"
    fault: str = "none"

    @property
    def _sockets(self) -> Target:
        found: Target = registry().make("targets", "sockets")
        return found

    @property
    def can_run_replicas(self) -> bool:  # type: ignore[override]
        return self.fault == "replicas"

    @property
    def can_tolerate_failures(self) -> bool:  # type: ignore[override]
        return self.fault == "survives"

    @property
    def can_keep_states(self) -> bool:  # type: ignore[override]
        return self.fault == "keeps"

    def emit(self, compilation: PipelineState, directory: Path) -> None:
        self._sockets.emit(compilation, directory)
        if self.fault == "silent":
            (directory / "artifact.json").unlink()
            return
        text = (directory / "artifact.json").read_text()
        if self.fault != "name":
            (directory / "artifact.json").write_text(text.replace('"target": "sockets"', '"target": "bad-target"'))
        if self.fault == "bytes":
            (directory / "where").write_text(str(directory.parent))
        if self.fault == "process":
            (directory / "hash").write_text(str(hash("x")))
        if self.fault == "outside":
            (directory.parent / "cache").mkdir()
            (directory.parent / "cache" / "file").write_text("x")
        if self.fault == "descriptor":
            os.close(os.open(directory.parent / "opened", os.O_WRONLY | os.O_CREAT))
        if self.fault == "scratch":
            with tempfile.TemporaryDirectory() as scratch:
                Path(scratch, "file").write_text("x")
        if self.fault == "weights":
            compilation.model.proto.doc_string = "changed"
        end_or_loop(self.fault)
        if self.fault == "replicas":
            raise DicompilerError("bad-target: one role only")

    def run(self, directory: Path, frames: Sequence[Mapping[str, NDArray[Any]]], options: RunOptions) -> RunResult:
        result = self._sockets.run(directory, frames, options)
        if self.fault == "child":
            subprocess.Popen(["sleep", "614"])
        if self.fault == "orphan":
            subprocess.run(["sh", "-c", "setsid sleep 615 > /dev/null 2>&1 &"], check=True)
        if self.fault == "inputs":
            for array in frames[0].values():
                array[...] = 0
        outputs = result.outputs
        if self.fault == "swap" or (self.fault == "survives" and options.start_without):
            outputs = tuple(dict(zip(own, reversed(own.values()), strict=True)) for own in outputs)
        if self.fault == "keeps":
            outputs = (outputs[0],) * len(outputs)
        if self.fault == "frames":
            outputs = outputs[::-1]
        reports = result.reports
        if self.fault == "sent":
            reports = tuple(replace(r, sent_bytes={i: count + 1 for i, count in r.sent_bytes.items()}) for r in reports)
        frames_s = () if self.fault == "times" else result.frames_s
        return replace(result, outputs=outputs, reports=reports, frames_s=frames_s)

    def memory_overhead(self, program: Program) -> Mapping[str, int]:
        return {device.device: -1 if self.fault == "memory" else 0 for device in program.devices}


@dataclass(frozen=True)
class BadPass(Pass):
    """A pass that returns an equal model, except for its fault."""

    name: ClassVar[str] = "bad-pass"
    fault: Literal[
        "none", "numbers", "illegal", "changes", "random", "provides", "outputs", "layers", "exit", "loop"
    ] = "none"

    def run(self, compilation: PipelineState) -> PipelineState:
        end_or_loop(self.fault)
        if self.fault == "layers" and compilation.layers is not None:
            compilation.layers.tensors.clear()  # type: ignore[attr-defined]
        proto = compilation.model.proto
        if self.fault != "changes":
            proto = onnx.ModelProto()
            proto.CopyFrom(compilation.model.proto)
        if self.fault in ("numbers", "changes"):
            for node in proto.graph.node:
                if node.op_type == "Relu":
                    node.op_type = "Abs"
        if self.fault == "illegal":
            del proto.graph.node[0]
        if self.fault == "random":
            proto.doc_string = os.urandom(4).hex()
        if self.fault == "outputs":
            first = proto.graph.output[0].name
            for node in proto.graph.node:
                node.output[:] = [f"{name}'" if name == first else name for name in node.output]
            proto.graph.output[0].name = f"{first}'"
        return replace(compilation, model=replace(compilation.model, proto=proto))


class ReadingPass(BadPass):
    """The pass with a field that it requires."""

    requires = ("layers",)


class ProvidingPass(BadPass):
    """The pass with a field that it provides."""

    provides = ("routing",)


def bad_pass(fault: Any) -> BadPass:
    """Return the pass that can have the fault."""
    kinds: dict[str, type[BadPass]] = {"layers": ReadingPass, "provides": ProvidingPass}
    return kinds.get(fault, BadPass)(fault)


@dataclass(frozen=True)
class BadCost(CostModel):
    """A cost model that returns the times of the analytic one, except for its fault."""

    name: ClassVar[str] = "bad-cost"
    fault: Literal["none", "negative", "nan", "shape", "fill", "random", "hash", "text", "exit", "loop", "mutates"] = (
        "none"
    )

    def seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        end_or_loop(self.fault)
        if self.fault == "mutates":
            layers.tensors.pop(layer.output)  # type: ignore[attr-defined]
        found = AnalyticModel().seconds(layers, layer, share, device)
        if self.fault == "text":
            return str(found)  # type: ignore[return-value]
        noise = {"random": os.urandom(1)[0] + 1, "hash": hash("x") % 1000 + 1}.get(self.fault, 1)
        return {"negative": -found - 1e-3, "nan": float("nan")}.get(self.fault, found * noise)

    def seconds_table(
        self, layers: LayerGraph, layer: Layer, shares: Sequence[LayerShare], devices: Sequence[Device]
    ) -> NDArray[np.float64]:
        found = super().seconds_table(layers, layer, shares, devices)
        return {"shape": found.T, "fill": found + 1.0}.get(self.fault, found)


@dataclass(frozen=True)
class Breaking(Strategy):
    """A strategy that raises KeyError."""

    name: ClassVar[str] = "breaking"

    def plan(self, problem: Problem) -> Plan:
        raise KeyError(problem.objective)


@dataclass(frozen=True)
class Careful(CostModel):
    """A cost model whose `seconds` raises KeyError, and whose table needs that error to be passed on."""

    name: ClassVar[str] = "careful"

    def seconds(self, *_: object) -> float:
        return float(broken())

    def seconds_table(
        self, layers: LayerGraph, layer: Layer, shares: Sequence[LayerShare], devices: Sequence[Device]
    ) -> NDArray[np.float64]:
        try:
            self.seconds(layers, layer, shares[0], devices[0])
        except KeyError:
            return np.ones((len(shares), len(devices)))
        raise AssertionError("seconds() did not raise KeyError")


def bad_rule(fault: str) -> OperatorRule:
    """Return the operator rule of MaxPool, except for the fault."""
    return OperatorRule(
        "MaxPool",
        partial(_bad_piece, fault),
        "",
        is_elementwise=fault == "elementwise",
        reduction_length=partial(_bad_reduction_length, fault),
        cost=(lambda *arguments: cost_per_output(*arguments)) if fault == "local" else partial(_bad_cost, fault),
        read_share=partial(_bad_read_share, fault),
    )


def _bad_piece(fault: str, operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    end_or_loop(fault)
    if fault == "mutates":
        operation.node.attributes["pads"] = [0, 0, 0, 0]  # type: ignore[index]
    right = pool(operation, region, reduce)
    (need,) = right.needs
    assert need is not None
    if fault == "short" and need[2][1] - need[2][0] > 3:  # This fault omits one row of the halo that the pool needs.
        return replace(right, needs=((*need[:2], (need[2][0], need[2][1] - 1), need[3]),))
    if fault == "shifted" and need[2][1] < operation.input_shape(0)[2]:
        return replace(right, needs=((*need[:2], (need[2][0] + 1, need[2][1] + 1), need[3]),))
    if fault == "outside":
        return replace(right, needs=((*need[:2], (need[2][0], 99), need[3]),))
    if fault == "less":
        return replace(right, out=((*right.out[:3], (0, 1))))
    if fault == "whole":
        return Piece(full_region(operation.out_shape), operation.full_needs())
    return right


def _bad_cost(fault: str, operation: Operation, out: Shape, needs: Sequence[Shape]) -> Any:
    return 1.5 if fault == "cost" else cost_per_output(operation, out, needs)


def _bad_reduction_length(fault: str, _operation: Operation) -> Any:
    return "many" if fault == "length" else None


def _bad_read_share(fault: str, _operation: Operation) -> Any:
    return 3 if fault == "share" else 1.0


def broken(*_: object) -> Any:
    """Raise KeyError, as a faulty function of an operator rule might."""
    raise KeyError("lost")


def bad_family(fault: str) -> PlatformFamily:
    """Return a platform family of N equal devices, except for the fault."""

    def make(count: int) -> Platform:
        end_or_loop(fault)
        made = make_cluster(
            "switch", *[1.0 + 1e-9 * os.urandom(1)[0] * (fault == "random")] * (count + (fault == "hosts"))
        )
        return {"type": "two boards"}.get(fault, made)  # type: ignore[return-value]

    return PlatformFamily("bad" if fault == "name" else "badxN", "" if fault == "figures" else "made up", make)
