"""Replicas, frames dealt out in turn: the plan file, what is refused, each role's program, the simulator by hand,
memory. What is predicted of them is in test_replicas_metrics.py, real processes are in test_sockets_replicas.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dealing import MORE, cluster, dealt
from support.generators import integers

from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.cost.memory import program_memory
from dicompiler.cost.simulator import simulate
from dicompiler.cost.workload import DeviceWork, Job, Message, Workload, workload
from dicompiler.driver.compiler import compile
from dicompiler.driver.prepare import load_problem, prepare
from dicompiler.ir.compilation import Compilation
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Part, Plan, dumps, from_json, load, to_json
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.partition.lowering import split
from dicompiler.partition.tiling import whole_plan
from dicompiler.search.constraints import check, check_compute, check_program
from dicompiler.target.interface import Target
from dicompiler.verify.comparison import exact, transfers
from dicompiler.verify.executor import Executor, run_model
from dicompiler_targets.sockets import SocketsTarget

MEGABIT = 10**6 // 8  # bytes that take a second on a line of 1 Mbit/s
TWO = Plan(
    {"conv": (Part("a"), Part("b")), "pool": (Part("b"),)},
    ("a",),
    ("b",),
    replicas=({}, {"a": "c", "b": "d"}, {"a": "c"}),
)


def lenet(replicas: tuple[dict[str, str], ...], platform: Platform) -> Compilation:
    """All of LeNet on the platform's second device, inputs and outputs on the first; split."""
    prepared = replace(prepare(Model.load(networks.build("lenet", 0))), platform=platform)
    assert prepared.layers is not None
    source = platform.devices[0].name
    plan = replace(whole_plan(prepared.layers, platform.devices[1].name), source=(source,), sink=(source,))
    return split(replace(prepared, plan=replace(plan, replicas=replicas)))


# -- plan


def test_roles_are_the_plan_renamed_but_source_and_sink_stay() -> None:
    first, second, third = TWO.roles
    assert first == replace(TWO, replicas=())
    assert second == Plan({"conv": (Part("c"), Part("d")), "pool": (Part("d"),)}, ("a",), ("b",))
    assert third == Plan({"conv": (Part("c"), Part("b")), "pool": (Part("b"),)}, ("a",), ("b",))
    assert TWO.devices == ("a", "b", "c", "d")
    assert first.roles == (first,)


def test_devices_that_only_a_role_without_them_names_take_no_part() -> None:
    assert replace(TWO, source=("x",), sink=("x",), replicas=({"a": "c", "b": "d"},)).devices == ("x", "c", "d")


RENAMINGS = st.lists(st.dictionaries(st.text(min_size=1, max_size=4), st.text(min_size=1, max_size=4)), max_size=3)


@given(RENAMINGS)
def test_a_plan_with_replicas_reads_back_as_it_was(replicas: list[dict[str, str]]) -> None:
    plan = replace(TWO, replicas=tuple(replicas))
    assert from_json(to_json(plan)) == from_json(json.loads(dumps(plan))) == plan
    assert ("replicas" in to_json(plan)) == bool(replicas)


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ("[]", "replicas: a list of 0 entries is too short"),
        ('[["a"]]', "replicas[0]: expected an object"),
        ('[{}, {"a": 3}]', "replicas[1].a: expected a text"),
        ('[{"a": ""}]', "replicas[0].a: an empty text"),
    ],
)
def test_a_wrong_file_is_refused(replicas: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(dumps(replace(TWO, replicas=())).replace('"sink"', f'"replicas": {replicas}, "sink"'))
    with pytest.raises(DicompilerError) as raised:
        load(path)
    assert message in str(raised.value) and str(path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        (({}, {"bb": "c"}), "replicas[1]: the plan uses no device 'bb'"),
        (({"b": "c", "a": "c"},), "replicas[0]: 'a' and 'b' both become 'c'"),
        (({"b": "a"},), "replicas[0]: 'a' and 'b' both become 'a'"),
        (({}, {}, {"a": "cc"}), "replicas[2]: test has no device 'cc'"),
        (({"a": "cam"},), "replicas[0]: device 'cam', which does the work of 'a', has no compute"),
        (({"cam": "cc"},), "replicas[0]: test has no device 'cc'"),
    ],
)
def test_a_renaming_that_cannot_be_is_named(replicas: tuple[dict[str, str], ...], message: str) -> None:
    problem = replace(load_problem(networks.build("lenet", 0), "rpi4x4"), platform=cluster("cam", *"abc", idle="cam"))
    names = [layer.name for layer in problem.layers.layers]
    parts = {name: (Part("b" if i else "a"),) for i, name in enumerate(names)}
    plan = Plan(parts, ("cam",), ("cam",))
    check(problem, plan)
    with pytest.raises(DicompilerError) as raised:
        check(problem, replace(plan, replicas=replicas))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_renamed_source_stays_the_source() -> None:
    """a is source, sink and does the work: a renaming moves its work only; a compute-less source may be named, too."""
    result = lenet(({}, {"b": "c"}), cluster("a", "b", "c"))
    assert result.program is not None
    for role, worker in zip(result.program.roles, "bc", strict=True):
        assert [(t.sender, t.receiver) for t in role.transfers] == [("a", worker), (worker, "a")]
    plan = Plan({"l": (Part("b"),)}, ("cam",), ("cam",), replicas=({"cam": "c"},))
    check_compute(cluster("cam", "b", "c", idle="cam"), plan)


def test_a_target_that_cannot_deal_refuses_before_it_writes() -> None:
    result = lenet(({}, {"b": "c"}), cluster("a", "b", "c"))

    class Other(SocketsTarget):
        name = "other"
        replicas = False

    with pytest.raises(DicompilerError, match=r"plan: replicas: target 'other' cannot deal out frames in turn"):
        check_program(result, Other())
    check_program(result, SocketsTarget())
    assert not Target.replicas


# -- each role's program


def test_one_renaming_of_nothing_changes_nothing() -> None:
    plain, dealt = lenet((), cluster("a", "b")), lenet(({},), cluster("a", "b"))
    assert plain.program is not None and dealt.program is not None
    assert plain.program.transfers == dealt.program.all_transfers
    assert [d.steps for d in plain.program.devices] == [d.steps for d in dealt.program.devices]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**48))
def test_every_role_of_any_plan_is_bit_equal_and_sends_what_was_predicted(seed: int) -> None:
    compilation, model, rng = dealt(seed)
    program, routing, plan = compilation.program, compilation.routing, compilation.plan
    assert program is not None and routing is not None and plan is not None
    inputs = integers(rng, model.proto)
    reference = run_model(model, inputs)
    index = 0
    assert len(program.roles) == len(routing.roles) == len(plan.replicas)
    for role, routes, renamed in zip(program.roles, routing.roles, plan.roles, strict=True):
        assert [device.device for device in role.devices] == [d for d in MORE if d in plan.devices]
        execution = Executor(role).run(inputs)
        assert set(execution.delivered) == set(plan.sink)
        for outputs in execution.delivered.values():
            assert all(np.array_equal(outputs[name], value, equal_nan=True) for name, value in reference.items())
        own = program.all_transfers[index : index + len(role.transfers)]
        sent = {index + i: count for i, count in enumerate(execution.sent)}
        assert transfers(own, sent, 1).passed and sum(execution.sent) == routes.total_bytes
        working = {device.device for device in role.devices if device.segments}
        assert working <= {p.device for parts in renamed.layers.values() for p in parts} | {*plan.source, *plan.sink}
        index += len(role.transfers)
    assert [t.index for t in program.all_transfers] == list(range(index))


def test_equal_roles_are_made_once() -> None:
    result = lenet(({}, {"b": "c"}, {"b": "b"}), cluster("a", "b", "c"))
    assert result.program is not None
    first, _, third = result.program.roles
    assert all(a is b for a, b in zip(first.devices, third.devices, strict=True))


def test_a_wrong_role_fails_the_exact_check() -> None:
    """The second role of the check model is spoilt; with whole roles it passes and says of how many."""
    platform = cluster("a", "b", "c")
    base = lenet(({}, {"b": "c"}), platform)
    assert base.reference is not None and base.plan is not None

    def program(model: Model, spoil: bool = False) -> Program:
        made = split(replace(prepare(model), plan=base.plan, platform=platform)).program
        assert made is not None
        if not spoil:
            return made
        (segment, *_) = made.others[0].devices[2].segments
        for node in segment.model.graph.node:
            if node.op_type == "MaxPool":
                node.op_type = "AveragePool"
        return made

    good = exact(base.reference, program, seeds=(0, 1))
    assert good.passed and good.detail.endswith(", each in 2 replicas")
    bad = exact(base.reference, lambda model: program(model, spoil=True), seeds=(0, 1))
    assert not bad.passed and "replica 1: output" in bad.detail


# -- simulator, by hand


def one_by_one(seconds: float, *receivers: int) -> Workload:
    """d0 sends each frame (2 s on its line) to one device, which computes and delivers; a role for each receiver."""
    roles = [
        Workload(
            tuple(
                DeviceWork(f"d{i}", f"d{i}", (0,) if i == 0 else (), (Job("j", seconds, (0,), (), 1),) * (i == to))
                for i in range(3)
            ),
            (Message(0, to, 2 * MEGABIT, "m"),),
        )
        for to in receivers
    ]
    return replace(roles[0], others=tuple(roles[1:]))


def test_frames_go_to_the_roles_in_turn() -> None:
    platform = cluster("d0", "d1", "d2")
    # Line out of d0: 0–2, 2–4, 4–6, 6–8. d1: 2–5, 6–9; d2: 4–7, 8–11: the line is what binds.
    found = simulate(one_by_one(3, 1, 2), platform, frames=4, in_flight=4)
    assert [end for _, end in found.frames] == pytest.approx([5, 7, 9, 11])
    assert found.period_s == pytest.approx(2)
    assert [span.device for span in found.spans if span.kind == "compute"] == ["d1", "d2", "d1", "d2"]
    # Of one device alone the computing binds: 2–5, 5–8, 8–11, 11–14.
    alone = simulate(one_by_one(3, 1), platform, frames=4, in_flight=4)
    assert [end for _, end in alone.frames] == pytest.approx([5, 8, 11, 14])
    # Two frames in flight: the third is given at 5, the fourth at 7.
    two = simulate(one_by_one(3, 1, 2), platform, frames=4, in_flight=2)
    assert [end for _, end in two.frames] == pytest.approx([5, 7, 10, 12])


def test_frames_dealt_unevenly_wait_for_the_slower_role() -> None:
    # d1, d1, d2 in turn at 10 s each: d1 2–12, 12–22, then 22–32; d2 6–16.
    found = simulate(one_by_one(10, 1, 1, 2), cluster("d0", "d1", "d2"), frames=4, in_flight=4)
    assert [end for _, end in found.frames] == pytest.approx([12, 22, 16, 32])
    assert found.waits["d2"] == {"d0": pytest.approx(6)}


def test_a_role_has_the_seconds_of_its_devices() -> None:
    platform = cluster("a", "b", "c")
    slow = replace(platform, devices=(*platform.devices[:2], replace(platform.devices[2], rate=0.25e9)))
    result = lenet(({}, {"b": "c"}), slow)
    assert result.program is not None and result.routing is not None
    problem = load_problem(networks.build("lenet", 0), slow)
    first, second = workload(result.program, result.routing, slow, problem.cost).roles
    seconds = [sum(job.seconds for device in own.devices for job in device.jobs) for own in (first, second)]
    assert seconds[1] == pytest.approx(4 * seconds[0])


# -- memory


def test_weights_of_all_roles_are_held_and_the_buffers_of_the_frames_in_flight() -> None:
    """a computes in role 0 and b in role 1; and both in turn each other's layers."""
    one = lenet(({"b": "a"},), cluster("a", "b"))
    both = lenet(({"b": "a"}, {}), cluster("a", "b"))
    assert one.program is not None and both.program is not None
    alone, shared = program_memory(one.program), program_memory(both.program)
    assert shared["a"].weights == shared["b"].weights == alone["a"].weights
    image, classes = 4 * 32 * 32, 4 * 10
    # One frame: at most what the role that computes there takes.
    assert shared["a"] == alone["a"]
    assert shared["b"].buffers == image
    # Of three at once two may be in one role; in the other a holds the input to be sent and the outputs to come.
    three = program_memory(both.program, 3)
    assert three["a"].buffers == 2 * image + (image + classes)
    assert three["b"].buffers == 2 * image


def test_different_halves_in_turn_hold_the_whole() -> None:
    platform = cluster("a", "b")
    prepared = replace(prepare(Model.load(networks.build("lenet", 0))), platform=platform)
    assert prepared.layers is not None
    names = [layer.name for layer in prepared.layers.layers]
    parts = {name: (Part("a" if i < len(names) - 2 else "b"),) for i, name in enumerate(names)}
    plan = Plan(parts, ("a",), ("a",))
    straight = split(replace(prepared, plan=plan)).program
    crossed = split(replace(prepared, plan=replace(plan, replicas=({}, {"a": "b", "b": "a"})))).program
    assert straight is not None and crossed is not None
    plain, swapped = program_memory(straight), program_memory(crossed)
    total = plain["a"].weights + plain["b"].weights
    assert swapped["a"].weights == swapped["b"].weights == total
    added = SocketsTarget().memory(crossed)
    assert all(added[name] >= SocketsTarget().memory(straight)[name] for name in "ab")


def test_the_error_of_a_full_host_counts_all_roles(tmp_path: Path) -> None:
    proto = networks.build("lenet", 0)
    problem = load_problem(proto, cluster("a", "b", memory=62 * 2**20))
    plan = replace(
        problem.plan({layer.name: (Part("a"),) for layer in problem.layers.layers}), replicas=({}, {"a": "b"})
    )
    with pytest.raises(DicompilerError, match=r"host a needs .* to run, .* added by target 'sockets'"):
        compile(proto, problem.platform, plan=plan, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
