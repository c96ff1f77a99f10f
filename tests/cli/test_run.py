"""`dicompiler run` and `verify`: all steps for a small network, and inputs that do not fit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import SHAPE, command, failed
from support.refusing import COMPILE, Refused, image, network
from support.running import WAIT_S, wait_until

from dicompiler.cli import main
from dicompiler.cli.file_io import read_npz
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import load_plan
from dicompiler.verify.executor import run_model

SPLIT = ("--platform", "rpi4x2", "--strategy", "modnn")


class TestWholeWay:
    """plan, compile, run and verify on a small network."""

    def test_compile_run_verify(self, open_model: Path, tmp_path: Path) -> None:
        directory = tmp_path / "build"
        done = command("compile", open_model, *SHAPE, *SPLIT, "-o", directory, "--json")
        assert done.returncode == 0, done.stderr
        compiled = json.loads(done.stdout)
        assert [record["device"] for record in compiled["devices"]] == ["pi01", "pi02"]
        assert sum(record["sent"] for record in compiled["devices"]) == compiled["metrics"]["total_bytes"] > 0

        x = np.random.default_rng(1).standard_normal((1, 3, 16, 16)).astype(np.float32)
        np.savez(tmp_path / "x.npz", x=x)
        outputs = tmp_path / "y.npz"
        done = command("run", directory, "--inputs", tmp_path / "x.npz", "--outputs", outputs, "--frames", 2, "--json")
        assert done.returncode == 0, done.stderr
        ran = json.loads(done.stdout)
        assert sum(sum(r["sent_bytes"].values()) for r in ran["devices"]) == 2 * compiled["metrics"]["total_bytes"]
        assert read_npz(outputs)["y"].shape == (1, 4, 16, 16)

        done = command("verify", directory, "--inputs", tmp_path / "x.npz")
        assert done.returncode == 0, done.stderr
        rows = [line for line in done.stdout.splitlines()[1:] if not line.startswith((" ", "y on"))]
        assert [row.split()[1] for row in rows] == ["ok"] * 2
        assert "as predicted" in done.stdout

    def test_plan_is_decided_once_and_then_carried_out(self, open_model: Path, tmp_path: Path) -> None:
        plan = tmp_path / "plan.json"
        done = command("plan", open_model, *SHAPE, "--platform", "rpi4x2", "--strategy", "modnn", "-o", plan)
        assert done.returncode == 0, done.stderr
        assert re.search(r"^sent between devices +\d+ bytes +0 bytes$", done.stdout, re.MULTILINE)
        base = ("compile", open_model, *SHAPE, "--platform", "rpi4x2", "--plan", plan)
        assert command(*base, "-o", tmp_path / "build").returncode == 0
        assert load_plan(tmp_path / "build" / "plan.json") == load_plan(plan)

    @pytest.mark.slow
    def test_wrong_inputs_are_one_line(self, open_model: Path, tmp_path: Path) -> None:
        directory = tmp_path / "build"
        command("compile", open_model, *SHAPE, "--platform", "rpi4x2", "--strategy", "single", "-o", directory)
        for arrays, words in (
            ({"X": np.ones(1)}, "no input 'X'"),
            ({"x": np.ones((1, 3, 16, 15), np.float32)}, "shape"),
            ({"x": np.ones((1, 3, 16, 16))}, "float32, not float64"),
            ({}, "input 'x' is missing"),
        ):
            np.savez(tmp_path / "x.npz", **arrays)
            assert words in failed(1, "run", directory, "--inputs", tmp_path / "x.npz")
        assert "not an artifact" in failed(1, "verify", tmp_path)


class TestInputs:
    """Inputs that are given to a compiled network."""

    IMAGE = image()

    @pytest.mark.parametrize(
        ("arrays", "line"),
        [
            ({"image": IMAGE}, "the network has no input 'image' (known: x)"),
            ({"x": IMAGE, "k": IMAGE}, "the network has no input 'k' (known: x)"),
            ({}, "input 'x' is missing: give all of the network's inputs"),
            ({"x": IMAGE[:, :2]}, "input 'x' must have the shape (1, 3, 12, 12), not (1, 2, 12, 12)"),
            ({"x": IMAGE[0]}, "input 'x' must have the shape (1, 3, 12, 12), not (3, 12, 12)"),
            ({"x": IMAGE.astype(np.float64)}, "input 'x' must be of type float32, not float64"),
            ({"x": IMAGE.astype(np.uint8)}, "input 'x' must be of type float32, not uint8"),
        ],
    )
    @pytest.mark.parametrize("command", ["run", "verify"])
    def test_another_name_shape_or_dtype(
        self,
        artifact: Path,
        tmp_path: Path,
        refused: Refused,
        command: str,
        arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]],
        line: str,
    ) -> None:
        np.savez(tmp_path / "x.npz", **arrays)
        outputs = ("--outputs", tmp_path / "y.npz") if command == "run" else ()
        assert refused(1, command, artifact, "--inputs", tmp_path / "x.npz", *outputs) == line

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "not an npz file of plain arrays: No data left in file"),
            (b"hello", "not an npz file of plain arrays: it is not a zip archive: write it with numpy.savez"),
            (b"PK\x03\x04 and no more", "not an npz file of plain arrays: File is not a zip file"),
            ({"x.npy": b"garbage"}, "'x' is not an array: write the file with numpy.savez"),
            ({"x.txt": b"1 2 3"}, "'x.txt' is not an array: write the file with numpy.savez"),
            (np.array([{}], object), "not an npz file of plain arrays: it contains Python objects"),
            ((9999999999, 99999), "not an npz file of plain arrays: Unable to allocate"),
            (None, "cannot be read: Is a directory"),
        ],
    )
    def test_rejects_a_file_without_arrays(
        self, artifact: Path, tmp_path: Path, refused: Refused, content: Any, words: str
    ) -> None:
        path = tmp_path / "x.npz"
        if content is None:
            path.mkdir()
        elif isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, np.ndarray):
            np.savez(path, x=content)
        else:
            if isinstance(content, tuple):  # An npy file that has a header, but no data after it.
                header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {content}, }}".ljust(117) + "\n"
                content = {"x.npy": b"\x93NUMPY\x01\x00v\x00" + header.encode()}
            with zipfile.ZipFile(path, "w") as archive:
                for name, data in content.items():
                    archive.writestr(name, data)
        line = refused(1, "run", artifact, "--inputs", path, "--outputs", tmp_path / "y.npz")
        assert line.startswith(f"{path}: ") and words in line

    def test_accepts_equivalent_arrays(self, artifact: Path, tmp_path: Path, refused: Refused) -> None:
        np.savez(tmp_path / "x.npz", x=np.asfortranarray(self.IMAGE))
        assert main(["run", str(artifact), "--inputs", str(tmp_path / "x.npz")]) == 0
        for array in (self.IMAGE.astype(">f4"), np.array("hello"), self.IMAGE.astype([("a", "<f4")])):
            np.savez(tmp_path / "x.npz", x=array)
            line = refused(1, "run", artifact, "--inputs", tmp_path / "x.npz")
            assert line == f"input 'x' must be of type float32, not {array.dtype}"

    def test_nan_and_infinity_match_onnxruntime(self, artifact: Path, tmp_path: Path) -> None:
        image = self.IMAGE.copy()
        image[0, 0, 3, 4], image[0, 1, 8, 2], image[0, 2, 10, 10] = np.nan, np.inf, -np.inf
        np.savez(tmp_path / "x.npz", x=image)
        outputs = tmp_path / "y.npz"
        assert main(["run", str(artifact), "--inputs", str(tmp_path / "x.npz"), "--outputs", str(outputs)]) == 0
        reference = run_model(Model.load(network()), {"x": image})
        with np.load(outputs) as found:
            for name, value in reference.items():
                assert not np.isfinite(value).all() and np.isfinite(value).any()
                assert np.array_equal(np.isnan(found[name]), np.isnan(value))
                assert np.array_equal(np.isinf(found[name]), np.isinf(value))
                finite = np.isfinite(value)
                assert np.allclose(found[name][finite], value[finite], rtol=1e-5, atol=1e-5)
        assert main(["verify", str(artifact), "--inputs", str(tmp_path / "x.npz")]) == 0


class TestArtifacts:
    """Directories that are not artifacts, or are damaged artifacts."""

    @pytest.mark.parametrize("file", ["artifact.json", "reference/model.onnx", "plan.json", "platform.toml"])
    def test_damaged_or_missing_file(self, model: Path, tmp_path: Path, refused: Refused, file: str) -> None:
        out = tmp_path / "out"
        assert main(["compile", str(model), *COMPILE, str(out)]) == 0
        data = (out / file).read_bytes()
        (out / file).write_bytes(data[: len(data) // 2])
        assert refused(1, "verify", out).startswith(str(out / file))
        (out / file).unlink()
        line = refused(1, "verify", out)
        assert str(out) in line


@pytest.mark.slow
def test_run_serves_metrics_and_adapts(open_model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "build"
    assert command("compile", open_model, *SHAPE, *SPLIT, "-o", directory).returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
        message = failed(1, "run", directory, "--metrics", address)
        assert f"metrics: '{address}' cannot be used" in message
    words = ["run", directory, "--frames", 100_000, "--in-flight", 4, "--adapt", "--metrics", address]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command_line = [sys.executable, "-m", "dicompiler", *map(str, words)]
    with subprocess.Popen(command_line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        try:
            assert wait_until(lambda: frame_count(address) > 100)
        finally:
            run.send_signal(signal.SIGINT)
            run.communicate(timeout=60)
    done = command("run", directory, "--frames", 20, "--adapt", "--outputs", tmp_path / "y.npz")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^pi01 ", done.stdout, re.MULTILINE) and "frames per second: " in done.stdout
    assert read_npz(tmp_path / "y.npz")["y"].shape == (1, 4, 16, 16)
    log = json.loads(command("run", directory, "--frames", 20, "--adapt", "--json").stdout)
    assert len(log["frames_s"]) == 20 and log["total_s"] >= max(log["frames_s"])
    (tmp_path / "current").symlink_to(directory)
    log = json.loads(command("run", tmp_path / "current", "--frames", 20, "--follow", "--json").stdout)
    assert len(log["frames_s"]) == 20 and "events" not in log
    assert "only a symbolic link can be followed" in failed(2, "run", directory, "--follow")


def frame_count(address: str) -> float:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S) as response:
        return float(re.findall(r"^dicompiler_frame_seconds_count (\S+)$", response.read().decode(), re.MULTILINE)[0])
    return 0.0
