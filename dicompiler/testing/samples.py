"""What plugins are tried on: small networks × platforms × objectives. Samples come out, always the same.

Others can be given wherever a check takes samples: `samples(networks=[my_model], platforms=[my_platform])`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx

from dicompiler import networks as built
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import NetworkKind
from dicompiler.networks.weights import make_weight as filled
from dicompiler.plugin_api import Device, Host, Network, Platform, Problem
from dicompiler.plugin_api.search import OBJECTIVES

NETWORKS = ("branches", "lenet")
"""Names of what is tried by default: two outputs, a residual Add and a Concat; a chain with fully connected layers."""

_BRANCHES_GRAPH = """<ir_version: 8, opset_import: ["": 17]>
branches (float[1, 3, 12, 10] x) => (float[1, 6, 6, 5] a, float[1, 6, 6, 5] b) {
  [c0] t0 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w0)
  [r0] t1 = Relu (t0)
  [c1] t2 = Conv <kernel_shape = [1, 1]> (t1, w1)
  [add] t3 = Add (t2, t0)
  [cat] t4 = Concat <axis = 1> (t3, t1)
  [max] a = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (t4)
  [avg] b = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (t4)
}"""


@dataclass(frozen=True)
class Sample:
    """One network to be split over one platform for one objective. name: how failures call it."""

    name: str
    model: onnx.ModelProto = field(repr=False)
    platform: Platform
    objective: str = "latency"

    def __str__(self) -> str:
        return f"{self.name} on {self.platform.name} for {self.objective}"

    @property
    def problem(self) -> Problem:
        """What a strategy is given."""
        return load_problem(self.model, self.platform, objective=self.objective)


def build_network(name: str) -> onnx.ModelProto:
    """One of NETWORKS, or any network of `dicompiler.networks`, with seeded weights."""
    if name != "branches":
        return built.build(name)
    proto = onnx.parser.parse_model(_BRANCHES_GRAPH)
    for weight, shape in (("w0", (3, 3, 3, 3)), ("w1", (3, 3, 1, 1))):
        fan_in = shape[1] * shape[2] * shape[3]
        proto.graph.initializer.append(onnx.numpy_helper.from_array(filled(0, weight, shape, "filter", fan_in), weight))
    return proto


def make_cluster(
    kind: NetworkKind,
    *rates: float,
    bandwidth: float = 1e8,
    memory: int = 2**30,
    power: tuple[float, float] = (0.0, 0.0),
) -> Platform:
    """Devices d0, d1, … of these rates (GFLOP/s; 0: without compute), each on a host of its own with `memory` bytes.

    bandwidth: of the network, in bit/s. power: W of each device while it computes and while it waits.
    """
    names = [f"d{i}" for i in range(len(rates))]
    devices = tuple(
        Device(name, name, rate * 1e9, power_active=power[0], power_idle=power[1])
        for name, rate in zip(names, rates, strict=True)
    )
    hosts = tuple(Host(name, memory) for name in names)
    return Platform(f"{kind}{len(rates)}", hosts, devices, Network(kind, bandwidth))


def default_platforms() -> tuple[Platform, ...]:
    """One device; three unequal ones on a switch; two behind a gateway, and a camera without compute."""
    return (
        make_cluster("switch", 1.0, power=(4.0, 2.0)),
        make_cluster("switch", 2.0, 1.0, 0.5, power=(4.0, 2.0)),
        make_cluster("gateway", 0.0, 1.0, 1.0, power=(4.0, 2.0)),
    )


def samples(
    networks: Sequence[str | Path | onnx.ModelProto] = NETWORKS,
    platforms: Sequence[Platform] | None = None,
    objectives: Sequence[str] = OBJECTIVES,
) -> Iterator[Sample]:
    """Every network on every platform for every objective.

    networks: names (see `network`), paths of ONNX files, or models. platforms: by default those of `platforms`.
    """
    chosen = _platforms() if platforms is None else platforms
    for i, given in enumerate(networks):
        name, model = _name_and_model(given, i)
        for platform in chosen:
            for objective in objectives:
                yield Sample(name, model, platform, objective)


_platforms = default_platforms


def _name_and_model(given: str | Path | onnx.ModelProto, index: int) -> tuple[str, onnx.ModelProto]:
    if isinstance(given, onnx.ModelProto):
        return given.graph.name or f"network {index}", given
    if isinstance(given, Path):
        return given.name, onnx.load(given)
    return given, build_network(given)


def memory_limited(sample: Sample, share: float = 0.6) -> Sample:
    """The same with hosts that hold only `share` of what a single device needs for the whole network."""

    needed = max(entry.memory for entry in sample.problem.best_single_device[1].devices)
    hosts = tuple(replace(host, memory=int(share * needed)) for host in sample.platform.hosts)
    return replace(
        sample, platform=replace(sample.platform, hosts=hosts, name=f"{sample.platform.name} with less memory")
    )
