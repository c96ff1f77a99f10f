"""Checks for plugin authors: one function for each kind of plugin.

    from dicompiler.testing import check_strategy
    from my_module import RoundRobin

    def test_round_robin():
        check_strategy(RoundRobin)

The argument of a check is an instance, or a class, which is created with default options. The check runs the plugin on
small networks, and raises AssertionError with the plugin, the network and the cause. The logger `dicompiler.testing`
reports progress at level INFO.

Neither an installed plugin nor a test framework is needed. The classes must be in a module that can be imported, not in
the script that is run, because some checks compare results with those of a second process.
"""

from dicompiler.plugin.registry import temporarily_registered
from dicompiler.testing.costs import check_cost_model
from dicompiler.testing.engines import check_engine
from dicompiler.testing.passes import check_pass
from dicompiler.testing.plans import check_legal, check_plan
from dicompiler.testing.platforms import check_platform_family
from dicompiler.testing.rules import RuleCase, check_operator_rule
from dicompiler.testing.samples import (
    NETWORKS,
    Sample,
    build_network,
    default_platforms,
    make_cluster,
    memory_limited,
    samples,
)
from dicompiler.testing.strategies import check_strategy
from dicompiler.testing.targets import check_target

__all__ = [
    "CHECKS",
    "NETWORKS",
    "RuleCase",
    "Sample",
    "build_network",
    "check_cost_model",
    "check_engine",
    "check_legal",
    "check_operator_rule",
    "check_pass",
    "check_plan",
    "check_platform_family",
    "check_strategy",
    "check_target",
    "default_platforms",
    "make_cluster",
    "memory_limited",
    "samples",
    "temporarily_registered",
]  # fmt: skip

CHECKS = {
    "passes": check_pass,
    "strategies": check_strategy,
    "targets": check_target,
    "engines": check_engine,
    "operators": check_operator_rule,
    "cost_models": check_cost_model,
    "platforms": check_platform_family,
}
"""Check function by kind of plugin."""
