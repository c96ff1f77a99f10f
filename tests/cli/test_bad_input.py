"""Wrong models, plans, inputs and places on the command line: one clear line, exit code 1 or 2, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support.refusing import PLATFORM, Refused, files, fill, image, network, small_disk

from dicompiler.base.errors import DicompilerError
from dicompiler.cli import main
from dicompiler.ir.onnx.model import Model
from dicompiler.verify.executor import run_model

COMPILE = ("--platform", "rpi4x2", "-o")
SINGLE = ("--platform", "rpi4x2", "--strategy", "single", "-o")


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
    assert main(["compile", str(place / "model.onnx"), "--strategy", "modnn", *COMPILE, str(place / "out")]) == 0
    return place / "out"


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

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda p: p.graph.node[2].attribute.append(helper.make_attribute("group", 0)), "0 groups do not fit"),
            (lambda p: p.graph.node[2].attribute.append(helper.make_attribute("group", 3)), "3 groups do not fit"),
            (lambda p: p.graph.initializer[0].dims.__setitem__(0, 17), "'w1' has 1728 bytes of data where its shape"),
            (lambda p: p.graph.initializer[0].dims.__setitem__(0, -1), "'w1' has 1728 bytes of data where its shape"),
            (lambda p: p.graph.initializer.append(p.graph.initializer[0]), "two initializers are called 'w1'"),
            (lambda p: p.graph.initializer.pop(), "the model: not a legal ONNX model: "),
            (lambda p: p.graph.node[1].input.__setitem__(0, "r"), "the model: not a legal ONNX model: "),
            (lambda p: p.graph.input.pop(), "the model: not a legal ONNX model: "),
            (lambda p: p.ClearField("graph"), "not an ONNX model (it has no graph or no opset)"),
            (lambda p: setattr(p.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", -1), "is open: give it as"),
            (lambda p: setattr(p.graph.input[0].type.tensor_type.shape.dim[2], "dim_value", 2**40), "and has 4.29 GB"),
        ],
    )
    def test_a_model_that_contradicts_itself(
        self, tmp_path: Path, refused: Refused, change: Callable[[onnx.ModelProto], Any], words: str
    ) -> None:
        proto, path = network(), tmp_path / "odd.onnx"
        change(proto)
        path.write_bytes(proto.SerializeToString())
        for strategy in ("single", "modnn"):
            assert words in refused(1, "compile", path, "--strategy", strategy, *COMPILE, tmp_path / "out")

    @pytest.mark.parametrize("name", ["größe/x", "../../etc/passwd", "a b", "\n\r", "💥", "x" * 5000, ".", "'", '"'])
    def test_names_may_be_anything(self, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        """They are no file names: nothing is written elsewhere, and every name comes back as it was."""
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
        ("change", "words"),
        [
            ({"location": "../model.onnx"}, "is not a file in the model's directory"),
            ({"location": "/etc/passwd"}, "is not a file in the model's directory"),
            ({"location": ""}, "is not a file in the model's directory"),
            ({"location": "loop"}, "there is no file"),
            ({"location": "directory"}, "there is no file"),
            ({"offset": "-4"}, "bytes -4 to 1724 are not in"),
            ({"offset": "x"}, "an offset, length or type that is no number"),
            ({"offset": "9" * 30}, "are not in"),
            ({"length": "3"}, "'w1' has 3 bytes of data where its shape 16x3x3x3 needs 1728"),
        ],
    )
    def test_external_data_that_is_not_there(
        self, tmp_path: Path, refused: Refused, change: dict[str, str], words: str
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
        assert line.startswith(f"{path}: ") and "'w1'" in line and words in line

    def test_a_link_that_leads_to_itself(self, model: Path, tmp_path: Path, refused: Refused) -> None:
        loop = tmp_path / "loop"
        loop.symlink_to(loop)
        for arguments in (
            ("compile", loop, *COMPILE, tmp_path / "out"),
            ("compile", model, "--platform", loop, "-o", tmp_path / "out"),
            ("compile", model, "--plan", loop, *COMPILE, tmp_path / "out"),
        ):
            line = refused(1, *arguments)
            assert line.startswith(f"{loop}: ") and "Too many levels of symbolic links" in line

    def test_a_model_without_elements_compiles(self, tmp_path: Path) -> None:
        proto, path = network(), tmp_path / "none.onnx"
        proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 0
        onnx.save(proto, path)
        assert main(["compile", str(path), *COMPILE, str(tmp_path / "out")]) == 0
        assert main(["verify", str(tmp_path / "out")]) == 0


PLATFORMS = {
    "no bandwidth": ('bandwidth = "100 Mbit/s"', "", "network: missing key 'bandwidth' (required: kind, bandwidth)"),
    "unknown key": ("bandwidth", "bandwith", "network: unknown key 'bandwith' (did you mean 'bandwidth'?)"),
    "unknown table": ("[network]", "[networks]", "unknown key 'networks' (did you mean 'network'?)"),
    "negative rate": ('"1 GFLOP/s"', '"-1 GFLOP/s"', "device[0].rate: '-1 GFLOP/s': a compute rate must be zero or"),
    "negative bandwidth": ('"100 Mbit/s"', '"-1 Mbit/s"', "network.bandwidth: '-1 Mbit/s': a bandwidth must be more"),
    "no unit": ('"1 GFLOP/s"', '"1"', "device[0].rate: '1' has no unit (allowed units: FLOP/s,"),
    "a number": ('"1 GFLOP/s"', "1e9", "device[0].rate: expected a text, got 1000000000.0"),
    "another unit": ('"100 Mbit/s"', '"100 GB"', "network.bandwidth: unknown unit 'GB' of a bandwidth"),
    "NaN": ('"1 GFLOP/s"', '"nan GFLOP/s"', "device[0].rate: 'nan GFLOP/s' is not a number with a unit"),
    "infinite": ('"1 GFLOP/s"', '"inf GFLOP/s"', "device[0].rate: 'inf GFLOP/s' is not a number with a unit"),
    "too large": ('"1 GiB"', '"1e400 GiB"', "host[0].memory: '1e400 GiB' is too large for a memory size"),
    "no memory": ('"1 GiB"', '"0 GiB"', "host[0].memory: '0 GiB': a memory size must be more than zero"),
    "key twice": ('name = "lab"', 'name = "lab"\nname = "x"', "a key stands twice, or [x] where [[x]] is meant"),
    "one bracket": ("[[host]]", "[host]", "host: expected a list, got an object"),
    "no device": ('[[device]]\nname = "a"\nrate = "1 GFLOP/s"', "", "missing key 'device' (required: host, device,"),
    "nobody computes": ('"1 GFLOP/s"', '"0 FLOP/s"', "no device computes: give at least one a rate above 0 FLOP/s"),
    "half a core": ('rate = "1 GFLOP/s"', 'rate = "1 GFLOP/s"\ncores = 1.5', "cores: expected a whole number, got 1.5"),
    "cores as 2.0": (
        'rate = "1 GFLOP/s"',
        'rate = "1 GFLOP/s"\ncores = 2.0',
        "cores: expected a whole number, got 2.0",
    ),
    "slash": ('[[device]]\nname = "a"', '[[device]]\nname = "../a"', 'device[0].name: "../a" has a character that is'),
    "other host": ('[[device]]\nname = "a"', '[[device]]\nname = "b"', "device[0].host: unknown host 'b' (known: a)"),
}


class TestPlatforms:
    """Platform files that describe no cluster."""

    @pytest.mark.parametrize("case", PLATFORMS)
    def test_a_mistake_in_a_platform(self, model: Path, tmp_path: Path, refused: Refused, case: str) -> None:
        old, new, words = PLATFORMS[case]
        assert PLATFORM.count(old) == 1 or case == "other host"
        path = tmp_path / "lab.toml"
        path.write_text(PLATFORM.replace(old, new))
        line = refused(1, "compile", model, "--platform", path, "-o", tmp_path / "out")
        assert line.startswith(f"{path}: ") and words in line

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "missing key 'host'"),
            (PLATFORM.encode("utf-16"), "cannot be read: not UTF-8 text: save it as such"),
            (b"\0\1", "not TOML"),
            (b"PK\x03\x04", "not TOML"),
            (None, "cannot be read: Is a directory"),
        ],
    )
    def test_a_file_that_is_no_platform(
        self, model: Path, tmp_path: Path, refused: Refused, content: bytes | None, words: str
    ) -> None:
        path = tmp_path / "lab.toml"
        path.mkdir() if content is None else path.write_bytes(content)
        line = refused(1, "compile", model, "--platform", path, "-o", tmp_path / "out")
        assert line.startswith(f"{path}: {words}")

    def test_a_byte_order_mark_is_no_mistake(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "lab.toml").write_text(PLATFORM, encoding="utf-8-sig")
        command = ["compile", str(model), "--platform", str(tmp_path / "lab.toml"), "-o", str(tmp_path / "out")]
        assert main(command) == 0

    def test_a_platform_without_a_name(self, model: Path, tmp_path: Path, refused: Refused) -> None:
        line = refused(1, "compile", model, "--platform", tmp_path / "no.toml", "-o", tmp_path / "out")
        assert line.startswith(f"{tmp_path / 'no.toml'}: no such platform file")
        line = refused(2, "compile", model, "--platform", "rpi4x0", "-o", tmp_path / "out")
        assert line.startswith("unknown platform 'rpi4x0' (did you mean 'rpi4x4'?): give a TOML file or one of ")
        line = refused(2, "compile", model, "-o", tmp_path / "out")
        assert line == "compile: no platform: give a TOML file or a built-in one such as rpi4x4 (--platform)"


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

    @pytest.mark.parametrize("room", ["16k", "48k", "80k"])
    def test_a_disk_that_fills_up(self, model: Path, tmp_path: Path, room: str, refused: Refused) -> None:
        with small_disk(tmp_path / "disk", room) as disk:
            line = refused(1, "compile", model, *SINGLE, disk / "out")
            assert line == f"{disk / 'out'}: it cannot be written: No space left on device"

    def test_a_disk_that_is_full(self, model: Path, artifact: Path, tmp_path: Path, refused: Refused) -> None:
        opt = ("opt", model, "-p", "infer-shapes,form-layers,tile-height{layers=h}")
        with small_disk(tmp_path / "disk", "64k") as disk:
            fill(disk)
            for arguments, file, words in (
                (("plan", model, *SINGLE, disk / "plan.json"), "plan.json", "it cannot be written"),
                ((*opt, "-o", disk / "y.onnx"), "y.onnx", "cannot write the model"),
                ((*opt, "--save-plan", disk / "p.json", "-o", tmp_path / "y.onnx"), "p.json", "it cannot be written"),
                (("run", artifact, "--outputs", disk / "y.npz"), "y.npz", "it cannot be written"),
                (("keys", artifact, "-o", disk / "keys"), "keys", "keys cannot be written"),
            ):
                assert refused(1, *arguments) == f"{disk / file}: {words}: No space left on device"

    def test_external_weights_that_do_not_fit(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk", "64k") as disk:
            model = Model.load(network())
            model.save(disk / "y.onnx", external=True)
            before = dict(files(disk))
            fill(disk)
            with pytest.raises(DicompilerError, match="No space left on device"):
                model.save(disk / "y.onnx", external=True)
            (disk / "filler").unlink()
            assert dict(files(disk)) == before

    def test_a_place_that_cannot_be_written(
        self, model: Path, artifact: Path, tmp_path: Path, refused: Refused
    ) -> None:
        (tmp_path / "directory").mkdir()
        for place, words in (
            (tmp_path / "directory", "it is a directory: give the name of a file"),
            (model / "y", f"there is no directory {str(model)!r}"),
            (tmp_path / "none" / "y", f"there is no directory {str(tmp_path / 'none')!r}"),
            (tmp_path / ("x" * 300), "it cannot be written: File name too long: choose another place"),
            (Path("/proc/y"), "it cannot be written: No such file or directory: choose another place"),
        ):
            opt = ("opt", model, "-p", "infer-shapes,form-layers,tile-height{layers=h}")
            for arguments in (
                ("plan", model, *COMPILE, place),
                (*opt, "-o", place),
                (*opt, "-o", tmp_path / "y.onnx", "--save-plan", place),
                ("run", artifact, "--outputs", place),
            ):
                assert refused(1, *arguments) == f"{place}: {words}"

    def test_a_read_only_file_system(self, model: Path, tmp_path: Path, refused: Refused) -> None:
        with small_disk(tmp_path / "disk", "64k") as disk:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            for command in ("compile", "plan"):
                line = refused(1, command, model, *COMPILE, disk / "out")
                assert line == f"{disk / 'out'}: it cannot be written: Read-only file system: choose another place"

    def test_one_place_for_two_files(self, model: Path, tmp_path: Path, refused: Refused) -> None:
        opt = ("opt", model, "-p", "infer-shapes,form-layers,tile-height{layers=h}", "-o", tmp_path / "y")
        line = refused(2, *opt, "--save-plan", tmp_path / "y")
        assert line.startswith("opt: --output and --save-plan are both ")
        line = refused(1, *opt, "--dump-after-all", model)
        assert line == f"{model}: it is a file: give the name of a directory"

    @pytest.mark.parametrize("room", [0, 3000, 9000])
    def test_a_limit_on_files(self, model: Path, tmp_path: Path, room: int) -> None:
        before = dict(files(tmp_path))
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
        assert dict(files(tmp_path)) == before

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
        assert re.match(r"plan: host tiny needs [\d.]+ MB .* and has 8.19 kB: .* layer '[hy]'", line), line

    def test_a_plan_that_is_no_plan(self, model: Path, tmp_path: Path, refused: Refused) -> None:
        plan = tmp_path / "plan.json"
        for text in ("", "[]", '{"format": "dicompiler.plan/2"}', '{"format": "dicompiler.plan/1", "layers": {'):
            plan.write_text(text)
            assert refused(1, "compile", model, "--plan", plan, *COMPILE, tmp_path / "out").startswith(str(plan))
        line = refused(1, "compile", model, "--plan", tmp_path / "none.json", *COMPILE, tmp_path / "out")
        assert line == f"{tmp_path / 'none.json'}: no such file"


FULL, TOP, BOTTOM = ([[0, 1], [0, 4], rows, [0, 12]] for rows in ([0, 12], [0, 6], [7, 12]))
PLANS: dict[str, tuple[Any, str]] = {
    "uncovered": (("y", (TOP, BOTTOM)), "plan: nobody computes [0:1, 0:4, 6:7, 0:12] of 'y', which 'z' on pi02 reads"),
    "covered twice": (("y", (FULL, FULL)), "layers.y[1]: the same part stands there twice: remove one"),
    "outside": (("y", ([*FULL[:2], [0, 13], [0, 12]],)), "is empty or outside the layer's output (1, 4, 12, 12)"),
    "huge": (("y", ([*FULL[:2], [0, 10**30], [0, 12]],)), "is empty or outside the layer's output (1, 4, 12, 12)"),
    "backwards": (("y", ([*FULL[:2], [6, 0], [0, 12]],)), "is empty or outside the layer's output (1, 4, 12, 12)"),
    "negative": (("y", ([*FULL[:2], [-3, 6], [0, 12]],)), "layers.y[0].region[2][0]: -3 is too small (allowed: 0 or"),
    "half": (("y", ([*FULL[:2], [0.5, 6], [0, 12]],)), "layers.y[0].region[2][0]: expected a whole number, got 0.5"),
    "12.0": (("y", ([*FULL[:3], [0, 12.0]],)), "layers.y[0].region[3][1]: expected a whole number, got 12.0"),
    "true": (("y", ([*FULL[:3], [0, True]],)), "layers.y[0].region[3][1]: expected a whole number, got true"),
    "rank": (("y", (FULL[:3],)), "layers.y[0].region: 3 intervals for an output of rank 4 (1, 4, 12, 12)"),
    "text": (("y", ("whole",)), 'layers.y[0].region: "whole" is not allowed (allowed: "all" or a list)'),
    "no parts": (("y", ()), "layers.y: a list of 0 entries is too short (allowed: 1 or more entries)"),
    "overlapping ranges": (("y", ("all",), [0, 9], [8, 16]), "plan: layers.y: reduce ranges overlap at 8"),
    "gap between ranges": (("y", ("all",), [0, 7], [8, 16]), "plan: layers.y: reduce ranges leave a gap at 7"),
    "range outside": (("y", ("all",), [0, 8], [8, 17]), "plan: layers.y[2].reduce: [8, 17] is empty or outside 0..16"),
    "nobody merges": (("y", (), [0, 8], [8, 16]), "plan: layers.y: partial sums but no merger: add a part without"),
    "no range here": (("z", ("all",), [0, 2], [2, 4]), "plan: layers.z[1].reduce: MaxPool here has no input channels"),
}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan that fits, as text, for no network in particular."""
    place = tmp_path_factory.mktemp("plan")
    onnx.save(network(), place / "model.onnx")
    path = str(place / "plan.json")
    command = ["plan", str(place / "model.onnx"), "--platform", "rpi4x2", "--strategy", "modnn", "-o", path]
    assert main(command) == 0
    found = json.loads((place / "plan.json").read_text())
    found.pop("network")
    return json.dumps(found)


class TestMorePlans:
    """Plans with a mistake in one place."""

    @pytest.mark.parametrize("case", PLANS)
    def test_regions_and_ranges(self, model: Path, tmp_path: Path, refused: Refused, document: str, case: str) -> None:
        (layer, regions, *ranges), words = PLANS[case]
        parts = [{"device": "pi01", "region": region} for region in regions]
        parts += [{"device": "pi02", "region": "all", "reduce": reduce} for reduce in ranges]
        changed = json.loads(document)
        changed["layers"][layer] = parts
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(changed))
        line = refused(1, "compile", model, "--plan", path, *COMPILE, tmp_path / "out")
        assert words in line and (line.startswith((f"{path}: ", "plan: ")))

    def test_what_overlaps_elsewhere_is_computed_twice_and_right(
        self, model: Path, tmp_path: Path, document: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        changed = json.loads(document)
        lower = [*FULL[:2], [3, 12], FULL[3]]
        changed["layers"]["y"] = [{"device": "pi01", "region": FULL}, {"device": "pi02", "region": lower}]
        (tmp_path / "plan.json").write_text(json.dumps(changed))
        command = ["compile", str(model), "--plan", str(tmp_path / "plan.json"), *COMPILE, str(tmp_path / "out")]
        assert main(command) == 0
        assert main(["verify", str(tmp_path / "out")]) == 0
        capsys.readouterr()

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"source": ["cam"]}, "rpi4x2: unknown device 'cam' (known: pi01, pi02)"),
            ({"source": []}, "source: a list of 0 entries is too short"),
            ({"sink": ["pi01", "pi01"]}, "holds an entry twice (allowed: each once)"),
            ({"sink": "pi01"}, 'sink: expected a list, got "pi01"'),
            ({"sinks": []}, "unknown key 'sinks' (did you mean 'sink'?)"),
            ({"network": "abc"}, "plan: it was made for another network"),
            ({"layers": []}, "layers: expected an object, got the list []"),
        ],
    )
    def test_everything_else(
        self, model: Path, tmp_path: Path, refused: Refused, document: str, change: dict[str, Any], words: str
    ) -> None:
        path = tmp_path / "plan.json"
        path.write_text(json.dumps({**json.loads(document), **change}))
        assert words in refused(1, "compile", model, "--plan", path, *COMPILE, tmp_path / "out")

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"\0\0", "not JSON"),
            (b'{"format": NaN}', "NaN is not a JSON number"),
            (b'{"a": 1, "a": 2}', "key 'a' stands twice in one object: remove one"),
            (b"[" * 100_000, "nested too deeply"),
            (b'{"lane": ' + b"9" * 10_000 + b"}", "a number of 10000 digits is too long"),
            ("{}".encode("utf-16"), "not UTF-8 text: byte 0 is not valid"),
            ("{}".encode("utf-8-sig"), "missing key 'format'"),
        ],
    )
    def test_a_file_that_is_no_plan(
        self, model: Path, tmp_path: Path, refused: Refused, content: bytes, words: str
    ) -> None:
        path = tmp_path / "plan.json"
        path.write_bytes(content)
        line = refused(1, "compile", model, "--plan", path, *COMPILE, tmp_path / "out")
        assert line.startswith(str(path)) and words in line

    @pytest.mark.parametrize(
        ("code", "text", "words"),
        [
            (1, "tile-height{layers=h parts=13}", "tile-height: layer 'h' has 12 rows, too few for 13 parts"),
            (1, "lop{layers=h parts=17}", "lop: layer 'h' has 16 output channels, too few for 17 parts"),
            (1, "tile-height{layers=fc}", "layer 'fc' cannot be cut by height: it can be cut by: channel"),
            (1, "lop{layers=last}", "layer 'last' cannot be cut by channel: it can be cut by: nothing"),
            (1, "lip{layers=z}", "lip: layer 'z' cannot be cut by input channels"),
            (2, "tile-height{layer=h}", "unknown option 'layer' of 'tile-height' (did you mean 'layers'?)"),
            (2, "tile-heigth{layers=h}", "unknown pass 'tile-heigth' (did you mean 'tile-height'?)"),
            (2, "tile-height{layers=q}", "tile-height: layers: no layer 'q' (known: fc, flat, h, last, y, z)"),
            (2, "tile-height{layers=h parts=1.5}", "option 'parts' of 'tile-height': expected int, got 1.5"),
            (2, "tile-height{layers=h devices=pi09}", "the platform has no device 'pi09' (did you mean 'pi02'?)"),
            (2, "tile-height{layers=h", "expected an option or '}'"),
        ],
    )
    def test_a_split_that_cannot_be(
        self, model: Path, tmp_path: Path, refused: Refused, code: int, text: str, words: str
    ) -> None:
        proto = network()
        weight = numpy_helper.from_array(np.ones((144, 5), np.float32), "w3")
        proto.graph.initializer.append(weight)
        proto.graph.node.append(helper.make_node("Flatten", ["z"], ["f"], "flat"))
        proto.graph.node.append(helper.make_node("Gemm", ["f", "w3"], ["g"], "fc"))
        proto.graph.node.append(helper.make_node("Hardmax", ["g"], ["s"], "last"))
        proto.graph.output.append(helper.make_tensor_value_info("s", onnx.TensorProto.FLOAT, (1, 5)))
        onnx.save(proto, model)
        pipeline = f"infer-shapes,form-layers,{text}"
        line = refused(code, "opt", model, "-p", pipeline, "--platform", "rpi4x2", "-o", tmp_path / "y.onnx")
        assert words in line


class TestCommandLines:
    """Options that do not exist, or not with that value."""

    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            ("complie m", "unknown command 'complie' (did you mean 'compile'?)"),
            ("compile m -o out --platfrom rpi4x2", "compile: unknown option '--platfrom' (did you mean '--platform'?)"),
            ("compile m -o out --platform rpi4x2 extra", "compile: got unexpected extra argument (extra)"),
            ("compile m -o out --platform rpi4x2 --strategy modn", "unknown strategy 'modn' (did you mean 'modnn'?)"),
            ("compile m -o out --platform rpi4x2 --target socket", "unknown target 'socket' (did you mean 'sockets'?)"),
            ("compile m -o out --platform rpi4x2 --target sockets{threads=-1}", "'sockets': threads must be 0 or more"),
            ("compile m -o out --platform rpi4x2 --cost analytc", "unknown cost model 'analytc' (did you mean"),
            ("compile m -o out --platform rpi4x2 --objective fast", "unknown objective 'fast' (known: communication,"),
            ("compile m -o out --platform rpi4x2 --objective latency+latency", "latency stands twice: give it one"),
            ("compile m -o out --platform rpi4x2 --objective latency+0*energy", "weight '0' is no number over 0"),
            ("compile m -o out --platform rpi4x2 --shape x", "shape 'x' is not of the form input=1x3x224x224"),
            ("compile m -o out --platform rpi4x2 --shape x=1x99999999999999999999", "is too large for a dimension"),
            ("compile m -o out --platform rpi4x2 --strategy single --plan p", "compile: --strategy and --plan exclude"),
            ("run a --frames 0", "run: invalid value for '--frames': 0 is not in the range"),
            (
                "run a --frames 99999999999999999999",
                "run: invalid value for '--frames': 99999999999999999999 is not in",
            ),
            ("run a --frames x", "run: invalid value for '--frames': 'x' is not a whole number"),
            ("run a --in-flight 0", "run: invalid value for '--in-flight': 0 is not in the range"),
            (
                "run a --timeout nan",
                "run: invalid value for '--timeout': 'nan' is no time",
            ),
            ("run a --timeout 1e300", "run: invalid value for '--timeout': 1e+300 is not in the range"),
            ("run a --timeout soon", "run: invalid value for '--timeout': 'soon' is not a number"),
            ("run a --heartbeat nan", "run: the heartbeat must be between 0.05 and 3600 s, not nan"),
            ("run a --elsewhere pi09", "run: there is no device 'pi09' (did you mean 'pi02'?)"),
            ("run a --listen nowhere", "run: 'nowhere' is no address: expected HOST:PORT"),
            ("run a --keys none", "run: keys: none/coordinator/ca.pem is missing: make keys with 'dicompiler keys'"),
            ("keys a --days 0", "keys: invalid value for '--days': 0 is not in the range"),
            ("list passs", "list: unknown kind 'passs' (did you mean 'passes'?)"),
            ("demo --network resnet5", "unknown network 'resnet5' (did you mean 'resnet50'?)"),
        ],
    )
    def test_a_wrong_word(
        self,
        model: Path,
        artifact: Path,
        tmp_path: Path,
        refused: Refused,
        monkeypatch: pytest.MonkeyPatch,
        arguments: str,
        line: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        names = {"m": str(model), "a": str(artifact)}
        assert line in refused(2, *(names.get(word, word) for word in arguments.split()))

    @pytest.mark.parametrize("command", ["run", "verify", "keys"])
    def test_what_is_no_artifact(self, model: Path, tmp_path: Path, refused: Refused, command: str) -> None:
        for place in (tmp_path, model, tmp_path / "none"):
            assert refused(1, command, place) == f"{place}: no artifact of dicompiler: compile a model into it first"


class TestInputs:
    """What a compiled network is given."""

    IMAGE = image()

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

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "not an npz file of plain arrays: No data left in file"),
            (b"hello", "not an npz file of plain arrays: it is another kind of file: write it with numpy.savez"),
            (b"PK\x03\x04 and no more", "not an npz file of plain arrays: File is not a zip file"),
            ({"x.npy": b"garbage"}, "'x' is no array: write the file with numpy.savez"),
            ({"x.txt": b"1 2 3"}, "'x.txt' is no array: write the file with numpy.savez"),
            (np.array([{}], object), "not an npz file of plain arrays: it holds Python objects"),
            ((9999999999, 99999), "not an npz file of plain arrays: Unable to allocate"),
            (None, "cannot be read: Is a directory"),
        ],
    )
    def test_a_file_that_holds_no_arrays(
        self, artifact: Path, tmp_path: Path, refused: Refused, content: Any, words: str
    ) -> None:
        path = tmp_path / "x.npz"
        if content is None:
            path.mkdir()
        elif isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, np.ndarray):
            np.savez(path, x=content)
        else:
            if isinstance(content, tuple):  # an array with no data behind its header
                header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {content}, }}".ljust(117) + "\n"
                content = {"x.npy": b"\x93NUMPY\x01\x00v\x00" + header.encode()}
            with zipfile.ZipFile(path, "w") as archive:
                for name, data in content.items():
                    archive.writestr(name, data)
        line = refused(1, "run", artifact, "--inputs", path, "--outputs", tmp_path / "y.npz")
        assert line.startswith(f"{path}: ") and words in line

    def test_other_words_for_the_same_array(self, artifact: Path, tmp_path: Path, refused: Refused) -> None:
        np.savez(tmp_path / "x.npz", x=np.asfortranarray(self.IMAGE))
        assert main(["run", str(artifact), "--inputs", str(tmp_path / "x.npz")]) == 0
        for array in (self.IMAGE.astype(">f4"), np.array("hello"), self.IMAGE.astype([("a", "<f4")])):
            np.savez(tmp_path / "x.npz", x=array)
            line = refused(1, "run", artifact, "--inputs", tmp_path / "x.npz")
            assert line == f"input 'x' must be of type float32, not {array.dtype}"

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
