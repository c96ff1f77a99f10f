"""Sessions of onnxruntime, wherever a model is run by what is not a target's runtime.

A package for profiles has a copy of this file: it imports nothing but onnxruntime.
"""

from __future__ import annotations

from typing import Any


def create_session(model: bytes, options: Any) -> Any:
    """An onnxruntime session of a model on the processor. Raises onnxruntime's errors.

    On processors where onnxruntime makes uint8 of int8 it then refuses its own QuantizeLinear of opset 21 (its issue
    25526): such a model is loaded as on those that keep int8, as the runtimes of targets do.
    """
    import onnxruntime

    try:
        return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no other base
        if "QuantizeLinear" not in str(error):
            raise
        options.add_session_config_entry("session.qdqisint8allowed", "1")
        return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
