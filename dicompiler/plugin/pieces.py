"""Pieces that an operator rule gives, of whoever wrote it: what is wrong with one.

In: an operation, the region asked for, what came back. Out: the fault in words.
"""

from __future__ import annotations

from typing import Any

from dicompiler.ir.operator_rule import Operation, Piece
from dicompiler.ir.regions import Region, contains, full_region


def describe_piece_error(operation: Operation, region: Region, piece: Any) -> str:
    """What is wrong with the piece that a rule gives for `region` of the output; '' where it may be right."""
    if not isinstance(piece, Piece):
        return f"returned {type(piece).__name__} instead of a Piece"
    whole = full_region(operation.out_shape)
    if not _inside(region, piece.out) or not _inside(piece.out, whole):
        return f"out is {piece.out}: it must hold the region asked for, {region}, and lie in the output, {whole}"
    if piece.written_region is not None and (
        not _inside(piece.out, piece.written_region) or not _inside(piece.written_region, whole)
    ):
        return f"raw is {piece.written_region}: it must hold out, {piece.out}, and lie in the output, {whole}"
    if len(piece.needs) != len(operation.inputs):
        return f"needs has {len(piece.needs)} entries: give one for each of the {len(operation.inputs)} inputs"
    for i, (need, there) in enumerate(zip(piece.needs, operation.full_needs(), strict=True)):
        if need is not None and (there is None or not _inside(need, there)):
            return f"needs[{i}] is {need}: it must lie in the input, {there}"
    return ""


def _inside(inner: Any, outer: Any) -> bool:
    """Whether a region, of the same rank, lies in another."""
    return len(inner) == len(outer) and contains(outer, inner)
