"""Tests of the Python API: representation of results, arguments of wrong types, progress."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dicompiler
from dicompiler import DicompilerError, UsageError, networks


@pytest.fixture(scope="module")
def result() -> dicompiler.CompileResult:
    return dicompiler.compile(networks.build("lenet"), platform="rpi4x32", strategy="modnn")


def test_result_is_one_line_and_a_limited_table(result: dicompiler.CompileResult) -> None:
    assert repr(result).startswith("<CompileResult: 8 layers on ")
    assert " of 32 devices of rpi4x32, by modnn: " in repr(result)
    assert len(repr(result)) < 200
    html = result._repr_html_()
    assert html.count("<tr>") == 17 and "… and " in html and len(html) < 4000
    assert "<p>bottleneck: " in html and "<p>advice: " in html
    with pytest.raises(UsageError, match=r"^no artifact was written: compile with output=…$"):
        result.artifacts  # noqa: B018


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dicompiler.compile(5), "compile: model must be the path of an ONNX file, its bytes or a ModelProto"),  # type: ignore[arg-type]
        (lambda: dicompiler.compile("x", platform=5), "compile: platform must be the path of a TOML file"),  # type: ignore[arg-type]
        (lambda: dicompiler.compile("x", strategy=object), "compile: strategy must be a string such as 'dp'"),  # type: ignore[arg-type]
        (lambda: dicompiler.compile("x", output=b"x"), "compile: output must be a path, not b'x' (bytes)"),  # type: ignore[arg-type]
        (lambda: dicompiler.run(None), "run: directory must be a path, not None"),  # type: ignore[arg-type]
        (lambda: dicompiler.run("x", [np.ones(1)]), "run: inputs must be arrays by the names of inputs"),  # type: ignore[arg-type]
        (lambda: dicompiler.run("x", frames=0), "run: frames must be 1 or more, not 0"),
        (lambda: dicompiler.connect(5), "connect: directory must be a path, not 5 (int)"),  # type: ignore[arg-type]
        (lambda: dicompiler.connect("x", hosts=["pi01"]), "connect: hosts must be the path of a hosts.toml"),  # type: ignore[arg-type]
    ],
)
def test_rejects_values_of_wrong_type_in_one_line(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert str(caught.value).startswith(words) and "\n" not in str(caught.value)


def test_rejects_unwritable_output_before_the_work() -> None:
    for place in ("/proc/net", "/proc/dicompiler", "x" * 300):
        with pytest.raises(DicompilerError, match=r"^(/proc/|x)"):
            dicompiler.compile("missing.onnx", platform="rpi4x2", output=place)


def test_accepts_shapes_as_dict_and_progress_may_end_the_compilation(tmp_path: Path) -> None:
    model, heard = networks.build("lenet"), list[str]()
    for dim, name in zip(model.graph.input[0].type.tensor_type.shape.dim, "N...", strict=True):
        if name == "N":
            dim.dim_param = name
    by_text, by_dict = (
        dicompiler.compile(model, "rpi4x2", "modnn", shape=shape, progress=heard.append)
        for shape in ("input=1x1x32x32", {"input": (1, 1, 32, 32)})
    )
    assert by_text.plan == by_dict.plan and "strategy modnn: making the plan" in heard
    with pytest.raises(UsageError, match=r"^compile: a size in the shape of 'input' must be an integer, not 'N'"):
        dicompiler.compile(model, "rpi4x2", shape={"input": ("N", 1, 32, 32)})  # type: ignore[dict-item]

    def stop(_: str) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        dicompiler.compile(model, "rpi4x2", "modnn", shape="input=1x1x32x32", output=tmp_path / "net", progress=stop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "given", [[print], ["timing"], [type("Watch", (), dict.fromkeys(("before", "after", "failed"), print))]]
)
def test_rejects_invalid_instruments_before_the_work(given: list[Any]) -> None:
    with pytest.raises(
        UsageError, match=r"^compile: instruments: .* pass objects with the methods before, after, failed"
    ):
        dicompiler.compile("there is no such model", "rpi4x2", instruments=given)
