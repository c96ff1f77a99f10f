"""The simulator: small workloads with times by hand on each kind of network, streams, waits and bounds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.generators import DEVICES, random_model, random_plan
from support.layer_graphs import rules
from support.workloads import MEGABIT, cluster, fan, job, work

from dicompiler import networks
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.cost.simulator import SimulationResult, simulate
from dicompiler.cost.workload import DeviceWork, Job, Message, Workload, build_workload
from dicompiler.driver.prepare import prepare
from dicompiler.driver.problem_setup import make_problem
from dicompiler.ir.cluster import Device, Host, Link, Network, NetworkKind
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.platform import Platform, uniform_platform
from dicompiler.partition.lowering import lower, lower_unchecked
from dicompiler.plugin.registry import registry
from dicompiler.search.lower_bounds import latency_bound
from dicompiler.search.problem import Problem
from dicompiler_passes.form_layers import form_layers


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # d0 sends to d1 and d2 from 1 to 5 s, over one link. d1 and d2 compute from 5 to 8 s. Their results are sent to
        # d0 from 8 to 12 s. d0 computes from 12 to 13 s.
        ("switch", 13.0),
        ("shared", 13.0),
        ("gateway", 13.0),
    ],
)
def test_messages_to_several_devices_share_link(kind: NetworkKind, expected: float) -> None:
    assert simulate(fan(), cluster(3, kind)).latency_s == pytest.approx(expected)


def costing(workload: Workload, runtime: RuntimeCosts, cores: int = 1) -> Workload:
    return replace(workload, devices=tuple(replace(one, runtime=runtime, cores=cores) for one in workload.devices))


@pytest.mark.parametrize(
    ("runtime", "cores", "expected"),
    [
        # d0 computes until 1 s and has prepared its messages at 1.5 and 2 s. They share the link from 2 s on, and
        # arrive at 5 and 5.5 s. d1 computes until 8 s and d2 until 8.5 s. Each needs 0.5 s to send. The results arrive
        # at 12 and 12.5 s. d0 computes until 13.5 s.
        (RuntimeCosts(send=0.5), 1, 13.5),
        # d1 and d2 each take 0.25 s to receive. d0 takes 0.25 s for each of the two results.
        (RuntimeCosts(receive=0.25), 1, 13.75),
        # Each message occupies its link for one more second: d0 sends until 7 s, d1 and d2 compute until 10 s and send
        # until 16 s, and d0 computes until 17 s.
        (RuntimeCosts(gap=1.0), 1, 17.0),
        # Each message arrives half a second later: d0 sends until 5 s, d1 and d2 compute until 8.5 s and send until
        # 12.5 s, and d0 computes from 13 to 14 s.
        (RuntimeCosts(latency=0.5), 1, 14.0),
        # Headers add a tenth to the bytes: d0 sends from 1 to 5.4 s, d1 and d2 compute until 8.4 s and send until 12.8
        # s, and d0 computes until 13.8 s.
        (RuntimeCosts(header_share=0.1), 1, 13.8),
    ],
)
def test_runtime_takes_time_for_messages(runtime: RuntimeCosts, cores: int, expected: float) -> None:
    assert simulate(costing(fan(), runtime, cores), cluster(3)).latency_s == pytest.approx(expected)


def test_second_core_receives_while_segment_computes() -> None:
    """d1 sends to d0, which meanwhile computes for 5 s and then waits for the message."""
    made = work([(1, 0, 1)], ((), [job(5), job(1, needs=(0,), outputs=1)]), ((0,), []))
    runtime = RuntimeCosts(receive=2.0, per_byte=0.0)
    assert simulate(costing(made, runtime, 1), cluster(2)).latency_s == pytest.approx(8)
    assert simulate(costing(made, runtime, 2), cluster(2)).latency_s == pytest.approx(6)
    found = simulate(costing(made, runtime, 2), cluster(2))
    assert found.total_seconds("handle", "d0") == pytest.approx(2)


def test_switch_is_parallel_and_medium_is_sequential() -> None:
    pairs = work(
        [(0, 1, 2), (2, 3, 2)],
        ((0,), []),
        ((), [job(1, needs=(0,), outputs=1)]),
        ((1,), []),
        ((), [job(1, needs=(1,), outputs=1)]),
    )
    assert simulate(pairs, cluster(4, "switch")).latency_s == pytest.approx(3)
    assert simulate(pairs, cluster(4, "shared")).latency_s == pytest.approx(5)


def test_flow_speeds_up_when_link_becomes_free() -> None:
    """d0 sends to d2 and d3, and d1 sends to d2.

    Each message has half of a link until 2 s. Then the message from d1 has all of its link.
    """
    busy = work(
        [(1, 2, 2), (0, 2, 1), (0, 3, 1)],
        ((1, 2), []),
        ((0,), []),
        ((), [job(0, needs=(0, 1), outputs=1)]),
        ((), [job(0, needs=(2,), outputs=1)]),
    )
    found = simulate(busy, cluster(4))
    times = {(span.device, span.peer): span.end for span in found.spans if span.kind == "message"}
    assert times == {("d0", "d2"): 2, ("d0", "d3"): 2, ("d1", "d2"): 3}


def test_slow_link_leaves_bandwidth_to_others() -> None:
    """The link to d1 can use a quarter of d0's bandwidth; the other gets the rest."""
    both = work([(0, 1, 1), (0, 2, 4)], ((0, 1), []), ((), [job(0, (0,), (), 1)]), ((), [job(0, (1,), (), 1)]))
    slow = cluster(3)
    slow = replace(slow, network=replace(slow.network, links=(Link(("d0", "d1"), 0.25e6),)))
    times = {span.peer: span.end for span in simulate(both, slow).spans if span.kind == "message"}
    # Together, the two messages need 1.25 times the bandwidth of d0's link, so each takes 5 s instead of 4 s.
    assert times == {"d1": pytest.approx(5), "d2": pytest.approx(5)}


def test_counts_latency_message_cost_and_host_bandwidth() -> None:
    one = work([(0, 1, 2)], ((0,), []), ((), [job(1, needs=(0,), outputs=1)]))
    assert simulate(one, cluster(2, latency=0.5)).latency_s == pytest.approx(3.5)
    assert simulate(one, cluster(2, message_overhead_s=0.25)).latency_s == pytest.approx(3.25)
    slow = cluster(2)
    slow = replace(slow, hosts=(slow.hosts[0], replace(slow.hosts[1], bandwidth=0.5e6)))
    assert simulate(one, slow).latency_s == pytest.approx(5)
    linked = replace(slow, network=replace(slow.network, links=(Link(("d0", "d1"), 0.25e6),)))
    assert simulate(one, linked).latency_s == pytest.approx(9)


def test_devices_of_one_host_exchange_tensors_for_free() -> None:
    one = work([(0, 1, 2)], ((0,), []), ((), [job(1, needs=(0,), outputs=1)]))
    devices = tuple(DeviceWork(d.device, "board", d.initial_sends, d.jobs) for d in one.devices)
    board = Platform(
        "b", (Host("board", 1),), (Device("d0", "board", 1), Device("d1", "board", 1)), Network("shared", 1)
    )
    assert simulate(replace(one, devices=devices), board).latency_s == pytest.approx(1)


def test_waits_name_awaited_device() -> None:
    found = simulate(fan(), cluster(3))
    # The results of d1 and d2 arrive at the same time. The wait is counted for d1, the first of them.
    assert found.waits["d0"] == {"d1": pytest.approx(11)}
    assert found.waits["d1"] == {"d0": pytest.approx(5)}
    assert found.total_seconds("compute", "d1") == 3
    assert found.total_seconds("message", "d0") == 4 and found.total_seconds("message", "d0", as_receiver=True) == 4


def line(stages: int) -> Workload:
    """Return a pipeline in which each device computes for 2 s and sends 1 s of data."""
    messages = [(i, i + 1, 1.0) for i in range(stages - 1)]
    return work(
        messages,
        *(
            ((), [job(2, (i - 1,) if i else (), (i,) if i < stages - 1 else (), int(i == stages - 1))])
            for i in range(stages)
        ),
    )


def test_stream_reaches_load_of_busiest_device() -> None:
    alone = simulate(line(3), cluster(3), frames=12, in_flight=1)
    assert alone.period_s == pytest.approx(8) and alone.latency_s == pytest.approx(8)
    assert simulate(line(3), cluster(3), frames=12, in_flight=4).period_s == pytest.approx(2)
    assert simulate(line(3), cluster(3), frames=12, in_flight=2).period_s == pytest.approx(4)
    ends = [end for _, end in simulate(line(3), cluster(3), frames=12, in_flight=4).frames]
    assert ends == sorted(ends) and len(ends) == 12


@pytest.mark.parametrize("frames", [1, 2, 4, 5, 7])
def test_period_of_short_stream_is_at_least_the_load_of_busiest_device(frames: int) -> None:
    """All frames of such a stream can be in flight at once, so that their ends follow each other closely."""
    slow_start = work([(0, 1, 0.5)], ((), [job(9, (), (0,), 0)]), ((), [job(1, (0,), (), 1)]))
    assert simulate(slow_start, cluster(2), frames=frames, in_flight=frames).period_s >= 9


def test_separates_queueing_from_frame_time() -> None:
    """Of the four frames that start together, each waits until the first device has computed those before."""
    assert simulate(line(3), cluster(3), frames=3, in_flight=1).queued_s == (0, 0, 0)
    assert simulate(line(3), cluster(3), frames=6, in_flight=4).queued_s[:4] == pytest.approx((0, 2, 4, 6))


def test_device_continues_with_oldest_ready_frame() -> None:
    """While frame 0 waits for d1, d0 starts frame 1. Frame 0 goes first as soon as it is ready."""
    ping = work(
        [(0, 1, 1), (1, 0, 1)],
        ((), [job(1, sends=(0,)), job(1, needs=(1,), outputs=1)]),
        ((), [job(1, needs=(0,), sends=(1,))]),
    )
    order = [
        (span.frame, span.start)
        for span in sorted(simulate(ping, cluster(2), 3, 3).spans, key=lambda span: span.start)
        if span.kind == "compute" and span.device == "d0"
    ]
    assert order == [(0, 0), (1, 1), (2, 2), (0, 4), (1, 5), (2, 6)]


@pytest.mark.parametrize("in_order", [False, True])
def test_oldest_frame_is_sent_first_unless_in_order(in_order: bool) -> None:
    """d0 sends for 3 s for each frame, and for 1 s more when d1 has answered.

    The 1 s of an older frame precedes the 3 s of the next frames.
    """
    made = work(
        [(0, 1, 3), (1, 0, 0.5), (0, 1, 1)],
        ((), [job(0.1, sends=(0,)), job(0.1, needs=(1,), sends=(2,))]),
        ((), [job(0.1, needs=(0,), sends=(1,)), job(0.1, needs=(2,), outputs=1)]),
    )
    played = simulate(costing(made, RuntimeCosts(in_order=in_order)), cluster(2), 4, 4)
    found = [(s.start, s.frame, s.name) for s in played.spans if s.kind == "message" and s.device == "d0"]
    order = [(frame, name) for _, frame, name in sorted(found)]
    waited = [(0, "m0"), (1, "m0"), (2, "m0"), (3, "m0"), (0, "m2"), (1, "m2"), (2, "m2"), (3, "m2")]
    ranked = [(0, "m0"), (1, "m0"), (0, "m2"), (1, "m2"), (2, "m0"), (3, "m0"), (2, "m2"), (3, "m2")]
    assert order == (waited if in_order else ranked)


def check_consistent(simulation: SimulationResult, played: Workload) -> None:
    """Assert that devices compute one job at a time, and that each job and message occurs once a frame."""
    for device in played.devices:
        own = sorted((s.start, s.end) for s in simulation.spans if s.kind == "compute" and s.device == device.device)
        assert len(own) == len(device.jobs) * len(simulation.frames)
        assert all(earlier[1] <= later[0] + 1e-12 for earlier, later in pairwise(own))
    sent = [span for span in simulation.spans if span.kind == "message"]
    assert len(sent) == len(played.messages) * len(simulation.frames)


def check_sums(simulation: SimulationResult) -> None:
    """Assert that totals are the sums of the spans."""
    for device in DEVICES:
        for kind, peer in (("compute", False), ("handle", False), ("message", False), ("message", True)):
            spans = [s for s in simulation.spans if s.kind == kind and (s.peer if peer else s.device) == device]
            seconds, sum_ = sum(span.seconds for span in spans), simulation.total_seconds(kind, device, peer)
            # The total counts the time that a message would take alone. If messages share a link, spans are longer.
            assert sum_ == pytest.approx(seconds) or (kind == "message" and sum_ < seconds)
        waits = [span for span in simulation.spans if span.kind == "wait" and span.device == device]
        assert sum(simulation.waits.get(device, {}).values()) == pytest.approx(sum(span.seconds for span in waits))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**48), kind=st.sampled_from(["switch", "shared", "gateway"]))
def test_random_plans_finish_and_respect_bound(seed: int, kind: NetworkKind) -> None:
    rng = Random(seed)
    model = Model.load(onnx.shape_inference.infer_shapes(random_model(rng)))
    layers = form_layers(model, rules())
    hosts, devices = tuple(Host(d, 2**30) for d in DEVICES), tuple(Device(d, d, 1e6) for d in DEVICES)
    platform = Platform("random", hosts, devices, Network(kind, 1e6, 1e-3, (), 1e-4))
    problem = Problem(layers, platform, model=model)
    plan = random_plan(rng, layers, DEVICES)
    sketched = problem.draft_program(plan)
    assert sketched.program is not None and sketched.routing is not None
    played = build_workload(sketched.program, sketched.routing, platform, problem.cost_model)
    costly = costing(played, RuntimeCosts(2e-3, 3e-3, 1e-6, 1e-3), 1 + seed % 2)
    for one, frames, in_flight in ((played, 1, 1), (played, 4, 2), (costly, 4, 2)):
        simulation = simulate(one, platform, frames, in_flight)
        check_consistent(simulation, one)
        check_sums(simulation)
        assert simulate(one, platform, frames, in_flight, keep_spans=False) == replace(simulation, spans=())
    metrics = problem.evaluate(plan)
    assert sum(job.seconds for device in played.devices for job in device.jobs) == pytest.approx(
        sum(device.compute_s for device in metrics.devices)
    )
    assert latency_bound(problem).seconds <= metrics.latency_s * (1 + 1e-9)
    assert metrics.total_bytes == problem.estimate(plan).total_bytes


def test_single_device_takes_sum_of_layers() -> None:
    model = Model.load(networks.build("lenet", 0))
    problem = make_problem(replace(prepare(model), platform=uniform_platform(2)))
    single = registry().make("strategies", "single").plan(problem)
    metrics = problem.evaluate(single)
    assert metrics.method == "simulation"
    assert metrics.latency_s == pytest.approx(problem.best_single_device[1].latency_s)
    assert metrics.latency_s == pytest.approx(latency_bound(replace(problem, platform=uniform_platform(1))).seconds)


def test_draft_program_has_steps_of_emitted_program() -> None:
    compilation = replace(prepare(Model.load(networks.build("lenet", 0))), platform=uniform_platform(3))
    plan = registry().make("strategies", "modnn").plan(make_problem(compilation))
    given = PipelineState(compilation.model, compilation.layers, compilation.platform, plan)
    one, other = lower_unchecked(given).program, lower(given).program
    assert one is not None and other is not None
    assert [device.steps for device in one.devices] == [device.steps for device in other.devices]
    assert one.transfers == other.transfers


def one_by_one(seconds: float, *receivers: int) -> Workload:
    """Return a workload in which d0 sends each frame (2 s on its link) to one device, which computes the outputs.

    There is a role for each receiver.
    """
    replicas = [
        Workload(
            tuple(
                DeviceWork(f"d{i}", f"d{i}", (0,) if i == 0 else (), (Job("j", seconds, (0,), (), 1),) * (i == to))
                for i in range(3)
            ),
            (Message(0, to, 2 * MEGABIT, "m"),),
        )
        for to in receivers
    ]
    return replace(replicas[0], other_replicas=tuple(replicas[1:]))


def test_frames_go_to_the_roles_in_turn() -> None:
    platform = cluster(3)
    # d0 sends two messages at once, from 0 to 4 s and from 4 to 8 s. d1 and d2 compute from 4 to 7 s and from 8 to 11
    # s, so the link is the bottleneck.
    found = simulate(one_by_one(3, 1, 2), platform, frames=4, in_flight=4)
    assert [end for _, end in found.frames] == pytest.approx([7, 7, 11, 11])
    assert found.period_s == pytest.approx(2)
    assert [span.device for span in found.spans if span.kind == "compute"] == ["d1", "d2", "d1", "d2"]
    # With one computing device, computing is the bottleneck: each frame takes 3 s, and the first starts at 2 s.
    alone = simulate(one_by_one(3, 1), platform, frames=4, in_flight=4)
    assert [end for _, end in alone.frames] == pytest.approx([5, 8, 11, 14])
    # With two frames in flight, the third and fourth frame start when the first two have finished, at 7 s.
    two = simulate(one_by_one(3, 1, 2), platform, frames=4, in_flight=2)
    assert [end for _, end in two.frames] == pytest.approx([7, 7, 14, 14])


def test_frame_that_overtakes_an_older_one_still_counts_as_in_flight() -> None:
    """Outputs are given out in order, so a session starts the next frame only when the oldest one has finished."""
    slow, fast = (
        work([], ((), [job(seconds, outputs=1)] * on_d0), ((), [job(seconds, outputs=1)] * (not on_d0)))
        for seconds, on_d0 in ((4, True), (1, False))
    )
    found = simulate(replace(slow, other_replicas=(fast,)), cluster(2), frames=4, in_flight=2)
    assert found.frames == ((0, 4), (0, 1), (4, 8), (4, 5))


def test_device_sends_inputs_of_a_new_frame_between_two_segments() -> None:
    """d0 computes for 2 s for each frame, and sends an input to d1, which takes 1 s."""
    both = work([(0, 1, 1)], ((0,), [job(2)]), ((), [job(1, needs=(0,), outputs=1)]))
    found = simulate(both, cluster(2), frames=3, in_flight=3)
    sent = [(span.frame, span.start, span.end) for span in found.spans if span.kind == "message"]
    # While d0 computes the first frame until 2 s, it cannot send. It then sends the inputs of both other frames before
    # it computes the second frame.
    assert sent == [(0, 0, 1), (1, 2, 3), (2, 3, 4)]


def test_uneven_roles_wait_for_slower_one() -> None:
    # d1, d1 and d2 compute the frames in turn, 10 s each. The first two messages share the link and arrive at 4 s. So
    # d1 computes its three frames from 4 to 34 s, and d2 its frame from 4 to 14 s.
    found = simulate(one_by_one(10, 1, 1, 2), cluster(3), frames=4, in_flight=4)
    assert [end for _, end in found.frames] == pytest.approx([14, 24, 14, 34])
    assert found.waits["d2"] == {"d0": pytest.approx(4)}


def test_frames_without_outputs_end_immediately() -> None:
    found = simulate(work([], ((), [job(1)])), cluster(1), frames=3000, in_flight=2)
    assert found.frames == ((0.0, 0.0),) * 3000
    assert found.total_seconds("compute", "d0") == 3000


def test_devices_continue_in_order_when_frame_starts() -> None:
    """d0 ends frame 0 at 2.25 s, and continues with frame 1 when d1 starts frame 2. Both send at 4.25 s."""
    one = work(
        [(1, 0, 0.25), (0, 2, 1)],
        ((), [job(2, (0,), (1,), 1)]),
        ((0,), []),
        ((), [job(0, (1,))]),
    )
    other = work([(1, 2, 1)], ((), []), ((), [job(2, (), (0,), 1)]), ((), [job(0, (0,))]))
    found = simulate(replace(one, other_replicas=(one, other)), cluster(3, "shared"), frames=3, in_flight=2)
    sent = [(span.device, span.start) for span in found.spans if span.kind == "message" and span.peer == "d2"]
    assert sent == [("d0", 2.25), ("d0", 4.25), ("d1", 4.25)]


def test_job_waits_for_state_of_frame_before() -> None:
    """Device a makes the state from b's answer.

    Of two frames in flight, the second waits for the state of the first.
    """
    jobs = (Job("reads", 1.0, (), (0,), 0, state_makers=(1,)), Job("makes", 1.0, (1,), (), 1))
    away = DeviceWork("d1", "d1", (), (Job("away", 1.0, (0,), (1,), 0),))
    messages = (Message(0, 1, 0, "there"), Message(1, 0, 0, "back"))
    platform = uniform_platform(2)
    for after, least, most in (((1,), 2.99, 3.01), ((), 2.0, 2.5)):
        own = DeviceWork("d0", "d0", (), (replace(jobs[0], state_makers=after), jobs[1]))
        played = simulate(Workload((own, away), messages), platform, frames=8, in_flight=3)
        assert least <= played.period_s <= most
