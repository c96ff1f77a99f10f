"""The strongest test: any network, cut in any legal way, computes the same bits and sends the predicted bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.generators import DEVICES, integers, random_model, random_plan
from support.layer_graphs import rules

from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import plan_from_json, plan_to_text
from dicompiler.ir.program import Program
from dicompiler.ir.wire_dtype import WireFormat
from dicompiler.partition.segmentation import build_program
from dicompiler.verify.executor import ProgramExecutor, run_model
from dicompiler_passes.form_layers import form_layers
from dicompiler_passes.partition import PartitionPass

EXACT = 2.0**24
HALVED = WireFormat((("*", "float16"),))


def compiled(seed: int) -> tuple[PipelineState, Model, Random]:
    """Return a random network with a random plan, partitioned.

    Every other one has all nodes for narrowing at device borders, but keeps its values.
    """
    rng = Random(seed)
    model = Model.load(onnx.shape_inference.infer_shapes(random_model(rng)))
    layers = form_layers(model, rules())
    plan = replace(random_plan(rng, layers), wire_format=HALVED if seed % 2 else WireFormat())
    plan = plan_from_json(json.loads(plan_to_text(plan)))
    placed = PartitionPass().run(
        PipelineState(model=model, layers=layers, plan=replace(plan, wire_format=plan.wire_format.with_exact_stand_ins))
    )
    placed.model.check("partition")
    return placed, model, rng


def check_arrivals(placed: PipelineState) -> None:
    """Check that no element arrives twice or is forwarded."""
    assert placed.routing is not None
    arrived: dict[object, set[tuple[int, ...]]] = {}
    for box in placed.routing.received_boxes:
        assert box.origin is not None and box.origin.origin is None
        assert box.origin.device != box.device
        assert box.region is not None
        elements = set(np.ndindex(*(stop - start for start, stop in box.region)))
        moved = {tuple(i + r[0] for i, r in zip(index, box.region, strict=True)) for index in elements}
        seen = arrived.setdefault((box.key, box.device), set())
        assert not seen & moved
        seen |= moved


def check_segment_order(program: Program) -> None:
    """Check that segments depend only on earlier ones."""
    there = {device.device: set(device.model_inputs) for device in program.devices}
    for transfer in program.transfers:
        if transfer.value.name in there[transfer.sender]:
            there[transfer.receiver].add(transfer.value.name)
    for device_index, index in program.segment_order:
        device = program.devices[device_index]
        segment = device.segments[index]
        assert set(segment.inputs) <= there[device.device]
        there[device.device] |= set(segment.outputs)
        for transfer in program.transfers:
            if transfer.sender == device.device and transfer.value.name in segment.outputs:
                there[transfer.receiver].add(transfer.value.name)


@settings(max_examples=examples(550), deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**48))
def test_random_networks_and_plans_are_bit_equal(seed: int) -> None:
    placed, model, rng = compiled(seed)
    check_arrivals(placed)
    assert placed.plan is not None and placed.routing is not None
    inputs = integers(rng, model.proto)
    reference = run_model(model, inputs)
    assert all(np.abs(value).max(initial=0) < EXACT for value in reference.values())

    program = build_program(placed.model, placed.plan.devices)
    check_segment_order(program)
    execution = ProgramExecutor(program).run(inputs)

    assert set(execution.outputs) == set(reference)
    assert set(execution.delivered) == set(placed.plan.sink)
    for outputs in execution.delivered.values():
        for name, value in outputs.items():
            assert np.array_equal(reference[name], value), name
    assert sum(execution.sent) == sum(t.value.nbytes for t in program.transfers) == placed.routing.total_bytes


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**48))
def test_placed_model_is_legal_and_computes_same(seed: int) -> None:
    placed, model, rng = compiled(seed)
    inputs = integers(rng, model.proto)
    reference, got = run_model(model, inputs), run_model(placed.model, inputs)
    assert all(np.array_equal(reference[name], got[name]) for name in reference)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**48))
def test_float16_halves_sent_bytes(seed: int) -> None:
    placed, model, rng = compiled(seed)
    assert placed.plan is not None and placed.layers is not None and placed.routing is not None
    plan = replace(placed.plan, wire_format=HALVED)
    narrow = PartitionPass().run(PipelineState(model=model, layers=placed.layers, plan=plan))
    assert narrow.routing is not None and narrow.routing.received_boxes == placed.routing.received_boxes

    execution = ProgramExecutor(build_program(narrow.model, plan.devices)).run(integers(rng, model.proto))

    floats = {name for name, tensor in placed.layers.tensors.items() if tensor.dtype == onnx.TensorProto.FLOAT}
    kept = sum(placed.routing.nbytes(box) for box in placed.routing.received_boxes if box.key.tensor not in floats)
    assert 2 * (sum(execution.sent) - kept) == placed.routing.total_bytes - kept
    assert sum(execution.sent) == narrow.routing.total_bytes


@pytest.mark.parametrize("seed", range(5))
def test_generator_makes_every_kind_of_part(seed: int) -> None:
    """With a generator that never cuts, every other test would pass."""
    cut_parts = partials = lanes = travelling = 0
    for number in range(40):
        placed, _, _ = compiled(1000 * seed + number)
        assert placed.plan is not None and placed.routing is not None
        parts = [part for own in placed.plan.layers.values() for part in own]
        cut_parts += sum(len(own) > 1 for own in placed.plan.layers.values())
        partials += sum(part.reduce is not None for part in parts)
        lanes += sum(part.lane > 0 for part in parts)
        travelling += len(placed.routing.received_boxes)
        assert {part.device for part in parts} <= set(DEVICES)
    assert min(cut_parts, partials, lanes, travelling) >= 10
