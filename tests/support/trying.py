"""Run hundreds of command lines, each in a process with limited memory and time.

As a script, it reads a JSON list of argument lists from stdin. It prints one JSON line per command line, in any order:
[index, exit code or negated signal, stderr, processor seconds, peak resident bytes]. Processes are forked, which saves
the start of Python.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import NamedTuple

MEMORY, SECONDS, MAX_WAIT_S = 2 << 30, 20, 300
"""Limits of a command line: bytes, seconds of processor time, and seconds by the clock, which a busy machine needs."""


class Outcome(NamedTuple):
    """The outcome of a command line.

    Attributes:
        code: Exit code, or negated signal.
        said: Text on stderr.
        seconds: Processor time of the process.
        peak: Peak resident bytes.
    """

    code: int
    said: str
    seconds: float
    peak: int

    @property
    def fault(self) -> str:
        """The violated rule, or "": a command must succeed or print one line of error, within the limits."""
        if self.code not in (0, 1, 2):
            return f"exit code {self.code}: {self.said[-300:]!r}"
        lines = self.said.splitlines()
        if self.code and len([line for line in lines if ": error: " in line]) != 1:
            return f"not one line of error: {self.said[:300]!r}"
        if any(not line.startswith("dicompiler: ") or not line.isprintable() or len(line) > 2000 for line in lines):
            return f"a line that is not fit to print: {self.said[:300]!r}"
        return (
            "" if self.peak < MEMORY and self.seconds < SECONDS else f"{self.seconds:.0f} s, {self.peak / 1e6:.0f} MB"
        )


def outcomes(lines: Sequence[Sequence[object]]) -> list[Outcome]:
    """Run `dicompiler` with each list of arguments, and return the outcomes in the same order."""
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([[str(word) for word in line] for line in lines]),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = {index: Outcome(*rest) for index, *rest in map(json.loads, done.stdout.splitlines())}
    return [found[index] for index in range(len(lines))]


def _child(line: Sequence[str], said: int) -> None:
    from dicompiler.cli.command_line import main

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(said, 2)
    # The limit is on address space. Libraries have reserved much of it without using it, so that part is added.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY + _mapped(),) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    signal.alarm(MAX_WAIT_S)
    try:
        code = main(line)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 99
    sys.stderr.flush()
    os._exit(code)


def _mapped() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _serve() -> None:
    import onnx
    import onnxruntime  # noqa: F401

    from dicompiler.cli.command_line import main

    # This first compilation imports the modules that all forked processes need. It must not leave a thread running,
    # because threads do not survive a fork.
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float y) {y = Relu(x)}')
    with tempfile.TemporaryDirectory() as scratch, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        onnx.save(model, f"{scratch}/m.onnx")
        main(["compile", f"{scratch}/m.onnx", "--platform", "rpi4x2", "--strategy", "modnn", "-o", f"{scratch}/m"])
    lines = list(enumerate(json.load(sys.stdin)))[::-1]
    running: dict[int, tuple[int, int, str]] = {}
    while lines or running:
        while lines and len(running) < 2:
            index, line = lines.pop()
            said, path = tempfile.mkstemp()
            pid = os.fork()
            if not pid:
                _child(line, said)
            running[pid] = index, said, path
        pid, status, usage = os.wait4(-1, 0)
        index, said, path = running.pop(pid)
        os.close(said)
        with open(path, errors="surrogateescape") as file:
            text = file.read()
        os.remove(path)
        code = os.waitstatus_to_exitcode(status)
        seconds = usage.ru_utime + usage.ru_stime
        print(json.dumps([index, code, text, seconds, usage.ru_maxrss * 1024]), flush=True)


if __name__ == "__main__":
    _serve()
