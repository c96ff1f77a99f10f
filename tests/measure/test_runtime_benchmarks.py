"""Tests of the benchmarks of targets' runtimes: programs, players, and the costs that follow from their times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dicompiler.analysis.prediction_error import available_processors
from dicompiler.base.errors import UsageError
from dicompiler.measure import link_benchmark, runtime_benchmarks, runtime_costs_fit
from dicompiler.measure.emulation.boards import measure_runtime_costs, runtime_cost_factor
from dicompiler.plugin.registry import registry


def written(directory: Path, target: str = "sockets") -> dict[str, Any]:
    """Write the benchmarks of a target as in a package, and return their entry of tasks.json."""
    place = directory / "runtime" / target
    place.mkdir(parents=True)
    return dict(runtime_benchmarks.write_benchmarks(registry().make("targets", target), place))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("package")
    return directory, written(directory)


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_compared_programs_differ_in_one_quantity(package: tuple[Path, dict[str, Any]]) -> None:
    programs = package[1]["programs"]
    for more, less, kinds in (
        ("calls", "one", {"calls"}),
        ("messages", "calls", {"messages", "bytes"}),
        ("messages-large", "calls-large", {"messages", "bytes"}),
        ("copies-small", "one-small", {"nodes", "copied"}),
        ("copies-huge", "one-huge", {"nodes", "copied"}),
    ):
        assert {kind for kind in programs[more] if programs[more][kind] > programs[less][kind]} == kinds
        assert all(programs[more][kind] == programs[less][kind] for kind in set(programs[more]) - kinds)
    assert programs["messages-large"]["bytes"] == 32 * programs["messages"]["bytes"]


def test_writes_same_bytes_each_time(package: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    assert written(tmp_path) == package[1]
    assert content(tmp_path) == content(package[0])


@pytest.mark.slow
def test_measures_sockets_without_dicompiler(
    package: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dicompiler").mkdir()
    (tmp_path / "dicompiler" / "__init__.py").write_text("raise ImportError('there is none')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(runtime_costs_fit, "RUN_S", 0.0)
    before = content(package[0])
    costs, reasons = runtime_costs_fit.measure_runtimes(package[0] / "runtime", [package[1]], 1)
    assert content(package[0]) == before
    measured = {"latency", "send", "receive", "per_byte", "call", "per_copy", "per_copied_byte"}
    found = costs.get("sockets", {"header_share": link_benchmark.HEADERS_SHARE})
    # On a busy host, a short measurement can give costs of 0. Such costs are omitted, and the reason is given.
    reason = reasons.get("sockets", "")
    omitted = {name for name in measured if name in reason} if "sockets" in costs else measured
    assert "sockets" in costs or reason
    assert set(found) == {*measured - omitted, "header_share"} and not reasons.keys() - {"sockets"}
    assert (
        all(0 < seconds < 0.1 for seconds in found.values()) and found["header_share"] == link_benchmark.HEADERS_SHARE
    )


PLAYER = """
import json, pathlib, sys
calls = pathlib.Path(__file__).with_name("calls")
count = int(calls.read_text()) + 1 if calls.exists() else 1
calls.write_text(str(count))
times = {times}
for name in sys.argv[2:]:
    print(json.dumps({{"frames": [times[name] if count > {busy_runs} else 0.5], "send": 5e-5}}))
"""


@pytest.mark.parametrize(("busy_runs", "repeat"), [(0, 7), (3, 7), (10**6, 7), (10**6, 1)])
def test_costs_of_zero_are_measured_again_and_then_refused(
    package: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    busy_runs: int,
    repeat: int,
) -> None:
    """The program says that all frames take equally long in its first runs, as on a busy host."""
    entry = package[1] | {"target": "acme"}
    times = {
        name: 0.01
        + 5e-5 * counts["calls"]
        + 2e-4 * counts["messages"]
        + 1e-9 * counts["bytes"]
        + 1e-6 * counts["nodes"]
        + 1e-10 * counts["copied"]
        for name, counts in entry["programs"].items()
    }
    place = tmp_path / "acme"
    place.mkdir()
    (place / "play.py").write_text(PLAYER.format(times=times, busy_runs=busy_runs))
    costs, reasons = runtime_costs_fit.measure_runtimes(tmp_path, [entry], repeat)
    if busy_runs < 10**6:
        assert reasons == {} and not runtime_costs_fit.find_zero_costs(costs["acme"])
        assert costs["acme"]["call"] == pytest.approx(5e-5, rel=0.5)
        return
    names = "send, receive, call, per_byte, per_copied_byte, per_copy, latency"
    reason = f"the host was busy, so that costs were measured as 0 s ({names}): measure again on an idle host"
    assert (costs, reasons) == ({}, {"acme": reason})
    assert capsys.readouterr().err == f"profile_run.py: runtime of acme: not measured: {reason}\n"
    assert int((place / "calls").read_text()) == runtime_costs_fit.MAX_FITS * min(
        repeat, runtime_costs_fit.RUN_COUNTS[0]
    )


def test_plays_mpi(tmp_path: Path) -> None:
    written(tmp_path, "mpi")
    place = tmp_path / "runtime" / "mpi"
    command = [sys.executable, "play.py", "0", "messages"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    message = json.loads(done.stdout)
    assert len(message["frames"]) >= 5 and min(message["frames"]) > 0 and message["send"] > 0


def test_reports_targets_that_cannot_be_measured(
    package: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "runtime" / "acme").mkdir(parents=True)
    (tmp_path / "runtime" / "acme" / "play.py").write_text("raise SystemExit('mpirun is missing: install it')")
    assert runtime_costs_fit.measure_runtimes(tmp_path / "runtime", [package[1] | {"target": "acme"}], 7) == (
        {},
        {"acme": "mpirun is missing: install it"},
    )
    assert capsys.readouterr().err == ("profile_run.py: runtime of acme: not measured: mpirun is missing: install it\n")


def test_reports_last_error_of_a_failed_device(tmp_path: Path) -> None:
    written(tmp_path)
    place = tmp_path / "runtime" / "sockets"
    (place / "messages" / "d1" / "segment000.onnx").write_bytes(b"no model")
    command = [sys.executable, "play.py", "0", "messages"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("messages: d1: file segment000.onnx has 8 bytes, expected")


def test_finds_costs() -> None:
    """The times are those of a runtime with known costs."""
    programs = {
        "one": {"calls": 1, "messages": 0, "bytes": 0, "copied": 0},
        "calls": {"calls": 17, "messages": 0, "bytes": 0, "copied": 0},
        "messages": {"calls": 17, "messages": 16, "bytes": 16 << 15, "copied": 0},
        "calls-large": {"calls": 17, "messages": 0, "bytes": 0, "copied": 0},
        "messages-large": {"calls": 17, "messages": 16, "bytes": 16 << 20, "copied": 0},
        "one-small": {"calls": 1, "messages": 0, "bytes": 0, "nodes": 34, "copied": 0},
        "copies-small": {"calls": 1, "messages": 0, "bytes": 0, "nodes": 98, "copied": 1 << 19},
        "one-huge": {"calls": 1, "messages": 0, "bytes": 0, "copied": 0},
        "copies-huge": {"calls": 1, "messages": 0, "bytes": 0, "copied": 1 << 24},
    }
    entry = {"programs": programs, "waking": 0.75, "header_share": 0.05}
    known = {"send": 6e-5, "receive": 2e-5, "per_byte": 8e-10, "call": 5e-5, "per_copied_byte": 2.5e-10}
    known |= {"latency": 6e-5, "per_copy": 2e-6, "header_share": 0.05}
    times = {
        name: 0.01 * (1 + name.endswith("large"))
        + counts["calls"] * known["call"]
        + counts["messages"] * (known["send"] + known["latency"] + known["receive"])
        + 2 * counts["bytes"] * known["per_byte"]
        + counts["copied"] * known["per_copied_byte"]
        + counts.get("nodes", 0) * known["per_copy"]
        for name, counts in programs.items()
    }
    assert runtime_costs_fit.fit_costs(entry, times, 6e-5 + (1 << 15) * 8e-10) == pytest.approx(known)
    untold = runtime_costs_fit.fit_costs(entry, times, None)
    assert untold["send"] + untold["latency"] + untold["receive"] == pytest.approx(14e-5)
    free = runtime_costs_fit.fit_costs(entry, dict.fromkeys(programs, 0.01), 1e-5)
    assert {name for name, seconds in free.items() if seconds} == {"header_share"}
    assert {*runtime_costs_fit.find_zero_costs(free), "header_share"} == set(free)
    found = {"send": 1e-5, "receive": 0.0, "latency": 2e-5, "call": 3e-5, "per_copy": 0.0, "header_share": 0.05}
    assert runtime_costs_fit.find_zero_costs(found) == ["send", "receive", "latency", "per_copy"]
    assert runtime_costs_fit.omit_zero_costs(found) == {"call": 3e-5, "header_share": 0.05}
    small = {name: programs[name] for name in ("one", "calls", "messages")}
    unmeasured = runtime_costs_fit.fit_costs(entry | {"programs": small, "waking": 0.0}, times, None)
    assert set(unmeasured) == {"send", "receive", "call", "header_share"}


def test_rejects_target_without_player(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="target 'tflm' has no benchmark programs"):
        written(tmp_path, "tflm")


def test_header_share_of_links_equals_that_of_targets() -> None:
    for name in ("sockets", "mpi"):
        assert registry().make("targets", name).runtime_costs.header_share == link_benchmark.HEADERS_SHARE


@pytest.mark.parametrize("name", ["sockets", "mpi"])
@pytest.mark.slow
def test_measures_runtime_costs_on_emulated_boards(name: str) -> None:
    stated, here = registry().make("targets", name).runtime_costs, measure_runtime_costs(name)
    assert measure_runtime_costs(name) is here  # The second call returns the cached result of the first.
    assert (here.per_byte, here.per_copied_byte, here.per_io_byte, here.per_tls_byte) == (
        0.0,
        stated.per_copied_byte,
        stated.per_io_byte,
        stated.per_tls_byte,
    )
    assert all(0 < seconds < 0.1 for seconds in (here.send, here.latency, here.receive)) and 0 <= here.call < 0.1
    theirs = stated.send + stated.latency + stated.receive
    # 40 processes share the processors, so sending and receiving take longer. The latency (the time to wake a process)
    # stays the same.
    awake = 40 / available_processors() * (here.send + here.receive)
    assert runtime_cost_factor(name, 40) == pytest.approx((awake + here.latency) / theirs)


def test_uses_stated_costs_if_the_runtime_cannot_be_measured(caplog: pytest.LogCaptureFixture) -> None:
    measure_runtime_costs.cache_clear()
    with caplog.at_level("WARNING", "dicompiler"):
        assert (
            measure_runtime_costs("tflm")
            == measure_runtime_costs("tflm")
            == registry().make("targets", "tflm").runtime_costs
        )
    (message,) = caplog.messages  # Two calls give only one warning.
    assert message == (
        "the runtime costs of tflm on this host cannot be measured, so its stated costs are used: "
        "its programs cannot run on emulated boards"
    )
