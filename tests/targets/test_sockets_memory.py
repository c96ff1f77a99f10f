"""Memory that the sockets target adds to a program, compared with the memory of real processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support.handmade import segment

from dicompiler import networks
from dicompiler.cost.memory import program_memory
from dicompiler.driver.artifact import run
from dicompiler.driver.compiler import compile
from dicompiler_targets.ort_memory import MIB_BYTES, WeightLoading, analyze_weight_loading, workspace_bytes
from dicompiler_targets.sockets.target import PROCESS_BYTES, SocketsTarget

UNDER, OVER = 0.95, 1.15


def convolutions(behind: str) -> onnx.ModelProto:
    """Build three layers of 256 × 256 × 3 × 3 (2.25 MiB each), followed by a Gemm of 16 MiB."""
    rows = (
        f"c{i} = Conv <pads = [1, 1, 1, 1]> ({f'r{i - 1}' if i else 'x'}, w{i}) {behind.format(i=i)}" for i in range(3)
    )
    text = f"""<ir_version: 8, opset_import: ["": 17]> g (float[1, 256, 8, 8] x) => (float[1, 256] y)
    {{ {" ".join(rows)}  f = Flatten (r2)  y = Gemm (f, g) }}"""
    model = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    shapes = {f"w{i}": (256, 256, 3, 3) for i in range(3)} | {"g": (16384, 256)}
    if "BatchNormalization" in behind:
        shapes |= {f"{p}{i}": (256,) for i in range(3) for p in "stmv"}
    arrays = {name: 1 + random.random(shape, "float32") for name, shape in shapes.items()}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


NETWORKS = {
    "squeezenet": lambda: networks.build("light/squeezenet"),
    "plain": lambda: convolutions("r{i} = Relu (c{i})"),
    "folded": lambda: convolutions("b{i} = BatchNormalization (c{i}, s{i}, t{i}, m{i}, v{i})  r{i} = Relu (b{i})"),
}


@pytest.mark.parametrize(("name", "strategy"), [("squeezenet", "pipeline"), ("plain", "modnn"), ("folded", "single")])
def test_prediction_is_close_to_peak_memory(name: str, strategy: str, tmp_path: Path) -> None:
    made = compile(NETWORKS[name](), platform="rpi4x2", strategy=strategy, output=tmp_path / "a")
    assert made.program is not None
    held, added = program_memory(made.program), SocketsTarget().memory_overhead(made.program)
    for report in run(tmp_path / "a").reports:
        predicted = held[report.device].total + added[report.device]
        assert UNDER <= predicted / report.peak_memory_bytes <= OVER, (
            report.device,
            predicted,
            report.peak_memory_bytes,
        )


def test_idle_device_needs_process_memory() -> None:
    made = compile(networks.build("lenet"), platform="rpi4x2", strategy="single")
    assert made.program is not None
    added = SocketsTarget().memory_overhead(made.program)
    assert list(added) == [device.device for device in made.program.devices]
    assert all(value >= PROCESS_BYTES for value in added.values())


def test_predicts_loading_of_each_weight() -> None:
    model = convolutions("b{i} = BatchNormalization (c{i}, s{i}, t{i}, m{i}, v{i})  r{i} = Relu (b{i})")
    made = compile(model, platform="rpi4x1", strategy="single")
    assert made.program is not None
    (own,) = made.program.devices[0].segments
    one = 256 * 256 * 9 * 4
    assert analyze_weight_loading(own) == WeightLoading((16 * MIB_BYTES,), 3 * one, 0, 3 * one, one)
    plain = compile(convolutions("r{i} = Relu (c{i})"), platform="rpi4x1", strategy="single")
    assert plain.program is not None
    assert analyze_weight_loading(plain.program.devices[0].segments[0]) == WeightLoading(
        (16 * MIB_BYTES,), 0, 0, 3 * one, one
    )


def test_packs_gemm_with_activation_last() -> None:
    text = """(float[1, 4] x) => (float[1, 2] y)
    { a = Gemm (x, w)  b = Relu (a)  y = Gemm (b, v) }"""
    own = segment("s", "d", text, {})
    own.model.graph.initializer.append(helper.make_tensor("w", 1, [4, 8], [0.5] * 32))
    own.model.graph.initializer.append(helper.make_tensor("v", 1, [8, 2], [0.5] * 16))
    assert analyze_weight_loading(own).packed == (64, 128)


def test_convolutions_with_many_filters_copy_all_patches() -> None:
    text = "(float[1, 64, 16, 16] x) => (float[1, 512, 16, 16] y) { y = Conv <pads = [1, 1, 1, 1]> (x, w) }"
    own = segment("s", "d", text, {})
    own.model.graph.initializer.append(helper.make_tensor("w", 1, [512, 64, 3, 3], np.ones(512 * 64 * 9).tolist()))
    assert workspace_bytes(own) == max(MIB_BYTES, 4 * 16 * 16 * 64 * 9)
    lrn = segment("s", "d", "(float[1, 8, 4, 4] x) => (float[1, 8, 4, 4] y) { y = LRN <size = 3> (x) }", {})
    assert workspace_bytes(lrn) == 2 * 8 * 4 * 4 * 4
