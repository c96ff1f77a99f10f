"""Lowering gives a placed model and a program, role by role."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dealing import MORE, cluster, dealt, lenet
from support.generators import integers

from dicompiler import networks
from dicompiler.driver.prepare import load_problem, prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Part
from dicompiler.partition.lowering import lower, partition
from dicompiler.partition.tiling import single_device_plan
from dicompiler.verify.comparison import check_transfers
from dicompiler.verify.executor import ProgramExecutor, run_model


def test_empty_replica_changes_nothing() -> None:
    plain, dealt = lenet((), cluster("a", "b")), lenet(({},), cluster("a", "b"))
    assert plain.program is not None and dealt.program is not None
    assert plain.program.transfers == dealt.program.all_transfers
    assert [d.steps for d in plain.program.devices] == [d.steps for d in dealt.program.devices]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**48))
def test_all_roles_are_bit_equal_and_send_the_predicted_bytes(seed: int) -> None:
    compilation, model, rng = dealt(seed)
    program, routing, plan = compilation.program, compilation.routing, compilation.plan
    assert program is not None and routing is not None and plan is not None
    inputs = integers(rng, model.proto)
    reference = run_model(model, inputs)
    index = 0
    assert len(program.roles) == len(routing.roles) == len(plan.replicas)
    for role, routes, renamed in zip(program.roles, routing.roles, plan.roles, strict=True):
        assert [device.device for device in role.devices] == [d for d in MORE if d in plan.devices]
        execution = ProgramExecutor(role).run(inputs)
        assert set(execution.delivered) == set(plan.sink)
        for outputs in execution.delivered.values():
            assert all(np.array_equal(outputs[name], value, equal_nan=True) for name, value in reference.items())
        own = program.all_transfers[index : index + len(role.transfers)]
        sent = {index + i: count for i, count in enumerate(execution.sent)}
        assert check_transfers(own, sent, 1).passed and sum(execution.sent) == routes.total_bytes
        working = {device.device for device in role.devices if device.segments}
        assert working <= {p.device for parts in renamed.layers.values() for p in parts} | {*plan.source, *plan.sink}
        index += len(role.transfers)
    assert [t.index for t in program.all_transfers] == list(range(index))


def test_equal_roles_are_processed_once() -> None:
    result = lenet(({}, {"b": "c"}, {"b": "b"}), cluster("a", "b", "c"))
    assert result.program is not None
    first, _, third = result.program.roles
    assert all(a is b for a, b in zip(first.devices, third.devices, strict=True))


def test_without_a_plan_every_layer_is_on_one_device() -> None:
    prepared = prepare(Model.load(networks.build("lenet", 0)))
    placed = partition(prepared)
    assert placed.plan is not None and placed.routing is not None
    assert placed.plan.devices == ("d0",)
    assert placed.routing.total_bytes == 0
    assert [node.op_type for node in placed.model.proto.graph.node] == [
        node.op_type for node in prepared.model.proto.graph.node
    ]


def test_plans_are_evaluated_without_a_check_of_the_whole_model() -> None:
    problem = load_problem(networks.build("lenet"), "rpi4x2", target="sockets")
    plan = problem.single_device_plan("pi01")
    problem.evaluate(plan)
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        problem.evaluate(plan)
    finally:
        sys.setprofile(None)
    assert "_partition_whole_model" in called and "check_not_placed" not in called


def test_warns_of_unread_parts_unless_quiet(caplog: pytest.LogCaptureFixture) -> None:
    prepared = prepare(Model.load(networks.build("lenet", 0)))
    assert prepared.layers is not None
    plan = single_device_plan(prepared.layers, "d0")
    name = prepared.layers.layers[0].name
    fat = replace(prepared, plan=replace(plan, layers={**plan.layers, name: (Part("d0"), Part("d1"))}))
    with caplog.at_level(logging.WARNING, "dicompiler"):
        quiet = partition(fat, quiet=True)
        lower(replace(fat, platform=cluster("d0", "d1")))  # `verify` calls lower(), which also must not warn.
        assert caplog.messages == []
        assert partition(fat).model.to_bytes() == quiet.model.to_bytes()
    assert caplog.messages == [f"partition: part 1 of layer {name!r} is never read and is omitted"]


def test_program_has_the_plans_devices_and_keeps_the_reference() -> None:
    prepared = prepare(Model.load(networks.build("lenet", 0)))
    assert prepared.layers is not None
    plan = replace(single_device_plan(prepared.layers, "c"), source=("b",), sink=("b",))
    result = lower(replace(prepared, platform=cluster("a", "b", "c", "d"), plan=plan))
    assert result.program is not None
    assert [device.device for device in result.program.devices] == ["b", "c"]
    assert result.reference is prepared.model
    assert result.model is not prepared.model
