"""int8 activations with QuantizeLinear of opset 21.

onnxruntime's optimizer makes uint8 of them on some processors and then rejects the result. Such a network must run
nevertheless, whole and in parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest

import dicompiler
from dicompiler.base.schema import load_json
from dicompiler.cost.profile import load_profile
from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.measure import profile_package as profiling
from dicompiler_targets.sockets.runtime.segments import make_sessions

TEXT = """<ir_version: 10, opset_import: ["": 21]> g (float[4, 8] x) => (float[8, 4] y)
  <float s = {0.0625}, int8 z = {0}, int64[2] turned = {8, 4}, float[4, 4] w = {WEIGHTS}> {
  q = QuantizeLinear (x, s, z)
  d = DequantizeLinear (q, s, z)
  t = Reshape (d, turned)
  m = MatMul (t, w)
  n = QuantizeLinear (m, s, z)
  y = DequantizeLinear (n, s, z)
}""".replace("WEIGHTS", ", ".join(str(number / 8) for number in range(-8, 8)))


@pytest.mark.parametrize("target", ["sockets", "mpi"])
def test_network_rejected_for_uint8_activations_runs(target: str, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(TEXT)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdqisint8allowed", "1")
    onnxruntime.InferenceSession(model.SerializeToString(), options)
    made = dicompiler.compile(model, "rpi4x2", strategy="modnn", target=target, output=tmp_path / "built")
    found = made.verify()
    assert found.passed, found.checks


def test_loads_other_files_of_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = dicompiler.compile(onnx.parser.parse_model(TEXT), "rpi4x2", strategy="single", output=tmp_path / "built")
    manifest = load_json(next((tmp_path / "built").glob("*/manifest.json")))
    tried = list[tuple[str, bool]]()

    def load_as_on_such_processors(path: str, options: Any, _: object) -> str:
        try:
            allowed = options.get_session_config_entry("session.qdqisint8allowed") == "1"
        except RuntimeError:
            allowed = False
        tried.append((path, allowed))
        if path == "one" and not allowed:
            raise RuntimeError("QuantizeLinear: type Error")
        return path

    monkeypatch.setattr(onnxruntime, "create_and_register_allocator", lambda *_: None)
    monkeypatch.setattr(onnxruntime, "InferenceSession", load_as_on_such_processors)
    manifest["segments"] = [{**manifest["segments"][0], "file": name} for name in ("one", "two")]
    make_sessions(Path(), manifest, 1)
    assert made.artifacts and tried == [("one", False), ("one", True), ("two", False)]


@pytest.mark.slow
def test_profile_measures_whole_network(tmp_path: Path) -> None:
    profiling.write_package(prepare(Model.load(onnx.parser.parse_model(TEXT))), tmp_path, (1,))
    profiling.run_package(tmp_path, tmp_path / "profile.json", None, 1)
    assert not load_profile(tmp_path / "profile.json").unmeasured
