"""Uses an installed dicompiler as a user does; tests/run starts it with a fresh environment, outside of the checkout.

Nothing goes in; it ends with exit code 0 if everything that was installed works, else with a traceback.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import onnx

import dicompiler
from dicompiler import networks

PROGRAM = Path(sys.executable).with_name("dicompiler")


def run(*arguments: str) -> str:
    """The standard output of a `dicompiler` command, which must succeed."""
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{arguments}: exit code {done.returncode}: {done.stderr}"
    return done.stdout


def listed(kind: str) -> dict[str, Any]:
    """What `dicompiler list` knows of a kind: name → the whole record."""
    return {record["name"]: record for record in json.loads(run("list", kind, "--json"))}


def check_files() -> None:
    """The files that are no modules are in the wheel, and it is the wheel that is used."""
    installed = Path(dicompiler.__file__).parent
    assert installed.is_relative_to(sys.prefix), installed
    files = {str(file) for file in metadata.files("dicompiler") or ()}
    for package in ("dicompiler", "dicompiler_passes", "dicompiler_targets", "dicompiler_strategies"):
        assert f"{package}/py.typed" in files, package
    for name in ("plan", "platform", "artifact", "manifest"):
        assert f"dicompiler/base/schemas/{name}.schema.json" in files, name
    for name in ("dicompilerConfig.cmake", "dicompilerConfigVersion.cmake"):
        assert Path(run("--cmakedir").strip(), name).is_file() and f"dicompiler/cli/cmake/{name}" in files, name


def check_plugins() -> None:
    """The built-in plugins and a third party's come in by their entry points."""
    version = metadata.version("dicompiler")
    assert run("--version") == f"dicompiler {version}\n"
    strategies = listed("strategies")
    assert (strategies["modnn"]["distribution"], strategies["modnn"]["version"]) == ("dicompiler", version)
    assert strategies["acme-round-robin"]["distribution"] == "acme-dicompiler"
    assert {"partition", "tile-height", "acme-drop-dropout"} <= set(listed("passes"))
    assert {"sockets", "acme-inline"} <= set(listed("targets"))
    assert "acme-per-call" in listed("cost-models")
    assert "acme-boardxN" in listed("platforms")
    assert {"Conv", "com.microsoft::QuickGelu"} <= set(listed("operators"))


def check_way() -> None:
    """A network is compiled, run and verified, by what is built in and by what the plugin provides."""
    onnx.save(networks.build("tiny"), "tiny.onnx")
    theirs = ("--platform", "acme-boardx4", "--cost", "acme-per-call", "--target", "acme-inline")
    for strategy, others in (("pipeline", ("--platform", "rpi4x4")), ("acme-round-robin", theirs)):
        given = ("--strategy", strategy, *others, "--objective", "throughput")
        directory = f"out-{strategy}"
        compiled = json.loads(run("compile", "tiny.onnx", *given, "-o", directory, "--json"))
        assert len(compiled["devices"]) == 4
        assert len(json.loads(run("run", directory, "--frames", "2", "--json"))["frames_s"]) == 2
        assert all(check["passed"] for check in json.loads(run("verify", directory, "--json")))
        run("report", directory, "-o", f"{directory}.html")
        assert Path(f"{directory}.html").read_text().count('class="node layer"') == 12


for check in (check_files, check_plugins, check_way):
    check()
    print(f"smoke: {check.__name__} ok")
