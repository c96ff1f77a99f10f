"""Check of operator rules: a node that is computed in random parts must have the result of the whole node.

Compiling checks the rules of third parties in this way for some nodes of the model. Tests prove the built-in rules.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any, Protocol

import onnx
from numpy.typing import NDArray
from onnx import helper

from dicompiler.base.errors import DicompilerError, PluginError
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.operator_rule import Node
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.regions import Interval, Region, full_region, region_shape, volume, with_interval
from dicompiler.partition.bounds_inference import cuttable_axes, output_shape, reduction_length
from dicompiler.partition.segmentation import build_program
from dicompiler.plugin.entry_points import PLUGINS_VARIABLE
from dicompiler.plugin.plugin_wrappers import describe_rule_plugin
from dicompiler.plugin.registry import registry
from dicompiler.verify.comparison import compare_value
from dicompiler.verify.executor import ProgramExecutor, run_model
from dicompiler.verify.run_inputs import prepare_inputs
from dicompiler.verify.tolerances import output_tolerances

log = logging.getLogger("dicompiler")

SPLITS_PER_NODE = 3
"""Number of random splits with which each chosen node is checked."""

MAX_CHECK_WORK = 3 * 10**8
"""Maximum work of all checks of a compilation, in FLOP, which takes a fraction of a second."""

FLOP_PER_ELEMENT = 10
"""Work of drawing and copying one element of an input or output, in FLOP."""

EXTRA_TOLERANCE = 1e-3
"""Share of max|reference| by which parts may differ from the whole node, in addition to the usual tolerances.

Only `verify` judges rounding. Compiling must not refuse a correct rule, and wrong rules cause much larger differences.
"""


class IntegerChooser(Protocol):
    """A function that returns an integer from `low` to `high`, both included, such as `Random(seed).randint`."""

    def __call__(self, low: int, high: int, /) -> int: ...


def check_plugin_rules(model: Model, layers: LayerGraph) -> None:
    """Check the operator rules of third parties that a model uses, for a few small nodes with different attributes.

    Args:
        model: The model.
        layers: Its layers.

    Raises:
        PluginError: A rule computes other values than the whole node. The message names the plugin and the node.
    """
    work = 0
    for node in _nodes_to_check(layers):
        work += _work(layers, node) * SPLITS_PER_NODE
        if work > MAX_CHECK_WORK:
            log.info("not checking the operator rules of plugins for node %r and larger ones: run verify", node.name)
            return
        if error := _describe_rule_error(model, layers, node):
            rule = describe_rule_plugin(layers.rule_of(node))
            raise PluginError(
                f"{rule}, for node {node.name!r}: {error}: correct the rule, uninstall the plugin, or name the plugins "
                f"to load in {PLUGINS_VARIABLE}"
            )


def _nodes_to_check(layers: LayerGraph) -> list[Node]:
    """Return the nodes whose operator rules are checked, in ascending order of work.

    For each operator with a third-party rule and each combination of its attributes, only the node with the least work
    is checked. Nodes with random results, and nodes of layers that are never split, are not checked.
    """
    nodes = [
        node
        for layer in layers.layers
        for node in layer.nodes
        if describe_rule_plugin(layers.rule_of(node))
        and not layer.whole_reason
        and node.name not in layers.random_nodes
    ]
    nodes.sort(key=lambda node: _work(layers, node))
    smallest: dict[tuple[str, str, str], Node] = {}
    for node in nodes:
        smallest.setdefault((node.domain, node.op, repr(sorted(node.attributes.items()))), node)
    return list(smallest.values())


def _work(layers: LayerGraph, node: Node) -> int:
    """Return the work of running a node, in FLOP. It includes the inputs and outputs."""
    operation = layers.operation_of(node)
    regions = [region for region in operation.full_needs() if region is not None]
    needs = [() if region is None else region_shape(region) for region in operation.full_needs()]
    cost = layers.rule_of(node).cost(operation, operation.out_shape, needs)
    flops = 2 * cost.multiply_adds + cost.pool_flops + cost.other_flops
    return flops + FLOP_PER_ELEMENT * sum(map(volume, (*regions, full_region(operation.out_shape))))


def _describe_rule_error(model: Model, layers: LayerGraph, node: Node) -> str:
    """Return a description of the difference between a node and its random parts.

    The result is '' if there is no difference, or if the node cannot be run or split.
    """
    single = _single_node_model(model, layers, node)
    try:
        inputs = prepare_inputs(single)
        expected = run_model(single, inputs, optimization="none")
    except DicompilerError as error:
        log.info("not checking the operator rule of node %r: it cannot be run with random inputs: %s", node.name, error)
        return ""
    formed = form_layers(single)
    (layer,) = formed.layers
    if not cuttable_axes(formed, layer):
        return ""
    tolerance = output_tolerances(single).get(layer.output)
    for seed in range(SPLITS_PER_NODE):
        parts = choose_parts(Random(seed).randint, formed)
        try:
            output = run_split(single, formed, parts, inputs)
        except PluginError:
            raise
        except DicompilerError as error:
            return f"its parts cannot be computed: {error}"
        reference = expected[layer.output]
        check = compare_value(layer.output, reference, output, tolerance=tolerance, extra_tolerance=EXTRA_TOLERANCE)
        if not check.passed:
            return f"the parts compute other values than the whole node: {check.detail}"
    return ""


def _single_node_model(model: Model, layers: LayerGraph, node: Node) -> Model:
    """Return a model of one node, with its weights. Its other inputs become graph inputs."""
    (proto,) = (proto for proto in model.proto.graph.node if proto.name == node.name)
    used = set(filter(None, node.inputs))
    graph = onnx.GraphProto(name="node", node=[proto])
    graph.initializer.extend(tensor for tensor in model.proto.graph.initializer if tensor.name in used)
    graph.sparse_initializer.extend(
        tensor for tensor in model.proto.graph.sparse_initializer if tensor.values.name in used
    )
    computed = [name for name in dict.fromkeys(node.inputs) if name and not layers.tensors[name].is_constant]
    output = layers.cut_output(node)
    graph.input.extend(_describe_tensor(layers, name) for name in computed)
    graph.output.append(_describe_tensor(layers, output))
    others = [name for name in node.outputs if name and name != output]
    graph.value_info.extend(_describe_tensor(layers, name) for name in others)
    single = onnx.ModelProto(ir_version=model.proto.ir_version, opset_import=model.proto.opset_import, graph=graph)
    weights = {name: weight for name, weight in model.weights.items() if name in used}
    return Model(single, MappingProxyType(weights), model.display_name)


def _describe_tensor(layers: LayerGraph, name: str) -> onnx.ValueInfoProto:
    tensor = layers.tensors[name]
    return helper.make_tensor_value_info(name, tensor.dtype, tensor.shape)


def form_layers(model: Model) -> LayerGraph:
    """Return the layers into which the pass `form-layers` groups the nodes of a model."""
    layers = registry().make("passes", "form-layers").run(PipelineState(model)).layers
    assert layers is not None
    return layers  # type: ignore[no-any-return]


def choose_interval(choose: IntegerChooser, extent: int) -> Interval:
    """Return a random non-empty interval on an axis of length `extent`."""
    start = choose(0, extent - 1)
    return start, choose(start + 1, extent)


def _choose_cuts(choose: IntegerChooser, extent: int) -> list[Interval]:
    inner = sorted({choose(1, extent - 1) for _ in range(choose(0, 2))}) if extent > 1 else []
    return list(zip([0, *inner], [*inner, extent], strict=True))


def _surrounding_boxes(whole: Region, region: Region) -> Iterator[Region]:
    """Yield disjoint regions that cover all of `whole` except `region`."""
    for axis, ((low, high), (start, stop)) in enumerate(zip(whole, region, strict=True)):
        yield from (with_interval(whole, axis, (a, b)) for a, b in ((low, start), (stop, high)) if a < b)
        whole = with_interval(whole, axis, (start, stop))


def choose_parts(choose: IntegerChooser, layers: LayerGraph) -> list[Part]:
    """Return random parts of the only layer.

    Device a computes a random region, and devices b and c compute the regions around it. If the operator can compute
    partial sums, the list may begin with partial sums of all these regions.
    """
    # Device a is the sink. It uses all elements that it computes, and receives only the others. Each wrong element of
    # its region is therefore in the output, even if another device computes this element too.
    (layer,) = layers.layers
    allowed, shape = cuttable_axes(layers, layer), output_shape(layers, layer)
    region = tuple(
        choose_interval(choose, extent) if axis in allowed else (0, extent) for axis, extent in enumerate(shape)
    )
    boxes = _surrounding_boxes(full_region(shape), region)
    parts = [Part("a", region), *(Part("bc"[i % 2], box) for i, box in enumerate(boxes))]
    extent = reduction_length(layers, layer)
    if extent is None or choose(0, 1):
        return parts
    ranges = _choose_cuts(choose, extent)
    partial_sums = [(i, reduce, part) for i, reduce in enumerate(ranges) for part in parts]
    return [Part("abc"[i % 3], part.region, reduce) for i, reduce, part in partial_sums] + parts


def run_split(model: Model, layers: LayerGraph, parts: Sequence[Part], feed: Mapping[str, Any]) -> NDArray[Any]:
    """Return the output of a node that is computed in parts on several devices.

    Args:
        model: A model with one node.
        layers: The LayerGraph of the model, with one layer.
        parts: The parts of this layer.
        feed: The inputs of the model, by name.

    Raises:
        DicompilerError: The parts cannot be computed, or the number of sent bytes differs from the prediction.
    """
    (layer,) = layers.layers
    plan = Plan({layer.name: tuple(parts)}, source=("b",), sink=("a",))
    placed = registry().make("passes", "partition{quiet=true}").run(PipelineState(model, layers, plan=plan))
    placed.model.check("partition")
    program = build_program(placed.model, plan.devices)
    execution = ProgramExecutor(program, "none").run(feed)
    sent, predicted = sum(execution.sent), placed.routing.total_bytes
    if not sent == predicted == sum(transfer.value.nbytes for transfer in program.transfers):
        raise DicompilerError(f"{sent} bytes are sent, {predicted} were predicted")
    output: NDArray[Any] = execution.outputs[layer.output]
    return output
