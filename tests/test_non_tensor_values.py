"""Strings, sequences, maps and optional values: given to and delivered by devices, but never between devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.non_tensor_models import ALL, labels, pieces, sentences

import dicompiler
from dicompiler.base.errors import DicompilerError
from dicompiler.cli.file_io import read_inputs, read_npz, write_npz
from dicompiler.driver.prepare import prepare
from dicompiler.ir.plan import Part, Plan
from dicompiler.plugin_api import Model


def _file(model: onnx.ModelProto, directory: Path) -> Path:
    onnx.save(model, path := directory / "model.onnx")
    return path


def _dealt(path: Path) -> Plan:
    """Put each layer on another one of two devices, neither of which is the source of all inputs."""
    layers = prepare(Model.load(path)).layers
    assert layers is not None
    parts = {layer.name: (Part(("pi02", "pi03")[i % 2]),) for i, layer in enumerate(layers.layers)}
    return Plan(parts, ("pi01",), ("pi04",))


@pytest.mark.parametrize("name", ALL)
def test_non_tensor_values_are_given_delivered_and_verified(name: str, tmp_path: Path) -> None:
    made = dicompiler.compile(_file(ALL[name](), tmp_path), platform="rpi4x4", output=tmp_path / "build")
    verified = made.verify()
    assert verified.passed, verified.checks


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_inner_devices_get_and_give_strings_directly(name: str, tmp_path: Path) -> None:
    path = _file(ALL[name](), tmp_path)
    made = dicompiler.compile(path, platform="rpi4x4", plan=_dealt(path), output=tmp_path / "build")
    verified = made.verify()
    assert verified.passed, verified.checks
    assert made.program is not None
    assert all(transfer.value.is_fixed_size for transfer in made.program.transfers)
    inputs = {value.name for value in made.program.inputs if not value.is_fixed_size}
    given = [set(device.model_inputs) & inputs for device in made.program.devices]
    assert set().union(*given) == inputs
    assert not given[0] | given[3]  # Devices 0 and 3 read no input of this kind, so none is given to them.


def test_strings_come_from_json_and_npz(tmp_path: Path) -> None:
    dicompiler.compile(_file(sentences(), tmp_path), platform="rpi4x2", output=tmp_path / "build")
    words = ["The", "cat", "SAT", "on", "a", "Mäuschen"]
    (tmp_path / "x.json").write_text(json.dumps({"text": words}))
    np.savez(tmp_path / "x.npz", text=np.array(words))
    for file in ("x.json", "x.npz"):
        outputs = dicompiler.run(tmp_path / "build", read_inputs(tmp_path / file)).outputs[0]
        assert outputs["low"].tolist() == ["the", "cat", "sat", "on", "a", "mäuschen"]
        assert outputs["label"].item() in ("ü", "b", "c", "d")
    write_npz(tmp_path / "y.npz", outputs)
    assert read_npz(tmp_path / "y.npz")["low"].tolist() == outputs["low"].tolist()


def test_session_takes_and_gives_strings(tmp_path: Path) -> None:
    path = _file(sentences(), tmp_path)
    dicompiler.compile(path, platform="rpi4x4", plan=_dealt(path), output=tmp_path / "build")
    with dicompiler.connect(tmp_path / "build") as session:
        for last in ("DOG", "Mat"):
            assert session.infer({"text": np.array(["A", "B", "C", "D", "E", last])})["low"][-1] == last.lower()
        with pytest.raises(DicompilerError, match="shape"):
            session.infer({"text": np.array(["A"])})


def test_sequences_are_lists_or_named_arrays_in_files(tmp_path: Path) -> None:
    dicompiler.compile(_file(pieces(), tmp_path), platform="rpi4x2", output=tmp_path / "build")
    rows = [np.full((2, 64), i, np.float32) for i in range(2)]
    np.savez(tmp_path / "x.npz", s_0=rows[0], s_1=rows[1], o=np.ones(3, np.float32))
    outputs = dicompiler.run(tmp_path / "build", read_inputs(tmp_path / "x.npz")).outputs[0]
    assert [part.shape for part in outputs["parts"]] == [(2, 3), (2, 3)]
    write_npz(tmp_path / "y.npz", outputs)
    assert set(read_npz(tmp_path / "y.npz")) == {"n", "parts_0", "parts_1", "maybe"}


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"s": 3, "o": None}, "input 's' is a sequence: give a list"),
        ({"o": None}, "input 's' is missing"),
        ({"s": [["a"]], "o": None}, "not an array"),
    ],
)
def test_rejects_value_that_is_not_a_sequence(inputs: dict[str, Any], words: str, tmp_path: Path) -> None:
    dicompiler.compile(_file(pieces(), tmp_path), platform="rpi4x2", output=tmp_path / "build")
    with pytest.raises(DicompilerError, match=words):
        dicompiler.run(tmp_path / "build", inputs)


@pytest.mark.parametrize(("make", "what"), [(labels, "'name' is a tensor of strings"), (pieces, "'s' is a sequence")])
def test_targets_without_strings_name_one_that_has_them(make: Any, what: str, tmp_path: Path) -> None:
    with pytest.raises(DicompilerError, match=f"{what}.*use target sockets"):
        dicompiler.compile(_file(make(), tmp_path), platform="rpi4x2", target="mpi", output=tmp_path / "build")
