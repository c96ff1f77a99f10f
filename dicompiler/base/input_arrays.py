"""Conversion of user inputs (numbers, strings, lists) to NumPy arrays of the type and shape that the model needs.

The module imports numpy but not onnx, because a program that only sends inputs to running devices may lack onnx.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dicompiler.base.errors import DicompilerError, one_line

STRING_DTYPE = np.dtype(object)
"""Element type of string arrays."""


def coerce_input(given: Any, dtype: np.dtype[Any], shape: tuple[int, ...] | None, place: str) -> Any:
    """Return a user's input as an array in C order with the given type and shape.

    Numbers, strings and lists are converted if the conversion keeps their values. Arrays must already have the right
    type.

    Args:
        given: Number, string, list or array.
        dtype: Required type. For strings it is `object`; string arrays may contain str or bytes.
        shape: Required shape; None if any shape is allowed.
        place: Beginning of error messages: the input's name.

    Returns:
        The array.

    Raises:
        DicompilerError: `given` has another type or shape, or cannot be converted exactly.
    """
    array = to_array(given, dtype, place)
    if dtype == STRING_DTYPE and array.dtype.kind in "SU":
        array = array.astype(str).astype(object)
    if array.dtype != dtype:
        raise DicompilerError(f"{place} must be of type {dtype}, not {array.dtype}")
    if shape is not None and array.shape != shape:
        raise DicompilerError(f"{place} must have the shape {shape}, not {array.shape}")
    return array


def to_array(given: Any, dtype: np.dtype[Any], place: str) -> Any:
    """Return a user's number, string, list or array as an array in C order.

    Args:
        given: The user's value. An array keeps its type.
        dtype: Type to which everything but an array is converted.
        place: Beginning of error messages.

    Raises:
        DicompilerError: `given` cannot become an array, or the conversion would change a value.
    """
    try:
        array = np.asarray(given, order="C")
        if isinstance(given, np.ndarray | np.generic):
            return array
        converted = np.array(given, object) if dtype == STRING_DTYPE else array.astype(dtype)
    except (ValueError, TypeError) as error:
        raise DicompilerError(f"{place} is not an array: {one_line(str(error))}") from None
    if array.size and array.dtype.kind not in "biufcUO":
        raise DicompilerError(f"{place} is not an array: give numbers or strings")
    if dtype.kind in "biu" and not np.array_equal(converted, array):
        raise DicompilerError(f"{place} must be of type {dtype}: give numbers that fit this type")
    return converted


def check_index_range(given: Any, tables: Iterable[Mapping[str, Any]], place: str) -> None:
    """Raise DicompilerError if an integer input contains an invalid index into a lookup table of the model.

    Args:
        given: The input; anything but an integer array is ignored.
        tables: Tables that the input indexes: entries of `lookup_tables` in artifact.json. A table has `rows` rows. Its
            other keys say how the model computes an index: it may read only a `region` of the input, cast the values to
            `cast_dtype`, and add `offset`.
        place: Beginning of error messages: the input's name.

    Raises:
        DicompilerError: An index is out of range. The message names the index, its position and the table.
    """
    if not isinstance(given, np.ndarray) or given.dtype.kind not in "iu":
        return
    for table in tables:
        offset, region = table.get("offset", 0), table.get("region")
        low, high = table["min_index"] - offset, table["rows"] - offset
        read = given if region is None else given[tuple(slice(*interval) for interval in region)]
        read = read.astype(table.get("cast_dtype", read.dtype))
        if read.size and (read.min() < low or read.max() >= high):
            first = np.argwhere((read < low) | (read >= high))[0]
            index = tuple(first if region is None else first + [start for start, _ in region])
            sum_text = f" (to which the model adds {offset})" if offset else ""
            raise DicompilerError(
                f"{place}: the number {given[index]} at [{', '.join(map(str, index))}]{sum_text} is not the index of a "
                f"row of {table['table']!r}, which has {table['rows']} rows: give numbers from {-offset} to {high - 1}"
            )
