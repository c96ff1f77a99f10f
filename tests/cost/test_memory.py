"""Memory of a program on each device: weights, live tensors and buffers, by hand and against an execution."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from support.dealing import cluster, lenet
from support.handmade import halo, segment, steps, value
from support.layer_graphs import formed

from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.cost.memory import MemoryUse, peak_nbytes, program_memory, segment_peak_nbytes, segment_value_sizes
from dicompiler.driver.compiler import compile
from dicompiler.driver.prepare import load_problem, prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.platform import uniform_platform
from dicompiler.ir.program import DeviceProgram, Program, Transfer
from dicompiler.partition.lowering import lower
from dicompiler.target.target_base import Target
from dicompiler.verify.comparison import random_inputs
from dicompiler.verify.executor import ProgramExecutor
from dicompiler_targets.sockets.target import SocketsTarget

MIB = 1 << 20


def chained() -> Program:
    """Return a program of devices a and b.

    In its first segment, a computes s (800 bytes) and t (400) from the input x (400), and sends s to b. In its second
    segment, a computes z from t and x. Device b computes y from s.
    """
    first = segment(
        "a_0", "a", "(float[100] x) => (float[200] s, float[100] t) { s = Concat <axis=0> (x, x) t = Relu (x) }", {}
    )
    second = segment("a_1", "a", "(float[100] t, float[100] x) => (float[100] z) { u = Neg (t)  z = Add (u, x) }", {})
    other = segment("b_0", "b", "(float[200] s) => (float[200] y) { v = Neg (s)  y = Neg (v) }", {})
    return Program(
        (
            DeviceProgram("a", "a", (first, second), steps("run 0, send 0, run 1"), ("x",), {"z": "z"}),
            DeviceProgram("b", "b", (other,), steps("receive 0, run 0"), (), {"y": "y"}),
        ),
        (Transfer(0, "a", "b", value("s", 200)),),
        (value("x", 100),),
        (value("z", 100), value("y", 200)),
        {},
        ((0, 0), (0, 1), (1, 0)),
    )


def test_memory_of_handmade_program() -> None:
    found = program_memory(chained())
    # Device a needs most memory in its second segment: x, t, u and z, and s, which is still being sent.
    assert found["a"] == MemoryUse(0, 400 + 400 + 400 + 800, 400)
    # At its peak, device b stores v and y. Tensor s is not needed any more after v is computed.
    assert found["b"] == MemoryUse(0, 800 + 800, 800)
    assert found["b"].total == 2400


def test_buffers_count_for_every_frame_in_flight() -> None:
    one, three = program_memory(chained(), 1), program_memory(chained(), 3)
    assert three["b"].buffers == 3 * one["b"].buffers
    # Up to two more frames may be between the two segments of device a. Each stores s and t in addition to its input.
    assert three["a"].activations == one["a"].activations + 2 * (800 + 400)


def test_constants_of_several_segments_count_once() -> None:
    program, _, _ = halo()
    found = program_memory(program)
    for device in program.devices:
        names = {t.name for s in device.segments for t in s.model.graph.initializer}
        assert found[device.device].weights == sum(
            program.weights[name].nbytes for name in names if name in program.weights
        ) + sum(
            len(onnx.numpy_helper.to_array(t).tobytes())
            for t in {t.name: t for s in device.segments for t in s.model.graph.initializer}.values()
            if t.name not in program.weights
        )


def test_tensor_lives_from_its_node_to_its_last_reader() -> None:
    text = "(float[10] x) => (float[10] y) { a = Neg (x)  b = Neg (a)  c = Neg (b)  y = Add (c, a) }"
    own = segment("s", "d", text, {})
    # Three tensors exist at once: first a, b and c, because the last node reads a; then a, c and y.
    assert segment_peak_nbytes(own, segment_value_sizes(own)) == 3 * 40


def test_peak_of_live_ranges() -> None:
    assert peak_nbytes([]) == 0
    assert peak_nbytes([(0, 1, 5), (1, 2, 7), (3, 3, 11)]) == 12


def test_tensor_without_static_shape_counts_zero() -> None:
    own = segment("s", "d", "(float[10] x) => (int64[1, N] y) { y = NonZero (x) }", {})
    assert segment_value_sizes(own) == {"x": 40, "y": 0}


@pytest.mark.parametrize("strategy", ["single", "pipeline", "modnn"])
def test_bounds_values_of_executor(strategy: str) -> None:
    result = compile(networks.build("tiny"), platform="rpi4x4", strategy=strategy)
    program, found = result.program, program_memory(result.program)
    assert program is not None and result.metrics is not None
    values = ProgramExecutor(program).run(random_inputs(program.inputs), keep_values=True).values
    for device in program.devices:
        held = values[device.device]
        received = sum(t.value.nbytes for t in program.transfers if t.receiver == device.device)
        assert found[device.device].buffers >= received
        assert found[device.device].activations >= max(
            (held[n].nbytes for s in device.segments for n in s.outputs), default=0
        )
    weights = {entry.device: entry.weights for entry in result.metrics.devices}
    for name, use in found.items():
        # A program has more constants than the network: shapes for Reshape nodes and bounds for Slices.
        assert weights[name] <= use.weights <= weights[name] + 4096


def test_cutting_a_layer_divides_weights_or_activations() -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[1, 16, 32, 32] x) => (float[1, 16, 32, 32] y)
    { y = Conv <pads = [1, 1, 1, 1]> (x, w) }"""
    layers = formed(text, w=(16, 16, 3, 3))
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.helper.make_tensor("w", 1, [16, 16, 3, 3], [0.5] * (16 * 16 * 9)))
    name = layers.layers[0].name
    rows = Plan(
        {"y": (Part("pi01", ((0, 1), (0, 16), (0, 16), (0, 32))), Part("pi02", ((0, 1), (0, 16), (16, 32), (0, 32))))},
        ("pi01",),
        ("pi01",),
    )
    channels = Plan(
        {"y": (Part("pi01", ((0, 1), (0, 8), (0, 32), (0, 32))), Part("pi02", ((0, 1), (8, 16), (0, 32), (0, 32))))},
        ("pi01",),
        ("pi01",),
    )
    assert name
    by_rows, by_channels = (
        program_memory(compile(proto, platform="rpi4x2", plan=plan).program) for plan in (rows, channels)
    )  # type: ignore[arg-type]
    assert by_rows["pi02"].weights == 2 * by_channels["pi02"].weights
    assert by_rows["pi02"].buffers == 4 * 16 * 17 * 32
    assert by_channels["pi02"].buffers == 4 * 16 * 32 * 32


def test_targets_add_nothing_by_default() -> None:
    assert Target.memory_overhead(object(), chained()) == {"a": 0, "b": 0}  # type: ignore[arg-type]


def test_counts_weights_of_all_roles_and_buffers_in_flight() -> None:
    """First, device a computes role 0 and b computes role 1. Then each also computes the other's layers in turn."""
    one = lenet(({"b": "a"},), cluster("a", "b"))
    both = lenet(({"b": "a"}, {}), cluster("a", "b"))
    assert one.program is not None and both.program is not None
    alone, shared = program_memory(one.program), program_memory(both.program)
    assert shared["a"].weights == shared["b"].weights == alone["a"].weights
    image, classes = 4 * 32 * 32, 4 * 10
    # With one frame in flight, a device needs at most the memory of one replica of the plan.
    assert shared["a"] == alone["a"]
    assert shared["b"].buffers == image
    # Of three frames in flight, two may use the same replica. For the third frame, which b computes, a stores the input
    # that it sends and the outputs that it receives.
    three = program_memory(both.program, 3)
    assert three["a"].buffers == 2 * image + (image + classes)
    assert three["b"].buffers == 2 * image


def test_alternating_halves_hold_all_weights() -> None:
    platform = cluster("a", "b")
    prepared = replace(prepare(Model.load(networks.build("lenet", 0))), platform=platform)
    assert prepared.layers is not None
    names = [layer.name for layer in prepared.layers.layers]
    parts = {name: (Part("a" if i < len(names) - 2 else "b"),) for i, name in enumerate(names)}
    plan = Plan(parts, ("a",), ("a",))
    straight = lower(replace(prepared, plan=plan)).program
    crossed = lower(replace(prepared, plan=replace(plan, replicas=({}, {"a": "b", "b": "a"})))).program
    assert straight is not None and crossed is not None
    plain, swapped = program_memory(straight), program_memory(crossed)
    total = plain["a"].weights + plain["b"].weights
    assert swapped["a"].weights == swapped["b"].weights == total
    added = SocketsTarget().memory_overhead(crossed)
    assert all(added[name] >= SocketsTarget().memory_overhead(straight)[name] for name in "ab")


def test_error_of_a_full_host_counts_all_roles(tmp_path: Path) -> None:
    proto = networks.build("lenet", 0)
    problem = load_problem(proto, cluster("a", "b", memory=64 * 2**20))
    plan = replace(
        problem.build_plan({layer.name: (Part("a"),) for layer in problem.layers.layers}), replicas=({}, {"a": "b"})
    )
    with pytest.raises(DicompilerError, match=r"host a needs .*MB runtime of target 'sockets'\); host b needs "):
        compile(proto, problem.platform, plan=plan, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_states_count_before_and_after_a_frame() -> None:
    """A cache of 64 x 8 floats for two heads, keys and values, counts as read and as kept on its device."""
    proto = networks.build("llama_small", past=64, layers=1, hidden=32, heads=4, kv_heads=2, vocabulary=20, size=1)
    problem = load_problem(proto, uniform_platform(2))
    sketch = problem.draft_program(problem.single_device_plan("d0"))
    assert sketch.program is not None
    use = program_memory(sketch.program)["d0"]
    cache = 2 * 2 * 64 * 8 * 4
    assert use.buffers >= cache and use.activations >= cache
