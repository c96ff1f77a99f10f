"""`dicompiler platform` writes files that `--platform` accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dicompiler.cli.command_line import main
from dicompiler.ir.platform import Platform


def test_writes_the_platform_with_its_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, file = 'rpi5x2{bandwidth="2.5 Gbit/s"}', tmp_path / "cluster.toml"
    assert main(["platform", name, "-o", str(file)]) == 0
    assert capsys.readouterr().out == f"written: {file}\n"
    assert Platform.load(file) == Platform.load(name)
    assert main(["platform", name]) == 0
    assert capsys.readouterr().out == file.read_text()


def test_measures_this_host(tmp_path: Path) -> None:
    file = tmp_path / "this.toml"
    assert main(["platform", "this", "-o", str(file)]) == 0
    platform = Platform.load(file)
    (device,) = platform.devices
    assert device.rate > 1e8 and device.memory_bandwidth > 1e7 and platform.hosts[0].memory > 2**28


def test_unknown_platform_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["platform", "rpi5y2", "-o", str(tmp_path / "cluster.toml")]) == 2
    assert "did you mean 'rpi5x2'" in capsys.readouterr().err and not list(tmp_path.iterdir())
