"""Memory needs of each host, and the error of the first need that exceeds its limit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.cost.memory import MemoryUse
from dicompiler.driver.compile_result import CompileResult
from dicompiler.driver.compiler import compile
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.metrics import DeviceFootprint
from dicompiler.ir.plan import Part
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.search.constraints import HostMemoryNeed, check_measured_memory, check_program_memory, host_memory_needs
from dicompiler_targets.sockets.target import SocketsTarget


def boards(*hosts: Host) -> Platform:
    """Two devices a0, a1 on the first host, one on each other host."""
    first, *others = hosts
    devices = [Device(f"{first.name}{i}", first.name, 1e6) for i in range(2)]
    devices += [Device(host.name, host.name, 1e6) for host in others]
    return Platform("boards", hosts, tuple(devices), Network("switch", 1e6))


SHARES = (
    r"needs 4\.33 kB \(1 B too much\) and has 4\.33 kB \(6 B weights \+ 320 B buffers and activations \+ "
    r"4\.00 kB runtime of target 'sockets'\): "
)
USES = {"a0": MemoryUse(1, 20, 300, 4000), "a1": MemoryUse(5, 0, 0), "b": MemoryUse(7, 80, 0)}


def test_devices_share_their_hosts_memory_and_weights_are_in_flash() -> None:
    platform = boards(Host("a", 9000), Host("b", 500, flash=100))
    a, b = (
        HostMemoryNeed("a", "memory", 4326, 9000),
        [HostMemoryNeed("b", "RAM", 80, 400), HostMemoryNeed("b", "flash", 7, 100)],
    )
    assert list(host_memory_needs(platform, USES)) == [a, *b]
    assert list(host_memory_needs(platform, USES, include_sum=True)) == [a, HostMemoryNeed("b", "memory", 87, 500), *b]


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (Host("a", 4326), ""),
        (Host("a", 4325), SHARES),
        (Host("a", 4325, flash=10), SHARES),
        (Host("a", 9000, flash=5), r"needs 6 B \(1 B too much\) of flash for weights and has 5 B: move layers to "),
        (
            Host("a", 4326, flash=7),
            r"needs 4\.32 kB \(1 B too much\) of RAM for activations and has 4\.32 kB: use smal",
        ),
    ],
)
def test_program_error_names_the_exceeded_memory(host: Host, message: str) -> None:
    problem = load_problem(networks.build("lenet", 0), boards(host))
    compilation = problem.draft_program(
        problem.build_plan({layer.name: (Part("a0"),) for layer in problem.layers.layers})
    )
    memory = {name: USES[name] for name in ("a0", "a1")}
    if not message:
        check_program_memory(compilation, memory, SocketsTarget())
        return
    with pytest.raises(DicompilerError, match=f"plan: host a {message}"):
        check_program_memory(compilation, memory, SocketsTarget())


def test_measurement_error_names_the_largest_user_of_the_memory() -> None:
    measured = (DeviceFootprint("a0", 50, 30, ("p", "q")), DeviceFootprint("a1", 60, 10, ("r", "s")))
    check_measured_memory(boards(Host("a", 150, flash=40)), measured)
    for host, message in (
        (Host("a", 149, flash=40), "needs 110 B of RAM, 1 B more than it has .109 B.: cut r into smaller parts"),
        (Host("a", 150, flash=39), "needs 40 B of flash, 1 B more than it has .39 B.: cut q into smaller parts"),
        (Host("a", 149), "needs 150 B of memory, 1 B more than it has .149 B.: cut r into smaller parts"),
    ):
        with pytest.raises(DicompilerError, match=f"plan: host a {message} or use another device for it"):
            check_measured_memory(boards(host), measured)


def test_compilation_asks_its_target_once_for_memory(tmp_path: Path) -> None:
    asked: list[Program] = []

    class Listening(SocketsTarget):
        def memory_overhead(self, program: Program) -> Mapping[str, int]:
            asked.append(program)
            return super().memory_overhead(program)

    problem = load_problem(networks.build("lenet", 0), "rpi4x2")
    plan = problem.build_plan({layer.name: (Part("pi01"),) for layer in problem.layers.layers})
    result = compile(networks.build("lenet", 0), "rpi4x2", plan=plan, target=Listening(), output=tmp_path / "a")
    # The target predicts memory twice: for devices without segments (the overhead), and for the compiled program.
    assert [bool(program.devices[0].segments) for program in asked] == [False, True]
    assert result.metrics is not None
    added = SocketsTarget().memory_overhead(asked[1])
    assert all(entry.overhead_bytes >= added[entry.device] for entry in result.metrics.devices)


@pytest.mark.parametrize("strategy", ["auto", "single", "modnn"])
def test_memory_that_an_error_names_suffices(strategy: str, tmp_path: Path) -> None:
    """Users set the memory once. The first error counts the runtime, and so does the result."""
    model = networks.build("lenet", 0)
    platform = load_problem(model, "rpi4x2").platform

    def compile_with(memory: int) -> CompileResult:
        hosts = tuple(replace(host, memory=memory) for host in platform.hosts)
        return compile(model, replace(platform, hosts=hosts), strategy, output=tmp_path / "a", allow_worse=True)

    with pytest.raises(DicompilerError) as refused:
        compile_with(10_000_000)
    message = str(refused.value)
    assert all(share in message for share in ("kB weights + ", "kB buffers and activations + ", "MB runtime of target"))
    sizes = re.findall(r"([\d.]+) MB (?:\([\d.]+ MB too much\)|on each host would suffice)", message)
    needed = max(map(float, sizes))
    # The error rounds the needed memory to 0.1 MB, so 0.05 MB are added.
    result = compile_with(round(needed * 1e6) + 50_000)
    assert "needs" in result.memory_summary and "MB runtime of target 'sockets'" in result.memory_summary
