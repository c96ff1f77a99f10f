"""Options `--wire-dtype` and `--wire-samples`: plans store them, and every table shows them and counts their bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from dicompiler import networks
from dicompiler.cli import main

WIRE = "int8,input=float32"


Call = Callable[..., str]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """A function that runs a command here, checks its exit code, and returns stdout (stderr if it fails)."""

    def run(*arguments: object, code: int = 0) -> str:
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return run


@pytest.fixture(scope="module")
def lenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wire")
    onnx.save(networks.build("lenet", 1), place / "lenet.onnx")
    np.savez(place / "s.npz", input=np.random.default_rng(0).standard_normal((4, 1, 1, 32, 32)).astype(np.float32))
    return place / "lenet.onnx"


def test_plan_stores_wire_types_and_commands_print_them(lenet: Path, tmp_path: Path, call: Call) -> None:
    common, plan, build = (lenet, "--platform", "rpi4x2"), tmp_path / "p.json", tmp_path / "build"
    said = f"tensors are sent between devices as {WIRE}"
    asked = ("--wire-dtype", WIRE, "--wire-samples", lenet.with_name("s.npz"))
    printed = call("plan", *common, "--strategy", "modnn", *asked, "--depfile", tmp_path / "d", "-o", plan)
    assert said in printed and str(lenet.with_name("s.npz")) in (tmp_path / "d").read_text()
    assert said in call("simulate", *common, "--plan", plan)
    assert said in call("compile", *common, "--plan", plan, "-o", build)
    assert said in call("run", build)
    call("report", build, "-o", tmp_path / "r.html")
    assert said in (tmp_path / "r.html").read_text()


def test_opt_applies_wire_types_to_the_plan_of_passes(lenet: Path, tmp_path: Path, call: Call) -> None:
    passes, out = "infer-shapes,form-layers,lop{layers=conv1 parts=2}", tmp_path / "o.onnx"
    asked = ("--wire-dtype", WIRE, "--wire-samples", lenet.with_name("s.npz"), "--save-plan", tmp_path / "p.json")
    assert "give a platform" in call("opt", lenet, "-p", passes, *asked, "-o", out, code=2)
    call("opt", lenet, "-p", passes.replace("2}", "2 devices=pi01,pi02}"), "--platform", "rpi4x2", *asked, "-o", out)
    assert {"QuantizeLinear", "DequantizeLinear"} <= {node.op_type for node in onnx.load(out).graph.node}
    assert json.loads((tmp_path / "p.json").read_text())["wire_dtype"]
    line = call("opt", lenet, "-p", f"{passes},partition", "--wire-dtype", "float16", "-o", tmp_path / "q.onnx", code=2)
    assert line.count("\n") == 1 and "opt adds the pass 'partition' at the end" in line
    line = call("opt", lenet, "-p", "infer-shapes", "--wire-dtype", "float16", "-o", tmp_path / "q.onnx", code=2)
    assert line.count("\n") == 1 and "the pipeline makes no plan" in line
    assert not (tmp_path / "q.onnx").exists()


def test_compare_and_explore_count_narrowed_bytes(lenet: Path, tmp_path: Path, call: Call) -> None:
    common = (lenet, "--platform", "rpi4x2")
    sent = []
    for wire in ((), ("--wire-dtype", "float16")):
        rows = json.loads(call("compare", *common, "--strategies", "modnn", *wire, "--json"))["results"]
        sent.append(rows[0]["metrics"]["total_bytes"])
    assert sent[0] == 2 * sent[1] > 0
    small = ("--generations", 2, "--population", 8)
    call("explore", *common, "--wire-dtype", "bfloat16", *small, "-o", tmp_path / "front")
    plans = [json.loads(path.read_text()) for path in (tmp_path / "front" / "plans").iterdir()]
    assert plans and all(plan["wire_dtype"] == "bfloat16" for plan in plans)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--wire-dtype", "float8"), "wire: unknown type 'float8'"),
        (
            ("--wire-dtype", "float16,conv9=float32"),
            "the network has no layer and no input 'conv9' (did you mean 'conv",
        ),
        (("--wire-dtype", "int8"), "wire: int8 needs the value range of each tensor"),
        (("--wire-samples", "s.npz"), "wire: samples are used for int8 only"),
    ],
)
def test_invalid_options_are_one_line_and_write_nothing(
    lenet: Path, options: tuple[str, ...], expected: str, tmp_path: Path, call: Call
) -> None:
    printed = call("compile", lenet, "--platform", "rpi4x2", *options, "-o", tmp_path / "out", code=2)
    assert expected in printed and printed.count("\n") == 1
    assert not (tmp_path / "out").exists()
