"""Random networks with random plans and failure plans, and runs of them in which devices fail.

A seed and the covered failures ⇒ a sockets artifact, frames of small integers, and their expected outputs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
from support.dealing import cluster
from support.generators import integers, random_model, random_plan
from support.layer_graphs import rules

from dicompiler import networks
from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import FailurePlan, Part, Plan
from dicompiler.partition.lowering import lower
from dicompiler.target.manifest import write_digests_and_checksum
from dicompiler.verify.comparison import compare_value
from dicompiler.verify.executor import run_model
from dicompiler_passes.form_layers import form_layers
from dicompiler_targets.sockets.artifact import RoleIO, SocketsArtifact
from dicompiler_targets.sockets.session import ClusterSession
from dicompiler_targets.sockets.target import SocketsTarget

DEVICES = ("a", "b", "c", "d", "e")


@dataclass(frozen=True)
class Survivor:
    """An artifact with failure plans.

    Attributes:
        directory: The artifact.
        model: The model before partitioning.
        compilation: The compiled network.
        exact: All values are small integers.
    """

    directory: Path
    model: Model
    compilation: PipelineState
    exact: bool = True

    def frames(self, count: int) -> list[dict[str, Any]]:
        return [integers(Random(number), self.model.proto) for number in range(count)]

    def peers(self, device: str) -> list[str]:
        """Return the sorted devices with which a device exchanges tensors in any role."""
        program = self.compilation.program
        assert program is not None
        ends = [{t.sender, t.receiver} for role in program.roles for t in role.transfers]
        return sorted({name for pair in ends if device in pair for name in pair} - {device})

    def roles(self) -> Sequence[RoleIO]:
        """Return inputs and outputs of the devices in each role."""
        return SocketsArtifact.load(self.directory).role_ios

    @cached_property
    def _known(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        frames = self.frames(5)
        return frames, [run_model(self.model, given) for given in frames]

    def _same(self, due: Any, got: Any) -> bool:
        return np.array_equal(due, got) if self.exact else compare_value("", due, got).passed

    def stream(self, session: ClusterSession, plot: Iterator[None]) -> int:
        """Send frames while the generator `plot` runs, which advances once per finished frame; return their number.

        Raises:
            AssertionError: Outputs differ from those of the model; an exact model must match bit by bit.
        """
        frames, wanted = self._known
        over = False

        def given() -> Iterator[dict[str, Any]]:
            for number in itertools.count():
                if over:
                    return
                yield frames[number % len(frames)]

        count = 0
        for count, outputs in enumerate(session.stream(given()), 1):
            due = wanted[(count - 1) % len(frames)]
            assert set(outputs) == set(due), count
            assert all(self._same(due[name], outputs[name]) for name in due), f"frame {count - 1}"
            over = over or next(plot, plot) is plot
        return count


def named(network: str, losses: Iterable[Sequence[str]], directory: Path) -> Survivor:
    """Return a network of dicompiler.networks with its layers distributed over all devices that are up."""
    base = replace(prepare(Model.load(networks.build(network, 0))), platform=cluster(*DEVICES))
    assert base.layers is not None
    names = [layer.name for layer in base.layers.layers]

    def dealt(devices: Sequence[str]) -> Plan:
        share = -(-len(names) // len(devices))
        parts = {name: (Part(devices[i // share]),) for i, name in enumerate(names)}
        return Plan(parts, (devices[0],), (devices[0],))

    others = tuple(FailurePlan(tuple(lost), dealt([name for name in DEVICES if name not in lost])) for lost in losses)
    return _emitted(replace(base, plan=replace(dealt(DEVICES), failures=others)), directory, exact=False)


def survivor(seed: int, losses: Iterable[Sequence[str]], directory: Path) -> Survivor:
    """Return a random network on five devices, with another random plan for each of the failures."""
    rng = Random(seed)
    model = Model.load(onnx.shape_inference.infer_shapes(random_model(rng)))
    layers = form_layers(model, rules())
    left = [(tuple(lost), [name for name in DEVICES if name not in lost]) for lost in losses]
    others = tuple(FailurePlan(lost, random_plan(rng, layers, names)) for lost, names in left)
    plan = replace(random_plan(rng, layers, DEVICES), failures=others)
    return _emitted(PipelineState(model=model, layers=layers, platform=cluster(*DEVICES), plan=plan), directory)


def _emitted(given: PipelineState, directory: Path, exact: bool = True) -> Survivor:
    compilation = lower(given)
    directory.mkdir(exist_ok=True)
    SocketsTarget().emit(compilation, directory)
    write_digests_and_checksum(directory)
    return Survivor(directory, given.model, compilation, exact)


def kinds(session: ClusterSession) -> list[tuple[str, str]]:
    """Return kind and device of each event of a session."""
    return [(event.kind, event.device) for event in session.events]


def frames(count: int) -> Iterator[None]:
    for _ in range(count):
        yield


def frames_until(condition: Callable[[], object], seconds: float = 20.0) -> Iterator[None]:
    """Yield until the condition is true; raise AssertionError if that takes too long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        yield
