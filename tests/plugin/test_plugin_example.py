"""The example distribution of a third party, tests/plugin_example: installed by pip, found, used, and removed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from dicompiler import networks
from dicompiler.plugin.plugin_kinds import PLUGIN_KINDS
from dicompiler.testing.targets import file_digests

EXAMPLE = Path(__file__).parents[1] / "plugin_example"
PROVIDED = {
    "passes": "acme-drop-dropout",
    "strategies": "acme-round-robin",
    "targets": "acme-inline",
    "engines": "acme_numpy",
    "operators": "com.microsoft::QuickGelu",
    "cost-models": "acme-per-call",
    "platforms": "acme-boardxN",
}
ORIGIN = {"distribution": "acme-dicompiler", "version": "1.2", "plugin": "acme"}


@dataclass(frozen=True)
class Environment:
    """A separate virtual environment that finds this checkout and its dependencies."""

    root: Path

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def files(self) -> set[str]:
        """All installed files, except for Python's compiled code."""
        return {str(p.relative_to(self.root)) for p in self.root.rglob("*") if "__pycache__" not in p.parts}

    def call(self, *words: str | Path, cwd: Path | None = None) -> str:
        """Run a command that must succeed, and return its output."""
        done = subprocess.run(list(map(str, words)), cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def dicompiler(self, *words: str | Path, cwd: Path | None = None) -> str:
        return self.call(self.python, "-P", "-m", "dicompiler", *words, cwd=cwd)

    def pip(self, *words: str | Path) -> None:
        self.call(sys.executable, "-m", "pip", "--python", self.python, "-q", "--disable-pip-version-check", *words)

    def install(self) -> None:
        self.pip("install", "--no-deps", "--no-build-isolation", "--no-index", EXAMPLE)

    def listed(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the output of `list KIND --json` by kind and name; one process prints all, to save time."""
        code = "import sys; from dicompiler.cli import main; [main(['list', kind, '--json']) for kind in sys.argv[1:]]"
        kinds = [*PROVIDED, "plugins"]
        documents = json.loads("[" + self.call(self.python, "-c", code, *kinds).replace("]\n[", "],\n[") + "]")
        return {
            kind: {record["name"]: record for record in records} for kind, records in zip(kinds, documents, strict=True)
        }


def environment(root: Path) -> Environment:
    venv.create(root, with_pip=False, symlinks=True)
    (site,) = (root / "lib").glob("python*/site-packages")
    (site / "checkout.pth").write_text("\n".join(sys.path) + "\n")
    return Environment(root)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    made = environment(tmp_path_factory.mktemp("installed") / "venv")
    made.install()
    return made


TEXT = """<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
    g (float[1, 3, 16, 16] x) => (float[1, 8, 16, 16] y) <float[1, 8, 16, 16] r> {
      h = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w)
      r = com.microsoft.QuickGelu <alpha = 1.5> (h)
      d = Dropout (r)
      y = MaxPool <kernel_shape = [1, 1]> (d)
    }"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    proto = onnx.parser.parse_model(TEXT)
    weights = np.random.default_rng(3).standard_normal((8, 3, 3, 3)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    onnx.save(proto, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


class TestInstalled:
    def test_all_it_provides_is_listed_with_options_distribution_and_version(self, installed: Environment) -> None:
        assert {kind.replace("-", "_") for kind in PROVIDED} == {*PLUGIN_KINDS}
        listed = installed.listed()
        found = {kind: listed[kind][name] for kind, name in PROVIDED.items()}
        assert all(record.items() >= ORIGIN.items() for record in found.values())
        assert found["strategies"] == {
            "name": "acme-round-robin",
            "summary": "Whole layers, given to the computing devices in turn.",
            "options": [{"name": "order", "type": "forward|backward", "default": "forward", "help": ""}],
            **ORIGIN,
        }
        helps = [option["help"] for option in found["cost-models"]["options"]]
        assert "fixed time that is added for each part" in helps
        assert found["operators"]["summary"] == "element-wise"
        provides = listed["plugins"]["acme"]["provides"]
        counts = dict.fromkeys(PROVIDED, 1) | {"passes": 2, "strategies": 2}
        assert provides == ", ".join(f"{kind}: {count}" for kind, count in counts.items())

    def test_people_see_it_in_a_table(self, installed: Environment) -> None:
        lines = installed.dicompiler("list", "strategies").splitlines()
        line = next(line for line in lines if line.startswith("acme-round-robin"))
        assert re.fullmatch(r"acme-round-robin  +Whole layers, given .*  acme-dicompiler 1\.2", line)
        options = installed.dicompiler("list", "strategies", "acme-round-robin")
        assert re.search(r"^order +\S+ +forward", options, re.MULTILINE)

    def test_its_pass_runs_and_its_rule_cuts_a_foreign_operator(self, model: Path, installed: Environment) -> None:
        out = model.with_name("out.onnx")
        pipeline = "acme-drop-dropout,infer-shapes,form-layers,tile-height{layers=h parts=2}"
        installed.dicompiler("opt", model, "-p", pipeline, "-o", out)
        operators = [node.op_type for node in onnx.load(out).graph.node]
        assert "Dropout" not in operators
        assert operators.count("QuickGelu") == 2
        x = np.random.default_rng(4).standard_normal((1, 3, 16, 16)).astype(np.float32)
        before, after = (onnxruntime.InferenceSession(str(path)).run(None, {"x": x})[0] for path in (model, out))
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-5 * np.abs(before).max())

    @pytest.mark.slow
    def test_all_together_compile_run_and_verify_a_network(self, tmp_path: Path, installed: Environment) -> None:
        onnx.save(networks.build("lenet"), tmp_path / "lenet.onnx")
        words = "compile lenet.onnx --platform acme-boardx3 --strategy acme-round-robin{order=backward}"
        more = "--cost acme-per-call{microseconds=20} --target acme-inline -o out --json"
        compiled = json.loads(installed.dicompiler(*words.split(), *more.split(), cwd=tmp_path))
        assert [device["device"] for device in compiled["devices"]] == ["board01", "board02", "board03"]
        plan = json.loads((tmp_path / "out" / "plan.json").read_text())
        assert [parts[0]["device"] for parts in plan["layers"].values()][:3] == ["board03", "board02", "board01"]
        checks = json.loads(installed.dicompiler("verify", "out", "--json", cwd=tmp_path))
        assert [check["name"] for check in checks] == ["exact", "output on board01", "bytes"]
        assert all(check["passed"] for check in checks)
        ran = json.loads(installed.dicompiler("run", "out", "--frames", "2", "--json", cwd=tmp_path))
        assert len(ran["frames_s"]) == 2
        slow = installed.dicompiler(*words.split(), *more.replace("=20", "=50000").split(), cwd=tmp_path)
        latency = re.findall(r'"latency_s": ([0-9.e-]+)', slow)
        assert float(latency[0]) >= 8 * 0.05  # Eight layers run one after another, each for at least 0.05 s.

    def test_connect_works_with_its_target(self, tmp_path: Path, installed: Environment) -> None:
        onnx.save(networks.build("lenet"), tmp_path / "lenet.onnx")
        words = "compile lenet.onnx --platform rpi4x2 --strategy modnn --target acme-inline -o out"
        installed.dicompiler(*words.split(), cwd=tmp_path)
        code = """import dicompiler, numpy
with dicompiler.connect("out") as session:
    frames = [{"input": numpy.full((1, 1, 32, 32), i, numpy.float32)} for i in range(3)]
    print(*(int(outputs["output"].argmax()) for outputs in session.stream(frames)))
print(*(report.device for report in session.reports))"""
        classes, devices = installed.call(installed.python, "-c", code, cwd=tmp_path).splitlines()
        session = onnxruntime.InferenceSession(tmp_path / "lenet.onnx")
        frames = [np.full((1, 1, 32, 32), i, np.float32) for i in range(3)]
        assert classes.split() == [str(session.run(None, {"input": x})[0].argmax()) for x in frames]
        assert devices == "pi01 pi02"


@pytest.mark.slow
def test_uninstalling_leaves_no_trace(tmp_path: Path) -> None:
    made = environment(tmp_path / "venv")
    onnx.save(networks.build("lenet"), tmp_path / "lenet.onnx")

    def seen(output: str) -> tuple[Any, ...]:
        """Return the listed items, and an artifact that is compiled without the plugin's items."""
        words = f"compile lenet.onnx --platform rpi4x2 --strategy modnn -o {output}".split()
        made.dicompiler(*words, cwd=tmp_path)
        return made.listed(), file_digests(tmp_path / output)

    files, (lists, artifact) = made.files, seen("before")
    made.install()
    with_it, same = seen("between")
    assert same == artifact
    assert all(name in with_it[kind] and name not in lists[kind] for kind, name in PROVIDED.items())
    made.pip("uninstall", "-y", "acme-dicompiler")
    assert made.files == files
    assert seen("after") == (lists, artifact)


def test_example_needs_only_the_package() -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["dicompiler"]
    imported = {
        match
        for path in EXAMPLE.rglob("*.py")
        for match in re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
    }
    assert {name for name in imported if "dicompiler" in name} == {"dicompiler", "acme_dicompiler"}
