"""Model outputs with two names: one in the graph, and the one that users know from their file.

A model may return one of its inputs, so that an input and an output have the same name. The compiler needs a node that
computes each output, and the output of a node cannot have the name of an input. Such an output gets a new name in the
graph. The model's metadata map it to the name in the user's file, which the results of runs have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import onnx

OUTPUT_NAMES_KEY = "dicompiler.outputs"


def read_output_names(model: onnx.ModelProto) -> dict[str, str]:
    """Return the outputs of a model that have another name for users.

    Args:
        model: Model with the names in its metadata.

    Returns:
        Name for users by the name of the graph output.
    """
    text = next((entry.value for entry in model.metadata_props if entry.key == OUTPUT_NAMES_KEY), "{}")
    return {str(name): str(user_name) for name, user_name in json.loads(text).items()}


def write_output_names(model: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Store further names of outputs for users in the metadata of a model.

    Args:
        model: The model, which is changed.
        names: Name for users by the name of the graph output.
    """
    if not names:
        return
    all_names = read_output_names(model) | dict(names)
    kept = [entry for entry in model.metadata_props if entry.key != OUTPUT_NAMES_KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    model.metadata_props.add(key=OUTPUT_NAMES_KEY, value=json.dumps(all_names, sort_keys=True))
