"""Plan files round-trip, and invalid ones are rejected with file, key and allowed values."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.plan import FailurePlan, Part, Plan, load_plan, plan_from_json, plan_to_text
from dicompiler.ir.wire_dtype import WireFormat

DESIGN = """
{"format": "dicompiler.plan/2", "source": ["cam"], "sink": ["pi01"], "layers": {
   "conv1": [{"device": "pi01", "region": [[0,1],[0,64],[0,60],[0,112]]},
             {"device": "pi02", "region": [[0,1],[0,64],[52,112],[0,112]]}],
   "fc6":   [{"device": "pi01", "region": [[0,1],[0,2048]]}, {"device": "pi02", "region": [[0,1],[2048,4096]]}],
   "fc7":   [{"device": "pi01", "region": "all", "reduce": [0,2048]},
             {"device": "pi02", "region": "all", "reduce": [2048,4096]}, {"device": "pi01", "region": "all"}]}}
"""


def test_reads_a_plan_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(DESIGN, encoding="utf-8")
    plan = load_plan(path)
    assert plan.devices == ("cam", "pi01", "pi02")
    assert plan.layers["conv1"][1] == Part("pi02", ((0, 1), (0, 64), (52, 112), (0, 112)))
    assert plan.layers["fc7"] == (Part("pi01", None, (0, 2048)), Part("pi02", None, (2048, 4096)), Part("pi01"))


def test_writes_one_line_per_part_in_order() -> None:
    text = plan_to_text(plan_from_json(json.loads(DESIGN)))
    parts = [line for line in text.splitlines() if '"region":' in line]
    assert len(parts) == 7
    assert list(json.loads(text)["layers"]) == ["conv1", "fc6", "fc7"]


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


INTERVALS = st.tuples(st.integers(0, 99), st.integers(0, 99))


PARTS = st.builds(
    Part, NAMES, st.none() | st.lists(INTERVALS, max_size=4).map(tuple), st.none() | INTERVALS, st.integers(0, 3)
)


DEVICES = st.lists(NAMES, min_size=1, max_size=3, unique=True).map(tuple)


PLANS = st.builds(
    Plan,
    st.dictionaries(NAMES, st.lists(PARTS, min_size=1, max_size=3).map(tuple), max_size=4),
    DEVICES,
    DEVICES,
    st.just("") | NAMES,
    st.just("") | NAMES,
)


@given(PLANS)
def test_plans_round_trip(plan: Plan) -> None:
    assert plan_from_json(json.loads(plan_to_text(plan))) == plan
    assert plan_to_text(plan_from_json(json.loads(plan_to_text(plan)))) == plan_to_text(plan)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("dicompiler.plan/2", "dicompiler.plan/1", "format dicompiler.plan/1 is not supported"),
        (
            '"sink"',
            '"sinks"',
            "unknown key 'sinks' (did you mean 'sink'?); allowed: format, source, sink, model_digest, note",
        ),
        (
            '"region": [[0,1],[0,2048]]',
            '"region": [[0,1],[0,"x"]]',
            "layers.fc6[0].region[1][1]: expected a whole number",
        ),
        ('{"device": "pi01", "region": "all"}]', '{"device": "pi01"}]', "layers.fc7[2]: missing key 'region'"),
        ('"fc7"', '"fc6"', "key 'fc6' appears twice"),
    ],
)
def test_errors_name_file_and_key(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = tmp_path / "plan.json"
    assert DESIGN.count(old) == 1
    path.write_text(DESIGN.replace(old, new), encoding="utf-8")
    with pytest.raises(DicompilerError) as caught:
        load_plan(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert expected in str(caught.value)


TWO = Plan(
    {"conv": (Part("a"), Part("b")), "pool": (Part("b"),)},
    ("a",),
    ("b",),
    replicas=({}, {"a": "c", "b": "d"}, {"a": "c"}),
)


def test_roles_rename_all_devices_except_source_and_sink() -> None:
    first, second, third = TWO.roles
    assert first == replace(TWO, replicas=())
    assert second == Plan({"conv": (Part("c"), Part("d")), "pool": (Part("d"),)}, ("a",), ("b",))
    assert third == Plan({"conv": (Part("c"), Part("b")), "pool": (Part("b"),)}, ("a",), ("b",))
    assert TWO.devices == ("a", "b", "c", "d")
    assert first.roles == (first,)


def test_devices_without_a_role_are_not_listed() -> None:
    assert replace(TWO, source=("x",), sink=("x",), replicas=({"a": "c", "b": "d"},)).devices == ("x", "c", "d")


RENAMINGS = st.lists(st.dictionaries(st.text(min_size=1, max_size=4), st.text(min_size=1, max_size=4)), max_size=3)


@given(RENAMINGS)
def test_plans_with_replicas_round_trip(replicas: list[dict[str, str]]) -> None:
    plan = replace(TWO, replicas=tuple(replicas))
    assert plan_from_json(json.loads(plan_to_text(plan))) == plan
    assert ("replicas" in json.loads(plan_to_text(plan))) == bool(replicas)


@given(PLANS, PLANS, st.lists(st.tuples(DEVICES, PLANS), max_size=3), RENAMINGS)
def test_plans_with_failure_plans_round_trip(
    plan: Plan, first: Plan, more: list[tuple[tuple[str, ...], Plan]], replicas: list[dict[str, str]]
) -> None:
    losses = [
        FailurePlan(("x",), replace(first, replicas=tuple(replicas))),
        *(FailurePlan(lost, other) for lost, other in more),
    ]
    whole = replace(plan, failures=tuple(losses), wire_format=WireFormat((("*", "float16"),)))
    assert plan_from_json(json.loads(plan_to_text(whole))) == whole
    assert all(
        (loss.plan.wire_format, loss.plan.model_digest) == (whole.wire_format, plan.model_digest)
        for loss in whole.failures
    )
    without = plan_to_text(replace(whole, failures=()))
    assert plan_to_text(whole).startswith(without.rstrip("}\n"))
    roles = (plan, *(loss.plan for loss in losses))
    part_lines = [line for line in plan_to_text(whole).splitlines() if '"region":' in line]
    assert len(part_lines) == sum(len(parts) for role in roles for parts in role.layers.values())


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ("[]", "failures: a list of 0 entries is too short"),
        ('[{"failed": [], "source": ["a"], "sink": ["a"], "layers": {}}]', "failures[0].failed: a list of 0 entries"),
        ('[{"failed": ["b"], "source": ["a"], "layers": {}}]', "failures[0]: missing key 'sink'"),
        (
            '[{"failed": ["b"], "source": ["a"], "sink": ["a"], "layers": {}, "wire_dtype": "int8"}]',
            "unknown key 'wire_dtype'",
        ),
    ],
)
def test_rejects_invalid_failure_plans(failures: str, message: str) -> None:
    text = plan_to_text(replace(TWO, replicas=())).replace('"sink"', f'"failures": {failures}, "sink"', 1)
    with pytest.raises(DicompilerError) as raised:
        plan_from_json(json.loads(text))
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ("[]", "replicas: a list of 0 entries is too short"),
        ('[["a"]]', "replicas[0]: expected an object"),
        ('[{}, {"a": 3}]', "replicas[1].a: expected a text"),
        ('[{"a": ""}]', "replicas[0].a: the text is empty"),
    ],
)
def test_rejects_invalid_replicas(replicas: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan_to_text(replace(TWO, replicas=())).replace('"sink"', f'"replicas": {replicas}, "sink"'))
    with pytest.raises(DicompilerError) as raised:
        load_plan(path)
    assert message in str(raised.value) and str(path) in str(raised.value) and "\n" not in str(raised.value)
