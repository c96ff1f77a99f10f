"""Instruments: dumps, printed text and times after every pass."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from support.example_passes import Annotate, Breaks, Rename, compilation
from support.onnx_models import parsed

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.plugin import instruments
from dicompiler.plugin.pass_manager import PassManager


def test_dump_writes_the_graph_after_every_pass_and_the_plan_once_there_is_one(tmp_path: Path) -> None:
    directory = tmp_path / "dumps" / "new"
    PassManager([Rename(), Annotate(), Rename("Neg")], [instruments.DumpAfterPass(directory)]).run(compilation())
    assert sorted(path.name for path in directory.iterdir()) == [
        "001_rename.onnx",
        "002_annotate.onnx",
        "002_annotate.plan.json",
        "003_rename.onnx",
        "003_rename.plan.json",
    ]
    assert [node.op_type for node in onnx.load(directory / "001_rename.onnx").graph.node] == ["Abs", "Abs"]
    assert [node.op_type for node in onnx.load(directory / "003_rename.onnx").graph.node] == ["Neg", "Neg"]
    assert json.loads((directory / "002_annotate.plan.json").read_text())["layers"]["h"] == [
        {"device": "d0", "region": "all"}
    ]


def test_print_after_prints_the_graph_after_every_pass(capsys: pytest.CaptureFixture[str]) -> None:
    PassManager([Annotate("d1"), Rename()], [instruments.PrintAfterPass()]).run(compilation())
    out, err = capsys.readouterr()
    assert out == ""
    assert "// after pass 1: annotate{device=d1}\n" in err
    assert "Relu" in err.partition("// after pass 2: rename")[0]
    assert "Abs" in err.partition("// after pass 2: rename")[2]


def test_print_after_elides_long_constants(capsys: pytest.CaptureFixture[str]) -> None:
    model = parsed(
        f"""<ir_version: 8, opset_import: ["": 17]> g (float[9] x) => (float[9] y)
        <float[9] b = {{1, 2, 3, 4, 5, 6, 7, 8, 9}}, float[1] a = {{0.5}}>
        {{ c = Constant <value_ints = {[*range(100)]}> ()  z = Add (x, b)  y = Mul (z, a) }}"""
    )
    instruments.PrintAfterPass().after(1, Rename(), PipelineState(Model.load(model)))
    text = capsys.readouterr().err
    assert "b =  {1,2,3,4,5,6,7,8,…}" in text and "a =  {0.5}" in text and "[0, 1, 2, 3, 4, 5, 6, 7, …]" in text


def test_timing_has_a_row_for_every_pass_that_ran_and_marks_the_one_that_failed() -> None:
    timing = instruments.PassTiming()
    with pytest.raises(DicompilerError):
        PassManager([Annotate("d1"), Breaks("input"), Rename()], [timing]).run(compilation())
    assert [(text, failed) for text, _, failed in timing.rows] == [
        ("annotate{device=d1}", False),
        ("breaks{how=input}", True),
    ]
    assert all(seconds >= 0 for _, seconds, _ in timing.rows)
