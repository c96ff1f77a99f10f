"""Creation of onnxruntime sessions for all code except the runtimes of targets.

The package that `dicompiler profile` sends to boards contains a copy of this file, so it imports only onnxruntime.
"""

from __future__ import annotations

from typing import Any, Literal

Optimization = Literal["none", "basic", "extended", "all"]
"""Graph optimization levels of onnxruntime. "all" is its default and fastest level, so users compare results with it.

Up to "extended", a convolution gives the same bits however the network is split. At "all", it does so only if all
values are integers. Quantized networks in QDQ form (operators between DequantizeLinear and QuantizeLinear nodes) are
computed with integers only at "all". If they are split, their results may round differently.
"""


def create_session(model: bytes, options: Any) -> Any:
    """Return an onnxruntime session that runs a serialized model on the CPU."""
    import onnxruntime

    try:
        return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
    except Exception as error:  # `Exception` is the only common base class of onnxruntime's errors.
        if "QuantizeLinear" not in str(error):
            raise
        # Some versions of onnxruntime convert int8 to uint8 and then reject their own QuantizeLinear of opset 21
        # (onnxruntime issue 25526). This option turns the conversion off.
        options.add_session_config_entry("session.qdqisint8allowed", "1")
        return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
