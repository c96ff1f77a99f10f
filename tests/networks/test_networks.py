"""Networks have the published architectures, run in onnxruntime, and are reproducible."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from dicompiler import networks
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.cost.op_counts import count_macs
from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model

PUBLISHED = {
    "alexnet": 61_100_840,
    "bert_base": 109_482_240 - 768 * 769,  # Published counts include the pooler, which this network does not have.
    "densenet121": 7_978_856,
    "lenet": 61_706,
    "llama_small": 2 * 32_000 * 1024 + 24 * (1024 * (2 * 1024 + 2 * 256 + 3 * 2816) + 2 * 1024) + 1024,
    "mobilenet_v2": 3_504_872,
    "resnet101": 44_549_160,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "segformer_b0": 3_752_694,
    "squeezenet": 1_235_496,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "vit_tiny": 5_717_416,
    "whisper_tiny_encoder": 8_208_384,
    # Published counts are for models with fused batch normalization. They include 16 fixed weights (DFL), which this
    # test does not count.
    "yolo11n": 2_616_248 - 16,
    "yolov8n": 3_151_904 - 16,
}


def run(model: onnx.ModelProto) -> dict[str, NDArray[Any]]:
    """Return the outputs for normally distributed inputs of seed 0."""
    options = ort.SessionOptions()
    # Hide the warning "initializer appears in graph inputs", which is normal for IR version 3.
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options)
    random = np.random.default_rng(0)
    feed = {
        value.name: random.standard_normal(value.shape, dtype=np.float32)
        if value.type == "tensor(float)"
        else random.integers(0, 2, value.shape)
        for value in session.get_inputs()
    }
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feed), strict=True))


MLPERF_TINY = {  # Name: parameters and multiplications. Parameters are Keras' "total params" of the authors' models.
    "autoencoder": (269_992, 264_192),
    "ds_cnn": (24_908, 2_656_768),
    "person_detection": (221_794, 7_489_664),
    "resnet8": (78_666, 12_501_632),
}
#: From the Keras documentation: width factor, input size, multiply-adds and parameters (both in millions). The
#: parameters do not include the scale and shift of normalisations.
MOBILENET_V2 = (
    *((0.35, 96, 11, 1.66), (0.35, 160, 30, 1.66), (0.35, 224, 59, 1.66)),
    *((1.0, 96, 56, 3.47), (1.0, 160, 154, 3.47), (1.0, 224, 300, 3.47)),
)


def multiplications(model: onnx.ModelProto) -> int:
    layers = prepare(Model.load(model)).layers
    assert layers is not None
    return sum(count_macs(layers, layer) for layer in layers.layers)


@pytest.mark.parametrize("name", MLPERF_TINY)
def test_mlperf_tiny_networks_have_the_published_counts(name: str) -> None:
    model = networks.build(name)
    total = sum(math.prod(tensor.dims) for tensor in model.graph.initializer if tensor.dims)
    assert (total, multiplications(model)) == MLPERF_TINY[name]


@pytest.mark.parametrize(("width", "size", "million_macs", "millions"), MOBILENET_V2)
def test_mobilenet_v2_has_the_published_counts(width: float, size: int, million_macs: int, millions: float) -> None:
    model = networks.build("mobilenet_v2", width=width, size=size)
    kept = [t for t in model.graph.initializer if ".bn." not in t.name]
    assert round(sum(math.prod(tensor.dims) for tensor in kept) / 1e6, 2) == millions
    assert multiplications(model) // 1_000_000 == million_macs


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert networks.count_parameters(name) == PUBLISHED[name]


def test_yolov2_has_as_many_numbers_as_the_authors_weight_file() -> None:
    model = networks.build("yolov2", size=32)
    # The published file yolov2.weights has 203 934 260 bytes: 16 for the header, then all parameters in float32.
    assert sum(np.prod(tensor.dims) for tensor in model.graph.initializer) == (203_934_260 - 16) // 4


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lenet", {}),
        ("tiny", {}),
        ("quirks", {}),
        ("autoencoder", {"batch": 2, "width": 0.5}),
        ("ds_cnn", {"size": (20, 9)}),
        ("person_detection", {"size": 64, "classes": 3}),
        ("resnet8", {}),
        ("squeezenet", {"size": 96}),
        ("mobilenet_v2", {"size": 96, "width": 0.5}),
        ("resnet18", {"size": (64, 32), "width": 0.25, "batch": 2}),
        ("resnet50", {"size": 32, "width": 0.125, "opset": 21}),
        ("densenet121", {"size": 32, "width": 0.25}),
        ("alexnet", {"size": 64, "width": 0.1, "opset": 13}),
        ("vgg16", {"size": 32, "width": 0.1, "classes": 7}),
        ("yolov2", {"size": 64, "width": 0.1, "classes": 2}),
        ("yolov8n", {"size": 64, "width": 0.25, "classes": 3}),
        ("yolo11n", {"size": (64, 96), "width": 0.25, "batch": 2}),
        ("segformer_b0", {"size": 64, "width": 0.25}),
        ("bert_base", {"size": 16, "width": 0.25, "layers": 2, "vocabulary": 100}),
        ("bert_base", {"size": 16, "width": 0.25, "layers": 1, "batch": 2, "classes": 3}),
        (
            "llama_small",
            {"size": 6, "layers": 1, "hidden": 24, "heads": 6, "kv_heads": 3, "vocabulary": 90, "batch": 2},
        ),
        ("vit_tiny", {"size": 32, "width": 0.25, "batch": 2}),
        ("whisper_tiny_encoder", {"size": 40, "width": 0.25}),
    ],
)
def test_networks_are_valid_and_give_plausible_outputs(name: str, options: dict[str, Any]) -> None:
    model = networks.build(name, 3, **options)
    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version == 10
    assert model.opset_import[0].version == options.get("opset", 17)
    assert all(node.name for node in model.graph.node)
    declared = tuple(dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim)
    output = run(model)["output"]
    assert output.shape == declared
    assert np.isfinite(output).all()
    assert np.unique(output).size > output.size / 2
    assert output.std() < 100


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet"])
def test_light_networks_depend_on_the_seed(name: str) -> None:
    first, second = (next(iter(run(networks.build(f"light/{name}", seed)).values())) for seed in (0, 1))
    for output in (first, second):
        assert np.isfinite(output).all()
        assert np.unique(output).size > 100
    assert not np.array_equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["densenet121", "inception_v1", "inception_v2"])
def test_light_networks_keep_their_ir_version_and_have_random_weights(name: str) -> None:
    model = networks.build_light(name, 0)
    onnx.checker.check_model(model)
    assert model.ir_version == 3
    assert all(node.op_type != "ConstantOfShape" for node in model.graph.node)
    weights = [onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    assert all(np.unique(weight).size > 0.99 * weight.size for weight in weights if 1 < weight.size < 1000)


def test_all_light_networks_of_the_onnx_package_are_listed() -> None:
    files = (Path(onnx.__file__).parent / "backend/test/data/light").glob("light_*.onnx")
    names = sorted(path.stem.removeprefix("light_").removeprefix("bvlc_") for path in files)
    assert tuple(names) == networks.LIGHT_NAMES


LLAMA = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "vocabulary": 50}


@pytest.mark.parametrize("opset", [17, 18])
def test_cached_decoder_steps_match_one_run_over_all_tokens(opset: int) -> None:
    tokens = np.array([[7, 3, 44, 9]])
    shape = {"size": 1, "past": 4, "opset": opset, **LLAMA}
    models = [
        networks.build("llama_small", 2, **more) for more in ({**LLAMA, "size": 4}, shape, shape | {"static": True})
    ]
    every, grown, kept = (ort.InferenceSession(model.SerializeToString()) for model in models)
    expected = every.run(None, {"input_ids": tokens})[0]
    pasts = [value.name for value in grown.get_inputs() if value.name.startswith("past")]
    fixed, growing = ({name: np.zeros((1, 2, 4, 8), np.float32) for name in pasts} for _ in range(2))
    for place in range(4):
        now = {"input_ids": tokens[:, place : place + 1]}
        output, *present = kept.run(None, {**now, **fixed, "cache_position": np.array([place])})
        fixed = dict(zip(pasts, present, strict=True))
        filled = np.arange(5)[None] >= 4 - place
        output2, *present = grown.run(
            None, {**now, **growing, "position_ids": np.array([[place]]), "attention_mask": filled.astype(np.int64)}
        )
        growing = {name: value[:, :, 1:] for name, value in zip(pasts, present, strict=True)}
        for found in (output, output2):
            assert np.allclose(found[:, 0], expected[:, place], atol=1e-5)


def test_both_passthroughs_compute_the_same() -> None:
    small = {"size": 64, "width": 0.05, "classes": 2}
    both = ("space-to-depth", "reshape")
    first, second = (run(networks.build("yolov2", 1, passthrough=how, **small)) for how in both)
    assert np.array_equal(first["output"], second["output"])


def test_another_layer_does_not_change_other_weights() -> None:
    small, large = (
        {tensor.name: tensor for tensor in networks.build(name, 5, size=32, width=0.05).graph.initializer}
        for name in ("vgg16", "vgg19")
    )
    shared = small.keys() & large.keys()
    assert len(shared) == 32
    assert all(small[name] == large[name] for name in shared)


def test_bytes_do_not_depend_on_the_process() -> None:
    program = (
        "import hashlib; from dicompiler import networks\n"
        "for name in ('tiny', 'quirks', 'light/squeezenet'):\n"
        "    print(hashlib.sha256(networks.build(name, 2).SerializeToString()).hexdigest())"
    )
    here = [
        hashlib.sha256(networks.build(name, 2).SerializeToString()).hexdigest()
        for name in ("tiny", "quirks", "light/squeezenet")
    ]
    for seed in ("1", "2"):
        path = os.pathsep.join(p for p in sys.path if p)
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout.split() == here


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet5O", {}, "unknown network 'resnet5O' (did you mean 'resnet50'?)"),
        ("light/vgg91", {}, "unknown light network 'vgg91' (did you mean 'vgg19'?)"),
        ("tiny", {"sise": 3}, "network 'tiny': unknown option 'sise' (did you mean 'size'?)"),
        ("vgg16", {"depth": 3}, "network 'vgg16': unknown option 'depth'"),
        ("light/vgg19", {"size": 32}, "network 'light/vgg19' takes no option 'size'"),
        ("yolov2", {"passthrough": "reshap"}, "yolov2: unknown passthrough 'reshap' (did you mean 'reshape'?)"),
        ("tiny", {"seed": -1}, "network 'tiny': seed is -1"),
        ("yolov8n", {"size": 100}, "network 'yolov8n': size is (100, 100): use multiples of 32"),
        ("vit_tiny", {"opset": 13}, "network 'vit_tiny': opset 13 has no LayerNormalization: use 17 or later"),
        (
            "llama_small",
            {"kv_heads": 5},
            "network 'llama_small': 1024 features, 16 heads, 5 heads of keys and values: choose an even",
        ),
        (
            "llama_small",
            {"static": True},
            "network 'llama_small': past is 0: use at least the number of tokens (128)",
        ),
        ("bert_base", {"size": 513}, "network 'bert_base': size is 513 tokens: use at most 512"),
    ],
)
def test_suggests_the_nearest_network_or_option(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        networks.build(name, **options)
    assert str(caught.value).startswith(message)


def test_reports_the_layer_for_too_small_images() -> None:
    with pytest.raises(DicompilerError, match="the image is too small at 'pool5'"):
        networks.build("vgg16", size=16)
