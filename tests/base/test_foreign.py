"""What others say is kept within bounds, and shown so that it cannot steer a terminal."""

from __future__ import annotations

import subprocess
import sys

from dicompiler.base.foreign import KEPT, Written, printable
from dicompiler_targets.sockets.processes import Process


def test_of_what_a_device_writes_the_beginning_and_the_end_are_kept() -> None:
    loop = "for _ in range(300):\n  os.write(1, bytes(1 << 20))"
    code = f"import os\nos.write(1, b'begin')\n{loop}\nos.write(2, b'\\nthe \\x1bend')"
    popen = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert popen.stdout is not None
    process = Process({"device": "a"}, popen, Written(popen.stdout))
    assert popen.wait(60) == 0
    assert process.log is not None
    written = process.log.read()
    assert written.startswith(b"begin")
    assert len(written) < 2 * KEPT + 100
    assert f"[{(300 << 20) + len('begin') + len('the end') + 2 - 2 * KEPT} bytes are left out here]".encode() in written
    assert process.ending() == "its process ended with exit code 0: the �end"


def test_text_from_elsewhere_is_one_line_without_control_characters() -> None:
    assert printable("a\x1b[31m\r\nb\u202ec\x00\x9b" + "d" * 5000, 20) == "a�[31m b�c��" + "d" * 8
