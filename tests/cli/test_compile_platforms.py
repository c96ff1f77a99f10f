"""`dicompiler compile` rejects invalid platform files, with file, key and cause in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.refusing import PLATFORM, Refused

from dicompiler.cli import main

PLATFORMS = {
    "no bandwidth": ('bandwidth = "100 Mbit/s"', "", "network: missing key 'bandwidth' (required: kind, bandwidth)"),
    "unknown key": ("bandwidth", "bandwith", "network: unknown key 'bandwith' (did you mean 'bandwidth'?)"),
    "unknown table": ("[network]", "[networks]", "unknown key 'networks' (did you mean 'network'?)"),
    "negative rate": ('"1 GFLOP/s"', '"-1 GFLOP/s"', "device[0].rate: '-1 GFLOP/s': a compute rate must be zero or"),
    "negative bandwidth": ('"100 Mbit/s"', '"-1 Mbit/s"', "network.bandwidth: '-1 Mbit/s': a bandwidth must be more"),
    "no unit": ('"1 GFLOP/s"', '"1"', "device[0].rate: '1' has no unit (allowed units: FLOP/s,"),
    "a number": ('"1 GFLOP/s"', "1e9", "device[0].rate: expected a text such as "),
    "another unit": ('"100 Mbit/s"', '"100 GB"', "network.bandwidth: unknown unit 'GB' for a bandwidth"),
    "NaN": ('"1 GFLOP/s"', '"nan GFLOP/s"', "device[0].rate: 'nan GFLOP/s' is not a number with a unit"),
    "infinite": ('"1 GFLOP/s"', '"inf GFLOP/s"', "device[0].rate: 'inf GFLOP/s' is not a number with a unit"),
    "too large": ('"1 GiB"', '"1e400 GiB"', "host[0].memory: '1e400 GiB' is too large for a memory size"),
    "no memory": ('"1 GiB"', '"0 GiB"', "host[0].memory: '0 GiB': a memory size must be more than zero"),
    "key twice": ('name = "lab"', 'name = "lab"\nname = "x"', "a key appears twice, or [x] is written for [[x]]"),
    "one bracket": ("[[host]]", "[host]", "host: expected a list, got an object"),
    "no device": ('[[device]]\nname = "a"\nrate = "1 GFLOP/s"', "", "missing key 'device' (required: host, device,"),
    "no part computes": ('"1 GFLOP/s"', '"0 FLOP/s"', "no device can compute: give at least one device a rate above 0"),
    "half a core": ('rate = "1 GFLOP/s"', 'rate = "1 GFLOP/s"\ncores = 1.5', "cores: expected a whole number, got 1.5"),
    "cores as 2.0": (
        'rate = "1 GFLOP/s"',
        'rate = "1 GFLOP/s"\ncores = 2.0',
        "cores: expected a whole number, got 2.0",
    ),
    "slash": ('[[device]]\nname = "a"', '[[device]]\nname = "../a"', 'device[0].name: "../a" has a character that is'),
    "other host": ('[[device]]\nname = "a"', '[[device]]\nname = "b"', "device[0].host: unknown host 'b' (known: a)"),
}


class TestPlatforms:
    """Invalid platform files."""

    @pytest.mark.parametrize("case", PLATFORMS)
    def test_rejects_mistake_in_a_platform(self, model: Path, tmp_path: Path, refused: Refused, case: str) -> None:
        old, new, message = PLATFORMS[case]
        assert PLATFORM.count(old) == 1 or case == "other host"
        path = tmp_path / "lab.toml"
        path.write_text(PLATFORM.replace(old, new))
        line = refused(1, "compile", model, "--platform", path, "-o", tmp_path / "out")
        assert line.startswith(f"{path}: ") and message in line

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "missing key 'host'"),
            (PLATFORM.encode("utf-16"), "cannot be read: not UTF-8 text: byte 0 is not valid"),
            (b"\0\1", "not TOML"),
            (b"PK\x03\x04", "not TOML"),
            (None, "cannot be read: Is a directory"),
        ],
    )
    def test_rejects_a_file_that_is_not_a_platform(
        self, model: Path, tmp_path: Path, refused: Refused, content: bytes | None, message: str
    ) -> None:
        path = tmp_path / "lab.toml"
        path.mkdir() if content is None else path.write_bytes(content)
        line = refused(1, "compile", model, "--platform", path, "-o", tmp_path / "out")
        assert line.startswith(f"{path}: {message}")

    def test_byte_order_mark_is_accepted(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "lab.toml").write_text(PLATFORM, encoding="utf-8-sig")
        command = ["compile", str(model), "--platform", str(tmp_path / "lab.toml"), "-o", str(tmp_path / "out")]
        assert main(command) == 0

    def test_rejects_missing_and_unknown_platform(self, model: Path, tmp_path: Path, refused: Refused) -> None:
        line = refused(1, "compile", model, "--platform", tmp_path / "no.toml", "-o", tmp_path / "out")
        assert line.startswith(f"{tmp_path / 'no.toml'}: no such platform file")
        line = refused(2, "compile", model, "--platform", "rpi4x0", "-o", tmp_path / "out")
        assert line.startswith("unknown platform 'rpi4x0' (did you mean 'rpi4x4'?): give a file that ends in .toml or ")
        line = refused(2, "compile", model, "-o", tmp_path / "out")
        assert line == "compile: no platform: give a TOML file or a built-in one such as rpi4x4 (--platform)"
