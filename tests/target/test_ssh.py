"""Copies and commands through ssh. A script replaces ssh, and runs the commands for the other host on this host."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from dicompiler.base.errors import RunError
from dicompiler.target.remote.hosts import DeviceLocation
from dicompiler.target.remote.ssh import (
    STAMP_FILE,
    UNPACK_SCRIPT,
    CommandResult,
    RemoteCommands,
    _write_archive,
    explain_failure,
    quote_path,
)

PLACE = DeviceLocation("a", "pi@board", "nets/a")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home directory on the other host, with an unusual name."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    place = tmp_path / "the 'home'"
    place.mkdir()
    monkeypatch.setenv("HOME", str(place))
    return place


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    found = {}
    for name in ("weights.bin", "runtime/wire.py", "run.sh"):
        path = found[name] = tmp_path / name.replace("/", "-")
        path.write_bytes(name.encode() * 5000)
    found["run.sh"].chmod(0o755)
    return found


def calls(seconds: float = 20.0) -> RemoteCommands:
    return RemoteCommands(time.monotonic() + seconds, "hosts.toml")


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_copy_holds_the_files_and_nothing_else(home: Path, files: dict[str, Path]) -> None:
    assert calls().copy_files(PLACE, "a b/$c/net", files, "one") == sum(path.stat().st_size for path in files.values())
    target = home / "a b" / "$c" / "net"
    assert content(target) == {name: path.read_bytes() for name, path in files.items()} | {STAMP_FILE: b"one"}
    modes = {path.name: path.stat().st_mode & 0o777 for path in (target, *target.rglob("*"))}
    assert modes == {"net": 0o700, "runtime": 0o700, "wire.py": 0o600, "weights.bin": 0o600, "run.sh": 0o700} | {
        STAMP_FILE: 0o600
    }
    calls().copy_files(PLACE, f"~/{target.relative_to(home)}", {"run.sh": files["run.sh"]}, "two")
    assert set(content(target)) == {"run.sh", STAMP_FILE}
    assert [path.name for path in target.parent.iterdir()] == ["net"]


def test_files_that_the_host_has_are_linked_and_not_sent(home: Path, files: dict[str, Path]) -> None:
    calls().copy_files(PLACE, "old net", files, "one")
    kept = {"weights.bin": "old net/weights.bin", "gone": "old net/gone"}
    rest = sum(path.stat().st_size for name, path in files.items() if name != "weights.bin")
    assert calls().copy_files(PLACE, "new", files, "two", other_copies=kept) == rest
    assert content(home / "new") == content(home / "old net") | {STAMP_FILE: b"two"}
    inodes = [(home / name / "weights.bin").stat().st_ino for name in ("old net", "new")]
    assert inodes[0] == inodes[1]


def test_rate_of_copy_is_limited(home: Path, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(100_000))
    start = time.monotonic()
    calls().copy_files(PLACE, "net", {"big": tmp_path / "big"}, "one", bytes_per_s=200_000)
    assert time.monotonic() - start >= 0.5
    assert (home / "net" / "big").read_bytes() == bytes(100_000)


def test_copy_that_was_cut_short_changes_nothing(home: Path, files: dict[str, Path], tmp_path: Path) -> None:
    calls().copy_files(PLACE, "net", files, "one")
    before = content(home)
    files["weights.bin"].write_bytes(b"new")
    with (tmp_path / "archive").open("wb") as stream:
        _write_archive(stream, files, "two")
    archive = (tmp_path / "archive").read_bytes()
    # The archive is cut to 0 bytes, within a file, and just before the stamp file.
    for size in (0, 700, archive.index(STAMP_FILE.encode())):
        part = io.BytesIO(archive[:size])
        done = calls().run(PLACE, UNPACK_SCRIPT, [quote_path("net"), STAMP_FILE], partial(shutil.copyfileobj, part))
        assert done.exit_code != 0
        assert content(home) == before
        assert [path.name for path in home.iterdir()] == ["net"]


def test_directory_that_is_not_ours_is_not_touched(home: Path, files: dict[str, Path]) -> None:
    (home / "empty").mkdir()
    calls().copy_files(PLACE, "empty", files, "one")
    for name in ("full", "file"):
        (home / "full").mkdir(exist_ok=True)
        (home / "full" / "thesis.txt").touch()
        (home / "file").touch()
        with pytest.raises(RunError, match=rf"device 'a' on pi@board: .*/{name} holds something else: give another"):
            calls().copy_files(PLACE, name, files, "one")
    assert (home / "full" / "thesis.txt").exists() and (home / "file").is_file()


def test_script_gets_its_arguments_and_its_input() -> None:
    done = calls().run(
        PLACE, 'cat; echo "$1|$2"; exit 3', [quote_path("/x y"), "'$z'"], lambda stream: stream.write(b"in ")
    )
    assert done == CommandResult(3, "in /x y|$z\n", "")


def test_first_failure_ends_the_others() -> None:
    own = calls()

    def work(script: str) -> CommandResult:
        done = own.run(PLACE, script, [])
        if done.exit_code:
            raise RunError("it failed")
        return done

    since = time.monotonic()
    with pytest.raises(RunError, match="it failed"):
        own.run_parallel(work, ["exec sleep 30", "exit 1", "exec sleep 30"])
    assert time.monotonic() - since < 10
    assert [done.output for done in calls().run_parallel(lambda n: calls().run(PLACE, f"echo {n}", []), [1, 2])] == [
        "1\n",
        "2\n",
    ]


def test_ends_work_that_takes_too_long() -> None:
    with pytest.raises(
        RunError,
        match=r"device 'a' on pi@board: its host did not answer in time: allow more time \(--timeout",
    ):
        calls(0.2).run(PLACE, "exec sleep 30", [])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("hello\nssh: connect to host board port 22: No route to host\r\n", r".*to host: is it on, .*\(ssh, port in h"),
        (
            "ssh: Could not resolve hostname board: Name or service not known",
            r".*: check the value of 'ssh' for this host in h\.toml$",
        ),
        (
            "kex_exchange_identification: Connection closed by remote host",
            r".*host: sshd there closes the connection: l",
        ),
        (
            "Bad owner or permissions on /home/me/.ssh/config",
            r"Bad .* run 'chmod 600 /home/me/.ssh/config'",
        ),
        (
            "pi@board: Permission denied (password).",
            r".*\(password\): the host accepts no keys: set 'PubkeyAuthentication",
        ),
        ("Received disconnect from board port 22:2: Too many authentication failures", r".*: name the right one \(id"),
        ("Host key verification failed.", r"Host key .* failed: its host key is .*\('ssh pi@board'\) and check it$"),
        ("pi@board: Permission denied (publickey).", r".*\(publickey\)\: authorize your key .*identity in h\.toml\)$"),
        ("kex_exchange_identification: read: Connection reset by peer", r"kex_exchange.* reset by peer: sshd there"),
        ("", "the ssh connection was lost$"),
    ],
)
def test_errors_of_ssh_have_a_remedy(said: str, expected: str) -> None:
    assert re.match(expected, explain_failure(PLACE, said, "h.toml"))


def test_module_needs_nothing_heavy() -> None:
    code = (
        "import sys, dicompiler.target.remote.ssh; "
        "print([m for m in ('numpy', 'onnx', 'jsonschema_rs') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
