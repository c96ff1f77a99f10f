"""Memoization per instance: results that depend only on an immutable object are stored in this object."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar


class Memoizing:
    """Base class of frozen dataclasses in which `memoized` functions store their results."""

    @cached_property
    def memo(self) -> defaultdict[object, dict[tuple[object, ...], Any]]:
        """Stored results by function, and within a function by arguments."""
        return defaultdict(dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return only the fields: stored results must not be pickled or copied."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]


_MISSING: Any = object()
P = ParamSpec("P")
T = TypeVar("T")
Owner = TypeVar("Owner", bound=Memoizing)


def memoized(function: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[Owner, P], T]:
    """Return a function that stores its results in its first argument, which is a `Memoizing` object.

    Args:
        function: Function or method with hashable arguments. Callers must not change its results.

    Returns:
        The memoizing function.
    """

    @wraps(function)
    def recall(owner: Owner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if kwargs:
            results, key = owner.memo[function, *kwargs], (*args, *kwargs.values())
        else:
            results, key = owner.memo[function], args
        result: T = results.get(key, _MISSING)
        if result is _MISSING:
            result = results[key] = function(owner, *args, **kwargs)
        return result

    return recall
