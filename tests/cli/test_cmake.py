"""The CMake package, used by real CMake with Ninja and with Makefiles; and the example that builds an MPI program."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support import console, crossing, mpi_runs
from support.building import environment, later
from support.commands import forked_command_line
from support.distributions import distribution

from dicompiler import networks
from dicompiler.base.atomic_output import tracked_files
from dicompiler.driver.compiler import compile
from dicompiler.ir import plan as plans
from dicompiler.ir.onnx.model import Model
from dicompiler.verify.executor import run_model
from dicompiler_targets.mpi import toolchain

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dicompiler" / "cli" / "cmake"
EXAMPLE = ROOT / "examples" / "cmake_mpi"
COMMANDS = [command.line for command in console.shown((EXAMPLE / "README.md").read_text())]
OLDER = shutil.which("cmake", path=os.defpath) or "cmake"
"""The system's; that of the test environment, which is another one, makes what is not for Ninja."""
CMAKES = sorted({os.path.realpath(OLDER), os.path.realpath(shutil.which("cmake") or "cmake")})
BUILDING = {"CMAKE_BUILD_TYPE": "Debug", "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
GENERATORS = ("Ninja", "Unix Makefiles")
COMPILING = "Compiling net: "
MAKE = """
import pathlib, onnx
from dicompiler.networks import build
pathlib.Path("net.data").unlink(missing_ok=True)
onnx.save(build("lenet", seed=0), "net.onnx", save_as_external_data=True, location="net.data")
"""
USE = """
add_custom_command(OUTPUT {name} COMMAND ${{CMAKE_COMMAND}} -E copy out/dir/artifact.json {name}
  DEPENDS out/dir/artifact.json)
add_custom_target(use_{name} ALL DEPENDS {name})
"""
HEAD = "cmake_minimum_required(VERSION 3.21)\nproject(p NONE)\nfind_package(dicompiler CONFIG REQUIRED)\n"


def call(*line: object, code: int = 0, **more: str) -> str:
    """Run a program, check its exit code, and return all that it prints."""
    done = subprocess.run(
        [str(word) for word in line],
        env=environment(**mpi_runs.environment()) | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def define_command(*words: object) -> str:
    """Return the CMake argument that sets the command line of `dicompiler`."""
    return "-Ddicompiler_COMMAND=" + ";".join(map(str, words))


def configure(source: Path, *more: object, code: int = 0) -> str:
    """Run CMake with the build directory `b` in `source` and return its output; this checkout's package is used."""
    given = (f"-Ddicompiler_DIR={PACKAGE}", define_command(*forked_command_line()), *more)
    cmake = OLDER if "Ninja" in more else "cmake"
    return " ".join(call(cmake, "-S", source, "-B", source / "b", *given, code=code).split())


def build(source: Path, *more: object, code: int = 0, **env: str) -> str:
    return call("cmake", "--build", source / "b", *more, code=code, **env)


def run_steps(source: Path, *more: object, **env: str) -> list[str]:
    """Build, and return the names of the targets whose commands of dicompiler were run, in this order."""
    said = build(source, *more, **env)
    steps = re.findall(r"(?:Transforming|Planning|Compiling) (\w+): ", said)
    if not steps and (source / "b" / "build.ninja").is_file():
        assert said == "ninja: no work to do.\n"
    return steps


def idle(source: Path) -> None:
    """Check that a build has nothing to do."""
    said = build(source)
    assert COMPILING not in said
    if (source / "b" / "build.ninja").is_file():
        assert said == "ninja: no work to do.\n"


def project(source: Path, call: str, model: str = "net.onnx") -> Path:
    """Write a project that ends with this CMake code, and a LeNet with its weights in `net.data`."""
    (source / "CMakeLists.txt").write_text(HEAD + call)
    onnx.save(networks.build("lenet"), source / model, save_as_external_data=True, location="net.data")
    return source


def test_cmakedir_prints_the_cmake_package() -> None:
    source = "import sys; from dicompiler.cli import main; main(['--cmakedir']); print(*sys.modules)"
    said = call(sys.executable, "-c", source)
    directory, modules = said.splitlines()
    assert Path(directory) == PACKAGE
    assert not {"numpy", "onnx", "pluggy", "logging", "dicompiler.plugins"} & set(modules.split())


def test_version_is_that_of_the_distribution(tmp_path: Path) -> None:
    version = importlib.metadata.version("dicompiler")
    for wanted, found in ((version, True), ("0.2", True), ("0.1.9", False), ("0.2.99", False), ("7", False)):
        source = tmp_path / wanted
        source.mkdir()
        text = f'find_package(dicompiler {wanted} CONFIG)\nmessage("v ${{dicompiler_VERSION}}/${{dicompiler_FOUND}}")'
        (source / "CMakeLists.txt").write_text(HEAD.replace("find_package(dicompiler CONFIG REQUIRED)", text))
        assert (f"v {version}/1" in configure(source)) == found, wanted


def test_missing_program_suggests_a_remedy(tmp_path: Path) -> None:
    project(tmp_path, "")
    path = os.pathsep.join(["/usr/bin", "/bin"])
    said = call("cmake", "-S", tmp_path, "-B", tmp_path / "b", f"-Ddicompiler_DIR={PACKAGE}", code=1, PATH=path)
    said = " ".join(said.split())
    assert "there is no program 'dicompiler': activate its Python environment" in said


@pytest.mark.slow
@pytest.mark.parametrize("generator", GENERATORS)
def test_it_compiles_again_just_when_something_has_changed(generator: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text((EXAMPLE / "cluster.toml").read_text())
    more = 'PLATFORM cluster.toml STRATEGY "${strategy}" DEPENDS extra.txt OUTPUT out/dir'
    used = "".join(USE.format(name=name) for name in ("used", "more"))
    call = f'dicompiler_compile(NAME net MODEL "my $net #1.onnx" {more})\n{used}'
    source = project(tmp_path, call, "my $net #1.onnx")
    (tmp_path / "extra.txt").touch()
    configure(source, "-G", generator, "-Dstrategy=modnn")
    assert build(source, "-j4").count(COMPILING) == 1
    idle(source)
    main, uses = source / "b" / "out" / "dir" / "artifact.json", [source / "b" / "used", source / "b" / "more"]
    used = [path.stat().st_mtime_ns for path in uses]
    for name in ("my $net #1.onnx", "net.data", "cluster.toml", "extra.txt"):
        before = main.stat().st_mtime_ns
        later(source / name)
        assert COMPILING in build(source), name
        idle(source)
        assert main.stat().st_mtime_ns == before, name
    # If the artifact is the same as before, nothing that depends on it is built again.
    assert [path.stat().st_mtime_ns for path in uses] == used
    configure(source, "-Dstrategy=single")
    assert build(source, "-j4").count(COMPILING) == 1
    assert main.stat().st_mtime_ns > before
    assert [path.read_bytes() for path in uses] == [main.read_bytes()] * 2
    idle(source)
    configure(source)
    idle(source)
    main.unlink()
    assert COMPILING in build(source)
    idle(source)
    build(source, "--target", "clean")
    assert not main.exists() and COMPILING in build(source)


CHAIN = """
set(run ${dicompiler_COMMAND})
add_custom_command(OUTPUT opt.onnx DEPFILE opt.d DEPENDS "${CMAKE_SOURCE_DIR}/net.onnx"
  COMMAND ${run} opt "${CMAKE_SOURCE_DIR}/net.onnx" -p infer-shapes -o opt.onnx --depfile opt.d)
add_custom_command(OUTPUT plan.json DEPFILE plan.d DEPENDS opt.onnx
  COMMAND ${run} plan opt.onnx --platform rpi4x2 --strategy modnn -o plan.json --depfile plan.d
  COMMAND ${CMAKE_COMMAND} -E touch plan.json)
dicompiler_compile(NAME net MODEL opt.onnx PLATFORM rpi4x2 PLAN plan.json)
"""


@pytest.mark.slow
@pytest.mark.parametrize("generator", GENERATORS)
def test_change_of_external_data_reaches_the_end_of_a_chain(generator: str, tmp_path: Path) -> None:
    """CMake 4 lost the change if a depfile had an empty rule for a file that another command creates."""
    source = project(tmp_path, CHAIN)
    configure(source, "-G", generator)
    build(source)
    before = tracked_digests(source / "b" / "net")
    idle(source)
    weights = bytearray((source / "net.data").read_bytes())
    weights[3] ^= 1
    (source / "net.data").write_bytes(weights)
    later(source / "net.data")
    assert COMPILING in build(source)
    assert tracked_digests(source / "b" / "net") != before
    idle(source)


STEPS = """
dicompiler_opt(NAME small MODEL net.onnx PIPELINE "${pipeline}" DEPENDS extra.txt)
dicompiler_plan(NAME split MODEL small.onnx PLATFORM cluster.toml STRATEGY modnn OUTPUT plans/split.json)
add_subdirectory(sub)
"""
LAST_STEP = """
set(directory "${CMAKE_BINARY_DIR}")
dicompiler_compile(NAME net MODEL "${directory}/small.onnx" PLATFORM ../cluster.toml
  PLAN "${directory}/plans/split.json")
"""
PLUGIN = """
from dicompiler.plugin_api import hookimpl

@hookimpl
def dicompiler_passes():
    return []
"""


@pytest.mark.slow
@pytest.mark.parametrize("generator", GENERATORS)
def test_chain_runs_exactly_the_steps_that_depend_on_a_change(generator: str, tmp_path: Path) -> None:
    """The last step is in another directory, in which no rule creates the files that it reads."""
    source, site = tmp_path / "source", tmp_path / "site"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "CMakeLists.txt").write_text(LAST_STEP)
    (source / "cluster.toml").write_text((EXAMPLE / "cluster.toml").read_text())
    (source / "extra.txt").touch()
    project(source, STEPS)
    site.mkdir()
    (site / "mine.py").write_text(PLUGIN)
    distribution(site, "mine", "1.0", {"mine": "mine"})
    command = define_command(*forked_command_line(str(site)))

    configure(source, "-G", generator, "-Dpipeline=infer-shapes", command)
    assert run_steps(source, "-j4", "--target", "net") == ["small", "split", "net"]
    assert run_steps(source) == []
    b = source / "b"
    first_digests = tracked_digests(b / "sub" / "net")
    for touched, steps in (
        # A touched file lets the step "small" run again. It writes the same model, so later steps do not run.
        (source / "net.onnx", ["small"]),
        (source / "net.data", ["small"]),
        (source / "extra.txt", ["small"]),
        (source / "cluster.toml", ["net", "split"]),
        (site / "mine.py", ["net", "small", "split"]),
        (b / "small.onnx", ["net", "split"]),
        (b / "plans" / "split.json", ["net"]),
    ):
        os.utime(touched)
        assert sorted(run_steps(source, "-j4")) == steps, touched
        assert run_steps(source) == [], touched
    assert tracked_digests(b / "sub" / "net") == first_digests

    weights = bytearray((source / "net.data").read_bytes())
    weights[3] ^= 1
    (source / "net.data").write_bytes(weights)
    assert run_steps(source, "-j4") == ["small", "split", "net"]
    assert tracked_digests(b / "sub" / "net") != first_digests
    assert run_steps(source) == []
    (b / "plans" / "split.json").unlink()
    assert run_steps(source, "-j4") == ["split", "net"]
    (b / "small.onnx").unlink()
    assert run_steps(source, "-j4") == ["small", "split", "net"]
    # The passes are the same, but written differently, so only the step "small" runs.
    configure(source, "-G", generator, "-Dpipeline=normalise,infer-shapes", command)
    assert run_steps(source, "-j4") == ["small"]
    assert run_steps(source) == []
    build(source, "--target", "clean")
    assert not (b / "small.onnx").exists() and not (b / "plans" / "split.json").exists()
    assert run_steps(source, "-j4") == ["small", "split", "net"]


WITH_LARGE_MODEL = "from dicompiler.ir.onnx import protobuf_io as io; io.MAX_PROTOBUF_BYTES = 10_000"
"""Weights are written to a second file as for a model of more than 2 GB."""


@pytest.mark.slow
@pytest.mark.parametrize("generator", GENERATORS)
def test_weights_in_a_second_file_reach_the_artifact_and_are_cleaned(generator: str, tmp_path: Path) -> None:
    steps = (
        "dicompiler_opt(NAME small MODEL net.onnx PIPELINE infer-shapes)\n"
        "dicompiler_compile(NAME net MODEL small.onnx PLATFORM rpi4x2 STRATEGY modnn)\n"
    )
    source = project(tmp_path, steps)
    main = f"{WITH_LARGE_MODEL}\nimport sys\nfrom dicompiler.cli import main\nsys.exit(main())\n"
    (source / "main.py").write_text(main)
    configure(source, "-G", generator, define_command(sys.executable, source / "main.py"))
    assert run_steps(source, "-j4") == ["small", "net"]
    b = source / "b"
    digests = tracked_digests(b / "net")
    assert (b / "small.onnx.data").is_file()
    assert run_steps(source) == []
    before = (b / "small.onnx").read_bytes()
    weights = bytearray((source / "net.data").read_bytes())
    weights[3] ^= 1
    (source / "net.data").write_bytes(weights)
    assert run_steps(source, "-j4") == ["small", "net"]
    assert (b / "small.onnx").read_bytes() == before
    assert tracked_digests(b / "net") != digests
    assert run_steps(source) == []
    build(source, "--target", "clean")
    assert not (b / "small.onnx").exists() and not (b / "small.onnx.data").exists()
    assert run_steps(source, "-j4") == ["small", "net"]


@pytest.mark.slow
@pytest.mark.parametrize("generator", GENERATORS)
def test_opt_and_plan_pass_all_arguments(generator: str, tmp_path: Path) -> None:
    calls = (
        'dicompiler_plan(NAME one MODEL net.onnx PLATFORM rpi4x2 STRATEGY modnn TARGET "mpi{threads=2}" '
        'OBJECTIVE memory COST "analytic{pools=false}" SHAPE input=1x1x32x32 OPTIONS --tolerate-failures pi02)\n'
        'dicompiler_opt(NAME tiled MODEL net.onnx PIPELINE "infer-shapes,form-layers,tile-height{layers=conv1 parts=2}"'
        " PLATFORM rpi4x2 PLAN one.json SAVE_PLAN plans/two.json SHAPE input=1x1x32x32 "
        "OPTIONS --wire-dtype float16 OUTPUT models/split.onnx)\n"
        "get_target_property(output tiled DICOMPILER_OUTPUT)\nmessage(${output})\n"
        "dicompiler_compile(NAME net MODEL net.onnx PLATFORM rpi4x2 PLAN plans/two.json)\n"
    )
    source = project(tmp_path, calls)
    b = source / "b"
    assert str(b / "models" / "split.onnx") in configure(source, "-G", generator)
    assert run_steps(source, "-j4") == ["one", "tiled", "net"]
    one, two, used = (plans.load_plan(b / name) for name in ("one.json", "plans/two.json", "net/plan.json"))
    assert [failure.failed for failure in one.failures] == [("pi02",)]
    assert two.wire_format == used.wire_format != one.wire_format
    assert two.layers == used.layers
    assert "conv1@pi01" in {node.name for node in onnx.load(b / "models" / "split.onnx").graph.node}
    (b / "plans" / "two.json").unlink()
    assert run_steps(source, "-j4") == ["tiled", "net"]
    assert run_steps(source) == []
    (source / "CMakeLists.txt").write_text(HEAD + calls.replace("parts=2", "parts=x"))
    said = build(source, code=1 if generator == "Ninja" else 2)
    assert "dicompiler: error: " in said and "parts" in said


def tracked_digests(artifact: Path) -> dict[str, bytes]:
    return {name: hashlib.sha256((artifact / name).read_bytes()).digest() for name in tracked_files(artifact)}


@pytest.mark.slow
@pytest.mark.parametrize("generator", GENERATORS)
def test_passes_all_arguments_and_reports_failures(generator: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "CMakeLists.txt").write_text(HEAD + "add_subdirectory(sub)\n")
    arguments = (
        'NAME net MODEL net.onnx PLATFORM rpi4x2 TARGET "mpi{threads=2}" PLAN plan.json OBJECTIVE memory '
        'COST "analytic{pools=false}" SHAPE input=1x1x32x32 DEPENDS net.data '
        "OPTIONS --tolerate-failures pi02 --allow-worse"
    )
    made = f"add_custom_command(OUTPUT net.onnx net.data COMMAND {sys.executable} ${{CMAKE_CURRENT_SOURCE_DIR}}/make.py"
    (tmp_path / "sub" / "CMakeLists.txt").write_text(f"{made} DEPENDS make.py)\ndicompiler_compile({arguments})\n")
    script = tmp_path / "sub" / "make.py"
    script.write_text(MAKE)
    plan = plans.plan_to_text(compile(networks.build("lenet"), platform="rpi4x2", strategy="modnn").plan)
    (tmp_path / "sub" / "plan.json").write_text(plan)
    configure(tmp_path, "-G", generator)
    build(tmp_path)
    idle(tmp_path)
    artifact = tmp_path / "b" / "sub" / "net"
    before = (artifact / "artifact.json").read_bytes()
    script.write_text(MAKE.replace("seed=0", "seed=1"))
    later(script)
    assert COMPILING in build(tmp_path)
    assert (artifact / "artifact.json").read_bytes() != before
    idle(tmp_path)
    assert '"threads": 2' in (artifact / "pi01" / "manifest.json").read_text()
    written, given = (plans.load_plan(place / "plan.json") for place in (artifact, tmp_path / "sub"))
    assert written.layers == given.layers and [failure.failed for failure in written.failures] == [("pi02",)]
    (tmp_path / "sub" / "plan.json").write_text("{")
    said = build(tmp_path, code=1 if generator == "Ninja" else 2)
    assert "dicompiler: error: " in said and "plan.json" in said
    assert len((artifact / "plan.json").read_bytes()) > 1


@pytest.mark.slow
@pytest.mark.parametrize("cmake", CMAKES)
@pytest.mark.parametrize("generator", GENERATORS)
def test_no_version_of_cmake_warns(cmake: str, generator: str, tmp_path: Path) -> None:
    """No warning is printed in a subdirectory either, or for the example and the packages of the targets."""
    (tmp_path / "CMakeLists.txt").write_text(HEAD + "add_subdirectory(sub)\n")
    (tmp_path / "sub").mkdir()
    steps = (
        "dicompiler_opt(NAME small MODEL net.onnx PIPELINE infer-shapes)\n"
        "dicompiler_plan(NAME plan MODEL small.onnx PLATFORM rpi4x2)\n"
        "dicompiler_compile(NAME net MODEL small.onnx PLATFORM rpi4x2 PLAN plan.json)\n"
    )
    project(tmp_path / "sub", steps)
    text = (tmp_path / "sub" / "CMakeLists.txt").read_text().removeprefix(HEAD)
    (tmp_path / "sub" / "CMakeLists.txt").write_text(text)
    compile(networks.build("lenet"), platform="rpi4x2", strategy="single", target="mpi", output=tmp_path / "mpi")
    command = define_command(sys.executable, "-m", "dicompiler")
    for source in (tmp_path, EXAMPLE, tmp_path / "mpi" / "pi01"):
        options = ("-G", generator, f"-Ddicompiler_DIR={PACKAGE}", command, f"-DPython3_EXECUTABLE={sys.executable}")
        said = call(cmake, "-S", source, "-B", tmp_path / f"build {source.name}", *options)
        assert "Warning" not in re.sub(r"CMake Warning.*:\n  Manually-specified variables", "", said)


@pytest.mark.parametrize("cmake", CMAKES)
def test_policies_and_diagnostics_of_the_caller_stay_the_same(cmake: str, tmp_path: Path) -> None:
    """The function sets CMP0116 for its own depfile. The caller's depfiles need the caller's setting."""
    project(
        tmp_path,
        "cmake_policy(GET CMP0116 before)\n"
        "dicompiler_compile(NAME net MODEL net.onnx PLATFORM rpi4x2)\n"
        'cmake_policy(GET CMP0116 after)\nmessage("policy: ${before} ${after}")\n'
        "if(COMMAND cmake_diagnostic)\n  cmake_diagnostic(GET CMD_DEPRECATED action)\nendif()\n"
        'message("action: ${action}")\n',
    )
    command = define_command(sys.executable, "-m", "dicompiler")
    said = call(cmake, "-S", tmp_path, "-B", tmp_path / "b", "-G", "Ninja", f"-Ddicompiler_DIR={PACKAGE}", command)
    assert "policy: NEW NEW" in said
    assert "action: IGNORE" not in said


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("compile(MODEL net.onnx PLATFORM rpi4x2)", "argument NAME is missing: add NAME and its value"),
        ("compile(NAME net PLATFORM rpi4x2)", "argument MODEL is missing: add MODEL and its value"),
        (
            "compile(NAME net MODEL net.onnx)",
            "argument PLATFORM is missing: give a TOML file, or a built-in one such as rpi4x4",
        ),
        (
            "compile(NAME net MODEL net.onnx PLATFROM x)",
            "unknown argument 'PLATFROM': it takes NAME, MODEL, PLATFORM, TARGET",
        ),
        (
            "compile(NAME net MODEL net.onnx PLATFORM x SHAPE a=1 STRATEGI y)",
            "SHAPE has 'STRATEGI': write input=1x3x224x224",
        ),
        (
            "compile(NAME net MODEL net.onnx PLATFORM)",
            "argument PLATFORM has no value: give one, or leave PLATFORM out",
        ),
        (
            "compile(NAME net MODEL m PLATFORM x STRATEGY dp PLAN p)",
            "STRATEGY and PLAN exclude each other: a plan needs no",
        ),
        ("opt(NAME a PIPELINE x)", "argument MODEL is missing: add MODEL and its value"),
        ("opt(NAME a MODEL net.onnx)", "argument PIPELINE is missing: add PIPELINE and its value"),
        ("opt(NAME a MODEL net.onnx PIPELINE)", "argument PIPELINE has no value: give one, or leave PIPELINE out"),
        (
            "opt(NAME a MODEL net.onnx PIPELINE place{layers=conv1 device=d1})",
            "unknown argument 'device=d1}': it takes NAME, MODEL, PIPELINE, PLATFORM, PLAN, SAVE_PLAN, OUTPUT, SHAPE, "
            "OPTIONS, DEPENDS",
        ),
        ("opt(NAME a MODEL m PIPELINE x STRATEGY dp)", "unknown argument 'STRATEGY': it takes NAME, MODEL, PIPELINE"),
        ("plan(NAME a PLATFORM rpi4x2)", "argument MODEL is missing: add MODEL and its value"),
        ("plan(NAME a MODEL net.onnx)", "argument PLATFORM is missing: give a TOML file, or a built-in one"),
        ("plan(NAME a MODEL m PLATFORM x PLAN p)", "unknown argument 'PLAN': it takes NAME, MODEL, PLATFORM, TARGET"),
        ("plan(NAME a MODEL m PLATFORM x SHAPE 1x2)", "SHAPE has '1x2': write input=1x3x224x224; arguments are NAME"),
    ],
)
def test_wrong_call_is_an_error_of_cmake_that_names_the_argument(call: str, words: str, tmp_path: Path) -> None:
    said = configure(project(tmp_path, f"dicompiler_{call}"), code=1)
    assert f"dicompiler_{call.partition('(')[0]}: {words}" in said


def test_output_of_a_target_is_not_confused_with_a_source_file(tmp_path: Path) -> None:
    steps = (
        "dicompiler_opt(NAME net MODEL net.onnx PIPELINE infer-shapes)\n"
        "dicompiler_plan(NAME plan MODEL net.onnx PLATFORM rpi4x2)\n"
    )
    said = configure(project(tmp_path, steps), code=1)
    cause = "MODEL net.onnx is a file in the source directory and the output of net: give the full path"
    assert f"dicompiler_plan: {cause}" in said
    step = 'dicompiler_opt(NAME a MODEL net.onnx PIPELINE infer-shapes OUTPUT "${CMAKE_SOURCE_DIR}/net.onnx")'
    said = configure(project(tmp_path, step), code=1)
    cause = f"{tmp_path}/net.onnx is an input and an output of a: give the output another name"
    assert f"dicompiler_opt: {cause}" in said
    steps = "".join(f"dicompiler_compile(NAME {name} MODEL net.onnx PLATFORM rpi4x2 OUTPUT net)\n" for name in "ab")
    said = configure(project(tmp_path, steps), code=1)
    cause = f"{tmp_path}/b/net/artifact.json is an output of a and of b: give one another OUTPUT"
    assert f"dicompiler_compile: {cause}" in said


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("name", ["a b", "a(b)c", "a]b", "a%b", "a:b", "a&b", "a'b", "a;b", "a=b"])
def test_directories_have_names_that_the_build_tool_can_read(name: str, generator: str, tmp_path: Path) -> None:
    source = tmp_path / name
    source.mkdir()
    project(source, "dicompiler_compile(NAME net MODEL net.onnx PLATFORM rpi4x2 STRATEGY single)")
    unreadable = "]&';=" if generator == "Ninja" else "]&';=%:"
    refused = next((character for character in unreadable if character in name), None)
    said = configure(source, "-G", generator, code=0 if refused is None else 1)
    if refused is None:
        assert COMPILING in build(source)
        idle(source)
    else:
        assert f"has '{refused}' in its name, which {generator} cannot read: rename the directory" in said


@pytest.mark.slow
def test_example_builds_a_program_that_computes_the_same_as_the_model(tmp_path: Path) -> None:
    source = tmp_path / "example"
    shutil.copytree(EXAMPLE, source)
    made = source / "build"
    env = BUILDING | {"CMAKE_GENERATOR": "Ninja"}
    for line in COMMANDS[:3]:
        call("bash", "-c", f"cd '{source}' && {line}", **env)
    assert computed(made) == pytest.approx(expected(made), abs=1e-5)
    before = expected(made)
    assert "Compiling" not in call("cmake", "--build", made, **env)
    # A model with other weights gives other data files but the same C++ code, so no C++ is compiled.
    script = source / "make_model.py"
    script.write_text(script.read_text().replace('build("lenet")', 'build("lenet", seed=1)'))
    later(script)
    said = call("cmake", "--build", made, **env)
    assert "Compiling lenet" in said and "Building CXX" not in said
    call("ctest", "--test-dir", made, "-R", "program", "--output-on-failure")
    assert computed(made) == pytest.approx(expected(made), abs=1e-5)
    assert expected(made) != pytest.approx(before, abs=1e-3)


@pytest.mark.slow
def test_example_builds_for_a_board_and_emulated_ranks_compute_the_same(
    tmp_path: Path,
) -> None:
    source = tmp_path / "example"
    shutil.copytree(EXAMPLE, source)
    made, env = source / "build-aarch64", BUILDING | {"CMAKE_GENERATOR": "Unix Makefiles"} | crossing.RANKS
    for line in COMMANDS[3:]:
        call("bash", "-c", f"cd '{source}' && {line}", **env)
    qemu = ";".join(crossing.emulator(tmp_path / "board"))
    call("cmake", made, f"-DCMAKE_CROSSCOMPILING_EMULATOR={qemu}")
    call("ctest", "--test-dir", made, "-R", "program", "--output-on-failure", **env)
    assert computed(made) == pytest.approx(expected(made), abs=1e-5)
    # When cross-compiling for aarch64, CMake must refuse a library for this machine's processor, and an empty
    # directory.
    package = ("cmake", "-S", made / "lenet" / "here", f"-DCMAKE_TOOLCHAIN_FILE={source}/aarch64.cmake")
    for name, value, words in (
        ("ONNXRUNTIME_LIBRARY", toolchain.find_library(), "is not for aarch64: give that of the target machine"),
        ("MPI_mpi_LIBRARY", toolchain.find_library(), "is not for aarch64: give that of the target machine"),
        ("DICOMPILER_FETCHED", tmp_path, "or fetch it: 'python3 -m dicompiler_targets.mpi.fetch_libraries aarch64'"),
    ):
        said = call(*package, "-B", tmp_path / name, f"-D{name}={value}", code=1)
        assert words in " ".join(said.split()), said


def computed(made: Path) -> Any:
    """Return the outputs of the example's program, which was built in `made`."""
    (output,) = (made / "outputs").rglob("*.npy")
    return np.load(output)


def expected(made: Path) -> Any:
    """Return the outputs of the example's model."""
    return run_model(Model.load(made / "lenet.onnx"), dict(np.load(made / "digit.npz")))["output"]
