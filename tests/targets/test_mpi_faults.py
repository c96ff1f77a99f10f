"""Failures of the MPI target: one line names rank and device, or the missing software, and no process is left."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import struct
import subprocess
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.handmade import endless, failing, halo
from support.mpi_runs import Alike, emit, environment, ranks
from support.running import wait_until

from dicompiler.base.errors import DicompilerError, RunError, UsageError
from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.platform import Platform
from dicompiler.target.manifest import write_digests_and_checksum
from dicompiler.target.run_records import RunOptions
from dicompiler_targets.mpi import MpiTarget, build, codegen, mpirun, package_files, toolchain
from dicompiler_targets.mpi.artifact import MpiArtifact


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emit(halo(), tmp_path_factory.mktemp("mpi") / "a")


@pytest.fixture
def artifact(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "a"))


def playing(name: str) -> dict[int, int]:
    """Return the processes of the three ranks, after the output of the first frame exists."""

    def found() -> dict[int, int]:
        processes = ranks(name)
        outputs = [list(Path(f"/proc/{pid}/cwd/outputs").rglob("frame*")) for pid in processes.values()]
        return processes if len(processes) == 3 and any(outputs) else {}

    processes: dict[int, int] = wait_until(found)
    return processes


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_rank_that_is_ended_is_named_and_ends_all(number: signal.Signals, made: Path) -> None:
    program = build.build_program(MpiArtifact.load(made).packages["a"], toolchain.find_toolchain())

    def end() -> None:
        os.kill(playing(program.name)[1], number)

    thread = threading.Thread(target=end)
    thread.start()
    cause = rf"its process was ended by signal {number:d} \({number.name}\)"
    words = (
        rf"^rank 1 \(device 'b' on host 'b'\): {cause}; the artifact has no plan for the failure of 'b': compile with"
    )
    with pytest.raises(RunError, match=words):
        MpiTarget().run(made, Alike(halo()[2], 2_000_000), RunOptions(timeout_s=100, kept_frames=1))
    thread.join()
    wait_until(lambda: not ranks(program.name))


def test_mpirun_that_is_killed_leaves_nothing_that_stops_a_later_one(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, scratch = tmp_path / "shared", tmp_path / "scratch"
    shared.mkdir()
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(shared))
    # mpirun is the parent process of its ranks.
    command = [str(toolchain.find_toolchain().mpirun), "-n", "1", "sh", "-c", "kill -9 $PPID"]
    with pytest.raises(RunError, match="mpirun ended with exit code -9"):
        mpirun.run_mpirun(MpiArtifact.load(made), command, scratch, 60, {})
    assert not [*shared.iterdir()] and [*scratch.glob("ompi.*")]


def test_last_paragraph_of_an_unknown_message_of_mpirun_is_reported(made: Path) -> None:
    dashes = "-" * 74
    errors = f"{dashes}\nfirst\n{dashes}\n{dashes}\nThe listener failed to start. We cannot\n continue.\0\n{dashes}\n"
    cause = "mpirun ended with exit code 213: The listener failed to start. We cannot continue."
    assert mpirun.find_cause(MpiArtifact.load(made), errors, 213) == cause


@pytest.mark.slow
def test_rank_that_stops_is_named(made: Path) -> None:
    """A rank that waits for it names it. It may also name itself, if it is ended first and then notices the delay."""
    program = build.build_program(MpiArtifact.load(made).packages["a"], toolchain.find_toolchain())
    stopped = list[float]()

    def stop() -> None:
        os.kill(playing(program.name)[1], signal.SIGSTOP)
        stopped.append(time.monotonic())

    for allowed_s in (5, 20, 60):
        thread, begun = threading.Thread(target=stop), time.monotonic()
        thread.start()
        with pytest.raises(RunError) as caught:
            MpiTarget().run(made, Alike(halo()[2], 400_000 * allowed_s), RunOptions(timeout_s=allowed_s, kept_frames=1))
        thread.join()
        if stopped and stopped[-1] - begun < allowed_s:
            # If the host is busy, all ranks may be late before one is stopped. The next attempt then allows more time.
            break
    assert "in time" in str(caught.value) and "rank 1 (device 'b' on host 'b')" in str(caught.value)
    wait_until(lambda: not ranks(program.name))


@pytest.mark.slow
def test_segment_that_takes_too_long_or_fails_is_named(tmp_path: Path) -> None:
    one = endless()
    with pytest.raises(RunError, match=r"rank 1 \(device 'b' on host 'b'\): it still computes step 0 of frame 0"):
        MpiTarget().run(emit(one, tmp_path / "endless"), [one[2]], RunOptions(timeout_s=1))
    one = failing()
    bad = {"x": np.array([7], np.int64)}
    with pytest.raises(
        RunError, match=r"rank 1 \(device 'b' on host 'b'\): data/b/segment000.onnx: onnxruntime cannot"
    ):
        MpiTarget().run(emit(one, tmp_path / "failing"), [one[2], bad], RunOptions(timeout_s=60))


def size(place: Path) -> int:
    return (place / "b" / "b" / "segment000.onnx").stat().st_size


def listing(place: Path, text: str) -> None:
    """Replace the contents.txt of device b by another one with valid digests."""
    (place / "b" / "b" / "contents.txt").write_text(f"{text}{hashlib.sha256(text.encode()).hexdigest()}\n")
    write_digests_and_checksum(place)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda place: (place / "b" / "b" / "segment000.onnx").unlink(),
            "segment000.onnx is missing: copy the device's",
        ),
        (lambda place: (place / "b" / "b" / "segment000.onnx").write_bytes(b"x"), "has 1 bytes instead of"),
        (lambda place: listing(place, "f" * 64 + "\n"), "are of different artifacts"),
        (lambda place: listing(place, "f" * 64 + "\n9 0 segment000.onnx\n"), "bytes instead of 9"),
        (
            lambda place: listing(place, f"{'f' * 64}\n{size(place)} md5:0 segment000.onnx\n"),
            "segment000.onnx: unknown kind of digest 'md5': compile the model again",
        ),
    ],
    ids=["missing", "cut", "other", "list", "kind"],
)
def test_files_that_do_not_belong_together_are_named(change: Any, words: str, artifact: Path) -> None:
    change(artifact)
    with pytest.raises(RunError, match=words) as caught:
        MpiTarget().run(artifact, [halo()[2]], RunOptions(timeout_s=60))
    assert "device 'b' on host 'b'" in str(caught.value)


def test_package_that_is_missing_is_named(artifact: Path) -> None:
    shutil.rmtree(artifact / "c")
    with pytest.raises(DicompilerError, match=r"a/c/program\.json: no such file: compile the model again"):
        MpiTarget().run(artifact, [halo()[2]], RunOptions(timeout_s=60))


@pytest.mark.parametrize(
    "options", [RunOptions(keys=Path("k")), RunOptions(start_manually=("a",)), RunOptions(in_flight=2000)]
)
def test_options_that_it_cannot_take_are_refused(options: RunOptions, made: Path) -> None:
    with pytest.raises(UsageError, match=r"^run: "):
        MpiTarget().run(made, [halo()[2]], options)


def test_device_that_is_a_gpu_needs_its_provider(tmp_path: Path) -> None:
    program, _, inputs = halo()
    device = [Device(name, name, 1e9, gpu=name == "b") for name in "abc"]
    platform = Platform("gpus", tuple(Host(n, 1 << 30) for n in "abc"), tuple(device), Network("switch", 1e9))
    places = package_files.place_ranks(program, platform, 0)
    from dicompiler_targets.mpi.emit import write_program

    write_program(program, places, "extended", "CUDA", codegen.ImagePreprocessing("RGB", (0.0,), (1.0,)), tmp_path)
    write_digests_and_checksum(tmp_path)
    with pytest.raises(RunError, match=r"rank 1 \(device 'b' on host 'b'\): the device is a GPU, but .* CUDAExec"):
        MpiTarget().run(tmp_path, [inputs], RunOptions(timeout_s=60))


# -- software that is missing on this host


@pytest.mark.parametrize("name", ["mpirun", "mpicxx", "cmake", "g++", "make"])
def test_program_that_is_missing_is_named_with_the_command_that_installs_it(name: str, tmp_path: Path) -> None:
    for other in ("mpirun", "mpicxx", "cmake", "g++", "make"):
        if other != name:
            (tmp_path / other).symlink_to(toolchain.find_program(other))
    with pytest.raises(DicompilerError, match=rf"^target mpi: {re.escape(name)} is missing: install it: .*apt install"):
        toolchain.find_toolchain(str(tmp_path))


def test_reports_source_that_does_not_compile(artifact: Path) -> None:
    (artifact / "a" / "main.cc").write_text("int main() { return nothing; }\n")
    with pytest.raises(DicompilerError, match=r"cannot be built: .*main\.cc:1:.*error: .*nothing"):
        build.build_program(artifact / "a", toolchain.find_toolchain())


# -- the program itself, as run.sh starts it


def image_network() -> Any:
    from support.handmade import segment, steps, value

    from dicompiler.ir.onnx.model import Model
    from dicompiler.ir.program import DeviceProgram, Program

    one = segment("a0", "a", "(float[1,3,4,6] x) => (float[1,3,4,6] out) { out = Identity(x) }", {})
    device = DeviceProgram("a", "localhost", (one,), steps("run 0"), ("x",), {"out": "out"})
    return (
        Program((device,), (), (value("x", 1, 3, 4, 6),), (value("out", 1, 3, 4, 6),), {}, ((0, 0),)),
        Model(one.model, {}),
        {},
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with a program that its own run.sh has built. The network returns its input."""
    place = emit(
        image_network(), tmp_path_factory.mktemp("package"), channels="BGR", mean=(10.0, 20.0, 30.0), scale=(0.5,)
    )
    done = call(place / "localhost", "build")
    assert done.returncode == 0, done.stderr
    assert "warning:" not in done.stderr
    return place / "localhost"


def call(package: Path, *words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    line = [package / "run.sh", *words]
    return subprocess.run(
        [str(word) for word in line], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120
    )


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Return the rows of red, green and blue pixels as a PNG file."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.slow
def test_images_become_inputs_as_the_manifest_says(package: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    small = np.repeat(np.repeat(np.array([[[10, 20, 30]]], np.uint8), 2, 0), 3, 1)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "0.png").write_bytes(png(pixels))
    (tmp_path / "images" / "1.ppm").write_bytes(b"P6\n# small\n3 2\n255\n" + small.tobytes())
    (tmp_path / "images" / "2.pgm").write_bytes(b"P5 6 4 255\n" + pixels[..., 0].tobytes())
    (tmp_path / "images" / "notes.txt").write_text("no image")
    done = call(package, "--inputs", "images", "--outputs", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [np.load(path) for path in sorted((tmp_path / "out" / "a").iterdir())]
    scaled = [
        (image.astype(np.float32)[..., ::-1] - [10, 20, 30]) * 0.5
        for image in (pixels, np.repeat(pixels[..., :1], 3, 2))
    ]
    assert len(found) == 3
    np.testing.assert_allclose(found[0], scaled[0].transpose(2, 0, 1)[None], atol=1e-4)
    np.testing.assert_allclose(found[2], scaled[1].transpose(2, 0, 1)[None], atol=1e-4)
    np.testing.assert_allclose(found[1][0, :, 0, 0], [10, 0, -10], atol=1e-4)
    assert np.ptp(found[1].reshape(3, -1), axis=1).max() < 1e-4


def inputs(place: Path) -> dict[str, Any]:
    """Write inputs that do not fit, and return the words of the error message by file name."""
    x = np.zeros((1, 3, 4, 6), np.float32)
    np.save(place / "shape.npy", x[:, :, :2])
    np.save(place / "dtype.npy", x.astype(np.float64))
    np.save(place / "order.npy", np.asfortranarray(x))
    np.savez(place / "name.npz", z=x)
    np.savez(place / "more.npz", x=x, z=x)
    np.savez_compressed(place / "packed.npz", x=x)
    (place / "image.png").write_bytes(png(np.zeros((2, 2, 3), np.uint8))[:40])
    (place / "image.ppm").write_bytes(b"P6 9 9 255\n")
    (place / "cut.npy").write_bytes((place / "dtype.npy").read_bytes()[:100])
    (place / "text.txt").write_text("x")
    (place / "empty").mkdir()
    return {
        "shape.npy": "must have the shape (1, 3, 4, 6), not (1, 3, 2, 6)",
        "dtype.npy": "must be of type '<f4', not '<f8'",
        "order.npy": "Fortran order",
        "name.npz": "input 'x' is missing",
        "more.npz": "the network has no input 'z'",
        "packed.npz": "is compressed: write the file with numpy.savez",
        "image.png": "the image cannot be read",
        "image.ppm": "the image cannot be read: it is cut short",
        "cut.npy": "cut short",
        "text.txt": "not an input file: expected",
        "empty": "no input files",
        "nothing.npy": "no such file",
    }


@pytest.mark.slow
def test_input_that_does_not_fit_is_one_line_and_leaves_no_output(package: Path, tmp_path: Path) -> None:
    for name, words in inputs(tmp_path).items():
        done = call(package, "--inputs", name, "--outputs", "out", cwd=tmp_path)
        assert done.returncode == 1, name
        (line,) = done.stderr.splitlines()
        assert line.startswith("dicompiler: rank 0 (device 'a' on host 'localhost'): "), line
        assert name in line and words in line, line
        assert not list((tmp_path / "out").iterdir()), name


def test_wrong_number_of_ranks_and_wrong_options_are_one_line(package: Path, tmp_path: Path) -> None:
    found = call(package, "--frames", "0", "--inputs", "x", cwd=tmp_path)
    assert found.returncode == 1 and "option --frames cannot be '0'" in found.stderr
    found = call(package, "--colour", "red", cwd=tmp_path)
    assert found.returncode == 1 and "there is no option '--colour'" in found.stderr
    found = call(package, cwd=tmp_path)
    assert found.returncode == 1 and "there are no inputs" in found.stderr
    script = (
        (package / "run.sh")
        .read_text()
        .replace(" -n 1 ", " --oversubscribe -n 2 ")
        .replace("$place", "--allow-run-as-root")
    )
    (package / "two.sh").write_text(script)
    done = subprocess.run(["sh", package / "two.sh"], capture_output=True, text=True, env=environment())
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["dicompiler: 2 ranks were started, this program has 1: use mpirun -n 1"]


@pytest.mark.parametrize(
    "name",
    ["main.cc", pytest.param("runtime/options.cc", marks=pytest.mark.slow), "runtime/options.hpp", "CMakeLists.txt"],
)
def test_a_changed_source_is_built_before_the_program_starts(name: str, package: Path, tmp_path: Path) -> None:
    shutil.copy2(package / name, tmp_path / "source")
    (package / name).write_text("neither C++ nor CMake")
    done = call(package, "--help")
    shutil.copy2(tmp_path / "source", package / name)  # The old time too, so that the program is up to date again.
    assert done.returncode != 0 and name in done.stderr
    assert call(package, "--help").stderr == ""


def test_help_starts_nothing_on_other_hosts(package: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(package, tmp_path / "package")
    (copy / "hostfile").write_text("nowhere.invalid slots=1\n")
    done = call(copy, "--help")
    assert (done.returncode, done.stderr) == (0, "") and "--in-flight N" in done.stdout
