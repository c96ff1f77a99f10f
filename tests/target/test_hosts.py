"""hosts.toml: settings of each device, and one line with file, key and remedy for each mistake."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from dicompiler.base.errors import DicompilerError
from dicompiler.target.remote.hosts import DeviceLocation, Hosts, parse_hosts

TEXT = """
[defaults]
python = "venv/bin/python"
directory = "/srv/nets/"

[[host]]
name = "pi"
ssh = "pi@192.168.1.11"
port = 2222
address = "10.0.0.11"

[[host]]
name = "nx"
ssh = "nx"
directory = "nets"
threads = 4

[[host]]
name = "nx_gpu"
python = "python3.12"
cores = [0, 1]
address = "fd00::2"
"""


def test_entry_of_a_device_overrides_its_host_and_the_defaults() -> None:
    hosts = parse_hosts(TEXT)
    assert hosts.locate_device("pi", "pi", "net") == DeviceLocation(
        "pi", "pi@192.168.1.11", "/srv/nets/pi", "venv/bin/python", port=2222, listen_address="10.0.0.11:0"
    )
    assert hosts.locate_device("nx_cpu", "nx", "net") == DeviceLocation(
        "nx_cpu", "nx", "nets/nx_cpu", "venv/bin/python", threads=4
    )
    assert hosts.locate_device("nx_gpu", "nx", "net") == DeviceLocation(
        "nx_gpu", "nx", "nets/nx_gpu", "python3.12", listen_address="[fd00::2]:0", threads=4, cores=(0, 1)
    )


@pytest.mark.parametrize(
    ("text", "parsed", "resolved"),
    [
        ("localhost:7000", "localhost:7000", ("127.0.0.1", 7000)),
        ("no.such.board.invalid", "no.such.board.invalid:0", ("no.such.board.invalid", 0)),
        ("fe80::1%eth0", "[fe80::1%eth0]:0", ("fe80::1%eth0", 0)),
    ],
)
def test_address_may_be_a_name_or_have_a_zone(text: str, parsed: str, resolved: tuple[str, int]) -> None:
    location = parse_hosts(HOST + f"address = '{text}'\n").locate_device("pi", "pi", "net")
    assert location.listen_address == parsed
    host, port = location.resolve_address() or ("", 0)
    assert ("127.0.0.1" if host == "::1" else host, port) == resolved


def test_little_must_be_said(tmp_path: Path) -> None:
    for name in ("key", "known"):
        (tmp_path / name).touch()
    (tmp_path / "hosts.toml").write_text(
        '[[host]]\nname = "pi"\nssh = "pi"\nidentity = "key"\nknown_hosts = "known"\naddress = "[::1]:7000"\n'
    )
    assert Hosts.load(tmp_path / "hosts.toml").locate_device("pi", "pi", "net") == DeviceLocation(
        "pi", "pi", ".cache/dicompiler/net/pi", "python3", identity=tmp_path / "key", listen_address="[::1]:7000",
        known_hosts=tmp_path / "known",
    )  # fmt: skip


def test_no_two_devices_share_a_directory() -> None:
    hosts = parse_hosts('defaults = {directory = "~/nets"}\nhost = [{name = "board", ssh = "board"}]')
    assert [hosts.locate_device(name, "board", "net").directory for name in ("a", "b")] == ["~/nets/a", "~/nets/b"]


def test_device_that_cannot_be_reached_is_named_with_the_hosts_that_are_known() -> None:
    hosts = parse_hosts('[[host]]\nname = "pi01"\nport = 22\n[[host]]\nname = "nx"\nssh = "nx"\n')
    for device, host, expected in (
        ("pi1", "pi1", r"hosts.toml: device 'pi1' cannot be reached: there is no host 'pi1' \(did you mean 'pi01'\?\)"),
        ("gpu", "jetson", r"device 'gpu' .* no host 'jetson' \(known: nx, pi01\): add \[\[host\]\] with this name and"),
        ("pi01", "pi01", r"device 'pi01' cannot be reached: its entry 'pi01' has no key ssh"),
    ):
        with pytest.raises(DicompilerError, match=expected):
            hosts.locate_device(device, host, "net")


HOST = '[[host]]\nname = "pi"\nssh = "pi"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[host]\n", "hosts.toml: not TOML: "),
        ("[defaults]\n", "hosts.toml: missing key 'host' (required: host)"),
        (
            HOST + "pyton = 'x'\n",
            "hosts.toml: host[0]: unknown key 'pyton' (did you mean 'python'?); allowed: name",
        ),
        ('defaults = {ssh = "x"}\n' + HOST, "hosts.toml: defaults: unknown key 'ssh'; allowed: port, identity"),
        (HOST + HOST, "hosts.toml: host[1].name: 'pi' is used twice: remove one"),
        (HOST + "port = 70000\n", "hosts.toml: host[0].port: 70000 is too large (allowed: 65535 or less)"),
        (HOST + "port = '22'\n", 'hosts.toml: host[0].port: expected a whole number, got "22"'),
        (HOST + "cores = []\n", "hosts.toml: host[0].cores: a list of 0 entries is too short"),
        (HOST + "threads = 0\n", "hosts.toml: host[0].threads: 0 is too small (allowed: 1 or more)"),
        (HOST.replace('"pi"\n', '"-oProxyCommand=x"\n'), "hosts.toml: host[0].name: "),
        ("[[host]]\nname = 'pi'\nssh = '-oProxyCommand=x'\n", 'hosts.toml: host[0].ssh: "-oProxyCommand=x" has a'),
        (
            HOST + "address = 'pi.local:x'\n",
            "hosts.toml: host[0].address: 'pi.local:x' is not an address: expected",
        ),
        (HOST + "address = '0.0.0.0'\n", "hosts.toml: host[0].address: '0.0.0.0' is not an address of a single host"),
        (HOST + "address = '10.0.0.2:x'\n", "hosts.toml: host[0].address: '10.0.0.2:x' is not an address"),
        (
            HOST + "identity = '/nowhere/key'\n",
            "hosts.toml: host[0].identity: '/nowhere/key' is not a file: name the file of",
        ),
        (
            HOST + "known_hosts = '/no'\n",
            "hosts.toml: host[0].known_hosts: '/no' is not a file: name the file of the keys",
        ),
        ("format = 'dicompiler.hosts/2'\n" + HOST, "hosts.toml: format dicompiler.hosts/2 is not supported"),
    ],
)
def test_mistake_is_one_line_with_file_and_key(text: str, expected: str) -> None:
    with pytest.raises(DicompilerError) as caught:
        parse_hosts(text)
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DicompilerError, match=r"none\.toml: no such file: write one"):
        Hosts.load(tmp_path / "none.toml")
    with pytest.raises(DicompilerError, match=r"cannot be read: Is a directory"):
        Hosts.load(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(DicompilerError, match=r"bytes\.toml: cannot be read: not UTF-8 text"):
        Hosts.load(tmp_path / "bytes.toml")


def test_versions_that_boards_need_are_those_of_this_project() -> None:
    from dicompiler_targets.engines.mnn import MnnEngine
    from dicompiler_targets.engines.ncnn import NcnnEngine
    from dicompiler_targets.engines.onnxruntime import OnnxruntimeEngine
    from dicompiler_targets.sockets.artifact import RUNTIME_PACKAGES
    from dicompiler_targets.sockets.deploy import MIN_PYTHON

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stated = {"Python": project["requires-python"].removeprefix(">=")}
    extras = project["optional-dependencies"]
    entries = (*project["dependencies"], *extras["ncnn"], *extras["mnn"])
    stated |= dict(entry.split(">=") for entry in entries)
    classes = (MnnEngine, NcnnEngine, OnnxruntimeEngine)
    engines = {package.name: package.min_version for engine in classes for package in engine.packages}
    needed = {"Python": MIN_PYTHON, **RUNTIME_PACKAGES}
    assert engines["onnxruntime"] == needed["onnxruntime"]
    needed |= engines
    assert {name: ".".join(map(str, version)) for name, version in needed.items()} == {n: stated[n] for n in needed}
