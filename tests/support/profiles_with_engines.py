"""Profiles (measured layer times) of networks in several engines, for tests of the choice of engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from support.profiles import document, written

from dicompiler import networks
from dicompiler.cost.layer_kinds import rate_kinds
from dicompiler.cost.profile import layer_signature
from dicompiler.driver.prepare import prepare
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.onnx.model import Model

Factor = Callable[[LayerGraph, Layer], float | None]


def profile_with_ncnn(directory: Path, network: str, factor: Factor, unit_s: float = 1.0) -> str:
    """Write a profile of a network in which ncnn needs `factor` times as long as onnxruntime for each layer.

    ncnn does not compute a layer if its factor is None. All times are multiplied by `unit_s`.
    """
    return profile_with_engines(directory, network, {"ncnn": factor}, unit_s)


def profile_with_engines(directory: Path, network: str, factors: Mapping[str, Factor], unit_s: float = 1.0) -> str:
    """Write a profile as `profile_with_ncnn` does, with the times of several engines."""
    layers = prepare(Model.load(networks.build(network, 0)), state="none").layers
    assert layers is not None
    content: dict[str, Any] = document(layers)
    for entry in content["layers"]:
        for piece in entry["measurements"]:
            piece.update({key: unit_s * piece[key] for key in ("median_s", "min_s", "max_s")})
    engines = [
        {
            "name": name,
            "versions": {name: "1.0"},
            "call_s": 0.0,
            "whole_model_s": None,
            "layers": _scaled_layers(
                content, {layer_signature(layers, layer): factor(layers, layer) for layer in layers.layers}
            ),
        }
        for name, factor in factors.items()
    ]
    return f"profile{{file={written(directory, content | {'engines': engines})} others=true}}"


def _scaled_layers(content: dict[str, Any], factors: Mapping[str, float | None]) -> list[dict[str, Any]]:
    return [
        {
            "signature": entry["signature"],
            "measurements": [
                {**piece, **{key: value * piece[key] for key in ("median_s", "min_s")}}
                for piece in entry["measurements"]
            ],
        }
        for entry in content["layers"]
        if (value := factors[entry["signature"]]) is not None
    ]


def fast_if_winograd(layers: LayerGraph, layer: Layer) -> float | None:
    """Return a factor with which ncnn computes 3×3 convolutions fast, and all other layers so slowly that it loses."""
    return 0.1 if rate_kinds(layers, layer)[0] == "Conv3x3" else 20.0
