"""The MPI target without failures: written files, and outputs of real ranks compared with the whole model.

Programs are built with software that `tests/run` installs. They are kept in the user's cache by their content.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from support.dealing import dealt
from support.generators import integers
from support.handmade import halo, partial, unknown_shape
from support.mpi_runs import emit, environment
from support.random_runs import check_random, sent_bytes

from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.base.schema import load_json, validate
from dicompiler.cost.memory import program_memory
from dicompiler.driver import artifact as artifacts
from dicompiler.driver import compiler
from dicompiler.target.manifest import make_file_record, write_digests_and_checksum
from dicompiler.target.run_records import RunOptions, RunResult
from dicompiler.verify.executor import run_model
from dicompiler_targets.mpi import MpiTarget, build, cache_directory, toolchain
from dicompiler_targets.mpi.artifact import MpiArtifact
from dicompiler_targets.mpi.codegen import assign_output_files, make_string_literal

MOVING = ("Slice", "Concat")


@pytest.mark.parametrize(
    "made",
    [halo, partial, lambda: partial("bfloat16"), lambda: partial("float8e4m3fn"), lambda: partial("bool")],
    ids=["halo", "partial", "bfloat16", "float8", "bool"],
)
def test_ranks_compute_the_same_as_the_whole_model(made: Any, tmp_path: Path) -> None:
    program, model, inputs = one = made()
    result = MpiTarget().run(emit(one, tmp_path), [inputs] * 2, RunOptions(timeout_s=60))
    reference = run_model(model, inputs)["out"]
    assert len(result.outputs) == len(result.outputs_by_device) == len(result.frames_s) == 2
    assert 0 < max(result.frames_s) <= result.total_s
    for delivered in result.outputs_by_device:
        assert set(delivered) == {d.device for d in program.devices if d.model_outputs}
        for outputs in delivered.values():
            assert outputs["out"].dtype == reference.dtype
            assert np.array_equal(outputs["out"], reference)
    assert sent_bytes(result) == {t.index: 2 * t.value.nbytes for t in program.transfers}
    for report, device in zip(result.reports, program.devices, strict=True):
        assert report.device == device.device
        assert len(report.segments_s) == len(device.segments)
        assert report.compute_s == pytest.approx(sum(report.segments_s))
        assert report.peak_memory_bytes > 10 << 20
        last = [one for one in report.timeline if one.frame == 1]
        assert sorted(one.index for one in last if one.kind == "run") == list(range(len(device.segments)))
        assert sorted(one.index for one in last if one.kind == "send") == sorted(
            step.index for step in device.steps if step.kind == "send"
        )
        assert all(0 <= one.start <= one.end for one in report.timeline)
    begins, ends = _edges(result)
    for transfer in program.transfers:
        # Sending a transfer must begin before its receiver stops waiting. The times of two ranks are comparable,
        # because they share the host's clock.
        assert begins[transfer.index] <= ends.get(transfer.index, math.inf)


def _edges(result: RunResult) -> tuple[dict[int, float], dict[int, float]]:
    """For the last frame, return when each transfer begins to be sent, and when the last wait for it ends.

    Times are in seconds, by index of the transfer. A wait ends when another message arrives, and then begins again.
    """
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for report in result.reports:
        for one in report.timeline:
            if one.kind == "send":
                begins[one.index] = one.start
            elif one.kind == "wait" and one.frame == 1:
                ends[one.index] = max(ends.get(one.index, 0.0), one.end)
    return begins, ends


def test_inputs_and_outputs_of_unknown_shape_may_have_any_shape(tmp_path: Path) -> None:
    _, model, inputs = one = unknown_shape()
    result = MpiTarget().run(emit(one, tmp_path), [inputs], RunOptions(timeout_s=60))
    for name, value in run_model(model, inputs).items():
        assert np.array_equal(result.outputs[0][name], value)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_networks_under_random_plans_are_bit_equal(seed: int, tmp_path: Path) -> None:
    check_random(MpiTarget(), 8000 + seed, 6, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_frames_are_dealt_out_to_replicas(seed: int, tmp_path: Path) -> None:
    compilation, model, _ = dealt(9000 + seed)
    program = compilation.program
    assert program is not None and program.other_roles
    target = MpiTarget()
    target.emit(compilation, tmp_path)
    write_digests_and_checksum(tmp_path)
    frames = [integers(Random(frame), model.proto) for frame in range(7)]

    result = target.run(tmp_path, frames, RunOptions(timeout_s=60, in_flight=1 + 2 * seed))

    for inputs, delivered in zip(frames, result.outputs_by_device, strict=True):
        reference = run_model(model, inputs)
        assert delivered
        for outputs in delivered.values():
            assert all(np.array_equal(outputs[name], value) for name, value in reference.items())
    counts = [len(range(i, len(frames), len(program.roles))) for i in range(len(program.roles))]
    each = [count for role, count in zip(program.roles, counts, strict=True) for _ in role.transfers]
    expected = {t.index: count * t.value.nbytes for t, count in zip(program.all_transfers, each, strict=True)}
    assert sent_bytes(result) == {index: count for index, count in expected.items() if count}
    assert all(seconds > 0 for seconds in result.frames_s) and len(result.frames_s) == len(frames)
    for index, report in enumerate(result.reports):
        assert len(report.segments_s) == sum(len(role.devices[index].segments) for role in program.roles)


def artifact_of(name: str, strategy: str, place: Path, target: str = "mpi", platform: str = "rpi4x2") -> Path:
    compiler.compile(networks.build(name), platform, strategy=strategy, target=target, output=place)
    return place


@pytest.mark.parametrize("strategy", ["single", "modnn"])
def test_verify_runs_the_program_and_compares_outputs_and_bytes(strategy: str, tmp_path: Path) -> None:
    found = artifacts.verify(artifact_of("lenet", strategy, tmp_path / "a"))
    assert found.passed, [check.detail for check in found.checks]
    assert [check.name for check in found.checks][0::2] == ["exact", "bytes"]


def test_same_network_gives_the_same_bytes(tmp_path: Path) -> None:
    trees = []
    for place in (tmp_path / "a", tmp_path / "b"):
        artifact_of("lenet", "modnn", place)
        files = sorted(path for path in place.rglob("*") if path.is_file())
        trees.append({str(path.relative_to(place)): path.read_bytes() for path in files})
    assert trees[0] == trees[1]
    assert not any(str(tmp_path).encode() in content for content in trees[0].values())


def test_package_holds_its_own_segments_and_the_source_that_all_have(tmp_path: Path) -> None:
    place = artifact_of("lenet", "modnn", tmp_path / "a")
    document = load_json(place / "artifact.json")
    validate(document, "artifact", "artifact.json")
    shared = {
        "CMakeLists.txt",
        "main.cc",
        "run.sh",
        "rankfile",
        "hostfile",
        "sender.json",
        "receiver.json",
        "program.json",
    }
    for host in document["devices"]:
        assert {path.name for path in (place / host).iterdir()} == shared | {"runtime", "manifest.json", host}
        for name in shared:
            assert (place / host / name).read_bytes() == (place / document["devices"][0] / name).read_bytes()
        listed = (place / host / host / "contents.txt").read_text().splitlines()
        sizes = {path.name: path.stat().st_size for path in (place / host / host).iterdir()}
        assert listed[0] == document["digest"]
        entries = [line.split() for line in listed[1:-1]]
        assert {name: int(size) for size, _, name in entries} | {"contents.txt": 0} == sizes | {"contents.txt": 0}
        assert all(make_file_record(place / host / host / name)["digest"] == digest for _, digest, name in entries)
    ranks = {device: rank for rank, device in enumerate(document["devices"])}
    sender, receiver = (load_json(place / "pi01" / name) for name in ("sender.json", "receiver.json"))
    for transfer in document["transfers"]:
        assert ranks[transfer["receiver"]] in sender[transfer["sender"]][transfer["name"]]
        assert ranks[transfer["sender"]] in receiver[transfer["receiver"]][transfer["name"]]
    assert (place / "pi01" / "hostfile").read_text() == "pi01 slots=1\npi02 slots=1\n"
    assert (place / "pi01" / "rankfile").read_text() == "rank 0=pi01 slot=0,1,2,3\nrank 1=pi02 slot=0,1,2,3\n"


def test_other_compiler_options_lead_to_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of the environment are neither ignored nor kept for later builds."""
    package, tools = artifact_of("lenet", "single", tmp_path / "a") / "pi01", toolchain.find_toolchain()
    program = build.build_program(package, tools)
    with monkeypatch.context() as changed:
        changed.setenv("CXXFLAGS", "--no-such-option")
        with pytest.raises(DicompilerError, match="no-such-option"):
            build.build_program(package, tools)
    assert build.build_program(package, tools) == program


@pytest.mark.slow
def test_programs_find_their_libraries_next_to_themselves(tmp_path: Path) -> None:
    """No program has the absolute path of its build directory, so that it can be moved together with `lib`."""
    place = artifact_of("lenet", "single", tmp_path / "a")
    tools = toolchain.find_toolchain()
    cached = build.build_program(place / "pi01", tools)
    options = ["-DCMAKE_BUILD_TYPE=Debug", f"-DMPI_CXX_COMPILER={tools.mpicxx}"]
    options += [f"-DONNXRUNTIME_INCLUDE_DIR={tools.include}", f"-DONNXRUNTIME_LIBRARY={tools.library}"]
    made = tmp_path / "build"
    subprocess.run([tools.cmake, "-S", place / "pi01", "-B", made, *options], check=True, capture_output=True)
    subprocess.run([tools.cmake, "--build", made, "--parallel", "2"], check=True, capture_output=True)
    moved = made.rename(tmp_path / "moved")
    for program in (cached, moved / "program"):
        done = subprocess.run(["readelf", "-d", program], check=True, capture_output=True, text=True)
        (line,) = [line for line in done.stdout.splitlines() if "(RUNPATH)" in line]
        paths = line.partition("[")[2].rstrip("]").split(":")
        assert paths[0] == "$ORIGIN/lib" and len(paths) == len(set(paths))
        assert not [
            path for path in paths if path.startswith((str(tmp_path), str(cache_directory.get_cache_directory())))
        ]
        libraries = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
        assert f"libonnxruntime.so.1 => {program.parent / 'lib'}/" in libraries


def test_segments_keep_no_slice_and_no_join_at_their_borders(tmp_path: Path) -> None:
    made = compiler.compile(networks.build("lenet", 1), "rpi4x4", strategy="modnn", target="mpi", output=tmp_path / "a")
    assert made.program is not None
    calls = load_json(tmp_path / "a" / "pi01" / "program.json")["ranks"]
    left, moved = 0, 0
    for device, rank in zip(made.program.devices, calls, strict=True):
        runs = [call for call in rank["roles"][0] if call[0] == "run"]
        for segment, run in zip(device.segments, runs, strict=True):
            moved += sum(node.op_type in MOVING for node in segment.model.graph.node)
            if run[1]:
                file = tmp_path / "a" / device.host / device.device / run[1]
                graph = onnx.load(file, load_external_data=False).graph
                left += sum(node.op_type in MOVING for node in graph.node)
                assert ([v.name for v in graph.input], [v.name for v in graph.output]) == (run[2], run[3])
    assert left == 0 and moved > 40
    joined = {call[2] for rank in calls for call in rank["roles"][0] if call[0] == "copy_input"}
    cuts = [call[2] for rank in calls for call in rank["roles"][0] if call[0] == "copy_output"]
    assert len(joined) > 10 and {*cuts} <= {transfer.value.name for transfer in made.program.transfers}


def test_weights_that_segments_share_are_stored_once_for_each_device(tmp_path: Path) -> None:
    program, _, _ = one = halo(channels=32)
    emit(one, tmp_path)
    for device in program.devices:
        names = {tensor.name for segment in device.segments for tensor in segment.model.graph.initializer}
        large = [program.weights[name].nbytes for name in names if name in program.weights]
        weights = tmp_path / device.host / device.device / "weights.bin"
        size = weights.stat().st_size if weights.is_file() else 0
        assert sum(large) <= size < sum(large) + 64 * (len(large) + 1)


def test_names_of_tensors_do_not_become_code() -> None:
    assert make_string_literal('a"b\\c??/\n\u00e9') == '"a\\042b\\134c\\077\\077/\\012\\303\\251"'
    files = assign_output_files(["a/b", "a_b", "../x", "é"])
    assert len(set(files.values())) == 4
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+\.npy", file) for file in files.values())


HOSTS = "nx01, arm, slots=0-5, gpu=NVIDIAVolta (CUDA)\nnx02, arm, slots=0-11\n"


def test_files_of_autodice_give_its_ranks_cores_and_gpu_flags(tmp_path: Path) -> None:
    keys = ("nx02_arm10,11", "nx01_gpu", "nx01_arm01234")
    proto = networks.build("lenet")
    nodes = [node.output[0] for node in proto.graph.node]
    third = len(nodes) // 3
    parts = (nodes[:third], nodes[third : 2 * third], nodes[2 * third :])
    mapping, hosts = tmp_path / "mapping.json", tmp_path / "platform.txt"
    mapping.write_text(json.dumps(dict(zip(keys, parts, strict=True))), encoding="utf-8")
    hosts.write_text(HOSTS, encoding="utf-8")
    strategy = f"manual{{mapping={mapping} platform={hosts}}}"
    compiler.compile(proto, strategy=strategy, target="mpi", output=tmp_path / "a")

    package = tmp_path / "a" / "nx01"
    rankfile = "rank 0=nx02 slot=10,11\nrank 1=nx01 slot=5\nrank 2=nx01 slot=0,1,2,3,4\n"
    assert (package / "rankfile").read_text() == rankfile
    assert (package / "hostfile").read_text() == "nx02 slots=1\nnx01 slots=2\n"
    ranks = {
        rank["rank"]: rank
        for host in ("nx01", "nx02")
        for rank in load_json(tmp_path / "a" / host / "manifest.json")["ranks"]
    }
    assert [(ranks[i]["threads"], ranks[i]["gpu"]) for i in range(3)] == [(2, False), (1, True), (5, False)]
    sender = load_json(package / "sender.json")
    assert list(sender) == ["nx02_arm10-11", "nx01_gpu", "nx01_arm01234"]
    assert 1 in next(iter(sender["nx02_arm10-11"].values()))


@pytest.mark.slow
def test_sanitized_build_has_no_warning_and_no_report_of_ours(tmp_path: Path) -> None:
    _, _, inputs = one = halo()
    place = emit(one, tmp_path / "a")
    found = toolchain.find_toolchain()
    artifact = MpiArtifact.load(place)
    program = build.build_program(artifact.packages["a"], found, sanitize=True)
    log = (program.parent.parent / "log").read_text()
    assert "warning" not in log, log
    for device, package in artifact.packages.items():
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / device).symlink_to(package / device)
    np.savez(tmp_path / "x.npz", **inputs)
    line = [
        found.mpirun,
        "--oversubscribe",
        "--bind-to",
        "none",
        "-n",
        "3",
        program,
        "--inputs",
        "x.npz",
        "--data",
        "data",
    ]
    # Leaks are not checked, because MPI and onnxruntime leak memory that dicompiler does not control.
    words = [str(word) for word in [*line, "--frames", "5", "--outputs", "out", "--pin"]]
    own = environment() | {"ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=own, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "runtime error" not in done.stderr and "AddressSanitizer" not in done.stderr, done.stderr
    assert [rank["rank"] for rank in json.loads(done.stdout)["ranks"]] == [0, 1, 2]
    assert len(list((tmp_path / "out").rglob("frame*.npy"))) == 5 * sum(bool(d.model_outputs) for d in one[0].devices)


def test_added_memory_is_close_to_the_memory_of_the_processes(tmp_path: Path) -> None:
    made = compiler.compile(
        networks.build("light/squeezenet"), "rpi4x2", strategy="modnn", target="mpi", output=tmp_path / "a"
    )
    assert made.program is not None
    held, more = program_memory(made.program), MpiTarget().memory_overhead(made.program)
    result = artifacts.run(tmp_path / "a")
    for report in result.reports:
        predicted = held[report.device].total + more[report.device]
        assert 0.85 < predicted / report.peak_memory_bytes < 1.2, (report, predicted)
