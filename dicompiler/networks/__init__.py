"""Network architectures with seeded weights: `build("resnet50", seed=1)`.

They serve tests, benchmarks and the demo.

The same arguments give the same bytes. NAMES are built by this package; LIGHT_NAMES (`build("light/vgg19")`) come with
the onnx package.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx

from dicompiler.base.errors import UsageError, did_you_mean
from dicompiler.networks import classic, decoder, detection, mlperf_tiny, residual, transformers
from dicompiler.networks.builder import NetworkBuilder
from dicompiler.networks.onnx_light_models import LIGHT_NAMES, build_light

__all__ = ["LIGHT_NAMES", "NAMES", "build", "build_light", "count_parameters", "describe", "network_options"]


@dataclass(frozen=True)
class _Network:
    """Architecture of a network.

    Attributes:
        append_to: Function that appends the network to a NetworkBuilder.
        size: Default size of the input.
        channels: Channels of the input; 0: the input only has the axes of its size.
        fixed_arguments: Arguments of `append_to` that are not options.
        size_axes: Number of axes of the size.
        token_inputs: Names of the inputs, if they are integers.
    """

    append_to: Callable[..., str]
    size: int | tuple[int, int] = 224
    channels: int = 3
    fixed_arguments: Mapping[str, Any] = field(default_factory=dict)
    size_axes: int = 2
    token_inputs: tuple[str, ...] = ()


_NETWORKS = {
    "alexnet": _Network(classic.alexnet),
    "autoencoder": _Network(mlperf_tiny.autoencoder, 640, 0, size_axes=1),
    "bert_base": _Network(
        transformers.bert_base, 128, 0, size_axes=1, token_inputs=("input_ids", "attention_mask", "token_type_ids")
    ),
    "densenet121": _Network(residual.densenet, fixed_arguments={"depth": 121}),
    "ds_cnn": _Network(mlperf_tiny.ds_cnn, (49, 10), 1),
    "lenet": _Network(classic.lenet, 32, 1),
    "llama_small": _Network(decoder.llama_small, 128, 0, size_axes=1, token_inputs=("input_ids",)),
    "mobilenet_v2": _Network(residual.mobilenet_v2),
    "person_detection": _Network(mlperf_tiny.person_detection, 96),
    "quirks": _Network(residual.quirks, 32),
    "resnet101": _Network(residual.resnet, fixed_arguments={"depth": 101}),
    "resnet18": _Network(residual.resnet, fixed_arguments={"depth": 18}),
    "resnet50": _Network(residual.resnet, fixed_arguments={"depth": 50}),
    "resnet8": _Network(mlperf_tiny.resnet8, 32),
    "segformer_b0": _Network(transformers.segformer_b0, 512),
    "squeezenet": _Network(classic.squeezenet),
    "tiny": _Network(residual.tiny, 32),
    "vgg16": _Network(classic.vgg, fixed_arguments={"depth": 16}),
    "vgg19": _Network(classic.vgg, fixed_arguments={"depth": 19}),
    "vit_tiny": _Network(transformers.vit_tiny),
    "whisper_tiny_encoder": _Network(transformers.whisper_tiny_encoder, 3000, 80, size_axes=1),
    "yolo11n": _Network(detection.yolo11n, 640),
    "yolov2": _Network(classic.yolov2, 608),
    "yolov8n": _Network(detection.yolov8n, 640),
}
NAMES = tuple(sorted(_NETWORKS))


def build(name: str, seed: int = 0, **options: Any) -> onnx.ModelProto:
    """Return a network with seeded weights.

    All networks except light ones have these options: size (side of the image, or (height, width); number of inputs of
    the autoencoder), batch, classes (not the autoencoder), width (factor for numbers of channels), opset (13 or later).
    Further
    options: columns of alexnet; anchors and passthrough of yolov2. AlexNet and VGG do not pool to a fixed size before
        the
    classifier, so its size depends on the image's size.

    Args:
        name: One of NAMES, or "light/" and one of LIGHT_NAMES.
        seed: Seed of the weights, at least 0.
        **options: Options of the network.

    Returns:
        The model.

    Raises:
        UsageError: The name or an option is unknown.
    """
    if seed < 0:
        raise UsageError(f"network {name!r}: seed is {seed}: use a number of at least 0")
    if name.startswith("light/"):
        if options:
            raise UsageError(f"network {name!r} takes no option {min(options)!r}: only its seed can be changed")
        return build_light(name.removeprefix("light/"), seed)
    net, output = _append_network(name, options)
    return net.to_model(output, seed)


def count_parameters(name: str, **options: Any) -> int:
    """Return the number of trained parameters of a network, without running statistics.

    No weights are made.

    Args:
        name: One of NAMES.
        **options: Options of the network.

    Returns:
        Number of parameters.
    """
    return _append_network(name, options)[0].parameter_count


def network_options(name: str) -> dict[str, Any]:
    """Return the options of a network with their defaults.

    Args:
        name: One of NAMES.

    Returns:
        Default value by option.
    """
    network = _NETWORKS[name]
    own = {key: p.default for key, p in inspect.signature(network.append_to).parameters.items() if key != "net"}
    return {"size": network.size, "batch": 1, "opset": 17} | {
        k: v for k, v in own.items() if k not in network.fixed_arguments
    }


def describe(name: str) -> str:
    """Return a short description of a network.

    Args:
        name: One of NAMES.

    Returns:
        A few words.
    """
    text = inspect.getdoc(_NETWORKS[name].append_to) or ""
    return re.split(r"\.\s| \(|: ", text, maxsplit=1)[0].replace("\n", " ").rstrip(".")


def _append_network(name: str, given: Mapping[str, Any]) -> tuple[NetworkBuilder, str]:
    """Return a builder with the network, and the name of its output tensor."""
    if name not in _NETWORKS:
        raise UsageError(
            f"unknown network {name!r}{did_you_mean(name, [*NAMES, *(f'light/{n}' for n in LIGHT_NAMES)])}"
        )
    network = _NETWORKS[name]
    known = network_options(name)
    for option in given:
        if option not in known:
            raise UsageError(f"network {name!r}: unknown option {option!r}{did_you_mean(option, known)}")
    known |= given
    size = known.pop("size")
    sides = (size,) * network.size_axes if isinstance(size, int) else tuple(size)
    image = (known.pop("batch"), *((network.channels,) if network.channels else ()), *sides)
    inputs: dict[str, int] = dict.fromkeys(network.token_inputs, onnx.TensorProto.INT64) or {
        "input": onnx.TensorProto.FLOAT
    }
    net = NetworkBuilder(name, image, known.pop("opset"), inputs)
    return net, network.append_to(net, **network.fixed_arguments, **known)
