"""Files of artifacts, engines, run records, and access to remote devices.

This module is part of the public API for plugin authors. A name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dicompiler.base.lazy_module import lazy_module

if TYPE_CHECKING:
    from dicompiler.base.input_arrays import check_index_range, coerce_input
    from dicompiler.ir.cluster import DEFAULT_ENGINE
    from dicompiler.ir.plan import load_user_plan, plan_file_in_errors
    from dicompiler.ir.program import DeviceState, Step
    from dicompiler.target.client import ReadyFrames
    from dicompiler.target.engine import (
        FULL_PRECISION,
        BoardPackage,
        EngineFiles,
        LoadedNetwork,
        UnsupportedByEngine,
    )
    from dicompiler.target.engine_check import (
        DeviatingResults,
        allowed_difference,
        convert_checked,
        measure_difference,
    )
    from dicompiler.target.manifest import (
        ARTIFACT_FORMAT,
        SENDABLE_TYPES,
        Json,
        check_files,
        describe_artifact,
        describe_transfer,
        describe_value,
        file_digest,
        format_checksummed_json,
        format_json,
        load_artifact,
        make_file_record,
        read_checksummed_json,
    )
    from dicompiler.target.missing_failure_plan import describe_missing_plan
    from dicompiler.target.remote import DEVICES_DIRECTORY, ssh
    from dicompiler.target.remote.hosts import DeviceLocation, Hosts
    from dicompiler.target.run_records import (
        BoardState,
        CopyFunction,
        DeviceStatus,
        Emulation,
        FrameTimes,
        InstalledDevice,
        ReceivedBytes,
        RunEvent,
        SegmentCall,
        TimelineEntry,
        describe_unfinished_run,
    )

__all__ = [
    "ARTIFACT_FORMAT",
    "DEFAULT_ENGINE",
    "DEVICES_DIRECTORY",
    "FULL_PRECISION",
    "SENDABLE_TYPES",
    "BoardPackage",
    "BoardState",
    "CopyFunction",
    "DeviatingResults",
    "DeviceLocation",
    "DeviceState",
    "DeviceStatus",
    "Emulation",
    "EngineFiles",
    "FrameTimes",
    "Hosts",
    "InstalledDevice",
    "Json",
    "LoadedNetwork",
    "ReadyFrames",
    "ReceivedBytes",
    "RunEvent",
    "SegmentCall",
    "Step",
    "TimelineEntry",
    "UnsupportedByEngine",
    "allowed_difference",
    "check_files",
    "check_index_range",
    "coerce_input",
    "convert_checked",
    "describe_artifact",
    "describe_missing_plan",
    "describe_transfer",
    "describe_unfinished_run",
    "describe_value",
    "file_digest",
    "format_checksummed_json",
    "format_json",
    "load_artifact",
    "load_user_plan",
    "make_file_record",
    "measure_difference",
    "plan_file_in_errors",
    "read_checksummed_json",
    "ssh",
]  # fmt: skip

if not TYPE_CHECKING:  # Type checkers must not see `__getattr__`, because they would then accept unknown names.
    __getattr__, __dir__ = lazy_module(__name__)
