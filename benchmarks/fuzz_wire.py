"""Give a million mutated message streams to the receiver of the target `sockets`.

The receiver must not crash, hang or allocate more memory than planned. The script prints the outcomes; the exit code
is 1 if a stream was not rejected by the protocol. How to run it: see README.md.
"""

from __future__ import annotations

import faulthandler
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
from support.fuzz_messages import Receiver, fuzz
from support.handmade import Made, halo, partial
from support.running import emit

from dicompiler.base.schema import load_json

CASES: Sequence[tuple[str, Callable[[], Made], str]] = (
    ("halo", halo, "a"),
    ("halo", halo, "b"),
    ("partial", partial, "a"),
    ("partial", partial, "b"),
)
"""Name and function of a program, and the device whose receiver gets the streams."""
HANG_S = 60
"""Seconds that a thousand message streams may take. Then the stacks of all threads are printed, and the test ends."""


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@click.command()
@click.option("--streams", default=1_000_000, show_default=True, help="Number of mutated streams, over all receivers.")
@click.option("--first", default=1_000_000, show_default=True, help="The first seed.")
def main(streams: int, first: int) -> None:
    """Feed mutated message streams to receivers in memory, and print how many streams ended in which way."""
    faulthandler.enable()
    start = time.perf_counter()
    for number, (name, build, device) in enumerate(CASES):
        with tempfile.TemporaryDirectory() as place:
            emit(build(), Path(place))
            receiver = Receiver(Path(place), load_json(Path(place, device, "manifest.json")))
            seeds = range(first + number * streams // len(CASES), first + (number + 1) * streams // len(CASES))
            fuzz(receiver, seeds[:1000])
            before = _peak_mib()
            for done in range(1000, len(seeds), 1000):
                faulthandler.dump_traceback_later(HANG_S, exit=True)
                fuzz(receiver, seeds[done : done + 1000])
            faulthandler.cancel_dump_traceback_later()
        ends = ", ".join(f"{count} {outcome}" for outcome, count in sorted(receiver.outcomes.items()))
        grown = _peak_mib() - before
        click.echo(
            f"{name} {device}: {ends}; at most {receiver.largest} bytes at once, process grew by {grown:.1f} MiB"
        )
    click.echo(
        f"{streams} streams in {time.perf_counter() - start:.0f} s: no crash, no hang, no memory beyond the plan"
    )


if __name__ == "__main__":
    sys.exit(main())
