"""What holds for every strategy: its plan verifies with real processes, sends what was predicted, and comes again."""

from __future__ import annotations

from pathlib import Path

import pytest

from dicompiler import networks
from dicompiler.bounds import bound
from dicompiler.compiler import compile, load_problem
from dicompiler.plugins import registry

SPECS = {
    "auto": "auto{tries=4}",
    "cpsat": "cpsat{time=2.0}",
    "dp": "dp",
    "fit": "fit",
    "genetic": "genetic{generations=4 population=12}",
    "gradient": "gradient{restarts=4 iterations=50}",
    "modnn": "modnn",
    "pipeline": "pipeline",
    "single": "single",
    "stahl": "stahl",
}


def test_no_built_in_strategy_is_forgotten() -> None:
    built_in = {name for name, found in registry().strategies.items() if found.distribution == "dicompiler"}
    assert built_in - {"manual", "replicate"} == set(SPECS)  # replicate knows throughput alone: see its own tests


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_its_plan_verifies_sends_what_was_predicted_and_is_the_same_again(spec: str, tmp_path: Path) -> None:
    model = networks.build("lenet", 1)
    result = compile(model, platform="rpi4x3", strategy=spec, output=tmp_path / "out")
    checks = {check.name: check for check in result.verify().checks}
    assert all(check.passed for check in checks.values())
    assert "as predicted" in checks["bytes"].detail
    assert result.metrics is not None and result.program is not None and result.plan is not None
    assert sum(transfer.value.nbytes for transfer in result.program.transfers) == result.metrics.total_bytes
    problem = load_problem(model, "rpi4x3")
    least = bound(problem)
    assert least is not None and least <= result.metrics.latency_s * (1 + 1e-9)
    assert registry().make("strategies", spec).plan(problem).layers == result.plan.layers
