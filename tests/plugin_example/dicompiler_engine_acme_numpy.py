"""The part of the engine acme_numpy that boards need. Boards do not have dicompiler."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

FUNCTIONS = {"Add": np.add, "Mul": np.multiply, "Relu": lambda array: np.maximum(array, 0)}


class EngineNetwork:
    """A loaded segment. numpy chooses its threads itself."""

    def __init__(self, network: Path, weights: Path, threads: int, is_spinning: bool) -> None:
        self._graph = json.loads(network.read_bytes())

    def run(self, inputs: Sequence[Any], shapes: Sequence[Sequence[int]]) -> list[Any]:
        """Return the outputs."""
        values = dict(zip(self._graph["inputs"], inputs, strict=True))
        for operator, names, output in self._graph["nodes"]:
            function = FUNCTIONS[operator]
            values[output] = function(*(values[name] for name in names))
        return [values[name] for name in self._graph["outputs"]]
