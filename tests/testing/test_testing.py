"""dicompiler.testing: built-in items pass its checks, and plugins with a fault do not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from support import bad_plugins as bad

from dicompiler.base.errors import UsageError
from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Plan
from dicompiler.measure.profile_package import run_package, write_package
from dicompiler.plugin.pass_base import Pass
from dicompiler.plugin.plugin_kinds import PLUGIN_KINDS
from dicompiler.plugin.registry import registry
from dicompiler.search.problem import Problem
from dicompiler.search.strategy import Strategy
from dicompiler.testing import (
    CHECKS,
    RuleCase,
    build_network,
    check_cost_model,
    check_engine,
    check_operator_rule,
    check_pass,
    check_platform_family,
    check_strategy,
    check_target,
    default_platforms,
    fingerprints,
    make_cluster,
    samples,
    temporarily_registered,
)
from dicompiler.testing.subprocess_call import call_in_subprocess

FEW = tuple(samples(["branches"], [make_cluster("switch", 2.0, 1.0, 0.5)], ["latency"]))
THREE = tuple(samples(["branches"], objectives=["latency"]))
X = np.random.default_rng(0).permutation(2 * 9 * 8).reshape(1, 2, 9, 8).astype(np.float32)
POOL = RuleCase("MaxPool", (X,), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]})

STRATEGIES = {
    "auto": "auto{tries=2 strategies=single,modnn}",
    "autodice": "autodice{generations=4 population=12}",
    "cpsat": "cpsat{time=0.3}",
    "diapason": "diapason",
    "dp": "dp",
    "fit": "fit",
    "genetic": "genetic{generations=2 population=6}",
    "gradient": "gradient{restarts=2 iterations=20}",
    "modnn": "modnn",
    "pipeline": "pipeline",
    "replicate": "replicate",
    "single": "single",
    "stahl": "stahl",
    "teams": "teams{tries=2}",
}
LEAVES_MEMORY = ("modnn", "pipeline", "replicate", "single", "stahl")
"""Those that make one plan, whatever memory there is: the compiler says where it does not fit."""
PASSES = (
    "normalise", "infer-shapes", "form-layers", "trim", "partition", "place{layers=c0,c1 device=d1}",
    "tile-height{layers=c0 parts=2}", "tile-grid{layers=c0 rows=2 columns=2}", "fuse-tiles{layers=c0..cat parts=2}",
    "lop{layers=c0 parts=3}", "lip{layers=c1 parts=3}", "fuse{layers=c0..c1 parts=3}", "quantise{samples=x.npz}",
)  # fmt: skip
COSTS = (
    "analytic",
    'roofline{bandwidth="4 GB/s"}',
    "linear{coefficients=*:0.001:1e-9:0}",
    "profile{file=p.json others=true}",
)


def built_in(kind: str) -> set[str]:
    return {name for name, found in registry().entries(kind).items() if found.distribution == "dicompiler"}


def test_there_is_a_check_for_every_kind() -> None:
    assert {*CHECKS} == {*PLUGIN_KINDS}


def test_all_built_in_things_are_tested() -> None:
    # The strategies coopai, heads and manual have their own tests.
    assert built_in("strategies") == {*STRATEGIES, "coopai", "heads", "manual"}
    # The pass keep-states has its own tests.
    assert built_in("passes") == {"keep-states", *(text.partition("{")[0] for text in PASSES)}
    assert built_in("cost_models") == {text.partition("{")[0] for text in COSTS}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_built_in_strategies_pass(name: str) -> None:
    few = FEW
    if name in ("replicate", "teams"):  # These two strategies do not support the objective latency.
        few = tuple(samples(["branches"], [FEW[0].platform], ["throughput"]))
    check_strategy(registry().make("strategies", STRATEGIES[name]), few, memory=name not in LEAVES_MEMORY)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(built_in("targets")))
def test_built_in_targets_pass(name: str) -> None:
    check_target(registry().make("targets", name), FEW, splits=["modnn"])


@pytest.mark.parametrize("name", sorted(built_in("engines")))
def test_built_in_engines_pass(name: str) -> None:
    check_engine(registry().make("engines", name))


@pytest.mark.slow
@pytest.mark.parametrize("text", PASSES)
def test_built_in_passes_pass(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("x.npz", x=np.random.default_rng(0).standard_normal((4, 1, 3, 12, 10)).astype(np.float32))
    step: Pass = registry().make("passes", text)
    check_pass(step, ["branches"] if "{" in text else ["branches", "lenet"])


@pytest.mark.slow
@pytest.mark.parametrize("text", COSTS)
def test_built_in_cost_models_pass(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if text.startswith("profile"):
        measured(tmp_path / "p.json")
    check_cost_model(registry().make("cost_models", text), THREE)


def measured(path: Path) -> None:
    """Write a profile of the network, for all devices."""
    (path.parent / "package").mkdir()
    write_package(prepare(Model.load(build_network("branches"))), path.parent / "package", tiles=(2,))
    run_package(path.parent / "package", path, threads=1, repeat=1)


def test_there_is_a_built_in_platform() -> None:
    assert "rpi4xN" in built_in("platforms")


@pytest.mark.parametrize("name", sorted(name for name in built_in("platforms") if name.endswith("N")))
def test_built_in_platforms_pass(name: str) -> None:
    check_platform_family(registry().platforms[name].value)


@pytest.mark.parametrize("op", ["Relu", "Add", "Transpose", "Softmax", "Gemm"])
def test_built_in_rules_pass(op: str) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (6, 8)).astype(np.float32) for _ in range(2))
    cases = {"Add": RuleCase("Add", (a, b), graph_inputs=(0, 1)), "Gemm": RuleCase("Gemm", (a, b.T.copy()))}
    check_operator_rule(registry().operators[op].value, [cases.get(op, RuleCase(op, (a,), is_inexact=op == "Softmax"))])


def fails(check: Callable[..., None], *arguments: Any, **options: Any) -> str:
    """Run a check that must raise an AssertionError, and return its text, which has one line."""
    with pytest.raises(AssertionError) as caught:
        check(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


ON = "strategy 'bad-strategy' of module support.bad_plugins on branches on"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("half", f"{ON} switch1 for latency: an invalid plan: "),
        ("camera", f"{ON} gateway3 for latency: an invalid plan: plan: layers.c0[0]: device 'd0' has no compute"),
        ("counts", f"{ON} switch3 for latency: when it is called again, the strategy makes another plan: "),
        ("memory", f"{ON} switch3 with less memory for latency: an invalid plan: plan: host d0 needs "),
        ("source", f"{ON} switch3 for latency: the plan's source is ('d2',), the problem's ('d0',): make the plan by "),
        (
            "refuses",
            "strategy 'bad-strategy' of module support.bad_plugins refuses every sample: bad-strategy: no plan today",
        ),
        ("type", f"{ON} switch1 for latency: plan() returned dict instead of a Plan"),
        (
            "layer",
            f"{ON} switch1 for latency: ValueError: plan: layers.c0: missing: give every layer",
        ),
        (
            "unknown",
            f"{ON} switch1 for latency: ValueError: plan: layers.c00: the model has no such layer",
        ),
        (
            "parts",
            f"{ON} switch1 for latency: plan() returned a Plan with 'd0' for layer 'c0': expected a tuple of Part",
        ),
        ("exit", f"{ON} switch1 for latency: it ends the process by sys.exit(0): raise DicompilerError instead"),
        ("os-exit", f"{ON} switch1 for latency: it ends the process by os._exit(0): raise DicompilerError instead"),
        ("mutates", f"{ON} switch1 for latency: it changes its argument problem.layers: change a copy"),
        (
            "child-exit",
            "strategy 'bad-strategy' of module support.bad_plugins: the call fails in another process: exit code -9",
        ),
    ],
)
def test_wrong_strategy_is_caught(fault: Any, text: str) -> None:
    assert fails(check_strategy, bad.BadStrategy(fault), THREE).startswith(text)


@pytest.mark.slow
def test_progress_is_logged_with_network_platform_and_objective(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "dicompiler.testing"):
        check_strategy(bad.BadStrategy, FEW, memory=False)
        check_cost_model(bad.BadCost, FEW)
    places = ["switch3", "switch3 with less memory"]
    steps = [
        *(f"running {ON} {place} for latency" for place in places),
        *(f"checking {ON} {place} for latency" for place in places),
        "checking strategy 'bad-strategy' of module support.bad_plugins: front() on branches on switch3 for latency",
        "running strategy 'bad-strategy' of module support.bad_plugins on 2 samples in other processes",
        "checking cost model 'bad-cost' of module support.bad_plugins on branches on switch3",
    ]
    assert list(dict.fromkeys(caplog.messages)) == steps


def test_weights_are_read_as_one_value_for_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fingerprint of each byte made the check of a strategy take minutes."""
    (sample,) = samples(["lenet"], [FEW[0].platform], ["latency"])
    hashed: list[int] = []
    monkeypatch.setattr(fingerprints, "_hash", lambda *parts: hashed.append(len(parts)) or b"")
    fingerprints.field_fingerprints({"problem": sample.problem})
    # The weights of lenet have 250,000 bytes, so they cannot have been hashed byte by byte.
    assert len(hashed) < 10_000


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("empty", "it returned a front without plans: raise DicompilerError instead"),
        ("value", "plan 0 has no value of objective "),
        ("objective", "unknown objectives beauty: use some of latency, "),
        ("dominated", "plan 1 is not better than plan 0 in any objective: omit it"),
    ],
)
def test_wrong_front_is_caught(fault: str, text: str) -> None:
    assert text in fails(check_strategy, bad.BadStrategy(f"front-{fault}"), FEW[:1])


@pytest.mark.parametrize("fault", ["half", "device", "camera"])
def test_wrong_plans_are_caught_if_memory_is_not_checked(fault: str) -> None:
    assert "an invalid plan: " in fails(check_strategy, bad.BadStrategy(fault), THREE, memory=False)


@pytest.mark.slow
def test_endless_loops_end_after_the_limit_with_the_place() -> None:
    ended = (
        "it did not end within 2 s (it is in end_or_loop, bad_plugins.py): end sooner, or increase limit_s of the check"
    )
    checks: list[tuple[Callable[..., None], Any, Any]] = [
        (check_strategy, bad.BadStrategy("loop"), THREE),
        (check_target, bad.BadTarget("loop"), FEW),
        (check_pass, bad.BadPass("loop"), ["branches"]),
        (check_cost_model, bad.BadCost("loop"), FEW),
        (check_operator_rule, bad.bad_rule("loop"), [POOL]),
        (check_platform_family, bad.bad_family("loop"), ()),
    ]
    for check, plugin, on in checks:
        assert ended in fails(check, plugin, on, limit_s=2.0)


@pytest.mark.parametrize(
    ("check", "plugin", "on", "text"),
    [
        (check_target, bad.BadTarget("exit"), FEW, "SystemExit: 0 (in end_or_loop, bad_plugins.py:"),
        (check_pass, bad.BadPass("exit"), ["branches"], "it ends the process by sys.exit(0): raise "),
        (check_cost_model, bad.BadCost("exit"), FEW, "it ends the process by sys.exit(0): raise "),
        (check_operator_rule, bad.bad_rule("exit"), [POOL], "SystemExit: 0 (in end_or_loop, bad_plugins.py:"),
        (check_platform_family, bad.bad_family("exit"), (), "it ends the process by sys.exit(0): raise "),
    ],
)
def test_ending_the_process_is_caught(check: Callable[..., None], plugin: Any, on: Any, text: str) -> None:
    assert text in fails(check, plugin, on)


def test_process_that_ends_without_a_result_is_caught() -> None:
    assert "ends the other process" in fails(call_in_subprocess, os._exit, 0, limit_s=60.0)
    assert "did not end within 1 s" in fails(call_in_subprocess, time.sleep, 600, limit_s=1.0)


def test_module_that_calls_the_check_when_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "looping.py").write_text(
        "from support.bad_plugins import BadCost\n"
        "from dicompiler.testing import check_cost_model, samples\n"
        "class Mine(BadCost):\n"
        "    name = 'mine'\n"
        "check_cost_model(Mine(), samples(['branches'], objectives=['latency']))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    code = [sys.executable, "-c", "import looping"]
    done = subprocess.run(code, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert "its module calls the check when it is imported: call the check in a test function" in done.stderr


@pytest.mark.slow
def test_strategy_whose_plan_depends_on_the_hash_seed_is_caught() -> None:
    wide = tuple(samples(["branches"], [make_cluster("switch", *[1.0] * 64)], ["latency"]))
    for fault in ("hash", "third-seed"):
        assert "in another process, the strategy makes another plan" in fails(
            check_strategy, bad.BadStrategy(fault), wide
        )


@pytest.mark.parametrize(("fault", "command"), [("child", "sleep 614"), ("orphan", "sleep 615")])
def test_target_that_leaves_a_process_is_caught(fault: str, command: str) -> None:
    error = fails(check_target, bad.BadTarget(fault), FEW, splits=["modnn"])
    assert re.search(rf"run\(\) leaves process \d+ \({command}\) running: end all started processes$", error)
    assert command not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("swap", "frame 0: output 'a' of the first sink differs by "),
        ("frames", "frame 0: output 'a' of the first sink differs by "),
        ("bytes", "when the artifact is emitted again, other bytes are in the files where"),
        ("process", "when the artifact is emitted in another process, other bytes are in the files hash"),
        ("sent", " bytes sent, "),
        ("memory", "memory_overhead() returns -1 for device 'd0'"),
        ("silent", "emit() wrote no artifact.json"),
        ("name", "artifact.json: target is 'sockets': expected 'bad-target'"),
        ("outside", "emit() writes outside of its directory: "),
        ("descriptor", "/opened: write below "),
        ("weights", "it changes its argument compilation.model"),
        ("inputs", "it changes its argument frames: change a copy"),
        ("times", "run() returned frames_s with 0 times: expected 2"),
    ],
)
def test_wrong_target_is_caught(fault: Any, text: str) -> None:
    error = fails(check_target, bad.BadTarget(fault), FEW, splits=["modnn"])
    assert error.startswith("target 'bad-target' of ")
    assert text in error


def test_detects_a_target_that_refuses_replicas_it_declares() -> None:
    error = fails(check_target, bad.BadTarget("replicas"), FEW, splits=[])
    assert "with replicas: it declares that it supports replicas, but refuses them: bad-target: one role only" in error


def test_detects_a_target_that_loses_states() -> None:
    error = fails(check_target, bad.BadTarget("keeps"), FEW, splits=[])
    assert "with a state: frame 1: output 'y' differs by " in error


def test_detects_a_target_that_does_not_tolerate_failures_as_declared() -> None:
    error = fails(check_target, bad.BadTarget("survives"), FEW, splits=[])
    assert "with a failure plan: frame 0: output 'a' of the first sink differs by " in error


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("numbers", "output 'a' differs by "),
        ("illegal", "after pass 'bad-pass'"),
        ("changes", "it changes its argument state.model: change a copy"),
        ("layers", "it changes its argument state.layers: change a copy"),
        ("random", "a second run makes another model"),
        ("provides", "it declares that it provides routing, but leaves it None"),
        ("outputs", "the graph's outputs have other names"),
    ],
)
def test_wrong_pass_is_caught(fault: Any, text: str) -> None:
    error = fails(check_pass, bad.bad_pass(fault), ["branches"])
    assert error.startswith("pass 'bad-pass' of module support.bad_plugins on branches: ")
    assert text in error


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("negative", "layer 'c0' on d0 takes -"),
        ("nan", "layer 'c0' on d0 takes nan s"),
        ("text", "layer 'c0' on d0 takes '"),
        ("shape", "return float64 and the shape (shares, devices), which is ("),
        ("fill", "by seconds_table()"),
        ("random", "s by seconds(), "),
        ("hash", "it returns other seconds in another process"),
        ("mutates", "it changes its argument layers.tensors: change a copy"),
    ],
)
def test_wrong_cost_model_is_caught(fault: Any, text: str) -> None:
    error = fails(check_cost_model, bad.BadCost(fault), FEW)
    assert error.startswith("cost model 'bad-cost' of module support.bad_plugins")
    assert text in error


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("short", "its node computes another shape than its operator rule's `out`"),
        ("shifted", "the parts compute other values than the whole node"),
        ("outside", "it must lie in the input"),
        ("less", "it must contain the region"),
        ("whole", "no axis can be cut"),
        ("elementwise", "although the rule is element-wise"),
        ("cost", "its cost is 1.5: expected an OpCost of integers of at least 0"),
        ("length", "its reduction_length is 'many': expected None or an integer of at least 0"),
        ("share", "its read_share is 3: expected a number from 0 to 1"),
        ("mutates", "it changes its argument operation.node: change a copy"),
    ],
)
def test_wrong_rule_is_caught(fault: str, text: str) -> None:
    error = fails(check_operator_rule, bad.bad_rule(fault), [POOL])
    assert error.startswith("rule MaxPool, case 0")
    assert text in error


def test_class_that_could_not_be_registered_is_caught() -> None:
    class Nameless(Strategy):
        def plan(self, problem: Problem) -> Plan:
            return problem.best_single_device[0]

    @dataclass(frozen=True)
    class WithTable(Nameless):
        name: ClassVar[str] = "with-table"
        table: dict[str, int] = field(default_factory=dict)

    assert "Nameless: TypeError: Nameless has no name" in fails(check_strategy, Nameless, FEW)
    assert "WithTable.table: dict[str, int] is not a type that an option can have" in fails(
        check_strategy, WithTable, FEW
    )


def test_rule_with_local_functions_is_caught() -> None:
    error = fails(check_operator_rule, bad.bad_rule("local"), [POOL])
    assert error.startswith("rule MaxPool: it cannot be sent to other processes: define its functions at the top of a")


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("type", "make() returned str instead of a Platform"),
        ("random", "a second find() returns another platform"),
        ("hosts", "it has 2 hosts"),
        ("name", "its name does not end in N"),
        ("figures", "it has no description: say where its rates and bandwidths come from"),
    ],
)
def test_wrong_platform_is_caught(fault: str, text: str) -> None:
    assert text in fails(check_platform_family, bad.bad_family(fault))


@pytest.mark.slow
def test_plugins_without_faults_pass() -> None:
    check_strategy(bad.BadStrategy, THREE)
    check_target(bad.BadTarget("scratch"), FEW, splits=["modnn"])
    check_pass(bad.BadPass)
    check_cost_model(bad.BadCost, FEW)
    check_operator_rule(bad.bad_rule(""), [POOL])
    check_platform_family(bad.bad_family(""))


def test_temporary_registration_ends_with_the_context() -> None:
    with temporarily_registered(bad.BadStrategy, bad.bad_family("")) as inside:
        assert inside.make("strategies", "bad-strategy{fault=half}") == bad.BadStrategy("half")
        assert "badxN" in registry().platforms
    with pytest.raises(UsageError, match="unknown strategy 'bad-strategy'"):
        registry().find("strategies", "bad-strategy")
    with (
        pytest.raises(TypeError, match="is not a Pass, Strategy, Target, Engine, CostModel"),
        temporarily_registered(int),
    ):
        pass


def test_it_needs_no_test_framework() -> None:
    code = "import sys, dicompiler.testing; print({'pytest', 'hypothesis'} & {*sys.modules})"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_samples_accept_names_of_platforms_and_refuse_unknown_objectives() -> None:
    assert [str(sample) for sample in samples(["lenet"], ["rpi4x2"], ["latency"])] == ["lenet on rpi4x2 for latency"]
    with pytest.raises(UsageError, match=r"unknown objective 'latancy' \(did you mean 'latency'"):
        next(samples(["lenet"], objectives=["latancy"]))


def test_a_rule_case_refuses_values_that_are_not_a_tuple_of_arrays() -> None:
    with pytest.raises(UsageError, match=r"RuleCase: values must be a tuple of arrays, not .*ndarray"):
        RuleCase("Relu", np.zeros((1, 4), np.float32))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"RuleCase: values\[0\] must be an array or None, not 3"):
        RuleCase("Relu", (3,))  # type: ignore[arg-type]


def test_samples_are_the_same_each_time() -> None:
    assert build_network("branches") == build_network("branches")
    assert [str(s) for s in samples()] == [str(s) for s in samples()]
    assert len(list(samples())) == 2 * len(default_platforms()) * 5


def test_energy_is_an_objective_only_for_platforms_with_powers() -> None:
    without_powers = make_cluster("switch", 1.0)
    objectives = [sample.objective for sample in samples(["branches"], [without_powers])]
    assert "energy" not in objectives
    assert len(objectives) == 4
    energy = tuple(samples(["branches"], [without_powers], ["energy"]))
    assert fails(check_strategy, bad.BadStrategy, energy).startswith(f"{ON} switch1 for energy: objective 'energy': ")
