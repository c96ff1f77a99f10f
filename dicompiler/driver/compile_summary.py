"""What came of a compilation, in a few sentences: who decided, the prediction, what holds it back, what to try next.

Compilation with metrics → Summary ──document──► made.json of the artifact ──load──► the same, for who runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dicompiler.base.objectives import speed_metric
from dicompiler.base.schema import load_json, validate
from dicompiler.ir.metrics import Metrics
from dicompiler.ir.pipeline_state import Decision, PipelineState
from dicompiler.ir.platform import Platform
from dicompiler.target.manifest import PROVENANCE_FILE

Bottleneck = Literal["network", "computing", "waiting"]
MIN_BUSY_SHARE = 0.5
"""What is busy for less than this share of a frame leaves it to waiting for one another."""


@dataclass(frozen=True)
class CompileSummary:
    """strategy: who decided ("": the plan was given); chosen: whose plan it took, where it asks others. devices: how
    many compute. Predicted, in seconds: latency_s of a frame, ends_s of its inputs' and outputs' way beside it,
    period_s between the frames of a stream, alone_s and alone_period_s of one device alone. bottleneck: in words;
    advice: what to try next."""

    strategy: str
    chosen_strategy: str
    device_count: int
    latency_s: float
    input_output_s: float
    period_s: float
    single_device_s: float
    single_device_period_s: float
    bottleneck: str
    advice: str

    @property
    def plan_origin(self) -> str:
        """Whose plan it is."""
        if not self.strategy:
            return "by a given plan"
        return f"by {self.strategy}" + (f", which chose {self.chosen_strategy}" if self.chosen_strategy else "")

    @property
    def prediction(self) -> str:
        """What is predicted, beside one device alone."""
        text = (
            f"a frame {format_milliseconds(self.latency_s)}, one every {format_milliseconds(self.period_s)} in a stream"
        )
        if self.device_count < 2:
            return text
        return f"{text}; one device alone {format_milliseconds(self.single_device_s)}, one every {format_milliseconds(self.single_device_period_s)}"

    @property
    def lines(self) -> tuple[str, ...]:
        """A sentence each."""
        return (
            f"plan: {self.plan_origin}",
            f"predicted: {self.prediction}",
            f"held back: {self.bottleneck}",
            f"to try: {self.advice}",
        )

    def document(self) -> dict[str, Any]:
        """As made.json has it; `load` has the rest from its other keys."""
        return {key: value for key, value in asdict(self).items() if key not in ("strategy", "chosen_strategy")}


def format_milliseconds(seconds: float) -> str:
    """0.1963 → "196.3 ms"."""
    return f"{1000 * seconds:.4g} ms"


def summarize(compilation: PipelineState, decision: Decision, metrics: Metrics, single: Metrics) -> CompileSummary:
    """The summary of a compilation with platform and plan."""
    assert compilation.platform is not None and compilation.plan is not None
    bound, text = find_bottleneck(compilation.platform, metrics, decision.objective)
    devices = sum(one.flops > 0 for one in metrics.devices)
    slower = metrics.objective_value(decision.objective) > single.objective_value(decision.objective)
    narrowed = bool(compilation.plan.wire_format.dtypes)
    return CompileSummary(
        decision.strategy,
        decision.chosen_strategy,
        devices,
        metrics.latency_s,
        metrics.input_output_s,
        metrics.period_s,
        single.latency_s,
        single.period_s,
        text,
        _suggest(bound, decision, metrics, devices, slower, narrowed),
    )


def load_summary(directory: Path) -> CompileSummary | None:
    """That of the compilation that wrote an artifact; None where it does not tell (an earlier version's)."""
    path = directory / PROVENANCE_FILE
    document: Mapping[str, Any] = load_json(path) if path.is_file() else {}
    if not document:
        return None
    validate(document, "provenance", str(path))
    if "summary" not in document:
        return None
    return CompileSummary(document["strategy"], document.get("chosen_strategy", ""), **document["summary"])


def find_bottleneck(platform: Platform, metrics: Metrics, objective: str) -> tuple[Bottleneck, str]:
    """What takes most of a frame, or for throughput of the time between two: the computing of the busiest device, the
    busiest line, or waiting for one another."""
    busiest, frame_s = metrics.busiest_device, getattr(metrics, speed_metric(objective)) or 1.0  # of what does nothing
    if platform.network.kind != "switch":
        share = sum(entry.link_s for entry in metrics.devices) / 2 / frame_s
        text = f"the {platform.network.kind} network"
    else:
        lines = max(metrics.devices, key=lambda entry: entry.link_s)
        share, text = lines.link_s / frame_s, f"the line of {lines.device}"
    computing = busiest.compute_s / frame_s
    text = f"{text} is busy {100 * share:.0f} % of the time"
    if computing >= share:
        text = f"{busiest.device} computes {100 * computing:.0f} % of the time"
    if max(computing, share) < MIN_BUSY_SHARE:
        return "waiting", f"{text}, else devices wait for one another"
    return ("computing" if computing >= share else "network"), text


def _suggest(
    bound: Bottleneck, decision: Decision, metrics: Metrics, devices: int, slower: bool, narrowed: bool
) -> str:
    """What may help against what holds it back."""
    if devices < 2:
        return (
            "more devices gain where computing takes longer than sending: a faster network, or whole frames dealt out "
            "in a stream (--objective throughput)"
        )
    if slower:
        return "this is slower than one device alone: --strategy auto takes the best of all strategies, or one device"
    stream = "" if speed_metric(decision.objective) == "period_s" else "; for a stream --objective throughput"
    if bound == "computing":
        return f"one more device, or a faster one for {metrics.busiest_device.device}{stream}"
    narrow = "" if narrowed else "--wire float16, which halves what travels; "
    text = f"{narrow}a faster network{stream}"
    return text if decision.strategy == "auto" else f"'dicompiler compare': what other strategies make of it; {text}"
