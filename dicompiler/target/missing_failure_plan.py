"""Error message for an artifact that has no plan for the failure (or exclusion) of some devices."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def describe_missing_plan(down: Collection[str], covered: Iterable[Collection[str]]) -> str:
    """Return the cause and the remedy for an artifact that has no plan for the failure of some devices.

    Example: "the artifact has no plan for the failure of 'pi02': compile with --tolerate-failures 1 (in Python:
    tolerate_failures=1)".

    Args:
        down: Names of all devices that are down together.
        covered: Sets of failed devices that the artifact has plans for. Empty sets are ignored.

    Returns:
        A text without a full stop, for the end of an error message.
    """
    names = sorted(map(repr, down))
    together = f"{', '.join(names[:-1])} and {names[-1]} together" if len(names) > 1 else "".join(names)
    count = len(names)
    # If the artifact has a plan for the failure of at least this number of other devices, the compiler has searched for
    # a plan for this failure too. It has probably found none and printed a warning, which the message mentions.
    is_exception = any(len(failed) >= count for failed in covered)
    advice = ", and read its warnings about failures that no plan can cover" if is_exception else ""
    remedy = f"compile with --tolerate-failures {count} (in Python: tolerate_failures={count}){advice}"
    return f"the artifact has no plan for the failure of {together}: {remedy}"
