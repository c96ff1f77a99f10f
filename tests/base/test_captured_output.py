"""Captured output of processes has a limited size."""

from __future__ import annotations

import subprocess
import sys

from dicompiler.base.captured_output import KEPT_BYTES, CapturedOutput
from dicompiler_targets.sockets.device_connections import DeviceProcess


def test_keeps_start_and_end_of_the_output() -> None:
    loop = "for _ in range(300):\n  os.write(1, bytes(1 << 20))"
    code = f"import os\nos.write(1, b'begin')\n{loop}\nos.write(2, b'\\nthe \\x1bend')"
    popen = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert popen.stdout is not None
    process = DeviceProcess({"device": "a"}, popen, CapturedOutput(popen.stdout))
    assert popen.wait(60) == 0
    assert process.output is not None
    written = process.output.read()
    assert written.startswith(b"begin")
    assert len(written) < 2 * KEPT_BYTES + 100
    assert (
        f"[{(300 << 20) + len('begin') + len('the end') + 2 - 2 * KEPT_BYTES} bytes are omitted here]".encode()
        in written
    )
    assert process.describe_exit() == "its process ended with exit code 0: the \\x1bend"
