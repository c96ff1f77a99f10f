"""The roles of a device, and the role of each frame.

A role is one way in which the devices can compute a frame: the normal plan, a replica of it, or a failure plan. With
replicas, frames use several roles in turn. With failure plans, some roles are only used while certain devices are down.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any


def role_manifests(manifest: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return a complete manifest for each role (the normal plan, a replica or a failure plan) in a device's manifest.

    These manifests differ in inputs, outputs, segments, steps and transfers, and in `failed`: the failed devices for
    which the role is made.
    """
    return (manifest, *({**manifest, **role} for role in manifest.get("other_roles", ())))


def active_roles(manifest: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return, for each role, True if the coordinator announces frames of the role to the device.

    The coordinator does so if the device has work in this role, or in another role for the same failed devices. A role
    is the normal plan, a replica of it, or a failure plan.
    """
    work = [
        (role.get("failed", ()), role["inputs"] or role["steps"] or role["outputs"])
        for role in role_manifests(manifest)
    ]
    return tuple(any(works for other, works in work if other == failed) for failed, _ in work)


class RoleSchedule:
    """Maps frames to roles (the normal plan, its replicas, and failure plans).

    If n roles are made for the devices that are down, frame i uses number i mod n of these roles.

    Attributes:
        tolerates_failures: True if there are roles for frames after a failure.
    """

    def __init__(self, failed_by_role: Sequence[Collection[str]], active_by_role: Sequence[bool] = ()) -> None:
        """Create a schedule that begins without failed devices.

        `failed_by_role` has, for each role (a plan), the failed devices for which the role is made. `active_by_role`
        has, for each role, True if frames of the role are announced to the device; by default, all of them are.
        """
        self._failed_sets = tuple(map(frozenset, failed_by_role))
        self._is_active = active_by_role or [True] * len(failed_by_role)
        self._changes = [(0, self._roles_for(frozenset()))]
        self.tolerates_failures = any(self._failed_sets)

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> RoleSchedule:
        return cls([role.get("failed", ()) for role in role_manifests(manifest)], active_roles(manifest))

    @property
    def covered_failures(self) -> tuple[frozenset[str], ...]:
        """The sets of failed devices for which there are roles (plans)."""
        return tuple(dict.fromkeys(failed for failed in self._failed_sets if failed))

    @property
    def is_idle(self) -> bool:
        """True if the device has no work in frames after the last change of roles (plans)."""
        return not self._is_active[self._changes[-1][1][0]]

    @property
    def last_change(self) -> int:
        """Number of the first frame after the last change of roles (plans)."""
        return self._changes[-1][0]

    def find_failed_set(self, down: Collection[str]) -> frozenset[str] | None:
        """Return the smallest set of failed devices that includes `down` and for which there are roles (plans).

        The result is None if there is no such set.
        """
        candidates = [failed for failed in self._failed_sets if failed.issuperset(down)]
        return min(candidates, key=len, default=None)

    def change(self, failed: Collection[str], first_frame: int, oldest_frame: int) -> None:
        """From frame `first_frame` on, use the roles (plans) that are made for the failure of the devices `failed`.

        `failed`, a result of `find_failed_set`, may include devices that have not failed. The roles of frames before
        `oldest_frame` are forgotten. Raise ValueError if no role is made for exactly these failed devices.
        """
        chosen = self._roles_for(frozenset(failed))
        if not chosen:
            raise ValueError(
                f"the artifact has no plan for the failure of {sorted(failed)}: compile it with --tolerate-failures"
            )
        ends = [*(start for start, _ in self._changes[1:]), first_frame]
        needed = [change for change, end in zip(self._changes, ends, strict=True) if end > oldest_frame]
        self._changes = [*needed, (first_frame, chosen)]  # Other threads read the list, so one assignment replaces it.

    def role_index(self, frame: int) -> int:
        first, chosen = self._changes[-1]
        if frame < first:
            chosen = next((roles for start, roles in reversed(self._changes) if frame >= start), chosen)
        return chosen[frame % len(chosen)]

    def _roles_for(self, failed: frozenset[str]) -> tuple[int, ...]:
        return tuple(index for index, other in enumerate(self._failed_sets) if other == failed)
