"""Search for the smallest arena (working memory) with which TFLite-micro can run a model.

The size that TFLite-micro itself reports is too small, so models are run with different sizes. This is done in a
separate process, because TFLite-micro ends its process if an arena is far too small.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence

from dicompiler.plugin_api import DicompilerError
from dicompiler_targets.tflm.flatbuffer import import_optional

RUNTIME_MODULE = "tflite_micro.python.tflite_micro.runtime"
ARENA_ALIGNMENT_BYTES = 16
"""TFLite-micro aligns the arena and its contents to multiples of this number of bytes."""
FIRST_ARENA_BYTES, MAX_ARENA_BYTES = 1 << 12, 1 << 30
TIMEOUT_S = 600.0

_arena_cache: dict[bytes, int] = {}
"""Arena sizes in bytes that were measured in this process, by the SHA-256 of the model."""


def measure_arenas(models: Sequence[bytes], names: Sequence[str]) -> list[int]:
    """Return the bytes of an arena that suffices for each model: less than 64 bytes above the minimum.

    Args:
        models: Contents of the .tflite files.
        names: Names of the models, for error messages.

    Raises:
        DicompilerError: TFLite-micro rejects a model.
    """
    import_optional(RUNTIME_MODULE)
    digests = [hashlib.sha256(model).digest() for model in models]
    new = {d: (model, name) for d, model, name in zip(digests, models, names, strict=True) if d not in _arena_cache}
    if new:
        sizes = _run_trials([model for model, _ in new.values()], [name for _, name in new.values()])
        _arena_cache.update(zip(new, sizes, strict=True))
    return [_arena_cache[digest] for digest in digests]


def _run_trials(models: Sequence[bytes], names: Sequence[str]) -> list[int]:
    """Return the bytes of the smallest arena of each model, which a separate process finds."""
    input_bytes = b"".join(struct.pack("<Q", len(model)) + model for model in models)
    code = f"from {__name__} import main; main()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=input_bytes,
        capture_output=True,
        env=environment,
        timeout=TIMEOUT_S,
        check=False,
    )
    sizes = [json.loads(line) for line in done.stdout.decode().splitlines()]
    if done.returncode or len(sizes) != len(models):
        said = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        cause = next((line for line in reversed(said) if "Failed to" not in line), said[-1] if said else "no reason")
        raise DicompilerError(
            f"target tflm: {names[min(len(sizes), len(names) - 1)]}: TFLite-micro cannot run it: {cause.strip()}: "
            "use target sockets for such a network"
        )
    return [int(size) for size in sizes]


def main() -> None:
    import_optional(RUNTIME_MODULE)  # Imported here, so that the child processes of the trials inherit the module.
    data, at = sys.stdin.buffer.read(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        model = data[at + 8 : at + 8 + length]
        at += 8 + length
        trials = ArenaTrials(model)
        print(json.dumps(find_least_arena(trials)), flush=True)
        trials.close()


def find_least_arena(trials: ArenaTrials) -> int:
    """Return the bytes of the smallest arena in which a model runs.

    Running a model takes long. The search therefore first finds the smallest arena in which the model can be created.
    """
    loadable = search_least_size(lambda size: trials.fits_arena(size, False))
    return loadable if trials.fits_arena(loadable) else search_least_size(trials.fits_arena, loadable)


def search_least_size(fits: Callable[[int], bool], first: int = FIRST_ARENA_BYTES) -> int:
    """Return the smallest multiple of ARENA_ALIGNMENT_BYTES for which `fits` is True; the search begins at `first`.

    `fits` must be True for all larger sizes too.
    """
    high = first
    while not fits(high):
        high *= 2
        if high > MAX_ARENA_BYTES:
            raise SystemExit(1)
    low = 0 if high == first else high // 2
    while high - low > ARENA_ALIGNMENT_BYTES:
        middle = (low + high) // 2 // ARENA_ALIGNMENT_BYTES * ARENA_ALIGNMENT_BYTES
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


class ArenaTrials:
    """Tries arenas for a model in a child process, which is replaced if TFLite-micro ends it."""

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._child, self._to, self._from = 0, -1, -1

    def fits_arena(self, size: int, runs: bool = True) -> bool:
        """Return True if the model can be created in an arena of `size` bytes and, if `runs`, can run in it."""
        if not self._child:
            self._fork()
        os.write(self._to, struct.pack("<Q?", size, runs))
        answer = os.read(self._from, 1)
        if not answer:
            self.close()
        return answer == b"y"

    def close(self) -> None:
        if self._child:
            os.close(self._to)
            os.close(self._from)
            os.waitpid(self._child, 0)
            self._child = 0

    def _fork(self) -> None:
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._to)
            os.close(self._from)
            while request := os.read(theirs_in, 9):
                os.write(theirs_out, b"y" if _fits_arena(self.model, *struct.unpack("<Q?", request)) else b"n")
            os._exit(0)
        os.close(theirs_in)
        os.close(theirs_out)


def _fits_arena(model: bytes, size: int, runs: bool) -> bool:
    try:
        interpreter = import_optional(RUNTIME_MODULE).Interpreter.from_bytes(model, arena_size=size)
        if runs:
            interpreter.invoke()
    except RuntimeError:
        return False
    except Exception as error:  # TFLite-micro raises errors of many types for invalid files.
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return False
    return True
