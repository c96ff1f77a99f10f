"""Network architectures with seeded weights for tests, benchmarks and the demo: `build("resnet50", seed=1)`.

Calls with equal arguments return models with equal bytes. NAMES are built by this package. LIGHT_NAMES, such as "vgg19"
(`build("light/vgg19")`), are in the onnx package.
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
class _NetworkDefinition:
    """Architecture of a network, and the form of its inputs.

    Attributes:
        append_to: Function that appends the network's nodes to a NetworkBuilder, and returns its output tensor.
        size: Default size of the input.
        channels: Number of channels of the input; 0 if the input has no channel axis.
        fixed_arguments: Arguments of `append_to` that users cannot set.
        size_axes: Number of axes of the input whose extent is a size: 2 for images, 1 for sequences and vectors.
        token_inputs: Names of the inputs, if they are integers (tokens); () for one float input.
    """

    append_to: Callable[..., str]
    size: int | tuple[int, int] = 224
    channels: int = 3
    fixed_arguments: Mapping[str, Any] = field(default_factory=dict)
    size_axes: int = 2
    token_inputs: tuple[str, ...] = ()


_NETWORKS = {
    "alexnet": _NetworkDefinition(classic.alexnet),
    "autoencoder": _NetworkDefinition(mlperf_tiny.autoencoder, 640, 0, size_axes=1),
    "bert_base": _NetworkDefinition(
        transformers.bert_base, 128, 0, size_axes=1, token_inputs=("input_ids", "attention_mask", "token_type_ids")
    ),
    "densenet121": _NetworkDefinition(residual.densenet, fixed_arguments={"depth": 121}),
    "ds_cnn": _NetworkDefinition(mlperf_tiny.ds_cnn, (49, 10), 1),
    "lenet": _NetworkDefinition(classic.lenet, 32, 1),
    "llama_small": _NetworkDefinition(decoder.llama_small, 128, 0, size_axes=1, token_inputs=("input_ids",)),
    "mobilenet_v2": _NetworkDefinition(residual.mobilenet_v2),
    "person_detection": _NetworkDefinition(mlperf_tiny.person_detection, 96),
    "quirks": _NetworkDefinition(residual.quirks, 32),
    "resnet101": _NetworkDefinition(residual.resnet, fixed_arguments={"depth": 101}),
    "resnet18": _NetworkDefinition(residual.resnet, fixed_arguments={"depth": 18}),
    "resnet50": _NetworkDefinition(residual.resnet, fixed_arguments={"depth": 50}),
    "resnet8": _NetworkDefinition(mlperf_tiny.resnet8, 32),
    "segformer_b0": _NetworkDefinition(transformers.segformer_b0, 512),
    "squeezenet": _NetworkDefinition(classic.squeezenet),
    "tiny": _NetworkDefinition(residual.tiny, 32),
    "vgg16": _NetworkDefinition(classic.vgg, fixed_arguments={"depth": 16}),
    "vgg19": _NetworkDefinition(classic.vgg, fixed_arguments={"depth": 19}),
    "vit_tiny": _NetworkDefinition(transformers.vit_tiny),
    "whisper_tiny_encoder": _NetworkDefinition(transformers.whisper_tiny_encoder, 3000, 80, size_axes=1),
    "yolo11n": _NetworkDefinition(detection.yolo11n, 640),
    "yolov2": _NetworkDefinition(classic.yolov2, 608),
    "yolov8n": _NetworkDefinition(detection.yolov8n, 640),
}
NAMES = tuple(sorted(_NETWORKS))


def build(name: str, seed: int = 0, **options: Any) -> onnx.ModelProto:
    """Return a network with seeded weights.

    All networks except light ones have these options:
    - size: side of the image, or (height, width); for networks without images, number of tokens, frames or inputs.
    - batch: number of inputs that are computed together.
    - classes: number of classes (only networks with classes).
    - width: factor for the numbers of channels (most networks).
    - opset: opset version, 13 or later.

    `network_options` returns all options of a network, with their defaults.

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
    """Return the number of trained parameters of a network, without running statistics of normalizations.

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
    parameters = inspect.signature(network.append_to).parameters.items()
    options = {key: p.default for key, p in parameters if key != "net" and key not in network.fixed_arguments}
    return {"size": network.size, "batch": 1, "opset": 17} | options


def describe(name: str) -> str:
    """Return a short description of a network, such as "VGG-16 or VGG-19".

    Args:
        name: One of NAMES.

    Returns:
        The description.
    """
    text = inspect.getdoc(_NETWORKS[name].append_to) or ""
    return re.split(r"\.\s| \(|: ", text, maxsplit=1)[0].replace("\n", " ").rstrip(".")


def _append_network(name: str, options: Mapping[str, Any]) -> tuple[NetworkBuilder, str]:
    if name not in _NETWORKS:
        names = [*NAMES, *(f"light/{light_name}" for light_name in LIGHT_NAMES)]
        raise UsageError(f"unknown network {name!r}{did_you_mean(name, names)}")
    network = _NETWORKS[name]
    values = network_options(name)
    for option in options:
        if option not in values:
            raise UsageError(f"network {name!r}: unknown option {option!r}{did_you_mean(option, values)}")
    values |= options
    size = values.pop("size")
    sides = (size,) * network.size_axes if isinstance(size, int) else tuple(size)
    shape = (values.pop("batch"), *((network.channels,) if network.channels else ()), *sides)
    inputs: dict[str, int] = dict.fromkeys(network.token_inputs, onnx.TensorProto.INT64)
    net = NetworkBuilder(name, shape, values.pop("opset"), inputs or {"input": onnx.TensorProto.FLOAT})
    return net, network.append_to(net, **network.fixed_arguments, **values)
