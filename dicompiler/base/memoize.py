"""Remembering: what follows from an object that never changes is worked out once, and goes when the object goes.

`@remembered` on a function whose first argument is a `Remembers` (a layer graph, say): asked the same of the same
object again, it gives the same result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar


class Memoizing:
    """A base of frozen dataclasses: objects that keep what `remembered` functions found out about them."""

    @cached_property
    def memo(self) -> defaultdict[object, dict[tuple[object, ...], Any]]:
        """Function → arguments → result."""
        return defaultdict(dict)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled and copied: the fields, and nothing of what follows from them."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]


_MISSING: Any = object()
P = ParamSpec("P")
T = TypeVar("T")
Owner = TypeVar("Owner", bound=Memoizing)


def memoized(function: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[Owner, P], T]:
    """The function, or method, with a memory of what it returned, in its first argument. The others must be hashable,
    and nobody may change what it returns."""

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
