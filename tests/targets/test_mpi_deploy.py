"""`dicompiler deploy` with the MPI target, on boards that are network namespaces with an sshd each: mpirun over ssh."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.boards import Cluster, cluster
from support.mpi_runs import ranks
from support.printed import column
from support.running import wait_until

import dicompiler
from dicompiler import networks
from dicompiler.base.errors import RunError, UsageError
from dicompiler.base.schema import load_json
from dicompiler.cli.command_line import main
from dicompiler.driver.artifact import install, run
from dicompiler.ir.onnx.model import Model
from dicompiler.target.remote.hosts import DeviceLocation, Hosts
from dicompiler.target.run_records import RunEvent, RunOptions
from dicompiler.verify.comparison import compare_value
from dicompiler.verify.executor import run_model
from dicompiler_targets.mpi import MpiTarget, deploy

PLATFORM = """
name = "boards"
[network]
kind = "switch"
bandwidth = "100 Mbit/s"
latency = "0.2 ms"
"""


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        # Emulated boards share this host's memory, but Open MPI takes them for different hosts. So it must use TCP.
        patch.setenv("OMPI_MCA_btl", "self,tcp")
        with cluster(tmp_path_factory.mktemp("boards"), ("one", "two")) as made, made.inside():
            yield made


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact for four devices on two hosts."""
    place = tmp_path_factory.mktemp("net")
    text = PLATFORM + "".join(f'[[host]]\nname = "{host}"\nmemory = "1 GiB"\n' for host in ("one", "two"))
    for index in range(4):
        text += f'[[device]]\nname = "d{index}"\nhost = "{("one", "two")[index // 2]}"\nrate = "1 GFLOP/s"\n'
    (place / "p.toml").write_text(text)
    dicompiler.compile(
        networks.build("lenet"), platform=place / "p.toml", strategy="modnn", target="mpi", output=place / "net"
    )
    return place / "net"


@pytest.fixture(scope="module")
def covered(net: Path) -> Path:
    """The same artifact with plans for the failure of each host."""
    options = {"platform": net.parent / "p.toml", "strategy": "modnn", "target": "mpi", "tolerate_failures": "hosts"}
    dicompiler.compile(networks.build("lenet"), output=net.parent / "covered", **options)
    return net.parent / "covered"


@pytest.mark.slow
def test_ranks_run_on_boards_and_send_the_predicted_bytes(
    boards: Cluster, net: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hosts = boards.hosts(tmp_path / "hosts.toml")
    x = np.random.default_rng(0).standard_normal((1, 1, 32, 32)).astype(np.float32)
    np.savez(tmp_path / "x.npz", input=x)
    command = ["deploy", str(net), "--hosts", str(hosts), "--insecure", "--inputs", str(tmp_path / "x.npz")]
    code = main([*command, "--outputs", str(tmp_path / "y.npz"), "--frames", "3", "--verify"])
    printed = capfd.readouterr()
    assert code == 0, printed.err
    copied = [int(count) for count in column(printed.out, "bytes copied").values()]
    assert copied[0] > 0 < copied[2] and copied[1] == copied[3] == 0
    assert set(np.load(tmp_path / "y.npz")) == {"output"}

    options = RunOptions(hosts=Hosts.load(hosts), insecure=True)
    assert [one.copied_bytes for one in install(net, options)] == [0, 0, 0, 0]
    result = run(net, {"input": x}, 2, 60, options)
    sent = {index: count for report in result.reports for index, count in report.sent_bytes.items()}
    document = load_json(net / "artifact.json")
    assert sent == {transfer["index"]: 2 * transfer["bytes"] for transfer in document["transfers"]}
    # Each host stores only its own segments and weights.
    for name, others in (("one", ("d2", "d3")), ("two", ("d0", "d1"))):
        assert not any(path.name in others for path in (boards.boards[name].home / ".cache").rglob("*"))


@pytest.mark.slow
def test_rank_that_ends_on_a_board_is_named_and_ends_all_ranks(boards: Cluster, net: Path, tmp_path: Path) -> None:
    options = RunOptions(hosts=Hosts.load(boards.hosts(tmp_path / "hosts.toml")), insecure=True, kept_frames=1)
    install(net, options)
    home = str(boards.root)

    def end() -> None:
        # A rank may only end after the first frame: before the ranks have connected, Open MPI may not report it.
        processes = wait_until(lambda: len(found := ranks(home, own=False)) == 4 and found)
        wait_until(lambda: any(boards.root.rglob("frame000000*")))
        os.kill(processes[2], signal.SIGKILL)

    thread = threading.Thread(target=end)
    thread.start()
    told = r"rank 2 \(device 'd2' on host 'two'\): its process was ended by signal 9 \(SIGKILL\)"
    # If Open MPI does not notice that rank 2 has ended, another rank reports its lost connection.
    untold = r"rank [013] .*: another rank has ended and closed its connection to this rank"
    words = rf"^({told}; the artifact has no plan for the failure of 'd2': compile with .*|{untold})$"
    with pytest.raises(RunError, match=words):
        run(net, None, 1_000_000, 100, options)
    thread.join()
    wait_until(lambda: not ranks(home, own=False))


@pytest.mark.slow
def test_board_that_is_off_at_the_start_is_omitted(boards: Cluster, net: Path, covered: Path, tmp_path: Path) -> None:
    heard, hosts = list[RunEvent](), Hosts.load(boards.hosts(tmp_path / "hosts.toml"))
    options = RunOptions(hosts=hosts, insecure=True, on_event=heard.append)
    boards.boards["two"].stop()
    try:
        with pytest.raises(RunError, match="is it on, and does sshd run there"):
            install(net, options)
        assert [one.device for one in install(covered, options)] == ["d0", "d1"]
        assert len(run(covered, None, 3, 100, options).outputs) == 3
    finally:
        boards.boards["two"].start()
        wait_until(boards.boards["two"].answers)
    assert [(one.kind, one.device) for one in heard] == [("failure", "d2"), ("failure", "d3"), ("takeover", "d3")]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kill", "cable"])
def test_frames_continue_without_a_rank_or_host(way: str, boards: Cluster, covered: Path, tmp_path: Path) -> None:
    """Devices d2 and d3 are on one host. If the host fails, both fail, and the plan for both is used."""
    heard = list[RunEvent]()
    hosts = Hosts.load(boards.hosts(tmp_path / "hosts.toml"))
    told = RunOptions(hosts=hosts, insecure=True, heartbeat_s=0.4, timeout_s=100, on_event=heard.append)
    install(covered, told)
    home = str(boards.root)

    def lose() -> None:
        processes = wait_until(lambda: len(found := ranks(home, own=False)) == 4 and found)
        wait_until(lambda: any(boards.root.rglob("frame00001*")))
        if way == "kill":
            os.kill(processes[2], signal.SIGKILL)
        else:
            boards.boards["two"].link("down")

    thread = threading.Thread(target=lose)
    thread.start()
    frames = [{"input": np.full((1, 1, 32, 32), number % 7, np.float32)} for number in range(300)]
    try:
        result = MpiTarget().run(covered, frames, told)
    finally:
        thread.join()
        boards.boards["two"].link("up")
    assert [event.kind for event in heard] == ["failure", *["failure"] * (way == "cable"), "takeover"]
    assert "d2" in heard[-1].down and len(result.outputs) == len(frames)
    model = Model.load(networks.build("lenet"))
    wanted = [run_model(model, given) for given in frames[:7]]
    for number, outputs in enumerate(result.outputs):
        assert compare_value("", wanted[number % 7]["output"], outputs["output"]).passed, number
    wait_until(lambda: not ranks(home, own=False))


@pytest.mark.slow
def test_host_that_is_unreachable_at_the_start_counts_as_failed(
    boards: Cluster, net: Path, covered: Path, tmp_path: Path
) -> None:
    hosts = Hosts.load(boards.hosts(tmp_path / "hosts.toml"))
    options = RunOptions(hosts=hosts, insecure=True, timeout_s=100)
    install(covered, options)
    frames = [{"input": np.full((1, 1, 32, 32), 3, np.float32)}] * 2
    boards.boards["two"].stop()
    try:
        result = MpiTarget().run(covered, frames, options)
        with pytest.raises(RunError, match="Connection refused"):
            MpiTarget().run(net, frames, options)
    finally:
        boards.boards["two"].start()
        wait_until(boards.boards["two"].answers)
    assert [(event.kind, event.device) for event in result.events] == [
        ("failure", "d2"), ("failure", "d3"), ("takeover", "d3")
    ]  # fmt: skip
    assert "host 'two' cannot be reached" in result.events[0].reason
    wanted = run_model(Model.load(networks.build("lenet")), frames[0])["output"]
    assert all(compare_value("", wanted, outputs["output"]).passed for outputs in result.outputs)


def test_deploy_errors_are_one_line(boards: Cluster, net: Path, tmp_path: Path) -> None:
    hosts = Hosts.load(boards.hosts(tmp_path / "hosts.toml"))
    with pytest.raises(UsageError, match=r"^deploy: MPI encrypts nothing: allow unencrypted connections"):
        install(net, RunOptions(hosts=hosts))
    with pytest.raises(UsageError, match=r"^deploy: target 'mpi' supports neither --pin nor --listen"):
        install(net, RunOptions(hosts=hosts, insecure=True, pin=True))
    other = Path(shutil.copytree(net, tmp_path / "other"))
    words = r"host '(one|two)' \(root@.*\), device 'd[02]': .* copy the artifact there with 'dicompiler deploy'$"
    with pytest.raises(RunError, match=words):
        run(other, None, 1, 60, RunOptions(hosts=hosts, insecure=True))


def test_paths_in_the_home_of_a_board_are_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs, home = tmp_path / "programs", tmp_path / "home of the board"
    programs.mkdir()
    # Instead of ssh, a script runs the command, its last argument, with another home directory.
    (programs / "ssh").write_text(f"#!/bin/sh\nfor last do :; done\nHOME='{home}' exec sh -c \"$last\"\n")
    (programs / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/a directory:{os.environ['PATH']}")
    location = DeviceLocation("d0", "pi@one", "models/net/d0", python="venv/bin/python")
    command = deploy._make_launch_command(deploy.PackageHost("one", location, ("d0",)))
    script = f"set -- 'env; ls -d \"$TMPDIR\"'; {command}"
    lines = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert f"PATH={home}/venv/bin:{os.environ['PATH']}" in lines
    assert f"TMPDIR={home}/models/net/.one.run/temporary" in lines
    assert lines[-1] == f"{home}/models/net/.one.run/temporary"
