"""What pieces of work take on a common computer: how many of them an allowance counts as a second."""

from __future__ import annotations

from collections.abc import Mapping

FILLED: Mapping[bool, int] = {True: 10_000, False: 7_000}
"""Places for parts that tables fill in a second, on a network of uniform lines and on another: measured on DenseNet-121
with 6 and 8 devices."""
EVALUATED = 3_000
"""Parts of plans that are simulated in a second: measured on networks of 60 to 2 000 layers."""
MOVES = 5_000
"""Moves of the dynamic programme that are made, and tried in some states, in a second."""
