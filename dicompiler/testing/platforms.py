"""Check of platform families: their platforms are found by name, are valid, and can be written to a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dicompiler.ir.platform import platform_from_toml, platform_to_toml
from dicompiler.plugin_api import Platform, PlatformFamily, PlatformFormat
from dicompiler.testing.assertions import LIMIT_S, checking, require, time_limit


def check_platform_family(family: PlatformFamily, members: Sequence[str] = (), limit_s: float = LIMIT_S) -> None:
    """Check the platforms of a platform family.

    The name of each platform ends in its number of hosts, such as "rpi4x3". The check requires that:

    - `find` returns a platform with this number of hosts and a description;
    - a second call returns an equal platform, and the platform is unchanged after it is written to TOML and read;
    - `find` returns None for other names;
    - `find` does not end the process or exceed the time limit.

    Args:
        family: The family, or a platform file format.
        members: Names of platforms. Default: those with 1, 2 and 4 hosts. Required for a file format: paths of files.
        limit_s: Seconds that a call of `find` may take.

    Raises:
        AssertionError: A requirement does not hold. The message names the family.
    """
    is_counted = not isinstance(family, PlatformFormat)
    if is_counted:
        with checking(f"platform {family.name!r}"), time_limit(limit_s):
            require(family.name.endswith("N"), "its name does not end in N, the number of hosts")
            for name in (family.name, f"{family.name[:-1]}0", f"x{family.name[:-1]}2"):
                require(family.find(name) is None, f"find({name!r}) must return None")
    chosen = members or [f"{family.name.removesuffix('N')}{count}" for count in (1, 2, 4)]
    for name in chosen:
        with checking(f"platform {name!r} of {family.name!r}"), time_limit(limit_s):
            platform: Any = family.find(name)
            require(isinstance(platform, Platform), f"make() returned {type(platform).__name__} instead of a Platform")
            require(family.find(name) == platform, "a second find() returns another platform")
            same = platform_from_toml(platform_to_toml(platform)) == platform
            require(same, "it is another platform after it is written as TOML and read")
            described = platform.description or family.description
            require(described, "it has no description: say where its rates and bandwidths come from")
            if is_counted:
                count = int(name.removeprefix(family.name.removesuffix("N")))
                require(len(platform.hosts) == count, f"it has {len(platform.hosts)} hosts, not {count}")
