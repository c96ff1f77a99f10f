"""Keys and values of one sequence are sent in one message. The cost tables count it like the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest

from dicompiler import networks
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.driver.prepare import load_problem
from dicompiler.search.problem import Problem, plan_workload
from dicompiler.testing import make_cluster
from dicompiler_strategies.tables import cost_tables
from dicompiler_strategies.tables.choices import ChoiceSet
from dicompiler_strategies.tables.cost_tables import CostTables, build_cost_tables, coalesced_layers

ROWS = ChoiceSet(("whole", "height"), (2,), 0, ("equal",), ("balanced",))
BLOCK = """<ir_version: 8, opset_import: ["" : 17]> g (float[1, 8, 16] x) => (float[1, 8, 16] y) {
    n = MatMul (x, w)
    q = MatMul (n, w)
    k = MatMul (n, w)
    v = MatMul (n, w)
    t = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul (q, t)
    p = Softmax (s)
    y = MatMul (p, v)
}"""


def problem(costs: RuntimeCosts) -> Problem:
    proto = onnx.parser.parse_model(BLOCK)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(16, dtype=np.float32), "w"))
    posed = load_problem(proto, make_cluster("switch", 1, 1))
    return replace(posed, runtime_costs={device.name: costs for device in posed.platform.devices})


def in_rows(found: CostTables) -> list[int]:
    """Return the choices with all layers in rows on both devices.

    The keys are transposed on both, so that they are sent as they were computed.
    """
    labels = [[choice.label for choice in choices] for choices in found.choices]
    return [own.index("whole on 2" if layer.output == "t" else "height 2")
            for own, layer in zip(labels, found.problem.layers.layers, strict=True)]  # fmt: skip


@pytest.mark.parametrize("joined", [0.0, 0.25])
def test_keys_and_values_cost_the_same_as_in_the_simulator(joined: float, monkeypatch: pytest.MonkeyPatch) -> None:
    posed = problem(RuntimeCosts(latency=1e-3, send=3e-3, receive=2e-3, coalesced_share=joined))
    found = build_cost_tables(posed, ROWS)
    plan, value = found.plan(in_rows(found)), found.total_seconds(in_rows(found))
    assert [m.name[0] for m in plan_workload(posed, plan)[1].messages if m.is_coalesced] == ["v", "v"]
    simulated = posed.evaluate(plan).latency_s
    # The tables may be up to 10 % higher: in the simulation, some messages are received during other work.
    assert simulated <= value <= 1.1 * simulated
    monkeypatch.setattr(cost_tables, "coalesced_layers", lambda _: frozenset())
    assert build_cost_tables(posed, ROWS).total_seconds(in_rows(found)) == pytest.approx(
        value + 1e-3 + (1 - joined) * 5e-3
    )


def names(posed: Problem) -> set[str]:
    return {posed.layers.layers[i].name for i in coalesced_layers(posed.layers)}


def test_values_are_coalesced_with_keys_but_not_with_queries() -> None:
    """The position of the queries does not matter: with rotary embeddings, they may precede the keys."""
    assert names(problem(RuntimeCosts())) == {"v", "q"}
    options = {"size": 3, "layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "vocabulary": 9}
    posed = load_problem(networks.build("llama_small", 0, **options), make_cluster("switch", 1, 1))
    found = {name.removeprefix("layers.0.").removesuffix(".matmul") for name in names(posed)}
    assert found == {"v_proj", "q_proj", "up_proj"}


def test_products_of_different_tensors_are_not_coalesced() -> None:
    assert names(load_problem(networks.build("lenet", 0), make_cluster("switch", 1, 1))) == set()
