"""Samples for checks: small networks on several platforms for several objectives.

Every check also accepts other samples, such as `samples(networks=[my_model], platforms=[my_platform])`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx

from dicompiler.base.objectives import objective_terms
from dicompiler.driver.prepare import load_problem, resolve_platform
from dicompiler.ir.cluster import NetworkKind
from dicompiler.networks import build
from dicompiler.networks.weights import make_weight
from dicompiler.plugin_api import Device, Host, Network, Platform, Problem
from dicompiler.plugin_api.search import OBJECTIVES

NETWORKS = ("branches", "lenet")
"""Names of the default networks.

"branches" has a residual Add, a Concat and two outputs; "lenet" is a chain with dense layers.
"""

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
    """A network, the platform over which it is split, and the objective.

    Attributes:
        name: The network's name in error messages.
        model: The network as an ONNX model.
        platform: The cluster over which the network is split.
        objective: The objective that a strategy minimises.
    """

    name: str
    model: onnx.ModelProto = field(repr=False)
    platform: Platform
    objective: str = "latency"

    def __str__(self) -> str:
        return f"{self.name} on {self.platform.name} for {self.objective}"

    @property
    def problem(self) -> Problem:
        """The problem that a strategy solves for this sample."""
        return load_problem(self.model, self.platform, objective=self.objective)


def build_network(name: str) -> onnx.ModelProto:
    """Return a network of NETWORKS or of `dicompiler.networks`, with seeded weights.

    Args:
        name: The network's name, such as "lenet".

    Returns:
        The model.
    """
    if name != "branches":
        return build(name)
    proto = onnx.parser.parse_model(_BRANCHES_GRAPH)
    for weight, shape in (("w0", (3, 3, 3, 3)), ("w1", (3, 3, 1, 1))):
        array = make_weight(0, weight, shape, "filter", shape[1] * shape[2] * shape[3])
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, weight))
    return proto


def make_cluster(
    kind: NetworkKind,
    *rates: float,
    bandwidth: float = 1e8,
    memory: int = 2**30,
    power: tuple[float, float] = (0.0, 0.0),
) -> Platform:
    """Return a platform of devices d0, d1, …, each on its own host.

    Args:
        kind: The network's topology, such as "switch".
        *rates: Rate of each device in GFLOP/s; 0 for a device without compute.
        bandwidth: Bandwidth of the network in bit/s.
        memory: Bytes of memory of each host.
        power: (power while computing, power while waiting) of each device in W.

    Returns:
        The platform.
    """
    names = [f"d{i}" for i in range(len(rates))]
    devices = tuple(
        Device(name, name, rate * 1e9, power_active=power[0], power_idle=power[1])
        for name, rate in zip(names, rates, strict=True)
    )
    hosts = tuple(Host(name, memory) for name in names)
    return Platform(f"{kind}{len(rates)}", hosts, devices, Network(kind, bandwidth))


def default_platforms() -> tuple[Platform, ...]:
    """Return the platforms of the default samples.

    Returns:
        One device; three unequal devices on a switch; two devices and a camera without compute, behind a gateway.
    """
    return (
        make_cluster("switch", 1.0, power=(4.0, 2.0)),
        make_cluster("switch", 2.0, 1.0, 0.5, power=(4.0, 2.0)),
        make_cluster("gateway", 0.0, 1.0, 1.0, power=(4.0, 2.0)),
    )


def samples(
    networks: Sequence[str | Path | onnx.ModelProto] = NETWORKS,
    platforms: Sequence[str | Path | Platform] | None = None,
    objectives: Sequence[str] | None = None,
) -> Iterator[Sample]:
    """Yield every network on every platform for every objective.

    Args:
        networks: Names such as "lenet" (those that `build_network` accepts), paths of ONNX files, or models.
        platforms: Platforms, names of built-in platforms such as "rpi4x4", or paths of TOML files. Default:
            `default_platforms()`.
        objectives: The objectives. Default: all, but the objective energy only for platforms that state powers.

    Yields:
        The samples.

    Raises:
        UsageError: A platform or an objective is unknown.
    """
    chosen = default_platforms() if platforms is None else [resolve_platform(platform) for platform in platforms]
    for objective in objectives or ():
        objective_terms(objective)
    for i, source in enumerate(networks):
        name, model = _name_and_model(source, i)
        for platform in chosen:
            for objective in _default_objectives(platform) if objectives is None else objectives:
                yield Sample(name, model, platform, objective)


def _default_objectives(platform: Platform) -> list[str]:
    return [name for name in OBJECTIVES if name != "energy" or platform.has_powers]


def _name_and_model(source: str | Path | onnx.ModelProto, index: int) -> tuple[str, onnx.ModelProto]:
    if isinstance(source, onnx.ModelProto):
        return source.graph.name or f"network {index}", source
    if isinstance(source, Path):
        return source.name, onnx.load(source)
    return source, build_network(source)


def memory_limited(sample: Sample, share: float = 0.6) -> Sample:
    """Return the sample with less memory on each host.

    Args:
        sample: The sample.
        share: New memory of each host, relative to the memory that one device needs for the whole network.

    Returns:
        A sample with the same network and objective, on a platform with less memory.
    """
    needed = max(entry.memory for entry in sample.problem.best_single_device[1].devices)
    hosts = tuple(replace(host, memory=int(share * needed)) for host in sample.platform.hosts)
    platform = replace(sample.platform, hosts=hosts, name=f"{sample.platform.name} with less memory")
    return replace(sample, platform=platform)
