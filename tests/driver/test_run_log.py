"""Tests of run logs: round trip, and rejection of logs of another artifact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.handmade import halo
from support.running import emit

from dicompiler.base.errors import DicompilerError
from dicompiler.driver.run_log import load_log, run_document
from dicompiler.target.manifest import load_artifact
from dicompiler.target.run_records import DeviceReport, RunResult, TimelineEntry

REPORTS = tuple(
    DeviceReport(name, 0.5 * place, 0.25, 0.125, {place: 100, 10 + place: 7}, (0.1, 0.2), 2**20 + place, timeline)
    for place, (name, timeline) in enumerate(
        (("a", (TimelineEntry("run", 0, 1, 0.0, 0.5), TimelineEntry("wait", -1, 1, 0.5, 0.75))), ("b", ()), ("c", ()))
    )
)
RESULT = RunResult((), REPORTS, frames_s=(1.5, 2.5), total_s=3.0)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return emit(halo(), tmp_path / "artifact")


def written(place: Path, **changes: Any) -> Path:
    """Write the log of RESULT with changes, and return its path."""
    path = place.parent / "run.json"
    path.write_text(json.dumps(run_document(place, RESULT) | changes), encoding="utf-8")
    return path


def test_log_round_trip(artifact: Path) -> None:
    given = run_document(artifact, RESULT)
    assert load_log(written(artifact), artifact, load_artifact(artifact)) == json.loads(json.dumps(given))


def test_log_has_artifact_digest_and_measurements_of_each_device(artifact: Path) -> None:
    found = load_log(written(artifact), artifact, load_artifact(artifact))
    assert (found["artifact_digest"], found["target"]) == (load_artifact(artifact)["digest"], "sockets")
    assert (found["frames_s"], found["total_s"]) == ([1.5, 2.5], 3.0)
    for entry, report in zip(found["devices"], REPORTS, strict=True):
        assert entry["device"] == report.device
        assert {int(index): count for index, count in entry["sent_bytes"].items()} == report.sent_bytes
        assert tuple(entry["segments_s"]) == report.segments_s
        assert [TimelineEntry(**moment) for moment in entry["timeline"]] == list(report.timeline)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"artifact_digest": "0" * 64}, r"the log is of another artifact than .*: run this artifact with --log"),
        ({"devices": []}, "devices"),
        ({"format": "dicompiler.run/9"}, "is not supported"),
        ({"total_s": "long"}, "total_s: expected a number"),
        ({"host": None}, "host: "),
    ],
)
def test_rejects_log_that_does_not_belong_to_the_artifact(
    artifact: Path, changes: dict[str, Any], message: str
) -> None:
    path = written(artifact, **changes)
    with pytest.raises(DicompilerError, match=message) as caught:
        load_log(path, artifact, load_artifact(artifact))
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_rejects_log_of_other_devices(artifact: Path) -> None:
    given = json.loads(json.dumps(run_document(artifact, RESULT)))
    given["devices"].reverse()
    with pytest.raises(
        DicompilerError, match=r"devices: the log has other devices than .*: run the artifact with --log"
    ):
        load_log(written(artifact, devices=given["devices"]), artifact, load_artifact(artifact))
