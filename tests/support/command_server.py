"""A process that forks to run `dicompiler` commands, so that each of them need not import the compiler again.

`python command_server.py FD` reads requests from the socket with file descriptor FD: a JSON object with `arguments`,
`cwd` and `env`, and two file descriptors for stdout and stderr. It forks for each request, answers with a line with the
child's process id, and later with a line with its exit code (negative: the signal that ended it).
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
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


def run_command(request: dict[str, Any]) -> NoReturn:
    """Run a command and end this process as the interpreter does, but without the deletion of all modules."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = ["dicompiler", *request["arguments"]]
    from dicompiler.cli import main as run

    code = run()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def main() -> None:
    preload()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        run_command(request)


# Processes that commands start import this module again under another name. They must not serve requests.
if __name__ == "__main__":
    main()
