"""`dicompiler deploy` over ssh to boards in network namespaces: copying, running, failures."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.boards import NOWHERE, Cluster, call, cluster
from support.printed import column
from support.running import LIMIT_S, WAIT_S, pids, wait_until

import dicompiler
from dicompiler import networks
from dicompiler.base.errors import RunError, UsageError
from dicompiler.base.schema import validate
from dicompiler.cli.command_line import main
from dicompiler.driver.artifact import install
from dicompiler.target.remote.certificates import make_keys
from dicompiler.target.remote.hosts import Hosts
from dicompiler.target.run_records import RunOptions
from dicompiler_targets.sockets.artifact import SocketsArtifact
from dicompiler_targets.sockets.daemon_client import ResidentCluster
from dicompiler_targets.sockets.deploy import _DeviceCopier
from dicompiler_targets.sockets.runtime.handshake import TOKEN_VARIABLE
from dicompiler_targets.sockets.session import ClusterSession

NAMES = ("pi01", "pi02")


# A run with these options does not end by itself. The heartbeat is short, because some failures are noticed only after
# three missed heartbeats.
FOREVER = ("--insecure", "--frames", "10000000", "--heartbeat", "0.3")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path_factory.mktemp("small")
    call("mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place))
    try:
        yield place
    finally:
        call("umount", str(place))


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory, small: Path) -> Iterator[Cluster]:  # noqa: ARG001  (seen by sshd)
    with cluster(tmp_path_factory.mktemp("boards"), NAMES) as made, made.inside():
        yield made


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("compiled") / "net"
    dicompiler.compile(networks.build("lenet"), platform="rpi4x2", strategy="modnn", output=directory)
    return directory


@pytest.fixture
def net(compiled: Path, tmp_path: Path) -> Path:
    """Return a copy of the artifact for a single test."""
    return Path(shutil.copytree(compiled, tmp_path / tmp_path.name))


def device_directory(boards: Cluster, name: str, net: Path) -> Path:
    """Return the default path of the device's directory on its board."""
    return boards.boards[name].home / ".cache" / "dicompiler" / net.name / name


def remove_copies(boards: Cluster) -> None:
    """Remove the artifacts of other tests from all boards, which would not be sent again."""
    for board in boards.boards.values():
        shutil.rmtree(board.home / ".cache", ignore_errors=True)


def copied(output: str) -> list[int]:
    """Return the copied bytes of each device from the output of deploy."""
    return [int(count) for count in column(output, "bytes copied").values()]


def test_runs_network_on_boards(boards: Cluster, net: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    remove_copies(boards)
    hosts, inputs, outputs = boards.hosts(tmp_path / "hosts.toml"), tmp_path / "x.npz", tmp_path / "y.npz"
    np.savez(inputs, input=np.random.default_rng(1).standard_normal((1, 1, 32, 32)).astype(np.float32))
    options = ["--inputs", str(inputs), "--outputs", str(outputs), "--frames", "3", "--logs", str(tmp_path / "logs")]
    assert main(["deploy", str(net), "--hosts", str(hosts), "--insecure", "--verify", *options]) == 0
    output = capfd.readouterr().out
    assert min(copied(output)) > 50_000
    assert "output on pi01  ok" in output and "frames per second" in output
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["pi01.log", "pi02.log"]
    assert main(["run", str(net), "--inputs", str(inputs), "--outputs", str(tmp_path / "here.npz")]) == 0
    with np.load(outputs) as got, np.load(tmp_path / "here.npz") as expected:
        assert np.allclose(got["output"], expected["output"], rtol=1e-5, atol=1e-6)
    assert not any(pids(device_directory(boards, name, net).parent) for name in NAMES)


def test_copies_only_missing_files(boards: Cluster, net: Path, tmp_path: Path) -> None:
    remove_copies(boards)
    options = RunOptions(hosts=Hosts.load(boards.hosts(tmp_path / "hosts.toml")), insecure=True)
    assert all(one.copied_bytes > 50_000 for one in install(net, options))
    places = [device_directory(boards, name, net) for name in NAMES]
    before = [(place.stat().st_ino, place.stat().st_mtime_ns) for place in places]
    assert [one.copied_bytes for one in install(net, options)] == [0, 0]
    assert [(place.stat().st_ino, place.stat().st_mtime_ns) for place in places] == before
    (places[1] / "weights.bin").write_bytes(b"cut short")
    assert [one.copied_bytes > 0 for one in install(net, options)] == [False, True]
    assert (places[1] / "weights.bin").read_bytes() == (net / "pi02" / "weights.bin").read_bytes()
    # Another network with the same name replaces the deployed network completely.
    (places[0] / "old").touch()
    dicompiler.compile(networks.build("tiny"), platform="rpi4x2", strategy="modnn", output=net)
    assert all(one.copied_bytes for one in install(net, options))
    assert not (places[0] / "old").exists()
    assert [path.name for path in places[0].parent.iterdir()] == ["pi01"]


@pytest.mark.slow
def test_other_plan_sends_only_pieces_that_a_board_lacks(
    boards: Cluster, net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first board has all weights of the second plan as a part of its file; the second board has none."""
    options = RunOptions(hosts=Hosts.load(boards.hosts(tmp_path / "hosts.toml")), insecure=True)
    install(net, options)
    other = tmp_path / f"other-{net.name}"
    dicompiler.compile(networks.build("lenet"), platform="rpi4x2", strategy="single", output=other, allow_worse=True)
    place, weights = device_directory(boards, "pi01", other), other / "pi01" / "weights.bin"
    (installed,) = install(other, options)
    assert installed.copied_bytes < 0.25 * weights.stat().st_size
    assert (place / "weights.bin").read_bytes() == weights.read_bytes()
    # Simulate that an assembled file is removed before it is used.
    assemble = _DeviceCopier.assemble

    def lose_assembled_file(copier: _DeviceCopier) -> None:
        assemble(copier)
        (place.parent / ".pi01.pieces" / "weights.bin").unlink()

    monkeypatch.setattr(_DeviceCopier, "assemble", lose_assembled_file)
    (place / "weights.bin").write_bytes(weights.read_bytes()[:-1])
    (installed,) = install(other, options)
    assert installed.copied_bytes > weights.stat().st_size
    assert (place / "weights.bin").read_bytes() == weights.read_bytes()
    assert [path.name for path in place.parent.iterdir()] == ["pi01"]


@pytest.mark.slow
def test_copies_keys_to_their_own_device_only(
    boards: Cluster, net: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hosts, keys = boards.hosts(tmp_path / "hosts.toml"), tmp_path / "keys"
    make_keys(NAMES, keys)
    assert main(["deploy", str(net), "--hosts", str(hosts), "--keys", str(keys), "--verify", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    validate({"deploy": document}, "results", "deploy --json")
    validate(document["run"], "run", "deploy --json")
    assert [(one["device"], one["host"]) for one in document["installed"]] == [
        ("pi01", "root@10.77.0.2"),
        ("pi02", "root@10.77.0.3"),
    ]
    assert set(document["installed"][0]["versions"]) == {"Python", "numpy", "onnxruntime"}
    assert [check["passed"] for check in document["checks"]] == [True]
    for name in NAMES:
        place = device_directory(boards, name, net).parent / ".keys"
        assert [path.name for path in place.iterdir()] == [name]
        assert (place / name / "key.pem").read_bytes() == (keys / "devices" / name / "key.pem").read_bytes()
        assert {path.stat().st_mode & 0o777 for path in (place / name).iterdir()} == {0o600}
        assert (place / name).stat().st_mode & 0o777 == 0o700
    shutil.rmtree(keys / "devices" / "pi02")
    make_keys(NAMES, keys)
    copied_again = [one.copied_bytes for one in install(net, RunOptions(hosts=Hosts.load(hosts), keys=keys))]
    assert copied_again[0] == 0 < copied_again[1] < 10_000
    make_keys(NAMES, keys, revoke=["pi02"])
    revoked = (keys / "authority" / "crl.pem").read_bytes()
    refused = "pi02: keys: .*pi02: its certificate was revoked"
    with pytest.raises(RunError, match=refused):
        dicompiler.run(net, options=RunOptions(keys=keys))
    install(net, RunOptions(hosts=Hosts.load(hosts), keys=keys))
    for name in NAMES:
        assert (device_directory(boards, name, net).parent / ".keys" / name / "crl.pem").read_bytes() == revoked


def test_connects_to_boards(boards: Cluster, net: Path, tmp_path: Path) -> None:
    extra = '[[host]]\nname = "extra"\nssh = "x"\n'
    hosts = boards.hosts(tmp_path / "hosts.toml", extra)
    text = hosts.read_text().replace('ssh = "root@10.77.0.3"', 'ssh = "10.77.0.3"\naddress = "10.77.0.3"\ncores = [0]')
    hosts.write_text(text.replace("[defaults]", "[defaults]\nthreads = 1"))
    with dicompiler.connect(net, RunOptions(insecure=True, in_flight=2), hosts=hosts) as session:
        words = Path(f"/proc/{pids(device_directory(boards, 'pi02', net).parent)['pi02']}/cmdline").read_text()
        assert "\0--listen\x0010.77.0.3:0\0--threads\x001\0--cores\x000\0" in words
        image = {"input": np.ones((1, 1, 32, 32), np.float32)}
        outputs = [found["output"] for found in session.stream([image] * 4)]
    assert all(np.array_equal(one, outputs[0]) for one in outputs)


@contextmanager
def running(boards: Cluster, net: Path, *options: str) -> Iterator[Future[int]]:
    """Run an endless deploy, which has finished frames."""
    hosts = boards.hosts(net.parent / "hosts.toml")
    command = ["deploy", str(net), "--hosts", str(hosts), "--outputs", str(net.parent / "y.npz"), *FOREVER, *options]
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(main, command)
        wait_until(lambda: future.done() or all(pids(device_directory(boards, name, net).parent) for name in NAMES))
        before = received(boards, net)
        wait_until(lambda: future.done() or received(boards, net) > before + 100_000)
        assert not future.done()
        yield future


def received(boards: Cluster, net: Path) -> int:
    """Return the bytes that the board pi02 has received."""
    pid = pids(device_directory(boards, "pi02", net).parent)["pi02"]
    return int(Path(f"/proc/{pid}/net/dev").read_text().split("net:")[1].split()[0])


def kill_device(boards: Cluster, net: Path) -> None:
    os.kill(pids(device_directory(boards, "pi02", net).parent)["pi02"], signal.SIGKILL)


def kill_sshd(boards: Cluster, net: Path) -> None:  # noqa: ARG001
    boards.boards["pi02"].stop()


def cut_cable(boards: Cluster, net: Path) -> None:  # noqa: ARG001
    boards.boards["pi02"].link("down")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (kill_device, r"its process was ended by signal 9 \(SIGKILL\)"),
        (kill_sshd, r"the ssh connection was lost: "),
        (cut_cable, r"no data received for 0.9 s: the device has stopped, or the network to the device is down"),
    ],
    ids=["device killed", "sshd killed", "cable cut"],
)
def test_failure_names_device_and_host(
    harm: Callable[[Cluster, Path], None],
    expected: str,
    boards: Cluster,
    net: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    try:
        with running(boards, net) as future:
            harm(boards, net)
            since = time.monotonic()
            assert future.result(WAIT_S) == 1
            assert time.monotonic() - since < 0.9 + LIMIT_S
            wait_until(lambda: not any(pids(device_directory(boards, name, net).parent) for name in NAMES))
    finally:
        board = boards.boards["pi02"]
        board.link("up")
        if board.sshd is None:
            board.start()
            wait_until(board.answers)
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(rf"error: device 'pi02' on root@10\.77\.0\.3: {expected}", line)
    assert not (net.parent / "y.npz").exists()
    logs = net.with_name(f"{net.name}.logs")
    assert logs.is_dir() == line.endswith(f"; see the output of the devices in {logs}")


@pytest.mark.slow
def test_interrupt_ends_devices_on_one_board(boards: Cluster, net: Path) -> None:
    here = device_directory(boards, "pi01", net).parent
    command = [
        sys.executable,
        "-m",
        "dicompiler",
        *deploy_command(boards, net, "root@10.77.0.3", "10.77.0.2", *FOREVER),
    ]
    paths = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, stderr=subprocess.PIPE) as deploy:
        wait_until(lambda: sorted(pids(here)) == list(NAMES))
        deploy.send_signal(signal.SIGINT)
        _, errors = deploy.communicate(timeout=WAIT_S)
    assert deploy.returncode == 130
    assert errors.decode().splitlines()[-1] == "dicompiler: interrupted"
    wait_until(lambda: not pids(here), LIMIT_S)


def write_python_wrapper(path: Path, text: str) -> str:
    """Write a script that replaces Python; in its `text`, $PYTHON is this interpreter."""
    path.write_text(f"#!/bin/sh\nPYTHON={sys.executable}\n{text}\n")
    path.chmod(0o755)
    return str(path)


def deploy_command(boards: Cluster, net: Path, old: str, new: str, *options: str) -> list[str]:
    """Return a deploy command whose hosts.toml has `new` instead of `old`."""
    hosts = boards.hosts(net.parent / "hosts.toml")
    text = hosts.read_text()
    assert old in text
    hosts.write_text(text.replace(old, new))
    return ["deploy", str(net), "--hosts", str(hosts), *(options or ("--copy-only",))]


def error_line(command: list[str], capfd: pytest.CaptureFixture[str], code: int = 1) -> str:
    """Return the error line of a command that fails."""
    capfd.readouterr()
    assert main(command) == code
    (line,) = capfd.readouterr().err.splitlines()
    return line.removeprefix("dicompiler: error: ")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "root@10.77.0.3",
            f"root@{NOWHERE}",
            rf"device 'pi02' on root@{NOWHERE}: .*(No route|unreachable).*: is it on, and does sshd run there\?",
        ),
        (
            '.3"',
            '.3"\nport = 2',
            r"device 'pi02' on .*port 2: Connection refused: is it on, .*ssh, port in .*hosts",
        ),
        (
            "root@10.77.0.3",
            "root@no.such.board",
            r".*Could not resolve hostname no\.such\.board.*: check the value of 'ssh'",
        ),
        (
            "root@10.77.0.3",
            "nobody@10.77.0.3",
            r"device 'pi02' on nobody@.*Permission denied \(.*\): authorize your key \('ssh-copy-id nobody@",
        ),
        (
            sys.executable,
            "python9",
            r"device 'pi0.' on root@10.77.0..: Python 'python9' cannot be run \(.*not found\): install it, or",
        ),
    ],
)
def test_names_unusable_host(
    old: str, new: str, expected: str, boards: Cluster, net: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert re.match(expected, error_line(deploy_command(boards, net, old, new), capfd))


def test_rejects_host_with_unknown_key(
    boards: Cluster, net: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    boards.known(["10.77.0.2"])
    try:
        line = error_line(deploy_command(boards, net, "root", "root"), capfd)
        assert re.match(
            r"device 'pi02' on root@10.77.0.3: Host key verification failed: .*by hand \('ssh root@10", line
        )
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other"))
        with (boards.root / "known_hosts").open("a") as file:
            file.write(f"10.77.0.3 {(tmp_path / 'other.pub').read_text()}")
        line = error_line(deploy_command(boards, net, "root", "root"), capfd)
        assert re.match(
            r"device 'pi02' on .*: Host key for 10\.77\.0\.3 has changed .*: if you have installed the host again", line
        )
    finally:
        boards.known([board.address for board in boards.boards.values()])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'exec $PYTHON -S "$@"',
            r"its Python has no numpy \(.*\): run '.*/own -m (pip|venv ~/venv && ~/venv/bin/pip) install numpy onnx",
        ),
        (
            'shift; exec $PYTHON -c "import sys; sys.version_info = (3, 9, 2); exec(sys.stdin.read())" "$@"',
            r"Python 3\.9\.2 is too old, 3\.11 or newer is needed: install it, or name another Python \(key python in",
        ),
        (
            "shift; exec $PYTHON -c \"import sys, onnxruntime; onnxruntime.__version__ = '1.16.3'; "
            'exec(sys.stdin.read())" "$@"',
            r"onnxruntime 1\.16\.3 is too old, 1\.21 or newer is needed: run '.*/own -m pip install --upgrade onnx",
        ),
    ],
    ids=["nothing installed", "old Python", "old onnxruntime"],
)
def test_rejects_unsuitable_python(
    text: str, expected: str, boards: Cluster, net: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = write_python_wrapper(tmp_path / "own", text)
    line = error_line(deploy_command(boards, net, "root@10.77.0.2", f'root@10.77.0.2"\npython = "{own}'), capfd)
    assert re.match(rf"device 'pi01' on root@10\.77\.0\.2: {expected}", line)
    # The refused command copied nothing to the boards.
    assert not any(device_directory(boards, name, net).exists() for name in NAMES)


@pytest.mark.parametrize(
    ("needed", "limits"),
    [
        ((8, 90), r"IR version 8 \(it supports 8\) and opset 90 \(it supports \d\d\)"),
        ((90, 13), r"IR version 90 \(it sup"),
    ],
)
def test_compares_onnxruntime_with_the_needs_of_the_model(
    needed: tuple[int, int],
    limits: str,
    boards: Cluster,
    net: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert SocketsArtifact.load(net).required_onnx("pi01") == (4, 17)
    monkeypatch.setattr(SocketsArtifact, "required_onnx", lambda *args: needed if args[1] == "pi02" else (4, 17))
    line = error_line(["deploy", str(net), "--hosts", str(boards.hosts(tmp_path / "hosts.toml")), "--copy-only"], capfd)
    start = r"device 'pi02' on root@10\.77\.0\.3: onnxruntime \d.* is too old for this model, which needs "
    assert re.match(start + limits, line)
    assert line.endswith("or export the model with an older opset") and "--upgrade onnxruntime' there" in line
    # The refused command copied nothing to the boards.
    assert not any(device_directory(boards, name, net).exists() for name in NAMES)


@pytest.mark.parametrize(("engine", "package"), [pytest.param("ncnn", "ncnn", marks=pytest.mark.slow), ("mnn", "MNN")])
def test_names_board_without_the_engine(
    engine: str, package: str, boards: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    net = tmp_path / f"in_{engine}"
    dicompiler.compile(networks.build("lenet"), "rpi4x2", "modnn", engine=engine, output=net)
    script = f'shift; exec $PYTHON -c "import sys; sys.modules[\'{package}\'] = None; exec(sys.stdin.read())" "$@"'
    own = write_python_wrapper(tmp_path / "own", script)
    line = error_line(deploy_command(boards, net, "root@10.77.0.2", f'root@10.77.0.2"\npython = "{own}'), capfd)
    expected = rf"its Python has no {package} \(.*\): run '.* install numpy onnxruntime {package}' there"
    assert re.match(rf"device 'pi01' on root@10\.77\.0\.2: {expected}", line)
    assert not any(device_directory(boards, name, net).exists() for name in NAMES)
    assert main(deploy_command(boards, net, "root", "root")) == 0


def test_full_disk_leaves_no_files(boards: Cluster, net: Path, small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = error_line(deploy_command(boards, net, ".2", f'.2"\ndirectory = "{small}/full'), capfd)
    assert re.match(
        rf"device 'pi01' on root@10.77.0.2: files cannot be copied to {small}/full/pi01: No space left on device: free",
        line,
    )
    assert list((small / "full").iterdir()) == []


def test_keeps_directory_with_other_content(
    boards: Cluster, net: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine" / "pi02").mkdir(parents=True)
    (tmp_path / "mine" / "pi02" / "thesis.txt").write_text("42")
    line = error_line(deploy_command(boards, net, ".3", f'.3"\ndirectory = "{tmp_path}/mine'), capfd)
    assert re.search(r"device 'pi02' on .*mine/pi02 holds something else: give another directory, or remove it", line)
    assert (tmp_path / "mine" / "pi02" / "thesis.txt").read_text() == "42"


def test_names_device_that_cannot_listen(boards: Cluster, net: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = deploy_command(boards, net, 'root@10.77.0.3"', 'root@10.77.0.3"\naddress = "10.77.0.9"', "--insecure")
    assert re.match(
        r"device 'pi02' on root@10\.77\.0\.3: .*Cannot assign requested address", error_line(command, capfd)
    )


def test_reports_errors_before_copying(
    boards: Cluster, net: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert re.search(r"10\.77\.0\.1 is not a loopback address and there are no keys", error_line(deploy_command(
        boards, net, "root", "root", "--timeout", "60"
    ), capfd, 2))  # fmt: skip
    keyless = deploy_command(boards, net, "root", "root", "--keys", str(tmp_path / "keys"))
    assert re.search(
        r"keys/devices/pi01/ca\.pem: no such file: create it with 'dicompiler keys ", error_line(keyless, capfd)
    )
    missing = deploy_command(boards, net, 'name = "pi02"', 'name = "pi2"')
    assert re.search(
        r"hosts\.toml: device 'pi02' cannot be reached: there is no host 'pi02' \(did you mean 'pi2'\?\): add \[\[host",
        error_line(missing, capfd),
    )
    assert "there is no route to 'no.such.board'" in error_line(
        deploy_command(boards, net, "root@10.77.0.2", "no.such.board", "--insecure"), capfd
    )
    assert "--copy-only runs nothing" in error_line(
        [*deploy_command(boards, net, "root", "root"), "--verify"], capfd, 2
    )
    assert "not an artifact of dicompiler" in error_line(["deploy", str(tmp_path), *missing[2:]], capfd)
    monkeypatch.setenv("PATH", str(tmp_path))
    line = error_line(deploy_command(boards, net, "root", "root"), capfd)
    assert line == "ssh is missing on this machine: install the package openssh-client"
    assert not any(device_directory(boards, name, net).exists() for name in NAMES)


@pytest.fixture(scope="module")
def surviving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("surviving") / "net"
    platform, survive = "rpi4x2", "1"
    dicompiler.compile(
        networks.build("lenet"), platform=platform, strategy="modnn", tolerate_failures=survive, output=directory
    )
    return directory


IMAGE = {"input": np.ones((1, 1, 32, 32), np.float32)}


def stream_during_failure(
    session: ClusterSession, harm: Callable[[], object], repair: Callable[[], object] = int
) -> list[tuple[str, str]]:
    """Stream frames until a device has failed and returned; return the session's events."""
    end, done = time.monotonic() + 60, list[object]()

    def frames() -> Iterator[dict[str, np.ndarray]]:
        while len(session.events) < 3 and time.monotonic() < end:
            yield IMAGE

    wanted = session.infer(IMAGE)["output"]
    for number, outputs in enumerate(session.stream(frames())):
        assert np.allclose(outputs["output"], wanted, rtol=1e-5, atol=1e-6), number
        if number == 20:
            harm()
        if len(session.events) > 1 and not done:
            done.append(repair())
    return [(event.kind, event.device) for event in session.events]


@pytest.mark.slow
def test_board_fails_and_returns(boards: Cluster, surviving: Path, net: Path, tmp_path: Path) -> None:
    net = Path(shutil.copytree(surviving, net, dirs_exist_ok=True))
    board, hosts = boards.boards["pi02"], Hosts.load(boards.hosts(tmp_path / "hosts.toml"))
    options = RunOptions(hosts=hosts, insecure=True, in_flight=2)
    install(net, options)
    with dicompiler.connect(net, options, 60) as session:
        assert isinstance(session, ClusterSession)
        assert stream_during_failure(session, board.stop, board.start) == [
            (kind, "pi02") for kind in ("failure", "takeover", "return")
        ]
        assert "the ssh connection was lost" in session.events[0].reason
    board.stop()
    try:  # The board pi02 is off when the session starts.
        assert [one.device for one in install(net, options)] == ["pi01"]
        with dicompiler.connect(net, options, 60) as session:
            assert isinstance(session, ClusterSession)
            session.infer(IMAGE)
            assert [(event.kind, event.device) for event in session.events] == [
                ("failure", "pi02"),
                ("takeover", "pi02"),
            ]
    finally:
        board.start()
        wait_until(board.answers)


@pytest.mark.slow
def test_resident_devices_run_until_stopped(
    boards: Cluster, surviving: Path, net: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    net = Path(shutil.copytree(surviving, net, dirs_exist_ok=True))
    places, keys = boards.hosts(tmp_path / "hosts.toml"), tmp_path / "keys"
    make_keys(NAMES, keys)
    command = ["deploy", str(net), "--hosts", str(places), "--keys", str(keys)]
    here = device_directory(boards, "pi01", net).parent

    def running() -> dict[str, int]:
        return {
            name: pid for name in NAMES for pid in [pids(device_directory(boards, name, net).parent).get(name)] if pid
        }

    assert main([*command, "--resident", "--verify", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    validate({"deploy": document}, "results", "deploy --json")
    assert document["resident"] == list(NAMES) and document["checks"][0]["passed"]
    before = running()
    assert len(before) == 2
    assert main([*command, "--resident"]) == 0 and running() == before
    assert main(["run", str(net), "--log", str(tmp_path / "run.json")]) == 0
    assert re.search(r"measured: .* on the boards bottleneck:", " ".join(capfd.readouterr().out.split()))
    assert json.loads((tmp_path / "run.json").read_text())["location"] == "boards"
    with dicompiler.connect(net, RunOptions(hosts=Hosts.load(places), in_flight=2), 60) as session:
        assert isinstance(session, ClusterSession)
        harm = functools.partial(os.kill, before["pi02"], signal.SIGKILL)
        assert stream_during_failure(session, harm) == [(kind, "pi02") for kind in ("failure", "takeover", "return")]
    assert running()["pi01"] == before["pi01"] and running()["pi02"] != before["pi02"]
    assert main(["status", str(net)]) == 0  # The state file has the new address of the restarted device.
    assert main(["run", str(net)]) == 0
    boards.boards["pi02"].stop()
    try:
        line = error_line([*command, "--stop"], capfd)
        assert line.endswith("; may still run: pi02; stopped: pi01") and "is it on, and does sshd run there?" in line
        assert list(running()) == ["pi02"]
    finally:
        boards.boards["pi02"].start()
        wait_until(boards.boards["pi02"].answers)
    assert main([*command, "--stop", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["stopped"] == ["pi02"]
    assert running() == {} and main(["status", str(net)]) == 2
    assert sorted(path.name for path in (here / ".resident").iterdir()) == ["pi01.log"]
    assert main([*command, "--stop"]) == 0 and "not running" in capfd.readouterr().out


@pytest.mark.slow
def test_remove_leaves_nothing_of_the_artifact_on_the_boards(
    boards: Cluster, net: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys, places = tmp_path / "keys", boards.hosts(tmp_path / "hosts.toml")
    make_keys(NAMES, keys)
    found = dicompiler.deploy(net, places, keys=keys, frames=2, resident=True, verify=True)
    assert isinstance(found, dicompiler.Deployment)
    assert found.resident == NAMES and found.verification.passed and found.result is not None
    assert [entry.device for entry in found.installed] == [*NAMES]
    directories = [device_directory(boards, name, net).parent for name in NAMES]
    kept = directories[0] / "mine.txt"
    kept.write_text("mine")
    assert all((directory / ".keys").is_dir() for directory in directories)
    command = ["deploy", str(net), "--hosts", str(places), "--keys", str(keys)]
    assert main([*command, "--remove", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    validate({"deploy": document}, "results", "deploy --json")
    assert document["removed"] == [*NAMES]
    assert [*directories[0].iterdir()] == [kept] and not directories[1].exists()
    assert main(["status", str(net)]) == 2
    assert main([*command, "--remove"]) == 0
    output = capfd.readouterr().out
    assert "removed" not in output and output.count("nothing to remove") == 2
    with pytest.raises(UsageError, match="with copy_only nothing is run: omit resident and verify"):
        dicompiler.deploy(net, places, copy_only=True, verify=True)


PAGE = Path(__file__).parents[2] / "docs" / "use" / "keep-running.md"


def read_unit(text: str, home: Path) -> tuple[str, list[str]]:
    """Return the working directory and the command of a systemd unit, as systemd reads them."""

    def expand(value: str) -> str:
        assert not re.search(r"%[^%h]|%$|(?<!\$)\$(?!\$)", value.replace("%%", ""))
        return value.replace("%%", "\0").replace("%h", str(home)).replace("\0", "%").replace("$$", "$")

    settings = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    return expand(settings["WorkingDirectory"]), [expand(word) for word in shlex.split(settings["ExecStart"])]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1], ids=["plain paths", "paths with spaces and percent signs"])
def test_devices_of_systemd_template_serve_clients(
    number: int, boards: Cluster, net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start the devices as the units in the documentation do, with a state file that the user writes."""
    template = re.findall(r"```ini\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[number]
    template = template.replace("--keys ../.keys/pi01", "--insecure")
    directory = re.findall(r"WorkingDirectory=%h/(.*)/pi01", template)[0].replace("%%", "%")
    hosts = boards.hosts(tmp_path / "hosts.toml")
    hosts.write_text(hosts.read_text().replace("[defaults]\n", f'[defaults]\ndirectory = "{directory}"\n'))
    install(net, RunOptions(hosts=Hosts.load(hosts), insecure=True))
    addresses = {name: (boards.boards[name].address, 7070) for name in NAMES}
    digest, token = SocketsArtifact.load(net).digest, "0" * 32
    ResidentCluster(net, digest, addresses, token, insecure=True).save()
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    processes = []
    try:
        for name, (host, port) in addresses.items():
            home = boards.boards[name].home
            unit = template.replace("192.168.1.11:7001", f"{host}:{port}").replace("pi01", name)
            place, (python, *arguments) = read_unit(unit, home)
            Path(python).parent.mkdir(parents=True)
            Path(python).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
            Path(python).chmod(0o755)
            check_unit(unit.replace("%h", str(home)), tmp_path / f"{name}.service")
            command = ["ip", "netns", "exec", boards.boards[name].space, python, *arguments]
            processes.append(subprocess.Popen(command, cwd=place))
        wait_until(lambda: main(["status", str(net)]) == 0)
        with dicompiler.connect(net, timeout=60) as session:
            assert session.infer(IMAGE)["output"].shape == (1, 10)
    finally:
        for process in processes:
            process.terminate()
        codes = [process.wait(WAIT_S) for process in processes]
    assert codes == [0, 0]


def check_unit(unit: str, path: Path) -> None:
    """Let systemd check the unit, on hosts that have it."""
    if shutil.which("systemd-analyze"):
        path.write_text(unit)
        call("systemd-analyze", "verify", str(path))


def test_rejects_options_for_local_runs(compiled: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text('[[host]]\nname = "pi01"\nssh = "pi01"\n')
    with pytest.raises(UsageError, match="applies to this host only: set the cores of each device in the hosts file"):
        install(compiled, RunOptions(hosts=Hosts.load(tmp_path / "hosts.toml"), pin=True))
    with pytest.raises(UsageError, match="no hosts: pass the file that describes the hosts"):
        install(compiled, RunOptions())


@pytest.mark.slow
def test_followed_link_that_changes_during_copying_starts_the_copied_artifact(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, used = tmp_path / "current", list[Path]()
    link.symlink_to(compiled)

    def copy_while_link_changes(directory: Path, _options: RunOptions) -> tuple[()]:
        used.append(directory)
        link.unlink()
        link.symlink_to(tmp_path)
        return ()

    def run(directory: Path, *_: object) -> None:
        used.append(directory)
        raise RunError("stop")

    monkeypatch.setattr("dicompiler.driver.artifact.install", copy_while_link_changes)
    monkeypatch.setattr("dicompiler.measure.adapt.run_with_swaps", run)
    (tmp_path / "hosts.toml").write_text('[[host]]\nname = "pi01"\nssh = "pi01"\n')
    assert main(["deploy", str(link), "--hosts", str(tmp_path / "hosts.toml"), "--follow", "--json"]) == 1
    assert used == [compiled, compiled]
