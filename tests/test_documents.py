"""README.md and docs/ say what is so: their commands run, their examples load, their tables are those of the code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import architecture, console, formats, notebook, operators, package_page
from support.building import environment
from support.console import blocks

from dicompiler import networks
from dicompiler.base.schema import validate
from dicompiler.driver.compiler import compile
from dicompiler.ir.plan import load_plan, plan_from_json
from dicompiler.ir.platform import platform_from_toml
from dicompiler.target.remote.hosts import parse_hosts as hosts_from_toml

BUILDING = console.DOCUMENT.parent / "docs" / "build-systems.md"
README = console.DOCUMENT.read_text(encoding="utf-8")
GUIDE = console.GUIDE.read_text(encoding="utf-8")
TUTORIAL = console.TUTORIAL.read_text(encoding="utf-8")
FORMATS = formats.DOCUMENT.read_text(encoding="utf-8")
COMMANDS = console.shown(README)
LEFT = ("deploy", "keys")
"""What the tutorial runs in the same words, on boards."""
# What these print is measured in part.
MEASURED = ("compare", "demo", "run", "verify")


def masked(text: str) -> str:
    """The text with all numbers alike, whatever their width."""
    return re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "#", text))


def check(command: console.Shown, directory: Path) -> None:
    """Runs it and compares what it prints with what is shown: to the last digit where that is not measured."""
    printed = console.run(command.line, directory)
    printed = re.sub(r"^Doubtful: this host was busy.*\n", "", printed, flags=re.MULTILINE)
    if command.output and command.line.split()[1] in MEASURED:
        assert masked(printed) == masked(command.output)
    elif command.output:
        assert printed == command.output


def test_the_demo_prints_what_the_readme_shows(tmp_path: Path) -> None:
    assert COMMANDS[0].line == "dicompiler demo"
    check(COMMANDS[0], tmp_path)


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which all other commands of the README and those of the guide ran, one after another."""
    directory = tmp_path_factory.mktemp("walked")
    for command in (*COMMANDS[1:], *console.shown(GUIDE)):
        if command.line.split()[1] not in LEFT:
            check(command, directory)
    return directory


def test_what_the_readme_deploys_the_tutorial_deploys() -> None:
    told = {command.line.replace("camera", "build") for command in console.shown(TUTORIAL)}
    assert {command.line for command in COMMANDS if command.line.split()[1] in LEFT} <= told


def test_the_commands_of_the_readme_and_the_guide_print_what_they_show(walked: Path) -> None:
    assert (walked / "by-hand" / "artifact.json").is_file()


def test_the_plan_in_the_guide_is_the_one_that_its_commands_make(walked: Path) -> None:
    (block,) = blocks(GUIDE, "json")
    shown, made = plan_from_json(json.loads(block)), load_plan(walked / "by-hand.json")
    assert (shown.source, shown.sink) == (made.source, made.sink)
    assert shown.layers.items() <= made.layers.items()
    assert len(made.layers) == 8


def test_the_python_of_the_guide_runs(walked: Path) -> None:
    code, _ = blocks(GUIDE, "python")
    _, counts, shape, *streamed = console.run_python(code, walked).splitlines()
    assert len(set(counts.split())) == 1
    assert shape == "(1, 10)"
    assert len(streamed) == 10
    assert len(set(streamed)) == 1  # the same image each time


def test_the_plugin_of_the_guide_works(walked: Path) -> None:
    _, plugin = blocks(GUIDE, "python")
    found = re.search(r'`(\w+) = "(\w+)"` under `\[project\.entry-points\.dicompiler\]`', GUIDE)
    assert found is not None
    name, module = found.groups()
    site = walked / "site"
    info = site / "mine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dicompiler]\n{name} = {module}\n")
    (site / f"{module}.py").write_text(plugin)
    command = "compile lenet.onnx --platform rpi4x4 --strategy round-robin{first=1} -o dealt --json"
    done = subprocess.run(
        [sys.executable, "-m", "dicompiler.cli", *command.split()],
        cwd=walked,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert [device["device"] for device in json.loads(done.stdout)["devices"]] == ["pi01", "pi02", "pi03", "pi04"]


def test_the_guide_says_how_much_slower_mobilenet_is_predicted_to_be() -> None:
    result = compile(networks.build("mobilenet_v2"), platform="rpi4x4", strategy="modnn")
    assert result.metrics is not None and result.single_device_metrics is not None
    split, alone = 1000 * result.metrics.latency_s, 1000 * result.single_device_metrics.latency_s
    assert f"it predicts {split:.0f} ms with `modnn`, and {alone:.0f} ms" in GUIDE
    assert f"predicted {alone / split:.2f} times as fast: `auto` takes one board" in README
    auto = compile(networks.build("mobilenet_v2"), platform="rpi4x4", strategy="auto{tries=2}")
    assert auto.metrics is not None and len(auto.metrics.devices) == 1


def test_the_commands_and_files_of_the_build_systems_work(tmp_path: Path) -> None:
    document = BUILDING.read_text(encoding="utf-8")
    for name, language in (("build.ninja", "ninja"), ("Makefile", "make")):
        (text,) = blocks(document, language)
        (tmp_path / name).write_text(text)
    (text,) = blocks(document, "cmake")
    (tmp_path / "CMakeLists.txt").write_text(text)
    for command in console.shown(document):
        done = subprocess.run(
            ["bash", "-c", command.line], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command.line}: {done.stderr}"
        assert command.output in ("", done.stdout), command.line


def test_the_stream_of_the_how_to_runs(walked: Path) -> None:
    stream, _ = blocks(console.GUIDE.parent.joinpath("how-to", "stream.md").read_text(), "python")
    assert len(console.run_python(stream, walked).splitlines()) == 20


def test_the_commands_of_the_camera_run(tmp_path: Path) -> None:
    example = console.DOCUMENT.parent / "examples" / "camera"
    shutil.copy(example / "camera.py", tmp_path)
    for command in console.shown((example / "README.md").read_text()):
        done = subprocess.run(
            ["bash", "-c", command.line], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command.line}: {done.stderr}"
    assert [line.split()[0] for line in done.stdout.splitlines()] == [str(number) for number in range(10)]


def test_the_cells_of_the_notebook_print_what_it_shows(tmp_path: Path) -> None:
    text = notebook.NOTEBOOK.read_text(encoding="utf-8")
    assert notebook.ran(text, tmp_path) == text, "run `python tests/support/notebook.py`"


def test_what_is_made_is_made_anew() -> None:
    assert architecture.PICTURE.read_text() == architecture.drawn(), "run `python tests/support/architecture.py`"
    page = package_page.PAGE.read_text()
    assert page == package_page.written(), "run `python tests/support/package_page.py`"
    assert not re.search(r"\]\((?!https?:)|<img", page)
    for document in operators.DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        assert operators.written(text) == text, "run `python tests/support/operators.py`"
        assert operators.TABLE.search(text)


def test_the_tables_of_the_formats_are_those_of_the_schemas() -> None:
    assert formats.written(FORMATS) == FORMATS, "run `python tests/support/formats.py`"
    assert len(formats.TABLE.findall(FORMATS)) == 11


def test_the_examples_of_the_formats_load(tmp_path: Path) -> None:
    plan, mapping, artifact, manifest, _, _, log, profile = map(json.loads, blocks(FORMATS, "json"))
    cluster, hosts = blocks(FORMATS, "toml")
    platform = platform_from_toml(cluster)
    places = [hosts_from_toml(hosts).locate_device(device.name, device.host, "net") for device in platform.devices]
    assert [place.ssh_destination for place in places] == ["pi@192.168.1.10", "pi@192.168.1.11", "jetson", "jetson"]
    assert [device.can_compute for device in platform.devices] == [False, True, True, True]
    validate(artifact, "artifact", "docs/formats.md")
    validate(manifest, "manifest", "docs/formats.md")
    validate(log, "run", "docs/formats.md")
    validate(profile, "profile", "docs/formats.md")
    result = compile(networks.build("lenet"), platform="rpi4x2", plan=plan_from_json(plan))
    assert result.metrics is not None and result.metrics.total_bytes > 0
    (tmp_path / "mapping.json").write_text(json.dumps(mapping))
    manual = f"manual{{mapping={tmp_path / 'mapping.json'}}}"
    mapped = compile(networks.build("lenet"), platform="rpi4x2", strategy=manual).plan
    assert mapped is not None and [parts[0].device for parts in mapped.layers.values()] == ["pi01"] * 5 + ["pi02"] * 3


def test_the_examples_of_microcontrollers_have_the_keys_that_are_written(tmp_path: Path) -> None:
    _, _, _, _, manifest, memory, *_ = map(json.loads, blocks(FORMATS, "json"))
    compile(networks.build("lenet"), "nano33x2", "modnn", target="tflm", output=tmp_path / "out")
    for example, name in ((manifest, "nano01/manifest.json"), (memory, "memory.json")):
        written = json.loads((tmp_path / "out" / name).read_text())
        assert example.keys() <= written.keys() and example["format"] == written["format"]
        for key in ("segments", "tensors", "devices"):
            for entry in example.get(key, ()) if isinstance(written.get(key), list) else ():
                assert entry.keys() <= written[key][0].keys()
