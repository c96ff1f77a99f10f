"""onnxruntime sessions for all code outside of a target's runtime.

The profile package contains a copy of this file, so it imports only onnxruntime.
"""

from __future__ import annotations

from typing import Any


def create_session(model: bytes, options: Any) -> Any:
    """Return an onnxruntime session of a model on the CPU.

    On CPUs on which onnxruntime converts int8 to uint8, it rejects its own QuantizeLinear of opset 21 (onnxruntime
    issue 25526). Such a model is loaded with int8 kept.

    Raises:
        Exception: onnxruntime cannot load the model.
    """
    import onnxruntime

    try:
        return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no other common base class
        if "QuantizeLinear" not in str(error):
            raise
        options.add_session_config_entry("session.qdqisint8allowed", "1")
        return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
