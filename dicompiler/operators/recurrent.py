"""RNN, GRU and LSTM: one step after another, so that they are computed whole; what that costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dicompiler.ir.regions import Shape
from dicompiler.ir.rule import Effort, Operation, counted


def stepped(operation: Operation, out: Shape, needs: Sequence[Shape]) -> Effort:  # noqa: ARG001
    """Each step of x (steps, batch, features) meets all of w (directions, gates, features) and of r; one FLOP for each
    element of each gate."""
    x, w, r = needs[:3]
    steps = x[0] * x[1]
    return Effort(steps * (math.prod(w) + math.prod(r)), other=steps * math.prod(w) // x[2])


RULES = (*counted(stepped, "RNN GRU LSTM", ""), *counted(stepped, "DynamicQuantizeLSTM"))
