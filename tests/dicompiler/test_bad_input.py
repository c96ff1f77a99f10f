"""Wrong models, plans, inputs and places on the command line: one clear line, exit code 1 or 2, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from dicompiler.cli import main
from dicompiler.executor import run_model
from dicompiler.model import Model

TEXT = """<ir_version: 8, opset_import: ["": 17]>
    g (float[1, 3, 12, 12] x) => (float[1, 4, 12, 12] y, float[1, 4, 6, 6] z) {
      h = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1)
      r = Relu (h)
      y = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (r, w2)
      z = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (y)
    }"""
COMPILE = ("--platform", "rpi4x2", "-o")
SINGLE = ("--platform", "rpi4x2", "--strategy", "single", "-o")


def network() -> onnx.ModelProto:
    """Two convolutions and a pool."""
    proto = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(7)
    for name, shape in (("w1", (16, 3, 3, 3)), ("w2", (4, 16, 3, 3))):
        proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    return proto


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(network(), path)
    return path


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The network, compiled for two devices."""
    place = tmp_path_factory.mktemp("compiled")
    onnx.save(network(), place / "model.onnx")
    assert main(["compile", str(place / "model.onnx"), *COMPILE, str(place / "out")]) == 0
    return place / "out"


class Refused:
    """Runs a command line that must fail, and looks at what it prints and leaves."""

    def __init__(self, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.place, self.capsys = place, capsys

    def __call__(self, code: int, *arguments: object) -> str:
        """The line on stderr; nothing is on stdout and no file has come, gone or changed."""
        before = dict(_files(self.place))
        self.capsys.readouterr()
        got = main([str(argument) for argument in arguments])
        out, line = self.capsys.readouterr()
        assert (got, out) == (code, ""), line
        assert line.count("\n") == 1
        assert line.startswith("dicompiler: error: ")
        assert dict(_files(self.place)) == before
        return line.rstrip("\n").removeprefix("dicompiler: error: ")


def _files(place: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(place.rglob("*")):
        yield str(path), path.read_bytes() if path.is_file() else b""


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    return Refused(tmp_path, capsys)


class TestModels:
    """Model files that cannot be compiled."""

    @pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
    def test_a_truncated_file(self, model: Path, tmp_path: Path, refused: Refused, share: float) -> None:
        data = model.read_bytes()
        model.write_bytes(data[: int(share * len(data))])
        line = refused(1, "compile", model, *COMPILE, tmp_path / "out")
        assert re.fullmatch(rf"{re.escape(str(model))}: .*(truncated, or )?not an ONNX model.*: export it again", line)

    @pytest.mark.parametrize("content", [b"hello, world\n", b'{"format": "x"}', b"\x89PNG\r\n\x1a\n", b"\0" * 4096])
    def test_a_file_that_is_no_model(self, tmp_path: Path, refused: Refused, content: bytes) -> None:
        path = tmp_path / "model.onnx"
        path.write_bytes(content)
        line = refused(1, "compile", path, *COMPILE, tmp_path / "out")
        assert line.startswith(f"{path}: ") and "not an ONNX model" in line

    def test_a_file_that_is_missing_or_a_directory(self, tmp_path: Path, refused: Refused) -> None:
        line = refused(1, "compile", tmp_path / "none.onnx", *COMPILE, tmp_path / "out")
        assert line == f"{tmp_path / 'none.onnx'}: cannot read the model: No such file or directory"
        line = refused(1, "compile", tmp_path, *COMPILE, tmp_path / "out")
        assert line == f"{tmp_path}: cannot read the model: Is a directory"

    def test_missing_and_truncated_external_data(self, tmp_path: Path, refused: Refused) -> None:
        path, data = tmp_path / "model.onnx", tmp_path / "model.data"
        onnx.save(network(), path, save_as_external_data=True, location=data.name, size_threshold=0)
        data.write_bytes(data.read_bytes()[:-8])
        line = refused(1, "compile", path, *COMPILE, tmp_path / "out")
        assert "external data of 'w2'" in line and "truncated" in line
        data.unlink()
        line = refused(1, "compile", path, *COMPILE, tmp_path / "out")
        assert line == f"{path}: external data of 'w1': there is no file {str(data)!r}: copy it beside the model"

    @pytest.mark.parametrize("what", ["IR version", "opset"])
    def test_a_version_that_is_too_new(self, tmp_path: Path, refused: Refused, what: str) -> None:
        proto = network()
        if what == "IR version":
            proto.ir_version = 60
        else:
            proto.opset_import[0].version = 60
        path = tmp_path / "new.onnx"
        path.write_bytes(proto.SerializeToString())
        line = refused(1, "compile", path, *COMPILE, tmp_path / "out")
        pattern = (
            rf"{re.escape(str(path))}: {what} 60 is too new: onnxruntime [\d.]+ goes up to \d+: export the model .*"
        )
        assert re.fullmatch(pattern, line)

    def test_dimensions_that_are_not_fixed(self, tmp_path: Path, refused: Refused) -> None:
        proto = network()
        proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
        path = tmp_path / "open.onnx"
        onnx.save(proto, path)
        line = refused(1, "compile", path, *COMPILE, tmp_path / "out")
        remedy = "give it as --shape x=1x3x12x12"
        assert line == f"infer-shapes: dimension 0 ('N') of input 'x' is open: {remedy}"
        line = refused(2, "compile", path, "--shape", "input=1x3x12x12", *COMPILE, tmp_path / "out")
        assert line == "shape: the model has no input 'input' (known: x)"
        line = refused(1, "compile", path, "--shape", "x=1x5x12x12", *COMPILE, tmp_path / "out")
        assert "dimension 1 is 5 where the model has 3" in line

    def test_a_model_that_is_not_legal(self, tmp_path: Path, refused: Refused) -> None:
        proto = network()
        proto.graph.node[1].op_type = "Relv"
        path = tmp_path / "odd.onnx"
        path.write_bytes(proto.SerializeToString())
        line = refused(1, "compile", path, *COMPILE, tmp_path / "out")
        assert "Relv" in line
        proto = network()
        proto.graph.node[1].input[0] = "nobody"
        path.write_bytes(proto.SerializeToString())
        line = refused(1, "compile", path, *COMPILE, tmp_path / "out")
        assert "nobody" in line


class TestPlaces:
    """Where nothing can or may be written."""

    def test_a_directory_with_other_content_a_file_and_no_parent(
        self, model: Path, tmp_path: Path, refused: Refused
    ) -> None:
        other = tmp_path / "mine"
        other.mkdir()
        (other / "thesis.tex").write_text("years of work")
        line = refused(1, "compile", model, *COMPILE, other)
        assert line == f"{other}: it exists and is no artifact of ours: choose another place or remove it"
        line = refused(1, "compile", model, *COMPILE, model)
        assert line == f"{model}: it exists and is no artifact of ours: choose another place or remove it"
        line = refused(1, "compile", model, *COMPILE, tmp_path / "none" / "out")
        assert str(tmp_path / "none") in line

    @pytest.mark.parametrize("room", [0, 3000, 9000])
    def test_a_full_disk(self, model: Path, tmp_path: Path, room: int) -> None:
        """A limit on the size of files stands for it: writing fails in the middle just as it does there."""
        before = dict(_files(tmp_path))
        done = subprocess.run(
            [sys.executable, "-m", "dicompiler.cli", "compile", str(model), *SINGLE, str(tmp_path / "out")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"dicompiler: error: {tmp_path / 'out'}: it cannot be written: File too large\n"
        assert dict(_files(tmp_path)) == before

    def test_an_artifact_is_replaced_only_by_one_that_is_whole(
        self, model: Path, tmp_path: Path, refused: Refused
    ) -> None:
        assert main(["compile", str(model), *COMPILE, str(tmp_path / "out")]) == 0
        model.write_bytes(model.read_bytes()[:500])
        refused(1, "compile", model, *COMPILE, tmp_path / "out")
        refused(1, "compile", tmp_path / "none.onnx", *COMPILE, tmp_path / "out")
        assert main(["run", str(tmp_path / "out")]) == 0


class TestPlans:
    """Plans that are not for this network or these devices."""

    def plan(self, model: Path, tmp_path: Path) -> Path:
        """A plan file that fits the model."""
        path = tmp_path / "plan.json"
        assert main(["plan", str(model), "--platform", "rpi4x2", "--strategy", "modnn", "-o", str(path)]) == 0
        return path

    def test_a_plan_for_another_network(self, model: Path, tmp_path: Path, refused: Refused) -> None:
        plan = self.plan(model, tmp_path)
        proto = network()
        proto.graph.node[1].op_type = "Sigmoid"
        onnx.save(proto, model)
        line = refused(1, "compile", model, "--plan", plan, *COMPILE, tmp_path / "out")
        remedy = "make it anew with 'dicompiler plan'"
        assert line == f"plan: it was made for another network (its structure differs): {remedy}"

    def test_a_retrained_network_keeps_its_plan(self, model: Path, tmp_path: Path) -> None:
        plan = self.plan(model, tmp_path)
        proto = network()
        for tensor in proto.graph.initializer:
            tensor.raw_data = (2 * numpy_helper.to_array(tensor)).tobytes()
        onnx.save(proto, model)
        assert main(["compile", str(model), "--plan", str(plan), *COMPILE, str(tmp_path / "out")]) == 0

    def test_a_layer_that_is_unknown_or_missing(self, model: Path, tmp_path: Path, refused: Refused) -> None:
        plan = self.plan(model, tmp_path)
        document = json.loads(plan.read_text())
        document["layers"]["hh"] = document["layers"].pop("h")
        document.pop("network")
        plan.write_text(json.dumps(document))
        line = refused(1, "compile", model, "--plan", plan, *COMPILE, tmp_path / "out")
        assert "'h'" in line and "plan" in line

    def test_a_plan_over_the_memory_of_a_host(self, model: Path, tmp_path: Path, refused: Refused) -> None:
        platform = tmp_path / "small.toml"
        platform.write_text(
            'format = "dicompiler.platform/1"\nname = "small"\n'
            '[network]\nkind = "switch"\nbandwidth = "100 Mbit/s"\nlatency = "0.5 ms"\n'
            '[[host]]\nname = "tiny"\nmemory = "8 KiB"\n[[device]]\nname = "cpu"\nhost = "tiny"\nrate = "1 GFLOP/s"\n'
        )
        line = refused(1, "compile", model, "--platform", platform, "--strategy", "single", "-o", tmp_path / "out")
        assert re.match(r"plan: host tiny needs [\d.]+ kB .* and has 8.19 kB: .* layer '[hy]'", line), line

    def test_a_plan_that_is_no_plan(self, model: Path, tmp_path: Path, refused: Refused) -> None:
        plan = tmp_path / "plan.json"
        for text in ("", "[]", '{"format": "dicompiler.plan/2"}', '{"format": "dicompiler.plan/1", "layers": {'):
            plan.write_text(text)
            assert refused(1, "compile", model, "--plan", plan, *COMPILE, tmp_path / "out").startswith(str(plan))
        line = refused(1, "compile", model, "--plan", tmp_path / "none.json", *COMPILE, tmp_path / "out")
        assert line == f"{tmp_path / 'none.json'}: no such file"


class TestInputs:
    """What a compiled network is given."""

    IMAGE = np.random.default_rng(1).standard_normal((1, 3, 12, 12)).astype(np.float32)

    @pytest.mark.parametrize(
        ("arrays", "line"),
        [
            ({"image": IMAGE}, "the network has no input 'image' (known: x)"),
            ({"x": IMAGE, "k": IMAGE}, "the network has no input 'k' (known: x)"),
            ({}, "input 'x' is missing: give all of the network's inputs"),
            ({"x": IMAGE[:, :2]}, "input 'x' must have the shape (1, 3, 12, 12), not (1, 2, 12, 12)"),
            ({"x": IMAGE[0]}, "input 'x' must have the shape (1, 3, 12, 12), not (3, 12, 12)"),
            ({"x": IMAGE.astype(np.float64)}, "input 'x' must be of type float32, not float64"),
            ({"x": IMAGE.astype(np.uint8)}, "input 'x' must be of type float32, not uint8"),
        ],
    )
    @pytest.mark.parametrize("command", ["run", "verify"])
    def test_another_name_shape_or_dtype(
        self,
        artifact: Path,
        tmp_path: Path,
        refused: Refused,
        command: str,
        arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]],
        line: str,
    ) -> None:
        np.savez(tmp_path / "x.npz", **arrays)
        outputs = ("--outputs", tmp_path / "y.npz") if command == "run" else ()
        assert refused(1, command, artifact, "--inputs", tmp_path / "x.npz", *outputs) == line

    def test_nan_and_infinity_come_out_where_onnxruntime_puts_them(self, artifact: Path, tmp_path: Path) -> None:
        image = self.IMAGE.copy()
        image[0, 0, 3, 4], image[0, 1, 8, 2], image[0, 2, 10, 10] = np.nan, np.inf, -np.inf
        np.savez(tmp_path / "x.npz", x=image)
        outputs = tmp_path / "y.npz"
        assert main(["run", str(artifact), "--inputs", str(tmp_path / "x.npz"), "--outputs", str(outputs)]) == 0
        reference = run_model(Model.load(network()), {"x": image})
        with np.load(outputs) as found:
            for name, value in reference.items():
                assert not np.isfinite(value).all() and np.isfinite(value).any()
                assert np.array_equal(np.isnan(found[name]), np.isnan(value))
                assert np.array_equal(np.isinf(found[name]), np.isinf(value))
                finite = np.isfinite(value)
                assert np.allclose(found[name][finite], value[finite], rtol=1e-5, atol=1e-5)
        assert main(["verify", str(artifact), "--inputs", str(tmp_path / "x.npz")]) == 0


class TestArtifacts:
    """Directories that are no artifact, or no longer a whole one."""

    @pytest.mark.parametrize("command", ["run", "verify"])
    def test_no_artifact(self, tmp_path: Path, refused: Refused, command: str) -> None:
        for path in (tmp_path, tmp_path / "none"):
            assert refused(1, command, path) == f"{path}: no artifact of dicompiler: compile a model into it first"

    @pytest.mark.parametrize("file", ["artifact.json", "reference/model.onnx", "plan.json", "platform.toml"])
    def test_a_damaged_or_missing_file(self, model: Path, tmp_path: Path, refused: Refused, file: str) -> None:
        out = tmp_path / "out"
        assert main(["compile", str(model), *COMPILE, str(out)]) == 0
        data = (out / file).read_bytes()
        (out / file).write_bytes(data[: len(data) // 2])
        assert refused(1, "verify", out).startswith(str(out / file))
        (out / file).unlink()
        line = refused(1, "verify", out)
        assert str(out) in line
