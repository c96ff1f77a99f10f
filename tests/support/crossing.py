"""Run programs of 64-bit ARM boards on this machine, with qemu-user and the libraries of the cross compiler."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from dicompiler_targets.mpi import fetch_libraries

SYSTEM = Path("/usr/aarch64-linux-gnu/lib")
CORE = """processor\t: {}
Features\t: fp asimd evtstrm crc32 cpuid
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd08
CPU revision\t: 3

"""
RANKS = {"PMIX_MCA_gds": "hash", "OMPI_MCA_btl": "tcp,self"}
"""Memory of mpirun and of ranks, which live in different address spaces here, is not shared."""


def emulator(place: Path) -> list[str]:
    """Return the command prefix that runs a program on an emulated board with Cortex-A72 cores, with files in `place`.

    onnxruntime reads /proc/cpuinfo and fails with that of this machine, so `place` has a replacement. It also has an
    empty zlib, which Open MPI loads but does not call, because the cross compiler lacks that library.
    """
    (place / "proc").mkdir(parents=True)
    (place / "proc" / "cpuinfo").write_text("".join(CORE.format(i) for i in range(os.cpu_count() or 1)))
    (place / "lib").symlink_to(SYSTEM)
    (place / "own").mkdir()
    empty = ["-shared", "-nostdlib", "-Wl,-soname,libz.so.1", "-x", "c++", "/dev/null"]
    subprocess.run(["aarch64-linux-gnu-g++", *empty, "-o", str(place / "own" / "libz.so.1")], check=True)
    libraries = f"LD_LIBRARY_PATH={fetch_libraries.fetch_libraries('aarch64') / 'lib'}:{place / 'own'}"
    return ["qemu-aarch64", "-cpu", "cortex-a72", "-L", str(place), "-E", libraries]
