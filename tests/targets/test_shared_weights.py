"""Failure plans: a piece of a weight within a larger piece is written once, and read back unchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from dicompiler.driver.prepare import load_problem
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import FailurePlan, Part
from dicompiler_targets.artifact_files import DeviceContents
from dicompiler_targets.bundled_runtime import WEIGHTS_FILE

TEXT = """
<ir_version: 8, opset_import: ["" : 13]>
net (float[1, 16, 8, 8] x) => (float[1, 64, 8, 8] y) { [conv] y = Conv <pads = [1, 1, 1, 1]> (x, w) }
"""


@pytest.mark.parametrize("stop", [48, 32])
def test_cut_within_a_larger_cut_shares_its_memory(stop: int, tmp_path: Path) -> None:
    """pi01 has filters 0 to 16 and 0 to `stop`, pi02 16 to 32 and `stop` - 32 to 64."""
    proto = onnx.parser.parse_model(TEXT)
    values = np.random.default_rng(0).standard_normal((64, 16, 3, 3)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(values, "w"))
    problem = load_problem(proto, "rpi4x3")

    def channels(*cuts: tuple[str, int, int]) -> tuple[Part, ...]:
        return tuple(Part(name, ((0, 1), (a, b), (0, 8), (0, 8))) for name, a, b in cuts)

    plan = problem.build_plan({"conv": channels(("pi01", 0, 16), ("pi02", 16, 32), ("pi03", 32, 64))})
    left = problem.build_plan({"conv": channels(("pi01", 0, stop), ("pi02", stop - 32, 64))})
    program = problem.draft_program(replace(plan, failures=(FailurePlan(("pi03",), left),))).program
    assert program is not None
    sizes, read = [], list[tuple[int, int]]()
    for i in range(2):
        place = tmp_path / str(i)
        place.mkdir()
        for name, _ in DeviceContents(program, i).write(place):
            if name != WEIGHTS_FILE:
                for cut in (weight.array() for weight in Model.load(place / name).weights.values()):
                    starts = (s for s in range(64) if np.array_equal(cut, values[s : s + len(cut)]))
                    read += [(s, s + len(cut)) for s in starts]
        sizes.append((place / WEIGHTS_FILE).stat().st_size // values[0].nbytes)
    assert sizes == [stop, 96 - stop]
    assert sorted(read) == sorted([(0, 16), (0, stop), (16, 32), (stop - 32, 64)])
