"""The tflm target: split networks in the real TFLite-micro, compared with onnxruntime and LiteRT."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import onnx
import pytest
from support import tflm_runs
from support.generators import integers
from support.tflm_runs import checked, compiled, emitted, litert, micro, numbers
from test_random_plans import compiled as random_compiled

from dicompiler import networks
from dicompiler.base.errors import DicompilerError, RunError, UsageError
from dicompiler.base.schema import load_json
from dicompiler.driver.artifact import verify
from dicompiler.driver.compiler import compile
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.platform import platform_from_toml, uniform_platform
from dicompiler.partition.lowering import lower
from dicompiler.partition.segmentation import build_program
from dicompiler.plugin.pass_manager import PassManager, make_pipeline
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.comparison import random_inputs
from dicompiler.verify.executor import run_model
from dicompiler_targets.tflm import arena_size
from dicompiler_targets.tflm.flatbuffer import read_operator_codes
from dicompiler_targets.tflm.target import TflmTarget

PLANS = (("single", 1), ("modnn", 2), ("modnn", 4), ("stahl", 2), ("pipeline", 3))


def network(name: str) -> onnx.ModelProto:
    return tflm_runs.block() if name == "block" else networks.build(name)


@pytest.mark.parametrize(("strategy", "devices"), PLANS)
@pytest.mark.parametrize("name", ["lenet", "tiny", "block"])
def test_split_networks_equal_onnxruntime_and_send_the_predicted_bytes(
    name: str, strategy: str, devices: int, tmp_path: Path
) -> None:
    model = Model.load(network(name))
    checked(compiled(model, strategy, devices), model, tmp_path / "out", 1e-5)


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("modnn", 3)])
def test_uneven_pads_dilation_groups_lrn_averages_and_a_channel_shuffle(
    strategy: str, devices: int, tmp_path: Path
) -> None:
    model = Model.load(networks.build("quirks"))
    checked(compiled(model, strategy, devices), model, tmp_path / "out", 1e-5)


def _refused(call: Callable[[], object]) -> str:
    """Return the error of a call; '' if it succeeds."""
    try:
        call()
    except DicompilerError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_random_networks_under_random_plans_are_bit_equal_or_refused_in_one_line(tmp_path: Path) -> None:
    ran = 0
    for seed in range(9015, 9055):
        placed, model, _ = random_compiled(seed)
        assert placed.plan is not None
        program = build_program(placed.model, placed.plan.devices)
        directory = tmp_path / str(seed)
        refused = _refused(partial(emitted, replace(placed, program=program), directory))
        if refused:
            assert refused.startswith("target tflm: ") and "\n" not in refused
            assert not list(directory.iterdir())
            continue
        ran += 1
        inputs = integers(Random(seed), model.proto)
        reference = run_model(model, inputs)
        for outputs in TflmTarget().run(directory, [inputs], RunOptions(timeout_s=60)).outputs_by_device[0].values():
            assert all(np.array_equal(outputs[name], value) for name, value in reference.items()), seed
    assert ran >= 8


@pytest.mark.parametrize("name", ["tiny", "quirks"])
def test_every_segment_equals_litert_and_its_resolver_lists_its_operators(name: str, tmp_path: Path) -> None:
    emitted(compiled(network(name), "modnn", 2), tmp_path / "out")
    for place in sorted((tmp_path / "out").glob("*/manifest.json")):
        manifest = load_json(place)
        found: set[str] = set()
        for segment in manifest["segments"]:
            if segment["model"] is None:
                continue
            data = (place.parent / segment["model"]).read_bytes()
            inputs = numbers(data)
            for a, b in zip(litert(data, inputs), micro(data, inputs, segment["arena"]), strict=True):
                assert tflm_runs.difference(a, b) <= 1e-6
            found.update(read_operator_codes(data))
        assert manifest["operators"] == sorted(found)
        resolver = (place.parent / "resolver.cc").read_text()
        assert resolver.count("operators.Add") == len(found)
        assert f"MicroMutableOpResolver<{len(found)}>" in resolver


def test_least_arena_runs_and_64_bytes_less_do_not(tmp_path: Path) -> None:
    compilation = compiled(network("tiny"), "modnn", 2)
    emitted(compilation, tmp_path / "out", margin=0.0)
    tried = 0
    for place in sorted((tmp_path / "out").glob("*/manifest.json")):
        for segment in (s for s in load_json(place)["segments"] if s["model"] is not None):
            data = (place.parent / segment["model"]).read_bytes()
            trials = arena_size.ArenaTrials(data)
            assert trials.fits_arena(segment["arena"])
            assert not trials.fits_arena(segment["arena"] - 64)
            trials.close()
            tried += 1
    assert tried > 8


@pytest.mark.parametrize("name", ["tiny", "block", "light/squeezenet"])
def test_no_transpose_is_between_convolutions(name: str) -> None:
    from dicompiler_targets.tflm.lowering import lower_segment

    program = compiled(network(name)).program
    assert program is not None
    (segment,) = program.devices[0].segments
    assert "TRANSPOSE" not in lower_segment(segment, program.weights).operators


@pytest.mark.slow
def test_same_compilation_gives_the_same_bytes_whatever_the_hash_seed(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[2].split(':'); from pathlib import Path; from support.tflm_runs import *; "
        "emitted(compiled(block(), 'modnn', 2), Path(sys.argv[1]))"
    )
    paths = ":".join(path for path in sys.path if path)
    for seed in ("1", "2"):
        line = [sys.executable, "-c", code, str(tmp_path / seed), paths]
        subprocess.run(line, env=os.environ | {"PYTHONHASHSEED": seed}, check=True, capture_output=True)
    files = [
        {
            path.relative_to(tmp_path / seed): path.read_bytes()
            for path in (tmp_path / seed).rglob("*")
            if path.is_file()
        }
        for seed in ("1", "2")
    ]
    assert len(files[0]) > 30 and files[0] == files[1]


def test_compiled_artifact_verifies_and_its_memory_is_that_measured(tmp_path: Path) -> None:
    compilation = compile(network("lenet"), "nano33x2", "modnn", target="tflm", output=tmp_path / "out")
    assert verify(tmp_path / "out").passed
    memory = load_json(tmp_path / "out" / "memory.json")
    for entry, found in zip(memory["devices"], compilation.footprints, strict=True):
        assert (entry["ram"], entry["flash"]) == (found.ram, found.flash)
        assert entry["ram_limit"] == 256 * 1024 and entry["flash_limit"] == 1024 * 1024
        assert entry["ram"] == entry["arena"] + entry["beside_arena"] <= entry["ram_limit"]
        assert entry["arena_needed"] <= entry["arena"] and entry["ram_32_bit_estimate"] < entry["ram"]
        models = (tmp_path / "out" / entry["device"]).glob("*.tflite")
        assert entry["flash"] == sum(path.stat().st_size for path in models)
    (single,) = compilation.single_device_footprints
    assert single.device == "nano01" and single.ram > min(one.ram for one in compilation.footprints)


def tiled(model: onnx.ModelProto | Model, layers: str, parts: int) -> PipelineState:
    """Compile a network for one device, with a run of layers in fused tiles that are computed one after another."""
    passes = make_pipeline(f"normalise,infer-shapes,form-layers,fuse-tiles{{layers={layers} parts={parts}}}")
    return lower(PassManager(passes).run(PipelineState(model=Model.load(model), platform=uniform_platform(1))))


def test_tiles_of_equal_shape_share_a_model_and_their_inputs_and_outputs_are_copied_by_the_loop(
    tmp_path: Path,
) -> None:
    model = Model.load(network("block"))
    # The 12 rows give six tiles of two rows. Only the first tile has pads, so it needs another model.
    compilation = tiled(model, "stem.wide..stem.narrow", 6)
    checked(compilation, model, tmp_path / "out", 1e-5)
    manifest = load_json(tmp_path / "out" / "d0" / "manifest.json")
    models = [segment["model"] for segment in manifest["segments"]]
    assert len(models) == 7 and len(set(models)) == 3
    assert len(set(models[1:6])) == 1
    assert not {"STRIDED_SLICE", "CONCATENATION"} & set(manifest["operators"])
    assert len(sorted((tmp_path / "out" / "d0").glob("*.tflite"))) == 3
    (memory,) = load_json(tmp_path / "out" / "memory.json")["devices"]
    arenas = {segment["model"]: segment["arena"] for segment in manifest["segments"]}
    assert memory["arena"] == max(arenas.values())
    assert f"kMemoryBytes = {memory['ram']};" in (tmp_path / "out" / "d0" / "arena.h").read_text()
    program = compiled(model).program
    assert program is not None
    uncut = TflmTarget().device_footprints(program)
    assert memory["ram"] < uncut[0].ram


# -- input that the target rejects


@pytest.mark.parametrize(
    ("memory", "flash", "cause"),
    [("16 KiB", "1 MiB", r"needs 23\.6 kB \(7\.14 kB too much\) of RAM for activations and has 16\.4 kB: .* 'pool1'"),
     ("1 MiB", "64 KiB", r"needs 247 kB \(182 kB too much\) of flash for weights and has 65\.5 kB: .* layer 'fc3'"),
     ("30 KiB", "1 MiB", r"needs 31\.6 kB of RAM, \S+ B more than it has \(30\.7 kB\): cut layer 'conv1' "),
     ("1 MiB", "242 KiB", r"needs 249 kB of flash, \S+ B more than it has \(248 kB\): cut layer 'fc3' ")],
)  # fmt: skip
def test_board_too_small_is_an_error_with_the_bytes_and_the_layer(
    memory: str, flash: str, cause: str, tmp_path: Path
) -> None:
    text = f'host = [{{name = "d0", memory = "{memory}", flash = "{flash}"}}]\n'
    text += 'device = [{name = "d0", rate = "1 MFLOP/s"}]\nnetwork = {kind = "switch", bandwidth = "1 Mbit/s"}\n'
    platform = platform_from_toml(text, "one.toml")
    with pytest.raises(DicompilerError, match=cause) as caught:
        compile(network("lenet"), platform, "single", target="tflm", output=tmp_path / "out")
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_compile_writes_nothing_if_an_operator_cannot_be_expressed(tmp_path: Path) -> None:
    text = '<ir_version: 9, opset_import: ["" : 17]> g (float[1,4] x) => (float[1,4] y) { y = CumSum(x, axis) }'
    model = onnx.parser.parse_model(text.replace("CumSum(x, axis)", "Erf(x)"))
    with pytest.raises(DicompilerError, match=r"node 'y' \(Erf\): TFLite-micro has no operator for it: use target"):
        compile(model, "nano33x1", "single", target="tflm", output=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_without_the_packages_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tflite", None)
    with pytest.raises(DicompilerError, match=r"tflite is not installed: pip install 'dicompiler\[tflm\]'"):
        emitted(compiled(network("lenet")), tmp_path / "out")


def test_model_that_ends_the_interpreter_is_one_line() -> None:
    with pytest.raises(DicompilerError, match="segment 'x': TFLite-micro cannot run it: "):
        arena_size.measure_arenas([b"TFL3" * 30], ["segment 'x'"])


def test_damaged_artifact_and_wrong_options_are_errors(tmp_path: Path) -> None:
    compilation = compiled(network("lenet"), "modnn", 2)
    assert compilation.program is not None
    frame = random_inputs(compilation.program.inputs)
    directory = emitted(compilation, tmp_path / "out")
    with pytest.raises(UsageError, match="omit --keys"):
        TflmTarget().run(directory, [frame], RunOptions(timeout_s=10, start_manually=("d0",)))
    with pytest.raises(RunError, match="did not finish within 0 s"):
        TflmTarget().run(directory, [frame], RunOptions(timeout_s=0))
    (directory / "d1" / "manifest.json").unlink()
    with pytest.raises(DicompilerError, match=r"d1/manifest\.json: no such file: compile the model again"):
        TflmTarget().run(directory, [frame], RunOptions(timeout_s=10))
    with pytest.raises(ValueError, match="margin must be between 0 and 10"):
        TflmTarget(margin=-1)
