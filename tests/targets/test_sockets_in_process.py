"""Artifacts with a single device, which a client runs in its own process."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from support.running import pids
from support.stateful import fed_back, integer_frames, random_stateful

import dicompiler
from dicompiler import networks
from dicompiler.base.errors import DicompilerError, RunError
from dicompiler.ir.onnx.model import Model
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.run_inputs import prepare_inputs
from dicompiler_targets.sockets.target import SocketsTarget

HEAD = '<ir_version: 8, opset_import: ["": 17]> g'
GATHER = f"{HEAD} (int64[1] x) => (float[1] y) <float[4] t = {{1, 2, 3, 4}}> {{ y = Gather(t, x) }}"
SUM = GATHER.replace("y =", "z = Add(x, x) y =").replace("t, x", "t, z")
COUNT = f"""{HEAD} (float[1] x) => (float[1] y) <int64 times = {{1000000000000}}, bool yes = {{1}}> {{
    y = Loop (times, yes, x) <body = turn (int64 i, bool go, float[1] s) => (bool again, float[1] t) {{
        again = Identity(go)
        t = Add(s, x)
    }}>
}}"""


def compiled(network: Any, directory: Path) -> Path:
    proto = onnx.parser.parse_model(network) if isinstance(network, str) else network
    dicompiler.compile(proto, "rpi4x1", "single", output=directory)
    return directory


def test_matches_device_process_without_starting_one(tmp_path: Path) -> None:
    artifact = compiled(networks.build("lenet", 1), tmp_path / "a")
    inputs = [{"input": np.random.default_rng(i).random((1, 1, 32, 32), "float32")} for i in range(4)]
    ran = SocketsTarget().run(artifact, inputs, RunOptions(timeout_s=60))
    used = np.empty_like(inputs[0]["input"])

    def source() -> Iterator[dict[str, Any]]:
        for frame in inputs:
            # The source writes each frame into the same array, so the session must not keep a reference to it.
            used[:] = frame["input"]
            yield {"input": used}

    inputs[0]["input"].setflags(write=False)
    with dicompiler.connect(artifact) as session:
        assert pids(artifact) == {}
        with pytest.raises(DicompilerError, match=r"^input 'input' is missing"):
            session.infer({})
        found = [session.infer(inputs[0]), *session.stream(source()), *session.stream(inputs)]
    for outputs, expected in zip(found, [ran.outputs[0], *ran.outputs, *ran.outputs], strict=True):
        assert outputs.keys() == expected.keys()
        assert all(np.array_equal(outputs[name], expected[name]) and outputs[name].flags.writeable for name in expected)
    (own,), (report,) = session.reports, ran.reports
    assert (own.device, len(own.segments_s), own.sent_bytes) == (report.device, len(report.segments_s), {})
    assert own.compute_s == pytest.approx(sum(own.segments_s)) and own.peak_memory_bytes > report.peak_memory_bytes / 2
    assert [(one.kind, one.index, one.frame) for one in own.timeline] == [("run", 0, 8)]
    with dicompiler.connect(artifact, RunOptions(pin=True)) as session:
        assert len(pids(artifact)) == 1  # The option `pin` needs a separate process for the device.


@pytest.mark.parametrize(
    "graph",
    [
        "(float[2, 3] x, int64[1] i) => (float[1, 3] y, float[2, 3] z) { y = Gather(x, i) z = Neg(x) }",
        "(float x) => (float y) { y = Neg(x) }",
        "(float[2] x) => (float[2] y, float[2] y) { y = Neg(x) }",
        "(float[2] x) => (float[2] y, float[2] x) { y = Neg(x) }",
        "(float[2] x, float[2] unused) => (float[2] y) { y = Neg(x) }",
        "(float16[2] x) => (bool[2] y) { y = Equal(x, x) }",
        "(bfloat16[2] x) => (bfloat16[2] y) { y = Identity(x) }",
        "(float[2] x) => (float[N] y) { k = Greater(x, x) y = Compress(x, k) }",
        "(string[2] x) => (string[2] y) { y = Identity(x) }",
    ],
)
def test_outputs_equal_those_of_device_process(graph: str, tmp_path: Path) -> None:
    model = Model.load(onnx.parser.parse_model(f"{HEAD} {graph}"))
    artifact = compiled(model.proto, tmp_path / "a")
    frames = [prepare_inputs(model, seed=seed) for seed in range(3)]
    expected = SocketsTarget().run(artifact, frames, RunOptions(timeout_s=60)).outputs
    with dicompiler.connect(artifact) as session:
        found = [*map(session.infer, frames)]
    for outputs, others in zip(found, expected, strict=True):
        assert list(outputs) == list(others)
        for name, array in outputs.items():
            assert (array.dtype, array.shape) == (others[name].dtype, others[name].shape)
            assert np.array_equal(array, others[name]) and array.flags.writeable


def test_keeps_and_resets_states(tmp_path: Path) -> None:
    rng = Random(3)
    model = random_stateful(rng)
    dicompiler.compile(model, "rpi4x1", "single", output=tmp_path / "a")
    frames = integer_frames(rng, model, 6)
    with dicompiler.connect(tmp_path / "a") as session:
        found = [session.infer(frame) for frame in frames]
        session.reset()
        found += session.stream(frames)
    for outputs, expected in zip(found, [*fed_back(model, frames)] * 2, strict=True):
        assert all(np.array_equal(outputs[name], expected[name]) for name in outputs)


def test_rejects_index_outside_table_and_continues(tmp_path: Path) -> None:
    message = r"^input 'x': the number {} at \[0\] is not the index of a row of 't', which has 4 rows: give "
    artifact = compiled(GATHER, tmp_path / "a")
    for number in (4, -5, 2**40):
        with pytest.raises(DicompilerError, match=message.format(number)):
            SocketsTarget().run(artifact, [{"x": np.array([number])}], RunOptions(timeout_s=60))
    with dicompiler.connect(artifact) as session:
        for number in (-1, 3):
            with pytest.raises(DicompilerError, match=message.format(9)):
                session.infer({"x": np.array([9])})
            assert session.infer({"x": np.array([number])})["y"] == [4]


def test_errors_match_device_process_and_end_session(tmp_path: Path) -> None:
    artifact, bad = compiled(SUM, tmp_path / "a"), {"x": np.array([9], np.int64)}
    with pytest.raises(RunError) as reported:
        SocketsTarget().run(artifact, [bad], RunOptions(timeout_s=60))
    with dicompiler.connect(artifact) as session:
        with pytest.raises(RunError, match=f"^{re.escape(str(reported.value))}$"):
            session.infer(bad)
        with pytest.raises(RunError, match=r"^the session has ended: device 'pi01': segment .* out of data bounds"):
            session.infer(bad)
    assert session.reports == ()
    (segment,) = artifact.glob("pi01/segment*.onnx")
    segment.write_bytes(segment.read_bytes().replace(b"Gather", b"gather"))
    with pytest.raises(RunError, match=r"^device 'pi01': file segment\d+.onnx is damaged"):
        dicompiler.connect(artifact)


def test_stops_frame_after_timeout(tmp_path: Path) -> None:
    session, start = dicompiler.connect(compiled(COUNT, tmp_path / "a"), timeout=1), time.monotonic()
    with pytest.raises(
        RunError, match=r"^device 'pi01': did not finish within 1 s: allow more time \(--timeout; in Python: timeout\)$"
    ):
        session.infer({"x": np.ones(1, np.float32)})
    assert 1 <= time.monotonic() - start < 6
