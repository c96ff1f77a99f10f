"""The driver: compile() takes a model and a platform through the whole pipeline; run() and verify() use what it wrote.

model ──prepare──► layers ──strategy──► plan ──partition──► placed model ──cut──► program ──target──► directory
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dicompiler import plan as plans
from dicompiler.compilation import Compilation
from dicompiler.costs import Analytic, CostModel, weight_regions
from dicompiler.cutting import cut
from dicompiler.errors import DicompilerError, UsageError
from dicompiler.metrics import Metrics
from dicompiler.model import Model
from dicompiler.passes import Instrument, PassManager
from dicompiler.plan import Plan
from dicompiler.platform import Platform, to_toml
from dicompiler.plugins import registry
from dicompiler.problem import Problem, Strategy
from dicompiler.program import Program
from dicompiler.routing import route
from dicompiler.schema import load_json, validate
from dicompiler.target import RunOptions, RunResult, Target
from dicompiler.tiling import whole_plan
from dicompiler.units import format_bytes

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

    from dicompiler.verify import Verification

log = logging.getLogger("dicompiler")

DEFAULT_STRATEGY = "modnn"
DEFAULT_TARGET = "sockets"
DEFAULT_COST = "analytic"
PREPARE = ("normalise", "infer-shapes", "form-layers")
MANIFEST, PLAN, PLATFORM, REFERENCE = "artifact.json", "plan.json", "platform.toml", "reference/model.onnx"
TIMEOUT_S = 600.0


def compile(
    model: str | Path | bytes | onnx.ModelProto | Model,
    platform: str | Path | Platform | None = None,
    strategy: str | Strategy | None = None,
    plan: str | Path | Plan | None = None,
    target: str | Target = DEFAULT_TARGET,
    objective: str = "latency",
    cost: str | CostModel = DEFAULT_COST,
    output: str | Path | None = None,
    shape: Sequence[str] = (),
    instruments: Sequence[Instrument] = (),
) -> Compilation:
    """Splits `model` over `platform` as `plan` says or as `strategy` decides, and writes `output` where it is given.

    strategy, target, cost: specs such as "modnn" or instances. shape: "input=1x3x224x224" for dynamic dimensions.
    Returns the compilation with plan, program, metrics, and artifacts where written. Raises DicompilerError for what
    cannot be compiled, UsageError for unknown names; nothing is written then.
    """
    if strategy is not None and plan is not None:
        raise UsageError("compile: strategy and plan exclude each other: a plan needs no strategy")
    emitter: Target = registry().make("targets", target) if isinstance(target, str) else target
    decider: Strategy | None = None
    if plan is None:
        chosen = DEFAULT_STRATEGY if strategy is None else strategy
        decider = registry().make("strategies", chosen) if isinstance(chosen, str) else chosen
    if output is not None:
        _check_place(Path(output))  # before the work, and in the end once more
    compilation = prepare(Model.load(model), shape, instruments)
    compilation = replace(compilation, platform=_platform(platform, decider))
    costs: CostModel = registry().make("cost_models", cost) if isinstance(cost, str) else cost
    compilation = decide(compilation, decider, plan, objective, costs)
    compilation = split(compilation, instruments)
    return compilation if output is None else emit(compilation, emitter, Path(output))


def prepare(model: Model, shape: Sequence[str] = (), instruments: Sequence[Instrument] = ()) -> Compilation:
    """Model → normalised, with shapes and layers."""
    from dicompiler.specs import Spec

    make = registry().make
    passes = [make("passes", Spec.of(name, {"shape": tuple(shape)} if name == PREPARE[1] else {})) for name in PREPARE]
    return PassManager(passes, instruments).run(Compilation(model=model))


def _platform(given: str | Path | Platform | None, strategy: Strategy | None) -> Platform:
    families = [provided.value for provided in registry().platforms.values()]
    own = strategy.own_platform() if strategy is not None and given is None else None
    if given is None and own is None:
        raise UsageError("compile: no platform: give a TOML file or a built-in one such as rpi4x4 (--platform)")
    return own if own is not None else Platform.load(given, families)  # type: ignore[arg-type]


def decide(
    compilation: Compilation,
    strategy: Strategy | None,
    plan: str | Path | Plan | None,
    objective: str = "latency",
    cost: CostModel | None = None,
) -> Compilation:
    """Adds the plan (the strategy's where there is one), its metrics, and those of the best single device beside it.

    Raises DicompilerError for a plan of another network, with parts on a device without compute, or over a host's
    memory.
    """
    layers, platform = compilation.layers, compilation.platform
    assert layers is not None and platform is not None
    problem = Problem(layers, platform, cost or Analytic(), objective)
    digest = compilation.model.digest()
    if strategy is not None:
        chosen = replace(strategy.plan(problem), network=digest)
    else:
        chosen = plan if isinstance(plan, Plan) else plans.load(plan or "")
        if chosen.network and chosen.network != digest:
            raise DicompilerError(
                "plan: it was made for another network (its structure differs): make it anew with 'dicompiler plan'"
            )
    _check_compute(platform, chosen)
    metrics = problem.evaluate(chosen)
    _check_memory(problem, chosen, metrics)
    single = single_device(problem)
    if metrics.value(objective) > single.value(objective):
        log.warning(
            "this plan's predicted %s is worse than that of one device alone (%.3g against %.3g; --strategy single)",
            objective,
            metrics.value(objective),
            single.value(objective),
        )
    return replace(compilation, plan=chosen, metrics=metrics, single=single)


def single_device(problem: Problem) -> Metrics:
    """The metrics of the whole network on the fastest device: the candidate that every plan is reported beside."""
    whole = whole_plan(problem.layers, problem.platform.fastest.name)
    return problem.evaluate(problem.plan(whole.layers))


def _check_compute(platform: Platform, plan: Plan) -> None:
    """A compute-less device may hold inputs and want outputs, and that is all."""
    for name, parts in plan.layers.items():
        for i, part in enumerate(parts):
            if not platform.device(part.device).computes:
                raise DicompilerError(
                    f"plan: layers.{name}[{i}]: device {part.device!r} has no compute: give the part to another"
                )


def _check_memory(problem: Problem, plan: Plan, metrics: Metrics) -> None:
    """Memory is a hard limit: weights and live activations of a host's devices. The error names the layer whose
    weights take most of it."""
    layers, platform = problem.layers, problem.platform
    for host in platform.hosts:
        used = sum(d.memory for d in metrics.devices if platform.host_of[d.device] == host.name)
        if used > host.memory:
            weights: dict[str, int] = {}
            for task in route(layers, plan, platform.host_of).tasks:
                if platform.host_of[task.device] == host.name:
                    held = sum(weight_regions(layers, task).values())
                    weights[task.layer] = weights.get(task.layer, 0) + held
            largest = max(weights, key=lambda name: weights[name], default=None)
            remedy = (
                "it only holds inputs or outputs: make another device the source or the sink"
                if largest is None
                else f"give it less of the network, above all of layer {largest!r} ({format_bytes(weights[largest])} "
                "of weights)"
            )
            raise DicompilerError(
                f"plan: host {host.name} needs {format_bytes(used)} for weights and activations and has "
                f"{format_bytes(host.memory)}: {remedy}"
            )


def split(compilation: Compilation, instruments: Sequence[Instrument] = ()) -> Compilation:
    """Adds routing, placed model and program to a compilation with a plan."""
    assert compilation.plan is not None and compilation.platform is not None
    for name in compilation.plan.devices:
        compilation.platform.device(name)
    placed = PassManager([registry().make("passes", "partition")], instruments).run(compilation)
    devices = [d.name for d in compilation.platform.devices if d.name in compilation.plan.devices]
    program = cut(placed.model, devices, compilation.platform.host_of)
    return replace(placed, program=program, reference=compilation.model)


def emit(compilation: Compilation, target: Target, output: Path) -> Compilation:
    """Writes the artifact: the target's files, the plan, the platform, and the model to verify against."""
    assert compilation.plan is not None and compilation.platform is not None and compilation.reference is not None
    with _moved_in_whole(output) as stage:
        target.emit(compilation, stage)
        (stage / PLAN).write_text(plans.dumps(compilation.plan), encoding="utf-8")
        (stage / PLATFORM).write_text(to_toml(compilation.platform), encoding="utf-8")
        (stage / REFERENCE).parent.mkdir()
        compilation.reference.save(stage / REFERENCE, external=True)
    return replace(compilation, artifacts=output)


def _check_place(output: Path) -> None:
    """An earlier artifact is replaced, anything else that is there is refused (an empty directory is nothing)."""
    if output.exists() and not (output / MANIFEST).is_file() and (not output.is_dir() or any(output.iterdir())):
        raise DicompilerError(f"{output}: it exists and is no artifact of ours: choose another place or remove it")
    if not output.absolute().parent.is_dir():
        raise DicompilerError(f"{output}: its parent is no directory: create it first")


@contextmanager
def _moved_in_whole(output: Path) -> Iterator[Path]:
    """A fresh directory beside `output` that takes its place in the end; see `_check_place`."""
    _check_place(output)
    scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.absolute().parent))
    try:
        stage = scratch / "new"
        stage.mkdir()
        yield stage
        if output.exists():
            output.rename(scratch / "old")
        stage.rename(output)
    except OSError as error:
        raise DicompilerError(f"{output}: it cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _open(directory: str | Path) -> tuple[Path, Target, Model]:
    """An artifact: (its directory, the target that wrote it, the model it was made from)."""
    path = Path(directory)
    if not (path / MANIFEST).is_file():
        raise DicompilerError(f"{path}: no artifact of dicompiler: compile a model into it first")
    document = load_json(path / MANIFEST)
    validate(document, "artifact", str(path / MANIFEST))
    return path, registry().make("targets", document["target"]), Model.load(path / REFERENCE)


def run(
    directory: str | Path,
    inputs: Mapping[str, NDArray[Any]] | None = None,
    frames: int = 1,
    timeout: float = TIMEOUT_S,
    options: RunOptions | None = None,
) -> RunResult:
    """Starts every device's program on this host and gives each of `frames` frames the same `inputs` (by name; by
    default seeded random ones), one after another unless `options` says otherwise. Raises RunError naming the device
    that failed."""
    from dicompiler.executor import check_inputs
    from dicompiler.verify import graph_inputs, random_inputs

    path, target, model = _open(directory)
    values = graph_inputs(model)
    given = check_inputs(values, random_inputs(values) if inputs is None else inputs)
    return target.run(path, [given] * frames, timeout, options or RunOptions())


def verify(directory: str | Path, inputs: Mapping[str, NDArray[Any]] | None = None) -> Verification:
    """Verifies an artifact on both levels: exact check models in this process, then its real programs, run as
    processes on this host and compared with onnxruntime; and that each transfer carried the bytes predicted."""
    from dicompiler.executor import check_inputs, run_model
    from dicompiler.verify import Verification, compare, exact, graph_inputs, random_inputs, transfers

    path, target, model = _open(directory)
    plan, platform = plans.load(path / PLAN), Platform.load(path / PLATFORM)
    values = graph_inputs(model)
    given = check_inputs(values, random_inputs(values) if inputs is None else inputs)

    def program(variant: Model) -> Program:
        compilation = replace(prepare(variant), plan=plan, platform=platform)
        result = split(compilation).program
        assert result is not None
        return result

    checks = [exact(model, program)]
    result = target.run(path, [given], TIMEOUT_S)
    reference = run_model(model, given)
    for device, outputs in (result.delivered or ({"": result.outputs[0]},))[0].items():
        checks += [
            compare(f"{name} on {device}" if device else name, reference[name], outputs[name]) for name in outputs
        ]
    sent = {index: count for report in result.reports for index, count in report.sent.items()}
    checks.append(transfers(program(model).transfers, sent, 1))
    return Verification(tuple(checks))
