"""onnxruntime sessions for all code outside of a target's runtime.

The profile package contains a copy of this file, so it imports only onnxruntime.
"""

from __future__ import annotations

from typing import Any, Literal

Optimization = Literal["none", "basic", "extended", "all"]
"""Graph optimization levels of onnxruntime.

"all" is onnxruntime's default, the fastest level, and the one that users compare with. All levels up to "extended" give
the same bits. "all" gives the same bits only for integer-valued floats.

In networks in QDQ form only "all" computes on integers, if onnxruntime finds a pattern to fuse. It may find other
patterns in the parts of a network than in the whole, and integers round differently (see `verify.tolerances`).
"""


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
