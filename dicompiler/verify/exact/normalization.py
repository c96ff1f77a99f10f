"""Integer functions that replace normalizations in the exact check.

The exact check compares a split network with the whole network bit by bit, so it must compute without rounding. A
normalization divides and therefore rounds. Its replacement uses only integers, and changes an element x to

    scale · (b − (s modulo 16)) + shift

Here b is x modulo 16, and s is the sum of b over the group. The group of x consists of all elements that the operator
normalizes together with x. `scale` and `shift` are inputs of the operator; not all normalizations have them. If a split
omits an element of the group, reads it twice, or reads another element instead, s changes, and with it all results of
the group. The modulus keeps the results small in networks of any depth.
"""

from __future__ import annotations

import numpy as np
from onnx import AttributeProto, NodeProto, TensorProto, helper

from dicompiler.verify.exact.function_builder import (
    MODULUS,
    StandInCall,
    attribute_constant,
    constant_node,
    nonnegative_mod,
    reduce_sum,
    refer_attribute,
)
from dicompiler.verify.exact.generic import weighted_sum_body

DEFAULT_AXES = (0, 2, 3)
"""Default axes of MeanVarianceNormalization."""


def instance_body(call: StandInCall) -> list[NodeProto]:
    """Return the nodes of an integer function that replaces InstanceNormalization."""
    return [
        *nonnegative_mod(call),
        constant_node("maps", np.array([0, 0, -1], np.int64)),
        helper.make_node("Reshape", ["bounded", "maps"], ["elements"]),
        *_subtract_group_sum(call, "elements", [constant_node("last", np.array([2], np.int64))], "last", 2),
        *_scale_and_shift(["X1", "X2"]),
        *_reshape_like("scaled", "X0"),
    ]


def group_body(call: StandInCall) -> list[NodeProto]:
    """Return the nodes of an integer function that replaces GroupNormalization.

    Scale and shift have one element for each group before opset 21, and one for each channel since then.
    """
    nodes = [
        *nonnegative_mod(call),
        attribute_constant("count", "value_int", "num_groups", AttributeProto.INT),
        constant_node("one", np.array([1], np.int64)),
        constant_node("same", np.array([0], np.int64)),
        constant_node("rest", np.array([-1], np.int64)),
        helper.make_node("Reshape", ["count", "one"], ["groups"]),
        helper.make_node("Concat", ["same", "groups", "rest"], ["by_group"], axis=0),
        helper.make_node("Reshape", ["bounded", "by_group"], ["elements"]),
        *_subtract_group_sum(call, "elements", [constant_node("last", np.array([2], np.int64))], "last", 2),
    ]
    if call.opset >= 21:
        nodes += [
            constant_node("maps", np.array([0, 0, -1], np.int64)),
            helper.make_node("Reshape", ["bounded", "maps"], ["by_channel"]),
            helper.make_node("Shape", ["by_channel"], ["channels"]),
            helper.make_node("Reshape", ["less", "channels"], ["of_channels"]),
        ]
    return [
        *nodes,
        *_scale_and_shift(["X1", "X2"], "of_channels" if call.opset >= 21 else "less"),
        *_reshape_like("scaled", "X0"),
    ]


def layer_body(call: StandInCall) -> list[NodeProto]:
    """Return the nodes of an integer function that replaces LayerNormalization and RMSNormalization."""
    nodes = [
        *nonnegative_mod(call),
        call.node("Flatten", ["bounded"], ["elements"]),
        *_subtract_group_sum(call, "elements", [constant_node("last", np.array([1], np.int64))], "last", 1),
        *_reshape_like("less", "X0", "shaped"),
    ]
    if not any(call.input_types[2:]):
        return [*nodes, helper.make_node("Mul", ["shaped", "X1"], ["Y"])]
    nodes.append(helper.make_node("Mul", ["shaped", "X1"], ["scaled"]))
    return [*nodes, helper.make_node("Add", ["scaled", "X2"], ["Y"])]


def skip_body(call: StandInCall) -> list[NodeProto]:
    """Return the nodes of an integer function that replaces SkipLayerNormalization.

    A group extends along the last axis of a weighted sum of the inputs.
    """
    axis = constant_node("last", np.array([-1], np.int64))
    return [
        *weighted_sum_body(call, "mix"),
        *nonnegative_mod(call, "mix"),
        *_subtract_group_sum(call, "bounded", [axis], "last", -1, "Y"),
    ]


def mean_variance_body(call: StandInCall) -> list[NodeProto]:
    """Return the nodes of an integer function that replaces MeanVarianceNormalization.

    `prepare_node` has set the attribute `axes` of the calling node if it was missing.
    """
    axes = attribute_constant("axes", "value_ints", "axes", AttributeProto.INTS)
    return [*nonnegative_mod(call), *_subtract_group_sum(call, "bounded", [axes], "axes", None, "Y")]


def lp_body(call: StandInCall) -> list[NodeProto]:
    """Return the nodes of an integer function that replaces LpNormalization.

    Since opset 13, it computes (x modulo 16) - (the sum of x modulo 16 over the axis, modulo 16). Before, it computes x
    minus the largest element along the axis, because the attribute `axes` of ReduceSum cannot refer to the attribute
    `axis` of the calling node. The attribute `axis` of TopK can.
    """
    if call.opset < 13:
        inputs, attributes = (["X0"], {"k": 1}) if call.opset < 10 else (["X0", "one"], {})
        nodes = [] if call.opset < 10 else [constant_node("one", np.array([1], np.int64))]
        nodes.append(call.node("TopK", inputs, ["greatest", "place"], **attributes))
        return [*nodes, helper.make_node("Sub", ["X0", "greatest"], ["Y"])]
    axis = attribute_constant("axis", "value_int", "axis", AttributeProto.INT)
    nodes = [
        axis,
        constant_node("one", np.array([1], np.int64)),
        helper.make_node("Reshape", ["axis", "one"], ["axes"]),
    ]
    return [*nonnegative_mod(call), *_subtract_group_sum(call, "bounded", nodes, "axes", None, "Y")]


def softmax_body(call: StandInCall) -> list[NodeProto]:
    """Return the nodes of an integer function that replaces Softmax and LogSoftmax.

    As with these operators, each result depends on all elements of its group. Since opset 13, a group extends along the
    axis that the attribute `axis` names; before, along this axis and all later ones.
    """
    if call.opset >= 13:
        return lp_body(call)
    return [
        *nonnegative_mod(call),
        call.node("Flatten", ["bounded"], ["elements"]),
        *_subtract_group_sum(call, "elements", [], "", 1),
        *_reshape_like("less", "X0"),
    ]


def _subtract_group_sum(
    call: StandInCall, tensor: str, axes: list[NodeProto], name: str, axis: int | None, target: str = "less"
) -> list[NodeProto]:
    """Return nodes that compute `target` = tensor - (sum of `tensor` over some axes, modulo 16).

    ReduceSum reads its axes from an input since opset 13, and from an attribute before. The axes are therefore given
    twice.

    Args:
        call: Description of the calling nodes.
        tensor: Name of a tensor of integers from 0 to 15.
        axes: Since opset 13: nodes that compute the axes.
        name: Since opset 13: name of the tensor with the axes.
        axis: Before opset 13: the only axis. If None, the axes are the attribute `axes` of the calling node.
        target: Name of the result.
    """
    over = helper.make_node("ReduceSum", ["numbers"], ["sum"], keepdims=1)
    if axis is None:
        refer_attribute(over, "axes", "axes", AttributeProto.INTS)
    summed = [*axes, helper.make_node("ReduceSum", ["numbers", name], ["sum"], keepdims=1)]
    if call.opset < 13:
        summed = [over] if axis is None else reduce_sum(call, "numbers", axis, "sum")
    return [
        helper.make_node("Cast", [tensor], ["numbers"], to=TensorProto.INT64),
        *summed,
        constant_node("sixteen", np.array(MODULUS, np.int64)),
        helper.make_node("Div", ["sum", "sixteen"], ["quotient"]),
        helper.make_node("Mul", ["quotient", "sixteen"], ["whole"]),
        helper.make_node("Sub", ["sum", "whole"], ["remainder"]),
        helper.make_node("Cast", ["remainder"], ["share"], to=call.dtype),
        helper.make_node("Sub", [tensor, "share"], [target]),
    ]


def _scale_and_shift(vectors: list[str], tensor: str = "less") -> list[NodeProto]:
    """Return nodes that compute `scaled` = tensor · vectors[0] + vectors[1].

    `tensor` has rank 3, and both vectors lie along its axis 1.
    """
    return [
        constant_node("upright", np.array([-1, 1], np.int64)),
        helper.make_node("Reshape", [vectors[0], "upright"], ["scale"]),
        helper.make_node("Reshape", [vectors[1], "upright"], ["shift"]),
        helper.make_node("Mul", [tensor, "scale"], ["product"]),
        helper.make_node("Add", ["product", "shift"], ["scaled"]),
    ]


def _reshape_like(tensor: str, like: str, target: str = "Y") -> list[NodeProto]:
    return [
        helper.make_node("Shape", [like], ["shape"]),
        helper.make_node("Reshape", [tensor, "shape"], [target]),
    ]


BODIES = {
    "group_normalization": group_body,
    "instance_normalization": instance_body,
    "layer_normalization": layer_body,
    "lp_normalization": lp_body,
    "mean_variance_normalization": mean_variance_body,
    "skip_normalization": skip_body,
    "softmax": softmax_body,
}
"""Builders of functions that replace normalizations, by the name that operator rules use."""
