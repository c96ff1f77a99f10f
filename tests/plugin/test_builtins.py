"""Built-in items are registered by hooks, like those of plugins."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import pluggy
import pytest
from support.distributions import distribution, listed

from dicompiler.base.option_specs import options_of
from dicompiler.plugin import builtins, hookspecs
from dicompiler.plugin.entry_points import BUILTIN_PLUGINS
from dicompiler.plugin.registry import registry


@pytest.fixture
def hooks() -> pluggy.HookRelay:
    """The hooks, with only the core's own plugin registered."""
    manager = pluggy.PluginManager(hookspecs.PLUGGY_PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(builtins)
    manager.check_pending()
    return manager.hook


def test_core_provides_rules_cost_models_and_platforms_and_nothing_else(hooks: pluggy.HookRelay) -> None:
    given = {name for name, hook in vars(hooks).items() if not name.startswith("_") and hook.get_hookimpls()}
    assert given == {"dicompiler_operators", "dicompiler_cost_models", "dicompiler_platforms"}


def test_registry_contains_exactly_the_results_of_the_hooks(hooks: pluggy.HookRelay) -> None:
    (rules,), (costs,), (platforms,) = (
        hooks.dicompiler_operators(), hooks.dicompiler_cost_models(), hooks.dicompiler_platforms()
    )  # fmt: skip
    known = registry()
    assert {model.name for model in costs} <= set(known.cost_models)
    assert {family.name for family in platforms} <= set(known.platforms)
    names = [(rule.domain, rule.op) for rule in rules]
    assert len(names) == len(set(names)) > 100


def test_plugin_states_the_version_of_the_hooks() -> None:
    assert builtins.dicompiler_api == hookspecs.API_VERSION


class TestBuiltins:
    """Built-in items are loaded exactly once, whether dicompiler is installed or not."""

    def test_builtin_plugins_match_pyproject(self) -> None:
        document = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
        assert dict(BUILTIN_PLUGINS) == document["project"]["entry-points"]["dicompiler"]

    @pytest.mark.parametrize("kind", ["passes", "strategies", "targets", "cost_models"])
    def test_every_option_has_a_description(self, kind: str) -> None:
        found = [
            (name, option.name, option.help.strip())
            for name, entry in registry().entries(kind).items()
            for option in options_of(entry.value)
        ]
        assert found and [(name, option) for name, option, text in found if not text] == []

    def test_installed_and_on_the_path_is_once(self, site: Path) -> None:
        for version in ("7.1", "7.0"):
            distribution(site / version, "dicompiler", version, dict(BUILTIN_PLUGINS))
        path = os.pathsep.join([str(site / "7.1"), str(site / "7.0"), *sys.path])
        plugins = listed(site, "plugins", PYTHONPATH=path)
        assert {name: record["module"] for name, record in plugins.items()} == dict(BUILTIN_PLUGINS)
        assert {record["version"] for record in plugins.values()} == {"7.1"}

    def test_older_installed_distribution_does_not_hide_a_new_built_in(self, site: Path) -> None:
        distribution(site, "dicompiler", "0.0.1", dict(BUILTIN_PLUGINS[:2]))
        assert listed(site, "plugins").keys() == dict(BUILTIN_PLUGINS).keys()
