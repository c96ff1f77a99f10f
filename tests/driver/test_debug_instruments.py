"""Tests of VerifyEach, PartitionStatistics and Reproducer."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import ClassVar

import onnx
import pytest
from click.testing import CliRunner

from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.cli import main
from dicompiler.cli.opt import command as opt
from dicompiler.driver.debug_instruments import PartitionStatistics, Reproducer, VerifyEach, strip_weights
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.plugin.pass_base import Pass, PassError
from dicompiler.plugin.pass_manager import PassManager, make_pipeline

PREPARE = "normalise,infer-shapes,form-layers,"


@dataclasses.dataclass(frozen=True)
class Forgetful(Pass):
    """A pass with a bug: it removes every bias."""

    name: ClassVar[str] = "forgetful"

    def run(self, compilation: PipelineState) -> PipelineState:
        graph = compilation.model.graph()
        for node in graph.nodes:
            if node.op == "Conv" and len(node.inputs) > 2:
                del node.inputs[2]
        return dataclasses.replace(compilation, model=compilation.model.with_graph(graph))


@dataclasses.dataclass(frozen=True)
class Broken(Pass):
    """A pass that raises."""

    name: ClassVar[str] = "broken"

    def run(self, compilation: PipelineState) -> PipelineState:
        raise KeyError(f"{len(compilation.model.proto.graph.node)} nodes")


@pytest.fixture(scope="module")
def lenet() -> Model:
    return Model.load(networks.build("lenet"))


def test_verify_each_names_the_pass_that_changes_outputs(lenet: Model) -> None:
    passes = [*make_pipeline("normalise,infer-shapes"), Forgetful(), *make_pipeline("form-layers")]
    with pytest.raises(DicompilerError, match=r"after pass 3 \(forgetful\): output 'output' differs by"):
        PassManager(passes, [VerifyEach()]).run(PipelineState(model=lenet))


def test_verify_each_accepts_passes_that_preserve_outputs(lenet: Model) -> None:
    watch = VerifyEach()
    PassManager(make_pipeline(PREPARE + "tile-height{layers=conv1 parts=3},lop{layers=fc3},partition"), [watch]).run(
        PipelineState(model=lenet)
    )
    assert watch._reference_outputs


def test_pass_that_does_not_preserve_outputs_sets_a_new_reference(lenet: Model) -> None:
    class Honest(Forgetful):
        preserves_outputs = False

    passes = [*make_pipeline("normalise,infer-shapes"), Honest(), *make_pipeline("form-layers")]
    PassManager(passes, [watch := VerifyEach()]).run(PipelineState(model=lenet))
    assert watch._reference_outputs


def test_statistics_count_parts_halos_and_redundant_macs(lenet: Model) -> None:
    for text, redundant in (("tile-height", False), ("fuse-tiles", True)):
        counts = PartitionStatistics()
        passes = make_pipeline(f"{PREPARE}{text}{{layers=conv1..conv2 parts=2}},partition")
        PassManager(passes, [counts]).run(PipelineState(model=lenet))
        rows = {row.layer: row for row in counts.rows}
        assert rows["conv1"].parts == rows["conv1"].devices == 2
        assert rows["fc3"].parts == 1
        assert (rows["conv1"].redundant_macs > 0) == redundant
        assert (rows["conv2"].halo == 0) == redundant
        assert all(row.redundant_macs == 0 for name, row in rows.items() if name not in ("conv1", "conv2"))


def test_reproducer_has_no_weights_and_runs_again(lenet: Model, tmp_path: Path) -> None:
    passes = [*make_pipeline(PREPARE + "tile-height{layers=conv1 parts=3}"), Broken()]
    with pytest.raises(PassError, match="broken"):
        PassManager(passes, [Reproducer(tmp_path)]).run(PipelineState(model=lenet))
    assert (tmp_path / "reproducer.onnx").stat().st_size < 10_000
    words = shlex.split((tmp_path / "reproducer.txt").read_text())
    assert words[:3] == ["dicompiler", "opt", "reproducer.onnx"]
    text = words[words.index("-p") + 1]
    assert text == PREPARE + "tile-height{layers=conv1 parts=3},broken"

    model = Model.load(tmp_path / "reproducer.onnx")
    again = PassManager(make_pipeline(text.removesuffix(",broken"))).run(PipelineState(model=model))
    assert again.layers is not None
    assert [layer.name for layer in again.layers.layers][:2] == ["conv1", "pool1"]
    with pytest.raises(PassError, match=r"\d+ nodes"):
        PassManager([Broken()]).run(again)


def test_strip_weights_keeps_names_shapes_and_types(lenet: Model) -> None:
    bare = Model.load(strip_weights(lenet))
    normal = PassManager(make_pipeline("normalise")).run(PipelineState(model=bare)).model
    large = {name: known for name, known in lenet.initializers().items() if name in lenet.weights}
    assert large.items() <= dict(normal.initializers()).items()
    assert not normal.array(next(iter(large))).any()


def test_opt_prints_statistics_and_verifies_each(tmp_path: Path) -> None:
    onnx.save(networks.build("lenet"), tmp_path / "lenet.onnx")
    text = "infer-shapes,form-layers,tile-height{layers=conv1 parts=2}"
    arguments = [
        str(tmp_path / "lenet.onnx"),
        "-p",
        text,
        "--verify-each",
        "--statistics",
        "-o",
        str(tmp_path / "o.onnx"),
    ]
    result = CliRunner().invoke(opt, arguments)
    assert result.exit_code == 0, result.output
    assert "multiplications  redundant" in result.stderr
    assert (tmp_path / "o.onnx").exists()
    assert callable(main)
