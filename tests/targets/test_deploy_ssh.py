"""Errors of `deploy` if ssh cannot run a command on a board: the message of ssh, and a remedy for its cause."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.boards import Cluster, call, cluster
from support.running import wait_until

import dicompiler
from dicompiler import networks
from dicompiler.cli.command_line import main

PORT = 2222
"""The port of the additional sshd on pi01."""


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A board; ssh uses no key unless the hosts file names one."""
    with cluster(tmp_path_factory.mktemp("boards"), ["pi01"]) as made, made.inside():
        configuration = made.root / "ssh_config"
        lines = configuration.read_text().splitlines()
        configuration.write_text("\n".join(line for line in lines if not line.startswith("IdentityFile")) + "\n")
        yield made


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("compiled") / "net"
    dicompiler.compile(networks.build("lenet"), platform="rpi4x1", strategy="single", output=directory)
    return directory


@pytest.fixture(autouse=True)
def no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


def deploy(
    boards: Cluster,
    net: Path,
    place: Path,
    key: Path,
    capfd: pytest.CaptureFixture[str],
    *lines: str,
    user: str = "root",
) -> str:
    """Copy the artifact to the board with this key and more lines of the hosts file; return the error line."""
    address = boards.boards["pi01"].address
    text = boards.hosts(place / "hosts.toml").read_text().replace("root@", f"{user}@")
    extra = "".join(f"{line}\n" for line in (f'identity = "{key}"', *lines))
    (place / "hosts.toml").write_text(text + extra)
    capfd.readouterr()
    code = main(["deploy", str(net), "--hosts", str(place / "hosts.toml"), "--copy-only"])
    errors = capfd.readouterr().err.splitlines()
    if code == 0:
        return ""
    (line,) = errors
    start = f"dicompiler: error: device 'pi01' on {user}@{address}: "
    assert line.startswith(start)
    return line.removeprefix(start)


def copy_key(boards: Cluster, place: Path, mode: int = 0o600) -> Path:
    key = Path(shutil.copy(boards.root / "key", place / "id"))
    key.chmod(mode)
    return key


@contextlib.contextmanager
def run_sshd(boards: Cluster, place: Path, *lines: str) -> Iterator[str]:
    """Run another sshd on pi01 with these lines of configuration; return the line for the hosts file."""
    board, root = boards.boards["pi01"], boards.root
    settings = [
        *lines,
        f"ListenAddress {board.address}:{PORT}",
        f"HostKey {root}/host_key",
        f"AuthorizedKeysFile {root}/key.pub",
        "StrictModes no",
        "PermitRootLogin yes",
        "UsePAM no",
        "PidFile none",
    ]
    (place / "sshd_config").write_text("\n".join(settings) + "\n")
    known = root / "known_hosts"
    before = known.read_text()
    known.write_text(f"{before}[{board.address}]:{PORT} {(root / 'host_key.pub').read_text()}")
    command = ["ip", "netns", "exec", board.space, str(shutil.which("sshd")), "-D", "-f", str(place / "sshd_config")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        listening = ["ip", "netns", "exec", board.space, "ss", "-Hltn", f"sport = :{PORT}"]
        wait_until(lambda: call(*listening).strip())
        yield f"port = {PORT}"
    finally:
        process.kill()
        process.wait()
        known.write_text(before)


def test_key_that_others_can_read(
    boards: Cluster, net: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key = copy_key(boards, tmp_path, 0o644)
    line = deploy(boards, net, tmp_path, key, capfd)
    assert line.startswith(f"Permissions 0644 for '{key}' are too open: ")
    assert line.endswith(f"run 'chmod 600 {key}' on this machine")
    key.chmod(0o600)
    assert deploy(boards, net, tmp_path, key, capfd) == ""


def test_key_with_passphrase_and_no_agent(
    boards: Cluster, net: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = copy_key(boards, tmp_path)
    call("ssh-keygen", "-q", "-p", "-P", "", "-N", "secret words", "-f", str(key))
    line = deploy(boards, net, tmp_path, key, capfd)
    assert re.match(r"root@\S+: Permission denied \(publickey.*\): the key ", line)
    assert line.endswith(f"the key {key} has a passphrase, for which ssh cannot ask here: load the key into an agent "
                         f"('ssh-add {key}')")  # fmt: skip
    with subprocess.Popen(["ssh-agent", "-D", "-a", str(tmp_path / "agent")], stdout=subprocess.DEVNULL) as agent:
        try:
            wait_until((tmp_path / "agent").exists)
            monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
            call("ssh-add", "-q", str(boards.root / "key"))
            assert deploy(boards, net, tmp_path, key, capfd) == ""
        finally:
            agent.kill()


def test_public_key_in_place_of_the_private_one(
    boards: Cluster, net: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    public = Path(shutil.copy(boards.root / "host_key.pub", tmp_path / "id.pub"))
    public.chmod(0o600)
    line = deploy(boards, net, tmp_path, public, capfd)
    assert f": {public} is not a private key: name the private key, which has no suffix .pub (identity in " in line


@pytest.mark.parametrize(
    ("settings", "user", "expected"),
    [
        (
            ["ForceCommand echo only backups here"],
            "root",
            r"it does not run commands, but answers 'only backups here' \(exit code 0\): the account's login shell, a "
            r"ForceCommand in sshd_config .* replaces commands: allow them for this account, or use another one \(ssh",
        ),
        (["ForceCommand internal-sftp"], "root", r"(it does not run commands|.*sftp).*ForceCommand"),
        (
            ["AuthorizedKeysCommand /bin/cat {key}", "AuthorizedKeysCommandUser root"],
            "nobody",
            r"it does not run commands, but answers 'This account is currently not available\.' \(exit code 1\): the "
            r"account has no login shell: set one there \('sudo chsh",
        ),
        (
            ["PubkeyAuthentication no", "PasswordAuthentication yes"],
            "root",
            r"root@\S+: Permission denied \(password.*\): the host accepts no keys: set 'PubkeyAuthentication yes'",
        ),
    ],
    ids=["another command", "sftp only", "nologin", "passwords only"],
)
def test_hosts_that_run_no_commands(
    settings: list[str],
    user: str,
    expected: str,
    boards: Cluster,
    net: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    lines = [line.format(key=boards.root / "key.pub") for line in settings]
    with run_sshd(boards, tmp_path, *lines) as port:
        assert re.match(expected, deploy(boards, net, tmp_path, copy_key(boards, tmp_path), capfd, port, user=user))


def test_host_key_that_has_changed(
    boards: Cluster, net: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    address = boards.boards["pi01"].address
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other"))
    (boards.root / "known_hosts").write_text(f"{address} {(tmp_path / 'other.pub').read_text()}")
    try:
        line = deploy(boards, net, tmp_path, copy_key(boards, tmp_path), capfd)
    finally:
        boards.known([address])
    assert line.startswith(f"Host key for {address} has changed and you have requested strict checking: if you have")
    assert f"('ssh-keygen -R {address}')" in line
