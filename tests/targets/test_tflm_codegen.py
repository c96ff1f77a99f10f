"""The generated C++ of several microcontrollers, against the interfaces of TFLite Micro, with real transport.

A stand-in computes the models. Everything else is the program as it is flashed.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fitting import boards, fitted, quantised, relative
from support.tflm_runs import CODES, compiled, emitted

from dicompiler import networks
from dicompiler.base.schema import load_json
from dicompiler_targets.tflm.lowering import hoist_segment_copies
from dicompiler_targets.tflm.memory_layout import plan_memory
from dicompiler_targets.tflm.run import copy_strided

FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-I.", f"-I{CODES}"]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact for three devices that all exchange tensors."""
    return emitted(compiled(networks.build("tiny"), "modnn", 3), tmp_path_factory.mktemp("tflm") / "out")


def test_every_source_compiles_without_a_warning(artifact: Path) -> None:
    for device in ("d0", "d1"):
        sources = sorted(path.name for path in (artifact / device).glob("*.cc"))
        assert {"main.cc", "resolver.cc", "program.cc", "transport_posix.cc", "transport_uart.cc"} <= set(sources)
        subprocess.run(["g++", *FLAGS, "-fsyntax-only", *sources], cwd=artifact / device, check=True, timeout=120)


def test_programs_exchange_the_listed_tensors_over_tcp(artifact: Path, tmp_path: Path) -> None:
    found, expected = _play(artifact, tmp_path)
    assert found == b"".join(expected) and len(set(expected)) == len(expected)


def test_cmake_demands_the_paths_of_tflite_micro(artifact: Path, tmp_path: Path) -> None:
    for options, message in (
        ([], "TFLM_INCLUDE is missing"),
        ([f"-DTFLM_INCLUDE={CODES};{tmp_path}/nothing"], "TFLM_INCLUDE names"),
        ([f"-DTFLM_INCLUDE={CODES}", f"-DTFLM_LIBRARY={tmp_path}/nothing.a"], "TFLM_LIBRARY names"),
    ):
        source = next(path.parent for path in artifact.glob("*/CMakeLists.txt"))
        line = ["cmake", "-S", source, "-B", tmp_path, *options]
        done = subprocess.run(line, timeout=120, capture_output=True, text=True)
        assert done.returncode == 1 and message in " ".join(done.stderr.split()), done.stderr


@pytest.mark.slow
def test_tiles_in_turn_share_models_and_memory_in_the_program_too(tmp_path: Path) -> None:
    """If interpreters, tensors and arenas shared a place at the same time, the stand-in or outputs would show it."""
    place = tmp_path / "out"
    fitted(quantised(relative()), boards(1, "48 KiB"), place)
    manifest = load_json(place / "m1" / "manifest.json")
    models = [segment["model"] for segment in manifest["segments"]]
    ends = [segment["arena_offset"] + segment["arena"] for segment in manifest["segments"]]
    assert len(set(models)) < len(models)
    assert any(tensor["offset"] < max(ends) for tensor in manifest["tensors"])
    found, expected = _play(place, tmp_path)
    assert found == b"".join(expected) and len(set(expected)) == len(expected)


def _play(artifact: Path, tmp_path: Path) -> tuple[bytes, list[bytes]]:
    """Build and run an artifact's programs with the stand-in; return their outputs and the outputs by the tables."""
    frames = 3
    document = load_json(artifact / "artifact.json")
    manifests = {name: load_json(artifact / name / "manifest.json") for name in document["devices"]}
    rng = np.random.default_rng(0)
    inputs = [rng.integers(0, 256, document["inputs"][0]["bytes"], np.uint8).tobytes() for _ in range(frames)]
    ports, programs = _ports(len(manifests)), []
    for number, (name, manifest) in enumerate(manifests.items()):
        _build(artifact / name, tmp_path / name)
        if manifest["inputs"]:
            (tmp_path / name / "input0.bin").write_bytes(b"".join(inputs))
        peers = [f"{other}=127.0.0.1:{port}" for other, port in zip(manifests, ports, strict=True)][:number]
        line = [str(tmp_path / name / "device"), str(ports[number]), *peers]
        programs.append(subprocess.Popen(line, cwd=tmp_path / name))
    try:
        assert [program.wait(60) for program in programs] == [0] * len(programs)
    finally:
        for program in programs:
            program.kill()
            program.wait()
    expected = [_frame(document, manifests, frame) for frame in inputs]
    return (tmp_path / next(iter(manifests)) / "output0.bin").read_bytes(), expected


def _ports(count: int) -> list[int]:
    """Return free ports of this host."""
    doors = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [door.getsockname()[1] for door in doors]
    for door in doors:
        door.close()
    return ports


def _build(source: Path, place: Path) -> None:
    """Build the program of a device with CMake, as the page about microcontrollers says."""
    place.mkdir()
    library = place / "libstandin.a"
    shutil.copy(CODES / "standin.cc", place)
    line = ["g++", *FLAGS, "-c", "-o", place / "standin.o", place / "standin.cc"]
    subprocess.run(line, cwd=source, check=True, timeout=120)
    subprocess.run(["ar", "rcs", library, place / "standin.o"], check=True, timeout=120)
    application = place / "own.cc"
    shutil.copy(source / "application.cc", application)
    options = (
        f"-DAPPLICATION={application}",
        f"-DTFLM_INCLUDE={CODES}",
        f"-DTFLM_LIBRARY={library}",
        "-DCMAKE_CXX_FLAGS=-Werror",
    )
    subprocess.run(["cmake", "-S", source, "-B", place, *options], check=True, timeout=120, capture_output=True)
    subprocess.run(["cmake", "--build", place], check=True, timeout=120, capture_output=True)


def _frame(document: Mapping[str, Any], manifests: Mapping[str, Mapping[str, Any]], given: bytes) -> bytes:
    """Return the first output of the first device for a frame, computed in Python as the stand-in computes it."""
    held: dict[str, dict[str, bytes]] = {name: {v["name"]: given for v in m["inputs"]} for name, m in manifests.items()}
    steps = {name: [s for s in m["steps"] if s[0] != "receive"] for name, m in manifests.items()}
    while any(steps.values()):
        for name, rest in steps.items():
            while rest and _step(name, rest[0], document, manifests, held):
                rest.pop(0)
    first = next(iter(manifests))
    return held[first][manifests[first]["outputs"][0]["tensor"]]


def _step(
    name: str,
    step: list[Any],
    document: Mapping[str, Any],
    manifests: Mapping[str, Mapping[str, Any]],
    held: Mapping[str, dict[str, bytes]],
) -> bool:
    kind, index = step
    if kind == "send":
        transfer = document["transfers"][index]
        held[transfer["receiver"]][transfer["name"]] = held[name][transfer["name"]]
        return True
    manifest, own = manifests[name], held[name]
    segment = manifest["segments"][index]
    if any(tensor not in own for tensor in segment["inputs"]):
        return False
    sizes = {tensor["name"]: tensor["bytes"] for tensor in manifest["tensors"]}
    made = {tensor: np.zeros(sizes[tensor], np.uint8) for tensor in segment["outputs"]}
    held = {tensor: np.frombuffer(own[tensor], np.uint8) for tensor in segment["inputs"]}
    if segment["model"] is not None:
        same = [s for s in manifest["segments"] if s["model"] == segment["model"]]
        inputs = [np.zeros(size, np.uint8) for size in _ports_of(same, "input_copies", "target", "target_offset", 2)]
        for one in segment["input_copies"]:
            copy_strided(one, held[one["source"]], inputs[one["target"]])
        data = np.concatenate(inputs).astype(np.uint64)
        models = list(dict.fromkeys(s["model"] for s in manifest["segments"] if s["model"] is not None))
        total = int((data * np.arange(1, len(data) + 1, dtype=np.uint64)).sum()) + models.index(segment["model"])
        sizes_out = _ports_of(same, "output_copies", "source", "source_offset", 1)
        words = [((total + i) % 2**32).to_bytes(4, "little") for i in range(len(sizes_out))]
        outputs = [np.frombuffer((w * (n // 4 + 1))[:n], np.uint8) for w, n in zip(words, sizes_out, strict=True)]
        for one in segment["output_copies"]:
            copy_strided(one, outputs[one["source"]], made[one["target"]])
    for one in segment["tensor_copies"]:
        copy_strided(one, held[one["source"]], made[one["target"]])
    own |= {tensor: array.tobytes() for tensor, array in made.items()}
    return True


def _ports_of(segments: Sequence[Mapping[str, Any]], kind: str, end: str, begin: str, column: int) -> list[int]:
    """Return the bytes of each input or output of a model: up to the last byte that any of its segments copies."""
    found: dict[int, int] = {}
    for one in (one for segment in segments for one in segment[kind]):
        reach = one[begin] + one["run_bytes"] + sum((loop[0] - 1) * loop[column] for loop in one["loops"])
        found[one[end]] = max(found.get(one[end], 0), reach)
    return [found[port] for port in sorted(found)]


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_buffers_with_overlapping_lifetimes_never_share_bytes(devices: int) -> None:
    program = compiled(networks.build("tiny"), "modnn", devices).program
    assert program is not None
    for device in program.devices:
        peeled = [hoist_segment_copies(segment) for segment in device.segments]
        models = [None if one.segment is None else i % 3 for i, one in enumerate(peeled)]
        arenas = (5000, 90000, 16)
        found = plan_memory(program, device, peeled, models, arenas)
        times = [t for t, step in enumerate((s for s in device.steps if s.kind != "receive"), 1) if step.kind == "run"]
        own = [held for name, held in found.buffers.items() if name not in found.views]
        # If there are several devices, d0 needs views: it sends rows of the input to the others without copying them.
        assert found.views or devices == 1 or device.device != "d0"
        for view in (held for name, held in found.buffers.items() if name in found.views):
            assert any(
                held.offset <= view.offset
                and view.end <= held.end
                and held.first_step <= view.first_step <= view.last_step <= held.last_step
                for held in own
            )
        blocks = [(held.offset, held.end, held.first_step, held.last_step) for held in own]
        for model, time, place in zip(models, times, found.arena_offsets, strict=True):
            if model is not None and place is not None:
                blocks.append((place, place + arenas[model], time, time))
        for i, (start, end, first, last) in enumerate(blocks):
            assert start % 16 == 0 and end <= found.size_bytes
            for low, high, begin, stop in blocks[:i]:
                assert not (first <= stop and begin <= last) or end <= low or high <= start
