"""Seeded random numbers depend only on the seed and the name."""

from __future__ import annotations

import os
import subprocess
import sys

from dicompiler.base.rng import named_generator


def drawn(seed: int, name: str) -> list[int]:
    return [int(number) for number in named_generator(seed, name).integers(0, 2**32, 8)]


def test_numbers_do_not_depend_on_other_names() -> None:
    alone = drawn(3, "conv1")
    named_generator(3, "conv2").standard_normal(1000)
    assert drawn(3, "conv1") == alone


def test_each_seed_and_name_has_different_numbers() -> None:
    rows = [drawn(seed, name) for seed in range(20) for name in ("", "a", "b", "ab", "größe")]
    assert len({tuple(row) for row in rows}) == len(rows)


def test_numbers_do_not_depend_on_the_hash_seed() -> None:
    draw = "named_generator(3, 'größe').integers(0, 2**32, 8).tolist()"
    code = f"from dicompiler.base.rng import named_generator; print({draw})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(drawn(3, "größe"))
