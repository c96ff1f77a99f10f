"""`dicompiler compile` rejects plans that do not fit the network, with file, key and cause in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support.refusing import COMPILE, Refused, network

from dicompiler.cli import main


class TestPlans:
    """Plans for another network or for other devices."""

    def plan(self, model: Path, tmp_path: Path) -> Path:
        """Write a plan for the model and return its path."""
        path = tmp_path / "plan.json"
        assert main(["plan", str(model), "--platform", "rpi4x2", "--strategy", "modnn", "-o", str(path)]) == 0
        return path

    def test_rejects_plan_for_another_network(self, model: Path, tmp_path: Path, refused: Refused) -> None:
        plan = self.plan(model, tmp_path)
        proto = network()
        proto.graph.node[1].op_type = "Sigmoid"
        onnx.save(proto, model)
        line = refused(1, "compile", model, "--plan", plan, *COMPILE, tmp_path / "out")
        remedy = "create a plan with 'dicompiler plan'"
        assert line == f"{plan}: the plan was made for a network with another structure: {remedy}"

    def test_accepts_plan_after_weights_change(self, model: Path, tmp_path: Path) -> None:
        plan = self.plan(model, tmp_path)
        proto = network()
        for tensor in proto.graph.initializer:
            tensor.raw_data = (2 * numpy_helper.to_array(tensor)).tobytes()
        onnx.save(proto, model)
        assert main(["compile", str(model), "--plan", str(plan), *COMPILE, str(tmp_path / "out")]) == 0

    def test_rejects_plan_without_a_layer(self, model: Path, tmp_path: Path, refused: Refused) -> None:
        plan = self.plan(model, tmp_path)
        document = json.loads(plan.read_text())
        document["layers"]["hh"] = document["layers"].pop("h")
        document.pop("model_digest")
        plan.write_text(json.dumps(document))
        line = refused(1, "compile", model, "--plan", plan, *COMPILE, tmp_path / "out")
        assert "'h'" in line and "plan" in line

    def test_rejects_plan_that_exceeds_memory_of_a_host(self, model: Path, tmp_path: Path, refused: Refused) -> None:
        platform = tmp_path / "small.toml"
        platform.write_text(
            'format = "dicompiler.platform/2"\nname = "small"\n'
            '[network]\nkind = "switch"\nbandwidth = "100 Mbit/s"\nlatency = "0.5 ms"\n'
            '[[host]]\nname = "tiny"\nmemory = "8 KiB"\n[[device]]\nname = "cpu"\nhost = "tiny"\nrate = "1 GFLOP/s"\n'
        )
        line = refused(1, "compile", model, "--platform", platform, "--strategy", "single", "-o", tmp_path / "out")
        remedy = "use hosts with more memory, because the runtime alone does not fit"
        assert re.match(rf"plan: host tiny needs [\d.]+ MB .* and has 8.19 kB .*: {remedy}", line), line
        line = refused(1, "compile", model, "--platform", "nano33x2", "--strategy", "single", "-o", tmp_path / "out")
        assert line.endswith(": use --target tflm, or hosts" + remedy.removeprefix("use hosts")), line

    def test_rejects_an_invalid_plan(self, model: Path, tmp_path: Path, refused: Refused) -> None:
        plan = tmp_path / "plan.json"
        for text in ("", "[]", '{"format": "dicompiler.plan/2"}', '{"format": "dicompiler.plan/2", "layers": {'):
            plan.write_text(text)
            assert refused(1, "compile", model, "--plan", plan, *COMPILE, tmp_path / "out").startswith(str(plan))
        line = refused(1, "compile", model, "--plan", tmp_path / "none.json", *COMPILE, tmp_path / "out")
        assert line == f"{tmp_path / 'none.json'}: no such file"


FULL, TOP, BOTTOM = ([[0, 1], [0, 4], rows, [0, 12]] for rows in ([0, 12], [0, 6], [7, 12]))


PLANS: dict[str, tuple[Any, str]] = {
    "uncovered": (
        ("y", (TOP, BOTTOM)),
        "no part computes the region [0:1, 0:4, 6:7, 0:12] of 'y', which 'z' on pi02 reads",
    ),
    "covered twice": (("y", (FULL, FULL)), "layers.y[1]: the part is listed twice: remove one"),
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
    "overlapping ranges": (("y", ("all",), [0, 9], [8, 16]), "layers.y: reduce ranges overlap at 8"),
    "gap between ranges": (("y", ("all",), [0, 7], [8, 16]), "layers.y: reduce ranges leave a gap at 7"),
    "range outside": (("y", ("all",), [0, 8], [8, 17]), "layers.y[2].reduce: [8, 17] is empty or outside 0..16"),
    "nobody merges": (
        ("y", (), [0, 8], [8, 16]),
        "layers.y: all parts are partial sums, and no part merges them: append a part without",
    ),
    "no range here": (("z", ("all",), [0, 2], [2, 4]), "layers.z[1].reduce: this MaxPool has no input channels"),
}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the text of a valid plan without `model_digest`, so that changed networks accept the plan."""
    directory = tmp_path_factory.mktemp("plan")
    onnx.save(network(), directory / "model.onnx")
    path = str(directory / "plan.json")
    command = ["plan", str(directory / "model.onnx"), "--platform", "rpi4x2", "--strategy", "modnn", "-o", path]
    assert main(command) == 0
    plan_document = json.loads((directory / "plan.json").read_text())
    plan_document.pop("model_digest")
    return json.dumps(plan_document)


class TestMorePlans:
    """Plans with a mistake in one place."""

    @pytest.mark.parametrize("case", PLANS)
    def test_rejects_invalid_regions_and_ranges(
        self, model: Path, tmp_path: Path, refused: Refused, document: str, case: str
    ) -> None:
        (layer, regions, *ranges), message = PLANS[case]
        parts = [{"device": "pi01", "region": region} for region in regions]
        parts += [{"device": "pi02", "region": "all", "reduce": reduce} for reduce in ranges]
        changed = json.loads(document)
        changed["layers"][layer] = parts
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(changed))
        line = refused(1, "compile", model, "--plan", path, *COMPILE, tmp_path / "out")
        assert message in line and line.startswith(f"{path}: ")

    def test_overlapping_parts_are_computed_twice_and_correctly(
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
        ("change", "message"),
        [
            ({"source": ["cam"]}, "source[0]: platform 'rpi4x2' has no device 'cam' (known: pi01, pi02): use one of"),
            ({"engines": {"pi09": "ncnn"}}, "engines.pi09: platform 'rpi4x2' has no device 'pi09'"),
            ({"engines": {"pi01": "nccn"}}, "engines.pi01: unknown engine 'nccn' (did you mean 'ncnn'?)"),
            ({"wire_dtype": {"q": "float16"}}, "wire_dtype: the network has no layer and no input 'q' (known: "),
            ({"source": []}, "source: a list of 0 entries is too short"),
            ({"sink": ["pi01", "pi01"]}, "contains an entry twice (allowed: each once)"),
            ({"sink": "pi01"}, 'sink: expected a list, got "pi01"'),
            ({"sinks": []}, "unknown key 'sinks' (did you mean 'sink'?)"),
            ({"model_digest": "abc"}, "the plan was made for a network with another structure"),
            ({"layers": []}, "layers: expected an object, got the list []"),
        ],
    )
    def test_rejects_invalid_top_level_keys(
        self, model: Path, tmp_path: Path, refused: Refused, document: str, change: dict[str, Any], message: str
    ) -> None:
        path = tmp_path / "plan.json"
        path.write_text(json.dumps({**json.loads(document), **change}))
        line = refused(1, "compile", model, "--plan", path, *COMPILE, tmp_path / "out")
        assert line.startswith(f"{path}: ") and message in line

    def test_rejects_a_model_as_the_plan(self, model: Path, tmp_path: Path, refused: Refused) -> None:
        line = refused(1, "compile", model, "--plan", model, *COMPILE, tmp_path / "out")
        assert line.endswith(": this is the name of a model, and a text file is expected")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"\0\0", "not JSON"),
            (b'{"format": NaN}', "NaN is not a JSON number"),
            (b'{"a": 1, "a": 2}', "key 'a' appears twice in one object: remove one"),
            (b"[" * 100_000, "nested too deeply"),
            (b'{"lane": ' + b"9" * 10_000 + b"}", "a number of 10000 digits is too long"),
            ("{}".encode("utf-16"), "not UTF-8 text: byte 0 is not valid"),
            ("{}".encode("utf-8-sig"), "missing key 'format'"),
        ],
    )
    def test_rejects_a_file_that_is_not_a_plan(
        self, model: Path, tmp_path: Path, refused: Refused, content: bytes, message: str
    ) -> None:
        path = tmp_path / "plan.json"
        path.write_bytes(content)
        line = refused(1, "compile", model, "--plan", path, *COMPILE, tmp_path / "out")
        assert line.startswith(str(path)) and message in line

    @pytest.mark.parametrize(
        ("code", "text", "message"),
        [
            (1, "tile-height{layers=h parts=13}", "tile-height: layer 'h' has 12 rows, too few for 13 parts"),
            (1, "lop{layers=h parts=17}", "lop: layer 'h' has 16 output channels, too few for 17 parts"),
            (1, "tile-height{layers=fc}", "layer 'fc' cannot be split along height: axes that can be split: channel"),
            (1, "lop{layers=last}", "layer 'last' cannot be split along channel: axes that can be split: none"),
            (1, "lip{layers=z}", "lip: layer 'z' cannot be split along input channels"),
            (2, "tile-height{layer=h}", "unknown option 'layer' of 'tile-height' (did you mean 'layers'?)"),
            (2, "tile-heigth{layers=h}", "unknown pass 'tile-heigth' (did you mean 'tile-height'?)"),
            (2, "tile-height{layers=q}", "tile-height: layers: no layer 'q' (known: fc, flat, h, last, y, z)"),
            (2, "tile-height{layers=h parts=1.5}", "option 'parts' of 'tile-height': expected int, got 1.5"),
            (2, "tile-height{layers=h devices=pi09}", "the platform has no device 'pi09' (did you mean 'pi02'?)"),
            (2, "tile-height{layers=h", "expected an option or '}'"),
        ],
    )
    def test_rejects_impossible_split(
        self, model: Path, tmp_path: Path, refused: Refused, code: int, text: str, message: str
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
        assert message in line
