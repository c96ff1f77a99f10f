"""`dicompiler keys`: keys are created once, kept, and renewed on request."""

from __future__ import annotations

import json
import re
import shutil
import stat
from pathlib import Path
from typing import Any

from support.commands import command, failed
from support.handmade import partial
from support.running import emit

from dicompiler.cli.command_line import main


def test_keys_are_created_once_kept_and_renewed(tmp_path: Path, capsys: Any) -> None:
    def printed() -> str:
        return " ".join(capsys.readouterr().out.split())

    directory = emit(partial(), tmp_path / "artifact")
    assert main(["keys", str(directory)]) == 0
    place = tmp_path / "artifact.keys"
    assert printed() == f"{place}: coordinator, a, b"
    for path in place.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    before = (place / "devices" / "a" / "cert.pem").read_bytes()
    shutil.rmtree(place / "devices" / "b")
    assert main(["keys", str(directory)]) == 0
    assert printed() == f"{place}: b"
    assert main(["keys", str(directory)]) == 0
    assert printed() == f"{place}: unchanged: all keys exist"
    assert (place / "devices" / "a" / "cert.pem").read_bytes() == before
    assert main(["keys", str(directory), "--revoke", "b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"keys": str(place), "created": [], "revoked": ["b"]}
    assert main(["keys", str(directory), "--revoke", "b", "--renew"]) == 0
    assert printed() == f"{place}: b; revoked b"
    assert main(["keys", str(directory), "--revoke", "c"]) == 2
    assert "device 'c' has no keys here (known: a, b)" in capsys.readouterr().err
    assert main(["keys", str(directory), "--renew"]) == 0
    assert (place / "devices" / "a" / "cert.pem").read_bytes() != before
    assert {path.name for path in tmp_path.iterdir()} == {"artifact", "artifact.keys"}


def test_days_are_limited_and_expiry_is_reported(tmp_path: Path) -> None:
    directory = emit(partial(), tmp_path / "artifact")
    for days in ("100000000", "36501", "0"):
        line = failed(2, "keys", str(directory), "--days", days)
        assert re.search(rf"'--days'.*{days} is not in the range 1<=x<=36500", line)
    near = r"dicompiler: warning: .*/artifact.keys: the certificates of a, authority, b, coordinator expire on .*\n"
    assert re.fullmatch(near, command("keys", str(directory), "--days", "20").stderr)
    keys = ["--keys", str(tmp_path / "artifact.keys")]
    assert re.match(near, command("run", str(directory), *keys).stderr)
    (tmp_path / "hosts.toml").write_text("")
    assert re.match(near, command("deploy", str(directory), "--hosts", str(tmp_path / "hosts.toml"), *keys).stderr)
    assert "--days: all keys exist, and none is new: " in command("keys", str(directory), "--days", "400").stderr
    assert command("keys", str(directory), "--renew", "--days", "36500").stderr == ""
