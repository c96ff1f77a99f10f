"""Run `dicompiler` in a fork of a command server: `python forked_command.py SERVER [ARGUMENT …]`.

SERVER is the name of an abstract Unix socket (see `command_server.py`).
"""

from __future__ import annotations

import json
import os
import socket
import sys

if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(f"\0{sys.argv[1]}")
        request = {"arguments": sys.argv[2:], "cwd": os.getcwd(), "env": dict(os.environ)}
        socket.send_fds(server, [json.dumps(request).encode()], [1, 2])
        _child, code = (server.recv(100) for _ in range(2))
    sys.exit(int(code) if code else "the command server has ended")
