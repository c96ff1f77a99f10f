"""Single bytes in the files of artifacts are changed, one at a time: each change is found before anything computes.

There are about a thousand changes. The checks of run, deploy and the programs get all of them, and real processes get
some. Not tested are the list `.outputs`, and the files of onnxruntime, Python and MPI.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from support import mpi_runs, running
from support.boards import Cluster, cluster
from support.handmade import halo
from support.tampering import flip, named

import dicompiler
import dicompiler_targets.mpi
from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.driver import artifact as artifacts
from dicompiler.target.manifest import check_files, load_artifact
from dicompiler.target.remote.hosts import Hosts
from dicompiler.target.run_records import RunOptions
from dicompiler_targets.mpi import build, toolchain
from dicompiler_targets.mpi.artifact import MpiArtifact as MpiArtifact
from dicompiler_targets.sockets.artifact import SocketsArtifact
from dicompiler_targets.sockets.runtime.integrity import FileIntegrity, read_manifest

KINDS = ("artifact.json", "plan.json", "platform.toml", "/model.onnx", "/model.onnx.data", "/provenance.json",
         "/manifest.json", "/weights.bin", "segment000.onnx", "runtime/")  # fmt: skip
MPI_KINDS = ("/contents.txt", "/main.cc", "/program.json", "/run.sh", "/CMakeLists.txt")
HARNESS = """
#include <cstdio>
#include "file_integrity.hpp"
#include "tensor.hpp"
int main(int, char** words) {
    try {
        dicompiler::DeviceFiles(words[1]).check();
    } catch (const dicompiler::Error& error) {
        std::puts(error.what());
        return 1;
    }
}
"""


def compiled(place: Path, target: str) -> Path:
    dicompiler.compile(networks.build("lenet"), "rpi4x2", strategy="modnn", target=target, output=place / "net")
    return place / "net"


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("sockets"), "sockets")


@pytest.fixture(scope="module")
def mpi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("mpi"), "mpi")


def flips(artifact: Path, kinds: tuple[str, ...], count: int, seed: int) -> Iterator[str]:
    """Change one byte of a file for each item, restore it afterwards, and yield its place.

    Kinds of files take turns.
    """
    random = Random(seed)
    names = named(artifact)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        name = random.choice([one for one in names if f"/{one}".endswith(kind) or (kind[-1] == "/" and kind in one)])
        at, before = flip(artifact / name, random)
        try:
            yield f"byte {at} of {name}"
        finally:
            (artifact / name).write_bytes(before)


def device_refuses(directory: Path) -> bool:
    """Return True if the checks that a device process makes before it is ready refuse the directory."""

    def check() -> None:
        files = FileIntegrity(directory, read_manifest(directory / "manifest.json"))
        files.begin_digests()
        files.check()

    return refuses(check, ValueError, "copy the device's directory again")


def refuses(
    check: Callable[[], object], kind: type[Exception] = DicompilerError, remedy: str = "compile the model again"
) -> bool:
    """Return True if the check fails with one line that contains the remedy."""
    try:
        check()
    except kind as error:
        return "\n" not in str(error) and remedy in str(error)
    return False


@pytest.mark.slow
def test_thousand_flips_of_a_sockets_artifact_are_refused(sockets: Path) -> None:
    names = tuple(load_artifact(sockets)["devices"])
    whole = {device: device_refuses(sockets / device) for device in names}
    assert not any(whole.values()) and not refuses(lambda: SocketsArtifact.load(sockets))
    for number, what in enumerate(flips(sockets, KINDS, 700, 1)):
        device = what.split()[-1].split("/")[0]
        by_device = device in names and device_refuses(sockets / device)
        assert by_device or refuses(lambda: artifacts._open_artifact(sockets, with_weights=True)), what
        # Reading all files, as `deploy` does, takes long, so this check is made for every seventh flip only.
        if number % 7 == 0:
            assert refuses(lambda: check_files(sockets, files := load_artifact(sockets)["files"], files)), what


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that checks a directory as a rank does."""
    place = tmp_path_factory.mktemp("harness")
    runtime = Path(dicompiler_targets.mpi.__file__).parent / "runtime"
    (place / "main.cc").write_text(HARNESS)
    words = [
        "g++",
        "-std=c++17",
        "-O1",
        f"-I{runtime}",
        str(place / "main.cc"),
        *map(str, runtime.glob("file_integrity.cc")),
    ]
    subprocess.run([*words, str(runtime / "tensor.cc"), "-pthread", "-o", str(place / "check")], check=True)
    return place / "check"


@pytest.mark.slow
def test_flips_of_an_mpi_artifact_are_refused(mpi: Path, harness: Path) -> None:
    def rank_refuses(package: str, device: str) -> bool:
        done = subprocess.run([harness, mpi / package / device], capture_output=True, text=True, check=False)
        return done.returncode == 1 and "copy the device's directory" in done.stdout

    assert not refuses(lambda: MpiArtifact.load(mpi)) and not rank_refuses("pi01", "pi01")
    for what in flips(mpi, KINDS + MPI_KINDS, 300, 2):
        package, device, *_ = [*what.split()[-1].split("/"), "", ""]
        by_rank = package.startswith("pi") and package == device and rank_refuses(package, device)
        opened = by_rank or refuses(lambda: artifacts._open_artifact(mpi, with_weights=True))
        assert opened or refuses(lambda: MpiArtifact.load(mpi)), what


@pytest.mark.slow
def test_flips_of_large_weights_are_refused_by_all_that_read_them(harness: Path, tmp_path: Path) -> None:
    """Their digest is a CRC-32, the same in Python and in C++."""
    made = halo(channels=1 << 13)
    (sockets := tmp_path / "sockets").mkdir()
    (mpi := tmp_path / "mpi").mkdir()
    weights = [running.emit(made, sockets) / "a" / "weights.bin", mpi_runs.emit(made, mpi) / "a" / "a" / "weights.bin"]
    texts = [load_artifact(sockets)["files"]["a/weights.bin"], load_artifact(mpi)["files"]["a/a/weights.bin"]]
    assert texts[0] == texts[1] and texts[0]["digest"].startswith("crc32:") and texts[0]["bytes"] > 1 << 20
    checks: tuple[Callable[[], bool], ...] = (
        lambda: device_refuses(weights[0].parent),
        lambda: refuses(lambda: check_files(sockets, load_artifact(sockets)["files"], ["a/weights.bin"])),
        lambda: subprocess.run([harness, weights[1].parent], capture_output=True).returncode == 1,
    )
    assert not any(check() for check in checks)
    whole, random = weights[0].read_bytes(), Random(7)
    for at in (0, len(whole) - 1, *(random.randrange(len(whole)) for _ in range(40))):
        for path in weights:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ random.randrange(1, 256)]) + whole[at + 1 :])
        assert all(check() for check in checks), at
    for other in (whole[:-1], whole + b"\0"):
        for path in weights:
            path.write_bytes(other)
        assert all(check() for check in checks)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sockets", "mpi"])
def test_flips_are_refused_by_runs(target: str, request: pytest.FixtureRequest) -> None:
    artifact: Path = request.getfixturevalue(target)
    kinds = (*(kind for kind in KINDS if kind != "/model.onnx.data"), *(MPI_KINDS if target == "mpi" else ()))
    artifacts.run(artifact)
    for what in flips(artifact, kinds, len(kinds), 3):
        with pytest.raises(DicompilerError) as caught:
            artifacts.run(artifact)
        words, name = str(caught.value), what.split()[-1]
        assert "\n" not in words and "again" in words, what
        assert name.split("/")[-1] in words, (what, words)
        assert "weights.bin" not in name or "device 'pi0" in words, (what, words)


def test_flips_are_refused_by_verify(sockets: Path) -> None:
    for _ in flips(sockets, ("/model.onnx.data",), 3, 4):
        with pytest.raises(DicompilerError, match=r"model\.onnx\.data: its content differs from the compiled one"):
            artifacts.verify(sockets)


def test_zeros_in_the_middle_of_weights_are_refused(sockets: Path) -> None:
    path = sockets / "pi02" / "weights.bin"
    before = path.read_bytes()
    path.write_bytes(before[:1000] + bytes(40) + before[1040:])
    try:
        with pytest.raises(DicompilerError, match=r"^device 'pi02': file weights\.bin is damaged, its content is not"):
            artifacts.run(sockets)
    finally:
        path.write_bytes(before)


def test_program_that_was_damaged_since_it_was_built_is_built_again(mpi: Path) -> None:
    package = MpiArtifact.load(mpi).packages["pi01"]
    program = build.build_program(package, toolchain.find_toolchain())
    before = program.read_bytes()
    program.write_bytes(before[:1000] + bytes([before[1000] ^ 1]) + before[1001:])
    assert build.build_program(package, toolchain.find_toolchain()).read_bytes() == before


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("boards"), ("pi01", "pi02")) as made, made.inside():
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sockets", "mpi"])
def test_deploy_refuses_flips_here_and_mends_those_on_boards(
    target: str, boards: Cluster, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    artifact: Path = request.getfixturevalue(target)
    options = RunOptions(hosts=Hosts.load(boards.hosts(tmp_path / "hosts.toml")), insecure=True)
    kinds = tuple(kind for kind in (*KINDS, *(MPI_KINDS if target == "mpi" else ())) if "reference" not in kind)
    for what in flips(artifact, tuple(kind for kind in kinds if kind != "/model.onnx.data"), 6, 5):
        with pytest.raises(DicompilerError, match=r"again"):
            artifacts.install(artifact, options)
        assert not list(boards.root.glob(f"*/home/.cache/dicompiler/{artifact.name}/pi*")), what
    assert all(one.copied_bytes for one in artifacts.install(artifact, options))
    place = boards.boards["pi02"].home / ".cache" / "dicompiler" / artifact.name / "pi02"
    random = Random(6)
    data = place / "pi02" if target == "mpi" else place
    for path in (data / "weights.bin", data / "segment000.onnx", place / "manifest.json"):
        size = path.stat().st_size
        flip(path, random)
        if target == "sockets":  # Without a new deploy, the device itself refuses the changed file.
            with pytest.raises(DicompilerError, match=r"device 'pi02' on .*copy the device's directory again"):
                artifacts.run(artifact, options=options)
        elif path.parent == data:
            with pytest.raises(
                DicompilerError, match=r"device 'pi02' on host 'pi02'.*copy the device's directory again"
            ):
                artifacts.run(artifact, options=options)
        assert [one.copied_bytes for one in artifacts.install(artifact, options)] == [0, size]
        assert [one.copied_bytes for one in artifacts.install(artifact, options)] == [0, 0]
    artifacts.run(artifact, options=options)
    for board in boards.boards.values():
        subprocess.run(["rm", "-rf", str(board.home / ".cache")], check=True)
