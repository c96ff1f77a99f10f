"""What the author of a plugin tests it with: a check for each kind of thing that plugins provide.

    from dicompiler.testing import check_strategy
    from my_module import RoundRobin

    def test_round_robin():
        check_strategy(RoundRobin)

Each takes a class (with the default of every option) or an instance, tries it on small networks, and raises
AssertionError with the plugin, the network and what was wrong. Nothing need be installed as a plugin, and no test
framework is needed. What is compared in a second process must be in a module, not in the script that is run.
"""

from dicompiler.plugin.registry import temporarily_registered
from dicompiler.testing.costs import check_cost_model
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
    "operators": check_operator_rule,
    "cost_models": check_cost_model,
    "platforms": check_platform_family,
}
"""Kind of thing that plugins provide → its check."""
