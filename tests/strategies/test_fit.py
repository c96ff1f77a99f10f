"""The strategy `fit`: plans fit by the target's measurement and are bit-equal."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from support import fitting
from support.fitting import boards, fitted, same_bits

from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.base.schema import load_json
from dicompiler.cli.command_line import main
from dicompiler.driver.compiler import compile
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import LayerShare, Part
from dicompiler.ir.platform import platform_to_toml
from dicompiler.networks.builder import NetworkBuilder
from dicompiler.partition.bounds_inference import make_share_task
from dicompiler.plugin.registry import registry
from dicompiler_strategies.fit_memory import estimate_arena
from dicompiler_strategies.fit_stages import FitBoard, StageEstimates
from dicompiler_targets.tflm import arena_size
from dicompiler_targets.tflm.target import TflmTarget

KIB = 1024


@cache
def model() -> Model:
    return fitting.quantised(fitting.relative())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the uncut network on a board that is large enough."""
    directory = tmp_path_factory.mktemp("whole") / "out"
    compilation = fitted(model(), boards(1, "4 MiB"), directory)
    assert compilation.footprints == compilation.single_device_footprints and compilation.footprints[0].ram > 112 * KIB
    return directory


def lanes(compilation: PipelineState) -> int:
    """Return the largest number of tiles of a layer on one device."""
    assert compilation.plan is not None
    every = [[part.device for part in parts] for parts in compilation.plan.layers.values()]
    return max(own.count(device) for own in every for device in own)


@pytest.mark.parametrize("ram", [96, 48])
def test_one_board_uses_the_coarsest_tiles_one_after_another(ram: int, whole: Path, tmp_path: Path) -> None:
    platform = boards(1, f"{ram} KiB")
    compilation = fitted(model(), platform, tmp_path / "out")
    (found,) = compilation.footprints
    assert found.ram <= ram * KIB < compilation.single_device_footprints[0].ram
    assert same_bits(model(), tmp_path / "out", whole)
    most = lanes(compilation)
    assert most > 1
    with pytest.raises(DicompilerError, match="fit: nothing fits 1 board of boards1: "):
        fitted(model(), platform, tmp_path / "coarser", f"fit{{tiles={most - 1}}}")
    assert not (tmp_path / "coarser").exists()


def test_uses_as_few_boards_as_possible_and_each_fits(whole: Path, tmp_path: Path) -> None:
    compilation = fitted(model(), boards(6, "64 KiB"), tmp_path / "out")
    count = len(compilation.footprints)
    assert 2 <= count <= 4 and all(one.ram <= 64 * KIB for one in compilation.footprints)
    assert lanes(compilation) == 1 and same_bits(model(), tmp_path / "out", whole)
    with pytest.raises(DicompilerError, match="nothing fits"):
        fitted(model(), boards(count - 1, "64 KiB"), tmp_path / "fewer", "fit{tiles=1}")
    serial = fitted(model(), boards(6, "64 KiB"), tmp_path / "serial", "fit{fewest_boards=true}")
    assert len(serial.footprints) == 1 and lanes(serial) > 1


def test_shared_arena_is_the_smallest_that_runs(tmp_path: Path) -> None:
    compile(model(), boards(1, "48 KiB"), "fit", target="tflm{margin=0.0}", output=tmp_path / "out")
    manifest = load_json(tmp_path / "out" / "m1" / "manifest.json")
    arenas = {segment["model"]: segment["arena"] for segment in manifest["segments"] if segment["model"]}
    assert 1 < len(arenas) < len(manifest["segments"])
    for name, arena in arenas.items():
        trials = arena_size.ArenaTrials((tmp_path / "out" / "m1" / name).read_bytes())
        assert trials.fits_arena(arena) and not trials.fits_arena(arena - 64)
        trials.close()


def test_weights_too_large_for_one_board_are_cut_by_channels(tmp_path: Path) -> None:
    net = NetworkBuilder("dense", (1, 3, 8, 8))
    x = net.flatten(net.conv("input", "conv", 16, 3, 1, 1), "flatten")
    network = Model.load(net.to_model(net.gemm(x, "classifier", 100), 0))
    compilation = fitted(network, boards(3, "64 KiB", "256 KiB"), tmp_path / "out")
    assert compilation.plan is not None
    assert len(compilation.plan.layers["classifier"]) > 1
    assert all(one.flash <= 256 * KIB for one in compilation.footprints)
    assert compilation.verify().passed


def test_boards_without_flash_store_models_in_ram() -> None:
    net = NetworkBuilder("dense", (1, 3, 8, 8))
    x = net.flatten(net.conv("input", "conv", 16, 3, 1, 1), "flatten")
    layers = load_problem(Model.load(net.to_model(net.gemm(x, "classifier", 100), 0)), boards(3, "4 MiB")).layers
    stages = StageEstimates(layers, 0.0)
    kinds = set()
    for ram in range(32 * KIB, 640 * KIB, 16 * KIB):
        chosen = stages.find_stages([FitBoard(f"m{i}", ram, 0) for i in (1, 2, 3)], 4) or ()
        kinds |= {stage.kind for stage in chosen}
        for stage in chosen:
            needs = stages.estimate_stage(stage.first, stage.last, stage.kind, len(stage.devices))
            assert max(need.arena + need.flash for need in needs) <= ram
    assert kinds == {"whole", "channels"}


@pytest.mark.parametrize(
    ("ram", "flash", "cause"),
    [("8 KiB", "2 MiB",
      r"layer '\S+' needs about \S+ kB of RAM in the smallest tiles, \S+ kB more than a board has \(8\.19 kB\)"),
     ("96 KiB", "12 KiB", r"about \S+ kB of flash, \S+ kB more than all boards have \(12\.3 kB\), most of it for")],
)  # fmt: skip
def test_error_names_missing_bytes_and_the_layer(ram: str, flash: str, cause: str, tmp_path: Path) -> None:
    with pytest.raises(DicompilerError, match=cause) as caught:
        fitted(model(), boards(1, ram, flash), tmp_path / "out", "fit{tiles=8}")
    assert str(caught.value).startswith("fit: nothing fits 1 board of boards1: ") and "\n" not in str(caught.value)
    assert "--quantize-samples" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_error_advises_to_quantize_a_float_model_whose_weights_exceed_the_flash() -> None:
    problem = load_problem(networks.build("lenet", 0), boards(1, "96 KiB", "12 KiB"), target=None)
    with pytest.raises(DicompilerError, match=r"use larger boards or int8 weights and tensors \(--quantize-samples\)$"):
        registry().make("strategies", "fit").plan(problem)


def test_estimate_is_close_to_measurement() -> None:
    problem = load_problem(model(), boards(1, "4 MiB"))
    layers = problem.layers.layers
    for size in (1, 2, 5, len(layers)):
        plan = problem.build_plan({layer.name: [Part("m1", lane=i // size % 2)] for i, layer in enumerate(layers)})
        program = problem.draft_program(plan).program
        assert program is not None
        runs = [layers[start : start + size] for start in range(0, len(layers), size)]
        tasks = [[make_share_task(problem.layers, layer, LayerShare()) for layer in run] for run in runs]
        estimate = max(estimate_arena(problem.layers, own, 0).arena for own in tasks)
        (found,) = TflmTarget(margin=0.0).device_footprints(program)
        assert abs(found.details["arena"] - estimate) <= 0.05 * estimate


def test_command_prints_ram_and_flash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(model().to_proto(), tmp_path / "net.onnx")
    (tmp_path / "boards.toml").write_text(platform_to_toml(boards(1, "64 KiB")))
    line = ["compile", str(tmp_path / "net.onnx"), "--platform", str(tmp_path / "boards.toml"), "--fit"]
    line += ["--target", "tflm", "-o", str(tmp_path / "out")]
    assert main(line) == 0
    shown = capsys.readouterr().out
    assert "RAM of the fullest device: " in shown and "of a device with the whole network: 12" in shown
    assert "multiplications: 1.0" in shown and "ram 32 bit estimate" in shown
    assert main([*line, "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    (device,) = memory["devices"]
    assert device["ram"] <= device["ram_limit"] == 64 * KIB and device["flash"] <= device["flash_limit"] == 2048 * KIB
    assert memory["single_device_ram"] > 112 * KIB and 1 < memory["multiplication_ratio"] < 1.2
    assert main([*line, "--strategy", "single"]) == 2
    assert "--fit is a strategy" in capsys.readouterr().err


def test_finds_a_plan_without_a_target() -> None:
    problem = load_problem(model(), boards(1, "64 KiB"))
    plan = registry().make("strategies", "fit").plan(problem)
    assert np.max([len(parts) for parts in plan.layers.values()]) > 1
