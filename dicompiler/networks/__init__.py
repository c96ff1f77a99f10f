"""Real network architectures with seeded weights, for tests, benchmarks and the demo: `build("resnet50", seed=1)`.

In: a name, a seed, options. Out: an onnx.ModelProto, the same bytes for the same arguments. NAMES are built here,
LIGHT_NAMES (`build("light/vgg19")`) come with the onnx package.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx

from dicompiler.base.errors import UsageError, nearest
from dicompiler.networks import classic, edge, residual
from dicompiler.networks.builder import Builder
from dicompiler.networks.light import LIGHT_NAMES, light

__all__ = ["LIGHT_NAMES", "NAMES", "build", "light", "parameters"]


@dataclass(frozen=True)
class _Network:
    """How to append the network, the image's usual side and channels (0: its input is a row of numbers, as many as its
    size), and what its function is called with."""

    append: Callable[..., str]
    size: int | tuple[int, int] = 224
    channels: int = 3
    fixed: Mapping[str, Any] = field(default_factory=dict)


_NETWORKS = {
    "alexnet": _Network(classic.alexnet),
    "autoencoder": _Network(edge.autoencoder, 640, 0),
    "densenet121": _Network(residual.densenet, fixed={"depth": 121}),
    "ds_cnn": _Network(edge.ds_cnn, (49, 10), 1),
    "lenet": _Network(classic.lenet, 32, 1),
    "mobilenet_v2": _Network(residual.mobilenet_v2),
    "person_detection": _Network(edge.person_detection, 96),
    "quirks": _Network(residual.quirks, 32),
    "resnet101": _Network(residual.resnet, fixed={"depth": 101}),
    "resnet18": _Network(residual.resnet, fixed={"depth": 18}),
    "resnet50": _Network(residual.resnet, fixed={"depth": 50}),
    "resnet8": _Network(edge.resnet8, 32),
    "squeezenet": _Network(classic.squeezenet),
    "tiny": _Network(residual.tiny, 32),
    "vgg16": _Network(classic.vgg, fixed={"depth": 16}),
    "vgg19": _Network(classic.vgg, fixed={"depth": 19}),
    "yolov2": _Network(classic.yolov2, 608),
}
NAMES = tuple(sorted(_NETWORKS))


def build(name: str, seed: int = 0, **options: Any) -> onnx.ModelProto:
    """A network with the weights of `seed` (at least 0).

    Options of all but the light ones: size (the image's side, or (height, width); of the autoencoder the number of its
    inputs), batch, classes (not of the autoencoder), width (a factor for the numbers of channels), opset (13 or later);
    alexnet also: columns; yolov2 also: anchors, passthrough. Where the architecture pools to a fixed size before its
    classifier (AlexNet, VGG), the classifier here takes what the image's size leaves.
    Errors: UsageError for an unknown name or option.
    """
    if seed < 0:
        raise UsageError(f"network {name!r}: seed is {seed}: take a number of at least 0")
    if name.startswith("light/"):
        if options:
            raise UsageError(f"network {name!r} takes no option {min(options)!r}: it is fixed but for its seed")
        return light(name.removeprefix("light/"), seed)
    net, output = _append(name, options)
    return net.model(output, seed)


def parameters(name: str, **options: Any) -> int:
    """The number of trained parameters of one of NAMES, without running statistics; no weight is made."""
    return _append(name, options)[0].parameters


def _append(name: str, options: Mapping[str, Any]) -> tuple[Builder, str]:
    """The grown builder and its output tensor."""
    if name not in _NETWORKS:
        raise UsageError(f"unknown network {name!r}{nearest(name, [*NAMES, *(f'light/{n}' for n in LIGHT_NAMES)])}")
    network = _NETWORKS[name]
    parameters = [key for key in inspect.signature(network.append).parameters if key not in ("net", *network.fixed)]
    known = [*parameters, "size", "batch", "opset"]
    for option in options:
        if option not in known:
            raise UsageError(f"network {name!r}: unknown option {option!r}{nearest(option, known)}")
    size = options.get("size", network.size)
    height, width = (size, size) if isinstance(size, int) else size
    image = (network.channels, height, width) if network.channels else (height,)
    net = Builder(name, (options.get("batch", 1), *image), options.get("opset", 17))
    given = {key: value for key, value in options.items() if key in parameters}
    return net, network.append(net, **network.fixed, **given)
