"""States in real processes: they are kept from frame to frame, can be reset, and are never sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.random_runs import check_random_states
from support.running import pids

import dicompiler
from dicompiler import networks
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.platform import uniform_platform
from dicompiler.ir.regions import full_region, split_proportionally, with_interval
from dicompiler.partition.bounds_inference import cuttable_axes, output_shape
from dicompiler.target.target_base import Target
from dicompiler.verify.executor import run_model
from dicompiler_targets.mpi import MpiTarget
from dicompiler_targets.sockets.in_process_session import InProcessSession
from dicompiler_targets.sockets.target import SocketsTarget

PAST, STEPS = 8, 20
DECODER = {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "vocabulary": 50, "size": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "seed"), [(SocketsTarget(), 7), (SocketsTarget(), 10), (MpiTarget(), 6)], ids=["tcp7", "tcp10", "mpi6"]
)
def test_frames_in_flight_find_the_states_of_the_frame_before(target: Target, seed: int, tmp_path: Path) -> None:
    check_random_states(target, seed, 8, tmp_path)


def halves(layers: Any) -> Plan:
    """Return a plan with heads and features in halves on two devices.

    Each layer is cut along its first axis of even length, so that caches are not sent.
    """
    parts = {}
    for layer in layers.layers:
        axis = next((a for a in cuttable_axes(layers, layer) if output_shape(layers, layer)[a] % 2 == 0), None)
        if axis is None:
            parts[layer.name] = (Part("d0"), Part("d1"))
            continue
        whole = full_region(output_shape(layers, layer))
        cuts = split_proportionally(whole[axis][1], (1, 1))
        parts[layer.name] = tuple(Part(f"d{i}", with_interval(whole, axis, cut)) for i, cut in enumerate(cuts))
    return Plan(parts, ("d0",), ("d0",))


def steps(tokens: Any) -> list[dict[str, Any]]:
    """Return a frame for each token, with the mask of valid positions and the position of the new token."""
    mask = [np.arange(PAST + 1)[None] >= PAST - min(i, PAST) for i in range(len(tokens))]
    return [
        {"input_ids": np.array([[t]]), "attention_mask": m.astype(np.int64), "position_ids": np.array([[i]])}
        for i, (t, m) in enumerate(zip(tokens, mask, strict=True))
    ]


def test_decoder_steps_as_the_whole_sequence_does_and_its_caches_stay(tmp_path: Path) -> None:
    proto = networks.build("llama_small", past=PAST, **DECODER)
    problem = load_problem(proto, uniform_platform(2))
    compiled = dicompiler.compile(proto, uniform_platform(2), plan=halves(problem.layers), output=tmp_path / "out")
    assert compiled.routing is not None and compiled.program is not None
    assert [[state.region[1] for state in device.states] for device in compiled.program.devices] == [
        [(0, 1)] * 2,
        [(1, 2)] * 2,
    ]
    assert not any("present" in box.key.tensor or "past" in box.key.tensor for box in compiled.routing.received_boxes)
    tokens = np.random.default_rng(0).integers(0, 50, STEPS)
    with dicompiler.connect(tmp_path / "out") as session:
        first = [session.infer(frame)["output"] for frame in steps(tokens)]
        session.reset()
        again = [outputs["output"] for outputs in session.stream(steps(tokens[:PAST]))]
    whole = Model.load(networks.build("llama_small", **DECODER | {"size": PAST}))
    reference = run_model(whole, {"input_ids": tokens[None, :PAST]})["output"]
    got = np.concatenate(first[:PAST], axis=1)
    assert np.abs(got - reference).max() <= 1e-5 * np.abs(reference).max()
    assert np.array_equal(np.concatenate(again, axis=1), got)
    sent = {index: count for report in session.reports for index, count in report.sent_bytes.items()}
    assert sent == {t.index: (STEPS + PAST) * t.value.nbytes for t in compiled.program.transfers}
    assert compiled.verify().passed


STATE_BYTES = 4 << 20
LARGE_STATE = f"""<ir_version: 8, opset_import: ["" : 17]> g
    (float[1, {STATE_BYTES // 4}] x, float[1, {STATE_BYTES // 4}] past) => (float[1, 1] y, float[1, {STATE_BYTES // 4}]
    present) {{
        present = Add (past, x)
        low = ReduceMax <axes = [1]> (present)
        y = Neg (low)
    }}"""


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("restart", ["reset", "given", "in flight"])
@pytest.mark.slow
def test_states_that_no_frame_reads_are_discarded(restart: str, devices: int, tmp_path: Path) -> None:
    directory = tmp_path / "artifact"
    problem = load_problem(onnx.parser.parse_model(LARGE_STATE), uniform_platform(devices), state=["past=present"])
    names = [layer.name for layer in problem.layers.layers]
    plan = Plan({name: (Part(f"d{i and devices - 1}"),) for i, name in enumerate(names)}, ("d0",), ("d0",))
    model = onnx.parser.parse_model(LARGE_STATE)
    dicompiler.compile(model, uniform_platform(devices), plan=plan, state=["past=present"], output=directory)
    one = {"x": np.ones((1, STATE_BYTES // 4), np.float32)}
    given = {**one, "past": np.full((1, STATE_BYTES // 4), 5, np.float32)}

    def resident_bytes() -> int:
        lines = [Path(f"/proc/{pid}/statm").read_text() for pid in pids(directory).values()]
        return sum(int(line.split()[1]) for line in lines) * 4096

    with dicompiler.connect(directory) as session:
        for number in range(60):
            if restart == "reset":
                session.reset()
            if restart == "in flight":
                found = [-float(outputs["y"][0, 0]) for outputs in session.stream([given, one, given, one])]
                assert found == [6, 7, 6, 7]
            else:
                frame = given if restart == "given" else one
                assert session.infer(frame)["y"] == (-6 if restart == "given" else -1)
                assert session.infer(one)["y"] == (-7 if restart == "given" else -2)
            if number == 10:
                before = resident_bytes()
        if isinstance(session, InProcessSession):
            assert len(session._executor._states) == 1
        else:
            assert resident_bytes() < before + 12 * STATE_BYTES
