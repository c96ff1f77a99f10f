"""The roles of a device: with replicas frames are dealt out in turn, without lost devices they go other ways, and a
device does another thing for each.

In: a manifest. Out: for each role the manifest that the device goes by, as if there were no other; and which is whose.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any


def roles(manifest: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """They differ in inputs, outputs, segments, steps, transfers, and in the devices without which they are played."""
    return (manifest, *({**manifest, **other} for other in manifest.get("others", ())))


def takes_part(manifest: Mapping[str, Any]) -> tuple[bool, ...]:
    """For each role whether the device has anything to do while it is in force, with those for the same loss. While it
    has not, it is told of no frame."""
    works = [(role.get("lost", ()), role["inputs"] or role["steps"] or role["outputs"]) for role in roles(manifest)]
    return tuple(any(work for other, work in works if other == lost) for lost, _ in works)


class Schedule:
    """The role that each frame goes by. lost: of each role the devices without which it is played. parts: see
    `takes_part`, by default it always does.

    At first nothing is lost. Of the roles for the same loss, frame i goes by entry i mod n.
    """

    def __init__(self, lost: Sequence[Collection[str]], parts: Sequence[bool] = ()) -> None:
        self._lost = tuple(map(frozenset, lost))
        self._parts = parts or [True] * len(lost)
        self._eras = [(0, self._of(frozenset()))]
        self.survives = any(self._lost)

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Schedule:
        """That of a run that goes by the roles of a manifest."""
        return cls([role.get("lost", ()) for role in roles(manifest)], takes_part(manifest))

    @property
    def idle(self) -> bool:
        """Whether the device that it is made for has no part in the frames from the last change on."""
        return not self._parts[self._eras[-1][1][0]]

    @property
    def since(self) -> int:
        """The first frame from the last change on."""
        return self._eras[-1][0]

    def covering(self, away: Collection[str]) -> frozenset[str] | None:
        """Of the losses that there are roles for the least that holds all of `away`; None if none does."""
        found = [one for one in self._lost if one.issuperset(away)]
        return min(found, key=len, default=None)

    def change(self, lost: Collection[str], first: int, oldest: int) -> None:
        """From frame `first` on the roles for that loss are in force; frames before `oldest` are not asked for again.
        ValueError where there are none."""
        chosen = self._of(frozenset(lost))
        if not chosen:
            raise ValueError(f"there is no role for the loss of {sorted(lost)}")
        later = [first for first, _ in self._eras[1:]]
        kept = [era for era, end in zip(self._eras, [*later, first], strict=True) if end > oldest]
        self._eras = [*kept, (first, chosen)]  # at once: other threads read it

    def role(self, frame: int) -> int:
        """Its place among all roles."""
        first, chosen = self._eras[-1]
        if frame < first:
            chosen = next((those for start, those in reversed(self._eras) if frame >= start), chosen)
        return chosen[frame % len(chosen)]

    def _of(self, lost: frozenset[str]) -> tuple[int, ...]:
        return tuple(i for i, one in enumerate(self._lost) if one == lost)
