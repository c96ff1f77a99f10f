"""What pieces of work take on a common computer: how many of them an allowance counts as a second."""

from __future__ import annotations

from collections.abc import Mapping

FILLED_PARTS_PER_S: Mapping[bool, int] = {True: 16_000, False: 11_000}
"""Places for parts that tables fill in a second, on a network of uniform lines and on another: 13 600 of the latter
were measured on DenseNet-121 with 4 devices."""
EVALUATED_PARTS_PER_S = 6_000
"""Parts of plans that are simulated in a second: 8 500 to 12 200 were measured on networks of 240 to 940 layers."""
CANDIDATE_RUNS_PER_S = 10_000
"""Moves of the dynamic programme that are made, and tried in some states, in a second: 20 000 were measured there."""
