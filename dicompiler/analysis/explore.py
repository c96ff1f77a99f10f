"""Exploration: the Pareto front of plans that a strategy finds, and its files.

Model ──strategy──► ParetoFront ──write_front──► front.json, front.csv, front.svg, plans/000.json …
"""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from dicompiler.base.atomic_output import atomic_directory, check_output_directory
from dicompiler.base.errors import UsageError
from dicompiler.base.option_specs import Spec, options_of, parse_spec
from dicompiler.base.schema import load_json
from dicompiler.cost.cost_model import CostModel
from dicompiler.driver.compile_options import DEFAULT_COST_MODEL, DEFAULT_TARGET
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import plan_to_text
from dicompiler.ir.platform import Platform
from dicompiler.ir.wire_dtype import WireFormat
from dicompiler.plugin.registry import registry
from dicompiler.search.pareto_front import FRONT_OBJECTIVES, ParetoFront, ProgressCallback
from dicompiler.search.strategy import Strategy
from dicompiler.target.target_base import Target

log = logging.getLogger("dicompiler")
FRONT_FORMAT = "dicompiler.front/2"
FRONT_FILE = "front.json"
DEFAULT_EXPLORATION_STRATEGY = "genetic"


def explore(
    model: str | Path | Model,
    platform: str | Path | Platform,
    strategy: str | Strategy = DEFAULT_EXPLORATION_STRATEGY,
    cost: str | CostModel = DEFAULT_COST_MODEL,
    output: str | Path | None = None,
    shape: Sequence[str] = (),
    progress: ProgressCallback | None = None,
    wire_dtype: str | Mapping[str, str] | WireFormat | None = None,
    target: str | Target = DEFAULT_TARGET,
    state: str | Sequence[str] = "auto",
    executor: Executor | None = None,
    engine: str | None = None,
    precision: str | None = None,
) -> ParetoFront:
    """Return the Pareto front of plans that a strategy finds for a model on a platform.

    Args:
        model: The path of an ONNX file, or a Model.
        platform: A TOML file, the name of a built-in platform, or a Platform.
        strategy: The strategy. If it makes only one plan, the front has one point.
        cost: The cost model.
        output: Directory to write the front to; None to write nothing.
        shape: Shapes of inputs with dynamic dimensions, such as "input=1x3x224x224".
        progress: Function that is called with a message before each step.
        wire_dtype: Element type in which tensors are sent, for all layers ("float16") or by layer. Default: the
            tensors' own types.
        target: The target, whose runtime adds time to each message and each call of an ONNX submodel.
        state: Graph inputs and outputs that devices keep between frames: `past*=present*`, "auto" (inputs and outputs
            with common names) or "none".
        executor: Executor, opened by `open_executor`, that evaluates plans in parallel. Default: this process evaluates
            them.
        engine: The engine that computes on devices with CPU cores, such as "ncnn", or "auto" (the fastest one of each
            device). Default: the engines in the platform.
        precision: The precision of engines that can compute with it: "fp32", "fp16" or "bf16". Default: the precisions
            in the platform, otherwise "fp32".

    Raises:
        DicompilerError: The model cannot be explored. Nothing is written.
        UsageError: An argument is not valid, or `output` has the front of another network. Nothing is written.
    """
    explorer: Strategy = registry().resolve("strategies", strategy)
    if output is not None:
        check_output_directory(Path(output), FRONT_FILE, "front")
    problem = load_problem(
        model,
        platform,
        shape,
        cost=cost,
        wire_dtype=wire_dtype,
        target=target,
        state=state,
        engine=engine,
        precision=precision,
    )
    problem = replace(problem, executor=executor)
    assert problem.model is not None
    digest = problem.model.digest()
    if output is not None:
        _check_earlier_front(Path(output), digest)
    front = _with_model_digest(explorer.front(problem, progress), digest)
    front = _drop_unknown_energy(front)
    if output is not None:
        write_front(front, problem.platform, Path(output))
    return front


def _check_earlier_front(output: Path, digest: str) -> None:
    """Raise UsageError if `output` has the front of a model with another digest."""
    path = output / FRONT_FILE
    if path.is_file() and load_json(path).get("model_digest", digest) != digest:
        raise UsageError(f"explore: {output}: it has the front of another network: remove it, or use another directory")


def override_options(text: str, options: Mapping[str, str | tuple[str, ...]]) -> str:
    """Return the text of a strategy with other values of some options.

    ("genetic{seed=1}", {"seed": "2"}) ⇒ "genetic{seed=2}"

    Raises:
        UsageError: The strategy has no option of such a name.
    """
    spec = parse_spec(text, "strategy")
    known = [option.name for option in options_of(registry().find("strategies", spec.name).value)]
    for name in options:
        if name not in known:
            raise UsageError(f"explore: strategy {spec.name!r} has no option {name!r}: omit --{name}")
    return str(Spec.from_mapping(spec.name, {**dict(spec.options), **options}))


def _with_model_digest(front: ParetoFront, digest: str) -> ParetoFront:
    points = tuple(replace(point, plan=replace(point.plan, model_digest=digest)) for point in front.points)
    return replace(front, points=points)


def _drop_unknown_energy(front: ParetoFront) -> ParetoFront:
    """Return the front without energy objectives if the platform states no powers, i.e. all energies are 0."""

    def is_known(name: str) -> bool:
        return FRONT_OBJECTIVES[name][0] != "J" or any(point.objectives[name] for point in front.points)

    names = tuple(filter(is_known, front.objectives))
    if not names:
        raise UsageError("explore: the platform does not state powers, so energies are unknown: use other objectives")
    return replace(front, objectives=names)


def write_front(front: ParetoFront, platform: Platform, output: Path) -> None:
    """Write a Pareto front as JSON, CSV and SVG, and the plan of each point.

    Raises:
        DicompilerError: The directory exists and is not a front.
    """
    with atomic_directory(output, FRONT_FILE, "front") as stage:
        (stage / "plans").mkdir()
        for i, point in enumerate(front.points):
            (stage / plan_file(i)).write_text(plan_to_text(point.plan), encoding="utf-8")
        document = json.dumps(front_document(front, platform), indent=1)
        (stage / FRONT_FILE).write_text(f"{document}\n", encoding="utf-8")
        (stage / "front.csv").write_text(_front_csv(front), encoding="utf-8")
        try:
            (stage / "front.svg").write_text(draw_front(front, platform), encoding="utf-8")
        except ImportError:
            log.warning("explore: without matplotlib, front.svg is left out: pip install 'dicompiler[explore]'")


def plan_file(index: int) -> str:
    """Return the path of the plan of point number `index`, relative to the directory of the front."""
    return f"plans/{index:03d}.json"


def front_document(front: ParetoFront, platform: Platform) -> dict[str, Any]:
    """Return a Pareto front as a JSON document of the schema `front`."""
    digest = front.points[0].plan.model_digest
    return {
        "format": FRONT_FORMAT,
        **({"model_digest": digest} if digest else {}),
        "platform": platform.name,
        "objectives": {name: FRONT_OBJECTIVES[name][0] for name in front.objectives},
        "metrics_source": front.metrics_source,
        "evaluations": front.evaluations,
        "interrupted": front.interrupted,
        "points": [
            {"plan": plan_file(i), "devices": len(point.plan.devices), **_point_values(front, i)}
            for i, point in enumerate(front.points)
        ],
    }


def _point_values(front: ParetoFront, index: int) -> dict[str, float]:
    """Return the values of all objectives of point number `index` by name; bytes are integers."""
    objectives = front.points[index].objectives
    return {
        name: round(objectives[name]) if FRONT_OBJECTIVES[name][0] == "bytes" else objectives[name]
        for name in front.objectives
    }


def _front_csv(front: ParetoFront) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["plan", *(f"{name} [{FRONT_OBJECTIVES[name][0]}]" for name in front.objectives)])
    for i in range(len(front.points)):
        rows.writerow([plan_file(i), *map(repr, _point_values(front, i).values())])
    return text.getvalue()


def draw_front(front: ParetoFront, platform: Platform) -> str:
    """Return a Pareto front as SVG, with a chart of each objective against the first one.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    first, *others = front.objectives
    with matplotlib.rc_context({"svg.hashsalt": "dicompiler"}):
        figure = Figure(figsize=(5 * max(1, len(others)), 4.5), layout="constrained")
        for i, other in enumerate(others or [first]):
            axes = figure.add_subplot(1, max(1, len(others)), i + 1)
            positions = [(point.objectives[first], point.objectives[other]) for point in front.points]
            axes.scatter([x for x, _ in positions], [y for _, y in positions], s=18)
            for number, position in enumerate(positions):
                axes.annotate(str(number), position, xytext=(3, 3), textcoords="offset points", fontsize=6)
            for set_label, name in ((axes.set_xlabel, first), (axes.set_ylabel, other)):
                quantity = "time between frames" if name == "throughput" else name
                set_label(f"{quantity} [{FRONT_OBJECTIVES[name][0]}]")
        figure.suptitle(f"{len(front.points)} plans on {platform.name}{', interrupted' if front.interrupted else ''}")
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
