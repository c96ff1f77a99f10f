"""Outputs of a frame, which several devices may deliver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def merge_outputs(names: Iterable[str], outputs_by_device: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the outputs `names` of a frame; an output that several devices have is taken from the first device."""
    devices = outputs_by_device.values()
    return {name: next(outputs[name] for outputs in devices if name in outputs) for name in names}
