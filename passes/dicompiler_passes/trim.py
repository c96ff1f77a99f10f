"""The pass `trim`: remove the computation of tensor elements that nothing reads.

Model + LayerGraph ──bounds inference from the outputs──► read regions ──partition on one device──► Model + LayerGraph

Bounds inference finds the region of each tensor that its readers need.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from dicompiler.plugin_api import (
    DicompilerError,
    Layer,
    LayerGraph,
    LayerShare,
    Model,
    Part,
    Pass,
    PipelineState,
    Plan,
    Region,
    registry,
)
from dicompiler.plugin_api.regions import (
    align_region,
    bounding_region,
    cuttable_axes,
    full_region,
    is_empty,
    make_share_task,
    output_shape,
    partition,
    remove_annotations,
)
from dicompiler_passes.form_layers import form_layers

SINGLE_DEVICE = "d0"


@dataclass(frozen=True)
class Trim(Pass):
    """Reduce every layer to the bounding box of its output elements that are read.

    MatMul (128 rows) → Gather (row 0)   ⇒  Slice (row 0) → MatMul (1 row) → Gather
    """

    name: ClassVar[str] = "trim"
    requires: ClassVar[tuple[str, ...]] = ("layers",)

    def run(self, state: PipelineState) -> PipelineState:
        """Replace the model and its layers by trimmed ones, and keep the untrimmed model as `reference`.

        Raises:
            DicompilerError: The state has a plan. Its regions belong to the untrimmed layers.
        """
        layers = state.layers
        assert layers is not None
        all_nodes = frozenset(node.name for layer in layers.layers for node in layer.nodes)
        read_regions = find_read_regions(replace(layers, rule_bound_nodes=all_nodes))
        if not any(read_regions.values()):
            return state
        if state.plan is not None:
            raise DicompilerError("trim: the layers have a plan already: run trim before the passes that split layers")
        trimmed = _make_trimmed_model(state, layers, read_regions)
        reference = state.reference or state.model
        return replace(state, model=trimmed, layers=_form_trimmed_layers(trimmed, all_nodes), reference=reference)


def _make_trimmed_model(state: PipelineState, layers: LayerGraph, read_regions: Mapping[str, Region | None]) -> Model:
    """Return the model without the computation of elements that nothing reads.

    The result is a partition for one device, which computes only the read region of each layer.
    """
    cut = {layers.layer_by_name[name].output for name, region in read_regions.items() if region is not None}
    # By default, a node that computes its full output reads its whole inputs. A node that depends on a trimmed tensor
    # must instead read only the regions that its operator rule returns. For other nodes, that would add useless Slices.
    rule_bound = frozenset(name for layer in layers.layers for name in _reading_nodes(layer, cut))
    parts = {name: (Part(SINGLE_DEVICE, region),) for name, region in read_regions.items()}
    trimmed_state = replace(
        state,
        layers=replace(layers, rule_bound_nodes=rule_bound),
        platform=None,
        plan=Plan(parts, (SINGLE_DEVICE,), (SINGLE_DEVICE,)),
    )
    return remove_annotations(partition(trimmed_state, quiet=True, check_narrowing=False).model)


def _form_trimmed_layers(model: Model, old_nodes: Collection[str]) -> LayerGraph:
    """Return the layers of a trimmed model. `old_nodes` are the names of the nodes before trimming."""
    # By default, a node that computes its full output reads its whole inputs. For a Slice that trimming has added, a
    # device would then receive the whole tensor. In `rule_bound_nodes`, it reads only the region that it selects.
    formed = form_layers(model, registry().operator_rules)
    slices = (node.name for layer in formed.layers for node in layer.nodes if node.op == "Slice")
    return replace(formed, rule_bound_nodes=frozenset(slices).difference(old_nodes))


def _reading_nodes(layer: Layer, cut: Collection[str]) -> Iterator[str]:
    """Yield the names of the layer's nodes that depend on a tensor in `cut`, directly or through other nodes."""
    names = set(cut)
    for node in layer.nodes:
        if not names.isdisjoint(node.inputs):
            yield node.name
            names.update(filter(None, node.outputs))


def find_read_regions(layers: LayerGraph) -> dict[str, Region | None]:
    """Return the bounding box of the read elements of each layer's output; None if all are read.

    Returns:
        Regions by layer name, in layer order.
    """
    boxes = {name: full_region(layers.tensors[name].shape or ()) for name in layers.outputs}
    read_regions: dict[str, Region | None] = {}
    for layer in reversed(layers.layers):
        region = None
        if not layer.whole_reason and layer.output in boxes and not is_empty(boxes[layer.output]):
            whole, free_axes = full_region(output_shape(layers, layer)), cuttable_axes(layers, layer)
            read_box = tuple(box if axis in free_axes else whole[axis] for axis, box in enumerate(boxes[layer.output]))
            region = align_region(layers, layer, read_box)
            region = None if region == whole else region
        read_regions[layer.name] = region
        for key, need in make_share_task(layers, layer, LayerShare(region)).needs.items():
            boxes[key.tensor] = bounding_region((boxes.get(key.tensor), need)) or need
    return {layer.name: read_regions[layer.name] for layer in layers.layers}
