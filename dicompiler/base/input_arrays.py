"""What a user gives for an input of a network, as an array of the type and shape that the network takes.

In: numbers, words, lists, arrays. Out: arrays. Needs numpy and nothing of ONNX: clients of boards have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dicompiler.base.errors import DicompilerError, one_line

STRING_DTYPE = np.dtype(object)
"""The type of arrays of words."""


def coerce_input(given: Any, dtype: np.dtype[Any], shape: tuple[int, ...] | None, place: str) -> Any:
    """What was given as an array in C order, of `dtype` and, where that is known, `shape`. Numbers, words and lists
    become of the type where that changes none of them; arrays must have it, but for words, which numpy may keep as text
    or bytes. DicompilerError, naming `place`, for what does not fit."""
    array = to_array(given, dtype, place)
    if dtype == STRING_DTYPE and array.dtype.kind in "SU":
        array = array.astype(str).astype(object)
    if array.dtype != dtype:
        raise DicompilerError(f"{place} must be of type {dtype}, not {array.dtype}")
    if shape is not None and array.shape != shape:
        raise DicompilerError(f"{place} must have the shape {shape}, not {array.shape}")
    return array


def to_array(given: Any, dtype: np.dtype[Any], place: str) -> Any:
    """What was given as an array in C order. Numbers, words and lists become of `dtype` where that changes none of
    them; arrays keep theirs. DicompilerError for what is no array, or would change."""
    try:
        array = np.asarray(given, order="C")
        if isinstance(given, np.ndarray | np.generic):
            return array
        made = np.array(given, object) if dtype == STRING_DTYPE else array.astype(dtype)
    except (ValueError, TypeError) as error:
        raise DicompilerError(f"{place} is no array: {one_line(str(error))}") from None
    if array.size and array.dtype.kind not in "biufcUO":
        raise DicompilerError(f"{place} is no array: give numbers or words")
    if dtype.kind in "biu" and not np.array_equal(made, array):
        raise DicompilerError(f"{place} must be of type {dtype}: give numbers that it can hold")
    return made


def check_index_range(given: Any, tables: Iterable[Mapping[str, Any]], place: str) -> None:
    """DicompilerError, naming `place`, the number and the table, where a whole number is no row of a table that it is
    looked up in. tables: each with its name, `table`, how many `rows` it has, and the `least` number that it takes:
    those below 0 count from its end. Where it has them: `type`, to which numbers are cast first, `offset`, which is
    added to them then; `region`, from where to where along each axis those stand that are looked up."""
    if not isinstance(given, np.ndarray) or given.dtype.kind not in "iu":
        return
    for one in tables:
        offset, region = one.get("offset", 0), one.get("region")
        low, high = one["least"] - offset, one["rows"] - offset
        read = given if region is None else given[tuple(slice(*interval) for interval in region)]
        read = read.astype(one.get("type", read.dtype))
        if read.size and (read.min() < low or read.max() >= high):
            first = np.argwhere((read < low) | (read >= high))[0]
            at = tuple(first if region is None else first + [start for start, _ in region])
            added = f", with {offset} added to it," if offset else ""
            raise DicompilerError(
                f"{place}: {given[at]} at [{', '.join(map(str, at))}]{added} is no row of {one['table']!r}, which has "
                f"{one['rows']}: give numbers from {-offset} to {high - 1}"
            )
