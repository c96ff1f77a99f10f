"""The workload of a plan: seconds of each job on its device, bytes of each message."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dealing import cluster, lenet
from support.random_problems import any_plan, random_problem

from dicompiler import networks
from dicompiler.cost.workload import task_seconds, workload
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.tasks import task_id


def test_a_role_has_the_seconds_of_its_devices() -> None:
    platform = cluster("a", "b", "c")
    slow = replace(platform, devices=(*platform.devices[:2], replace(platform.devices[2], rate=0.25e9)))
    result = lenet(({}, {"b": "c"}), slow)
    assert result.program is not None and result.routing is not None
    problem = load_problem(networks.build("lenet", 0), slow)
    first, second = workload(result.program, result.routing, slow, problem.cost).roles
    seconds = [sum(job.seconds for device in own.devices for job in device.jobs) for own in (first, second)]
    assert seconds[1] == pytest.approx(4 * seconds[0])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 30), st.integers(0, 2**32))
def test_jobs_and_messages_are_the_segments_and_transfers_of_the_program(network: int, seed: int) -> None:
    problem = random_problem(network)
    plan = any_plan(seed, problem)
    sketched = problem.sketch(plan)
    program, routing = sketched.program, sketched.routing
    assert program is not None and routing is not None
    work = workload(program, routing, problem.platform, problem.cost)
    assert [message.nbytes for message in work.messages] == [transfer.value.nbytes for transfer in program.transfers]
    assert sum(message.nbytes for message in work.messages) == routing.total_bytes
    for own, device in zip(work.devices, program.devices, strict=True):
        assert (own.device, own.host) == (device.device, device.host)
        assert [job.name for job in own.jobs] == [segment.name for segment in device.segments]
        assert sum(job.outputs for job in own.jobs) <= len(device.sinks)
        sends = [*own.first, *(index for job in own.jobs for index in job.sends)]
        assert sends == [step.index for step in device.steps if step.kind == "send"]
    assert set(work.seconds) == {task_id(task) for task in routing.tasks}
    computed = sum(job.seconds for device in work.devices for job in device.jobs)
    assert computed == pytest.approx(sum(work.seconds.values()))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 30), st.integers(0, 2**32))
def test_the_seconds_of_a_task_are_its_cost_on_its_device(network: int, seed: int) -> None:
    problem = random_problem(network)
    routing, work = problem.workload(any_plan(seed, problem))
    for task in routing.tasks:
        alone = task_seconds(routing, problem.platform, problem.cost, task)
        assert work.seconds[task_id(task)] == alone >= 0
        twice = replace(problem.platform, devices=tuple(replace(d, rate=2 * d.rate) for d in problem.platform.devices))
        assert task_seconds(routing, twice, problem.cost, task) == pytest.approx(alone / 2)
