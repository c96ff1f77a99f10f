"""The pass `quantise`: turn a float32 network into 8-bit integers, with ranges from samples.

Model in float32 + samples ⇒ model in QDQ form, by onnxruntime's static quantizer
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import onnx
from numpy.typing import NDArray

from dicompiler.plugin_api import DicompilerError, Model, Pass, PipelineState, UsageError
from dicompiler.plugin_api.onnx import Samples, copy_without, read_samples
from dicompiler_passes.normalise import normalise
from dicompiler_passes.prequantize import simplify_for_quantization

MIN_OPSET = 13
"""First opset in which weights have a scale for each channel."""


@dataclass(frozen=True)
class Quantise(Pass):
    """Quantize weights by channel and activations by tensor, to 8 bits.

    Later results are compared with the quantized network.

    x → Conv → Relu → y  ⇒  x → Quantize → Dequantize → Conv(Dequantize(w)) → Quantize → Dequantize → y

    With inputs=int8 the caller gives quantized inputs, as a camera's driver can. They take a quarter of the memory. The
    model documents the scale of each input.
    """

    name: ClassVar[str] = "quantise"
    preserves_outputs: ClassVar[bool] = False

    samples: str = field(default="", metadata={"file": True})
    inputs: Literal["float32", "int8"] = "float32"

    def run(self, compilation: PipelineState) -> PipelineState:
        """Replace the model, and drop layers, plan and reference."""
        if not self.samples:
            raise UsageError("quantise: no samples: give a file of them, quantise{samples=samples.npz}")
        model = normalise(compilation.model)
        from dicompiler.plugin_api.onnx import graph_inputs

        samples = read_samples(Path(self.samples), graph_inputs(model))
        quantised = quantise(model, samples)
        if self.inputs == "int8":
            quantised = take_int8(quantised)
        return replace(compilation, model=quantised, layers=None, plan=None, routing=None, reference=None)


def quantise(model: Model, samples: Samples) -> Model:
    """Return the network in QDQ form.

    Raises:
        DicompilerError: onnxruntime cannot quantize it.
    """
    proto = simplify_for_quantization(model).to_proto()
    if any(node.op_type == "QuantizeLinear" for node in proto.graph.node):
        raise DicompilerError("quantise: the network is quantised already: leave this pass out")
    opset = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 1)
    with tempfile.TemporaryDirectory(prefix="dicompiler-quantise-") as temporary, _warnings_disabled():
        try:
            if opset < MIN_OPSET:
                proto = onnx.version_converter.convert_version(proto, MIN_OPSET)
            return normalise(_quantize_static(proto, samples, Path(temporary)))
        except DicompilerError:
            raise
        except Exception as error:  # onnxruntime's and onnx's share no other base
            raise DicompilerError(f"quantise: onnxruntime cannot: {' '.join(str(error).split())}") from error


def take_int8(model: Model) -> Model:
    """Return a network in QDQ form whose inputs are int8.

    x → Quantize → Dequantize → …  ⇒  x (int8) → Dequantize → …

    Raises:
        DicompilerError: An input is also read in float32.
    """
    graph = model.graph()
    for tensor in graph.inputs:
        readers = list(tensor.outputs)
        if not readers or any(node.op != "QuantizeLinear" for node in readers):
            raise DicompilerError(f"quantise: input {tensor.name!r} is read as it is: leave out inputs=int8")
        scale, zero = (constant.values for constant in readers[0].inputs[1:3])
        info = graph.value_infos["input"][tensor.name] = copy_without(graph.value_infos["input"][tensor.name])
        info.doc_string = f"value = {float(scale)!r} * (q - {int(zero)})"
        info.type.tensor_type.elem_type = onnx.TensorProto.INT8
        tensor.set_info(info)
        for node in readers:
            graph.replace_uses(node.outputs[0], tensor)
        graph.remove_nodes(readers)
    return model.with_graph(graph)


def _quantize_static(proto: onnx.ModelProto, samples: Samples, place: Path) -> Model:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # it has no types
        """Gives the samples one by one."""

        def __init__(self) -> None:
            self.rest = iter(samples)

        def get_next(self) -> dict[str, NDArray[Any]] | None:
            return next(self.rest, None)

    _write_folded(proto, place / "folded.onnx")
    quantize_static(
        str(place / "folded.onnx"),
        str(place / "quantised.onnx"),
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
    )
    made = onnx.load(place / "quantised.onnx")
    # onnxruntime adds operator sets of its own that no node is of.
    used = {node.domain for node in made.graph.node}
    kept = [entry for entry in made.opset_import if entry.domain in ("", *used)]
    del made.opset_import[:]
    made.opset_import.extend(kept)
    made.ir_version = max(proto.ir_version, 7)
    return Model.load(made)


def _write_folded(proto: onnx.ModelProto, path: Path) -> None:
    """Write the network with batch normalizations folded into the convolutions."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


@contextmanager
def _warnings_disabled() -> Iterator[None]:
    """Suppress the quantizer's advice, which is followed already."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
