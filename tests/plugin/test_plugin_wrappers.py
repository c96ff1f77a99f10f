"""The registry wraps items of third parties: they look the same, but errors inside them name the plugin."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import bad_plugins as bad

import dicompiler
from dicompiler import networks
from dicompiler.base.errors import PluginError
from dicompiler.base.option_specs import options_of, spec_of
from dicompiler.cli import command_line
from dicompiler.cost.cost_model import AnalyticModel
from dicompiler.driver.compiler import compile
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Device
from dicompiler.ir.operator_rule import OperatorRule
from dicompiler.ir.plan import LayerShare, Part, Plan
from dicompiler.plugin import registry as plugins
from dicompiler.plugin.entry_points import Plugin
from dicompiler.plugin.plugin_kinds import PLUGIN_KINDS
from dicompiler.plugin.plugin_wrappers import describe_plan_error
from dicompiler.plugin.registry import Registry, registry
from dicompiler.search.problem import RemoteEvaluator
from dicompiler.testing import build_network, temporarily_registered

BAD = Plugin("bad", "bad_plugins", "acme-bad", "1.2")
OF = "of acme-bad 1.2 (plugin 'bad')"


def known() -> Registry:
    """Return the built-in items, and the plugins with faults as items of a third party."""
    things = {"strategies": bad.BadStrategy, "targets": bad.BadTarget, "cost_models": bad.BadCost}
    more = {kind: plugins.make_entry(BAD, kind, cls) for kind, cls in things.items()}
    given = {kind: {**registry().entries(kind), one.name: one} for kind, one in more.items()}
    return replace(registry(), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "name"), [("strategies", "bad-strategy"), ("targets", "bad-target")])
def test_wrapped_class_looks_like_the_class(kind: str, name: str) -> None:
    cls = known().find(kind, name).value
    plain: Any = inspect.unwrap(cls)
    assert cls is not plain and issubclass(cls, plain)
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(cls, attribute) == getattr(plain, attribute)
    assert fields(cls) == fields(plain) and options_of(cls) == options_of(plain)
    one, other = known().make(kind, f"{name}{{fault=hash}}"), plain("hash")
    assert one == other and other == one and hash(one) == hash(other) and one != plain()
    assert repr(one) == repr(other) and str(spec_of(one)) == f"{name}{{fault=hash}}"


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, replace, lambda one: pickle.loads(pickle.dumps(one))])
def test_copy_stays_wrapped(again: Any) -> None:
    one = again(known().make("strategies", "bad-strategy{fault=type}"))
    assert one == bad.BadStrategy("type")
    with pytest.raises(PluginError) as caught:
        one.plan(load_problem(build_network("branches"), "rpi4x2"))
    assert str(caught.value) == f"strategy 'bad-strategy' {OF}: plan() returned dict instead of a Plan"


@pytest.mark.parametrize(
    ("part", "cause"),
    [
        (Part("a", ((0, 1), (0, 18.0))), "the bound 18.0 (float) in a region of layer 'conv': give integers (int)"),  # type: ignore[arg-type]
        (Part("a", ((0, np.int64(4)),)), "the bound 4 (int64) in a region of layer 'conv': give integers (int)"),  # type: ignore[arg-type]
        (Part("a", None, (0, 1.5)), "the bound 1.5 (float) in a region of layer 'conv': give integers (int)"),  # type: ignore[arg-type]
        (Part(Device("a", "a", 1.0)), "a Device as the device of layer 'conv': give its name"),  # type: ignore[arg-type]
    ],
)
def test_plan_with_values_of_wrong_types_is_described(part: Part, cause: str) -> None:
    assert describe_plan_error(Plan({"conv": (part,)}, ("a",), ("a",))) == f"a Plan with {cause}"
    assert describe_plan_error(Plan({"conv": (Part("a", ((0, 4),)),)}, ("a",), ("a",))) == ""


def test_built_in_things_are_not_wrapped() -> None:
    for kind in PLUGIN_KINDS:
        for one in registry().entries(kind).values():
            assert not hasattr(one.value, "__guard__") and inspect.unwrap(one.value) is one.value
    given = AnalyticModel(pools=False)
    assert registry().resolve("cost_models", given) is given


def test_resolve_wraps_an_instance_like_make() -> None:
    given = bad.BadStrategy("type")
    adopted = known().resolve("strategies", given)
    assert type(adopted) is known().find("strategies", "bad-strategy").value and adopted == given
    assert known().resolve("strategies", adopted) is adopted
    assert type(given) is bad.BadStrategy


def test_unregistered_class_keeps_exceptions_and_invalid_results_name_the_module() -> None:
    with pytest.raises(KeyError):
        compile(build_network("branches"), "rpi4x2", "single", cost=bad.Careful())
    wrong = r"^strategy 'bad-strategy' of module support.bad_plugins: plan\(\) returned dict "
    with pytest.raises(PluginError, match=wrong):
        compile(build_network("branches"), "rpi4x2", bad.BadStrategy("type"))
    wrong = r"^cost model 'bad-cost' of module support.bad_plugins: layer 'c0' on pi01 takes -"
    with pytest.raises(PluginError, match=wrong):
        compile(build_network("branches"), "rpi4x2", "single", cost=bad.BadCost("negative"))


def test_plugin_may_catch_its_own_exceptions() -> None:
    problem = load_problem(build_network("branches"), "rpi4x2")
    layers, devices = problem.layers, problem.platform.devices
    cost = plugins.make_entry(BAD, "cost_models", bad.Careful).value()
    assert cost.seconds_table(layers, layers.layers[0], [LayerShare()], devices).tolist() == [[1.0, 1.0]]
    with pytest.raises(
        PluginError,
        match=r"^cost model 'careful' of acme-bad 1\.2 \(plugin 'bad'\): KeyError: 'lost' \(in broken, bad_plugins",
    ):
        cost.seconds(layers, layers.layers[0], LayerShare(), devices[0])


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("shape", "seconds_table() must return an array of shape (shares, devices), which is (1, 3) here"),
        ("negative", "takes -"),
    ],
)
def test_wrong_arrays_of_seconds_name_the_cost_model(fault: str, text: str) -> None:
    problem = load_problem(
        build_network("branches"), "rpi4x3", cost=known().make("cost_models", f"bad-cost{{fault={fault}}}")
    )
    layers, devices = problem.layers, problem.platform.devices
    with pytest.raises(PluginError, match=f"^cost model 'bad-cost' {re.escape(OF)}: .*{re.escape(text)}"):
        problem.cost_model.seconds_table(layers, layers.layers[0], [LayerShare()], devices)


def test_pickled_problem_has_a_wrapped_cost_model() -> None:
    problem = load_problem(
        build_network("branches"), "rpi4x3", cost=known().make("cost_models", "bad-cost{fault=negative}")
    )
    plan = registry().make("strategies", "modnn").plan(replace(problem, cost_model=AnalyticModel()))
    there: RemoteEvaluator = pickle.loads(pickle.dumps(RemoteEvaluator(problem)))
    with pytest.raises(PluginError, match=f"^cost model 'bad-cost' {re.escape(OF)}: layer 'c0' on pi0. takes -"):
        there(plan)


def test_auto_continues_with_a_warning_if_a_third_party_strategy_fails(caplog: pytest.LogCaptureFixture) -> None:
    problem = load_problem(networks.build("resnet8"), "rpi4x2")
    with temporarily_registered(bad.Breaking), caplog.at_level("WARNING", "dicompiler"):
        auto = registry().make("strategies", "auto{tries=0 strategies=breaking,single}")
        assert isinstance(auto.plan(replace(problem, objective="throughput")), Plan)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("auto: breaking has no plan: ") and "KeyError: 'throughput'" in warning


@pytest.mark.parametrize("function", ["piece", "reduction_length"])
def test_functions_of_a_rule_name_the_plugin_and_can_be_pickled(function: str) -> None:
    rule = plugins.make_entry(BAD, "operators", OperatorRule("Odd", bad.broken, reduction_length=bad.broken)).value
    again = pickle.loads(pickle.dumps(rule))
    assert again == rule
    with pytest.raises(
        PluginError, match=r"^rule 'Odd' of plugin 'bad' of acme-bad 1\.2: KeyError: 'lost' \(in broken, bad_plugins"
    ):
        getattr(again, function)(None, (), None)


def test_error_names_a_family_that_returns_another_type() -> None:
    family = plugins.make_entry(BAD, "platforms", bad.bad_family("type")).value
    with pytest.raises(PluginError) as caught:
        family.find("badx2")
    text = "platform 'badxN' of plugin 'bad' of acme-bad 1.2: make() returned str instead of a Platform"
    assert str(caught.value) == text


def test_only_the_registry_and_the_command_line_import_the_wrappers() -> None:
    """Other modules import only the functions that describe an error."""
    root, found = Path(dicompiler.__file__).parent, set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [
                alias.name for alias in getattr(node, "names", ()) if isinstance(node, ast.Import | ast.ImportFrom)
            ]
            module = getattr(node, "module", None) or ""
            imports_wrappers = module.endswith(".plugin_wrappers") or any("plugin_wrappers" in name for name in names)
            if imports_wrappers and not all(name.startswith("describe_") for name in names):
                found.add(path)
    assert found == {Path(plugins.__file__), Path(command_line.__file__)}
