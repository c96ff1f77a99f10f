"""`explore` on a Dask cluster of this machine: evaluations per second with N workers against one.

    python benchmarks/farm.py [--workers 4] [--rounds 3] [--network mobilenet_v2]

Both clusters are measured in turn, in several rounds. The ratios of the medians and of the minima of the times are
printed. The ratio for `explore` cannot exceed the number of this machine's cores. In a second measurement, the workers
therefore wait `--wait` seconds instead of computing. Its ratio shows the limit of the scheduler and of dicompiler on
more cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import replace

from dicompiler import networks, open_executor
from dicompiler.driver import dask_executor
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.onnx.model import Model
from dicompiler.plugin.registry import registry
from dicompiler.search.pareto_front import ParetoFront
from dicompiler.search.problem import Problem

SPEC = "genetic{generations=10 population=32 measured=32 measured_generations=4}"
WAITS = 128


@contextlib.contextmanager
def cluster(workers: int, port: int) -> Iterator[Executor]:
    """Start a Dask scheduler and `workers` workers with one thread each, and yield an executor that uses them."""
    run = "from distributed.cli.dask_{0} import main; main()"
    more = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    scheduler = [run.format("scheduler"), "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]
    worker = [run.format("worker"), f"127.0.0.1:{port}", "--nthreads", "1", "--no-dashboard", "--no-nanny"]
    lines = [scheduler, *[worker] * workers]
    started = [
        subprocess.Popen([sys.executable, "-c", *line], env=more, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for line in lines
    ]
    try:
        with open_executor(f"dask=127.0.0.1:{port}") as pool:
            assert pool is not None
            pool._client.wait_for_workers(workers)  # type: ignore[attr-defined]
            yield pool
    finally:
        for process in started:
            process.kill()
            process.wait()


def search(problem: Problem, pool: Executor | None) -> tuple[float, ParetoFront]:
    start = time.perf_counter()
    front = registry().make("strategies", SPEC).front(replace(problem, executor=pool))
    return time.perf_counter() - start, front


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given.add_argument("--workers", type=int, default=4)
    given.add_argument("--rounds", type=int, default=3)
    given.add_argument("--network", default="mobilenet_v2")
    given.add_argument("--wait", type=float, default=0.05)
    options = given.parse_args()
    dask_executor.CONNECT_TIMEOUT_S = 60.0
    problem = load_problem(Model.load(networks.build(options.network, 0)), "rpi4-gateway-x8", target="sockets")
    _, alone = search(problem, None)
    times: dict[tuple[str, int], list[float]] = {}
    with cluster(1, 18787) as one, cluster(options.workers, 18788) as many:
        pools = {1: one, options.workers: many}
        for pool in pools.values():
            search(problem, pool)
        for _ in range(options.rounds):
            for count, pool in pools.items():
                seconds, front = search(problem, pool)
                assert front == alone, "the front is another one"
                times.setdefault(("explore", count), []).append(seconds)
                start = time.perf_counter()
                list(pool.map(time.sleep, [options.wait] * WAITS))
                times.setdefault((f"waiting {1000 * options.wait:g} ms", count), []).append(time.perf_counter() - start)
    print(f"{os.cpu_count()} cores, {options.network}, {options.rounds} rounds, {SPEC}; all fronts are alike")
    for what in dict.fromkeys(what for what, _ in times):
        base, spread = times[what, 1], times[what, options.workers]
        median, least = (pick(base) / pick(spread) for pick in (statistics.median, min))
        print(f"{what}: {options.workers} workers against 1: {median:.2f} times (medians), {least:.2f} (minima)")


if __name__ == "__main__":
    main()
