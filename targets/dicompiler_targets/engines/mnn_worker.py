"""Process that converts ONNX models to MNN networks, and runs each network once.

MNN's converter prints to stdout, and networks that MNN cannot compute may crash it. The process therefore forks for
each model. It imports only packages that MNN needs, and these only once.

    a line on stdin with a directory that contains model.onnx, shapes.json and engine_mnn.py
    ⇒ model.mnn and model.mnn.weight in this directory, and a line on stdout with the exit code of the fork
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ARGUMENTS = (
    "mnnconvert", "-f", "ONNX", "--modelFile", "model.onnx", "--MNNModel", "model.mnn", "--bizCode", "dicompiler",
    "--saveExternalData", "--useGeluApproximation", "0",
)  # fmt: skip


def serve() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # MNN prints to stdout, which must have replies only.
    sys.path = [path for path in sys.path if path]  # Modules in the current directory must not replace packages.

    # The module MNN.tools.mnnconvert would install a logging package, which replaces protobuf by an older version.
    import _tools
    import MNN  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _convert(Path(line.rstrip("\n")), _tools)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, file=replies, flush=True)


def _convert(directory: Path, tools: Any) -> None:
    """Convert the model in a directory, run it, and end the process. The file `log` gets all messages."""
    code = 1
    try:
        os.chdir(directory)
        with open("log", "wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        tools.mnnconvert(list(ARGUMENTS))
        _run()
        code = 0
    except Exception as error:
        print(f"{error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _run() -> None:
    import numpy as np

    sys.path.insert(0, "")
    from engine_mnn import EngineNetwork  # type: ignore[import-not-found]

    inputs, outputs = json.loads(Path("shapes.json").read_text(encoding="utf-8"))
    network = EngineNetwork(Path("model.mnn"), Path("model.mnn.weight"), threads=1, is_spinning=False)
    network.run([np.zeros(shape, np.float32) for shape in inputs], outputs)


if __name__ == "__main__":
    serve()
