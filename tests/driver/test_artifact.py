"""Tests of using artifacts: open, run and verify, in every role."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.splits import Case, splits
from support.tflm_runs import int8

from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.cli import main
from dicompiler.cli.options import StreamOptions
from dicompiler.driver.artifact import memory_by_host, reopen_artifact, run, verify, verify_run
from dicompiler.driver.compiler import compile
from dicompiler.driver.prepare import load_problem, prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.operator_rule import OperatorRule
from dicompiler.ir.plan import plan_to_text
from dicompiler.partition.lowering import lower
from dicompiler.partition.operators.elementwise import elementwise
from dicompiler.plugin.registry import registry, temporarily_registered
from dicompiler.search.constraints import host_memory_needs
from dicompiler.target.manifest import load_artifact
from dicompiler.target.run_records import RunOptions
from dicompiler.verify import executor
from dicompiler.verify.comparison import check_transfers
from dicompiler.verify.exact import check_model
from dicompiler.verify.executor import ProgramExecutor, run_model


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LeNet with two replicas on two devices each."""
    problem = load_problem(Model.load(networks.build("lenet", 0)), "rpi4x4", objective="throughput")
    plan = registry().make("strategies", "replicate{group_size=2}").plan(problem)
    directory = tmp_path_factory.mktemp("replicas")
    (directory / "plan.json").write_text(plan_to_text(plan), encoding="utf-8")
    compile(networks.build("lenet", 0), "rpi4x4", plan=directory / "plan.json", output=directory / "a")
    Model.load(networks.build("lenet", 0)).save(directory / "lenet.onnx")
    return directory


def test_verification_checks_every_role(compiled: Path) -> None:
    checks = {check.name: check for check in verify(compiled / "a").checks}
    assert list(checks) == ["exact", "output on pi01, 2 replicas", "bytes"]
    assert all(check.passed for check in checks.values())
    assert ", each in 2 replicas, " in checks["exact"].detail
    assert checks["bytes"].detail.endswith("in a frame of each of 2 replicas: as predicted")


def test_artifact_states_the_memory_of_its_program(compiled: Path) -> None:
    compilation, target, problem = reopen_artifact(compiled / "a")
    uses = replace(problem, target=target).program_memory_use(compilation)
    needs = {need.host: need.needed_bytes for need in host_memory_needs(problem.platform, uses)}
    assert memory_by_host(compiled / "a") == needs


def test_detects_wrong_output_of_one_role(compiled: Path) -> None:
    _, result = StreamOptions(frames=2).run(compiled / "a", None, RunOptions(kept_frames=2))
    assert repr(result).startswith("<RunResult: 2 frames in ") and len(repr(result)) < 200
    spoilt = [{device: dict(outputs) for device, outputs in frame.items()} for frame in result.outputs_by_device]
    (name,) = spoilt[1]["pi01"]
    spoilt[1]["pi01"][name] = spoilt[1]["pi01"][name] + np.float32(1)
    good, bad = (
        verify_run(compiled / "a", given) for given in (result, replace(result, outputs_by_device=tuple(spoilt)))
    )
    assert good.passed and [check.name for check in good.checks] == ["output on pi01, 2 replicas"]
    assert [(check.name, check.passed) for check in bad.checks] == [
        ("output on pi01, replica 0", True),
        ("output on pi01, replica 1", False),
    ]
    first_frame = replace(result, outputs=result.outputs[:1], outputs_by_device=result.outputs_by_device[:1])
    *_, uncompared = verify_run(compiled / "a", first_frame).checks
    assert uncompared.name == "replica 1" and not uncompared.applies
    assert uncompared.detail == "not compared: run 2 frames, one for each replica"


def test_detects_missing_bytes_of_one_role(compiled: Path) -> None:
    program = compile(networks.build("lenet", 0), "rpi4x4", plan=compiled / "plan.json").program
    assert program is not None
    sent = {t.index: t.value.nbytes for t in program.all_transfers}
    assert check_transfers(program.all_transfers, sent, 1, 2).passed
    for index in sent:
        assert not check_transfers(program.all_transfers, {k: v for k, v in sent.items() if k != index}, 1, 2).passed


def test_commands_accept_plan_with_replicas(compiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*words: str) -> Any:
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    files = [str(compiled / "lenet.onnx"), "--platform", "rpi4x4", "--plan", str(compiled / "plan.json")]
    made = printed("compile", *files, "-o", str(compiled / "b"))
    weights = [record["weights"] for record in made["devices"]]
    assert all(record["segments"] and record["sent"] for record in made["devices"]) and weights[0] == weights[1]
    for command in (["simulate", *files], ["run", str(compiled / "b")]):
        assert main([*command, "--frames", "2", "--in-flight", "1"]) == 0
        hint = "replicas: at most 1 of 2 compute at the same time, because of the limit of 1 frame in flight"
        assert hint in " ".join(capsys.readouterr().out.split())
    stream = printed("simulate", *files, "--frames", "12")
    assert len(stream["stream"]["frames"]) == 12
    assert len({(link["from"], link["to"]) for link in stream["links"]}) >= 4
    ran = printed("run", str(compiled / "b"), "--frames", "5")
    assert all(device["compute_s"] > 0 for device in ran["devices"])


def test_reopened_artifact_equals_its_compilation(tmp_path: Path) -> None:
    made = compile(networks.build("lenet", 0), "rpi4x2", strategy="modnn", output=tmp_path / "a")
    again, target, problem = reopen_artifact(tmp_path / "a")
    assert again.plan == made.plan and again.platform == made.platform
    for one, other in ((again.metrics, made.metrics), (again.single_device_metrics, made.single_device_metrics)):
        assert one is not None and other is not None
        assert (one.latency_s, one.energy_j, one.total_bytes) == (other.latency_s, other.energy_j, other.total_bytes)
    assert again.decision == made.decision
    assert (target.name, problem.objective) == ("sockets", "latency")
    assert made.program is not None and again.program is not None
    assert again.program.transfers == made.program.transfers


def test_rejects_directory_without_artifact(tmp_path: Path) -> None:
    for use in (load_artifact, reopen_artifact, run, verify):
        with pytest.raises(DicompilerError, match="not an artifact of dicompiler: compile a model into it first"):
            use(tmp_path)


@pytest.mark.parametrize(("stand_in", "shape"), [("Relu", "<float[1, 4, 6, 6] z>"), ("Relu", ""), ("", "")])
def test_exact_check_uses_stand_ins_of_plugins(stand_in: str, shape: str, tmp_path: Path) -> None:
    """Without a known output shape, the layer stays whole, in the check model too."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        g (float[1, 4, 6, 6] x) => (float[1, 4, 6, 6] y) {shape} {{
          z = com.microsoft.QuickGelu (x)
          y = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (z) }}""")
    with temporarily_registered(
        OperatorRule("QuickGelu", elementwise, "com.microsoft", is_elementwise=True, stand_in=stand_in)
    ):
        compile(model, "rpi4x4", strategy="modnn", output=tmp_path / "a")
        exact, *others = verify(tmp_path / "a").checks
    assert exact.applies and exact.passed and all(check.passed for check in others)


def quantised() -> Model:
    """Return a QDQ network whose whole and tiled results differ at the highest optimization level."""
    return int8(Model.load(networks.build("resnet8", 1)))


@pytest.mark.parametrize(("target", "level"), [("sockets", "all"), ("sockets{optimization=extended}", "extended")])
def test_compares_outputs_at_the_optimization_level_of_the_artifact(
    target: str, level: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def noted(*arguments: Any, optimization: Any = "extended") -> Any:
        asked.append(optimization)
        return run_model(*arguments, optimization=optimization)

    compile(quantised(), "rpi4x2", strategy="modnn", target=target, output=tmp_path / "a")
    monkeypatch.setattr(executor, "run_model", noted)
    verification = verify(tmp_path / "a")
    assert verification.passed and asked == [level]
    (output,) = (check.detail for check in verification.checks if check.name.startswith("output"))
    assert "steps of" in output and output.endswith("(allowed: 16)")
    assert json.loads((tmp_path / "a" / "reference" / "provenance.json").read_text())["target"] == target


@pytest.mark.parametrize("level", ["extended", "all"])
def test_split_check_models_are_bit_equal_at_all_levels(level: Any) -> None:
    """Layouts and fused kernels do not change the integer results of check models."""
    case = Case.of(networks.build("quirks", 1))
    checked, inputs = check_model(case.compilation.model, 0)
    whole = run_model(checked, inputs, optimization=level)
    for one in splits(case.layers, ("pipeline", "height", "lop", "lip", "fused-grid"), sets=1):
        made = lower(replace(prepare(checked), plan=case.plan(one), platform=case.compilation.platform)).program
        assert made is not None
        outputs = ProgramExecutor(made, level).run(inputs).outputs
        assert all(np.array_equal(whole[name], value) for name, value in outputs.items()), one.kind


@pytest.mark.parametrize("target", ["sockets", "mpi"])
def test_single_device_runs_one_segment_at_the_default_level(target: str, tmp_path: Path) -> None:
    made = compile(networks.build("resnet8", 1), "rpi4x1", strategy="single", target=target, output=tmp_path / "a")
    assert made.program is not None and made.reference is not None
    (segment,) = made.program.devices[0].segments
    kinds = [[node.op_type for node in proto.graph.node] for proto in (segment.model, made.reference.proto)]
    assert kinds[0] == kinds[1]
    (place,) = (tmp_path / "a").glob({"sockets": "*/manifest.json", "mpi": "*/program.json"}[target])
    assert json.loads(place.read_text())["optimization"] == "all"


ASKED = """
import json, sys
from pathlib import Path
from runtime.segments import make_sessions
manifest = json.loads(Path("manifest.json").read_text())
session = next(one for one in make_sessions(Path(), manifest, 1) if one is not None)  # others only move
try:
    print(session.get_session_options().get_session_config_entry("session.force_spinning_stop"))
except RuntimeError:
    print("it spins")
"""


@pytest.mark.parametrize(
    ("platform", "strategy", "expected"), [("rpi4x1", "single", "it spins"), ("rpi4x2", "modnn", "1")]
)
def test_engine_threads_do_not_spin_if_devices_exchange_messages(
    platform: str, strategy: str, expected: str, tmp_path: Path
) -> None:
    compile(networks.build("lenet", 1), platform, strategy=strategy, output=tmp_path / "a")
    words = [sys.executable, "-c", ASKED]
    done = subprocess.run(words, cwd=tmp_path / "a" / "pi01", check=True, capture_output=True, text=True)
    assert done.stdout.strip() == expected
