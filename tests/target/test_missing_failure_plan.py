"""The message for a failure that no plan of an artifact covers."""

from __future__ import annotations

from dicompiler.target.missing_failure_plan import describe_missing_plan


def test_names_devices_and_option_of_shell_and_python() -> None:
    alone = describe_missing_plan(["pi02"], [()])
    assert alone == (
        "the artifact has no plan for the failure of 'pi02': compile with --tolerate-failures 1 (in Python: "
        "tolerate_failures=1)"
    )
    both = describe_missing_plan({"pi03", "pi02"}, [(), ("pi02",), ("pi03",)])
    assert "of 'pi02' and 'pi03' together: compile with --tolerate-failures 2 (in Python: tolerate_failures=2)" in both


def test_points_to_warnings_if_as_many_failures_are_covered() -> None:
    text = describe_missing_plan(["pi01"], [("pi02",), ("pi03",)])
    assert text.endswith(
        "(in Python: tolerate_failures=1), and read its warnings about failures that no plan can cover"
    )
