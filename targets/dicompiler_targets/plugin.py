"""Registration of the built-in targets and engines, through the same hooks that other plugins use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dicompiler.plugin_api import API_VERSION, hookimpl

if TYPE_CHECKING:
    from dicompiler.plugin_api import Engine, Target

dicompiler_api = API_VERSION


@hookimpl
def dicompiler_targets() -> Iterable[type[Target]]:
    from dicompiler_targets.mpi import MpiTarget
    from dicompiler_targets.sockets.target import SocketsTarget
    from dicompiler_targets.tflm import TflmTarget

    return [SocketsTarget, MpiTarget, TflmTarget]


@hookimpl
def dicompiler_engines() -> Iterable[type[Engine]]:
    from dicompiler_targets.engines.mnn import MnnEngine
    from dicompiler_targets.engines.ncnn import NcnnEngine
    from dicompiler_targets.engines.onnxruntime import OnnxruntimeEngine

    return [OnnxruntimeEngine, NcnnEngine, MnnEngine]
