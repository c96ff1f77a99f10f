"""Artifacts of the MPI target for tests, and how its programs are called without dicompiler."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from handmade import Made

from dicompiler.compilation import Compilation
from dicompiler_targets.mpi import MpiTarget, tools


def emit(made: Made, directory: Path, **options: Any) -> Path:
    """Writes the program's artifact; options are the target's."""
    directory.mkdir(exist_ok=True)
    MpiTarget(**options).emit(Compilation(model=made[1], program=made[0]), directory)
    return directory


def environment() -> dict[str, str]:
    """Ours, in which root may start ranks, and programs and headers are found as the target finds them."""
    roots = {f"{name}_ALLOW_RUN_AS_ROOT{end}": "1" for name in ("OMPI", "PRTE") for end in ("", "_CONFIRM")}
    own = {"PATH": tools.search_path(), tools.INCLUDE: str(tools.include()), "OMPI_MCA_btl": "^ofi"}
    return os.environ | roots | own
