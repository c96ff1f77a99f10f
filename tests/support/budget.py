"""Number of random examples that a property test tries: all of them with `tests/run --all`, a share without."""

from __future__ import annotations

import os

DEFAULT_SHARE = 0.2


def examples(count: int) -> int:
    """Return the number of examples to try.

    Args:
        count: Number of examples with `tests/run --all`, which sets the environment variable DICOMPILER_TESTS to "all".
    """
    return count if os.environ.get("DICOMPILER_TESTS") == "all" else round(count * DEFAULT_SHARE)
