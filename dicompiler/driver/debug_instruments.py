"""Instruments that compute: VerifyEach (numbers after every pass), Statistics (what a split costs), Reproducer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dicompiler.base.errors import DicompilerError
from dicompiler.plugin.instruments import NoOpInstrument

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.ir.onnx.model import Model
    from dicompiler.ir.pipeline_state import PipelineState
    from dicompiler.ir.plan import Plan
    from dicompiler.plugin.pass_base import Pass


@dataclass
class VerifyEach(NoOpInstrument):
    """After every pass that changed the model runs it in onnxruntime, and compares with what it computed before.

    The inputs are seeded random ones unless given; until the graph's inputs have static shapes nothing is compared.
    Raises DicompilerError naming the pass, the output and the difference. A pass that says `preserves = False` sets a
    new reference.
    """

    inputs: Mapping[str, NDArray[Any]] | None = None
    _reference_outputs: dict[str, Any] = field(default_factory=dict)
    _run_inputs: dict[str, Any] = field(default_factory=dict)

    def before(self, index: int, step: Pass, compilation: PipelineState) -> None:  # noqa: ARG002
        if not self._reference_outputs:
            self._reference_outputs = self._run_model(compilation.model)

    def after(self, index: int, step: Pass, compilation: PipelineState) -> None:
        from dicompiler.ir.random_ops import random_tensors
        from dicompiler.verify.comparison import compare_value

        got = self._run_model(compilation.model)
        before = self._reference_outputs if step.preserves_outputs else {}
        random = random_tensors(compilation.model.proto)
        for name, was in before.items() if got else ():
            if name not in got or name in random:  # a state, which is in pieces now; others in each run
                continue
            check = compare_value(name, was, got[name])
            if not check.passed:
                raise DicompilerError(f"after pass {index} ({step.spec}): output {name!r} {check.detail}")
        self._reference_outputs = self._reference_outputs if self._reference_outputs and step.preserves_outputs else got

    def _run_model(self, model: Model) -> dict[str, Any]:
        """The outputs by name; none where an input has no static shape yet."""
        from dicompiler.verify.comparison import graph_inputs
        from dicompiler.verify.executor import run_model
        from dicompiler.verify.run_inputs import hint_on_input_error, prepare_inputs

        if self.inputs is None and any(value.shape is None for value in graph_inputs(model)):
            return {}
        # Once: a pass may take away what tells which numbers an input can be.
        self._run_inputs = self._run_inputs or prepare_inputs(model, self.inputs)
        with hint_on_input_error(model, self.inputs):
            return run_model(model, self._run_inputs)


@dataclass(frozen=True)
class LayerStatistics:
    """What became of one layer. halo: elements of its inputs that arrive from other devices; macs: multiplications
    that all its parts do together; redundant: those beyond what the whole layer does."""

    layer: str
    parts: int
    devices: int
    halo: int
    macs: int
    redundant_macs: int


@dataclass
class PartitionStatistics(NoOpInstrument):
    """After partition counts, layer by layer, parts, elements that travel, and multiplications that are done twice."""

    rows: list[LayerStatistics] = field(default_factory=list)

    def after(self, index: int, step: Pass, compilation: PipelineState) -> None:  # noqa: ARG002
        if compilation.routing is None or self.rows:
            return
        from dicompiler.cost.op_counts import count_macs, count_task_macs
        from dicompiler.ir.regions import volume
        from dicompiler.ir.routing import assembly_leaves
        from dicompiler.ir.tasks import task_id

        routing = compilation.routing
        layers = routing.layers
        for layer in layers.layers:
            tasks = [task for task in routing.tasks if task.layer == layer.name]
            arrived = {
                leaf.box: volume(leaf.box.region or ())
                for task in tasks
                for tree in routing.reads.get(task_id(task), {}).values()
                for leaf in assembly_leaves(tree)
                if leaf.box.origin is not None
            }
            done = sum(count_task_macs(layers, task) for task in tasks)
            redundant = done - count_macs(layers, layer)
            devices = len({task.device for task in tasks})
            self.rows.append(LayerStatistics(layer.name, len(tasks), devices, sum(arrived.values()), done, redundant))


@dataclass
class Reproducer(NoOpInstrument):
    """Where a pass breaks, writes what it takes to see it again: `reproducer.onnx`, the graph before the first pass
    with its weights replaced by zeros that take no room, `reproducer.plan.json` where there was a plan, and
    `reproducer.txt`, the command that runs the same passes."""

    directory: Path
    _model: Model | None = None
    _plan: Plan | None = None
    _passes: list[str] = field(default_factory=list)

    def before(self, index: int, step: Pass, compilation: PipelineState) -> None:  # noqa: ARG002
        if self._model is None:
            self._model = compilation.model
        if compilation.plan is not None and not any("partition" in text for text in self._passes):
            self._plan = self._plan or compilation.plan
        self._passes.append(str(step.spec))

    def failed(self, index: int, step: Pass, compilation: PipelineState, error: Exception) -> None:  # noqa: ARG002
        from dicompiler.ir.plan import dumps

        assert self._model is not None
        self.directory.mkdir(parents=True, exist_ok=True)
        command = "dicompiler opt reproducer.onnx"
        if self._plan is not None:
            (self.directory / "reproducer.plan.json").write_text(dumps(self._plan), encoding="utf-8")
            command += " --plan reproducer.plan.json"
        (self.directory / "reproducer.onnx").write_bytes(strip_weights(self._model))
        text = ",".join(self._passes)
        (self.directory / "reproducer.txt").write_text(f"{command} -p '{text}' -o out.onnx\n", encoding="utf-8")


def strip_weights(model: Model) -> bytes:
    """The model as ONNX bytes with every large weight made by a ConstantOfShape node of value 0: names, shapes and
    types stay, the numbers go."""
    import onnx
    from onnx import helper, numpy_helper

    from dicompiler.ir.onnx.weights import is_placeholder

    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    graph = proto.graph
    hollow = [tensor for tensor in graph.initializer if is_placeholder(tensor)]
    small = [tensor for tensor in graph.initializer if not is_placeholder(tensor)]
    fed = {tensor.name for tensor in hollow}
    zeros, shapes = [], []
    for number, tensor in enumerate(hollow):
        shape = numpy_helper.from_array(_int64(tensor.dims), f"reproducer.shape{number}")
        shapes.append(shape)
        zero = onnx.TensorProto(dims=[1], data_type=tensor.data_type, raw_data=bytes(_itemsize(tensor.data_type)))
        zeros.append(helper.make_node("ConstantOfShape", [shape.name], [tensor.name], value=zero))
    nodes = list(graph.node)
    inputs = [value for value in graph.input if value.name not in fed]
    del graph.initializer[:], graph.node[:], graph.input[:]
    graph.initializer.extend([*small, *shapes])
    graph.node.extend([*zeros, *nodes])
    graph.input.extend(inputs)
    return bytes(proto.SerializeToString(deterministic=True))


def _int64(dims: Any) -> Any:
    import numpy as np

    return np.array(list(dims), np.int64)


def _itemsize(dtype: int) -> int:
    from dicompiler.ir.onnx.weights import raw_nbytes

    return raw_nbytes(dtype, (1,))
