"""Loading of plugins: broken ones, conflicting names, and the restriction by DICOMPILER_PLUGINS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.distributions import command, distribution, listed

from dicompiler.base.errors import UsageError
from dicompiler.base.version import package_version
from dicompiler.plugin.entry_points import Plugin
from dicompiler.plugin.registry import load_plugins


def install(site: Path, name: str, source: str, version: str = "1.0", point: str | None = None) -> None:
    """Install a distribution with one plugin, a module with the distribution's name."""
    module = name.replace("-", "_")
    distribution(site, name, version, {point or name: module})
    (site / f"{module}.py").write_text("from dicompiler.plugin_api import hookimpl\n" + textwrap.dedent(source))


PASS = """
    from dataclasses import dataclass
    from dicompiler.plugin_api import Pass

    @dataclass(frozen=True)
    class Same(Pass):
        "Does nothing."
        name = "{name}"
        def run(self, compilation):
            return compilation

    @hookimpl
    def dicompiler_passes():
        yield Same
"""


class TestBroken:
    """A broken plugin is one warning on stderr."""

    @pytest.mark.parametrize(
        ("source", "cause"),
        [
            ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
            ("def f(:", "SyntaxError: "),
            ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
            ("raise SystemExit(3)", "SystemExit: 3"),
            ("dicompiler_api = 3", "it is written for version 3 of the hooks, newer than 2"),
            ("dicompiler_api = 'one'", "TypeError: dicompiler_api is 'one', not a version of the hooks"),
            ("@hookimpl\ndef dicompiler_passes(extra): return []", "PluginValidationError: "),
            (
                "@hookimpl\ndef dicompiler_passes():\n    yield 1\n",
                "TypeError: dicompiler_passes yields 1, which is not",
            ),
            ("@hookimpl\ndef dicompiler_passes():\n    yield int", "TypeError: dicompiler_passes yields <class 'int'>"),
            ("@hookimpl\ndef dicompiler_passes():\n    raise ValueError('late')", "ValueError: late"),
            ("@hookimpl\ndef dicompiler_operators():\n    yield 'Conv'", "not of type OperatorRule"),
            (PASS.format(name="x") + "        yield Same", "it provides pass 'x' twice"),
            (PASS.format(name="white space"), "ValueError: not a spec: name 'white space'"),
            (PASS.format(name="x").replace('name = "x"', "other = 1"), "TypeError: Same has no name"),
            (PASS.format(name="x").replace('name = "x"', 'name = "x"\n        o: dict = 1'), "TypeError: Same.o: "),
        ],
    )
    def test_broken_plugin_is_one_warning_with_distribution_version_and_cause(
        self, source: str, cause: str, site: Path
    ) -> None:
        install(site, "acme-broken", source, version="0.9", point="odd")
        install(site, "acme-good", PASS.format(name="good"))
        done = command(site, "list", "passes", "--json")
        assert done.returncode == 0
        assert done.stderr.startswith("dicompiler: warning: plugin 'odd' of acme-broken 0.9 is left out: ")
        assert cause in done.stderr
        assert done.stderr.count("\n") == 1
        names = [record["name"] for record in json.loads(done.stdout)]
        assert {"good", "partition"} <= {*names}
        assert not {"x", "white space"} & {*names}

    def test_misspelt_hook_is_a_warning_and_other_hooks_work(self, site: Path) -> None:
        install(
            site,
            "acme",
            PASS.format(name="good") + "\n    @hookimpl\n    def dicompiler_stategies():\n        return []",
        )
        done = command(site, "list", "passes", "--json")
        assert done.stderr == (
            "dicompiler: warning: plugin 'acme' of acme 1.0: unknown hook 'dicompiler_stategies' "
            "(did you mean 'dicompiler_strategies'?)\n"
        )
        assert "good" in [record["name"] for record in json.loads(done.stdout)]

    def test_metadata_that_cannot_be_read_is_a_warning(self, site: Path) -> None:
        install(site, "acme-good", PASS.format(name="good"))
        distribution(site, "acme-garbled", "1.0", {})
        (site / "acme_garbled-1.0.dist-info" / "entry_points.txt").write_text("[dicompiler]\nno equals sign\n")
        done = command(site, "list", "passes")
        assert done.stderr.startswith("dicompiler: warning: ")
        assert done.stderr.count("\n") == 1
        assert "acme-garbled" in done.stderr
        assert "good" in done.stdout


class TestDuplicates:
    """Two things of the same kind and name are an error that names both."""

    def test_two_distributions_with_one_name(self, site: Path) -> None:
        install(site, "acme-one", PASS.format(name="same"), version="1.5")
        install(site, "acme-two", PASS.format(name="same"), version="2.5")
        done = command(site, "list", "passes")
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr == (
            "dicompiler: error: pass 'same' comes from two plugins: acme-one 1.5 (plugin 'acme-one') and "
            "acme-two 2.5 (plugin 'acme-two'); uninstall one or name only the other in DICOMPILER_PLUGINS\n"
        )
        assert "same" in listed(site, "passes", DICOMPILER_PLUGINS="acme-two")

    def test_names_that_differ_only_by_case_or_dashes_are_refused(self, site: Path) -> None:
        install(site, "acme", PASS.format(name="tileheight"))
        assert "tileheight" in listed(site, "passes")
        install(site, "acme-other", PASS.format(name="Tile_Height"), version="1.5")
        done = command(site, "list", "passes")
        assert done.returncode == 1
        built_in = f"pass 'tile-height' of dicompiler {package_version()} (plugin 'passes')"
        names = f"{built_in} and 'Tile_Height' of acme-other 1.5"
        assert names in done.stderr
        assert " differ only by case, '-', '_' or '.'; uninstall one or " in done.stderr

    def test_plugin_cannot_take_a_built_in_name(self, site: Path) -> None:
        install(site, "acme", PASS.format(name="partition"))
        done = command(site, "list", "passes")
        assert done.returncode == 1
        assert "pass 'partition' comes from two plugins: dicompiler " in done.stderr
        assert " and acme 1.0 (plugin 'acme')" in done.stderr

    def test_two_kinds_may_use_the_same_name(self, site: Path) -> None:
        install(site, "acme", PASS.format(name="single"))
        assert "single" in listed(site, "passes")


class TestRestriction:
    """DICOMPILER_PLUGINS names the third-party plugins to load."""

    @pytest.mark.parametrize(
        ("value", "loaded"),
        [
            ("", []),
            ("first", ["first"]),
            ("Acme.Two", ["second"]),
            (" first , acme-two,", ["first", "second"]),
        ],
    )
    def test_it_names_entry_points_or_distributions(self, value: str, loaded: Sequence[str], site: Path) -> None:
        install(site, "acme-one", PASS.format(name="first"), point="first")
        install(site, "acme_two", PASS.format(name="second"), point="second")
        install(site, "acme-three", "import sys\nsys.exit('imported')", point="third")
        passes = listed(site, "passes", DICOMPILER_PLUGINS=value)
        assert [name for name in ("first", "second") if name in passes] == loaded
        assert "partition" in passes

    def test_name_that_is_not_installed_is_a_warning(self, site: Path) -> None:
        install(site, "acme-one", PASS.format(name="first"), point="first")
        done = command(site, "list", "passes", DICOMPILER_PLUGINS="acme-on")
        assert done.stderr == (
            "dicompiler: warning: DICOMPILER_PLUGINS names 'acme-on', which is not an installed plugin "
            "(did you mean 'acme-one'?)\n"
        )


class TestRegistry:
    """`load_plugins`: plugins and an environment in, a registry out."""

    def test_names_are_sorted_and_the_order_of_loading_does_not_show(
        self, site: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("zeta", "alpha"):
            install(site, f"order-{name}", PASS.format(name=name))
        monkeypatch.syspath_prepend(site)
        found = [Plugin(f"order-{name}", f"order_{name}", f"order-{name}", "1.0") for name in ("zeta", "alpha")]
        assert [*load_plugins({}, found).passes] == [*load_plugins({}, found[::-1]).passes] == ["alpha", "zeta"]

    def test_unknown_name_suggests_the_nearest_of_its_kind(self, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        install(site, "registry-one", PASS.format(name="tile-height"))
        monkeypatch.syspath_prepend(site)
        registry = load_plugins({}, [Plugin("one", "registry_one", "registry-one", "1.0")])
        with pytest.raises(UsageError, match=r"^unknown pass 'tile-heigth' \(did you mean 'tile-height'\?\)$"):
            registry.make("passes", "tile-heigth{parts=2}")
        with pytest.raises(UsageError, match=r"^unknown strategy 'dp' \(there are none\)$"):
            registry.make("strategies", "dp")
        assert registry.make("passes", "tile-height").name == "tile-height"


def test_loading_plugins_imports_no_solver_engine_or_plots() -> None:
    heavy = ("matplotlib", "onnxruntime", "ortools", "pandas", "pymoo", "scipy")
    code = "import sys; from dicompiler.plugin_api import registry; registry();"
    code += f"print({{*{heavy!r}}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == "set()\n"
