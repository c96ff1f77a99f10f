"""A headless Chromium for tests of HTML pages, controlled over pipes with the DevTools protocol.

It opens a file and returns values of JavaScript expressions, console messages, requested URLs, a PDF or a screenshot.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --disable-default-apps --disable-extensions --remote-debugging-pipe"
).split()
PATIENCE_S = 60.0
# A program that starts Chromium with the pipes of the DevTools protocol: Chromium reads from descriptor 3 and writes
# to 4.
PLUG = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(text), fcntl.F_DUPFD_CLOEXEC, 10) for text in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


@dataclass
class Browser:
    """A browser with one open page.

    Attributes:
        process: The browser's process.
        to: File descriptor to which commands are written.
        of: File descriptor from which answers and events are read.
        events: Method and parameters of each event since the page was opened.
        session: DevTools session of the page.
        count: Number of commands that were sent.
        rest: Bytes that were read after the last complete message.
    """

    process: subprocess.Popen[bytes]
    to: int
    of: int
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    session: str = ""
    count: int = 0
    rest: bytes = b""

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and return its result.

        Raises:
            RuntimeError: The browser reports an error, or does not answer in time.
        """
        self.count += 1
        message: dict[str, Any] = {"id": self.count, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self.count:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                result: dict[str, Any] = found["result"]
                return result
            self.events.append((found["method"], found["params"]))

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.of], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self.of, 1 << 16) if ready else b""
            if not data:
                raise RuntimeError("the browser sent no message in time, or ended")
            self.rest += data
        text, _, self.rest = self.rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file in a window of this size, and return when the page is loaded.

        A window of less than 500 pixels' width emulates a phone.
        """
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 500)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        # Without emulated focus, a headless page gets no focus events.
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.call("Page.navigate", url=page.absolute().as_uri())
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            found = self._next()
            self.events.append((found["method"], found["params"]))

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page; raise RuntimeError if it throws an exception."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def complaints(self) -> list[str]:
        """Return the page's console messages, exceptions, and log entries such as violations of its security policy."""
        self.value("new Promise((done) => setTimeout(done, 50))")
        wrong = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(parameters) for method, parameters in self.events if method in wrong]

    def requests(self) -> list[str]:
        """Return the URLs that the page requested, its own included."""
        return [p["request"]["url"] for method, p in self.events if method == "Network.requestWillBeSent"]

    def pdf(self) -> bytes:
        """Return the page as a PDF, printed with the page size of its style sheet."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"])

    def screenshot(self, whole: bool = True) -> bytes:
        """Return a PNG of the whole page, or of the window only."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser with an empty profile, and kill it with its child processes at the end."""
    program = shutil.which("chromium")
    assert program, "chromium is missing: apt install chromium"
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        theirs, to = os.pipe()
        of, ours = os.pipe()
        command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        wrapped = [sys.executable, "-c", PLUG, str(theirs), str(ours), *command]
        process = subprocess.Popen(
            wrapped, pass_fds=(theirs, ours), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        os.close(ours)
        found = Browser(process, to, of)
        try:
            target = next(t for t in found.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
            attached = found.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
            found.session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                found.call(f"{domain}.enable")
            yield found
        finally:
            _end(process)
            os.close(to)
            os.close(of)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the browser and its child processes, which share a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()
