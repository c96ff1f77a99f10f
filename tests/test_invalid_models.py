"""Invalid models, by hand and at random: each compiles or is rejected in one line, in little memory and time."""

from __future__ import annotations

import random
from pathlib import Path

import onnx
import pytest
from support.commands import command
from support.invalid_models import ILLEGAL, write_all
from support.model_mutations import mutated
from support.onnx_models import body_model, rich_model, small
from support.trying import outcomes

from dicompiler.networks import build

MUTATIONS = 500


def line(model: Path, strategy: str = "single") -> list[object]:
    """Return the command line that compiles the model."""
    return ["compile", model, "--platform", "rpi4x2", "--strategy", strategy, "-o", model.with_suffix("")]


def static(model: onnx.ModelProto) -> onnx.ModelProto:
    """Set open dimensions, such as the batch size, to one."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = 1
    return model


def test_rejects_invalid_models_and_names_node(tmp_path: Path) -> None:
    files = write_all(tmp_path)
    found = dict(zip(files, outcomes([line(file) for file in files.values()]), strict=True))
    assert {name: outcome.fault for name, outcome in found.items() if outcome.fault} == {}
    for name in ILLEGAL:
        said = found[name].said
        assert found[name].code == 1 and str(files[name]) in said and "culprit" in said, (name, said)
    for name, file in files.items():
        assert found[name].code == 0 or not file.with_suffix("").exists()


@pytest.mark.slow
def test_mutated_models_do_not_break_compiler(tmp_path: Path) -> None:
    models = [static(m) for m in (build("quirks"), small(), body_model(), rich_model(), build("tiny"))]
    rng, files = random.Random(20), []
    for number in range(MUTATIONS):
        files.append(tmp_path / f"{number}.onnx")
        files[-1].write_bytes(mutated(models[number % len(models)], rng))
    found = outcomes([line(file, ("single", "modnn")[i % 2]) for i, file in enumerate(files)])
    assert {i: outcome.fault for i, outcome in enumerate(found) if outcome.fault} == {}
    assert 20 < sum(outcome.code == 0 for outcome in found) < MUTATIONS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2^40 calls", "a stride of 0", "a name with line ends", "sums over a vector of 2^40"])
def test_command_reports_same_error(tmp_path: Path, name: str) -> None:
    file = write_all(tmp_path)[name]
    (outcome,) = outcomes([line(file)])
    done = command(*line(file))
    assert (done.returncode, done.stderr, outcome.code) == (1, outcome.said, 1)
    assert done.stderr.count("\n") == 1 and not file.with_suffix("").exists()
