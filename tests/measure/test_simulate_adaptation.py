"""Simulated adaptive sessions on boards and links that change their speed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.commands import command, failed
from support.onnx_models import parsed

import dicompiler
from dicompiler import networks
from dicompiler.base.errors import UsageError
from dicompiler.cost.speed_changes import SpeedChange
from dicompiler.driver.compile_result import CompileResult
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.measure.adapt import AdaptOptions, SpeedTrial
from dicompiler.measure.calibrate import scale_rates
from dicompiler.measure.simulate_adaptation import SWAP_S, simulate_adaptation

PLATFORM = scale_rates(
    Platform.load('rpi4x4{bandwidth="1 Gbit/s"}'), dict.fromkeys(("pi01", "pi02", "pi03", "pi04"), 0.05)
)
ADAPT = AdaptOptions(min_gain=0.03)


def make_model() -> onnx.ModelProto:
    weights = np.ones((32, 32, 3, 3), np.float32)
    nodes = "".join(f"t{i} = Conv <pads = [1, 1, 1, 1]> ({f't{i - 1}' if i else 'x'}, w) " for i in range(4))
    return parsed(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[1, 32, 56, 56] x) => (float[1, 32, 56, 56] y) {{ {nodes} y = Relu (t3) }}""",
        w=weights,
    )


def simulated(changes: Sequence[SpeedChange], frames: int, adapt: AdaptOptions = ADAPT) -> SpeedTrial:
    model = make_model()

    def plan_for(platform: Platform, plan: Plan | None) -> CompileResult:
        strategy = "modnn" if plan is None else None
        return dicompiler.plan(model, platform=platform, plan=plan, strategy=strategy, allow_worse=True)

    return simulate_adaptation(plan_for(PLATFORM, None), plan_for, changes, frames, 12, adapt)


def count(trial: SpeedTrial, start_s: float, end_s: float) -> int:
    return sum(start_s <= seconds < end_s for seconds in trial.finished_s)


def test_plan_changes_with_the_speed_of_a_board_and_back() -> None:
    change = [SpeedChange("pi03", 0.4, 10, 40)]
    trial = simulated(change, 900)
    still = simulated(change, 900, replace(ADAPT, min_gain=1e9))
    assert len(trial.finished_s) == len(still.finished_s) == 900
    assert list(trial.finished_s) == sorted(trial.finished_s)
    slower, back = trial.adaptations
    assert slower.swap is not None and back.swap is not None and slower.ratios == {"pi03": pytest.approx(2.5)}
    assert 10 < slower.at_s < 20 and 40 < back.at_s < 50
    assert "pi03 computes 2.50 times as long as predicted: plan 2 is predicted to be " in slower.message
    assert re.search(r"\d+% better \(latency\), from frame ", slower.message)
    assert count(trial, slower.at_s + SWAP_S + 2, 38) > 1.1 * count(still, slower.at_s + SWAP_S + 2, 38)
    assert all(found.swap is None for found in still.adaptations)
    # Before the slowdown and after it has ended, both sessions use the same plan.
    assert count(trial, 0, 10) == count(still, 0, 10)
    after = back.at_s + SWAP_S + 2
    assert count(trial, after, after + 5) == pytest.approx(count(still, after, after + 5), abs=1)


def test_slow_link_and_small_changes() -> None:
    (found,) = simulated([SpeedChange("link:pi03", 0.02, 5)], 400).adaptations
    assert found.ratios == {"pi03 → others": pytest.approx(50.0)}
    assert simulated([SpeedChange("pi03", 0.9, 5), SpeedChange("link:*", 0.8, 5)], 200).adaptations == ()
    with pytest.raises(UsageError, match="there is no device 'pi09'"):
        simulated([SpeedChange("pi09", 0.9, 5)], 10)


@pytest.mark.slow
def test_command(tmp_path: Path) -> None:
    onnx.save(networks.build("lenet", 0), tmp_path / "lenet.onnx")
    words = ["simulate", tmp_path / "lenet.onnx", "--platform", "rpi4x2", "--strategy", "modnn", "--frames", 3000]
    document = json.loads(command(*words, "--slow", "pi02=0.2@1s", "--adapt", "--json").stdout)
    assert len(document["finished_s"]) == 3000
    assert document["adaptations"][0]["message"].startswith("pi02 computes 5.00 times as long as predicted: ")
    output = command(*words, "--slow", "pi02=0.2@1s", "--adapt").stdout
    assert output.startswith("from ") and "adaptation: pi02 computes" in output
    assert output.endswith("simulated: a new plan computes frames 7 s after its search began\n")
    assert "--adapt needs --slow and excludes --trace" in failed(2, *words, "--adapt")
