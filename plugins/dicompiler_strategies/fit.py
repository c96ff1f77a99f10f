"""The strategy `fit`: the fewest boards, or the fewest tiles, with which a network fits RAM and flash.

The search estimates the memory that TFLite-micro needs. If the problem has a target, the target measures each plan that
the search finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from dicompiler.plugin_api import DicompilerError, Host, Plan, Platform, Problem, Strategy
from dicompiler.plugin_api.costs import DeviceFootprint
from dicompiler.plugin_api.search import check_measured_memory
from dicompiler.plugin_api.utilities import format_bytes
from dicompiler_strategies.fit_stages import FitBoard, StageEstimates

MAX_MEASURED_PLANS = 6
"""Largest number of plans that the target measures for each number of boards and of tiles.

If a plan does not fit, the next one is searched with less RAM.
"""
EXTRA_BYTES = 256
"""Bytes of RAM that are reserved on each board after a plan did not fit, in addition to the missing bytes."""


@dataclass(frozen=True)
class Fit(Strategy):
    """The fewest boards, or on one board the largest tiles (computed one after another), that fit RAM and flash.

        conv1..conv5 in 4 fused tiles one after another, conv6 … whole     (one board, as in MCUNetV2)

    Layers with too large tensors are computed in fused height tiles. A layer with too many weights is split by output
    channels. Among plans with equally many boards and tiles, the one with the fewest multiplications is used. The
    strategy is made for targets that measure memory (tflm).
    """

    name: ClassVar[str] = "fit"

    fewest_boards: bool = field(
        default=False, metadata={"help": "prefer fewer boards, even if a board then computes more tiles"}
    )
    tiles: int = field(default=64, metadata={"help": "largest number of tiles that a board computes one after another"})

    def __post_init__(self) -> None:
        if not 1 <= self.tiles <= 1024:
            raise ValueError(f"tiles must be between 1 and 1024, not {self.tiles}")

    def plan(self, problem: Problem) -> Plan:
        """Return the first plan that fits RAM and flash; plans with few tiles and few boards are tried first.

        Raises:
            DicompilerError: Nothing fits. The error says how many bytes are missing and which layer needs the most.
        """
        boards = _list_boards(problem.platform)
        stages = StageEstimates(problem.layers, getattr(problem.target, "margin", 0.0))
        refused: list[DicompilerError] = []
        for used, tiles in self._list_search_orders(len(boards)):
            remaining = list(boards[:used])
            for _ in range(MAX_MEASURED_PLANS):
                sequence = stages.find_stages(remaining, tiles)
                if sequence is None:
                    break
                plan = problem.build_plan(stages.stage_parts(sequence))
                missing = _missing_bytes(problem, plan, refused)
                if not missing:
                    return plan
                remaining = [replace(board, ram=board.ram - missing.get(board.device, 0)) for board in remaining]
        raise self._failure_error(problem, boards, stages, refused)

    def _failure_error(
        self, problem: Problem, boards: Sequence[FitBoard], stages: StageEstimates, refused: Sequence[DicompilerError]
    ) -> DicompilerError:
        count = f"{len(boards)} board{'s' if len(boards) > 1 else ''} of {problem.platform.name}"
        weights, flash = stages.network_estimate.flash, sum(board.flash for board in boards)
        ram, layer = stages.least_ram(len(boards) * self.tiles)
        limit = min(board.ram for board in boards)
        if flash and weights > flash:
            cause = (
                f"the models need about {format_bytes(weights)} of flash, {format_bytes(weights - flash)} more than "
                f"all boards have ({format_bytes(flash)}), most of it for layer {stages.heaviest_layer.name!r}"
            )
        elif ram > limit:
            cause = (
                f"layer {layer.name!r} needs about {format_bytes(ram)} of RAM in the smallest tiles, "
                f"{format_bytes(ram - limit)} more than a board has ({format_bytes(limit)})"
            )
        elif refused:
            cause = str(refused[-1]).removeprefix("plan: ")
        else:
            cause = (
                f"no sequence of tiles was found that fits; layer {layer.name!r} alone needs about "
                f"{format_bytes(ram)} of {format_bytes(limit)} of RAM"
            )
        remedies = ["larger boards"]
        if not _is_quantized(problem):
            remedies.append("int8 weights and tensors (--quantize-samples)")
        if not (flash and weights > flash):
            remedies.append("smaller inputs")
        return DicompilerError(f"fit: nothing fits {count}: {cause}: use {' or '.join(remedies)}")

    def _list_search_orders(self, boards: int) -> Iterator[tuple[int, int]]:
        """Yield pairs (number of boards, largest number of tiles per board) in the order in which plans are tried."""
        if self.fewest_boards or boards == 1:
            yield from ((count, each) for count in range(1, boards + 1) for each in range(1, self.tiles + 1))
            return
        yield from ((count, 1) for count in range(1, boards + 1))
        for each in (2**i for i in range(1, self.tiles.bit_length())):
            yield from ((count, each) for count in range(1, boards + 1))


def _is_quantized(problem: Problem) -> bool:
    operators = {node.op for layer in problem.layers.layers for node in layer.nodes}
    return bool(operators & {"DequantizeLinear", "QLinearConv", "QLinearMatMul"})


def _list_boards(platform: Platform) -> tuple[FitBoard, ...]:
    """Return a board for each host: its first computing device, with the host's memory."""
    first: dict[str, str] = {}
    for device in platform.computing_devices:
        first.setdefault(device.host, device.name)
    hosts: Sequence[Host] = [platform.host(name) for name in first]
    return tuple(FitBoard(first[host.name], host.ram, host.flash) for host in hosts)


def _missing_bytes(problem: Problem, plan: Plan, refused: list[DicompilerError]) -> dict[str, int]:
    """Return by how many bytes the RAM of each device must be lowered in the search; empty if the plan fits.

    The target measures the plan's RAM and flash. If the plan does not fit, the error is appended to `refused`.
    """
    target = problem.target
    if target is None or problem.model is None:
        return {}
    program = problem.draft_program(plan).program
    assert program is not None
    occupied = target.device_footprints(program)
    try:
        check_measured_memory(problem.platform, occupied)
    except DicompilerError as error:
        refused.append(error)
        return {
            entry.device: max(EXTRA_BYTES, _excess_bytes(problem.platform, entry) + EXTRA_BYTES) for entry in occupied
        }
    return {}


def _excess_bytes(platform: Platform, entry: DeviceFootprint) -> int:
    host = platform.host(platform.host_of[entry.device])
    return entry.ram - host.ram if host.flash else entry.ram + entry.flash - host.memory
