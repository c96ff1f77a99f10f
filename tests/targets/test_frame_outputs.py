"""Outputs of several devices become the outputs of a frame."""

from dicompiler_targets.frame_outputs import merge_outputs


def test_takes_each_output_from_the_first_device_that_has_it() -> None:
    outputs = {"a": {"y": 1}, "b": {"y": 2, "x": 3}}
    assert list(merge_outputs(["x", "y"], outputs).items()) == [("x", 3), ("y", 1)]
