"""The pass `quantise`: quantize a float32 network to 8-bit integers, or only the constant matrices of MatMul.

float32 model + samples ⇒ model in QDQ form (QuantizeLinear/DequantizeLinear pairs), by onnxruntime's static quantizer
float32 model           ⇒ model with MatMulNBits instead of MatMul
"""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from dicompiler.plugin_api import DicompilerError, Model, Pass, PipelineState, UsageError
from dicompiler.plugin_api.onnx import ModelGraph, Samples, copy_without, names_read, read_samples
from dicompiler.plugin_api.utilities import one_line
from dicompiler_passes.normalise import normalise
from dicompiler_passes.unfuse_attention import ORT_DOMAIN

MIN_OPSET = 13
"""First opset in which DequantizeLinear supports weights with a scale for each channel."""


@dataclass(frozen=True)
class Quantise(Pass):
    """Quantize weights and activations to 8 bits, or only the constant matrices of MatMul to 4 or 8 bits.

    By default, each channel of a weight and each activation tensor has its own scale:

    x → Conv → Relu → y  ⇒  x → Quantize → Dequantize → Conv(Dequantize(w)) → Quantize → Dequantize → y

    With weights=int4 or weights=int8, only constant matrices of MatMul are quantized, and no samples are needed. Each
    block of `block_size` weights has its own scale:

    x → MatMul(w) → y  ⇒  x → MatMulNBits(blocks of w, scales) → y

    The quantized network becomes the reference of `verify`, instead of the float32 network.

    With inputs=int8, the caller supplies quantized inputs. The scale of each input is written to its doc_string in the
    model.
    """

    name: ClassVar[str] = "quantise"
    preserves_outputs: ClassVar[bool] = False

    samples: str = field(
        default="",
        metadata={
            "file": True,
            "help": ".npz file with an array for each input: the samples stacked along a new first axis",
        },
    )
    inputs: Literal["float32", "int8"] = field(default="float32", metadata={"help": "type of the network's inputs"})
    weights: Literal["channels", "int4", "int8"] = field(
        default="channels",
        metadata={
            "help": "channels: all weights in 8 bits per channel, and activations in 8 bits; int4, int8: only the "
            "constant matrices of MatMul, in blocks that share a scale"
        },
    )
    block_size: int = field(
        default=32, metadata={"help": "number of weights that share a scale, for weights=int4 and weights=int8"}
    )
    activations: Literal["float32", "int8"] = field(
        default="float32",
        metadata={
            "help": "type in which MatMul with weights=int4 or weights=int8 reads its other operand; int8 sets "
            "accuracy_level=4 of MatMulNBits"
        },
    )

    def run(self, state: PipelineState) -> PipelineState:
        # Layers, plan, routing and reference belong to the float32 network, so they are removed.
        if self.weights != "channels":
            quantized = self._quantize_products(state.model)
            return replace(state, model=quantized, layers=None, plan=None, routing=None, reference=None)
        if self.activations != "float32":
            raise UsageError(
                "quantise: activations=int8 needs block-quantised weights: add weights=int4 or weights=int8, or omit "
                "activations"
            )
        if not self.samples:
            raise UsageError("quantise: no samples: give a file, quantise{samples=samples.npz}")
        model = normalise(state.model)
        from dicompiler.plugin_api.onnx import graph_inputs

        samples = read_samples(Path(self.samples), graph_inputs(model))
        quantized = quantise(model, samples)
        if self.inputs == "int8":
            quantized = take_int8(quantized)
        return replace(state, model=quantized, layers=None, plan=None, routing=None, reference=None)

    def _quantize_products(self, model: Model) -> Model:
        if self.samples or self.inputs != "float32":
            raise UsageError(
                f"quantise: weights={self.weights} needs no samples and keeps the inputs: omit the options samples and "
                "inputs"
            )
        if self.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise UsageError(f"quantise: invalid block_size {self.block_size}: use one of {sizes}")
        bits = {"int4": 4, "int8": 8}[self.weights]
        return quantize_products(normalise(model), bits, self.block_size, self.activations == "int8")


def quantise(model: Model, samples: Samples) -> Model:
    """Return the float32 network quantized to 8 bits, with value ranges measured on `samples`.

    In the result, float operators are between DequantizeLinear and QuantizeLinear nodes (QDQ form).

    Raises:
        DicompilerError: onnxruntime cannot quantize the network.
    """
    proto = simplify_for_quantization(model).to_proto()
    if any(node.op_type == "QuantizeLinear" for node in proto.graph.node):
        raise DicompilerError("quantise: the network is quantized already: omit this pass")
    opset = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 1)
    with tempfile.TemporaryDirectory(prefix="dicompiler-quantise-") as temporary, _warnings_disabled():
        try:
            if opset < MIN_OPSET:
                proto = onnx.version_converter.convert_version(proto, MIN_OPSET)
            return normalise(_quantize_static(proto, samples, Path(temporary)))
        except DicompilerError:
            raise
        except Exception as error:  # Errors of onnxruntime and onnx have no common base class except Exception.
            raise DicompilerError(
                f"quantise: onnxruntime cannot quantize the network: {one_line(str(error))}"
            ) from error


def take_int8(model: Model) -> Model:
    """Change the float32 inputs of a quantized network to int8.

    x → Quantize → Dequantize → …  ⇒  x (int8) → Dequantize → …

    Raises:
        DicompilerError: A node reads an input in float32.
    """
    graph = model.graph()
    for tensor in graph.inputs:
        readers = list(tensor.outputs)
        if not readers or any(node.op != "QuantizeLinear" for node in readers):
            raise DicompilerError(f"quantise: input {tensor.name!r} is also read in float32: omit inputs=int8")
        scale, zero_point = (constant.values for constant in readers[0].inputs[1:3])
        value_info = graph.value_infos["input"][tensor.name] = copy_without(graph.value_infos["input"][tensor.name])
        value_info.doc_string = f"value = {float(scale)!r} * (q - {int(zero_point)})"
        value_info.type.tensor_type.elem_type = onnx.TensorProto.INT8
        tensor.set_info(value_info)
        for node in readers:
            graph.replace_uses(node.outputs[0], tensor)
        graph.remove_nodes(readers)
    return model.with_graph(graph)


def _quantize_static(proto: onnx.ModelProto, samples: Samples, directory: Path) -> Model:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class SampleReader(CalibrationDataReader):  # type: ignore[misc]  # The base class has no types.
        def __init__(self) -> None:
            self.remaining = iter(samples)

        def get_next(self) -> dict[str, NDArray[Any]] | None:
            return next(self.remaining, None)

    _write_folded(proto, directory / "folded.onnx")
    quantize_static(
        str(directory / "folded.onnx"),
        str(directory / "quantised.onnx"),
        SampleReader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
    )
    quantized = onnx.load(directory / "quantised.onnx")
    # Remove the imports of operator sets that onnxruntime has added and no node uses.
    domains = {node.domain for node in quantized.graph.node}
    imports = [entry for entry in quantized.opset_import if entry.domain in ("", *domains)]
    del quantized.opset_import[:]
    quantized.opset_import.extend(imports)
    quantized.ir_version = max(proto.ir_version, 7)
    return Model.load(quantized)


def _write_folded(proto: onnx.ModelProto, path: Path) -> None:
    """Write the network with batch normalizations folded into the convolutions, by onnxruntime's optimizer."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


@contextmanager
def _warnings_disabled() -> Iterator[None]:
    # onnxruntime's quantizer advises to preprocess the model, which `_write_folded` has already done.
    previous = logging.root.manager.disable
    logging.disable(max(previous, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(previous)


def simplify_for_quantization(model: Model) -> Model:
    """Return an equivalent network in which quantization rounds fewer values.

    Batch normalizations are folded into the Gemm nodes before them, and average pools over the whole image become
    GlobalAveragePool nodes.
    """
    graph = model.graph()
    _fold_batch_norms(graph)
    _use_global_average(graph, Model(onnx.shape_inference.infer_shapes(model.without_weights())))
    graph.prune()
    return model.with_graph(graph)


def _fold_batch_norms(graph: ModelGraph) -> None:
    """Fold batch normalizations into the Gemm nodes before them, because onnxruntime's optimizer does not.

    Gemm(x, B, C) → BatchNormalization ⇒ Gemm(x, B', C')    (if nothing else reads the output of the Gemm)
    """
    read_counts = Counter(name for node in graph.nodes for name in names_read(node))
    read_counts.update(tensor.name for tensor in graph.outputs)
    folded = []
    for norm in graph.nodes:
        if norm.op != "BatchNormalization" or len(norm.outputs) != 1:
            continue
        gemm = next(iter(norm.inputs[0].inputs), None)
        if gemm is None or gemm.op != "Gemm" or read_counts[norm.inputs[0].name] > 1:
            continue
        if not all(graph.is_constant(tensor) for tensor in (*gemm.inputs[1:], *norm.inputs[1:])):
            continue
        scale, shift, mean, variance = (tensor.values.astype(np.float64) for tensor in norm.inputs[1:5])
        factor = scale / np.sqrt(variance + norm.attrs.get("epsilon", 1e-5))
        weight, bias = _scale_gemm(gemm, factor)
        values = {f"{gemm.name}/weight": weight, f"{gemm.name}/bias": bias + shift - mean * factor}
        constants = [
            graph.add_initializer(graph.unused_tensor_name(name), np.ascontiguousarray(v, np.float32))
            for name, v in values.items()
        ]
        gemm.inputs = [gemm.inputs[0], *constants]
        gemm.attrs = {key: value for key, value in gemm.attrs.items() if key not in ("alpha", "beta")}
        gemm.outputs = norm.outputs
        folded.append(norm)
    graph.remove_nodes(folded)


def _scale_gemm(gemm: gs.Node, factor: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the weight and bias with which a Gemm's output channels are multiplied by `factor`.

    The attributes alpha and beta are included in the results.
    """
    weight = gemm.inputs[1].values.astype(np.float64) * gemm.attrs.get("alpha", 1.0)
    bias = gemm.inputs[2].values.astype(np.float64) if len(gemm.inputs) > 2 else np.zeros(1)
    scaled_by = factor[:, None] if gemm.attrs.get("transB", 0) else factor
    return weight * scaled_by, bias * gemm.attrs.get("beta", 1.0) * factor


def _use_global_average(graph: ModelGraph, inferred: Model) -> None:
    """Replace average pools with a single window over the whole image by GlobalAveragePool."""
    tensors = inferred.tensors()
    for node in graph.nodes:
        shape = tensors[node.inputs[0].name].shape if node.op == "AveragePool" else None
        if not shape or list(shape[2:]) != list(node.attrs.get("kernel_shape", [])):
            continue
        if not any(node.attrs.get("pads", [])) and node.attrs.get("auto_pad", "NOTSET") in ("NOTSET", "VALID"):
            node.op, node.attrs = "GlobalAveragePool", {}


BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Block sizes that onnxruntime's MatMulNBits supports."""
INT8_ACTIVATIONS = 4
"""Value of MatMulNBits' attribute `accuracy_level` for activations in 8 bits."""


def quantize_products(model: Model, bits: int, block_size: int, has_int8_activations: bool) -> Model:
    """Return the network with the constant float32 matrices of MatMul nodes quantized.

    Args:
        model: A normalised network.
        bits: Bits of a weight: 4 or 8.
        block_size: Number of weights of a column that share a scale.
        has_int8_activations: True to let the products quantize their activations to 8 bits.

    Raises:
        DicompilerError: There is no such matrix.
    """
    graph = model.graph()
    packed: dict[str, tuple[gs.Constant, gs.Constant]] = {}
    level = {"accuracy_level": INT8_ACTIVATIONS} if has_int8_activations else {}
    count = 0
    for node in graph.nodes:
        if node.op != "MatMul" or node.domain not in (None, "", "ai.onnx") or not graph.is_constant(node.inputs[1]):
            continue
        weight = node.inputs[1]
        if len(weight.shape) != 2 or weight.dtype != np.float32 or 0 in weight.shape:
            continue
        if weight.name not in packed:
            blocks, scales = quantize_matrix(weight.values, bits, block_size)
            packed[weight.name] = (
                graph.add_initializer(graph.unused_tensor_name(f"{weight.name}_blocks"), blocks),
                graph.add_initializer(graph.unused_tensor_name(f"{weight.name}_scales"), scales),
            )
        features, columns = weight.shape
        node.op, node.domain = "MatMulNBits", ORT_DOMAIN
        node.attrs = {"K": features, "N": columns, "bits": bits, "block_size": block_size, **level}
        node.inputs = [node.inputs[0], *packed[weight.name]]
        count += 1
    if not count:
        raise DicompilerError("quantise: the network has no product with a constant matrix in float32: omit this pass")
    return model.with_graph(graph)


def quantize_matrix(weight: NDArray[Any], bits: int, block_size: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return a matrix of shape (features, columns) as blocks and scales, in the form that MatMulNBits reads.

    A block has `block_size` consecutive features of a column. Zeros are appended to the last block.

    Returns:
        Blocks of shape (columns, blocks per column, bytes of a block), and scales of shape (columns, blocks per
        column).
    """
    features, columns = weight.shape
    block_count, middle = -(-features // block_size), 1 << (bits - 1)
    padded = np.zeros((columns, block_count * block_size), np.float32)
    padded[:, :features] = weight.T
    blocks = padded.reshape(columns, block_count, block_size)
    # The value of largest magnitude becomes the integer of largest magnitude, such as -8 of -8 … 7.
    peaks = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2, keepdims=True), axis=2)
    scales = (peaks / -middle).astype(np.float32)
    steps = np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales != 0)
    values = np.clip(np.rint(steps) + middle, 0, 2 * middle - 1).astype(np.uint8)
    if bits == 4:
        values = values[:, :, ::2] | (values[:, :, 1::2] << 4)
    return values, scales[:, :, 0]
