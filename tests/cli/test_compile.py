"""`dicompiler compile` rejects wrong models with one line and exit code 1 or 2, and leaves no file behind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper
from support.refusing import COMPILE, Refused, network

from dicompiler.cli import main


class TestModels:
    """Model files that cannot be compiled."""

    @pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
    def test_rejects_truncated_file(self, model: Path, tmp_path: Path, refused: Refused, share: float) -> None:
        data = model.read_bytes()
        model.write_bytes(data[: int(share * len(data))])
        line = refused(1, "compile", model, *COMPILE, tmp_path / "out")
        assert re.fullmatch(rf"{re.escape(str(model))}: .*(truncated, or )?not an ONNX model.*: export it again", line)

    @pytest.mark.parametrize("content", [b"hello, world\n", b'{"format": "x"}', b"\x89PNG\r\n\x1a\n", b"\0" * 4096])
    def test_rejects_a_file_that_is_not_a_model(self, tmp_path: Path, refused: Refused, content: bytes) -> None:
        path = tmp_path / "model.onnx"
        path.write_bytes(content)
        line = refused(1, "compile", path, *COMPILE, tmp_path / "out")
        assert line.startswith(f"{path}: ") and "not an ONNX model" in line

    def test_rejects_missing_file_and_directory(self, tmp_path: Path, refused: Refused) -> None:
        line = refused(1, "compile", tmp_path / "none.onnx", *COMPILE, tmp_path / "out")
        assert line == f"{tmp_path / 'none.onnx'}: cannot read the model: No such file or directory"
        line = refused(1, "compile", tmp_path, *COMPILE, tmp_path / "out")
        assert line == f"{tmp_path}: cannot read the model: Is a directory"

    def test_rejects_missing_and_truncated_external_data(self, tmp_path: Path, refused: Refused) -> None:
        path, data = tmp_path / "model.onnx", tmp_path / "model.data"
        onnx.save(network(), path, save_as_external_data=True, location=data.name, size_threshold=0)
        data.write_bytes(data.read_bytes()[:-8])
        line = refused(1, "compile", path, *COMPILE, tmp_path / "out")
        assert "external data of 'w2'" in line and "truncated" in line
        data.unlink()
        line = refused(1, "compile", path, *COMPILE, tmp_path / "out")
        assert line == f"{path}: external data of 'w1': there is no file {str(data)!r}: copy it next to the model"

    @pytest.mark.parametrize("version", ["IR version", "opset"])
    def test_rejects_version_that_is_too_new(self, tmp_path: Path, refused: Refused, version: str) -> None:
        proto = network()
        if version == "IR version":
            proto.ir_version = 60
        else:
            proto.opset_import[0].version = 60
        path = tmp_path / "new.onnx"
        path.write_bytes(proto.SerializeToString())
        line = refused(1, "compile", path, *COMPILE, tmp_path / "out")
        pattern = (
            rf"{re.escape(str(path))}: {version} 60 is too new: onnxruntime [\d.]+ goes up to \d+: export the model .*"
        )
        assert re.fullmatch(pattern, line)

    def test_rejects_open_dimensions_and_contradicting_shapes(self, tmp_path: Path, refused: Refused) -> None:
        proto = network()
        proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
        path = tmp_path / "open.onnx"
        onnx.save(proto, path)
        line = refused(1, "compile", path, *COMPILE, tmp_path / "out")
        remedy = "give it as --shape x=1x3x12x12"
        assert line == f"infer-shapes: dimension 0 ('N') of input 'x' is open: {remedy}"
        line = refused(2, "compile", path, "--shape", "input=1x3x12x12", *COMPILE, tmp_path / "out")
        assert line == "shape: the model has no input 'input' (known: x)"
        line = refused(2, "compile", path, "--shape", "x=1x5x12x12", *COMPILE, tmp_path / "out")
        assert "dimension 1 is 5, but 3 in the model" in line

    def test_rejects_unknown_operator_and_missing_tensor(self, tmp_path: Path, refused: Refused) -> None:
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

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda p: p.graph.node[2].attribute.append(helper.make_attribute("group", 0)), "Conv 'y': group is [0]"),
            (
                lambda p: p.graph.node[2].attribute.append(helper.make_attribute("group", 3)),
                "group is 3, which does not fit 16 channels",
            ),
            (lambda p: p.graph.initializer[0].dims.__setitem__(0, 17), "'w1' has 1728 bytes of data, but its shape"),
            (lambda p: p.graph.initializer[0].dims.__setitem__(0, -1), "'w1' has 1728 bytes of data, but its shape"),
            (lambda p: p.graph.initializer.append(p.graph.initializer[0]), "two initializers have the name 'w1'"),
            (
                lambda p: p.graph.initializer.pop(),
                "reads 'w2', which is neither an input nor a weight nor the output of a node: ",
            ),
            (lambda p: p.graph.node[1].input.__setitem__(0, "r"), "these nodes form a cycle: "),
            (lambda p: p.graph.input.pop(), "odd.onnx: not a valid ONNX model: Conv "),
            (lambda p: p.graph.node[1].attribute.add(name="no", type=2), "not a valid ONNX model: Relu 'r': Unrec"),
            (
                lambda p: p.graph.ClearField("output"),
                "odd.onnx: the model has no output: export",
            ),
            (lambda p: p.ClearField("graph"), "not an ONNX model (it has no graph or no opset)"),
            (lambda p: setattr(p.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", -1), "is open: give it as"),
            (lambda p: setattr(p.graph.input[0].type.tensor_type.shape.dim[2], "dim_value", 2**40), "and has 4.29 GB"),
        ],
    )
    def test_rejects_inconsistent_model(
        self, tmp_path: Path, refused: Refused, change: Callable[[onnx.ModelProto], Any], message: str
    ) -> None:
        proto, path = network(), tmp_path / "odd.onnx"
        change(proto)
        path.write_bytes(proto.SerializeToString())
        for strategy in ("single", "modnn"):
            assert message in refused(1, "compile", path, "--strategy", strategy, *COMPILE, tmp_path / "out")

    @pytest.mark.parametrize("name", ["größe/x", "../../etc/passwd", "a b", "\n\r", "💥", "x" * 5000, ".", "'", '"'])
    def test_accepts_any_tensor_and_node_name(
        self, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Names in the model are not used as file names, and the artifact states the original name of the input."""
        proto, path = network(), tmp_path / "model.onnx"
        proto.graph.input[0].name = proto.graph.node[0].input[0] = name
        proto.graph.node[0].name = proto.graph.node[2].name = name
        onnx.save(proto, path)
        assert main(["compile", str(path), *COMPILE, str(tmp_path / "out")]) == 0
        assert {entry.name for entry in tmp_path.iterdir()} == {"model.onnx", "out"}
        capsys.readouterr()
        document = json.loads((tmp_path / "out" / "artifact.json").read_text())
        assert [value["name"] for value in document["inputs"]] == [name]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"location": "../model.onnx"}, "is not a file in the model's directory"),
            ({"location": "/etc/passwd"}, "is not a file in the model's directory"),
            ({"location": ""}, "is not a file in the model's directory"),
            ({"location": "loop"}, "there is no file"),
            ({"location": "directory"}, "there is no file"),
            ({"offset": "-4"}, "bytes -4 to 1724 are outside the 4032 bytes of"),
            ({"offset": "x"}, "has an invalid offset, length or type"),
            ({"offset": "9" * 30}, "are outside the 4032 bytes of"),
            ({"length": "3"}, "'w1' has 3 bytes of data, but its shape 16x3x3x3 needs 1728"),
        ],
    )
    def test_rejects_invalid_reference_to_external_data(
        self, tmp_path: Path, refused: Refused, change: dict[str, str], message: str
    ) -> None:
        path = tmp_path / "model.onnx"
        onnx.save(network(), path, save_as_external_data=True, location="model.data", size_threshold=0)
        (tmp_path / "loop").symlink_to("loop")
        (tmp_path / "directory").mkdir()
        proto = onnx.load(path, load_external_data=False)
        for entry in proto.graph.initializer[0].external_data:
            entry.value = change.get(entry.key, entry.value)
        path.write_bytes(proto.SerializeToString())
        line = refused(1, "compile", path, *COMPILE, tmp_path / "out")
        assert line.startswith(f"{path}: ") and "'w1'" in line and message in line

    def test_rejects_symbolic_link_to_itself(self, model: Path, tmp_path: Path, refused: Refused) -> None:
        loop = tmp_path / "loop"
        loop.symlink_to(loop)
        for arguments in (
            ("compile", loop, *COMPILE, tmp_path / "out"),
            ("compile", model, "--platform", loop, "-o", tmp_path / "out"),
            ("compile", model, "--plan", loop, *COMPILE, tmp_path / "out"),
        ):
            line = refused(1, *arguments)
            assert line.startswith(f"{loop}: ") and "Too many levels of symbolic links" in line

    def test_model_without_elements_compiles(self, tmp_path: Path) -> None:
        proto, path = network(), tmp_path / "none.onnx"
        proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 0
        onnx.save(proto, path)
        assert main(["compile", str(path), *COMPILE, str(tmp_path / "out")]) == 0
        assert main(["verify", str(tmp_path / "out")]) == 0
