"""Explores: a model and a platform go in, a Front comes out, and where wanted its files: JSON, CSV, plans, a picture.

model ──prepare──► layers ──strategy──► front ──► front.json, front.csv, front.svg, plans/000.json …
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from dicompiler.base.atomic_output import atomic_directory, check_output_directory
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.base.option_specs import Spec, parse_spec
from dicompiler.driver.prepare import DEFAULT_COST_MODEL, DEFAULT_TARGET, load_problem
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import dumps
from dicompiler.ir.platform import Platform
from dicompiler.plugin.registry import registry
from dicompiler.search.pareto_front import FRONT_OBJECTIVES, ParetoFront, ProgressCallback
from dicompiler.search.strategy import Strategy
from dicompiler.target.target_base import Target

FRONT_FORMAT = "dicompiler.front/1"
FRONT_FILE = "front.json"
DEFAULT_EXPLORATION_STRATEGY = "genetic"


def explore(
    model: str | Path | Model,
    platform: str | Path | Platform,
    strategy: str | Strategy = DEFAULT_EXPLORATION_STRATEGY,
    cost: str = DEFAULT_COST_MODEL,
    output: str | Path | None = None,
    shape: Sequence[str] = (),
    progress: ProgressCallback | None = None,
    wire_dtype: str | Mapping[str, str] | None = None,
    target: str | Target = DEFAULT_TARGET,
    state: str | Sequence[str] = "auto",
    executor: Executor | None = None,
) -> ParetoFront:
    """The front that `strategy` finds for `model` on `platform`; written to the directory `output` where it is given.

    strategy, cost: specs or a strategy itself; one that makes a single plan gives a front of one point. shape:
    "input=1x3x224x224" for dynamic dimensions. tell: called with what is being done. wire, target, state, executor: as
    for `compile`.
    Raises DicompilerError for what cannot be explored, UsageError for unknown names; nothing is written then.
    """
    explorer: Strategy = registry().resolve("strategies", strategy)
    if output is not None:
        check_output_directory(Path(output), FRONT_FILE, "front")  # before the work, and in the end once more
    problem = load_problem(model, platform, shape, cost=cost, wire_dtype=wire_dtype, target=target, state=state)
    problem = replace(problem, executor=executor)
    assert problem.model is not None
    front = _drop_unknown_energy(_with_network_digest(explorer.front(problem, progress), problem.model.digest()))
    if output is not None:
        write_front(front, problem.platform, Path(output))
    return front


def override_options(text: str, options: Mapping[str, str | tuple[str, ...]]) -> str:
    """The spec `text` with these options in place of its own: `spec("genetic{seed=1}", {"seed": "2"})`."""
    given = parse_spec(text, "strategy")
    return str(Spec.from_mapping(given.name, {**dict(given.options), **options}))


def _with_network_digest(front: ParetoFront, digest: str) -> ParetoFront:
    """The plans with the digest of the network that they were made for."""
    points = tuple(replace(point, plan=replace(point.plan, model_digest=digest)) for point in front.points)
    return replace(front, points=points)


def _drop_unknown_energy(front: ParetoFront) -> ParetoFront:
    """Without energies where nothing takes any, because the platform gives no powers. UsageError where none is left."""

    def known(name: str) -> bool:
        return FRONT_OBJECTIVES[name][0] != "J" or any(point.objectives[name] for point in front.points)

    names = tuple(filter(known, front.objectives))
    if not names:
        raise UsageError("explore: the platform gives no powers, so that nothing takes energy: choose other objectives")
    return replace(front, objectives=names)


def write_front(front: ParetoFront, platform: Platform, output: Path) -> None:
    """Writes the directory `output`: FILE, front.csv, front.svg and the plan of each point; of the same front the same
    bytes. DicompilerError where something else is there already."""
    with atomic_directory(output, FRONT_FILE, "front") as stage:
        (stage / "plans").mkdir()
        for i, point in enumerate(front.points):
            (stage / plan_file(i)).write_text(dumps(point.plan), encoding="utf-8")
        (stage / FRONT_FILE).write_text(json.dumps(front_document(front, platform), indent=1) + "\n", encoding="utf-8")
        (stage / "front.csv").write_text(_front_csv(front), encoding="utf-8")
        (stage / "front.svg").write_text(draw_front(front, platform), encoding="utf-8")


def plan_file(index: int) -> str:
    """Where the plan of a point is in the directory."""
    return f"plans/{index:03d}.json"


def front_document(front: ParetoFront, platform: Platform) -> dict[str, Any]:
    """The front as JSON: units by objective, and for each point its numbers and its plan's file."""
    return {
        "format": FRONT_FORMAT,
        **({"network": front.points[0].plan.model_digest} if front.points[0].plan.model_digest else {}),
        "platform": platform.name,
        "objectives": {name: FRONT_OBJECTIVES[name][0] for name in front.objectives},
        "level": front.metrics_source,
        "evaluations": front.evaluations,
        "interrupted": front.interrupted,
        "points": [
            {"plan": plan_file(i), "devices": len(point.plan.devices), **_point_values(front, i)}
            for i, point in enumerate(front.points)
        ],
    }


def _point_values(front: ParetoFront, index: int) -> dict[str, float]:
    """Objective → number; bytes are whole."""
    objectives = front.points[index].objectives
    return {
        name: round(objectives[name]) if FRONT_OBJECTIVES[name][0] == "bytes" else objectives[name]
        for name in front.objectives
    }


def _front_csv(front: ParetoFront) -> str:
    """A line for each point; the head names the units."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["plan", *(f"{name} [{FRONT_OBJECTIVES[name][0]}]" for name in front.objectives)])
    for i in range(len(front.points)):
        rows.writerow([plan_file(i), *map(repr, _point_values(front, i).values())])
    return text.getvalue()


def draw_front(front: ParetoFront, platform: Platform) -> str:
    """The front as SVG: each objective against the first, the points with their numbers. No clock, no random names."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise DicompilerError(
            "explore: matplotlib is not installed, which draws front.svg: pip install pymoo matplotlib"
        ) from None
    first, *others = front.objectives
    with matplotlib.rc_context({"svg.hashsalt": "dicompiler"}):
        figure = Figure(figsize=(5 * max(1, len(others)), 4.5), layout="constrained")
        for i, other in enumerate(others or [first]):
            axes = figure.add_subplot(1, max(1, len(others)), i + 1)
            places = [(point.objectives[first], point.objectives[other]) for point in front.points]
            axes.scatter([x for x, _ in places], [y for _, y in places], s=18)
            for number, at in enumerate(places):
                axes.annotate(str(number), at, xytext=(3, 3), textcoords="offset points", fontsize=6)
            for label, name in ((axes.set_xlabel, first), (axes.set_ylabel, other)):
                label(f"{name} [{FRONT_OBJECTIVES[name][0]}]")
        figure.suptitle(f"{len(front.points)} plans on {platform.name}{', interrupted' if front.interrupted else ''}")
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
