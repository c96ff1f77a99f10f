"""The roles of a device: with replicas frames are dealt out in turn, without lost devices they go other ways, and a
device does another thing for each.

In: a manifest. Out: for each role the manifest that the device goes by, as if there were no other; and which is whose.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any


def role_manifests(manifest: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """They differ in inputs, outputs, segments, steps, transfers, and in the devices without which they are played."""
    return (manifest, *({**manifest, **other} for other in manifest.get("others", ())))


def active_roles(manifest: Mapping[str, Any]) -> tuple[bool, ...]:
    """For each role whether the device has anything to do while it is in force, with those for the same loss. While it
    has not, it is told of no frame."""
    works = [
        (role.get("lost", ()), role["inputs"] or role["steps"] or role["outputs"]) for role in role_manifests(manifest)
    ]
    return tuple(any(work for other, work in works if other == lost) for lost, _ in works)


class RoleSchedule:
    """The role that each frame goes by. lost: of each role the devices without which it is played. parts: see
    `takes_part`, by default it always does.

    At first nothing is lost. Of the roles for the same loss, frame i goes by entry i mod n.
    """

    def __init__(self, lost: Sequence[Collection[str]], parts: Sequence[bool] = ()) -> None:
        self._failed_sets = tuple(map(frozenset, lost))
        self._is_active = parts or [True] * len(lost)
        self._changes = [(0, self._roles_for(frozenset()))]
        self.tolerates_failures = any(self._failed_sets)

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> RoleSchedule:
        """That of a run that goes by the roles of a manifest."""
        return cls([role.get("lost", ()) for role in role_manifests(manifest)], active_roles(manifest))

    @property
    def is_idle(self) -> bool:
        """Whether the device that it is made for has no part in the frames from the last change on."""
        return not self._is_active[self._changes[-1][1][0]]

    @property
    def last_change(self) -> int:
        """The first frame from the last change on."""
        return self._changes[-1][0]

    def find_failed_set(self, away: Collection[str]) -> frozenset[str] | None:
        """Of the losses that there are roles for the least that holds all of `away`; None if none does."""
        found = [one for one in self._failed_sets if one.issuperset(away)]
        return min(found, key=len, default=None)

    def change(self, lost: Collection[str], first: int, oldest: int) -> None:
        """From frame `first` on the roles for that loss are in force; frames before `oldest` are not asked for again.
        ValueError where there are none."""
        chosen = self._roles_for(frozenset(lost))
        if not chosen:
            raise ValueError(f"there is no role for the loss of {sorted(lost)}")
        later = [first for first, _ in self._changes[1:]]
        kept = [era for era, end in zip(self._changes, [*later, first], strict=True) if end > oldest]
        self._changes = [*kept, (first, chosen)]  # at once: other threads read it

    def role_index(self, frame: int) -> int:
        """Its place among all roles."""
        first, chosen = self._changes[-1]
        if frame < first:
            chosen = next((those for start, those in reversed(self._changes) if frame >= start), chosen)
        return chosen[frame % len(chosen)]

    def _roles_for(self, lost: frozenset[str]) -> tuple[int, ...]:
        return tuple(i for i, one in enumerate(self._failed_sets) if one == lost)
