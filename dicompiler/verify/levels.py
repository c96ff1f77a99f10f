"""How much onnxruntime may rewrite a graph before it runs it: the levels, and what each means for the bits."""

from __future__ import annotations

from typing import Literal

Optimization = Literal["none", "basic", "extended", "all"]
"""onnxruntime's graph optimisation levels. "all" is its default, the fastest and what users compare with. Up to
"extended" all of them give the same bits; "all" does not, but of integer-valued floats.

In networks in QDQ form "all" alone computes on integers, where onnxruntime finds a pattern to fuse: not always the same
in a network's parts as in the whole, and integers round otherwise (see `tolerances`).
"""
