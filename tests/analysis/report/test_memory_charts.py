"""Memory timelines of the report: the highest point that is drawn is the memory that the metrics count."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.reports import made

from dicompiler.cost.memory import memory_timeline, program_memory
from dicompiler.driver.artifact import reopen_artifact


class TestMemory:
    @pytest.mark.parametrize(("network", "strategy"), [("lenet", "modnn"), ("mobilenet_v2", "dp"), ("tiny", "single")])
    def test_course_reaches_the_peak(self, tmp_path: Path, network: str, strategy: str) -> None:
        compilation, _, _ = reopen_artifact(made(tmp_path, network, strategy=strategy))
        assert compilation.program is not None
        used, timelines = program_memory(compilation.program), memory_timeline(compilation.program)
        assert {name: use.total for name, use in used.items()} == {
            name: one.peak_bytes for name, one in timelines.items()
        }
        for device in compilation.program.devices:
            assert len(timelines[device.device].buffers) == 2 * len(device.segments) + 1
