"""Swaps of artifacts on boards: files are copied next to the running ones, and resident devices are used."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.boards import Cluster, cluster
from support.running import pids, wait_until
from support.swapping import artifact_changes, compile_times, frames

import dicompiler
from dicompiler.base.errors import DicompilerError, RunError, UsageError
from dicompiler.cli.command_line import main
from dicompiler.measure.emulation.trial_runs import open_cluster_runner
from dicompiler.target.manifest import load_artifact
from dicompiler.target.remote.certificates import make_keys
from dicompiler.target.remote.hosts import Hosts
from dicompiler.target.run_records import RunOptions
from dicompiler_targets.sockets.runtime import STATE_DIRECTORY

NAMES = ("pi01", "pi02")


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("boards"), NAMES) as made, made.inside():
        yield made


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("compiled")
    return compile_times(3, place / "three", "rpi4x2"), compile_times(5, place / "five", "rpi4x2")


@pytest.mark.slow
def test_new_files_are_copied_next_to_running_ones(
    boards: Cluster, artifacts: tuple[Path, Path], tmp_path: Path
) -> None:
    three, five = artifacts
    text = boards.hosts(tmp_path / "hosts.toml").read_text()
    (tmp_path / "hosts.toml").write_text(text.replace("[defaults]", '[defaults]\ndirectory = "nets/mine"'))
    options = RunOptions(insecure=True, in_flight=4)
    with dicompiler.connect_swappable(three, options, hosts=tmp_path / "hosts.toml") as session:
        outputs = []
        for number, found in enumerate(session.stream(frames(60)), 1):
            outputs.append(found)
            if number == 20:
                (boards.boards["pi01"].home / "nets" / "mine" / "pi01" / "runtime" / "daemon.py").write_text("damaged")
                there = session.swap(five)
                places = [{path.name for path in (board.home / "nets").iterdir()} for board in boards.boards.values()]
                assert places == [{"mine", "mine.five"}] * 2
                check_links(boards, five)
            if number == 40:
                back = session.swap_back()
        assert artifact_changes(outputs) == [(0, 3), (there.first_frame, 5), (back.first_frame, 3)]
    assert not any(
        pids(board.home / "nets" / name) for board in boards.boards.values() for name in ("mine", "mine.five")
    )
    (tmp_path / "again").mkdir()
    same = compile_times(5, tmp_path / "again" / "three", "rpi4x2")
    with dicompiler.connect_swappable(three, options, hosts=tmp_path / "hosts.toml") as session:
        with pytest.raises(UsageError, match="would have the same directory on the boards: rename the directory"):
            session.swap(same)
        boards.known([boards.boards["pi01"].address])
        with pytest.raises(RunError, match=r"device 'pi02' on root@10\.77\.0\.3: Host key verification failed"):
            session.swap(five)
        boards.known([board.address for board in boards.boards.values()])
        assert artifact_changes(session.stream(frames(8))) == [(0, 3)]


def check_links(boards: Cluster, new: Path) -> None:
    """Check that equal files of both artifacts are linked, except for a damaged one."""
    linked = {}
    for name, board in boards.boards.items():
        for path in (board.home / "nets" / "mine.five" / name).rglob("*"):
            if path.is_file() and path.name != ".dicompiler":
                key = f"{name}/{path.relative_to(board.home / 'nets' / 'mine.five' / name)}"
                linked[key] = path.stat().st_nlink == 2
                assert path.read_bytes() == (new / key).read_bytes()
    assert linked["pi01/runtime/channel.py"] and linked["pi02/runtime/daemon.py"]
    assert not linked["pi01/runtime/daemon.py"] and not linked["pi01/manifest.json"]


@pytest.mark.slow
def test_session_swaps_to_resident_devices(boards: Cluster, artifacts: tuple[Path, Path], tmp_path: Path) -> None:
    """`dicompiler deploy` starts the new devices while the old ones run; the session then needs no ssh."""
    hosts, keys = boards.hosts(tmp_path / "hosts.toml"), tmp_path / "keys"
    make_keys(NAMES, keys)

    def deploy(directory: Path, *options: str) -> int:
        return main(["deploy", str(directory), "--hosts", str(hosts), "--keys", str(keys), *options])

    three, five = artifacts
    try:
        assert deploy(three, "--resident") == 0
        with dicompiler.connect_swappable(three, keys=keys, in_flight=4) as session, ThreadPoolExecutor(1) as pool:
            outputs = []
            for number, found in enumerate(session.stream(frames(60)), 1):
                outputs.append(found)
                if number == 10:
                    assert pool.submit(deploy, five, "--resident").result(60) == 0
                if number == 20:
                    there = session.swap(five)
                if number == 40:
                    back = session.swap_back()
            assert artifact_changes(outputs) == [(0, 3), (there.first_frame, 5), (back.first_frame, 3)]
    finally:
        assert [deploy(directory, "--stop") for directory in (three, five)] == [0, 0]


@pytest.mark.slow
def test_devices_keep_running_between_trials(boards: Cluster, tmp_path: Path) -> None:
    """Devices load the artifacts of `tune` one after another; after a failed trial, they are started again."""
    trials = [tmp_path / f"{number}" / "artifact" for number in range(4)]
    for trial, (factor, strategy) in zip(trials, itertools.product((3, 5), ("modnn", "single")), strict=True):
        trial.parent.mkdir()
        compile_times(factor, trial, "rpi4x2", strategy, allow_worse=True)
    places = [board.home / ".cache" / "dicompiler" / "artifact" for board in boards.boards.values()]
    states = [place / STATE_DIRECTORY / f"{name}.json" for place, name in zip(places, NAMES, strict=True)]

    def pids_after(artifact: Path) -> list[int]:
        document = run(artifact, tmp_path / "run.json")
        assert [device["device"] for device in document["devices"]] == load_artifact(artifact)["devices"]
        assert document["location"] == "boards" and len(document["frames_s"]) == 4
        return [json.loads(state.read_bytes())["pid"] for state in states]

    options = RunOptions(hosts=Hosts.load(boards.hosts(tmp_path / "hosts.toml")), insecure=True)
    with open_cluster_runner(4, options) as run:
        first = pids_after(trials[0])
        assert [pids_after(trial) for trial in trials[1:]] == [first] * 3
        os.kill(first[0], signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{first[0]}").exists())
        second = pids_after(trials[0])
        assert second[0] != first[0] and second[1] == first[1]
        (trials[1] / "pi01" / "segment000.onnx").write_bytes(b"damaged")
        with pytest.raises(DicompilerError, match=r"segment000\.onnx: it has 7 bytes instead of"):
            run(trials[1], tmp_path / "run.json")
        assert not any(state.exists() for state in states)
        assert not {*first, *second} & {*pids_after(trials[2])}
    assert not any(state.exists() for state in states) and not list(tmp_path.rglob("*.resident.json"))
