"""Tests of profile packages: pieces, the script that times them and links, and the command."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support import profiles
from support.running import WAIT_S

from dicompiler import networks
from dicompiler.base.errors import RunError
from dicompiler.cli import main
from dicompiler.cli.file_io import write_json
from dicompiler.cost.op_counts import count_operations
from dicompiler.cost.profile import Profile, layer_signature, load_profile, network_digest
from dicompiler.driver.compiler import compile
from dicompiler.driver.prepare import prepare
from dicompiler.ir.layers import TensorKey
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import is_placeholder
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import LayerShare
from dicompiler.ir.platform import Platform
from dicompiler.ir.regions import to_slices
from dicompiler.measure import link_benchmark, profile_script
from dicompiler.measure import profile_package as profiling
from dicompiler.measure.remote_profiling import BoardMeasurements, MeasuredBoard, apply_measurements
from dicompiler.partition.bounds_inference import make_share_task
from dicompiler.target.engine import BoardPackage
from dicompiler.verify.executor import OrtSession
from dicompiler_targets.engines.ncnn import NcnnEngine

TEXT = """<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 16, 16] x) => (float[1, 10] y)
{ a = Conv <pads = [1, 1, 1, 1]> (x, v)  b = Relu (a)  c = Conv <pads = [1, 1, 1, 1]> (b, w)  d = Relu (c)
  p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (d)  f = Flatten (p)  y = Gemm (f, u) }"""
SHAPES = {"v": (4, 4, 3, 3), "w": (4, 4, 3, 3), "u": (256, 10)}


def model() -> Model:
    """Return a network of two equal convolutions, a pool and a fully connected layer with a large weight."""
    proto, random = onnx.parser.parse_model(TEXT), np.random.default_rng(0)
    arrays = {name: random.integers(-2, 3, shape).astype(np.float32) for name, shape in SHAPES.items()}
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return Model.load(proto)


def prepared() -> PipelineState:
    return prepare(model())


def packed(directory: Path, tiles: tuple[int, ...] = (1, 2, 4), **options: Any) -> Path:
    directory.mkdir()
    profiling.write_package(prepared(), directory, tiles, **options)
    return directory


def script(directory: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a package's script as on a device, without this checkout."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(directory / profiling.SCRIPT_FILE), *map(str, arguments)]
    return subprocess.run(command, env=env, cwd=directory, capture_output=True, text=True, timeout=120, check=False)


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """The profile that the package's script writes in a process without dicompiler."""
    directory = packed(tmp_path_factory.mktemp("package") / "p", device="pi*")
    done = script(directory, "--repeat", 5, "--threads", 1)
    assert done.returncode == 0, done.stderr
    profile = load_profile(directory / "PROFILE.json")
    written, *reasons = done.stdout.splitlines()
    count, unmeasured = sum(len(layer.names) for layer in profile.layers.values()), len(profile.unmeasured)
    assert written.startswith(f"written: PROFILE.json, for device pi*: {count} of {count + unmeasured} layers")
    assert len(reasons) == unmeasured and all(line.startswith("not measured: layer ") for line in reasons)
    return profile


class TestPackage:
    def test_same_model_gives_same_bytes(self, tmp_path: Path) -> None:
        one, two = content(packed(tmp_path / "one")), content(packed(tmp_path / "two"))
        assert one == two
        assert {"profile_run.py", "link_benchmark.py", "runtime_costs_fit.py", "ort_session.py"} <= set(one)
        assert not any(str(tmp_path).encode() in text for text in one.values())

    def test_has_no_large_weights(self, tmp_path: Path) -> None:
        package = packed(tmp_path / "p")
        tasks = json.loads((package / "tasks.json").read_text())
        fc = next(layer for layer in tasks["layers"] if layer["kind"] == "Gemm")
        constants = [constant for task in fc["measurements"] for constant in task["constants"]]
        assert {"name": "u", "dtype": "FLOAT", "number": 1, "shape": [256, 10]} in constants
        assert max(path.stat().st_size for path in (package / "pieces").iterdir()) < 4096

    def test_script_needs_only_numpy_and_onnxruntime(self, tmp_path: Path) -> None:
        package = packed(tmp_path / "p")
        files = tuple(profiling.SHIPPED_MODULES)
        trees = [ast.parse((package / name).read_text()) for name in files]
        imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {
            (node.module or "" if isinstance(node, ast.ImportFrom) else alias.name).partition(".")[0]
            for node in imports
            for alias in node.names
        } - {Path(name).stem for name in files}
        assert names - set(sys.stdlib_module_names) == {"numpy", "onnxruntime"}

    def test_has_equal_layers_once(self, tmp_path: Path) -> None:
        tasks = json.loads((packed(tmp_path / "p") / "tasks.json").read_text())
        assert sorted(len(layer["names"]) for layer in tasks["layers"]) == [1, 1, 1, 2]

    def test_omits_and_names_layers_without_static_shapes(self, tmp_path: Path) -> None:
        text = """<ir_version: 8, opset_import: ["": 17]> g (float[8] x) => (int64[1, N] y, float[8] z)
        { z = Relu (x)  y = NonZero (z) }"""
        profiling.write_package(prepare(Model.load(onnx.parser.parse_model(text))), tmp_path)
        tasks = json.loads((tmp_path / "tasks.json").read_text())
        assert [(one["name"], "no static shape" in one["reason"]) for one in tasks["unmeasured"]] == [
            (tasks["unmeasured"][0]["name"], True)
        ]
        assert len(tasks["layers"]) == 1


class TestPieces:
    def test_piece_computes_its_region_of_the_layer(self) -> None:
        compilation, compared = prepared(), 0
        layers, weights = compilation.layers, compilation.model.weights
        assert layers is not None
        random = np.random.default_rng(1)
        for layer in layers.layers:
            whole, *others = profiling.layer_pieces(compilation.model, layers, layer, (2, 4))
            given = [random.integers(-3, 4, layers.tensors[name].shape).astype(np.float32) for name in layer.inputs]
            names = [value.name for value in whole.model.graph.input]
            (expected,) = OrtSession(whole.model, weights, "whole").run(dict(zip(names, given, strict=True))).values()
            for piece in others:
                region, inner = piece.share.region, piece.model.graph
                if region is None or any(is_placeholder(tensor) for tensor in inner.initializer):
                    continue
                task = make_share_task(layers, layer, LayerShare(region))
                needs = [task.needs[TensorKey(name)] for name in layer.inputs]
                feeds = {v.name: g[to_slices(n)] for v, g, n in zip(inner.input, given, needs, strict=True)}
                (made,) = OrtSession(piece.model, {}, "piece").run(feeds).values()
                assert np.array_equal(made, expected[to_slices(region)])
                compared += 1
        assert compared >= 8

    def test_each_tile_size_occurs_once(self) -> None:
        layers = prepared().layers
        assert layers is not None
        conv = next(layer for layer in layers.layers if layer.nodes[layer.anchor].op == "Conv")
        found = [(p.cut, p.size) for p in profiling.layer_pieces(prepared().model, layers, conv, (1, 2, 4, 8, 16))]
        assert found == [
            ("whole", 1), ("axis 2", 8), ("axis 2", 4), ("axis 2", 2), ("axis 2", 1),
            ("axis 3", 8), ("axis 3", 4), ("axis 3", 2), ("axis 3", 1), ("axis 1", 2), ("axis 1", 1),
            ("reduce", 2), ("merge", 2), ("reduce", 1), ("merge", 4),
        ]  # fmt: skip

    def test_inner_tile_has_halo_on_both_sides(self) -> None:
        compilation = prepared()
        layers = compilation.layers
        assert layers is not None
        (piece,) = [
            p for p in profiling.layer_pieces(compilation.model, layers, layers.layers[0], (4,)) if p.cut == "axis 2"
        ]
        assert [shape_of_value(value) for value in piece.model.graph.input] == [(1, 4, 6, 16)]


def shape_of_value(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    return tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)


class TestMeasuring:
    @pytest.mark.slow
    def test_piece_has_times_and_operation_counts(self, measured: Profile) -> None:
        layers = prepared().layers
        assert layers is not None
        assert measured.model_digest == network_digest(layers)
        assert (measured.device, measured.threads, dict(measured.unmeasured)) == ("pi*", 1, {})
        for layer in layers.layers:
            own = measured.layers[layer_signature(layers, layer)]
            assert layer.name in own.names
            for one in own.measurements:
                assert 0 < one.min_s <= one.median_s <= one.max_s
            whole = next(one for one in own.measurements if one.cut == "whole")
            assert (whole.flops, whole.moved_bytes) == (
                count_operations(layers, layer).flops,
                count_operations(layers, layer).moved_bytes,
            )

    def test_compilation_uses_profile(self, tmp_path: Path) -> None:
        layers = prepared().layers
        assert layers is not None
        document = profiles.document(layers)
        layer_s = sum(len(own["names"]) * own["measurements"][0]["median_s"] for own in document["layers"])
        write_json(tmp_path / "profile.json", document | {"whole_model_s": 0.9 * layer_s})
        cost = f"profile{{file={json.dumps(str(tmp_path / 'profile.json'))}}}"
        made = compile(model(), platform="rpi4x2", strategy="modnn", cost=cost)
        assert made.single_device_metrics is not None
        (call,) = {costs.call for costs in made.problem.runtime_costs.values()}
        own_s = 0.9 * layer_s - load_profile(tmp_path / "profile.json").call_s
        assert made.single_device_metrics.latency_s == pytest.approx(own_s + call)

    @pytest.mark.slow
    def test_keeps_existing_links(self, tmp_path: Path) -> None:
        package = packed(tmp_path / "p", (1,))
        known = {"hosts": ["a", "b"], "bandwidth": 1e6, "latency": 0.5}
        (package / "PROFILE.json").write_text(json.dumps({"links": [known]}))
        assert script(package, "--repeat", 1).returncode == 0
        profile = json.loads((package / "PROFILE.json").read_text())
        assert profile["links"] == [known]
        assert sum(len(layer["names"]) for layer in profile["layers"]) == 5

    def test_names_pieces_that_do_not_run(self, tmp_path: Path) -> None:
        package = packed(tmp_path / "p", (1,))
        (package / "pieces" / "0001-00.onnx").write_bytes(b"no model")
        assert script(package, "--repeat", 1).returncode == 0
        profile = load_profile(package / "PROFILE.json")
        assert len(profile.unmeasured) == 2
        assert all("onnxruntime cannot run it alone" in reason for reason in profile.unmeasured.values())

    def test_ignores_passes_in_which_the_network_did_not_run(self) -> None:
        slow, quick = {"whole_model_s": 2.0, "call_s": 0.1}, {"whole_model_s": 1.0, "call_s": 0.2}
        assert profile_script.fastest_network_pass([{}, slow, quick]) == quick
        assert profile_script.fastest_network_pass([{}, {}]) == {}

    def test_script_reports_missing_tasks(self, tmp_path: Path) -> None:
        package = packed(tmp_path / "p", (1,))
        (package / "tasks.json").unlink()
        done = script(package)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert "tasks.json" in done.stderr
        with pytest.raises(RunError, match=r"the measurement failed: .*tasks\.json"):
            profiling.run_package(package, tmp_path / "x.json", None, 1)

    def test_makes_tensors_of_all_types(self) -> None:
        from dicompiler.measure.profile_script import random_tensor

        random = np.random.default_rng(0)
        kinds = {"FLOAT": 1, "UINT8": 2, "INT8": 3, "INT64": 7, "BOOL": 9, "FLOAT16": 10, "BFLOAT16": 16}
        for name, number in kinds.items():
            made = random_tensor({"dtype": name, "number": number, "shape": [2, 3]}, random)
            assert (made.element_type(), made.shape()) == (number, [2, 3])


class TestColdCosts:
    def test_finds_costs_per_call_and_byte(self) -> None:
        rows = [(1.0, 0.0, 5e5), (1.0, 1e5, 0.0), (1.0, 2e6, 1e5), (1.0, 9e6, 3e5)]
        wanted = [2e-5 + 3e-11 * weights + 7e-11 * read for _, weights, read in rows]
        assert profile_script.fit_nonnegative(rows, wanted) == pytest.approx([2e-5, 3e-11, 7e-11])

    def test_no_cost_is_negative(self) -> None:
        least = profile_script.fit_nonnegative
        assert least([(1.0, 0.0, 0.0), (1.0, 1.0, 0.0)], [5.0, 3.0]) == pytest.approx([4.0, 0.0, 0.0])
        assert least([(1.0, 1.0, 0.0), (1.0, 2.0, 0.0)], [0.0, 3.0]) == pytest.approx([0.0, 6 / 5, 0.0])
        assert least([(1.0, 0.0, 0.0)], [-1.0]) == [0.0, 0.0, 0.0]

    @pytest.mark.parametrize("engine", ["", "ncnn"])
    def test_pieces_keep_their_inputs_in_the_given_memory(self, engine: str, tmp_path: Path) -> None:
        package = packed(tmp_path / "p", (2,), engines=(NcnnEngine(),))
        code = """if True:
            import sys, numpy, profile_run
            task = profile_run.load_tasks()["layers"][0]["measurements"][0]
            memory = numpy.ones(100_000, "float32")
            session, feeds, outputs, _ = profile_run.open_piece(task, 1, sys.argv[1], memory)
            memory[:] = 2
            arrays = session._inputs if sys.argv[1] else [value.numpy() for value in feeds.values()]
            assert arrays and all((array == 2).all() for array in arrays)
            """
        subprocess.run([sys.executable, "-c", code, engine], cwd=package, check=True, timeout=60)

    def test_median_piece_reads_all_weights(self) -> None:
        pieces = [{"weight_bytes": w, "moved_bytes": moved} for w, moved in ((8, 100), (8, 60), (8, 40), (4, 50))]
        assert profile_script.median_piece(pieces) == pieces[1]


@contextlib.contextmanager
def serving(package: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a script that serves on a free port of this host."""
    process = subprocess.Popen(
        [sys.executable, str(package / profiling.SCRIPT_FILE), "--serve", "127.0.0.1:0", "--name", "there"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline().split()[-1])
    finally:
        process.kill()
        process.communicate()


class TestLinks:
    def test_adds_measured_link_to_the_profile(self, tmp_path: Path) -> None:
        package, profile = packed(tmp_path / "p", (1,)), tmp_path / "profile.json"
        for _ in range(2):
            with serving(package) as (server, port):
                options = ("--connect", f"127.0.0.1:{port}", "--name", "here", "--repeat", 2, "--megabytes", 1)
                done = script(package, "-o", profile, *options)
                assert done.returncode == 0, done.stderr
                assert server.wait(WAIT_S) == 0
        (link,) = load_profile(profile).links
        assert link.hosts == ("here", "there")
        assert link.bandwidth > 1e6 and link.latency > 0
        assert f'bandwidth = "{link.bandwidth / 1e6:.1f} Mbit/s"' in done.stdout
        output = f"# written: {profile}, with this link for a platform file\n"
        assert done.stdout.startswith(f'{output}[[link]]\nhosts = ["here", "there"]\nbandwidth = "')

    def test_bandwidth_includes_headers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Platforms state the bandwidth of links with headers."""
        monkeypatch.setattr(link_benchmark, "_time_request", lambda _, kind, *__: 0.5 if kind == b"p" else 1.5)
        with serving(packed(tmp_path / "p", (1,))) as (_, port):
            link = link_benchmark.measure_link("127.0.0.1", port, "here", 1, 1000)
        assert (link["bandwidth"], link["latency"]) == (pytest.approx(8 * 1000 * 1.05), 0.25)

    def test_transfers_that_take_no_time_are_measured_again_and_then_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The times of two measurements' requests. Each has 20 round trips, and then one transfer in each direction. In
        # the first one, transfers take no longer than round trips, which cannot be true.
        again = [*[0.5] * 42, 1.5, 1.5]
        monkeypatch.setattr(link_benchmark, "_time_request", lambda *_: again.pop(0) if again else 0.5)
        with serving(packed(tmp_path / "p", (1,))) as (_, port):
            assert link_benchmark.measure_link("127.0.0.1", port, "here", 1, 1000)["latency"] == 0.25
        assert not again
        with (
            serving(packed(tmp_path / "q", (1,))) as (_, port),
            pytest.raises(link_benchmark.LinkError, match=r"^1000 bytes took no longer than an empty message \(500 ms"),
        ):
            link_benchmark.measure_link("127.0.0.1", port, "here", 1, 1000)

    def test_serves_next_client_after_an_invalid_one(self, tmp_path: Path) -> None:
        package = packed(tmp_path / "p", (1,))
        with serving(package) as (server, port):
            with socket.create_connection(("127.0.0.1", port), 10) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(100) == b""
            options = ("--connect", f"127.0.0.1:{port}", "--repeat", 1, "--megabytes", 1)
            assert script(package, "-o", tmp_path / "x.json", *options).returncode == 0
            assert server.wait(WAIT_S) == 0

    def test_reports_missing_server_in_one_line(self, tmp_path: Path) -> None:
        package = packed(tmp_path / "p", (1,))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        done = script(package, "--connect", f"127.0.0.1:{port}")
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert not (package / "PROFILE.json").exists()
        assert "invalid address 'nowhere'" in script(package, "--connect", "nowhere").stderr


class TestCommand:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        Model.load(networks.build("lenet")).save(tmp_path / "lenet.onnx")
        return tmp_path / "lenet.onnx"

    @pytest.mark.slow
    def test_writes_profile(self, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        output = tmp_path / "p.json"
        options = ["--tiles", "1,2", "--repeat", "1", "--threads", "1", "--device", "pi*"]
        assert main(["profile", str(file), "-o", str(output), *options]) == 0
        profile = load_profile(output)
        assert (profile.device, profile.threads) == ("pi*", 1)
        printed = capsys.readouterr().out
        assert printed.startswith("8 layers, 8 distinct")
        assert profile.whole_model_s is not None
        # On a busy host, a measured cost can be 0. The profile then names the target as not measured.
        assert {*profile.runtime_costs, *profile.unmeasured_runtimes} == {"sockets"}
        assert ("\nruntime of sockets: " in printed) == bool(profile.runtime_costs)
        assert ("\nnot measured: runtime of sockets: the host " in printed) == bool(profile.unmeasured_runtimes)
        # Weights are read with at least 1 MB/s, so a byte takes less than 1 µs.
        assert 0 <= profile.weight_byte_s < 1e-6
        assert 0 <= profile.cold_call_s < 1e-2
        assert printed.endswith(f"written: {output}\n")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["lenet.onnx", "p.json"]

    def test_writes_package_without_measuring(self, file: Path, tmp_path: Path) -> None:
        assert main(["profile", str(file), "--package", str(tmp_path / "p"), "--tiles", "2"]) == 0
        assert (tmp_path / "p" / profiling.SCRIPT_FILE).is_file()
        assert (tmp_path / "p" / "runtime" / "sockets" / "play.py").is_file()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["lenet.onnx", "p"]

    @pytest.mark.parametrize(
        ("arguments", "code", "message"),
        [
            ([], 2, "give either -o PROFILE.json or --package DIR"),
            (["-o", "x.json", "--package", "d"], 2, "give either"),
            (["-o", "x.json", "--tiles", "1,two"], 2, "--tiles must be numbers from 1 to 1024"),
            (["-o", "x.json", "--repeat", "0"], 2, "'--repeat'"),
            (["-o", "nowhere/x.json"], 1, "there is no directory 'nowhere'"),
            (["-o", "x.json", "--target", "socket"], 2, "unknown target 'socket'"),
            (["-o", "x.json", "--target", "tflm"], 2, "target 'tflm' has no benchmark programs"),
            (["--package", "."], 1, "the path exists: choose another directory"),
        ],
    )
    def test_reports_usage_errors_in_one_line(
        self,
        arguments: list[str],
        code: int,
        message: str,
        file: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(file.parent)
        assert main(["profile", str(file), *arguments]) == code
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        assert message in printed.err
        assert [path.name for path in file.parent.iterdir()] == ["lenet.onnx"]


@pytest.mark.slow
def test_measures_layers_of_other_kinds(tmp_path: Path) -> None:
    """The inputs of such layers are in range, such as indices, and an input of two nodes is created once."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 8, 8] x, int64[3] i) => (float[1, 3, 8, 8] y)
    { z = Gather <axis = 1> (x, i)  s = Sigmoid (z)  y = Mul (s, z) }"""
    profiling.write_package(prepare(Model.load(onnx.parser.parse_model(text))), tmp_path, (1, 2))
    assert script(tmp_path, "--repeat", 1).returncode == 0
    profile = load_profile(tmp_path / "PROFILE.json")
    assert not profile.unmeasured and profile.layers


class TestEngines:
    """Engines other than onnxruntime, which are measured if the device has them."""

    @pytest.mark.slow
    def test_script_measures_the_engines_that_the_device_has(self, tmp_path: Path) -> None:
        package = packed(tmp_path / "p", (1, 2), engines=[NcnnEngine(), MissingEngine()])
        assert not any(path.stat().st_size > 4096 for path in (package / "pieces").iterdir())
        done = script(package, "--repeat", 1, "--threads", 1)
        assert done.returncode == 0, done.stderr
        profile = load_profile(package / "PROFILE.json")
        assert profile.engines.keys() == {"ncnn"}
        measured = profile.engines["ncnn"]
        assert measured.layers.keys() == profile.layers.keys()
        assert measured.whole_model_s is not None and measured.call_s > 0
        assert measured.cold_costs.keys() == {"weight_byte_s", "read_byte_s", "cold_call_s"}
        conv = next(layer for layer in profile.layers.values() if layer.kind == "Conv")
        cuts = {piece.cut for piece in measured.layers[conv.signature]}
        assert cuts >= {"whole", "axis 1", "axis 2", "axis 3", "reduce"}
        assert [*measured.transfers] == [4 * math.prod(shape) for shape in profiling.TRANSFER_SHAPES]
        assert measured.call_s < 2 * measured.transfers[4 * 16 * 7 * 7] < max(measured.transfers.values())

    def test_pieces_that_an_engine_cannot_run_are_left_to_onnxruntime(self, tmp_path: Path) -> None:
        package = packed(tmp_path / "p", (1,), engines=[NcnnEngine()])
        tasks = json.loads((package / "tasks.json").read_text())
        damaged = tasks["layers"][0]
        for piece in damaged["measurements"]:
            (package / piece["engines"]["ncnn"]["file"]).write_bytes(b"no network")
        done = script(package, "--repeat", 1, "--threads", 1)
        assert done.returncode == 0, done.stderr
        profile = load_profile(package / "PROFILE.json")
        assert profile.layers.keys() - profile.engines["ncnn"].layers.keys() == {damaged["signature"]}
        assert profile.engines["ncnn"].cold_costs

    def test_pieces_that_an_engine_does_not_support_are_omitted(self, tmp_path: Path) -> None:
        text = """<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y)
        { e = Erf (x)  y = MaxPool <kernel_shape = [1, 1]> (e) }"""
        profiling.write_package(
            prepare(Model.load(onnx.parser.parse_model(text))), tmp_path, (1,), engines=[NcnnEngine()]
        )
        tasks = json.loads((tmp_path / "tasks.json").read_text())
        assert tasks["whole"]["engines"] == {} and tasks["call"]["engines"].keys() == {"ncnn"}
        kinds = {layer["kind"]: layer["measurements"][0]["engines"].keys() for layer in tasks["layers"]}
        assert kinds == {"Erf": set(), "MaxPool": {"ncnn"}}

    @pytest.mark.slow
    def test_platform_of_measured_boards_has_the_rate_of_each_engine(self, tmp_path: Path) -> None:
        package = packed(tmp_path / "p", (1,), engines=[NcnnEngine()])
        assert script(package, "--threads", 1).returncode == 0
        measured = json.loads((package / "PROFILE.json").read_text())
        board = MeasuredBoard("pi01", "pi01", None, 4, 1 << 30, measured)  # type: ignore[arg-type]
        measurements = BoardMeasurements((board,), (), ())
        for platform in (
            apply_measurements(measurements, None),
            apply_measurements(measurements, Platform.load("rpi4x1")),
        ):
            (entry,) = platform.devices[0].engine_rates
            assert (entry.engine, entry.kind) == ("ncnn", "*") and entry.rate > 0


@dataclass(frozen=True)
class MissingEngine(NcnnEngine):
    """An engine that no device has."""

    name: ClassVar[str] = "missing"
    packages: ClassVar[tuple[BoardPackage, ...]] = (BoardPackage("no_such_package", (1, 0)),)
