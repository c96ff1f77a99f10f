"""The built-in passes, registered through the same hook as those of plugins."""

from __future__ import annotations

from collections.abc import Iterable

from dicompiler.plugin_api import API_VERSION, Pass, hookimpl

dicompiler_api = API_VERSION


@hookimpl
def dicompiler_passes() -> Iterable[type[Pass]]:
    """Return the classes of the built-in passes, in the order of a usual pipeline."""
    from dicompiler_passes.channel_partition import FusePass, LipPass, LopPass
    from dicompiler_passes.form_layers import FormLayers
    from dicompiler_passes.infer_shapes import InferShapes
    from dicompiler_passes.keep_states import KeepStates
    from dicompiler_passes.normalise import Normalise
    from dicompiler_passes.partition import PartitionPass
    from dicompiler_passes.quantise import Quantise
    from dicompiler_passes.spatial_partition import FuseTiles, PlacePass, TileGrid, TileHeight
    from dicompiler_passes.trim import Trim

    splitting: list[type[Pass]] = [
        PlacePass,
        TileHeight,
        TileGrid,
        FuseTiles,
        LopPass,
        LipPass,
        FusePass,
        PartitionPass,
    ]
    return [Normalise, Quantise, InferShapes, KeepStates, FormLayers, Trim, *splitting]
