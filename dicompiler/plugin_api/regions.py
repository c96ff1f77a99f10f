"""Regions of tensors, tilings of layers, and a plan's computations and transfers.

This module is part of the public API for plugin authors. A name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dicompiler.base.lazy_module import lazy_module

if TYPE_CHECKING:
    from dicompiler.ir.layers import TensorKey
    from dicompiler.ir.plan import FailurePlan
    from dicompiler.ir.regions import (
        bounding_region,
        contains,
        full_region,
        intersect,
        is_empty,
        region_shape,
        split_proportionally,
        volume,
        with_interval,
    )
    from dicompiler.ir.routing import (
        AssemblyConcat,
        AssemblyLeaf,
        Box,
        OutputDelivery,
        Routing,
        ShareTask,
        StateRetention,
        Task,
        TaskId,
        TaskNode,
        assembly_leaves,
    )
    from dicompiler.partition.bounds_inference import (
        align_region,
        cuttable_axes,
        make_share_task,
        output_shape,
        reduction_length,
    )
    from dicompiler.partition.lowering import lower, partition
    from dicompiler.partition.placed_model import read_part, remove_annotations
    from dicompiler.partition.routing import route_on_platform
    from dicompiler.partition.tiling import (
        AxisLabel,
        align_cuts,
        exit_layer,
        fused_regions,
        grid_tiles,
        is_read_only_within,
        labelled_axis,
        named_axes,
        single_device_plan,
        split_axis,
        tile_layer,
    )

__all__ = [
    "AssemblyConcat", "AssemblyLeaf", "AxisLabel", "Box", "FailurePlan", "OutputDelivery", "Routing", "ShareTask",
    "StateRetention", "Task", "TaskId", "TaskNode", "TensorKey", "align_cuts", "align_region", "assembly_leaves",
    "bounding_region", "contains", "cuttable_axes", "exit_layer", "full_region", "fused_regions", "grid_tiles",
    "intersect", "is_empty", "is_read_only_within", "labelled_axis", "lower", "make_share_task", "named_axes",
    "output_shape", "partition", "read_part", "reduction_length", "region_shape", "remove_annotations",
    "route_on_platform", "single_device_plan", "split_axis", "split_proportionally", "tile_layer", "volume",
    "with_interval",
]  # fmt: skip

if not TYPE_CHECKING:  # Type checkers must not see `__getattr__`, because they would then accept unknown names.
    __getattr__, __dir__ = lazy_module(__name__)
