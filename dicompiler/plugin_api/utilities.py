"""Error texts, host names, captured output of processes, memoization, file reading, registry of plugins.

This module is part of the public API for plugin authors. A name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dicompiler.base.lazy_module import lazy_module

if TYPE_CHECKING:
    from dicompiler.base.addresses import resolve_host
    from dicompiler.base.captured_output import CapturedOutput
    from dicompiler.base.errors import ALLOW_MORE_TIME, check_type, did_you_mean, one_line
    from dicompiler.base.memoize import Memoizing, memoized
    from dicompiler.base.notices import NOTICE_LEVEL
    from dicompiler.base.option_specs import Spec
    from dicompiler.base.process import memory_limit
    from dicompiler.base.schema import load_json, read_text
    from dicompiler.base.units import format_bytes, format_needed_bytes
    from dicompiler.base.version import package_version, parse_release
    from dicompiler.plugin.entry_points import Plugin
    from dicompiler.plugin.registry import Registry, RegistryEntry

__all__ = [
    "ALLOW_MORE_TIME", "NOTICE_LEVEL", "CapturedOutput", "Memoizing", "Plugin", "Registry", "RegistryEntry", "Spec",
    "check_type", "did_you_mean", "format_bytes", "format_needed_bytes", "load_json", "memoized", "memory_limit",
    "one_line", "package_version", "parse_release", "read_text", "resolve_host",
]  # fmt: skip

if not TYPE_CHECKING:  # Type checkers must not see `__getattr__`, because they would then accept unknown names.
    __getattr__, __dir__ = lazy_module(__name__)
