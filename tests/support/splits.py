"""The kinds of split, applied to any network by the annotating passes, for the matrix of networks and kinds.

Every layer that allows a kind is cut. The other layers are assigned whole to the devices in turn, so that tensors are
sent between devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from numpy.typing import NDArray

from dicompiler.base.errors import DicompilerError
from dicompiler.base.option_specs import Spec
from dicompiler.driver.prepare import prepare
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import TensorSpec
from dicompiler.partition.bounds_inference import cuttable_axes, output_shape, reduction_length
from dicompiler.partition.tiling import AxisLabel, is_read_only_within, named_axes, split_axis
from dicompiler.plugin.pass_manager import PassManager, make_pipeline
from dicompiler.plugin.registry import registry
from dicompiler.testing.plans import verify_plan
from dicompiler.verify.comparison import Check, random_inputs
from dicompiler.verify.executor import run_model

KINDS = ("pipeline", "height", "grid", "lop", "lip", "fuse")
FUSED = ("fused-height", "fused-grid")
ALL = (*KINDS, *FUSED)
DEVICES = 4
_MERGES = ("one", "scatter", "all")
_WEIGHTED = ("Conv", "Gemm", "MatMul")


@dataclass(frozen=True)
class Split:
    """One way to split a network.

    Attributes:
        kind: Kind of split, one of ALL.
        pipeline: The passes that annotate the layers.
        cut: Names of the layers that are cut.
        number: Index of the set of fused layers: 0 is the largest set, later ones are random.
    """

    kind: str
    pipeline: tuple[Spec, ...]
    cut: tuple[str, ...]
    number: int = 0


def layers_of(compilation: PipelineState) -> LayerGraph:
    assert compilation.layers is not None
    return compilation.layers


def cluster(devices: int = DEVICES) -> Platform:
    """Return this number of devices, each on a separate host."""
    return Platform.load(f"rpi4x{devices}")


def rows_and_columns(devices: int = DEVICES) -> tuple[int, int]:
    """Return the rows and columns of the grid of tiles: two rows for four or more devices, else one row."""
    return (2, devices // 2) if devices > 3 else (1, devices)


@dataclass(frozen=True)
class Case:
    """A network that is to be split.

    Attributes:
        compilation: The prepared network and its cluster.
        inputs: Random inputs of the network.
        reference: Outputs of the whole network for these inputs.
    """

    compilation: PipelineState
    inputs: dict[str, NDArray[Any]]
    reference: dict[str, Any]

    @classmethod
    def of(cls, source: Any, devices: int = DEVICES) -> Case:
        """Return the case of a model (or file) with its weights, on this number of devices."""
        compilation = replace(prepare(Model.load(source)), platform=cluster(devices))
        model, layers = compilation.model, layers_of(compilation)
        values = [TensorSpec(name, layers.tensors[name].dtype, layers.tensors[name].shape) for name in layers.inputs]
        inputs = random_inputs(values)
        return cls(compilation, inputs, run_model(model, inputs))

    @property
    def layers(self) -> LayerGraph:
        return layers_of(self.compilation)

    def plan(self, split: Split) -> Plan:
        """Return the plan that the passes of `split` make, parsed from text as in `dicompiler opt -p`."""
        plan = PassManager(make_pipeline(",".join(map(str, split.pipeline)))).run(self.compilation).plan
        assert plan is not None
        return plan

    def with_plan(self, plan: Plan) -> PipelineState:
        """Return the prepared network with this plan."""
        return replace(self.compilation, plan=plan)

    def verify(self, split: Split, seeds: Sequence[int] | None = None) -> tuple[Check, Check, Check]:
        """Return three checks of a split: exact outputs, outputs with real weights, and sent bytes.

        The exact check compares check models (the network with integer weights) of all seeds bit by bit.
        """
        exact, *outputs, sent = verify_plan(self.compilation, self.plan(split), self.inputs, self.reference, seeds)
        return exact, next((check for check in outputs if not check.passed), outputs[0]), sent


def splits(
    layers: LayerGraph, kinds: Sequence[str] = ALL, sets: int = 20, seed: int = 0, devices: int = DEVICES
) -> Iterator[Split]:
    """Yield the splits of these kinds, except for kinds that cut no layer of the network.

    For a fused kind, these are the split of the largest set of layers, and of up to `sets` random sets.
    """
    for kind in kinds:
        if kind in FUSED:
            yield from _fused_splits(layers, kind, sets, seed, devices)
            continue
        specs, cut = MAKERS[kind](layers, devices)
        if cut:
            yield Split(kind, (*specs, *_rest(layers, cut, devices)), tuple(cut))


def _rest(layers: LayerGraph, cut: Iterable[str], count: int) -> list[Spec]:
    """Return passes that assign the layers that are not in `cut` to `count` devices in turn."""
    taken = set(cut)
    left = [layer.name for layer in layers.layers if layer.name not in taken]
    devices = [device.name for device in cluster(count).devices]
    dealt = [(device, left[i::count]) for i, device in enumerate(devices)]
    return [Spec.from_mapping("place", {"layers": tuple(names), "device": device}) for device, names in dealt if names]


def _pipeline(layers: LayerGraph, devices: int) -> tuple[list[Spec], list[str]]:
    """Return passes that assign consecutive whole layers to each device, with equal numbers of layers."""
    names = [layer.name for layer in layers.layers]
    bounds = [len(names) * i // devices for i in range(devices + 1)]
    specs = [
        Spec.from_mapping("place", {"layers": tuple(names[bounds[i] : bounds[i + 1]]), "device": device.name})
        for i, device in enumerate(cluster(devices).devices)
        if bounds[i] < bounds[i + 1]
    ]
    return specs, names


def pieces(layers: LayerGraph, layer: Layer, label: AxisLabel, most: int) -> int:
    """Return the largest number of parts, up to `most`, into which a layer can be cut along an axis.

    It is 1 if the layer cannot be cut.
    """
    axis = named_axes(layers).get(layer.output, {}).get(label)
    if layer.whole_reason or axis is None or axis not in cuttable_axes(layers, layer):
        return 1
    counts = range(min(most, output_shape(layers, layer)[axis]), 1, -1)
    fits = (n for n in counts if all(start < stop for start, stop in split_axis(layers, layer, axis, [1.0] * n)))
    return next(fits, 1)


def _by_count(name: str, counts: dict[str, int], devices: int) -> tuple[list[Spec], list[str]]:
    """Return one pass for each number of parts, and the names of the layers that are cut."""
    specs = [
        Spec.from_mapping(name, {"layers": tuple(n for n, own in counts.items() if own == count), "parts": str(count)})
        for count in range(devices, 1, -1)
        if count in counts.values()
    ]
    return specs, [name for name, count in counts.items() if count > 1]


def _along(name: str, label: AxisLabel, layers: LayerGraph, devices: int) -> tuple[list[Spec], list[str]]:
    return _by_count(name, {layer.name: pieces(layers, layer, label, devices) for layer in layers.layers}, devices)


def _grid(layers: LayerGraph, devices: int) -> tuple[list[Spec], list[str]]:
    grid = partial(allows, layers, "fused-grid")
    cut = [layer.name for layer in layers.layers if grid(layer) and in_grid(layers, layer, devices)]
    return [Spec.from_mapping("tile-grid", {"layers": tuple(cut), **_grid_options(devices)})], cut


def _grid_options(devices: int) -> dict[str, str]:
    rows, columns = rows_and_columns(devices)
    return {"rows": str(rows), "columns": str(columns)}


def in_grid(layers: LayerGraph, layer: Layer, devices: int = DEVICES) -> bool:
    """Return True if the layer can be cut into all tiles of the grid."""
    rows, columns = rows_and_columns(devices)
    return pieces(layers, layer, "height", rows) == rows and pieces(layers, layer, "width", columns) == columns


def _lip(layers: LayerGraph, devices: int) -> tuple[list[Spec], list[str]]:
    """Split layers by input channels; the layers use the three ways to merge partial sums in turn.

    The sum is computed on one device, in slices of channels on all devices, or completely on all devices.
    """
    chosen = [layer for layer in layers.layers if (reduction_length(layers, layer) or 0) >= devices]
    specs = []
    for merge in _MERGES:
        names = tuple(layer.name for k, layer in enumerate(chosen) if _merge(layers, layer, k, devices) == merge)
        if names:
            specs.append(Spec.from_mapping("lip", {"layers": names, "parts": str(devices), "merge": merge}))
    return specs, [layer.name for layer in chosen]


def _merge(layers: LayerGraph, layer: Layer, index: int, devices: int) -> str:
    merge = _MERGES[index % len(_MERGES)]
    return "one" if merge == "scatter" and pieces(layers, layer, "channel", devices) < devices else merge


def _fuse(layers: LayerGraph, devices: int) -> tuple[list[Spec], list[str]]:
    """Fuse each chain from a layer with weights to the next layer that sums over input channels."""
    specs: list[Spec] = []
    cut: list[str] = []
    for layer in layers.layers:
        chain = _chain(layers, layer, devices)
        if chain and layer.name not in cut:
            specs.append(Spec.from_mapping("fuse", {"layers": chain, "parts": str(devices)}))
            cut.extend(chain)
    return specs, cut


def _chain(layers: LayerGraph, first: Layer, devices: int) -> tuple[str, ...]:
    """Return the names of the layers from `first` to the one with which it can be fused; empty if there is none."""
    if first.nodes[first.anchor].op not in _WEIGHTED or pieces(layers, first, "channel", devices) < devices:
        return ()
    chain = [first]
    while True:
        readers = layers.consumers.get(chain[-1].output, ())
        if len(readers) != 1 or chain[-1].output in layers.outputs or len(readers[0].inputs) != 1:
            return ()
        chain.append(readers[0])
        if readers[0].whole_reason:
            return ()
        if reduction_length(layers, readers[0]) is not None:
            names = tuple(layer.name for layer in chain)
            spec = Spec.from_mapping("fuse", {"layers": names, "parts": str(devices)})
            return names if _accepted(layers, spec, devices) else ()


def _accepted(layers: LayerGraph, spec: Spec, devices: int) -> bool:
    """Return True if the pass accepts its layers.

    Only the pass knows whether the output channels form one range of input channels of the last layer.
    """
    annotation = registry().make("passes", spec)
    try:
        annotation.annotate(
            layers, [layers.layer_by_name[n] for n in annotation.layers], [f"d{i}" for i in range(devices)]
        )
    except DicompilerError:
        return False
    return True


MAKERS: dict[str, Callable[[LayerGraph, int], tuple[list[Spec], list[str]]]] = {
    "pipeline": _pipeline,
    "height": partial(_along, "tile-height", "height"),
    "grid": _grid,
    "lop": partial(_along, "lop", "channel"),
    "lip": _lip,
    "fuse": _fuse,
}


def allows(layers: LayerGraph, kind: str, layer: Layer) -> bool:
    """Return True if the layer can be inside a fused tile of this kind."""
    labels: tuple[AxisLabel, ...] = ("height",) if kind == "fused-height" else ("height", "width")
    own = named_axes(layers).get(layer.output, {})
    return not layer.whole_reason and all(own.get(label) in cuttable_axes(layers, layer) for label in labels)


def exits(layers: LayerGraph, kind: str, devices: int = DEVICES) -> dict[str, tuple[Layer, ...]]:
    """Map each layer that can be tiled to the largest set of two or more layers of which it is the only exit."""
    allowed = partial(allows, layers, kind)
    found = {}
    for layer in layers.layers:
        grid = kind == "fused-grid"
        enough = in_grid(layers, layer, devices) if grid else pieces(layers, layer, "height", 2) > 1
        chosen = largest_set(layers, layer, allowed) if enough and allowed(layer) else ()
        if len(chosen) > 1:
            found[layer.name] = chosen
    return found


def largest_set(layers: LayerGraph, last: Layer, allowed: Callable[[Layer], bool]) -> tuple[Layer, ...]:
    """Return the largest set, in layer order, whose only exit is `last` and whose other layers are `allowed`."""
    names = {last.name}
    for layer in reversed(layers.layers):
        if allowed(layer) and is_read_only_within(layers, layer, names):
            names.add(layer.name)
    return tuple(layer for layer in layers.layers if layer.name in names)


def branches(layers: LayerGraph, chosen: Sequence[Layer]) -> bool:
    """Return True if two or more layers of the set read the output of the same layer in the set."""
    names = {layer.name for layer in chosen}
    return any(sum(reader.name in names for reader in layers.consumers.get(layer.output, ())) > 1 for layer in chosen)


def random_set(rng: Random, layers: LayerGraph, last: Layer, largest: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return a random subset of `largest` whose only exit is `last`."""
    names = {last.name}
    for _ in range(rng.randrange(1, len(largest))):
        ready = [layer for layer in largest if layer.name not in names and is_read_only_within(layers, layer, names)]
        names.add(rng.choice(ready).name)
    return tuple(layer for layer in largest if layer.name in names)


def random_sets(
    layers: LayerGraph, kind: str, count: int, seed: int, devices: int = DEVICES
) -> list[tuple[Layer, ...]]:
    """Return up to `count` different random sets of layers with one exit.

    If the network has tileable sets with branches inside, only sets with branches are returned.
    """
    rng, found = Random(seed), exits(layers, kind, devices)
    forked = {name: largest for name, largest in found.items() if branches(layers, largest)}
    names = sorted(forked or found)
    sets: dict[tuple[str, ...], tuple[Layer, ...]] = {}
    for _ in range(50 * count if names else 0):
        if len(sets) == count:
            break
        name = rng.choice(names)
        chosen = random_set(rng, layers, layers.layer_by_name[name], found[name])
        if not forked or branches(layers, chosen):
            sets[tuple(layer.name for layer in chosen)] = chosen
    return list(sets.values())


def _fused_splits(layers: LayerGraph, kind: str, sets: int, seed: int, devices: int) -> Iterator[Split]:
    found = exits(layers, kind, devices)
    if not found:
        return
    chosen = [max(found.values(), key=len), *random_sets(layers, kind, sets, seed, devices)]
    for number, own in enumerate(chosen):
        names = tuple(layer.name for layer in own)
        options: dict[str, str | tuple[str, ...]] = {"layers": names, **_grid_options(devices)}
        if kind == "fused-height":
            last = next(layer for layer in own if not is_read_only_within(layers, layer, names))
            options = {"layers": names, "parts": str(pieces(layers, last, "height", devices))}
        yield Split(kind, (Spec.from_mapping("fuse-tiles", options), *_rest(layers, names, devices)), names, number)
