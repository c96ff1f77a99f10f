"""Tests of depfiles with Make and Ninja, and of the files that they list."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.building import SPLIT, dicompiler, later, run

from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.cli.file_io import write_npz
from dicompiler.driver import depfile
from dicompiler.driver.compile_options import CompileOptions
from dicompiler.ir.platform import Platform, platform_to_toml

HARD = ("a b", "a  b", "$x", "a$$b", "#1", "a:b", "C:\\x", "a\\b", "(1) a", "b@{!,}~+%25", "é", "my $ #1.onnx")
"""File names that Make and Ninja can read in a depfile."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a LeNet that has its weights in a separate file."""
    onnx.save(networks.build("lenet"), tmp_path / "net.onnx", save_as_external_data=True, location="net.data")
    return tmp_path


class TestNames:
    """Make and Ninja read the same names in a depfile."""

    def test_make_and_ninja_see_changed_files(self, tmp_path: Path) -> None:
        makefile, ninja = ["all:\n"], ["rule touch\n  command = touch $out\n  depfile = $out.d\n"]
        for i, name in enumerate(HARD):
            (tmp_path / name).touch()
            os.utime(tmp_path / name, (1e9, 1e9))
            (tmp_path / f"m{i}.d").write_text(depfile.format_rule(f"m{i}", [name]))
            (tmp_path / f"n{i}.d").write_text(depfile.format_rule(f"n{i}", [name]))
            makefile.append(f"all: m{i}\nm{i}:\n\ttouch $@\ninclude m{i}.d\n")
            ninja.append(f"build n{i}: touch\n")
        (tmp_path / "Makefile").write_text("".join(makefile))
        (tmp_path / "build.ninja").write_text("".join(ninja))
        run(tmp_path, "make")
        run(tmp_path, "ninja")
        assert run(tmp_path, "make") == "make: Nothing to be done for 'all'.\n"
        assert run(tmp_path, "ninja") == "ninja: no work to do.\n"
        for i, name in enumerate(HARD):
            later(tmp_path / name)
            assert run(tmp_path, "make") == f"touch m{i}\n", name
            assert run(tmp_path, "ninja", "-v") == f"[1/1] touch n{i}\n", name
            os.utime(tmp_path / name, (1e9, 1e9))

    def test_make_and_ninja_build_again_if_a_file_was_deleted(self, tmp_path: Path) -> None:
        names = [name for name in HARD if "%" not in name]
        for name in names:
            (tmp_path / name).touch()
        (tmp_path / "t.d").write_text(depfile.format_rule("t", names, has_empty_rules=True))
        (tmp_path / "Makefile").write_text("t:\n\ttouch $@\ninclude t.d\n")
        (tmp_path / "build.ninja").write_text("rule touch\n  command = touch t\n  depfile = t.d\nbuild t: touch\n")
        run(tmp_path, "make")
        for name in names:
            (tmp_path / name).unlink()
            assert run(tmp_path, "make") == "touch t\n", name
            assert run(tmp_path, "ninja", "-v") == "[1/1] touch t\n", name

    def test_escapes_targets(self, tmp_path: Path) -> None:
        name = "my $ #1: net"
        (tmp_path / "in").touch()
        (tmp_path / "one.d").write_text(depfile.format_rule(name, ["in"]))
        rule = "rule touch\n  command = touch 'my $$ #1: net'\n  depfile = one.d\n"
        (tmp_path / "build.ninja").write_text(f"{rule}build my$ $$$ #1$:$ net: touch\n")
        run(tmp_path, "ninja")
        assert run(tmp_path, "ninja") == "ninja: no work to do.\n"
        assert run(tmp_path, "make", "-f", "one.d", name) == f"make: Nothing to be done for '{name}'.\n"
        later(tmp_path / "in")
        assert "touch" in run(tmp_path, "ninja", "-v")

    @pytest.mark.parametrize(
        "name", ["a;b", "a=b", "a|b", "a*b", "a?", "[1]", "a<b", "a>b", "'", '"', "a&b", "a^b", "a`b", "a\nb", "a\tb",
                 "~/a", "a ", "a:", "a\\", "a\\ b", "a\\#b", "lib(x)"]
    )  # fmt: skip
    def test_rejects_names_that_make_or_ninja_cannot_read(self, name: str) -> None:
        for target, prerequisite in ((name, "x"), ("x", name)):
            with pytest.raises(DicompilerError, match=r"depfile: .*: Make or Ninja cannot read .* in a name: rename"):
                depfile.format_rule(target, [prerequisite])

    def test_rejects_target_with_percent_sign(self) -> None:
        assert depfile.format_rule("a", ["100%", "b c"], True) == "a: \\\n 100% \\\n b\\ c\nb\\ c:\n"
        with pytest.raises(DicompilerError, match="cannot read '%'"):
            depfile.format_rule("100%", ["a"])


class TestPrerequisites:
    """A depfile lists all files that a command reads, as they were given, in a fixed order."""

    @pytest.mark.slow
    def test_compile_lists_model_data_platform_plan_and_profile(self, place: Path) -> None:
        sub = place / "in put"
        sub.mkdir()
        (sub / "c.toml").write_text(platform_to_toml(Platform.load("rpi4x2")))
        measure = ("--tiles", "2", "--repeat", "1", "--device", "*", "--target", "none")
        dicompiler(place, "profile", "net.onnx", *measure, "-o", "in put/p.json")
        dicompiler(place, "plan", "net.onnx", *SPLIT, "-o", "in put/plan.json")
        given = ["./net.onnx", "--platform", "in put/c.toml", "--plan", sub / "plan.json"]
        given += ["--depfile", "net.d", "--depfile-empty-rules"]
        dicompiler(place, "compile", *given, "--cost", 'profile{file="in put/p.json"}', "-o", "net")
        assert (place / "net.d").read_text() == (
            "net/artifact.json: \\\n net.onnx \\\n net.data \\\n in\\ put/c.toml \\\n "
            f"{place}/in\\ put/plan.json \\\n in\\ put/p.json\n"
            f"net.onnx:\nnet.data:\nin\\ put/c.toml:\n{place}/in\\ put/plan.json:\nin\\ put/p.json:\n"
        )

    def test_plan_lists_files_of_its_strategy(self, place: Path) -> None:
        nodes = [node.output[0] for node in onnx.load(place / "net.onnx").graph.node]
        mapping = {"nx01_arm0": nodes[:5], "nx01_arm1": nodes[5:]}
        (place / "mapping.json").write_text(json.dumps(mapping))
        (place / "platform.txt").write_text("nx01, arm, slots=0-5\n")
        strategy = "manual{mapping=mapping.json platform=platform.txt}"
        dicompiler(place, "plan", "net.onnx", "--strategy", strategy, "-o", "plan.json", "--depfile", "plan.d")
        names = ["net.onnx", "net.data", "mapping.json", "platform.txt"]
        assert (place / "plan.d").read_text() == depfile.format_rule("plan.json", names)

    def test_compile_lists_samples_of_quantization(self, place: Path) -> None:
        write_npz(place / "s.npz", {"input": np.random.default_rng(0).random((4, 1, 1, 32, 32), np.float32)})
        line = ("compile", "net.onnx", *SPLIT, "--quantize-samples", "s.npz", "-o", "net", "--depfile", "net.d")
        dicompiler(place, *line)
        assert (place / "net.d").read_text() == depfile.format_rule(
            "net/artifact.json", ["net.onnx", "net.data", "s.npz"]
        )

    def test_opt_lists_samples_of_quantise(self, place: Path) -> None:
        write_npz(place / "s.npz", {"input": np.random.default_rng(0).random((4, 1, 1, 32, 32), np.float32)})
        line = ("opt", "net.onnx", "-p", "quantise{samples=s.npz}", "-o", "int8.onnx", "--depfile", "o.d")
        dicompiler(place, *line, "--depfile-target", "my out")
        assert (place / "o.d").read_text() == depfile.format_rule("my out", ["net.onnx", "net.data", "s.npz"])

    def test_lists_modules_of_third_party_plugins(self, place: Path) -> None:
        site = place / "site"
        info, package = site / "acme-2.0.dist-info", site / "acme"
        for directory in (info, package):
            directory.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 2.0\n")
        (info / "entry_points.txt").write_text("[dicompiler]\nacme = acme.plugin\n")
        (info / "RECORD").write_text("acme/__init__.py,,\nacme/plugin.py,,\nacme_tables.py,,\nacme_unused.py,,\n")
        for name in ("acme/__init__.py", "acme/dealing.py", "acme_tables.py", "acme_unused.py"):
            (site / name).touch()
        (package / "plugin.py").write_text(textwrap.dedent(PLUGIN))
        (place / "start").touch()
        path = os.pathsep.join([str(site), *sys.path])
        line = ("compile", "net.onnx", "--platform", "rpi4x2", "--strategy", "acme{start=start}", "-o", "net")
        dicompiler(place, *line, "--depfile", "net.d", PYTHONPATH=path)
        modules = ("acme/__init__.py", "acme/dealing.py", "acme/plugin.py", "acme_tables.py")
        names = ["net.onnx", "net.data", "start", *(f"{site}/{name}" for name in modules)]
        assert (place / "net.d").read_text() == depfile.format_rule("net/artifact.json", names)

    @pytest.mark.slow
    def test_rejects_unwritable_depfile_before_the_work(self, place: Path) -> None:
        line = ("compile", "net.onnx", *SPLIT, "-o", "net", "--depfile")
        said = dicompiler(place, *line, "no/net.d", code=1)
        assert said == "dicompiler: error: no/net.d: there is no directory 'no': create it, or choose another place\n"
        assert ".: it is a directory: give the name of a file" in dicompiler(place, *line, ".", code=1)
        assert "Make or Ninja cannot read ';' in a name" in dicompiler(
            place, *line, "n.d", "--depfile-target", "a;b", code=1
        )
        (place / "net;.onnx").write_bytes((place / "net.onnx").read_bytes())
        line = ("compile", "net;.onnx", *SPLIT, "-o", "net")
        assert "'net;.onnx': Make or Ninja" in dicompiler(place, *line, "--depfile", "net.d", code=1)
        line = ("plan", "net.onnx", *SPLIT, "-o", "plan.json")
        assert "plan.json: the command also reads or writes this file: give the output another name" in dicompiler(
            place, *line, "--depfile", "plan.json", code=2
        )
        assert "--depfile-target needs --depfile" in dicompiler(place, *line, "--depfile-target", "x", code=2)
        (place / "net.data").unlink()
        assert "there is no file 'net.data'" in dicompiler(place, *line, "--depfile", "net.d", code=1)
        assert sorted(path.name for path in place.iterdir()) == ["net.onnx", "net;.onnx"]


PLUGIN = """
    from dataclasses import dataclass, field
    import acme.dealing, acme_tables
    from dicompiler.plugin_api import hookimpl
    from dicompiler.plugin_api import Part
    from dicompiler.plugin_api import Strategy

    @dataclass(frozen=True)
    class Acme(Strategy):
        name = "acme"
        start: str = field(default="", metadata={"file": True})

        def plan(self, problem):
            return problem.build_plan({layer.name: [Part("pi01")] for layer in problem.layers.layers})

    @hookimpl
    def dicompiler_strategies():
        return [Acme]
"""


def test_lists_model_data_platform_and_plan_once_in_order(place: Path) -> None:
    cluster, plan = place / "c.toml", place / "plan.json"
    cluster.write_text(platform_to_toml(Platform.load("rpi4x2")))
    found = depfile.find_prerequisites(place / "net.onnx", CompileOptions(str(cluster), plan=plan), ())
    assert found == (place / "net.onnx", place / "net.data", cluster, plan)
    assert depfile.find_prerequisites(place / "net.onnx", CompileOptions("rpi4x2"), ()) == found[:2]
    with pytest.raises(DicompilerError, match=r"gone\.onnx: cannot read the model"):
        depfile.find_prerequisites(place / "gone.onnx", CompileOptions(), ())
