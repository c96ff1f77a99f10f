"""Run `dicompiler` as users do, in a separate process."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import IO, Any

TEXT = """<ir_version: 8, opset_import: ["": 17]>
    g (float[N, 3, 16, 16] x) => (float[N, 4, 16, 16] y) {
      h = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1)
      r = Relu (h)
      s = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (r, w2)
      y = Dropout (s)
    }"""


SHAPE = ("--shape", "x=1x3x16x16")


TIMEOUT_S = 120.0
FRESH_PROCESS_VARIABLES = ("PYTHON", "LANG", "LC_", "DICOMPILER_PLUGINS")
"""Beginnings of the names of environment variables that have an effect only on a process that starts afresh."""


def command(
    *arguments: object, cwd: Path | None = None, stdout: IO[Any] | int = subprocess.PIPE, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `dicompiler` in a separate process, with `env` as additional environment variables.

    The process is a fork of one that has already imported the compiler, except if `env` could change the imports.
    """
    words = [*map(str, arguments)]
    if any(name.startswith(FRESH_PROCESS_VARIABLES) for name in env) or stdout != subprocess.PIPE:
        return subprocess.run(
            [sys.executable, "-m", "dicompiler", *words],
            env=environment(**env),
            cwd=cwd,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    return command_server().run(words, Path.cwd() if cwd is None else cwd, environment(**env))


def environment(**env: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}


def start_command_server(requests: socket.socket, env: dict[str, str]) -> None:
    """Start `command_server.py`, which reads requests from a socket, or from the clients of a listening socket."""
    script, number = Path(__file__).with_name("command_server.py"), requests.fileno()
    subprocess.Popen([sys.executable, script, str(number)], env=env, stdin=subprocess.DEVNULL, pass_fds=(number,))


@cache
def command_server() -> CommandServer:
    return CommandServer()


class CommandServer:
    """A process that forks for each command (see `command_server.py`). It ends with this process."""

    def __init__(self) -> None:
        # A packet socket delivers each request as a whole.
        self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._socket.settimeout(TIMEOUT_S)
        with theirs:
            start_command_server(theirs, environment())
        self._answers = self._socket.makefile("r")

    def run(self, words: list[str], cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a command.

        Args:
            words: The arguments of `dicompiler`.
            cwd: Its working directory.
            env: All of its environment variables.
        """
        request = json.dumps({"arguments": words, "cwd": str(cwd), "env": env}).encode()
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            socket.send_fds(self._socket, [request], [stdout.fileno(), stderr.fileno()])
            child = int(self._answers.readline())
            try:
                code = int(self._answers.readline())
            except TimeoutError:
                os.kill(child, signal.SIGKILL)
                command_server.cache_clear()
                raise subprocess.TimeoutExpired(words, TIMEOUT_S) from None
            texts = []
            for file in (stdout, stderr):
                file.seek(0)
                texts.append(io.TextIOWrapper(file).read())
            return subprocess.CompletedProcess(words, code, *texts)


@cache
def forked_command_line(python_path: str = "") -> list[str]:
    """Return a command line that runs `dicompiler` in a fork of a server, for programs that run it many times.

    Args:
        python_path: Directory with modules that the server can import.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # The operating system chooses an abstract name, which begins with a zero byte.
        listener.listen()
        name = listener.getsockname()[1:].decode()
        start_command_server(listener, environment(PYTHONPATH=os.pathsep.join(filter(None, [python_path, *sys.path]))))
    # Without site-packages (-I -S), Python starts in a tenth of the time.
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("forked_command.py")), name]


def failed(code: int, *arguments: object, **env: str) -> str:
    """Run `dicompiler`, check that it fails with this exit code, and return the only line that it prints."""
    done = command(*arguments, **env)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr.removesuffix("\n")
