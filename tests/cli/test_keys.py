"""`dicompiler keys`: made once, kept, renewed on request."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path
from typing import Any

from support.handmade import partial
from support.running import emit

from dicompiler.cli.entry import main


def test_keys_are_made_once_kept_and_renewed(tmp_path: Path, capsys: Any) -> None:
    directory = emit(partial(), tmp_path / "artifact")
    assert main(["keys", str(directory)]) == 0
    place = tmp_path / "artifact.keys"
    assert capsys.readouterr().out == f"{place}: coordinator, a, b\n"
    for path in place.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    before = (place / "devices" / "a" / "cert.pem").read_bytes()
    shutil.rmtree(place / "devices" / "b")
    assert main(["keys", str(directory)]) == 0
    assert capsys.readouterr().out == f"{place}: b\n"
    assert main(["keys", str(directory)]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert (place / "devices" / "a" / "cert.pem").read_bytes() == before
    assert main(["keys", str(directory), "--renew"]) == 0
    assert (place / "devices" / "a" / "cert.pem").read_bytes() != before
    assert {path.name for path in tmp_path.iterdir()} == {"artifact", "artifact.keys"}
