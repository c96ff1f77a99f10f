"""The MPI target: one C++ program for all ranks, and a package for each host."""

from __future__ import annotations

from dicompiler_targets.mpi.target import MpiTarget

__all__ = ["MpiTarget"]
