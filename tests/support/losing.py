"""Random networks with random plans, and others for when devices are lost; and runs of them in which devices are lost.

In: a seed, which losses are covered. Out: an artifact of the sockets target, frames of small integers, what they give.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
from support.dealing import cluster
from support.generators import integers, random_model, random_plan
from support.layer_graphs import rules

from dicompiler.ir.compilation import Compilation
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Loss
from dicompiler.partition.lowering import split
from dicompiler.target.seal import seal
from dicompiler.verify.executor import run_model
from dicompiler_passes.form_layers import form_layers
from dicompiler_targets.sockets import SocketsTarget

DEVICES = ("a", "b", "c", "d", "e")


@dataclass(frozen=True)
class Survivor:
    """An artifact in `directory`, and the model it is a split of."""

    directory: Path
    model: Model
    compilation: Compilation

    def frames(self, count: int) -> list[dict[str, Any]]:
        return [integers(Random(number), self.model.proto) for number in range(count)]

    def right(self, given: dict[str, Any], outputs: dict[str, Any]) -> bool:
        """Whether the outputs are those of the whole model, bit by bit."""
        whole = run_model(self.model, given)
        return set(outputs) == set(whole) and all(np.array_equal(outputs[name], whole[name]) for name in whole)


def survivor(seed: int, losses: Iterable[Sequence[str]], directory: Path) -> Survivor:
    """On five devices, of which each of the losses leaves some, on which another random plan goes on."""
    rng = Random(seed)
    model = Model.load(onnx.shape_inference.infer_shapes(random_model(rng)))
    layers = form_layers(model, rules())
    left = [(tuple(lost), [name for name in DEVICES if name not in lost]) for lost in losses]
    others = tuple(Loss(lost, random_plan(rng, layers, names)) for lost, names in left)
    plan = replace(random_plan(rng, layers, DEVICES), losses=others)
    compilation = split(Compilation(model=model, layers=layers, platform=cluster(*DEVICES), plan=plan))
    directory.mkdir(exist_ok=True)
    SocketsTarget().emit(compilation, directory)
    seal(directory)
    return Survivor(directory, model, compilation)
