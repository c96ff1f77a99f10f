"""Programs: bytes of tensors, and roles of replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from onnx import TensorProto

from dicompiler.ir.program import DeviceProgram, Program, Step, TensorSpec, Transfer

DEVICES = tuple(DeviceProgram(name, name, (), (), (), {}) for name in ("a", "b"))


def program(*names: str) -> Program:
    """Return a program with a number of transfers from a to b."""
    transfers = tuple(Transfer(i, "a", "b", TensorSpec(n, TensorProto.FLOAT, (2, 3))) for i, n in enumerate(names))
    steps = tuple(Step("send", transfer.index) for transfer in transfers)
    return Program((replace(DEVICES[0], steps=steps), DEVICES[1]), transfers, (), (), {}, ())


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [(TensorProto.FLOAT, 60), (TensorProto.FLOAT16, 30), (TensorProto.BOOL, 15), (TensorProto.INT4, 8)],
)
def test_nbytes_counts_packed_elements(dtype: int, nbytes: int) -> None:
    assert TensorSpec("x", dtype, (3, 5)).nbytes == nbytes
    assert TensorSpec("x", dtype, (0, 5)).nbytes == 0


def test_program_of_one_role_is_that_role() -> None:
    single = program("x", "y")
    assert single.roles == (single,)
    assert single.all_transfers == single.transfers


def test_transfers_are_numbered_through_all_roles() -> None:
    whole = replace(program("x", "y"), other_roles=(program("u"), program(), program("v", "w")))
    assert [len(role.transfers) for role in whole.roles] == [2, 1, 0, 2]
    assert all(role.other_roles == () for role in whole.roles)
    assert [(transfer.index, transfer.value.name) for transfer in whole.all_transfers] == list(enumerate("xyuvw"))
    assert [transfer.index for transfer in whole.other_roles[2].transfers] == [0, 1]
