"""Names in the user's file of outputs that have another name in the graph.

A model may return one of its inputs, so that an input and an output have the same name. The compiler needs a node that
computes each output, so it renames such an output in the graph. The model's metadata map the new name to the name in
the file, which users see.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import onnx

OUTPUT_NAMES_KEY = "dicompiler.outputs"


def read_output_names(model: onnx.ModelProto) -> dict[str, str]:
    """Return the names in the user's file of the outputs that have another name in the graph.

    Args:
        model: Model with the names in its metadata.

    Returns:
        Name in the user's file, by the name of the graph output.
    """
    text = next((entry.value for entry in model.metadata_props if entry.key == OUTPUT_NAMES_KEY), "{}")
    return {str(name): str(user_name) for name, user_name in json.loads(text).items()}


def write_output_names(model: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Add the names that outputs have in the user's file to the metadata of a model.

    Args:
        model: The model, which is changed.
        names: Name in the user's file, by the name of the graph output.
    """
    if not names:
        return
    all_names = read_output_names(model) | dict(names)
    kept = [entry for entry in model.metadata_props if entry.key != OUTPUT_NAMES_KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    model.metadata_props.add(key=OUTPUT_NAMES_KEY, value=json.dumps(all_names, sort_keys=True))
