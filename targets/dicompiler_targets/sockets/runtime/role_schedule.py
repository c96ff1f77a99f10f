"""Roles of a device, and which role each frame uses.

With replicas, frames are distributed over several roles in turn. With failure plans, a role is used while the devices
that it does without are down. A manifest describes all roles ⇒ one manifest per role.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any


def role_manifests(manifest: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return a manifest for each role.

    They differ in inputs, outputs, segments, steps, transfers, and in `failed`, the devices that the role does without.
    """
    return (manifest, *({**manifest, **role} for role in manifest.get("other_roles", ())))


def active_roles(manifest: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return for each role True if the device works while that role, or another for the same failure, is in use.

    A device that is not active is not told about frames.
    """
    work = [
        (role.get("failed", ()), role["inputs"] or role["steps"] or role["outputs"])
        for role in role_manifests(manifest)
    ]
    return tuple(any(works for other, works in work if other == failed) for failed, _ in work)


class RoleSchedule:
    """Maps frames to roles: among the roles for the current failed devices, frame i uses entry i mod n.

    Attributes:
        tolerates_failures: The schedule has roles for failed devices.
    """

    def __init__(self, failed: Sequence[Collection[str]], active: Sequence[bool] = ()) -> None:
        """Create a schedule that starts without failed devices.

        Args:
            failed: For each role the devices that it does without.
            active: See active_roles. Default: always active.
        """
        self._failed_sets = tuple(map(frozenset, failed))
        self._is_active = active or [True] * len(failed)
        self._changes = [(0, self._roles_for(frozenset()))]
        self.tolerates_failures = any(self._failed_sets)

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> RoleSchedule:
        return cls([role.get("failed", ()) for role in role_manifests(manifest)], active_roles(manifest))

    @property
    def is_idle(self) -> bool:
        """True if the device has no work in the frames since the last change."""
        return not self._is_active[self._changes[-1][1][0]]

    @property
    def last_change(self) -> int:
        """The first frame after the last change."""
        return self._changes[-1][0]

    def find_failed_set(self, down: Collection[str]) -> frozenset[str] | None:
        """Return the smallest set of failed devices that has roles and includes all of `down`, or None."""
        candidates = [failed for failed in self._failed_sets if failed.issuperset(down)]
        return min(candidates, key=len, default=None)

    def change(self, failed: Collection[str], first: int, oldest: int) -> None:
        """Use the roles for the failed devices from frame `first` on.

        Args:
            failed: A set that `find_failed_set` returned.
            first: The first frame that uses them.
            oldest: Roles of frames before this one are not needed any more.

        Raises:
            ValueError: There is no role for these failed devices.
        """
        chosen = self._roles_for(frozenset(failed))
        if not chosen:
            raise ValueError(f"there is no role for the failure of {sorted(failed)}")
        ends = [*(start for start, _ in self._changes[1:]), first]
        needed = [change for change, end in zip(self._changes, ends, strict=True) if end > oldest]
        self._changes = [*needed, (first, chosen)]  # One assignment, because other threads read it.

    def role_index(self, frame: int) -> int:
        """Return the index of the frame's role among all roles."""
        first, chosen = self._changes[-1]
        if frame < first:
            chosen = next((roles for start, roles in reversed(self._changes) if frame >= start), chosen)
        return chosen[frame % len(chosen)]

    def _roles_for(self, failed: frozenset[str]) -> tuple[int, ...]:
        return tuple(index for index, other in enumerate(self._failed_sets) if other == failed)
