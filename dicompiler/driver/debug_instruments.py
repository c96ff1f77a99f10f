"""Instruments for debugging passes. An instrument is an object that is called before and after each pass."""

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
    """An instrument that runs the model after each pass, and raises DicompilerError if an output has changed.

    The model runs in onnxruntime. Nothing is compared until all graph inputs have static shapes, nor after a pass that
    may change outputs, such as `quantise`.

    Attributes:
        inputs: Arrays by the names of the graph inputs. Default: seeded random arrays.
    """

    inputs: Mapping[str, NDArray[Any]] | None = None
    _reference_outputs: dict[str, Any] = field(default_factory=dict)
    _run_inputs: dict[str, Any] = field(default_factory=dict)

    def before(self, index: int, step: Pass, state: PipelineState) -> None:  # noqa: ARG002
        if not self._reference_outputs:
            self._reference_outputs = self._run_model(state.model)

    def after(self, index: int, step: Pass, state: PipelineState) -> None:
        from dicompiler.ir.random_ops import random_tensors
        from dicompiler.verify.comparison import compare_value

        outputs = self._run_model(state.model)
        references = self._reference_outputs if step.preserves_outputs else {}
        random = random_tensors(state.model.proto)
        for name, reference in references.items() if outputs else ():
            # States (outputs that the next frame reads) are missing after a pass has split them. Random outputs differ
            # in each run.
            if name not in outputs or name in random:
                continue
            check = compare_value(name, reference, outputs[name])
            if not check.passed:
                raise DicompilerError(f"after pass {index} ({step.spec}): output {name!r} {check.detail}")
        if not self._reference_outputs or not step.preserves_outputs:
            self._reference_outputs = outputs

    def _run_model(self, model: Model) -> dict[str, Any]:
        from dicompiler.verify.comparison import graph_inputs
        from dicompiler.verify.executor import run_model
        from dicompiler.verify.run_inputs import hint_on_input_error, prepare_inputs

        if self.inputs is None and any(value.shape is None for value in graph_inputs(model)):
            return {}
        # Inputs are chosen once. Valid values follow from the nodes that read an input, and a pass may remove these.
        self._run_inputs = self._run_inputs or prepare_inputs(model, self.inputs)
        with hint_on_input_error(model, self.inputs):
            return run_model(model, self._run_inputs)


@dataclass(frozen=True)
class LayerStatistics:
    """Effects of the pass `partition` on one layer.

    Attributes:
        layer: Name of the layer.
        parts: Number of pieces into which the layer is split.
        devices: Number of devices that compute a piece.
        halo: Number of input elements that are received from other devices.
        macs: Multiply-adds of all pieces together.
        redundant_macs: Difference between `macs` and the multiply-adds of the unsplit layer.
    """

    layer: str
    parts: int
    devices: int
    halo: int
    macs: int
    redundant_macs: int


@dataclass
class PartitionStatistics(NoOpInstrument):
    """An instrument that counts the pieces, received elements and multiply-adds of each layer after `partition`.

    Attributes:
        rows: One entry for each layer; empty before the pass `partition`.
    """

    rows: list[LayerStatistics] = field(default_factory=list)

    def after(self, index: int, step: Pass, state: PipelineState) -> None:  # noqa: ARG002
        if state.routing is None or self.rows:
            return
        from dicompiler.cost.op_counts import count_macs, count_task_macs
        from dicompiler.ir.regions import volume
        from dicompiler.ir.routing import assembly_leaves, task_id

        routing = state.routing
        layers = routing.layers
        for layer in layers.layers:
            tasks = [task for task in routing.tasks if task.layer == layer.name]
            received = {
                leaf.box: volume(leaf.box.region or ())
                for task in tasks
                for assembly in routing.reads.get(task_id(task), {}).values()
                for leaf in assembly_leaves(assembly)
                if leaf.box.origin is not None
            }
            macs = sum(count_task_macs(layers, task) for task in tasks)
            devices, redundant_macs = len({task.device for task in tasks}), macs - count_macs(layers, layer)
            halo = sum(received.values())
            self.rows.append(LayerStatistics(layer.name, len(tasks), devices, halo, macs, redundant_macs))


@dataclass
class Reproducer(NoOpInstrument):
    """An instrument that writes files with which the failure of a pass can be reproduced.

    The files are:

    - `reproducer.onnx`: the model before the first pass, with zeros instead of its weights.
    - `reproducer.plan.json`: the plan, if there was one.
    - `reproducer.txt`: a command that runs the same passes.

    Attributes:
        directory: Directory to write to.
    """

    directory: Path
    _model: Model | None = None
    _plan: Plan | None = None
    _passes: list[str] = field(default_factory=list)

    def before(self, index: int, step: Pass, state: PipelineState) -> None:  # noqa: ARG002
        if self._model is None:
            self._model = state.model
        if state.plan is not None and not any("partition" in text for text in self._passes):
            self._plan = self._plan or state.plan
        self._passes.append(str(step.spec))

    def failed(self, index: int, step: Pass, state: PipelineState, error: Exception) -> None:  # noqa: ARG002
        from dicompiler.ir.plan import plan_to_text

        assert self._model is not None
        self.directory.mkdir(parents=True, exist_ok=True)
        command = "dicompiler opt reproducer.onnx"
        if self._plan is not None:
            (self.directory / "reproducer.plan.json").write_text(plan_to_text(self._plan), encoding="utf-8")
            command += " --plan reproducer.plan.json"
        (self.directory / "reproducer.onnx").write_bytes(strip_weights(self._model))
        text = ",".join(self._passes)
        (self.directory / "reproducer.txt").write_text(f"{command} -p '{text}' -o out.onnx\n", encoding="utf-8")


def strip_weights(model: Model) -> bytes:
    """Return the model as ONNX bytes, with zeros of the same shape and type instead of large weights."""
    import numpy as np
    import onnx
    from onnx import helper, numpy_helper

    from dicompiler.ir.onnx.weights import is_placeholder, raw_nbytes

    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    graph = proto.graph
    large = [tensor for tensor in graph.initializer if is_placeholder(tensor)]
    small = [tensor for tensor in graph.initializer if not is_placeholder(tensor)]
    large_names = {tensor.name for tensor in large}
    zeros, shapes = [], []
    for number, tensor in enumerate(large):
        shape = numpy_helper.from_array(np.array(list(tensor.dims), np.int64), f"reproducer.shape{number}")
        shapes.append(shape)
        data = bytes(raw_nbytes(tensor.data_type, (1,)))
        value = onnx.TensorProto(dims=[1], data_type=tensor.data_type, raw_data=data)
        zeros.append(helper.make_node("ConstantOfShape", [shape.name], [tensor.name], value=value))
    nodes = list(graph.node)
    inputs = [value for value in graph.input if value.name not in large_names]
    del graph.initializer[:], graph.node[:], graph.input[:]
    graph.initializer.extend([*small, *shapes])
    graph.node.extend([*zeros, *nodes])
    graph.input.extend(inputs)
    return bytes(proto.SerializeToString(deterministic=True))
