"""The result of `dicompiler.compile`, and its summary: origin of the plan, predicted times, bottleneck, advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dicompiler.base.errors import UsageError
from dicompiler.base.objectives import speed_metric
from dicompiler.base.option_specs import Spec, parse_spec
from dicompiler.base.schema import load_json, validate
from dicompiler.base.units import format_seconds
from dicompiler.cost.memory import MemoryUse
from dicompiler.ir.cluster import engine_layers
from dicompiler.ir.frame_prediction import FramePrediction
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.metrics import Metrics
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import Decision, PipelineState
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.ir.routing import Routing
from dicompiler.search.constraints import describe_memory_shares, host_memory_needs
from dicompiler.search.problem import Problem
from dicompiler.target.manifest import PROVENANCE_FILE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.verify.comparison import Verification


Bottleneck = Literal["network", "computing", "messages", "waiting"]
MIN_BUSY_SHARE = 0.5
"""Waiting is the bottleneck if every device and every link is busy for less than this share of the time."""
MIN_NAMED_SHARE = 0.05
"""The description of a bottleneck mentions messages only if they take at least this share of the time."""


@dataclass(frozen=True)
class CompileSummary:
    """Summary of a compilation. All times are predictions.

    Attributes:
        strategy: Name of the strategy; empty if the user supplied the plan.
        chosen_strategy: Name of the strategy that made the plan, if `strategy` tried several; otherwise empty.
        device_count: Number of devices that compute.
        latency_s: Seconds of a frame, from its inputs on the first devices to its outputs on the last ones.
        input_output_s: Additional seconds to bring a frame's inputs to the devices and to fetch its outputs.
        period_s: Seconds between consecutive frames of a stream.
        single_device_s: `latency_s` on the best single device.
        single_device_input_output_s: `input_output_s` on the best single device.
        single_device_period_s: `period_s` on the best single device.
        bottleneck: Sentence that names the device or link that limits the speed.
        advice: Suggestion to relieve the bottleneck.
        engines: Names of the engines other than onnxruntime, by device name.
    """

    strategy: str
    chosen_strategy: str
    device_count: int
    latency_s: float
    input_output_s: float
    period_s: float
    single_device_s: float
    single_device_input_output_s: float
    single_device_period_s: float
    bottleneck: str
    advice: str
    engines: Mapping[str, str] = field(default_factory=dict)

    @property
    def plan_origin(self) -> str:
        """Origin of the plan as text: "by auto, which chose modnn", or "given" if the user supplied it."""
        if not self.strategy:
            return "given"
        return f"by {self.strategy}" + (f", which chose {self.chosen_strategy}" if self.chosen_strategy else "")

    @property
    def frame(self) -> FramePrediction:
        """The predicted time of a frame with the plan."""
        return FramePrediction(self.latency_s, self.input_output_s)

    @property
    def single_device_frame(self) -> FramePrediction:
        """The predicted time of a frame on the best single device."""
        return FramePrediction(self.single_device_s, self.single_device_input_output_s)

    @property
    def prediction(self) -> str:
        """The predicted times as text; if several devices compute, also those of the best single device."""
        text = _format_times(self.frame, self.period_s)
        if self.device_count < 2:
            return text
        return f"{text}. One device: {_format_times(self.single_device_frame, self.single_device_period_s)}"

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines that `dicompiler compile` prints: the plan's origin, engines, times, bottleneck and advice."""
        return (
            f"plan: {self.plan_origin}",
            *([f"engines: {describe_engines(self.engines)}"] if self.engines else []),
            f"predicted: {self.prediction}",
            f"bottleneck: {self.bottleneck}",
            f"advice: {self.advice}",
        )

    def document(self) -> dict[str, Any]:
        """Return the content of the key `summary` in provenance.json, which states the strategies under other keys.

        Returns:
            The values by attribute name, in a form that `json.dumps` accepts.
        """
        omitted = ("strategy", "chosen_strategy", *([] if self.engines else ["engines"]))
        return {key: value for key, value in asdict(self).items() if key not in omitted}


MAX_NAMED_LAYERS = 3
"""Number of layers of an engine that `shorten_engine` names."""


def shorten_engine(engine: str) -> str:
    """Return an engine with few of its layers, for users: "ncnn{layers=a,b,c,d,e}" ⇒ "ncnn{layers=a,b,c and 2 more}".

    A list of up to four layers is not shortened.
    """
    layers = engine_layers(engine)
    if len(layers) <= MAX_NAMED_LAYERS + 1:
        return engine
    spec = parse_spec(engine, "engine")
    named = Spec.from_mapping(spec.name, {**dict(spec.options), "layers": layers[:MAX_NAMED_LAYERS]})
    return f"{str(named)[:-1]} and {len(layers) - MAX_NAMED_LAYERS} more}}"


def describe_engines(engines: Mapping[str, str]) -> str:
    """Return the engines of devices as text: {"pi01": "ncnn", "pi02": "ncnn"} ⇒ "ncnn on pi01, pi02"."""
    return "; ".join(
        f"{shorten_engine(engine)} on {', '.join(device for device, name in engines.items() if name == engine)}"
        for engine in dict.fromkeys(engines.values())
    )


def _format_times(frame: FramePrediction, period_s: float) -> str:
    return f"a frame takes {frame}; in a stream, one every {format_seconds(period_s)}"


def summarize(compilation: PipelineState, decision: Decision, metrics: Metrics, single: Metrics) -> CompileSummary:
    """Return the summary of a compilation; `single` are the metrics of the best single device."""
    assert compilation.plan is not None
    bottleneck, description = find_bottleneck(metrics, decision.objective)
    return CompileSummary(
        strategy=decision.strategy,
        chosen_strategy=decision.chosen_strategy,
        device_count=_computing_count(metrics),
        latency_s=metrics.latency_s,
        input_output_s=metrics.input_output_s,
        period_s=metrics.period_s,
        single_device_s=single.latency_s,
        single_device_input_output_s=single.input_output_s,
        single_device_period_s=single.period_s,
        bottleneck=description,
        engines=dict(compilation.plan.engines),
        advice=_suggest(
            bottleneck,
            decision,
            metrics,
            single,
            is_narrowed=bool(compilation.plan.wire_format.dtypes),
            has_states=compilation.layers is not None and bool(compilation.layers.states),
        ),
    )


def load_summary(directory: Path) -> CompileSummary | None:
    """Return the summary that is stored in an artifact's directory; None if there is none."""
    path = directory / PROVENANCE_FILE
    document: Mapping[str, Any] = load_json(path) if path.is_file() else {}
    if not document:
        return None
    validate(document, "provenance", str(path))
    if "summary" not in document:
        return None
    return CompileSummary(document["strategy"], document.get("chosen_strategy", ""), **document["summary"])


def find_bottleneck(metrics: Metrics, objective: str) -> tuple[Bottleneck, str]:
    """Return the kind of the bottleneck, and a description of it for users.

    The bottleneck is the busiest device, or the busiest direction of a link. If neither is busy for half of the time,
    the kind is "waiting".
    """
    # Devices and links may still work after the outputs were delivered, for example to send states of the next frame.
    frame_s = metrics.period_s if speed_metric(objective) == "period_s" else max(metrics.latency_s, metrics.active_s)
    device = metrics.busiest_device
    link, link_s = max(metrics.link_loads.items(), key=lambda entry: entry[1], default=("", 0.0))
    compute_share, link_share = device.compute_s / (frame_s or 1.0), link_s / (frame_s or 1.0)
    message_share = max(0.0, device.occupied_s / (frame_s or 1.0) - compute_share)
    kind: Bottleneck = "computing" if compute_share >= message_share else "messages"
    description = f"{device.device} computes {100 * compute_share:.0f} % of the time"
    if message_share >= MIN_NAMED_SHARE:
        description += f" and handles messages {100 * message_share:.0f} %"
    if link_share > compute_share + message_share:
        kind, description = "network", f"{link} is busy {100 * link_share:.0f} % of the time"
    if max(compute_share + message_share, link_share) < MIN_BUSY_SHARE:
        return "waiting", f"{description}; otherwise devices wait for each other"
    return kind, description


def _computing_count(metrics: Metrics) -> int:
    return sum(device.flops > 0 for device in metrics.devices)


def _suggest(
    bottleneck: Bottleneck,
    decision: Decision,
    metrics: Metrics,
    single: Metrics,
    is_narrowed: bool,
    has_states: bool,
) -> str:
    """Return advice on how to relieve the bottleneck.

    Args:
        bottleneck: Kind of the bottleneck.
        decision: The strategy and the objective.
        metrics: Metrics of the plan.
        single: Metrics of the best single device.
        is_narrowed: Whether tensors are already sent in narrower types than their own.
        has_states: Whether frames use outputs of earlier frames, so that devices cannot compute whole frames in turn.
    """
    is_for_streams = speed_metric(decision.objective) == "period_s"
    if _computing_count(metrics) < 2:
        advice = "more devices help if computing takes longer than sending: use a faster network"
        if is_for_streams or has_states:
            return advice
        return f"{advice}, or send whole frames to different devices in a stream (objective throughput)"
    if metrics.objective_value(decision.objective) > single.objective_value(decision.objective):
        return (
            f"one device is better for objective {decision.objective}: strategy auto chooses the best of all "
            "strategies or one device"
        )
    if decision.objective == "memory":
        return "add a device, or quantise the network to int8"
    if decision.objective == "communication":
        return "quantise the network to int8" if is_narrowed else "wire type float16, which halves the sent bytes"
    stream = "" if is_for_streams else "; for a stream, objective throughput"
    if bottleneck == "computing":
        return f"add a device, or use a faster one for {metrics.busiest_device.device}{stream}"
    if bottleneck == "messages":
        return f"use a plan with fewer messages (compare strategies), or fewer devices{stream}"
    narrow = "" if is_narrowed else "wire type float16, which halves the sent bytes; "
    suggestion = f"{narrow}a faster network{stream}"
    return suggestion if decision.strategy == "auto" else f"compare strategies; {suggestion}"


MAX_TABLE_DEVICES = 16


@dataclass(frozen=True, kw_only=True, repr=False)
class CompileResult(PipelineState):
    """The result of `dicompiler.compile`.

    Attributes:
        layers: The layers of the model.
        platform: The cluster.
        plan: The parts (regions that devices compute) of each layer.
        routing: The regions of tensors that devices exchange, as the plan requires.
        reference: The unsplit model, with which outputs are compared.
        program: Steps of each device, and transfers between devices.
        metrics: Predicted metrics of the plan.
        single_device_metrics: Predicted metrics of the best single device.
        decision: Names of the strategy, the objective and the cost model with which the plan was chosen.
        problem: The problem that the strategy solved: layers, platform, cost model and objective.
        memory_use: Memory that the program needs for one frame, by device name; None if no artifact was written.
    """

    layers: LayerGraph
    platform: Platform
    plan: Plan
    routing: Routing
    reference: Model
    program: Program
    metrics: Metrics
    single_device_metrics: Metrics
    decision: Decision
    problem: Problem = field(compare=False)
    memory_use: Mapping[str, MemoryUse] | None = field(default=None, compare=False)

    @classmethod
    def from_state(
        cls, state: PipelineState, problem: Problem, memory_use: Mapping[str, MemoryUse] | None = None
    ) -> CompileResult:
        """Return the pipeline state of a finished compilation as a result.

        Args:
            state: A state after all steps; only the artifact may be missing.
            problem: The problem that the strategy solved.
            memory_use: Memory that the program needs, by device name, if it is known.

        Returns:
            The result.
        """
        values = {entry.name: getattr(state, entry.name) for entry in fields(PipelineState)}
        return cls(**values, problem=problem, memory_use=memory_use)

    @property
    def artifacts(self) -> Path:
        """The directory of the artifact.

        Raises:
            UsageError: No artifact was written.
        """
        if self.artifact_directory is None:
            raise UsageError("no artifact was written: compile with output=…")
        return self.artifact_directory

    @property
    def unused_devices(self) -> tuple[str, ...]:
        """Names of the devices with compute that the plan does not use."""
        return tuple(d.name for d in self.platform.computing_devices if d.name not in self.plan.devices)

    @property
    def summary(self) -> CompileSummary:
        """The origin of the plan, its predicted times, its bottleneck, and advice."""
        return summarize(self, self.decision, self.metrics, self.single_device_metrics)

    @property
    def memory_summary(self) -> str:
        """Memory of the host that uses the largest share of its limit, by purpose, as text; "" if not known."""
        target = self.problem.target
        if self.memory_use is None or target is None or self.footprints:
            return ""
        needs = tuple(host_memory_needs(self.platform, self.memory_use, include_sum=True))
        fullest = max(needs, key=lambda need: need.needed_bytes / need.limit_bytes)
        shares = describe_memory_shares(self.platform, self.memory_use, fullest.host, target.name)
        needed, _, limit = fullest.size_texts
        rank = ", the largest share of all hosts" if len(self.platform.hosts) > 1 else ""
        return f"{fullest.host} needs {needed} of {limit}{rank}: {shares}"

    def verify(self, inputs: Mapping[str, NDArray[Any]] | None = None, timeout: float | None = None) -> Verification:
        """Verify that the artifact computes what onnxruntime computes.

        Args:
            inputs: Arrays by the names of the graph inputs. Default: seeded random arrays.
            timeout: Seconds for all checks together. Default: the timeout of `RunOptions`.

        Returns:
            All checks, passed or failed.

        Raises:
            UsageError: No artifact was written.
        """
        from dicompiler.driver.artifact import verify

        return verify(self.artifacts, inputs, timeout)

    def __repr__(self) -> str:
        summary = self.summary
        written = "" if self.artifact_directory is None else f", in {self.artifact_directory}"
        devices = f"{summary.device_count} of {len(self.platform.devices)} devices of {self.platform.name}"
        latency, single = (format_seconds(frame.total_s) for frame in (summary.frame, summary.single_device_frame))
        return (
            f"<CompileResult: {len(self.layers.layers)} layers on {devices}, {summary.plan_origin}: "
            f"{latency} per frame predicted, {single} on one device{written}>"
        )

    def _repr_html_(self) -> str:
        devices = self.metrics.devices
        table = _table_row("th", ("device", "computing", "waiting", "memory", "bytes sent"))
        for metrics in devices[:MAX_TABLE_DEVICES]:
            times = (format_seconds(metrics.compute_s), format_seconds(metrics.wait_s))
            table += _table_row("td", (metrics.device, *times, f"{metrics.memory / 1e6:.1f} MB", metrics.sent))
        lines = list(self.summary.lines)
        if self.artifact_directory is not None:
            lines.append(f"written: {self.artifact_directory}")
        if len(devices) > MAX_TABLE_DEVICES:
            lines.insert(0, f"… and {len(devices) - MAX_TABLE_DEVICES} more devices")
        return f"<table>{table}</table>" + "".join(f"<p>{escape(line)}</p>" for line in lines)


def _table_row(tag: str, cells: tuple[object, ...]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"
