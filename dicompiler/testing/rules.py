"""Check of operator rules: pieces of a node's output must equal the same regions of the whole output.

A random region of the output is computed on one device, and the rest on other devices. onnxruntime runs the resulting
nodes and the whole node.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from dicompiler.base.errors import check_type
from dicompiler.driver.rule_check import IntegerChooser, choose_interval, choose_parts, form_layers, run_split
from dicompiler.plugin.plugin_wrappers import (
    describe_op_cost_error,
    describe_piece_error,
    describe_read_share_error,
    describe_reduction_length_error,
)
from dicompiler.plugin.registry import temporarily_registered
from dicompiler.plugin_api import (
    Interval,
    LayerGraph,
    Model,
    Operation,
    OperatorRule,
    Region,
)
from dicompiler.plugin_api.onnx import run_model
from dicompiler.plugin_api.regions import cuttable_axes, full_region, output_shape, region_shape
from dicompiler.testing.assertions import LIMIT_S, checking, error_context, require, time_limit, unchanged

Array = NDArray[Any]


@dataclass(frozen=True)
class RuleCase:
    """A node and the values of its inputs, on which an operator rule is checked.

    Attributes:
        op: The operator type, such as "Conv".
        values: The inputs in order; None for an omitted optional input.
        attributes: Values of the node's attributes, by name.
        opset: Version of the operator set of the node's domain.
        graph_inputs: Indices of the inputs that are graph inputs; all other inputs become initializers.
        is_inexact: True if the node rounds, so that the last bits may differ. If False, `values` must be integers,
            because sums of integers are exact.
        extra_outputs: Names of the node's outputs after the first one. Nothing reads them.
        shape: Shape of the output; needed only if onnx cannot infer it. The default for a custom domain is the shape
            that a run of the node returns.
        domain: The operator's domain; '' is the standard domain.

    Raises:
        UsageError: `values` is not a tuple of arrays.
    """

    op: str
    values: tuple[Array | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 17
    graph_inputs: tuple[int, ...] = (0,)
    is_inexact: bool = False
    extra_outputs: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    domain: str = ""

    def __post_init__(self) -> None:
        check_type(self.values, (tuple, list), "RuleCase: values", "a tuple of arrays")
        for i, value in enumerate(self.values):
            check_type(value, (np.ndarray, np.generic, type(None)), f"RuleCase: values[{i}]", "an array or None")

    def model(self) -> Model:
        """Return a model that consists of the node.

        Returns:
            The model, with the shape of its output.
        """
        names = ["" if value is None else f"x{i}" for i, value in enumerate(self.values)]
        outputs = ["y", *self.extra_outputs]
        node = helper.make_node(self.op, names, outputs, "node", domain=self.domain, **self.attributes)
        constants = [
            numpy_helper.from_array(value, names[i])
            for i, value in enumerate(self.values)
            if value is not None and i not in self.graph_inputs
        ]
        inputs = [_describe_array(name, array) for name, array in self.inputs.items()]
        output = onnx.ValueInfoProto(name="y")
        if self.shape is not None:
            output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, self.shape)
        graph = helper.make_graph([node], "one", inputs, [output], constants)
        opsets = {"": 17, self.domain: self.opset}
        imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
        proto = helper.make_model(graph, opset_imports=imports, ir_version=10)
        if self.domain and self.shape is None:
            y = np.asarray(run_model(Model.load(proto), self.inputs, optimization="none")["y"])
            proto.graph.output[0].CopyFrom(_describe_array("y", y))
            return Model.load(proto)
        return Model.load(onnx.shape_inference.infer_shapes(proto, strict_mode=self.shape is None, data_prop=True))

    @property
    def inputs(self) -> dict[str, Array]:
        """The values of the graph inputs, by name."""
        values = {f"x{i}": self.values[i] for i in self.graph_inputs}
        return {name: value for name, value in values.items() if value is not None}


def _describe_array(name: str, array: Array) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def check_operator_rule(
    rule: OperatorRule, cases: Sequence[RuleCase], seeds: int = 20, limit_s: float = LIMIT_S
) -> None:
    """Check that an operator rule splits nodes correctly.

    For each case and seed, the node is split at a random region, and the result is compared with that of the whole
    node. The bits must be equal unless the case is inexact. If the operator sums over input channels, partial sums are
    checked too. The rule need not be registered.

    Args:
        rule: The operator rule to check.
        cases: Nodes of the rule's operator, with inputs.
        seeds: Number of random splits of each case.
        limit_s: Seconds that one case may take.

    Raises:
        AssertionError: The rule's result for a region does not cover the region, reads outside an input, computes
            other values than the whole node, or sends other bytes than predicted; no axis of a case can be cut; a
            function of the rule returns a value of another type, changes its arguments, ends the process, or exceeds
            the time limit; the rule is not picklable, so that executors cannot evaluate plans in other processes.
    """
    name = f"rule {rule.domain + '::' if rule.domain else ''}{rule.op}"
    require(cases, f"{name}: there are no cases")
    with temporarily_registered(_with_argument_checks(rule)):
        for number, case in enumerate(cases):
            place = f"{name}, case {number}"
            require((case.op, case.domain) == (rule.op, rule.domain), f"{place}: its operator is {case.op!r}")
            with checking(place):
                model = case.model()
            with error_context(f"{place}: onnxruntime refuses the node"):
                expected = np.asarray(run_model(model, case.inputs, optimization="none")["y"])
            with error_context(place), time_limit(limit_s):
                layers = form_layers(model)
                _check_reduction_and_share(layers)
                require(cuttable_axes(layers, layers.layers[0]), "no axis can be cut: every piece is the whole output")
                for seed in range(seeds):
                    with error_context(f"seed {seed}"):
                        check_split(layers, model, case, expected, Random(seed).randint)
    with error_context(f"{name}: it cannot be sent to other processes: define its functions at the top of a module"):
        pickle.dumps(rule)


def _with_argument_checks(rule: OperatorRule) -> OperatorRule:
    """Return the rule with functions that raise AssertionError if they change their argument `operation`."""
    return replace(
        rule,
        piece=_with_argument_check(rule.piece) if rule.can_cut else rule.piece,
        cost=_with_argument_check(rule.cost),
        reduction_length=rule.reduction_length and _with_argument_check(rule.reduction_length),
        read_share=rule.read_share and _with_argument_check(rule.read_share),
    )


def _with_argument_check(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(operation: Operation, *arguments: Any) -> Any:
        with unchanged(operation=operation):
            return function(operation, *arguments)

    return call


def _check_reduction_and_share(layers: LayerGraph) -> None:
    """Check the results of the rule's `reduction_length` and `read_share` for a model of one node.

    They are the length of the axis over which the node sums, and the fraction of its first input that it reads.
    """
    operation, rule = _get_operation_and_rule(layers)
    extent = None if rule.reduction_length is None else rule.reduction_length(operation)
    share = 1.0 if rule.read_share is None else rule.read_share(operation)
    error = describe_reduction_length_error(extent) or describe_read_share_error(share)
    require(not error, error)


def _get_operation_and_rule(layers: LayerGraph) -> tuple[Operation, OperatorRule]:
    (layer,) = layers.layers
    (node,) = layer.nodes
    return layers.operation_of(node), layers.rule_of(node)


def check_split(layers: LayerGraph, model: Model, case: RuleCase, expected: Array, choose: IntegerChooser) -> None:
    """Check an operator rule for a random region, and for random parts of the node.

    Args:
        layers: The LayerGraph of the model, with one layer.
        model: A model with one node.
        case: The case, for its inputs and exactness.
        expected: Output of the whole node.
        choose: Source of the random integers.
    """
    (layer,) = layers.layers
    check_piece(layers, tuple(choose_interval(choose, extent) for extent in output_shape(layers, layer)))
    parts = choose_parts(choose, layers)
    for part in parts:
        if part.region and part.reduce:
            check_piece(layers, part.region, part.reduce)
    output = np.asarray(run_split(model, layers, parts, case.inputs))
    require(output.dtype == expected.dtype, f"the parts compute {output.dtype}, the whole node {expected.dtype}")
    rtol, atol = (1e-5, 1e-6) if case.is_inexact else (0, 0)
    require(output.shape == expected.shape, f"the parts compute the shape {output.shape}, the node {expected.shape}")
    differing = np.argwhere(~np.isclose(output, expected, rtol, atol, equal_nan=True))
    if len(differing):
        first = tuple(int(i) for i in differing[0])
        places = f"{len(differing)} of {expected.size} elements differ, the first at {first}"
        values = f"{output[first]} instead of {expected[first]}"
        raise AssertionError(f"the parts compute other values than the whole node: {places}: {values}")


def check_piece(layers: LayerGraph, region: Region, reduce: Interval | None = None) -> None:
    """Check the rule's Piece (computed output region and needed input regions) for `region`.

    It must cover `region` and read only existing elements. `reduce` is the range of input channels of a partial sum.
    """
    operation, rule = _get_operation_and_rule(layers)
    place = f"region {region}{f', input channels {reduce}' if reduce else ''}"
    piece = rule.piece(operation, region, reduce)
    error = describe_piece_error(operation, region, piece)
    require(not error, f"{place}: {error}")
    needs = [() if need is None else region_shape(need) for need in piece.needs]
    error = describe_op_cost_error(rule.cost(operation, region_shape(piece.out), needs))
    require(not error, f"{place}: {error}")
    own_out = rule.piece(operation, piece.out, reduce).out
    require(
        own_out == piece.out,
        f"{place}: out is {piece.out}, but the piece of region {piece.out} has out {own_out}: make both equal",
    )
    full_output = full_region(operation.out_shape)
    is_same = piece.out in (region, full_output)
    require(is_same or not rule.is_elementwise, f"{place}: out is {piece.out}, although the rule is element-wise")
    for i, (need, whole) in enumerate(zip(piece.needs, operation.full_needs(), strict=True)):
        is_same = not rule.is_elementwise or whole != full_output or need in (None, piece.out)
        require(is_same, f"{place}: needs[{i}] is {need}, not out, {piece.out}, although the rule is element-wise")
