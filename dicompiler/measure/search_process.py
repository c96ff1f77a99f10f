"""The process in which an adaptive session searches for better plans.

It is started with the session and kept, because Python's start, imports and the first compilation take longer than most
searches.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict

from dicompiler.base.errors import RunError
from dicompiler.measure.adapt_search import SearchAnswer, SearchRequest


class SearchProcess:
    """A process that makes one search after another. It is started again if it has ended.

    One thread may call `prepare` and `search`, and another one `close`.

    Attributes:
        popen: The process; None before the first call of `prepare` or `search`.
    """

    def __init__(self) -> None:
        self.popen: subprocess.Popen[str] | None = None
        # Stderr is a file, because no thread reads it. A pipe would become full, and the process would block.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._lock, self._is_closed = threading.Lock(), False

    def prepare(self, request: SearchRequest) -> None:
        """Let the process load all that a search needs, and wait until it is ready or has ended.

        Args:
            request: An example of the later searches.

        Raises:
            RunError: The object was closed.
        """
        popen = self._send({"prepare": asdict(request)})
        assert popen.stdout is not None
        popen.stdout.readline()

    def search(self, request: SearchRequest) -> SearchAnswer:
        """Search for a better plan in the process, and wait for the result.

        Raises:
            RunError: The search failed, or the process ended, or the object was closed.
        """
        popen = self._send({"search": asdict(request)})
        assert popen.stdout is not None
        line = popen.stdout.readline()
        if self._is_closed:
            raise RunError("the session was closed")
        try:
            answer = json.loads(line)
            if "error" in answer:
                raise RunError(f"the search failed: {answer['error']}")
            return SearchAnswer(**answer)
        except (ValueError, TypeError):
            popen.kill()
            raise RunError(f"the search ended without a result: {self._last_error(popen.wait())}") from None

    def close(self) -> None:
        """End the search process, even while it searches."""
        with self._lock:
            self._is_closed = True
            if self.popen is not None:
                self.popen.kill()
                self.popen.wait()

    def _send(self, message: object) -> subprocess.Popen[str]:
        with self._lock:
            if self._is_closed:
                raise RunError("the session was closed")
            if self.popen is None or self.popen.poll() is not None:
                command = [sys.executable, "-m", "dicompiler.measure.adapt_search"]
                pipe = subprocess.PIPE
                # With `start_new_session`, Ctrl-C interrupts only the calling process, which then ends this one.
                self.popen = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, start_new_session=True
                )
            assert self.popen.stdin is not None
            # A broken pipe means that the process has ended. `search` reports this.
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps(message), file=self.popen.stdin, flush=True)
            return self.popen

    def _last_error(self, exit_code: int) -> str:
        self._errors.seek(0)
        return (self._errors.read().strip().splitlines() or [f"exit code {exit_code}"])[-1]
