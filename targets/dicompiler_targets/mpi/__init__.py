"""The target `mpi`: C++ programs for MPI with ONNX Runtime."""

from __future__ import annotations

from dicompiler_targets.mpi.target import MpiTarget

__all__ = ["MpiTarget"]
