"""The sockets target without failures: written files, and outputs of real processes compared with the whole model."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.handmade import Made, failing, halo, integers, partial, unknown_shape
from support.tampering import rewrite

from dicompiler.base.errors import DicompilerError
from dicompiler.base.schema import load_json, validate
from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.onnx.model import Weight
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.platform import Platform
from dicompiler.target.manifest import write_digests_and_checksum
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.executor import ProgramExecutor, run_model
from dicompiler_targets.sockets.runtime import segments as runtime_values
from dicompiler_targets.sockets.target import SocketsTarget

RUNTIME = Path(runtime_values.__file__).parent


def emit(made: Made, directory: Path, **options: Any) -> Path:
    directory.mkdir(exist_ok=True)
    SocketsTarget(**options).emit(PipelineState(model=made[1], program=made[0]), directory)
    write_digests_and_checksum(directory)
    return directory


def manifest(directory: Path, device: str) -> dict[str, Any]:
    found: dict[str, Any] = load_json(directory / device / "manifest.json")
    return found


@pytest.mark.parametrize(
    "made",
    [halo, partial, lambda: partial("bfloat16"), lambda: partial("float8e4m3fn"), lambda: partial("bool")],
    ids=["halo", "partial", "bfloat16", "float8", "bool"],
)
def test_processes_match_whole_model(made: Any, tmp_path: Path) -> None:
    program, model, inputs = one = made()
    result = SocketsTarget().run(emit(one, tmp_path), [inputs] * 2, RunOptions(timeout_s=60))
    reference = run_model(model, inputs)["out"]
    assert len(result.outputs) == len(result.outputs_by_device) == len(result.frames_s) == 2
    for delivered in result.outputs_by_device:
        assert set(delivered) == {d.device for d in program.devices if d.model_outputs}
        for outputs in delivered.values():
            assert outputs["out"].dtype == reference.dtype
            assert np.array_equal(outputs["out"], reference)
    sent = {index: count for report in result.reports for index, count in report.sent_bytes.items()}
    assert sent == {t.index: 2 * t.value.nbytes for t in program.transfers}
    for report, device in zip(result.reports, program.devices, strict=True):
        assert report.device == device.device
        assert len(report.segments_s) == len(device.segments)
        assert report.compute_s == pytest.approx(sum(report.segments_s))
        assert 20 << 20 < report.peak_memory_bytes < 1 << 30
        assert set(report.sent_bytes) == {t.index for t in program.transfers if t.sender == device.device}


def test_keeps_frames_apart(tmp_path: Path) -> None:
    program, model, inputs = halo()
    frames = [{"x": integers(inputs["x"].shape, seed)} for seed in range(20)]
    result = SocketsTarget().run(emit((program, model, inputs), tmp_path), frames, RunOptions(timeout_s=60))
    for frame, outputs in zip(frames, result.outputs, strict=True):
        assert np.array_equal(outputs["out"], run_model(model, frame)["out"])


def test_accepts_shapes_known_only_at_run_time(tmp_path: Path) -> None:
    made = unknown_shape()
    frames = [{"x": integers(shape, 1)} for shape in [(2, 5), (2, 0), (2, 1)]]
    result = SocketsTarget().run(emit(made, tmp_path), frames, RunOptions(timeout_s=60))
    assert [outputs["out"].shape for outputs in result.outputs] == [(10, 2), (0, 2), (2, 2)]
    for frame, outputs in zip(frames, result.outputs, strict=True):
        assert np.array_equal(outputs["out"], run_model(made[1], frame)["out"])


def test_crossing_large_tensors_do_not_deadlock(tmp_path: Path) -> None:
    # Both devices send more bytes than the socket buffers can store before either device receives.
    program, model, inputs = partial(rows=200_000)
    result = SocketsTarget().run(emit((program, model, inputs), tmp_path), [inputs], RunOptions(timeout_s=60))
    assert np.array_equal(result.outputs[0]["out"], run_model(model, inputs)["out"])
    assert min(sum(report.sent_bytes.values()) for report in result.reports) > 16 << 20


def test_matches_executor(tmp_path: Path) -> None:
    program, model, inputs = halo(32, 5)
    result = SocketsTarget(optimization="none", threads=2).run(
        emit((program, model, inputs), tmp_path), [inputs], RunOptions(timeout_s=60)
    )
    execution = ProgramExecutor(program).run(inputs)
    assert np.array_equal(result.outputs[0]["out"], execution.outputs["out"])
    assert {i: n for report in result.reports for i, n in report.sent_bytes.items()} == dict(enumerate(execution.sent))


def test_run_does_not_change_moved_artifact(tmp_path: Path, monkeypatch: Any) -> None:
    made = halo()
    (tmp_path / "here" / "sub").mkdir(parents=True)
    emit(made, tmp_path / "there")
    before = content(tmp_path / "there")
    shutil.move(tmp_path / "there", tmp_path / "here" / "sub" / "artifact")
    monkeypatch.chdir(tmp_path / "here")
    # Devices must not inherit environment variables that change how Python starts.
    monkeypatch.setenv("PYTHONINSPECT", "1")
    result = SocketsTarget().run(Path("sub/artifact"), [made[2]], RunOptions(timeout_s=60))
    assert np.array_equal(result.outputs[0]["out"], run_model(made[1], made[2])["out"])
    assert content(Path("sub/artifact")) == before


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_same_program_gives_same_bytes(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; from support.handmade import halo\n"
        "from dicompiler.plugin_api import PipelineState\n"
        "from dicompiler_targets.sockets.target import SocketsTarget; program, model, _ = halo()\n"
        "SocketsTarget().emit(PipelineState(model=model, program=program), Path(sys.argv[1]))\n"
    )
    found = []
    for seed in ("1", "2"):
        (place := tmp_path / seed / "artifact").mkdir(parents=True)
        paths = [os.path.abspath(entry) for entry in sys.path if entry]
        command = [sys.executable, "-c", script, str(place), *paths]
        subprocess.run(command, check=True, cwd=place.parent, env=os.environ | {"PYTHONHASHSEED": seed})
        found.append(content(place))
    assert found[0] == found[1]
    assert not any(str(tmp_path).encode() in data for data in found[0].values())


def test_files_match_schemas(tmp_path: Path) -> None:
    for i, made in enumerate([halo(), partial("bfloat16"), unknown_shape()]):
        directory = emit(made, tmp_path / str(i))
        artifact = load_json(directory / "artifact.json")
        validate(artifact, "artifact", "artifact.json")
        assert artifact["devices"] == [d.device for d in made[0].devices]
        assert [t["bytes"] for t in artifact["transfers"]] == [t.value.nbytes for t in made[0].transfers]
        for device in artifact["devices"]:
            one = manifest(directory, device)
            validate(one, "manifest", "manifest.json")
            assert one["digest"] == artifact["digest"]
            files = {str(p.relative_to(directory / device)) for p in (directory / device).rglob("*") if p.is_file()}
            assert files == {*one["files"], "manifest.json"}
            for name, record in one["files"].items():
                data = (directory / device / name).read_bytes()
                assert record == {"bytes": len(data), "digest": f"sha256:{hashlib.sha256(data).hexdigest()}"}


def test_stores_each_weight_once_per_device(tmp_path: Path) -> None:
    program, model, inputs = halo()
    directory = emit((program, model, inputs), tmp_path)
    assert not (directory / "c" / "weights.bin").exists()
    data = (directory / "a" / "weights.bin").read_bytes()
    places: dict[str, set[str]] = {}
    for path in sorted((directory / "a").glob("*.onnx")):
        for tensor in onnx.load(path, load_external_data=False).graph.initializer:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            if entries:
                offset, length = int(entries["offset"]), int(entries["length"])
                assert entries["location"] == "weights.bin"
                assert offset % 64 == 0
                assert data[offset : offset + length] == bytes(program.weights[tensor.name].data)
                places.setdefault(tensor.name, set()).add(entries["offset"])
    assert {name: len(offsets) for name, offsets in places.items()} == {"w1": 1, "b1": 1, "w2": 1}
    assert len(data) < sum(weight.nbytes for weight in program.weights.values()) + 3 * 64
    partial_directory = emit(partial(), tmp_path / "partial")
    assert (partial_directory / "a" / "weights.bin").read_bytes()[: 16 * 24 * 4] == bytes(
        partial()[0].weights["wa"].data
    )
    onnx.checker.check_model(str(directory / "a" / "segment001.onnx"))


def test_digest_includes_weights(tmp_path: Path) -> None:
    program, model, inputs = halo()
    first = load_json(emit((program, model, inputs), tmp_path / "1") / "artifact.json")
    weights = dict(program.weights)
    weights["b1"] = Weight.from_array(weights["b1"].array() + 1)
    object.__setattr__(program, "weights", weights)
    second = load_json(emit((program, model, inputs), tmp_path / "2") / "artifact.json")
    assert first["digest"] != second["digest"]
    changed = {"digest": "", "files": {}, "checksum": ""}
    assert first | changed == second | changed
    assert {name for name in first["files"] if first["files"][name] != second["files"][name]} == {
        *(f"{device}/manifest.json" for device in "abc"), "a/weights.bin", "b/weights.bin"
    }  # fmt: skip


def test_runtime_imports_only_numpy_and_engines() -> None:
    for path in RUNTIME.glob("*.py"):
        engine = {"engine_ncnn": ["ncnn"], "engine_mnn": ["MNN"]}.get(path.stem, [])
        allowed = {*sys.stdlib_module_names, "numpy", "onnxruntime", *engine}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, path
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert (node.module or "").split(".")[0] in allowed, path
            elif isinstance(node, ast.ImportFrom):
                inside = [node.module] if node.module else [alias.name for alias in node.names]
                assert all((RUNTIME / f"{name}.py").exists() or name.isupper() for name in inside), path


def test_never_unpickles() -> None:
    for path in RUNTIME.glob("*.py"):
        for word in ("pickle", "marshal", "eval(", "exec(", "allow_pickle"):
            assert word not in path.read_text(), path


def test_threads_default_to_device_cores(tmp_path: Path) -> None:
    program, model, _ = halo()
    devices = tuple(Device(name, name, 1e9, cores) for name, cores in (("a", 1), ("b", 4), ("c", 2)))
    hosts = tuple(Host(device.host, 1 << 30) for device in devices)
    platform = Platform("p", hosts, devices, Network("switch", 1e8))
    for place, target, expected in (
        (tmp_path / "1", SocketsTarget(), [1, 4, 2]),
        (tmp_path / "2", SocketsTarget(threads=3), [3, 3, 3]),
    ):
        place.mkdir()
        target.emit(PipelineState(model=model, program=program, platform=platform), place)
        assert [manifest(place, device)["threads"] for device in "abc"] == expected
    with pytest.raises(ValueError, match="threads must be 0 or more"):
        SocketsTarget(threads=-1)


def renamed(made: Made, name: str) -> Made:
    object.__setattr__(made[0].devices[0], "device", name)
    return made


@pytest.mark.parametrize("name", ["..", "a/b", "", "reference", "artifact.json", "-x"])
def test_rejects_device_names_that_cannot_be_directories(name: str, tmp_path: Path) -> None:
    with pytest.raises(DicompilerError, match=r"^device .*: not a valid name for its directory"):
        emit(renamed(unknown_shape(), name), tmp_path)


def test_rejects_strings_between_devices(tmp_path: Path) -> None:
    made = failing()
    object.__setattr__(made[0].transfers[0].value, "dtype", onnx.TensorProto.STRING)
    with pytest.raises(
        DicompilerError, match=r"^tensor 'x': its size is not known before the run, so it cannot be sent"
    ):
        emit(made, tmp_path)


def test_tensor_types_match_onnx() -> None:
    for name, (number, size) in runtime_values.TENSOR_TYPES.items():
        assert onnx.TensorProto.DataType.Value(name) == number
        assert onnx.helper.tensor_dtype_to_np_dtype(number).itemsize == size


def test_rejects_wrong_inputs_before_start(tmp_path: Path) -> None:
    directory = emit(halo(), tmp_path)
    with pytest.raises(DicompilerError, match=r"^input 'x' must have the shape"):
        SocketsTarget().run(directory, [{"x": np.zeros((1, 3, 4, 4), np.float32)}], RunOptions(timeout_s=60))
    rewrite(directory / "b" / "manifest.json", lambda document: document.pop("steps"))
    write_digests_and_checksum(directory)
    with pytest.raises(DicompilerError, match=r"manifest\.json: missing key 'steps'"):
        SocketsTarget().run(directory, [halo()[2]], RunOptions(timeout_s=60))
