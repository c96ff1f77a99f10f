"""Partial sums added up in slices: exact for any devices, fewer bytes, and chosen if that is predicted to be better."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from support.planning import make_cluster

from dicompiler import networks
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.plan import Part
from dicompiler.search.problem import Problem
from dicompiler.testing.plans import check_plan
from dicompiler_strategies.candidate_search import slice_sums
from dicompiler_strategies.tables.choices import ChoiceSet, list_choices
from dicompiler_strategies.transformer_heads import Heads

CHOICES = ChoiceSet(("whole", "lip"), extra_rows=0, merges=("all",))


def decoder_problem(*rates: float, wire_dtype: str | None = None, bandwidth: float = 1e6) -> Problem:
    shape = {"size": 1, "layers": 2, "hidden": 128, "heads": 8, "kv_heads": 4, "vocabulary": 30}
    model = networks.build("llama_small", 1, **shape)
    problem = load_problem(model, make_cluster("switch", *rates, bandwidth=bandwidth), wire_dtype=wire_dtype)
    return replace(problem, objective="latency")


def all_reduced(problem: Problem) -> dict[str, tuple[Part, ...]]:
    """Return parts in which all devices add up every partial sum, for each layer that has such a choice."""
    options = replace(CHOICES, device_counts=(len(problem.platform.computing_devices),))
    return {layer.name: list_choices(problem, layer, options)[-1].parts for layer in problem.layers.layers}


@pytest.mark.parametrize("wire_dtype", [None, "int8-block"])
@pytest.mark.parametrize("rates", [(1, 1, 1), pytest.param((2, 1, 1, 3), marks=pytest.mark.slow)])
def test_slices_are_bit_equal_and_send_fewer_bytes(rates: tuple[float, ...], wire_dtype: str | None) -> None:
    problem = decoder_problem(*rates, wire_dtype=wire_dtype)
    whole = problem.build_plan(all_reduced(problem))
    sliced = slice_sums(problem.layers, whole)
    check_plan(problem, replace(sliced, wire_format=sliced.wire_format.with_exact_stand_ins))
    sent = [sum(device.sent for device in problem.evaluate(plan).devices) for plan in (sliced, whole)]
    assert sliced != whole and sent[0] < sent[1]


def test_two_devices_keep_whole_sums() -> None:
    problem = decoder_problem(1, 1)
    plan = problem.build_plan(all_reduced(problem))
    assert any(part.reduce for parts in plan.layers.values() for part in parts)
    assert slice_sums(problem.layers, plan) == plan


def test_random_plans_stay_bit_equal() -> None:
    problem = decoder_problem(1, 2, 1)
    random = Random(7)
    drawn = {
        layer.name: random.choice(list_choices(problem, layer, ChoiceSet(extra_rows=0))).parts
        for layer in problem.layers.layers
    }
    check_plan(problem, slice_sums(problem.layers, problem.build_plan(drawn)))


def test_heads_slices_sums_if_the_network_is_slow() -> None:
    problem = decoder_problem(1e6, 1e6, 1e6, 1e6)
    plan = Heads(device_counts=(4,), waves=False).plan(problem)
    unsliced = {name for name, parts in slice_sums(problem.layers, plan).layers.items() if parts != plan.layers[name]}
    assert not unsliced
