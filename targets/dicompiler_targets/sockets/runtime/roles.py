"""The roles of a device: with replicas, frames are dealt out in turn, and a device does another thing for each.

In: a manifest. Out: for each role the manifest that the device goes by, as if there were no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def roles(manifest: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Frame i goes by entry i mod n. They differ in inputs, outputs, segments, steps and transfers."""
    return (manifest, *({**manifest, **other} for other in manifest.get("others", ())))
