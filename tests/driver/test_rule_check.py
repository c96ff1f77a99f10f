"""Compiling checks the operator rules of third parties on a few nodes of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import onnx
import pytest
from support import bad_plugins as bad

from dicompiler import networks
from dicompiler.base.errors import PluginError
from dicompiler.driver import rule_check
from dicompiler.driver.compiler import compile
from dicompiler.ir.operator_rule import Operation, OperatorRule, Piece
from dicompiler.ir.regions import Interval, Region
from dicompiler.plugin.registry import registry, temporarily_registered

SMALL = "MaxPool <kernel_shape = [1, 1]>"
LARGE = "MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]>"


def pools(*nodes: str) -> onnx.ModelProto:
    tensors = ["x", *(f"t{i}" for i in range(len(nodes) - 1)), "y"]
    calls = "".join(f"[p{i}] {tensors[i + 1]} = {node} ({tensors[i]}) " for i, node in enumerate(nodes))
    text = "float[1, 4, 12, 12]"
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g ({text} x) => ({text} y) {{ {calls} }}')


@pytest.fixture(params=["short", "shifted"])
def wrong_rule(request: pytest.FixtureRequest) -> Iterator[None]:
    with temporarily_registered(bad.bad_rule(request.param)):
        yield


@pytest.mark.parametrize("strategy", ["single", "modnn"])
def test_wrong_rule_is_found_before_a_plan_is_made(strategy: str, wrong_rule: None) -> None:
    assert wrong_rule is None
    with pytest.raises(
        PluginError, match=r"rule 'MaxPool' of plugin 'uninstalled' .*, for node 'p0': (its|the) parts c"
    ):
        compile(pools(LARGE), "rpi4x2", strategy)


def test_rule_that_is_wrong_for_some_attributes_is_found() -> None:
    def piece(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
        fault = "shifted" if operation.attribute("kernel_shape") == [3, 3] else ""
        return bad.bad_rule(fault).piece(operation, region, reduce)

    with (
        temporarily_registered(OperatorRule("MaxPool", piece)),
        pytest.raises(PluginError, match="for node 'p1': the parts compute other values than the whole node"),
    ):
        compile(pools(SMALL, LARGE), "rpi4x2", "single")


def test_large_nodes_are_not_checked(
    wrong_rule: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert wrong_rule is None
    monkeypatch.setattr(rule_check, "MAX_CHECK_WORK", 100)
    with caplog.at_level("INFO", "dicompiler"):
        compile(pools(LARGE), "rpi4x2", "single")
    assert "not checking the operator rules of plugins for node 'p0' and larger ones: run verify" in caplog.text


def test_one_node_of_each_set_of_attributes_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = [], rule_check.run_split

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(rule_check, "run_split", counted)
    with temporarily_registered(bad.bad_rule("")):
        compile(pools(LARGE, SMALL, LARGE, SMALL), "rpi4x2", "modnn")
    assert len(calls) == 2 * rule_check.SPLITS_PER_NODE


def test_built_in_rules_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_check, "run_split", None)
    compile(pools(LARGE), "rpi4x2", "modnn")


@pytest.mark.parametrize("name", ["quirks", "tiny"])
def test_correct_rules_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = Mock(wraps=rule_check.run_split)
    monkeypatch.setattr(rule_check, "run_split", checked)
    rules = [entry.value for entry in registry().operators.values() if entry.value.can_cut]
    with temporarily_registered(*rules):
        compile(networks.build(name), "rpi4x2", "single")
    assert checked.call_count
