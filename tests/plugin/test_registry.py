"""Loading of plugins: broken ones, conflicting names, and the restriction by DICOMPILER_PLUGINS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
import pytest
from support.distributions import command, distribution, listed

from dicompiler.base.errors import PluginError, UsageError
from dicompiler.base.version import package_version
from dicompiler.networks import build
from dicompiler.plugin.entry_points import Plugin
from dicompiler.plugin.registry import Registry, load_plugins


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


VARIANT = """
def variant(**attributes):
    return type("Variant", (Pass,), {"run": Same.run, "__module__": __name__, **attributes})
"""
BROKEN = "plugin 'odd' of acme-broken 0.9"


@pytest.fixture
def load(site: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Registry]:
    """Return a function that loads a plugin from its source, in this process."""
    monkeypatch.syspath_prepend(site)

    def load_source(source: str) -> Registry:
        install(site, "acme-broken", source, version="0.9", point="odd")
        monkeypatch.delitem(sys.modules, "acme_broken", raising=False)
        return load_plugins({}, [Plugin("odd", "acme_broken", "acme-broken", "0.9")])

    return load_source


class TestBroken:
    """A broken plugin is one warning on stderr."""

    @pytest.mark.parametrize(
        ("source", "line"),
        [
            ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' (acme_broken.py:2)"),
            (
                "import json\njson.loads('')",
                "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (acme_broken.py:3)",
            ),
            ("\ndef f(:", "SyntaxError: invalid syntax (acme_broken.py, line 3)"),
            ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines (acme_broken.py:2)"),
            ("raise SystemExit(3)", "SystemExit: 3 (acme_broken.py:2)"),
            (
                "dicompiler_api = 3",
                "it is written for version 3 of the hooks, newer than 2: install a newer dicompiler",
            ),
            (
                "dicompiler_api = 'one'",
                "TypeError: dicompiler_api is 'one', not a version of the hooks: set it to 2",
            ),
        ],
    )
    def test_module_that_cannot_be_imported_leaves_out_its_plugin(
        self, source: str, line: str, load: Callable[[str], Registry]
    ) -> None:
        loaded = load(source)
        assert loaded.load_errors == loaded.warnings == (f"{BROKEN} is left out: {line}",)
        assert loaded.plugins == ()

    def test_statement_of_a_package_that_fails_is_named(self, load: Callable[[str], Registry], site: Path) -> None:
        (site / "acme_lazy").mkdir()
        (site / "acme_lazy" / "__init__.py").write_text("import no_such_module\n")
        install(site, "acme-lazy-plugin", "import acme_lazy")
        assert load("import acme_lazy").warnings[0].endswith("No module named 'no_such_module' (acme_broken.py:2)")
        loaded = load_plugins({}, [Plugin("lazy", "acme_lazy", "acme-lazy", "1.0")])
        assert loaded.warnings[0].endswith("No module named 'no_such_module' (acme_lazy/__init__.py:1)")

    @pytest.mark.parametrize(
        ("hooks", "line"),
        [
            ("yield 1", "pass 1 is left out: TypeError: dicompiler_passes yields 1, which is not a subclass of Pass: "),
            ("yield int", "pass int is left out: TypeError: dicompiler_passes yields <class 'int'>, which is not a "),
            (
                "yield Same()",
                "pass Same() is left out: TypeError: dicompiler_passes yields an object of Same: ",
            ),
            (
                "yield variant(name='white space')",
                "pass Variant is left out: ValueError: not a spec: name 'white space'",
            ),
            ("yield variant(name=None)", "pass Variant is left out: TypeError: Variant has no name: set name = "),
            (
                "yield variant(name='x', requires=('layer',))",
                "pass Variant is left out: TypeError: Variant names 'layer', ",
            ),
            ("yield Same", "pass Same is left out: the plugin provides pass 'good' twice: rename one"),
            (
                "raise ValueError('late')",
                "dicompiler_passes fails: ValueError: late (in dicompiler_passes, acme_broken.py:",
            ),
            (
                "@hookimpl\ndef dicompiler_strategies(): yield Same",
                "strategy Same is left out: TypeError: ",
            ),
            ("@hookimpl\ndef dicompiler_operators(): yield 'Conv'", "operator rule 'Conv' is left out: TypeError: "),
            (
                "@hookimpl\ndef dicompiler_operators():\n    from dicompiler.plugin_api import OperatorRule\n"
                "    yield OperatorRule('Conv', None)",
                "operator rule 'Conv' is left out: TypeError: ",
            ),
        ],
    )
    def test_faulty_item_is_one_warning_and_the_other_items_stay(
        self, hooks: str, line: str, load: Callable[[str], Registry]
    ) -> None:
        own_hook = hooks if hooks.startswith("@") else f"    {hooks}"
        loaded = load(f"{textwrap.dedent(PASS.format(name='good'))}{own_hook}\n{VARIANT}")
        assert [*loaded.passes] == ["good"]
        assert [*loaded.strategies, *loaded.operators] == []
        (warning,) = loaded.warnings
        assert warning.startswith(f"{BROKEN}: {line}")
        with pytest.raises(PluginError, match=f"^unknown pass 'wanted'; {BROKEN}: "):
            loaded.find("passes", "wanted")

    @pytest.mark.slow
    def test_broken_plugin_is_one_line_on_stderr(self, site: Path) -> None:
        install(site, "acme-broken", "raise SystemExit(3)", version="0.9", point="odd")
        install(site, "acme-good", PASS.format(name="good"))
        done = command(site, "list", "passes", "--json")
        assert done.returncode == 0
        assert done.stderr == f"dicompiler: warning: {BROKEN} is left out: SystemExit: 3 (acme_broken.py:2)\n"
        assert {"good", "partition"} <= {record["name"] for record in json.loads(done.stdout)}

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


RULE = """
    from dicompiler.plugin_api import OperatorRule, Piece
    from dicompiler.plugin_api.regions import full_region

    def mine(operation, region, reduce):
        "Rule of {owner}."
        return Piece(full_region(operation.out_shape), operation.full_needs())

    @hookimpl
    def dicompiler_operators():
        yield OperatorRule("{op}", mine, replaces={replaces})
"""


class TestDuplicates:
    """If two things have the same kind and name, the first is used, with a warning that names both."""

    def test_two_distributions_with_one_name(self, site: Path) -> None:
        install(site, "acme-one", PASS.format(name="same"), version="1.5")
        install(site, "acme-two", PASS.format(name="same"), version="2.5")
        done = command(site, "list", "passes", "--json")
        assert done.returncode == 0
        assert done.stderr == (
            "dicompiler: warning: pass 'same' of acme-two 2.5 (plugin 'acme-two') is left out: acme-one 1.5 (plugin "
            "'acme-one') provides it too: uninstall acme-two, or name the plugins to load in DICOMPILER_PLUGINS\n"
        )
        assert [r["version"] for r in json.loads(done.stdout) if r["name"] == "same"] == ["1.5"]
        assert listed(site, "passes", DICOMPILER_PLUGINS="acme-two")["same"]["version"] == "2.5"

    def test_name_that_differs_only_by_case_or_dashes_is_left_out(self, site: Path) -> None:
        install(site, "acme", PASS.format(name="tileheight"))
        assert "tileheight" in listed(site, "passes")
        install(site, "acme-other", PASS.format(name="Tile_Height"), version="1.5")
        done = command(site, "list", "passes")
        assert done.returncode == 0
        built_in = f"'tile-height' of dicompiler {package_version()} (plugin 'passes')"
        cause = f"is left out: its name differs from {built_in} only by case, '-', '_' or '.': "
        assert f"warning: pass 'Tile_Height' of acme-other 1.5 (plugin 'acme-other') {cause}" in done.stderr
        assert "Tile_Height" not in done.stdout

    def test_plugin_cannot_take_a_built_in_name(self, site: Path) -> None:
        install(site, "acme", PASS.format(name="partition"))
        done = command(site, "list", "passes", "--json")
        assert done.returncode == 0
        assert done.stderr.startswith("dicompiler: warning: pass 'partition' of acme 1.0 (plugin 'acme') is left out: ")
        assert [r["distribution"] for r in json.loads(done.stdout) if r["name"] == "partition"] == ["dicompiler"]

    def test_rule_of_an_operator_with_a_built_in_rule_is_left_out_with_one_warning(self, site: Path) -> None:
        install(site, "acme", RULE.format(op="Conv", owner="acme", replaces=False))
        done = command(site, "list", "operators", "--json")
        assert done.returncode == 0
        assert done.stderr == (
            f"dicompiler: warning: operator rule 'Conv' of acme 1.0 (plugin 'acme') is left out: dicompiler "
            f"{package_version()} (plugin 'core') provides it too: set replaces=True in the rule to use it, uninstall "
            "acme, or name the plugins to load in DICOMPILER_PLUGINS\n"
        )
        assert [r["distribution"] for r in json.loads(done.stdout) if r["name"] == "Conv"] == ["dicompiler"]

    def test_rule_that_replaces_a_built_in_one_is_used(self, site: Path, tmp_path: Path) -> None:
        """The plugin's rule never splits a Conv, so that the strategy cannot tile it."""
        install(site, "acme", RULE.format(op="Conv", owner="acme", replaces=True))
        assert listed(site, "operators")["Conv"]["distribution"] == "acme"
        onnx.save(build("lenet"), tmp_path / "lenet.onnx")
        plan = ["plan", str(tmp_path / "lenet.onnx"), "--platform", "rpi4x2", "--strategy", "modnn", "-o"]
        for name, plugins in (("own.json", "acme"), ("built-in.json", "")):
            assert command(site, *plan, str(tmp_path / name), DICOMPILER_PLUGINS=plugins).returncode == 0
        own, built_in = (json.loads((tmp_path / name).read_text()) for name in ("own.json", "built-in.json"))
        assert (len(own["layers"]["conv1"]), len(built_in["layers"]["conv1"])) == (1, 2)

    @pytest.mark.parametrize(
        ("first", "second", "used"), [(False, True, "two"), (True, False, "one"), (True, True, "one")]
    )
    def test_rules_of_two_plugins(self, first: bool, second: bool, used: str, site: Path) -> None:
        install(site, "one", RULE.format(op="Relu", owner="one", replaces=first))
        install(site, "two", RULE.format(op="Relu", owner="two", replaces=second))
        done = command(site, "list", "operators", "--json")
        assert done.returncode == 0
        assert [r["distribution"] for r in json.loads(done.stdout) if r["name"] == "Relu"] == [used]
        left_out = "two" if used == "one" else "one"
        assert f"operator rule 'Relu' of {left_out} 1.0 (plugin '{left_out}') is left out: " in done.stderr
        assert done.stderr.count("\n") == 1

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

    @pytest.mark.parametrize(
        ("value", "cause"),
        [
            ("acme-on", "'acme-on' is not an installed third-party plugin (did you mean 'acme-one'?)"),
            ("first,x", "'x' is not an installed third-party plugin (known: acme-one, first)"),
            ("partition", "'partition' is not an installed third-party plugin (known: acme-one, first)"),
        ],
    )
    def test_unknown_name_is_an_error(self, value: str, cause: str, site: Path, tmp_path: Path) -> None:
        install(site, "acme-one", PASS.format(name="first"), point="first")
        onnx.save(build("lenet"), tmp_path / "lenet.onnx")
        plan = ("plan", str(tmp_path / "lenet.onnx"), "--platform", "rpi4x2", "-o", str(tmp_path / "plan.json"))
        for arguments in (("list", "passes"), plan):
            done = command(site, *arguments, DICOMPILER_PLUGINS=value)
            line = f"DICOMPILER_PLUGINS: {cause}: correct the name, or install the plugin"
            assert (done.returncode, done.stderr) == (2, f"dicompiler: error: {line}\n")
        assert not (tmp_path / "plan.json").exists()

    def test_other_errors_are_reported_with_an_unknown_name_too(self) -> None:
        code = (
            "import sys; from dicompiler.cli import command_line as c; c.COMMANDS = {'fail': ''}\n"
            "import click, types; sys.modules['dicompiler.cli.fail'] = types.SimpleNamespace(\n"
            "command=click.Command('fail', callback=lambda: open('/')))\nsys.exit(c.main(['fail']))"
        )
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "DICOMPILER_PLUGINS": "x"}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, "dicompiler: error: /: Is a directory\n")


class TestRegistry:
    """`load_plugins` makes a registry from plugins and environment variables."""

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
    heavy = ("matplotlib", "onnxruntime", "ortools", "pandas", "scipy")
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
