"""The tflm target on the command line: int8 networks from float networks and samples, verification, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tflite
from numpy.typing import NDArray
from support.refusing import Refused

from dicompiler import networks
from dicompiler.base.schema import load_json
from dicompiler.cli import main
from dicompiler.target.manifest import write_digests_and_checksum

COMPILE = ("--platform", "nano33x2", "--strategy", "modnn", "--target", "tflm", "-o")
SHAPE = (1, 1, 32, 32)


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    return Refused(tmp_path, capsys)


@pytest.fixture
def lenet(tmp_path: Path) -> Path:
    onnx.save(networks.build("lenet"), tmp_path / "lenet.onnx")
    return tmp_path / "lenet.onnx"


def samples(path: Path, **arrays: NDArray[Any]) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]  # its keywords are the arrays' names
    return path


def normal(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("target", "platform", "name", "shape"),
    [("tflm", "nano33x2", "lenet", SHAPE), ("sockets", "rpi4x2", "resnet8", (1, 3, 32, 32))],
)
def test_float_network_is_quantised_on_the_way_split_and_verified(
    target: str, platform: str, name: str, shape: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = samples(tmp_path / "samples.npz", input=normal(8, *shape))
    onnx.save(networks.build(name), tmp_path / "model.onnx")
    options = ("--platform", platform, "--strategy", "modnn", "--target", target, "--quantize-samples", given)
    assert run("compile", tmp_path / "model.onnx", *options, "-o", tmp_path / "out") == 0
    capsys.readouterr()
    assert run("verify", tmp_path / "out") == 0
    rows = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    transfers = load_json(tmp_path / "out" / "artifact.json")["transfers"]
    inner = [one for one in transfers if not one["name"].startswith("input[")]
    assert inner and {one["dtype"] for one in inner} == {"INT8"}
    if target == "tflm":
        assert "steps of" in rows["output on nano01"] and "(allowed: 16)" in rows["output on nano01"]
        assert "bit-equal" in rows["output on nano01, uncut"]
        assert "(allowed: 1)" in rows["output on nano01, LiteRT"] and "ok" in rows["output on nano01, LiteRT"]
    else:
        assert "differs by 0 steps" in rows["output on pi01"]


def test_verify_fails_if_a_model_gives_other_numbers(
    lenet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = samples(tmp_path / "samples.npz", input=normal(8, *SHAPE))
    assert run("compile", lenet, *COMPILE, tmp_path / "out", "--quantize-samples", given) == 0
    largest = max((tmp_path / "out").glob("nano*/*.tflite"), key=lambda path: path.stat().st_size)
    data = largest.read_bytes()
    model = tflite.Model.GetRootAs(data)
    buffers = [model.Buffers(i).DataAsNumpy() for i in range(1, model.BuffersLength())]
    weights = max((bytes(buffer) for buffer in buffers), key=len)
    largest.write_bytes(data.replace(weights, bytes(-byte % 256 for byte in weights)))
    assert run("verify", tmp_path / "out") == 1
    assert "its content differs from the compiled one: compile the model again" in capsys.readouterr().err
    write_digests_and_checksum(tmp_path / "out")
    capsys.readouterr()
    assert run("verify", tmp_path / "out") == 1
    assert "uncut   FAILED" in capsys.readouterr().out


# -- samples for int8 that the command rejects


@pytest.mark.parametrize(
    ("arrays", "cause"),
    [
        ({}, "no samples of input 'input': give samples of every input"),
        ({"imput": normal(8, *SHAPE)}, "the network has no input 'imput' (did you mean 'input'?)"),
        (
            {"input": normal(8, 1, 1, 28, 28)},
            "have the shape (8, 1, 1, 28, 28): give the shape (samples, 1, 1, 32, 32)",
        ),
        ({"input": normal(*SHAPE)}, "have the shape (1, 1, 32, 32): give the shape (samples, 1, 1, 32, 32)"),
        ({"input": normal(0, *SHAPE)}, "have the shape (0, 1, 1, 32, 32): give"),
        ({"input": normal(8, *SHAPE).astype(np.float64)}, "are of type float64: give float32"),
        ({"input": np.full((2, *SHAPE), np.nan, np.float32)}, "hold NaN or infinity: remove these samples"),
    ],
)
def test_samples_that_do_not_fit(
    arrays: dict[str, NDArray[Any]], cause: str, lenet: Path, tmp_path: Path, refused: Refused
) -> None:
    given = samples(tmp_path / "samples.npz", **arrays)
    line = refused(1, "compile", lenet, *COMPILE, tmp_path / "out", "--quantize-samples", given)
    assert line.startswith(f"{given}: ") and cause in line


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_truncated_file_of_samples(share: float, lenet: Path, tmp_path: Path, refused: Refused) -> None:
    given = samples(tmp_path / "samples.npz", input=normal(8, *SHAPE))
    given.write_bytes(given.read_bytes()[: int(given.stat().st_size * share)])
    line = refused(1, "compile", lenet, *COMPILE, tmp_path / "out", "--quantize-samples", given)
    assert line == f"{given}: the samples cannot be read: it is not an .npz file of arrays"


def test_missing_file_of_samples_and_a_network_that_is_quantised_already(
    lenet: Path, tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(1, "compile", lenet, *COMPILE, tmp_path / "out", "--quantize-samples", tmp_path / "none.npz")
    assert line == f"{tmp_path / 'none.npz'}: the samples cannot be read: No such file or directory"
    given = samples(tmp_path / "samples.npz", input=normal(8, *SHAPE))
    made = tmp_path / "int8.onnx"
    assert run("opt", lenet, "-p", f"quantise{{samples={given}}}", "-o", made) == 0
    capsys.readouterr()
    line = refused(1, "compile", made, *COMPILE, tmp_path / "out", "--quantize-samples", given)
    assert line == "quantise: the network is quantized already: omit this pass"


# -- networks that TFLite Micro cannot run

HEAD = '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g '
NUMBERS = "float s = {0.1}, int8 z = {0}, float[2] t = {0.1, 0.2}"
REFUSED = {
    "an operator that TFLite-micro lacks": (
        "(float[1,4] x) => (float[1,4] y) { y = Erf(x) }",
        "target tflm: node 'y' (Erf): TFLite-micro has no operator for it: use target sockets for such a network",
    ),
    "rank 5": (
        "(float[1,2,3,4,5] x) => (float[1,2,3,4,5] y) { y = Relu(x) }",
        "target tflm: node 'y' (Relu): tensor 'x' has rank 5: TFLite-micro supports up to 4; use target sockets",
    ),
    "a dynamic dimension": (
        "(float[N,4] x) => (float[N,4] y) { y = Relu(x) }",
        "infer-shapes: dimension 0 ('N') of input 'x' is open: give it as --shape x=1x4",
    ),
    "uint8 activations": (
        f"(float[1,4] x) => (float[1,4] y) <{NUMBERS}, uint8 u = {{128}}> "
        "{ q = QuantizeLinear(x, s, u) y = DequantizeLinear(q, s, u) }",
        "target tflm: node 'q' (QuantizeLinear): tensor 'q' is of type uint8: quantise to int8",
    ),
    "zero points of channels": (
        f"(float[1,2,4,4] x) => (float[1,2,4,4] y) <{NUMBERS}, int8[2] v = {{3, 4}}, int8[2,2,1,1] w = {{1,2,3,4}}> "
        "{ q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) e = DequantizeLinear<axis = 0>(w, t, v) "
        "c = Conv(d, e) r = QuantizeLinear(c, s, z) y = DequantizeLinear(r, s, z) }",
        "target tflm: node 'e' (DequantizeLinear): it has a scale for each channel and a zero point that is not 0: "
        "quantise weights symmetrically",
    ),
    "activations quantised while it runs": (
        "(float[1,4] x) => (float[1,4] y) { q, a, b = DynamicQuantizeLinear(x) y = DequantizeLinear(q, a, b) }",
        "target tflm: node 'q' (DynamicQuantizeLinear): its activations are quantised at run time: quantise with "
        "samples (--quantize-samples)",
    ),
    "integers of a product": (
        "(int8[1,4] x) => (int32[1,2] y) <int8[4,2] w = {1,2,3,4,5,6,7,8}> { y = MatMulInteger(x, w) }",
        "target tflm: node 'y' (MatMulInteger): its activations are quantised at run time: quantise with "
        "samples (--quantize-samples)",
    ),
    "a scale that is computed": (
        f"(float[1,4] x, float i) => (float[1,4] y) <{NUMBERS}> "
        "{ q = QuantizeLinear(x, i, z) y = DequantizeLinear(q, i, z) }",
        "target tflm: node 'q' (QuantizeLinear): its scale is computed or given for each block: use constants, one for "
        "each channel",
    ),
    "an output that is not quantised": (
        f"(int8[1,4] x) => (float[1,2] y) <{NUMBERS}, int8[4,2] w = {{1,2,3,4,5,6,7,8}}, int32[2] b = {{1, 2}}> "
        "{ y = com.microsoft.QGemm(x, s, z, w, s, z, b) }",
        "target tflm: node 'y' (QGemm): its output is not quantised, or alpha is not 1: quantise in QDQ form",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_node_operator_and_remedy(name: str, tmp_path: Path, refused: Refused) -> None:
    text, expected = REFUSED[name]
    onnx.save(onnx.parser.parse_model(HEAD + text), tmp_path / "model.onnx")
    options = ("--platform", "rpi4x1", "--strategy", "single", "--target", "tflm", "-o")
    assert refused(1, "compile", tmp_path / "model.onnx", *options, tmp_path / "out") == expected


def test_network_of_qlinear_operators_keeps_its_scales(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """onnxruntime's quantiser writes such networks in its operator format."""
    onnx.save(networks.build("tiny"), tmp_path / "tiny.onnx")
    made = _in_operators(tmp_path / "tiny.onnx", tmp_path / "operators.onnx")
    assert {"QLinearConv", "QLinearAdd", "QLinearConcat", "QLinearGlobalAveragePool", "QGemm"} <= made
    assert run("compile", tmp_path / "operators.onnx", *COMPILE, tmp_path / "out") == 0
    capsys.readouterr()
    assert run("verify", tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert "output on nano01, uncut   ok  bit-equal" in out and "(allowed: 16)" in out
    manifests = [load_json(tmp_path / "out" / name / "manifest.json") for name in ("nano01", "nano02")]
    operators = {code for manifest in manifests for code in manifest["operators"]}
    assert {"CONV_2D", "DEPTHWISE_CONV_2D", "ADD", "CONCATENATION", "MEAN"} <= operators


def _in_operators(source: Path, path: Path) -> set[str]:
    """Quantise a network in operator format, and return its operators."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # it has no types
        def __init__(self) -> None:
            self.rest = iter([{"input": normal(1, 3, 32, 32)}])

        def get_next(self) -> Any:
            return next(self.rest, None)

    kinds = {"activation_type": QuantType.QInt8, "weight_type": QuantType.QInt8, "per_channel": True}
    quantize_static(str(source), str(path), Reader(), quant_format=QuantFormat.QOperator, **kinds)
    return {node.op_type for node in onnx.load(path).graph.node}
