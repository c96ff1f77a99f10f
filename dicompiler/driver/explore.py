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

from dicompiler.base.atomic import check_place, moved_in_whole
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.base.specs import Spec, parse
from dicompiler.driver.prepare import DEFAULT_COST, DEFAULT_TARGET, load_problem
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import dumps
from dicompiler.ir.platform import Platform
from dicompiler.plugin.registry import registry
from dicompiler.search.fronts import FRONT_OBJECTIVES, Front, Tell
from dicompiler.search.strategy import Strategy
from dicompiler.target.interface import Target

FORMAT = "dicompiler.front/1"
FILE = "front.json"
DEFAULT_EXPLORER = "genetic"


def explore(
    model: str | Path | Model,
    platform: str | Path | Platform,
    strategy: str | Strategy = DEFAULT_EXPLORER,
    cost: str = DEFAULT_COST,
    output: str | Path | None = None,
    shape: Sequence[str] = (),
    tell: Tell | None = None,
    wire: str | Mapping[str, str] | None = None,
    target: str | Target = DEFAULT_TARGET,
    state: str | Sequence[str] = "auto",
    executor: Executor | None = None,
) -> Front:
    """The front that `strategy` finds for `model` on `platform`; written to the directory `output` where it is given.

    strategy, cost: specs or a strategy itself; one that makes a single plan gives a front of one point. shape:
    "input=1x3x224x224" for dynamic dimensions. tell: called with what is being done. wire, target, state, executor: as
    for `compile`.
    Raises DicompilerError for what cannot be explored, UsageError for unknown names; nothing is written then.
    """
    explorer: Strategy = registry().adopt("strategies", strategy)
    if output is not None:
        check_place(Path(output), FILE, "front")  # before the work, and in the end once more
    problem = load_problem(model, platform, shape, cost=cost, wire=wire, target=target, state=state)
    problem = replace(problem, executor=executor)
    assert problem.model is not None
    front = _powered(_named(explorer.front(problem, tell), problem.model.digest()))
    if output is not None:
        write(front, problem.platform, Path(output))
    return front


def spec(text: str, options: Mapping[str, str | tuple[str, ...]]) -> str:
    """The spec `text` with these options in place of its own: `spec("genetic{seed=1}", {"seed": "2"})`."""
    given = parse(text, "strategy")
    return str(Spec.of(given.name, {**dict(given.options), **options}))


def _named(front: Front, digest: str) -> Front:
    """The plans with the digest of the network that they were made for."""
    points = tuple(replace(point, plan=replace(point.plan, network=digest)) for point in front.points)
    return replace(front, points=points)


def _powered(front: Front) -> Front:
    """Without energies where nothing takes any, because the platform gives no powers. UsageError where none is left."""

    def known(name: str) -> bool:
        return FRONT_OBJECTIVES[name][0] != "J" or any(point.objectives[name] for point in front.points)

    names = tuple(filter(known, front.objectives))
    if not names:
        raise UsageError("explore: the platform gives no powers, so that nothing takes energy: choose other objectives")
    return replace(front, objectives=names)


def write(front: Front, platform: Platform, output: Path) -> None:
    """Writes the directory `output`: FILE, front.csv, front.svg and the plan of each point; of the same front the same
    bytes. DicompilerError where something else is there already."""
    with moved_in_whole(output, FILE, "front") as stage:
        (stage / "plans").mkdir()
        for i, point in enumerate(front.points):
            (stage / plan_file(i)).write_text(dumps(point.plan), encoding="utf-8")
        (stage / FILE).write_text(json.dumps(document(front, platform), indent=1) + "\n", encoding="utf-8")
        (stage / "front.csv").write_text(_csv(front), encoding="utf-8")
        (stage / "front.svg").write_text(picture(front, platform), encoding="utf-8")


def plan_file(index: int) -> str:
    """Where the plan of a point is in the directory."""
    return f"plans/{index:03d}.json"


def document(front: Front, platform: Platform) -> dict[str, Any]:
    """The front as JSON: units by objective, and for each point its numbers and its plan's file."""
    return {
        "format": FORMAT,
        **({"network": front.points[0].plan.network} if front.points[0].plan.network else {}),
        "platform": platform.name,
        "objectives": {name: FRONT_OBJECTIVES[name][0] for name in front.objectives},
        "level": front.level,
        "evaluations": front.evaluations,
        "interrupted": front.interrupted,
        "points": [
            {"plan": plan_file(i), "devices": len(point.plan.devices), **_numbers(front, i)}
            for i, point in enumerate(front.points)
        ],
    }


def _numbers(front: Front, index: int) -> dict[str, float]:
    """Objective → number; bytes are whole."""
    objectives = front.points[index].objectives
    return {
        name: round(objectives[name]) if FRONT_OBJECTIVES[name][0] == "bytes" else objectives[name]
        for name in front.objectives
    }


def _csv(front: Front) -> str:
    """A line for each point; the head names the units."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["plan", *(f"{name} [{FRONT_OBJECTIVES[name][0]}]" for name in front.objectives)])
    for i in range(len(front.points)):
        rows.writerow([plan_file(i), *map(repr, _numbers(front, i).values())])
    return text.getvalue()


def picture(front: Front, platform: Platform) -> str:
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
