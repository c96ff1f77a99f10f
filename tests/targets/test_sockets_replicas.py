"""Replicas with real processes: outputs of each frame, sent bytes of each role, and failures."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support.dealing import dealt
from support.generators import integers
from support.kill_process import kill_once
from support.running import LIMIT_S
from support.tampering import reseal, rewrite

from dicompiler import networks
from dicompiler.base.errors import DicompilerError, RunError
from dicompiler.base.schema import load_json, validate
from dicompiler.driver.compiler import compile
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.program import Program
from dicompiler.target.manifest import write_digests_and_checksum
from dicompiler.target.run_records import RunOptions, RunResult
from dicompiler.verify.comparison import compare_value, random_inputs
from dicompiler.verify.executor import run_model
from dicompiler_targets.sockets.artifact import SocketsArtifact
from dicompiler_targets.sockets.open_session import total_seconds
from dicompiler_targets.sockets.runtime.channel import EventLoop
from dicompiler_targets.sockets.runtime.executor import Mailbox, StepExecutor
from dicompiler_targets.sockets.runtime.protocol import (
    FrameWindow,
    MessageHeader,
    MessageType,
    ProtocolError,
    ReceiveFilter,
    role_manifests,
)
from dicompiler_targets.sockets.runtime.segments import make_sessions
from dicompiler_targets.sockets.session import InFlightFrame
from dicompiler_targets.sockets.target import SocketsTarget

SINGLES = ({"w0": "pi01"}, {"w0": "pi02"}, {"w0": "pi03"}, {"w0": "pi04"})
PAIRS: tuple[dict[str, str], ...] = ({}, {"pi01": "pi03", "pi02": "pi04"})


def plan(*devices: str, replicas: tuple[dict[str, str], ...]) -> Plan:
    """Return a plan with LeNet's layers on these devices in turn; inputs and outputs are on pi01."""
    names = [layer.name for layer in load_problem(networks.build("lenet", 0), "rpi4x4").layers.layers]
    share = -(-len(names) // len(devices))
    parts = {name: (Part(devices[i // share]),) for i, name in enumerate(names)}
    return Plan(parts, ("pi01",), ("pi01",), replicas=replicas)


def sent(result: RunResult) -> dict[int, int]:
    return {index: count for report in result.reports for index, count in report.sent_bytes.items()}


def predicted(program: Program, frames: int) -> dict[int, int]:
    """Return the predicted bytes by index of the transfer; each role computes every n-th frame."""
    counts = [len(range(i, frames, len(program.roles))) for i in range(len(program.roles))]
    each = [count for role, count in zip(program.roles, counts, strict=True) for _ in role.transfers]
    return {t.index: count * t.value.nbytes for t, count in zip(program.all_transfers, each, strict=True) if count}


@pytest.fixture(scope="module")
def lenet() -> Any:
    return networks.build("lenet", 0)


@pytest.mark.parametrize("in_flight", [1, 6])
@pytest.mark.parametrize(
    "dealt_plan", [plan("pi01", "pi02", replicas=PAIRS), plan("w0", replicas=SINGLES)], ids=["2 pairs", "4 singles"]
)
def test_frames_are_correct_and_roles_send_predicted_bytes(
    dealt_plan: Plan, in_flight: int, lenet: Any, tmp_path: Path
) -> None:
    made = compile(lenet, "rpi4x4", plan=dealt_plan, output=tmp_path / "a")
    assert made.program is not None
    frames = [random_inputs(made.program.inputs, seed) for seed in range(11)]
    result = SocketsTarget().run(tmp_path / "a", frames, RunOptions(timeout_s=60, in_flight=in_flight))
    model = Model.load(lenet)
    for given, outputs in zip(frames, result.outputs, strict=True):
        checks = [compare_value(name, value, outputs[name]) for name, value in run_model(model, given).items()]
        assert all(check.passed for check in checks), checks
    assert sent(result) == predicted(made.program, 11)
    # Each device computes some of the frames.
    assert all(report.compute_s > 0 for report in result.reports)
    for report, device in zip(result.reports, made.program.devices, strict=True):
        count = sum(
            len(own.segments) for role in made.program.roles for own in role.devices if own.device == device.device
        )
        assert len(report.segments_s) == count


def test_device_sends_inputs_of_later_frames_before_it_computes(lenet: Any, tmp_path: Path) -> None:
    """Otherwise the other device would wait until this device has computed all older frames."""
    on_pi01_and_pi02 = plan("w0", replicas=({"w0": "pi01"}, {"w0": "pi02"}))
    compile(lenet, "rpi4x4", plan=on_pi01_and_pi02, output=tmp_path / "a")
    manifest = SocketsArtifact.load(tmp_path / "a").manifests[0]
    sessions = make_sessions(tmp_path / "a" / "pi01", manifest, 1)
    loop, mailbox, runs_before_post = EventLoop(0), Mailbox(), dict[int, list[int]]()

    def post(entry: Mapping[str, Any], frame: int, payload: Any, keep: Any) -> None:  # noqa: ARG001
        runs_before_post[frame] = [run[2] for run in executor.timeline]

    executor = StepExecutor(manifest, sessions, mailbox, loop, post)
    for frame in range(6):
        for value in role_manifests(manifest)[frame % 2]["inputs"]:
            mailbox.put((frame, value["name"]), np.zeros(value["bytes"], np.uint8))
    with contextlib.closing(loop):
        for frames in (range(4), range(4, 6)):
            for frame in frames:
                executor.begin_frame(frame, 0.0, math.inf)
            while executor.advance(lambda _: None):
                pass
    # This device computes the even frames. It sends the inputs of the odd ones to the other device.
    assert runs_before_post == {0: [0], 1: [], 2: [0, 2], 3: [], 4: [0, 2, 4], 5: [0, 2]}


def test_total_time_ends_with_the_last_frame_that_arrives() -> None:
    """The newest frame, on a fast board, overtakes an older one on a slow board."""
    frames = [InFlightFrame(None, sent_at=1.0, finished_at=9.0), InFlightFrame(None, sent_at=2.0, finished_at=4.0)]
    assert (total_seconds(frames), total_seconds(())) == (8.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_any_replicated_plan_computes_same_bits(seed: int, tmp_path: Path) -> None:
    compilation, model, _ = dealt(9100 + seed)
    assert compilation.program is not None and compilation.plan is not None
    SocketsTarget().emit(compilation, tmp_path)
    write_digests_and_checksum(tmp_path)
    frames = [integers(Random(frame), model.proto) for frame in range(5)]
    result = SocketsTarget().run(tmp_path, frames, RunOptions(timeout_s=60, in_flight=1 + seed % 3))
    for inputs, delivered in zip(frames, result.outputs_by_device, strict=True):
        assert set(delivered) == set(compilation.plan.sink)
        for name, value in run_model(model, inputs).items():
            assert all(np.array_equal(outputs[name], value) for outputs in delivered.values())
    assert sent(result) == predicted(compilation.program, 5)


def test_stores_shared_weights_and_segments_once(lenet: Any, tmp_path: Path) -> None:
    """pi02 does the same in roles 0 and 2; pi01 only forwards tensors."""
    every = tuple({"w0": name} for name in ("pi02", "pi03", "pi02"))
    compile(lenet, "rpi4x4", plan=plan("w0", replicas=every), output=tmp_path / "a")
    alone = compile(lenet, "rpi4x4", plan=plan("pi02", replicas=()), output=tmp_path / "b")
    assert alone.program is not None
    manifest = load_json(tmp_path / "a" / "pi02" / "manifest.json")
    validate(manifest, "manifest", "pi02")
    assert [name for name in manifest["files"] if name.endswith(".onnx")] == ["segment000.onnx"]
    assert manifest["other_roles"][1]["segments"] == manifest["segments"] and not manifest["other_roles"][0]["segments"]
    weights = [(tmp_path / name / "pi02" / "weights.bin").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]
    # Without replicas, the manifest must not contain other roles.
    assert "other_roles" not in load_json(tmp_path / "b" / "pi02" / "manifest.json")
    artifact = load_json(tmp_path / "a" / "artifact.json")
    validate(artifact, "artifact", "a")
    assert [transfer["index"] for transfer in artifact["transfers"]] == list(range(6))


def test_same_plan_gives_same_bytes(lenet: Any, tmp_path: Path) -> None:
    for name in "ab":
        compile(lenet, "rpi4x4", plan=plan("pi01", "pi02", replicas=PAIRS), output=tmp_path / name)
    files = [
        {path.relative_to(tmp_path / name): path.read_bytes() for path in sorted((tmp_path / name).rglob("*.*"))}
        for name in "ab"
        if not (tmp_path / name).is_file()
    ]
    assert files[0] == files[1]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["pi02", "pi04"])
def test_failure_in_one_role_ends_run_and_is_named(victim: str, lenet: Any, tmp_path: Path) -> None:
    """pi02 computes only in the first role, pi04 only in the second."""
    compile(lenet, "rpi4x4", plan=plan("pi01", "pi02", replicas=PAIRS), output=tmp_path / "a")
    assert kill_once(tmp_path / "a", victim, 1.5).find_fault(LIMIT_S) == ""


def test_names_segment_that_fails_in_one_role(lenet: Any, tmp_path: Path) -> None:
    compile(lenet, "rpi4x4", plan=plan("w0", replicas=SINGLES), output=tmp_path / "a")
    place = tmp_path / "a" / "pi03" / "segment000.onnx"
    place.write_bytes(b"\0" * place.stat().st_size)
    reseal(tmp_path / "a")
    with pytest.raises(RunError, match=r"device 'pi03': segment .* cannot be loaded"):
        SocketsTarget().run(tmp_path / "a", [{"input": np.zeros((1, 1, 32, 32), np.float32)}], RunOptions(timeout_s=60))


def test_rejects_devices_with_different_roles(lenet: Any, tmp_path: Path) -> None:
    compile(lenet, "rpi4x4", plan=plan("w0", replicas=SINGLES), output=tmp_path / "a")
    rewrite(tmp_path / "a" / "pi03" / "manifest.json", lambda manifest: manifest["other_roles"].pop())
    reseal(tmp_path / "a")
    with pytest.raises(DicompilerError, match="failure plans for different failures"):
        SocketsArtifact.load(tmp_path / "a")


def test_rejects_tensors_of_another_role() -> None:
    first, second = {3: {"name": "t", "bytes": 8}}, {4: {"name": "t", "bytes": 4}}
    gate = ReceiveFilter([first, second], FrameWindow(4))
    for header in (
        MessageHeader(MessageType.TENSOR, 3, 0, 8),
        MessageHeader(MessageType.TENSOR, 4, 1, 4),
        MessageHeader(MessageType.TENSOR, 3, 2, 8),
    ):
        gate.check(header)
    for header in (
        MessageHeader(MessageType.TENSOR, 4, 2, 4),
        MessageHeader(MessageType.TENSOR, 3, 3, 8),
        MessageHeader(MessageType.TENSOR, 4, 3, 8),
    ):
        with pytest.raises(ProtocolError):
            gate.check(header)
