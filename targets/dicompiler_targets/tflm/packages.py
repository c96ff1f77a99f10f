"""The packages that this target alone needs, imported when they are used: the flatbuffer schema and the two runtimes.

In: a module's name. Out: the module, untyped; one line names the extra that brings it where it is missing.
"""

from __future__ import annotations

import importlib
from typing import Any

from dicompiler.plugin_api import DicompilerError


def import_optional(module: str) -> Any:
    """The module; DicompilerError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DicompilerError(
            f"target tflm: {error.name or module} is not installed: pip install flatbuffers tflite tflite-micro"
        ) from None
