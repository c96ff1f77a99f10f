"""Constraints of a plan: each violation is a one-line error."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.alone import posed
from support.dealing import cluster, lenet
from support.layer_graphs import stack
from support.planning import make_cluster as rated

from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.metrics import DeviceFootprint
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.platform import Platform
from dicompiler.search.constraints import (
    check_compute,
    check_constraints,
    check_measured_memory,
    check_target_support,
    fits_constraints,
    free_memory,
    missing_memory,
    needed_memory,
    used_memory,
)
from dicompiler.search.problem import Problem
from dicompiler.target.target_base import Target
from dicompiler_targets.sockets.target import SocketsTarget


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        (({}, {"bb": "c"}), "replicas[1]: the plan uses no device 'bb'"),
        (({"b": "c", "a": "c"},), "replicas[0]: 'a' and 'b' both become 'c'"),
        (({"b": "a"},), "replicas[0]: 'a' and 'b' both become 'a'"),
        (({}, {}, {"a": "cc"}), "replicas[2]: test has no device 'cc'"),
        (({"a": "cam"},), "replicas[0]: device 'cam', which replaces 'a', has no compute"),
        (({"cam": "cc"},), "replicas[0]: test has no device 'cc'"),
    ],
)
def test_rejects_invalid_renaming(replicas: tuple[dict[str, str], ...], message: str) -> None:
    problem = replace(load_problem(networks.build("lenet", 0), "rpi4x4"), platform=cluster("cam", *"abc", idle="cam"))
    names = [layer.name for layer in problem.layers.layers]
    parts = {name: (Part("b" if i else "a"),) for i, name in enumerate(names)}
    plan = Plan(parts, ("cam",), ("cam",))
    check_constraints(problem, plan)
    with pytest.raises(DicompilerError) as raised:
        check_constraints(problem, replace(plan, replicas=replicas))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_renamed_source_stays_the_source() -> None:
    """A renaming moves only the work of the source, and a source without compute may be renamed."""
    result = lenet(({}, {"b": "c"}), cluster("a", "b", "c"))
    assert result.program is not None
    for role, worker in zip(result.program.roles, "bc", strict=True):
        assert [(t.sender, t.receiver) for t in role.transfers] == [("a", worker), (worker, "a")]
    plan = Plan({"l": (Part("b"),)}, ("cam",), ("cam",), replicas=({"cam": "c"},))
    check_compute(cluster("cam", "b", "c", idle="cam"), plan)


def test_target_without_replicas_rejects_plan_before_writing() -> None:
    result = lenet(({}, {"b": "c"}), cluster("a", "b", "c"))
    assert result.plan is not None

    class Other(SocketsTarget):
        name = "other"
        can_run_replicas = False

    with pytest.raises(DicompilerError, match=r"plan: replicas: target 'other' does not support replicas"):
        check_target_support(result.plan, Other())
    check_target_support(result.plan, SocketsTarget())
    assert not Target.can_run_replicas


def test_memory_counts_the_weights_of_all_roles() -> None:
    """d0 and d1 each store the half that the other computes in the next frame."""
    problem = posed(rated("switch", 1, 1))
    names = [layer.name for layer in problem.layers.layers]
    plan = problem.build_plan({name: (Part("d0" if i < len(names) - 2 else "d1"),) for i, name in enumerate(names)})
    crossed = replace(plan, replicas=({}, {"d0": "d1", "d1": "d0"}))
    halves, both = problem.evaluate(plan), problem.evaluate(crossed)
    total = sum(entry.weights for entry in halves.devices)
    assert [entry.weights for entry in both.devices] == [total, total]
    limit = both.memory - 1
    assert halves.memory < limit
    tight = replace(problem.platform, hosts=tuple(Host(host.name, limit) for host in problem.platform.hosts))
    check_constraints(replace(problem, platform=tight), plan)
    with pytest.raises(DicompilerError, match=r"host d0 needs 271 kB .* \(247 kB weights \+ .* without the runtime"):
        check_constraints(replace(problem, platform=tight), crossed)


def two(memory: int = 2**30) -> Problem:
    """A convolution and a classifier on cam (without compute), a and b, with this much memory each."""
    layers = stack((1, 3, 8, 8), [("conv", 4, 3, 1, 1, 1), ("flatten",), ("fc", 100)])
    return Problem(layers, cluster("cam", "a", "b", memory=memory, idle="cam"))


def on(problem: Problem, *devices: str) -> Plan:
    """Return a plan with one device for each layer."""
    layers = problem.layers.layers
    return problem.build_plan({layer.name: [Part(name)] for layer, name in zip(layers, devices, strict=True)})


def test_device_without_compute_may_only_be_source_or_sink() -> None:
    problem = two()
    assert on(problem, "a", "a", "b").source == ("cam",)
    check_constraints(problem, on(problem, "a", "a", "b"))
    with pytest.raises(DicompilerError, match=r"plan: layers\.conv1\[0\]: device 'cam' has no compute: use another"):
        check_constraints(problem, on(problem, "cam", "a", "b"))


def test_plan_fits_exactly_when_each_host_has_enough_memory() -> None:
    plan = on(two(), "a", "a", "b")
    needed = needed_memory(two(), plan)
    assert set(needed) == {"cam", "a", "b"}
    most = max(needed, key=lambda host: needed[host])
    assert most == "b"  # Host b stores the largest weights, 256 × 100.
    enough, tight = two(needed[most]), two(needed[most] - 1)
    assert fits_constraints(enough, plan, enough.estimate(plan))
    assert missing_memory(enough, plan) == {}
    assert not fits_constraints(tight, plan, tight.estimate(plan))
    assert missing_memory(tight, plan) == {"b": 1}
    with pytest.raises(
        DicompilerError, match=r"plan: host b needs .*: move layers .* above all parts of layer 'fc3'"
    ) as raised:
        check_constraints(tight, plan)
    assert "\n" not in str(raised.value)


def test_memory_of_devices_on_one_host_adds_up() -> None:
    problem = two()
    devices = tuple(replace(device, host="cam") for device in problem.platform.devices)
    together = replace(problem, platform=replace(problem.platform, hosts=problem.platform.hosts[:1], devices=devices))
    plan = on(together, "a", "a", "b")
    metrics = together.estimate(plan)
    assert used_memory(together.platform, metrics) == {"cam": sum(entry.total_memory for entry in metrics.devices)}
    assert free_memory(together) == {"cam": 2**30}


@pytest.mark.parametrize(
    ("ram", "flash", "message"),
    [
        (100, 100, ""),
        (101, 100, "host a needs 101 B of RAM, 1 B more than it has .100 B.: cut layer x into smaller"),
        (100, 101, "host a needs 101 B of flash, 1 B more than it has .100 B.: cut weights of y into"),
    ],
)
def test_measured_ram_and_flash_are_separate_limits(ram: int, flash: int, message: str) -> None:
    platform = Platform("p", (Host("a", 200, flash=100),), (Device("a", "a", 1e6),), Network("switch", 1e6))
    occupied = [DeviceFootprint("a", ram, flash, ("layer x", "weights of y"))]
    if not message:
        check_measured_memory(platform, occupied)
        return
    with pytest.raises(DicompilerError, match=message):
        check_measured_memory(platform, occupied)
