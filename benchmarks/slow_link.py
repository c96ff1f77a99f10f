"""Check that no device is reported as failed only because its link is slow.

The boards are network namespaces, which need root:

PYTHONPATH=tests python benchmarks/slow_link.py --minutes 10 --rate 64kbit --in-flight 64
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from support.boards import cluster, shape
from support.handmade import halo
from support.running import emit

import dicompiler
from dicompiler.plugin_api import RunError, RunOptions
from dicompiler.plugin_api.artifacts import Hosts
from dicompiler_targets.sockets.target import SocketsTarget


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", default="64kbit", help="rate of each cable, in the notation of tc")
    parser.add_argument("--queue", default="1mb", help="queue at each end of a cable")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--size", type=int, default=32, help="rows and columns of the network's input")
    options = parser.parse_args()
    made = halo(options.size)
    with tempfile.TemporaryDirectory() as place, cluster(Path(place), "abc") as boards, boards.inside():
        directory = emit(made, Path(place, "artifact"))
        hosts = Hosts.load(boards.hosts(Path(place, "hosts.toml")))
        run = RunOptions(timeout_s=3600, in_flight=options.in_flight, hosts=hosts, insecure=True)
        SocketsTarget().install(directory, run)
        shape(boards, options.rate, options.queue)
        begun, count = time.monotonic(), 0
        try:
            session = dicompiler.connect(directory, run)
            began = time.monotonic()
            print(f"joined after {began - begun:.1f} s", flush=True)
            for _ in session.stream([made[2]] * 1_000_000):
                count += 1
                if time.monotonic() - began > 60 * options.minutes:
                    break
        except RunError as error:
            print(f"{time.monotonic() - begun:.1f} s, {count} frames: {error}")
            return 1
        print(f"{time.monotonic() - begun:.1f} s, {count} frames: no device failed")
        session.__exit__(RunError, None, None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
