"""What passes map to what: one frozen record that grows along the way, from a loaded model to written artifacts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from dicompiler.layers import LayerGraph
    from dicompiler.model import Model
    from dicompiler.plan import Plan
    from dicompiler.platform import Platform
    from dicompiler.program import Program


@dataclass(frozen=True)
class Compilation:
    """One compilation at one moment; a pass returns a new one (`dataclasses.replace`). None: not made yet.

    model: the ONNX model; layers: its layers; platform: the cluster; plan: what the annotating passes or a strategy
    decided; routing: what follows from layers and plan (set once partition has rewritten the model); program: steps
    per device; metrics: the costs that were predicted; artifacts: the directory that the target wrote.
    """

    model: Model
    layers: LayerGraph | None = None
    platform: Platform | None = None
    plan: Plan | None = None
    routing: Any = None
    program: Program | None = None
    metrics: Any = None
    artifacts: Path | None = None
