"""ONNX graphs and weights; running models and comparing their outputs.

This module is part of the public API for plugin authors. A name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dicompiler.base.lazy_module import lazy_module

if TYPE_CHECKING:
    from dicompiler.base.ort_session import Optimization
    from dicompiler.ir.node_origins import NodeOrigins
    from dicompiler.ir.onnx.graph import ConstantValues, ModelGraph, OpaqueAttribute, Variable, names_read
    from dicompiler.ir.onnx.graph_export import export_node
    from dicompiler.ir.onnx.graph_structure import captured_names
    from dicompiler.ir.onnx.names import unique_name
    from dicompiler.ir.onnx.protobuf_io import copy_without
    from dicompiler.ir.onnx.sanity_checks import check_tensor_size
    from dicompiler.ir.onnx.weights import (
        Weight,
        array_dtype,
        dtype_name,
        is_fixed_size,
        is_placeholder,
        raw_nbytes,
        to_dense,
    )
    from dicompiler.ir.operator_rule import STAND_IN_DOMAIN, Node, TensorInfo
    from dicompiler.ir.output_names import read_output_names, write_output_names
    from dicompiler.ir.random_ops import is_random
    from dicompiler.ir.recurrent_states import read_states, write_states
    from dicompiler.partition.operators.window_geometry import onnx_window_attributes, onnxruntime_output_shape
    from dicompiler.verify.calibration_samples import Samples, read_samples
    from dicompiler.verify.comparison import Check, compare_value, graph_inputs, random_inputs
    from dicompiler.verify.executor import Execution, ProgramExecutor, SegmentRunner, run_model
    from dicompiler.verify.tolerances import Tolerance, quantized_tolerances

__all__ = [
    "STAND_IN_DOMAIN", "Check", "ConstantValues", "Execution", "ModelGraph", "Node", "NodeOrigins",
    "OpaqueAttribute", "Optimization", "ProgramExecutor", "Samples", "SegmentRunner", "TensorInfo", "Tolerance",
    "Variable", "Weight", "array_dtype", "captured_names", "check_tensor_size", "compare_value", "copy_without",
    "dtype_name", "export_node", "graph_inputs", "is_fixed_size", "is_placeholder", "is_random", "names_read",
    "onnx_window_attributes", "onnxruntime_output_shape", "quantized_tolerances", "random_inputs", "raw_nbytes",
    "read_output_names", "read_samples", "read_states", "run_model", "to_dense", "unique_name",
    "write_output_names", "write_states",
]  # fmt: skip

if not TYPE_CHECKING:  # Type checkers must not see `__getattr__`, because they would then accept unknown names.
    __getattr__, __dir__ = lazy_module(__name__)
