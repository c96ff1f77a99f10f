"""Programs of target mpi whose segments ncnn computes: real ranks, compared with onnxruntime.

The library of ncnn is the one that `tests/run` builds.
"""

from __future__ import annotations

import platform
import re
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support import crossing
from support.boards import cluster
from support.mpi_runs import environment

import dicompiler
from dicompiler import networks
from dicompiler.base.errors import DicompilerError, RunError, UsageError
from dicompiler.base.schema import load_json
from dicompiler.driver.artifact import install, run, verify
from dicompiler.target.remote.hosts import Hosts
from dicompiler.target.run_records import RunOptions
from dicompiler.testing import temporarily_registered
from dicompiler_targets.engines.ncnn import NcnnEngine
from dicompiler_targets.engines.ncnn_converter import CONVERTERS
from dicompiler_targets.mpi import MpiTarget, fetch_headers, fetch_libraries, fetch_ncnn

SPLIT_TEXT = """<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 16, 16] x) => (float[1, 4, 16, 16] y)
{ c = Conv <pads = [1, 1, 1, 1]> (x, w)  e = Erf (c)  y = Conv <pads = [1, 1, 1, 1]> (e, w) }"""

TOOLCHAIN_FILE = Path(__file__).parents[2] / "examples" / "cmake_mpi" / "aarch64.cmake"


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def compile_network(model: Any, directory: Path, devices: int = 2, **options: Any) -> Path:
    chosen = {"strategy": "modnn", "engine": "ncnn", "target": "mpi"} | options
    dicompiler.compile(model, f"rpi4x{devices}", output=directory, **chosen)
    return directory


def suffixes(directory: Path) -> set[str]:
    return {path.suffix for path in directory.rglob("segment*") if path.suffix != ".bin"}


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("lenet", 2),
        ("lenet", 3),
        pytest.param("resnet8", 2, marks=pytest.mark.slow),
        pytest.param("light/squeezenet", 3, marks=pytest.mark.slow),
    ],
)
def test_ranks_compute_tiles_with_ncnn(name: str, devices: int, tmp_path: Path) -> None:
    directory = compile_network(networks.build(name, 0), tmp_path / "a", devices)
    assert ".net" in suffixes(directory)
    found = verify(directory)
    assert found.passed and "allowed: 1e-04" in str(found.checks), [check.detail for check in found.checks]


def test_ranks_compute_in_fp16_and_name_a_library_without_bf16(tmp_path: Path) -> None:
    directory = compile_network(networks.build("lenet", 0), tmp_path / "a", precision="fp16")
    found = verify(directory)
    (difference,) = re.findall(r"differs by (\S+) of max\|reference\| \(allowed: 1e-02\)", str(found.checks))
    # In fp32, the difference would be below 1e-6, so the ranks must have used the reduced precision.
    assert found.passed and float(difference) > 1e-4
    directory = compile_network(networks.build("lenet", 0), tmp_path / "b", precision="bf16")
    with pytest.raises(RunError, match="this ncnn has no bf16: build it with -DNCNN_BF16=ON, or compile with"):
        run(directory)


@pytest.mark.slow
def test_devices_have_different_engines(tmp_path: Path) -> None:
    text = 'name = "mixed"\n[network]\nkind = "switch"\nbandwidth = "1 Gbit/s"\nlatency = "0.1 ms"\n'
    for device, engine in (("a", "ncnn"), ("b", "onnxruntime"), ("c", "ncnn")):
        text += f'[[host]]\nname = "{device}"\nmemory = "1 GiB"\n'
        text += f'[[device]]\nname = "{device}"\nhost = "{device}"\nrate = "1 GFLOP/s"\nengine = "{engine}"\n'
    (tmp_path / "p.toml").write_text(text)
    options = {"strategy": "modnn", "target": "mpi", "output": tmp_path / "a"}
    dicompiler.compile(networks.build("lenet", 0), tmp_path / "p.toml", **options)
    assert [suffixes(tmp_path / "a" / name) for name in "abc"] == [{".net"}, {".onnx"}, {".net"}]
    assert verify(tmp_path / "a").passed


@pytest.mark.slow
def test_frames_equal_those_of_onnxruntime_except_for_rounding(tmp_path: Path) -> None:
    inputs = {"input": floats(1, 1, 32, 32)}
    outputs = []
    for engine in ("ncnn", "onnxruntime"):
        directory = compile_network(networks.build("lenet", 0), tmp_path / engine, engine=engine)
        result = run(directory, inputs, frames=5)
        assert all(np.array_equal(frame["output"], result.outputs[0]["output"]) for frame in result.outputs)
        outputs.append(result.outputs[0]["output"])
    np.testing.assert_allclose(outputs[0], outputs[1], atol=1e-5 * np.abs(outputs[1]).max())


def huge_page_bytes(directory: Path) -> int:
    """Return the most bytes in huge pages that a process in a subdirectory of `directory` has."""
    found = [0]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink().is_relative_to(directory):
                text = (process / "smaps_rollup").read_text()
                found.append(1024 * int(text.split("AnonHugePages:")[1].split()[0]))
    return max(found)


@pytest.mark.slow
def test_large_weights_are_in_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    has_huge_pages = setting.exists() and "[never]" not in setting.read_text()
    text = "g (float[1, 2048] x) => (float[1, 2048] y) { y = Gemm (x, w) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    model.graph.initializer.append(numpy_helper.from_array(floats(2048, 2048), "w"))
    directory = compile_network(model, tmp_path / "a", 1, strategy="single")
    inputs, found = {"x": floats(1, 2048)}, 0
    run(directory, inputs)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run, directory, inputs, 1000)
        while not running.done():
            found = max(found, huge_page_bytes(tmp_path))
            time.sleep(0.01)
    assert running.result()
    assert (found > floats(2048, 2048).nbytes // 2) == has_huge_pages


@pytest.mark.parametrize("strategy", ["single", "modnn"])
def test_onnxruntime_computes_what_ncnn_does_not_support(strategy: str, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(SPLIT_TEXT)
    model.graph.initializer.append(numpy_helper.from_array(floats(4, 4, 3, 3), "w"))
    directory = compile_network(model, tmp_path / "a", strategy=strategy)
    assert suffixes(directory) == {".net", ".onnx"}
    assert verify(directory).passed


def test_segment_that_converts_wrongly_stays_with_onnxruntime(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert_to_tanh(converter: Any, node: onnx.NodeProto, _: Any) -> None:
        converter.add("TanH", node.input[:1], node.output[0])

    monkeypatch.setitem(CONVERTERS, "Relu", convert_to_tanh)
    with caplog.at_level("WARNING", "dicompiler"):
        directory = compile_network(networks.build("lenet", 0), tmp_path / "a", 1, strategy="single")
    assert re.search(r"ncnn differs by [\d.e+-]+ of the largest output: onnxruntime computes it", caplog.text)
    assert suffixes(directory) == {".onnx"} and "ncnn" not in load_json(directory / "pi01" / "program.json")
    assert not list(directory.rglob("engine_ncnn.cc")) and verify(directory).passed


@pytest.mark.slow
def test_failure_plans_compute_with_ncnn(tmp_path: Path) -> None:
    directory = compile_network(networks.build("lenet", 0), tmp_path / "a", 3, tolerate_failures=1)
    assert verify(directory).passed
    inputs = {"input": floats(1, 1, 32, 32)}
    whole = run(directory, inputs).outputs[0]["output"]
    frames = [inputs] * 3
    for down in ("pi01", "pi03"):
        result = MpiTarget().run(directory, frames, RunOptions(timeout_s=60, start_without=(down,)))
        np.testing.assert_allclose(result.outputs[-1]["output"], whole, atol=1e-5 * np.abs(whole).max())


@pytest.mark.slow
def test_version_that_the_program_does_not_have_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dicompiler_targets.mpi import emit as mpi_emit

    installed = mpi_emit.metadata.version
    monkeypatch.setattr(
        mpi_emit.metadata, "version", lambda name: "1.0.20200101" if name == "ncnn" else installed(name)
    )
    directory = compile_network(networks.build("lenet", 0), tmp_path / "a")
    monkeypatch.undo()
    monkeypatch.setenv(
        fetch_ncnn.DIRECTORY_VARIABLE, str(fetch_ncnn.get_ncnn_directory(installed("ncnn"), platform.machine()))
    )
    with pytest.raises(
        RunError, match=r"the files were made for ncnn 1\.0\.20200101, this program has 1\.0\.\d+: build"
    ):
        run(directory)


@pytest.mark.slow
def test_library_that_is_missing_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fetch_headers.INCLUDE_VARIABLE, str(fetch_headers.get_include_directory()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(variable, f"file://{tmp_path}")
    directory = compile_network(networks.build("lenet", 0), tmp_path / "a")
    with pytest.raises(
        DicompilerError,
        match=r"^target mpi: pip cannot download the sources of ncnn 1\.0\.\d+ \(ERROR: .*NCNN_DIRECTORY",
    ):
        run(directory)
    monkeypatch.setenv(fetch_ncnn.DIRECTORY_VARIABLE, str(tmp_path))
    with pytest.raises(DicompilerError, match=r"NCNN_DIRECTORY: .* has no .*net\.h"):
        run(directory)


def test_engines_without_a_cpp_library_are_refused(tmp_path: Path) -> None:
    class OtherEngine(NcnnEngine):
        """An engine that only has a Python module."""

        name = "other"

    message = (
        "^engine: target 'mpi' computes with onnxruntime and ncnn only, not with other: use --engine onnxruntime or "
        "ncnn, or --target sockets$"
    )
    with temporarily_registered(OtherEngine), pytest.raises(UsageError, match=message):
        compile_network(networks.build("lenet", 0), tmp_path / "a", engine="other")


@pytest.mark.slow
def test_program_for_a_board_computes_the_same(tmp_path: Path) -> None:
    directory = compile_network(networks.build("resnet8", 0), tmp_path / "a", 1, strategy="single")
    package = directory / "pi01"
    fetched = [fetch_libraries.fetch_libraries("aarch64"), fetch_ncnn.get_ncnn_directory(version("ncnn"), "aarch64")]
    options = [f"-DCMAKE_TOOLCHAIN_FILE={TOOLCHAIN_FILE}", f"-DDICOMPILER_FETCHED={fetched[0]}"]
    configure = ["cmake", "-S", package, "-B", tmp_path / "build", *options, f"-DNCNN_DIRECTORY={fetched[1]}"]
    for command in (configure, ["cmake", "--build", tmp_path / "build", "--parallel", "2"]):
        subprocess.run(command, check=True, capture_output=True, env=environment())
    inputs = {"input": floats(1, 3, 32, 32)}
    np.savez(tmp_path / "x.npz", **inputs)
    command = [*crossing.emulator(tmp_path / "board"), tmp_path / "build" / "program", "--data", package]
    command += ["--inputs", tmp_path / "x.npz", "--outputs", tmp_path / "out"]
    subprocess.run(command, check=True, capture_output=True, env=environment() | crossing.RANKS, timeout=100)
    (path,) = (tmp_path / "out").rglob("*.npy")
    (expected,) = run(directory, inputs).outputs[0].values()
    np.testing.assert_allclose(np.load(path), expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_boards_get_the_library_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_btl", "self,tcp")
    with cluster(tmp_path, ("one", "two")) as made, made.inside():
        text = 'name = "boards"\n[network]\nkind = "switch"\nbandwidth = "100 Mbit/s"\nlatency = "0.2 ms"\n'
        for host in ("one", "two"):
            text += f'[[host]]\nname = "{host}"\nmemory = "1 GiB"\n'
            text += f'[[device]]\nname = "d-{host}"\nhost = "{host}"\nrate = "1 GFLOP/s"\n'
        (tmp_path / "p.toml").write_text(text)
        options = {"strategy": "modnn", "target": "mpi", "engine": "ncnn", "output": tmp_path / "a"}
        dicompiler.compile(networks.build("lenet", 0), tmp_path / "p.toml", **options)
        run_options = RunOptions(hosts=Hosts.load(made.hosts(tmp_path / "hosts.toml")), insecure=True)
        assert all(device.copied_bytes > 1 << 20 for device in install(tmp_path / "a", run_options))
        assert [device.copied_bytes for device in install(tmp_path / "a", run_options)] == [0, 0]
        inputs = {"input": floats(1, 1, 32, 32)}
        found = run(tmp_path / "a", inputs, 2, 60, run_options).outputs[-1]["output"]
    np.testing.assert_allclose(found, run(tmp_path / "a", inputs).outputs[0]["output"], atol=1e-6)
