"""The inputs that a network is run with: those that were given, else seeded random ones that it can take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.model import Model
from dicompiler.verify.comparison import graph_inputs, random_inputs
from dicompiler.verify.executor import check_inputs
from dicompiler.verify.ranges import limits, ranged


def given_inputs(model: Model, inputs: Mapping[str, NDArray[Any]] | None = None, seed: int = 0) -> dict[str, Any]:
    """`inputs`, checked; None: seeded random ones, in range where an input is a number of a token, a position, a class
    or a mask. DicompilerError for a missing, unknown or unfitting one."""
    values = graph_inputs(model)
    if inputs is not None:
        return check_inputs(values, inputs)
    return check_inputs(values, ranged(random_inputs(values, seed), limits(model), seed))


@contextmanager
def advising(model: Model, inputs: Mapping[str, NDArray[Any]] | None) -> Iterator[None]:
    """Says, where the network cannot be computed with random inputs, that one can give better ones, and which."""
    try:
        yield
    except DicompilerError as error:
        if inputs is not None or "onnxruntime" not in str(error).lower():
            raise
        names = ", ".join(value.name for value in graph_inputs(model))
        more = f"; its inputs were random numbers: give arrays that it takes (--inputs X.npz with {names})"
        raise type(error)(f"{error}{more}") from error
