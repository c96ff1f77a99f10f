"""The annotating passes by hand: effects of `dicompiler opt` with named layers and part counts on the plan."""

from __future__ import annotations

import numpy as np
import pytest

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Part
from dicompiler.ir.platform import Platform
from dicompiler.ir.routing import Routing
from dicompiler.partition.segmentation import build_program
from dicompiler.plugin.pass_manager import PassManager, make_pipeline
from dicompiler.verify.executor import ProgramExecutor, run_model

TEXT = """
<ir_version: 8, opset_import: ["" : 13]>
net (float[1, 4, 9, 8] x) => (float[1, 6] y)
<float[8, 4, 3, 3] w1, float[8, 1, 3, 3] w2, float[6, 8, 1, 1] w3, float[64, 108] w4, float[64] b4, float[6, 64] w5>
{
   [conv1] c1 = Conv <pads = [1, 1, 1, 1]> (x, w1)
   [relu1] r1 = Relu (c1)
   [depthwise] c2 = Conv <group = 8, pads = [1, 1, 1, 1]> (r1, w2)
   [conv3] c3 = Conv <strides = [2, 2]> (c2, w3)
   [pool] p = MaxPool <kernel_shape = [3, 2]> (c3)
   [flatten] f = Flatten (p)
   [fc1] g1 = Gemm <transB = 1> (f, w4, b4)
   [relu4] r4 = Relu (g1)
   [fc2] g2 = Gemm <transB = 1> (r4, w5)
   [softmax] y = Hardmax <axis = 1> (g2)
}
"""


@pytest.fixture(scope="module")
def model() -> Model:
    rng = np.random.default_rng(1)
    import onnx

    text = TEXT.replace("float[64, 108] w4", "float[64, 54] w4")
    proto = onnx.parser.parse_model(text)
    for name, shape in {
        "w1": (8, 4, 3, 3),
        "w2": (8, 1, 3, 3),
        "w3": (6, 8, 1, 1),
        "w4": (64, 54),
        "b4": (64,),
        "w5": (6, 64),
    }.items():
        values = rng.integers(-1, 2, shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return Model.load(proto)


def run(model: Model, text: str, platform: Platform | None = None) -> PipelineState:
    passes = make_pipeline("normalise,infer-shapes,form-layers," + text)
    return PassManager(passes).run(PipelineState(model=model, platform=platform))


def parts(model: Model, text: str, layer: str, platform: Platform | None = None) -> tuple[Part, ...]:
    plan = run(model, text, platform).plan
    assert plan is not None
    return plan.layers[layer]


def computes_the_same(model: Model, text: str) -> Routing:
    result = run(model, text + ",partition")
    assert result.plan is not None and result.routing is not None
    inputs = {"x": np.random.default_rng(2).integers(-4, 5, (1, 4, 9, 8)).astype(np.float32)}
    execution = ProgramExecutor(build_program(result.model, result.plan.devices)).run(inputs)
    reference = run_model(model, inputs)
    assert np.array_equal(execution.outputs["y"], reference["y"])
    return result.routing


def test_unnamed_layers_stay_whole_on_first_device(model: Model) -> None:
    assert parts(model, "tile-height{layers=conv1 parts=3}", "fc1") == (Part("d0"),)


def test_name_of_absorbed_node_selects_its_layer(model: Model) -> None:
    for absorbed, layer in (("relu1", "conv1"), ("relu1..relu4", "conv1..fc1")):
        wanted = run(model, f"place{{layers={layer} device=d1}}").plan
        assert run(model, f"place{{layers={absorbed} device=d1}}").plan == wanted


def test_place_moves_whole_layers(model: Model) -> None:
    assert parts(model, "place{layers=fc1..softmax device=d1}", "fc2") == (Part("d1"),)
    assert (
        len(computes_the_same(model, "place{layers=fc1..softmax device=d1}").received_boxes) == 2
    )  # The two transfers are: f to d1, and y back.


def test_tile_height_cuts_rows_evenly_or_by_shares(model: Model) -> None:
    rows = [part.region[2] for part in parts(model, "tile-height{layers=conv1 parts=4}", "conv1") if part.region]
    assert rows == [(0, 3), (3, 5), (5, 7), (7, 9)]
    shared = parts(model, "tile-height{layers=conv1 parts=2 shares=1,2}", "conv1")
    assert [part.region[2] for part in shared if part.region] == [(0, 3), (3, 9)]
    computes_the_same(model, "tile-height{layers=conv1..conv3 parts=4}")


def test_tile_grid_cuts_rows_and_columns(model: Model) -> None:
    own = parts(model, "tile-grid{layers=conv1 rows=2 columns=2}", "conv1")
    assert [part.region[2:] for part in own if part.region] == [
        ((0, 5), (0, 4)),
        ((0, 5), (4, 8)),
        ((5, 9), (0, 4)),
        ((5, 9), (4, 8)),
    ]
    computes_the_same(model, "tile-grid{layers=conv1..conv3}")


def test_fused_tiles_grow_backwards_without_exchange(model: Model) -> None:
    text = "fuse-tiles{layers=conv1..conv3 parts=2}"
    rows = [part.region[2] for part in parts(model, text, "conv1") if part.region]
    assert rows == [(0, 6), (5, 9)]
    routing = computes_the_same(model, text)
    assert not [box for box in routing.received_boxes if box.key.tensor in ("r1", "c2")]
    computes_the_same(model, "fuse-tiles{layers=conv1..pool rows=1 columns=2}")


def test_surplus_tiles_go_to_lanes(model: Model) -> None:
    own = parts(model, "fuse-tiles{layers=conv1..conv3 parts=5 devices=d0,d1}", "conv1")
    assert [(part.device, part.lane) for part in own] == [("d0", 0), ("d0", 1), ("d0", 2), ("d1", 0), ("d1", 1)]
    routing = computes_the_same(model, "fuse-tiles{layers=conv1..conv3 parts=5 devices=d0,d1}")
    order = [(task.lane, task.layer) for task in routing.tasks if task.device == "d1" and task.layer != "pool"]
    assert order == [(lane, layer) for lane in (0, 1) for layer in ("conv1", "depthwise", "conv3")]


def test_lop_cuts_weights_with_channels(model: Model) -> None:
    result = run(model, "lop{layers=fc1 parts=3},partition")
    shapes = result.model.initializers()
    held = sorted(shapes[n.input[1]][1] for n in result.model.proto.graph.node if n.name.startswith("fc1"))
    assert held == [(21, 54), (21, 54), (22, 54)]
    # Without `layers`, lop cuts all layers that allow it, including the depthwise convolution.
    computes_the_same(model, "lop{parts=3}")


def test_lip_merges_in_three_ways(model: Model) -> None:
    for merge, count in (("one", 1), ("scatter", 2), ("all", 2)):
        own = parts(model, f"lip{{layers=fc1 parts=2 merge={merge}}}", "fc1")
        assert [part.reduce for part in own] == [(0, 27), (27, 54), *[None] * count]
        computes_the_same(model, f"lip{{parts=2 merge={merge}}}")


def test_fuse_needs_no_exchange_between_layers(model: Model) -> None:
    for layers in ("fc1..fc2", "conv3..fc1", "conv1..conv3"):
        routing = computes_the_same(model, f"fuse{{layers={layers} parts=2}}")
        first, last = layers.split("..")
        graph = routing.layers
        between = graph.layers[graph.position[first] : graph.position[last]]
        inner = {layer.output for layer in between}
        assert not [box for box in routing.received_boxes if box.key.tensor in inner and box.key.reduce is None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tile-height{layers=conv9}", "no layer 'conv9'"),
        ("tile-height{layers=conv1..fc9}", "no layer 'fc9'"),
        ("tile-height{layers=conv1 parts=10}", "has 9 rows, too few for 10 parts"),
        ("tile-height{layers=fc1}", "cannot be split along height: axes that can be split: channel"),
        ("tile-grid{layers=conv1 rows=10 columns=1}", "too small for 10×1 tiles"),
        ("lop{layers=softmax}", "cannot be split along channel: axes that can be split: none"),
        ("lop{layers=fc2 parts=7}", "has 6 output channels, too few for 7 parts"),
        ("lip{layers=depthwise}", "cannot be split along input channels"),
        ("lip{layers=fc1 merge=none}", "invalid merge 'none': expected one, scatter or all"),
        ("fuse{layers=fc1}", "a single layer cannot be fused"),
        ("fuse-tiles{}", "name the layers to fuse"),
        ("fuse-tiles{layers=conv1,pool}", "exactly one of them must be read outside"),
        ("fuse-tiles{layers=conv1 parts=2 rows=2}", "not both"),
        ("place{layers=conv1 device=a devices=b}", "device and devices are both set: omit one of them"),
        ("tile-height{layers=conv3..conv1}", "'conv3..conv1' is empty: 'conv1' comes before 'conv3'"),
        ("tile-height{parts=0}", "parts: expected a number of at least 1, got 0"),
        ("tile-height{parts=-1}", "parts: expected a number of at least 1, got -1"),
        ("tile-grid{rows=0}", "rows: expected a number of at least 1, got 0"),
        ("tile-grid{columns=-2}", "columns: expected a number of at least 1, got -2"),
        ("fuse-tiles{layers=conv1 parts=-1}", "parts: expected a number of at least 1, got -1"),
        ("lip{parts=0}", "parts: expected a number of at least 1, got 0"),
        ("tile-height{shares=0,0}", "shares: expected numbers above 0"),
        ("tile-height{shares=1,inf}", "shares: expected numbers above 0"),
        ("tile-height{shares=1,2,3}", "3 shares for 2 parts"),
    ],
)
def test_rejects_impossible_split_in_one_line(model: Model, text: str, message: str) -> None:
    with pytest.raises(DicompilerError) as raised:
        run(model, text)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_default_devices_are_computing_devices(model: Model) -> None:
    platform = Platform.load("rpi4x3")
    own = parts(model, "tile-height{layers=conv1 parts=3}", "conv1", platform)
    assert [part.device for part in own] == ["pi01", "pi02", "pi03"]
    for text in ("tile-height{layers=conv1 devices=pi04}", "place{layers=conv1 device=pi04}"):
        with pytest.raises(UsageError, match="the platform has no device 'pi04'"):
            run(model, text, platform)
