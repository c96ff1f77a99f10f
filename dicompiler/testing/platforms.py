"""Checks platform families: their members can be named, are legal platforms, and survive being written as a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dicompiler.ir.platform import platform_from_toml, platform_to_toml
from dicompiler.plugin_api import Platform, PlatformFamily, PlatformFormat
from dicompiler.testing.assertions import error_context, require


def check_platform_family(family: PlatformFamily, members: Sequence[str] = ()) -> None:
    """Each of `members` (by default the name with 1, 2 and 4 hosts in the place of N; of a file format give paths) is
    found, is the same when found again, has a description, and its TOML reads as the same platform; a family's member
    has as many hosts as its name says, and other names are not its own. AssertionError otherwise, with the family."""
    counted = not isinstance(family, PlatformFormat)
    if counted:
        with error_context(f"platform {family.name!r}"):
            require(family.name.endswith("N"), "its name does not end in N, the number of hosts")
            for name in (family.name, f"{family.name[:-1]}0", f"x{family.name[:-1]}2"):
                require(family.find(name) is None, f"it claims {name!r}")
    chosen = members or [f"{family.name.removesuffix('N')}{count}" for count in (1, 2, 4)]
    for name in chosen:
        with error_context(f"platform {name!r} of {family.name!r}"):
            platform: Any = family.find(name)
            require(isinstance(platform, Platform), f"make() returned {type(platform).__name__} instead of a Platform")
            require(family.find(name) == platform, "found again it is another platform")
            require(
                platform_from_toml(platform_to_toml(platform)) == platform,
                "written as TOML and read it is another platform",
            )
            require(platform.description or family.description, "it says nowhere where its figures come from")
            if counted:
                count = int(name.removeprefix(family.name.removesuffix("N")))
                require(len(platform.hosts) == count, f"it has {len(platform.hosts)} hosts")
