"""A process that forks to run `dicompiler` commands, so that each of them need not import the compiler again.

`python command_server.py FD` reads requests from the socket with file descriptor FD: a JSON object with `arguments`,
`cwd` and `env`, and two file descriptors for stdout and stderr. It forks for each request, answers with a line with the
child's process id, and later with a line with its exit code (negative: the signal that ended it).

If the socket listens, the server accepts several clients at the same time.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any, NoReturn

PACKAGES = ("dicompiler", "dicompiler_passes", "dicompiler_strategies", "dicompiler_targets")
LEFT_OUT = ("dicompiler.testing", "dicompiler_targets.sockets.runtime", "dicompiler.__main__")
"""Modules that commands do not import."""
LIBRARIES = ("click.shell_completion", "onnx", "rich.table", "ortools.sat.python.cp_model")
MAX_REQUEST_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1
"""Operation of prctl(2): the calling process gets a signal when its parent ends."""


def preload() -> None:
    """Import the modules that commands need, except those that import onnxruntime.

    onnxruntime starts a thread when it is imported. The children would not have this thread, and wait for it.
    """
    sys.modules["onnxruntime"] = None  # type: ignore[assignment]  # Importing it is now an ImportError.
    for name in LIBRARIES:
        importlib.import_module(name)
    for package in map(importlib.import_module, PACKAGES):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.startswith(LEFT_OUT):
                with suppress(ImportError):
                    importlib.import_module(module.name)
    del sys.modules["onnxruntime"]
    gc.freeze()  # The garbage collector of children would otherwise copy the pages of all these modules.


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; return the request in the child, and None in the server after the last request."""
    while True:
        content, descriptors, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 2)
        if not content:
            return None
        if (child := os.fork()) == 0:
            for source, target in zip(descriptors, (1, 2), strict=True):
                os.dup2(source, target)
                os.close(source)
            requests.close()
            request: dict[str, Any] = json.loads(content)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        requests.sendall(f"{child}\n".encode())
        requests.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())


def accept_clients(listener: socket.socket) -> socket.socket:
    """Fork for each client; return the connection in the child."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The operating system removes ended children.
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return connection
        connection.close()


def run_command(request: dict[str, Any]) -> NoReturn:
    """Run a command and end this process as the interpreter does, but without the deletion of all modules."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    # Python created its stream objects for the server's stdout and stderr, which may be files. It would seek in them,
    # which fails if those of the command are pipes.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.argv = ["dicompiler", *request["arguments"]]
    from dicompiler.cli import main as run

    code = run()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def main() -> None:
    # The server ends with the process that started it.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    preload()
    requests = socket.socket(fileno=int(sys.argv[1]))
    if requests.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        requests = accept_clients(requests)
    request = serve(requests)
    if request is not None:
        run_command(request)


# Processes that commands start import this module again under another name. They must not serve requests.
if __name__ == "__main__":
    main()
