"""The pass `partition`: nodes record device and origin, and the bytes do not depend on the hash seed."""

from __future__ import annotations

import os
import subprocess
import sys

from support.placing import marks, network, place, rows

from dicompiler.ir.plan import Plan
from dicompiler.partition.placed_model import DEVICE_KEY, ORIGIN_KEY, REGION_KEY


def test_nodes_record_device_region_and_origin() -> None:
    halves = (rows("a", 0, 4), rows("b", 4, 8))
    placed = place(network(), Plan({"conv1": halves, "conv2": halves}, ("a",), ("a",))).model
    found = {(marks(n)[ORIGIN_KEY], marks(n)[DEVICE_KEY], marks(n)[REGION_KEY]) for n in placed.proto.graph.node}
    assert ("conv1", "a", "[0:1, 0:4, 0:4, 0:6]") in found
    assert ("conv2", "b", "[0:1, 0:4, 4:8, 0:6]") in found
    assert [n.doc_string for n in placed.proto.graph.node if n.op_type == "Conv"].count("the first") == 2


def test_same_bytes_for_any_hash_seed() -> None:
    script = (
        "import hashlib; from support import placing as t; from dicompiler.plugin_api import Part, Plan;"
        "halves = (t.rows('a', 0, 4), t.rows('b', 4, 8));"
        "sums = (Part('a', None, (0, 2)), Part('b', None, (2, 4)), Part('b'));"
        "placed = t.place(t.network(), Plan({'conv1': halves, 'conv2': sums}, ('b', 'c'), ('a', 'c')));"
        "print(hashlib.sha256(placed.model.to_bytes()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(digests) == 1
