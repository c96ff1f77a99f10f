"""Plans are evaluated by processes, a Dask cluster or MPI ranks. The results are the same, even if workers fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx
import pytest
from distributed import versions
from support import farming
from support.boards import Cluster, cluster
from support.building import environment
from support.mpi_runs import environment as of_mpi
from support.refusing import Refused

import dicompiler as public
from dicompiler import networks
from dicompiler.analysis.explore import explore
from dicompiler.base.errors import DicompilerError
from dicompiler.cli import main
from dicompiler.driver import dask_executor
from dicompiler.driver.prepare import load_problem
from dicompiler.plugin.registry import registry

SEARCH = (
    "--strategy",
    "genetic{measured_generations=2}",
    "--generations",
    "4",
    "--population",
    "20",
    "--platform",
    "rpi4x3",
)


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("farm"), ["w0", "w1"]) as made:
        yield made


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("proceses=2", "executor 'proceses=2': unknown kind 'proceses' (did you mean 'processes'?)"),
        ("processes", "executor 'processes': wrong form: write processes=N"),
        ("processes=0", "executor 'processes=0': '0' is not a valid number of processes: use 1 to 1024"),
        ("processes=two", "executor 'processes=two': 'two' is not a valid number of processes: use 1 to 1024"),
        ("mpi=3", "executor 'mpi=3': wrong form: write mpi"),
        ("dask=", "executor 'dask=': wrong form: write dask=HOST:PORT"),
        (
            "dask=foo://x:1",
            "executor 'dask=foo://x:1': 'foo://x:1' is not an address: write it as 10.0.0.1:8786 or tls://",
        ),
    ],
)
def test_rejects_an_invalid_executor_before_any_work(text: str, line: str, refused: Refused) -> None:
    for command, output in (("compile", ("-o", "out")), ("explore", ("-o", "out")), ("compare", ())):
        assert refused(2, command, "absent.onnx", "--platform", "rpi4x2", "--executor", text, *output).startswith(line)


@pytest.mark.slow
def test_failed_process_is_replaced_and_results_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "armed").touch()
    with public.open_executor("processes=2") as pool:
        assert pool is not None
        assert list(pool.map(partial(farming.slow, of=6), range(6))) == list(range(6))
        assert list(pool.map(partial(farming.deadly, path=str(tmp_path / "armed"), worker=3), range(6))) == [*range(6)]
        assert not (tmp_path / "armed").exists()
    with public.open_executor("processes=1") as pool:
        assert pool is not None
        with pytest.raises(DicompilerError, match=r"processes=1: a process failed 3 times in a row without any result"):
            pool.map(farming.suicide, range(3))


def test_compile_and_compare_are_the_same_with_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(networks.build("lenet", 1), "net.onnx")
    spec, processes = "auto{tries=6 strategies=single,modnn}", ("--executor", "processes=2")
    for name, more in (("alone", ()), ("spread", processes)):
        assert main(["compile", "net.onnx", "--platform", "rpi4x3", "--strategy", spec, "-o", name, *more]) == 0
    assert files(Path("alone")) == files(Path("spread"))
    capsys.readouterr()
    assert main(["compare", "net.onnx", "--platform", "rpi4x3", "--strategies", spec, *processes]) == 0
    assert spec in capsys.readouterr().out


@pytest.mark.slow
def test_ranks_of_mpi_find_the_same_front(tmp_path: Path) -> None:
    onnx.save(networks.build("lenet"), tmp_path / "net.onnx")
    explore(
        tmp_path / "net.onnx",
        "rpi4x3",
        "genetic{measured_generations=2 generations=4 population=20}",
        output=tmp_path / "a",
    )
    line = ["-m", "dicompiler", "explore", "net.onnx", *SEARCH, "-o", "b", "--executor", "mpi"]
    ranks = ["mpirun", "--oversubscribe", "-n", "3", sys.executable]
    for words, code in ((["-m", "mpi4py.futures"], 0), ([], 2)):
        done = subprocess.run(
            [*(ranks if words else ranks[-1:]), *words, *line],
            cwd=tmp_path, env=of_mpi() | environment(PATH=of_mpi()["PATH"]), capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
    assert done.stderr.startswith("dicompiler: error: executor mpi: ")
    assert files(tmp_path / "a") == files(tmp_path / "b")


def files(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_dask_finds_the_same_front_after_a_worker_fails_and_reports_a_failed_scheduler(
    boards: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    armed = tmp_path / "armed"
    costs = farming.Deadly(home=os.getpid(), path=str(armed))
    problem = replace(load_problem(networks.build("lenet"), "rpi4x3"), cost_model=costs)
    strategy = registry().make("strategies", "genetic{measured_generations=4 generations=4 population=20}")
    alone = strategy.front(problem)
    address = f"dask={farming.ADDRESS}"
    with boards.inside(), farming.dask(boards, tmp_path) as running, public.open_executor(address) as pool:
        assert pool is not None
        armed.touch()
        assert strategy.front(replace(problem, executor=pool)) == alone
        assert not armed.exists() and sorted(one.poll() is None for one in running.values()) == [False, True, True]
        with pytest.raises(ZeroDivisionError):  # An exception in the user's function is not an error of the cluster.
            pool.map(divmod, [1], [0])
        installed = versions._version_cached
        known = {"dicompiler": "0.0.9"}
        monkeypatch.setattr(versions, "_version_cached", lambda name: known.get(name) or installed(name))
        with pytest.raises(DicompilerError, match=r"worker .* runs dicompiler .*, but this host runs 0\.0\.9: install"):
            dask_executor.DaskExecutor(farming.ADDRESS)
        monkeypatch.undo()
        scheduler = running["scheduler"].pid
        with pytest.raises(DicompilerError, match=rf"^executor {address}: the scheduler has ended: start it and its"):
            pool.map(farming.killer, [scheduler] * 3)


def test_reports_an_unusable_cluster_in_one_line(
    boards: Cluster, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr(dask_executor, "CONNECT_TIMEOUT_S", 1.0)
    line = ("explore", "absent.onnx", "--platform", "rpi4x2", "-o", "out", "--executor", f"dask={farming.ADDRESS}")
    said = f"executor dask={farming.ADDRESS}: "
    empty = replace(boards, boards={})
    with boards.inside():
        assert refused(1, *line).startswith(f"{said}no Dask ")
        monkeypatch.setattr(dask_executor, "CONNECT_TIMEOUT_S", 20.0)
        with farming.dask(empty, tmp_path_factory.mktemp("other"), start=farming.OTHER):
            with pytest.raises(DicompilerError, match=r"the scheduler runs Dask distributed 2024\.1\.0, but this host"):
                dask_executor.DaskExecutor(farming.ADDRESS)
            monkeypatch.setattr(versions, "_version_cached", lambda _name: "2024.1.0")
            monkeypatch.setattr(dask_executor, "CONNECT_TIMEOUT_S", 1.0)
            assert refused(1, *line) == f"{said}the scheduler has no worker: start workers with 'dask worker'"
