"""Check an installed dicompiler as a user would run it.

tests/run starts this script in a fresh environment, outside of the checkout. It prints a line per passed check, and
ends with a traceback if a check fails.
"""

from __future__ import annotations

import json
import shutil
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
    """Run a `dicompiler` command, which must succeed, and return its standard output."""
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{arguments}: exit code {done.returncode}: {done.stderr}"
    return done.stdout


def listed(kind: str) -> dict[str, Any]:
    """Return the records that `dicompiler list KIND --json` prints, by name."""
    return {record["name"]: record for record in json.loads(run("list", kind, "--json"))}


def check_files() -> None:
    """Check that dicompiler is imported from the wheel, and that the wheel includes the files that are not modules."""
    installed = Path(dicompiler.__file__).parent
    assert installed.is_relative_to(sys.prefix), installed
    files = {str(file) for file in metadata.files("dicompiler") or ()}
    for package in ("dicompiler", "dicompiler_passes", "dicompiler_targets", "dicompiler_strategies"):
        assert f"{package}/py.typed" in files, package
    for name in ("plan", "platform", "artifact", "manifest"):
        assert f"dicompiler/base/schemas/{name}.schema.json" in files, name
    for name in ("dicompilerConfig.cmake", "dicompilerConfigVersion.cmake"):
        assert Path(run("--cmakedir").strip(), name).is_file() and f"dicompiler/cli/cmake/{name}" in files, name


def check_cmake() -> None:
    """Check that the CMake package finds the program of its own environment, which is not on PATH."""
    script = Path("find.cmake")
    script.write_text(
        f"include({run('--cmakedir').strip()}/dicompilerConfig.cmake)\nmessage(NOTICE ${{dicompiler_COMMAND}})\n"
    )
    cmake = shutil.which("cmake")
    assert cmake is not None
    done = subprocess.run([cmake, "-P", script], capture_output=True, text=True, check=True, env={"PATH": ""})
    assert Path(done.stderr.strip()).resolve() == PROGRAM.resolve(), done.stderr


def check_plugins() -> None:
    """Check that the built-in plugins and those of the package acme-dicompiler are found by their entry points."""
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
    """Compile, run, verify and report a network, once with built-in plugins and once with those of acme-dicompiler."""
    onnx.save(networks.build("tiny"), "tiny.onnx")
    theirs = ("--platform", "acme-boardx4", "--cost", "acme-per-call", "--target", "acme-inline")
    for strategy, others in (("modnn", ("--platform", "rpi4x4")), ("acme-round-robin", theirs)):
        given = ("--strategy", strategy, *others, "--objective", "throughput")
        directory = f"out-{strategy}"
        compiled = json.loads(run("compile", "tiny.onnx", *given, "-o", directory, "--json"))
        assert len(compiled["devices"]) == 4
        assert len(json.loads(run("run", directory, "--frames", "2", "--json"))["frames_s"]) == 2
        assert all(check["passed"] for check in json.loads(run("verify", directory, "--json")))
        run("report", directory, "-o", f"{directory}.html")
        assert Path(f"{directory}.html").read_text().count('class="node layer"') == 12


for check in (check_files, check_cmake, check_plugins, check_way):
    check()
    print(f"smoke: {check.__name__} ok")
