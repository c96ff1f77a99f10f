"""Memoization per instance: results that depend only on an immutable object are stored in that object.

Use `@memoized` on functions with a `Memoizing` object (a layer graph, for instance) as the first argument.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar


class Memoizing:
    """Base class of frozen dataclasses that store the results of memoized functions."""

    @cached_property
    def memo(self) -> defaultdict[object, dict[tuple[object, ...], Any]]:
        """Stored results, by function and arguments."""
        return defaultdict(dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields only: stored results are not pickled or copied."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]


_MISSING: Any = object()
P = ParamSpec("P")
T = TypeVar("T")
Owner = TypeVar("Owner", bound=Memoizing)


def memoized(function: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[Owner, P], T]:
    """Store the function's results in its first argument, which is a `Memoizing` object.

    Args:
        function: Function or method with hashable arguments. Callers must not change its results.

    Returns:
        The function with stored results.
    """

    @wraps(function)
    def recall(owner: Owner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if kwargs:
            known, key = owner.memo[function, *kwargs], (*args, *kwargs.values())
        else:
            known, key = owner.memo[function], args
        result: T = known.get(key, _MISSING)
        if result is _MISSING:
            result = known[key] = function(owner, *args, **kwargs)
        return result

    return recall
