"""The published figures of CoopAI and of Stahl et al. next to those that `coopai` and `stahl` compute.

Nothing is run on devices. All rows are reproduced, except YOLOv2 of CoopAI.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from support.layer_graphs import alexnet, formed, stack, vgg16
from support.stahl_paper import chained, communication, memory, table_2, variant

from dicompiler.cost.op_counts import count_macs
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.networks import build
from dicompiler_strategies.papers.coopai import CoopaiResult, best_k, build_chain, minimise_latency
from dicompiler_strategies.papers.stahl import PartitionScheme, build_ilp_layers, solve_ilp

F, G = 13.6e9, 100e6  # F: FLOP/s of a Raspberry Pi 4; G: bit/s of the gateway.
COUNTS = range(1, 11)
# From the paper on CoopAI (table II, section V-A), by network: the number of blocks for k = 1 … 10 devices; the best k
# of the methods MLS and SLS; the time in % that MLS saves compared to SLS and to one device.
COOPAI = {
    "AlexNet": ((1, 5, 4, 4, 4, 4, 4, 4, 4, 4), (2, 2), (4.91, 18.43)),
    "VGG16": ((1, 8, 7, 6, 5, 4, 4, 4, 4, 4), (7, 3), (31.49, 60.46)),
    "VGG19": ((1, 11, 9, 8, 5, 4, 5, 5, 4, 4), (7, 3), (28.53, 58.94)),
    "YOLOv2": ((1, 12, 10, 9, 8, 7, 7, 7, 5, 5), (6, 4), (17.75, 55.91)),
}
# Published by Stahl et al. TABLE_2: MB that six devices send, by variant. MEMORY (table 1, last column): MB of weights
# per device, by number of devices.
TABLE_2 = {"LOP": 78.1, "FUSE4": 82.2, "FUSE3": 75.5, "FUSE2": 68.1, "FUSE1": 68.1}
MEMORY = {1: 204, 3: 68, 5: 41, 6: 34, 7: 29}
MB = 1e6 / 4  # Number of 32-bit elements in a megabyte.


def vgg19() -> LayerGraph:
    """Return the layer graph of VGG19 without activation functions."""
    rows: list[tuple[object, ...]] = []
    for channels, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        rows += [("conv", channels, 3, 1, 1, 1)] * count + [("pool", 2, 2, 0)]
    return stack((1, 3, 224, 224), [*rows, ("flatten",), ("fc", 4096), ("fc", 4096), ("fc", 1000)])


def line(name: str, published: Iterable[object], recomputed: Iterable[object]) -> str:
    """Return a line of text with a name, the published and the recomputed values, and "=" if they are equal."""
    both = " ".join(map(str, published)), " ".join(map(str, recomputed))
    return f"{name:<34} {both[0]:<28} {both[1]:<28} {'=' if both[0] == both[1] else ''}"


def longest_path(layers: LayerGraph) -> list[Layer]:
    """Return the path from an input to an output with the most layers that multiply; the first of equal ones."""
    length: dict[str, int] = {}
    before: dict[str, Layer | None] = {}
    for layer in layers.layers:
        producers = [layers.producer[name] for name in layer.inputs if name in layers.producer]
        best = max(producers, key=lambda producer: length[producer.name], default=None)
        before[layer.name] = best
        multiplies = 0 if layer.whole_reason else int(count_macs(layers, layer) > 0)
        length[layer.name] = multiplies + (length[best.name] if best else 0)
    ends = [layers.producer[name] for name in layers.outputs if name in layers.producer]
    last: Layer | None = max(ends, key=lambda layer: length[layer.name], default=None)
    path = []
    while last is not None:
        path.append(last)
        last = before[last.name]
    return path[::-1]


def coopai(name: str, graph: LayerGraph) -> None:
    """Print the published and the recomputed figures of CoopAI for one network.

    YOLOv2 has a branch. It is represented by its longest path, because CoopAI needs a chain of layers.
    """
    layers = build_chain(graph, longest_path(graph))
    many = [minimise_latency(layers, F, G, k) for k in COUNTS]
    single = [minimise_latency(layers, F, G, k, single=True) for k in COUNTS]
    blocks, counts, saved = COOPAI[name]
    best, base = best_k(many), best_k(single)
    print(line(f"{name}: blocks, k = 1…10", blocks, (len(result.blocks) for result in many)))
    print(line(f"{name}: best k of MLS, SLS", counts, (best.k, base.k)))
    percentages = (_saved(best, base), _saved(best, many[0]))
    print(line(f"{name}: % saved to SLS, one device", saved, (f"{value:.2f}" for value in percentages)))
    print(line(f"{name}: seconds, k = 1, 2, 4, 7", (), (f"{many[k - 1].seconds:.4f}" for k in (1, 2, 4, 7))))


def _saved(ours: CoopaiResult, other: CoopaiResult) -> float:
    return 100 * (1 - ours.seconds / other.seconds)


def stahl(yolo: LayerGraph) -> None:
    """Print the figures of Stahl et al.: their example, table 2, and the memory column of table 1."""
    example = chained((4, 8, 16, 4, 4))
    rows: Sequence[tuple[str, int, tuple[PartitionScheme, ...]]] = (
        ("LOP", 34, ("o", "o", "o", "o")),
        ("LIP", 48, ("i", "i", "i", "i")),
        ("two pairs fused", 40, ("f", "s", "f", "s")),
        ("optimum, as printed", 22, solve_ilp(example, 2).schemes),
    )
    for name, published, schemes in rows:
        print(line(f"example: {name}", (published,), (f"{communication(example, schemes, 2):.0f}",)))
    print(line("example: optimum, reuse in FUSE", (22,), (f"{solve_ilp(example, 2, reuse=True).communication:.0f}",)))
    print(line("example: memory, N = 1, 2", (240, 120), (f"{memory(example, count):.0f}" for count in (1, 2))))
    for name, published_mb in TABLE_2.items():
        found = communication(table_2(), variant(name), 6) / MB
        print(line(f"table 2: {name}, MB", (published_mb,), (f"{found:.3f}",)))
    for name, lip in (("optimum without LIP", False), ("optimum of the ILP", True)):
        print(line(f"table 2: {name}, MB", (68.1,), (f"{solve_ilp(table_2(), 6, lip=lip).communication / MB:.3f}",)))
    weights = build_ilp_layers(yolo)
    print(
        line("table 1: MB of weights, each of N", MEMORY.values(), (f"{memory(weights, n) / MB:.1f}" for n in MEMORY))
    )


def main() -> None:
    """Print the figures of both papers. This takes some seconds, most of them for the weights of YOLOv2."""
    yolo = formed(build("yolov2"))
    print(line("", ("published",), ("recomputed",)))
    for name, graph in (("AlexNet", alexnet(1)), ("VGG16", vgg16()), ("VGG19", vgg19()), ("YOLOv2", yolo)):
        coopai(name, graph)
    stahl(yolo)


if __name__ == "__main__":
    main()
