"""The workload of a plan: seconds of each job on its device, and bytes of each message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dealing import cluster, lenet
from support.random_problems import any_plan, random_problem

from dicompiler import compile, networks
from dicompiler.cost.cost_model import AnalyticModel, LocalBytes
from dicompiler.cost.op_counts import count_macs
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.cost.workload import BLOCK_DECODER, BLOCK_ENCODER, build_workload, count_copies, task_seconds
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Device
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.onnx.weights import raw_nbytes
from dicompiler.ir.plan import LayerShare, Part
from dicompiler.ir.platform import Platform
from dicompiler.ir.regions import full_region, with_interval
from dicompiler.ir.routing import Box, TaskId, find_uncut_producer, task_id
from dicompiler.ir.wire_dtype import with_wire_dtypes
from dicompiler.partition.bounds_inference import output_shape
from dicompiler.partition.tiling import AxisLabel, tile_layer
from dicompiler.search.problem import plan_workload


def test_replica_has_seconds_of_its_devices() -> None:
    platform = cluster("a", "b", "c")
    slow = replace(platform, devices=(*platform.devices[:2], replace(platform.devices[2], rate=0.25e9)))
    result = lenet(({}, {"b": "c"}), slow)
    assert result.program is not None and result.routing is not None
    problem = load_problem(networks.build("lenet", 0), slow)
    first, second = build_workload(result.program, result.routing, slow, problem.cost_model).replicas
    seconds = [sum(job.seconds for device in own.devices for job in device.jobs) for own in (first, second)]
    assert seconds[1] == pytest.approx(4 * seconds[0])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 30), st.integers(0, 2**32))
def test_jobs_and_messages_follow_program(network: int, seed: int) -> None:
    problem = random_problem(network)
    plan = any_plan(seed, problem)
    sketched = problem.draft_program(plan)
    program, routing = sketched.program, sketched.routing
    assert program is not None and routing is not None
    work = build_workload(program, routing, problem.platform, problem.cost_model)
    assert [message.nbytes for message in work.messages] == [transfer.value.nbytes for transfer in program.transfers]
    assert sum(message.nbytes for message in work.messages) == routing.total_bytes
    for own, device in zip(work.devices, program.devices, strict=True):
        assert (own.device, own.host) == (device.device, device.host)
        assert [job.name for job in own.jobs] == [segment.name for segment in device.segments]
        assert sum(job.outputs for job in own.jobs) <= len(device.model_outputs)
        sends = [*own.initial_sends, *(index for job in own.jobs for index in job.sends)]
        assert sends == [step.index for step in device.steps if step.kind == "send"]
    assert set(work.task_seconds) == {task_id(task) for task in routing.tasks}
    computed = sum(job.seconds for device in work.devices for job in device.jobs)
    assert computed == pytest.approx(sum(work.task_seconds.values()))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 30), st.integers(0, 2**32))
def test_task_seconds_are_cost_on_device(network: int, seed: int) -> None:
    problem = random_problem(network)
    routing, work = plan_workload(problem, any_plan(seed, problem))
    for task in routing.tasks:
        alone = task_seconds(routing, problem.platform, problem.cost_model, task)
        assert work.task_seconds[task_id(task)] == alone >= 0
        twice = replace(problem.platform, devices=tuple(replace(d, rate=2 * d.rate) for d in problem.platform.devices))
        assert task_seconds(routing, twice, problem.cost_model, task) == pytest.approx(alone / 2)


def test_coalesced_messages_cost_a_share() -> None:
    """Rows of queries, keys and values are sent to the other device together."""
    costs = RuntimeCosts(send=2e-3, receive=3e-3, coalesced_share=0.1)
    assert (costs.send_seconds(0, True), costs.receive_seconds(0, True)) == pytest.approx((2e-4, 3e-4))
    assert costs.scaled_by(2.0).coalesced_share == costs.coalesced_share
    problem = load_problem(networks.build("vit_tiny", width=0.05, size=32), Platform.load("rpi4-gateway-x2"))
    rows = [
        tuple(Part(d, with_interval(full_region(shape), 1, cut)) for d, cut in (("pi01", (0, 3)), ("pi02", (3, 5))))
        if (shape := output_shape(problem.layers, layer))[1:2] == (5,) and count_macs(problem.layers, layer)
        else (Part("pi01"), Part("pi02"))
        for layer in problem.layers.layers
    ]
    plan = problem.build_plan(dict(zip((layer.name for layer in problem.layers.layers), rows, strict=True)))
    work = plan_workload(problem, plan)[1]
    together = [
        (work.messages[i].name, work.messages[i].is_coalesced) for job in work.devices[1].jobs for i in job.sends
    ]
    # Query, key and value are sent together: the last two messages are coalesced with the first.
    assert [joined for name, joined in together if "blocks.0.attn.split" in name] == [False, True, True]


def test_counts_input_and_output_time_separately() -> None:
    """Inputs of 4 KiB go to a source on another host, and outputs of 40 bytes come from the first device."""
    costs = RuntimeCosts(latency=1e-3, send=2e-3, receive=3e-3, per_io_byte=1e-6, header_share=0.5)
    platform = Platform.load("rpi4-gateway-x2")
    problem = replace(load_problem(networks.build("lenet"), platform), source=("pi02",), sink=("pi01",))
    costly = replace(problem, runtime_costs={device.name: costs for device in platform.devices})
    work = plan_workload(costly, costly.single_device_plan("pi02"))[1]
    (came,), (went,) = (
        [raw_nbytes(tensor.dtype, tensor.shape or ()) for name in names for tensor in [problem.layers.tensors[name]]]
        for names in (problem.layers.inputs, problem.layers.outputs)
    )
    line_s = 1.5 * 8 * came / platform.network.bandwidth
    assert work.input_output_s == pytest.approx(2 * 6e-3 + 1e-6 * (came + went) + line_s)
    assert costly.evaluate(costly.single_device_plan("pi02")).input_output_s == pytest.approx(work.input_output_s)
    assert plan_workload(problem, problem.single_device_plan("pi02"))[1].input_output_s == 0.0


@pytest.mark.parametrize("label", ["height", "channel"])
def test_counts_slices_and_joins(label: AxisLabel) -> None:
    """LeNet's convolutions and pools are on two devices, and the rest is on one.

    Each slice and join is a node in a segment.
    """
    problem = load_problem(networks.build("lenet"), Platform.load("rpi4-gateway-x2"))
    layers = {layer.name: (Part("pi01"),) for layer in problem.layers.layers}
    for layer in problem.layers.layers[:4]:
        layers[layer.name] = tile_layer(problem.layers, layer, label, [1.0, 1.0], ["pi01", "pi02"])
    made = compile(networks.build("lenet"), problem.platform, plan=problem.build_plan(layers))
    assert made.program is not None and made.routing is not None
    segments = (segment for device in made.program.devices for segment in device.segments)
    nodes = sum(node.op_type in ("Slice", "Concat") for segment in segments for node in segment.model.graph.node)
    times = sum(one.copies for one in count_copies(made.routing).values())
    given = [
        (box, box.origin) for box in made.routing.received_boxes if box.origin is not None and box.origin.task is None
    ]
    uncounted = sum(
        box.region != origin.region for box, origin in given
    )  # Pieces of the network's input cost nothing at their sender, because no part computes them.
    assert times == nodes - uncounted > 2
    free, costly = (
        build_workload(
            made.program, made.routing, problem.platform, problem.cost_model, dict.fromkeys(("pi01", "pi02"), costs)
        )
        for costs in (RuntimeCosts(call=1.0), RuntimeCosts(call=1.0, per_copy=1.0))
    )
    before, after = (sum(job.seconds for one in work.devices for job in one.jobs) for work in (free, costly))
    assert after - before == pytest.approx(times)


@pytest.mark.parametrize("kind", ["float16", "int8", "int8-block"])
def test_narrowed_tensor_is_copied_at_each_end(kind: str) -> None:
    """Both devices compute the first layer.

    One device computes the next layers, and the other one delivers the last layer's output.
    """
    costs = RuntimeCosts(per_copy=1e-2, per_copied_byte=1e-6)
    wide = replace(
        load_problem(networks.build("lenet"), Platform.load("rpi4-gateway-x2")), source=("pi01",), sink=("pi02",)
    )
    wide = replace(wide, runtime_costs={device.name: costs for device in wide.platform.devices})
    narrow = replace(wide, layers=with_wire_dtypes(wide.layers, (("*", kind),)))
    names = [layer.name for layer in wide.layers.layers]
    layers = {name: (Part("pi01" if i < 5 else "pi02"),) for i, name in enumerate(names)}
    layers[names[0]] = tile_layer(wide.layers, wide.layers.layers[0], "height", [1.0, 1.0], ["pi01", "pi02"])
    (seen, before), (routing, after) = (
        plan_workload(problem, problem.build_plan(layers)) for problem in (wide, narrow)
    )
    ends, times = {"pi01": 0, "pi02": 0}, {"pi01": 0, "pi02": 0}
    for box in routing.received_boxes:  # The network's input is not narrowed, because no task computes it.
        nbytes = seen.nbytes(held(box))
        assert box.origin is not None
        for device, counts, block_cost in (
            (box.device, True, BLOCK_DECODER),
            (box.origin.device, box.origin.task is not None, BLOCK_ENCODER),
        ):
            passes, extra_calls = block_cost if kind == "int8-block" else (1, 0)
            ends[device] += nbytes * counts * passes
            times[device] += counts * (passes + extra_calls)
    for one, other in zip(before.devices, after.devices, strict=True):
        more = sum(job.seconds for job in other.jobs) - sum(job.seconds for job in one.jobs)
        assert more == pytest.approx(1e-2 * times[one.device] + 1e-6 * ends[one.device])
    assert ends["pi01"] > 0 < ends["pi02"]


def held(box: Box) -> Box:
    """Return the box as if it were stored on its device, so that it has the bytes of its own type."""
    return box._replace(origin=None)


class Marked(AnalyticModel):
    """A cost model that adds a second for each byte of local inputs, and 1e6 s for each byte of local outputs."""

    def seconds_in_frame(
        self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device, local: LocalBytes
    ) -> float:
        return local.inputs + 1e6 * local.outputs + self.seconds(layers, layer, share, device)


def test_only_uncut_tensors_of_one_device_are_local() -> None:
    problem = load_problem(networks.build("lenet"), Platform.load("rpi4-gateway-x2"))
    halves = {
        layer.name: tile_layer(problem.layers, layer, "height", [1.0, 1.0], ["pi01", "pi02"])
        for layer in problem.layers.layers[:4]
    }
    rest = problem.single_device_plan("pi01").layers
    routing, work = plan_workload(replace(problem, cost_model=Marked()), problem.build_plan({**rest, **halves}))
    local = {(task.layer, task.device): divmod(work.task_seconds[task_id(task)], 1e6) for task in routing.tasks}
    # The two parts of pool2 compute 3 and 2 of 5 rows. Each needs rows of conv2 from both devices, so pool2 does not
    # read conv2 as it is.
    reading = {("pool1", "pi01"), ("pool1", "pi02"), ("fc3", "pi01"), ("fc4", "pi01"), ("fc5", "pi01")}
    assert {key for key, (_, inputs) in local.items() if inputs >= 1} == reading
    writing = {("conv1", "pi01"), ("conv1", "pi02"), ("flatten", "pi01"), ("fc3", "pi01"), ("fc4", "pi01")}
    assert {key for key, (outputs, _) in local.items() if outputs} == writing


@pytest.mark.parametrize("network", ["tiny", "quirks", "lenet", "resnet18"])
@pytest.mark.parametrize("strategy", ["single", "pipeline", "modnn", "dp"])
def test_tasks_that_exchange_results_in_a_call_are_in_one_segment(network: str, strategy: str) -> None:
    options: dict[str, Any] = {"size": 64, "width": 0.1} if network == "resnet18" else {}
    result = compile(networks.build(network, 0, **options), "rpi4x3", strategy, allow_worse=True)
    assert result.program is not None and result.routing is not None
    segments: dict[TaskId, set[str]] = {}
    for device in result.program.devices:
        for segment in device.segments:
            for key, _ in segment.node_marks:
                segments.setdefault(key, set()).add(segment.name)
    in_call = in_segment = 0
    for reader, reads in result.routing.reads.items():
        for producer in filter(None, map(find_uncut_producer, reads.values())):
            is_in_call = reader in result.routing.call_readers.get(producer, ())
            is_in_segment = bool(segments.get(producer, set()) & segments.get(reader, set()))
            assert is_in_segment or not is_in_call, (producer, reader)
            in_call, in_segment = in_call + is_in_call, in_segment + is_in_segment
    # If a segment sends several results, tasks that read one of them in the same segment are not counted.
    assert in_call >= 0.5 * in_segment > 0, (in_call, in_segment)
