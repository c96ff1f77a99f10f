"""Remote evaluation: bit-equal metrics in another process, without sending weights."""

from __future__ import annotations

import pickle
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_problems import any_plan, random_problem

from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.plan import Part
from dicompiler.search.problem import RemoteEvaluator


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 30), st.integers(0, 2**32))
def test_pickled_evaluator_gives_bit_equal_metrics(network: int, seed: int) -> None:
    problem = random_problem(network)
    plan = any_plan(seed, problem)
    here, there = RemoteEvaluator(problem), pickle.loads(pickle.dumps(RemoteEvaluator(problem)))
    assert repr(there(plan)) == repr(here(plan)) == repr(problem.evaluate(plan))
    assert repr(pickle.loads(pickle.dumps(there))(plan)) == repr(here(plan))


def test_estimates_without_a_model() -> None:
    problem = replace(random_problem(5), model=None)
    plan = any_plan(2, problem)
    there = pickle.loads(pickle.dumps(RemoteEvaluator(problem)))
    assert repr(there(plan)) == repr(problem.estimate(plan))


def test_weights_are_not_pickled() -> None:
    problem = load_problem(networks.build("lenet", 0), "rpi4x2")
    assert problem.model is not None
    held = sum(weight.nbytes for weight in problem.model.weights.values())
    assert held > 100_000
    assert len(pickle.dumps(RemoteEvaluator(problem))) < held / 4


def test_rule_with_a_local_function_is_named() -> None:
    problem = random_problem(4)
    key, rule = next(iter(problem.layers.rules.items()))
    local = replace(rule, cost=lambda *arguments: rule.cost(*arguments))
    layers = replace(problem.layers, rules={**problem.layers.rules, key: local})
    with pytest.raises(
        DicompilerError, match=rf"the operator rule of .*{key[1]} cannot be sent .*: define its functions"
    ):
        pickle.dumps(RemoteEvaluator(replace(problem, layers=layers)))


def test_pickled_evaluator_returns_errors() -> None:
    problem = random_problem(4)
    plan = any_plan(0, problem)
    name = Random(0).choice(list(plan.layers))
    wrong = replace(plan, layers={**plan.layers, name: (Part("nobody"),)})
    there = pickle.loads(pickle.dumps(RemoteEvaluator(problem)))
    for referee in (RemoteEvaluator(problem), there):
        found = referee.evaluate_or_error(wrong)
        assert isinstance(found, DicompilerError) and "nobody" in str(found)
        assert repr(referee.evaluate_or_error(plan)) == repr(problem.evaluate(plan))
    assert [str(found) for found in problem.evaluate_all([wrong])] == [str(there.evaluate_or_error(wrong))]
