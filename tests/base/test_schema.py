"""Schema violations give one line with file, key path, cause and allowed values."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from dicompiler.base.errors import DicompilerError
from dicompiler.base.schema import format_key_path, load_json, load_schema, validate

PLAN = {
    "format": "dicompiler.plan/2",
    "source": ["cam"],
    "sink": ["pi01"],
    "layers": {"conv1": [{"device": "pi01", "region": [[0, 1], [0, 64]]}, {"device": "pi02", "region": "all"}]},
}


def message(change: Callable[[dict[str, Any]], object]) -> str:
    document: Any = copy.deepcopy(PLAN)
    change(document)
    with pytest.raises(DicompilerError) as caught:
        validate(document, "plan", "plan.json")
    text = str(caught.value)
    assert "\n" not in text
    return text


def part(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["layers"]["conv1"][0]
    return found


def test_accepts_a_valid_document() -> None:
    validate(PLAN, "plan", "plan.json")
    assert PLAN["sink"] == ["pi01"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda d: part(d).update(devise="x"),
            "plan.json: layers.conv1[0]: unknown key 'devise' (did you mean 'device'?);"
            " allowed: device, region, reduce, lane",
        ),
        (
            lambda d: part(d).pop("device"),
            "plan.json: layers.conv1[0]: missing key 'device' (required: device, region)",
        ),
        (lambda d: part(d).update(device=7), "plan.json: layers.conv1[0].device: expected a text, got 7"),
        (lambda d: part(d).update(lane=True), "plan.json: layers.conv1[0].lane: expected a whole number, got true"),
        (lambda d: part(d).update(lane=2.0), "plan.json: layers.conv1[0].lane: expected a whole number, got 2.0"),
        (
            lambda d: part(d).update(device=tomllib.loads("device = 2026-01-02")["device"]),
            "plan.json: layers.conv1[0].device: 2026-01-02 is a date or time: write it in quotes if a text is meant",
        ),
        (lambda d: part(d).update(lane=-1), "plan.json: layers.conv1[0].lane: -1 is too small (allowed: 0 or more)"),
        (
            lambda d: part(d).update(region="al"),
            'plan.json: layers.conv1[0].region: "al" is not allowed (allowed: "all" or a list)',
        ),
        (
            lambda d: part(d).update(region=[[0, 1, 2]]),
            "plan.json: layers.conv1[0].region[0]: a list of 3 entries is too long (allowed: 2 or fewer entries)",
        ),
        (
            lambda d: part(d).update(region=[[0, 1.5]]),
            "plan.json: layers.conv1[0].region[0][1]: expected a whole number, got 1.5",
        ),
        (
            lambda d: part(d).update(reduce=[0]),
            "plan.json: layers.conv1[0].reduce: a list of 1 entry is too short (allowed: 2 or more entries)",
        ),
        (
            lambda d: d.update(format="dicompiler.plan/1"),
            "plan.json: format dicompiler.plan/1 is not supported (this version reads dicompiler.plan/2): rename its"
            " keys (losses: failures, lost: failed, network: model_digest, wire: wire_dtype, ranges: wire_ranges), or"
            " create it again with 'dicompiler plan'",
        ),
        (
            lambda d: d.update(format="dicompiler.run/2"),
            'plan.json: format: "dicompiler.run/2" is not supported (allowed: "dicompiler.plan/2")',
        ),
        (lambda d: d.update(sink=[]), "plan.json: sink: a list of 0 entries is too short (allowed: 1 or more entries)"),
        (
            lambda d: d.update(sink=["a", "a"]),
            'plan.json: sink: the list ["a", "a"] contains an entry twice (allowed: each once)',
        ),
        (
            lambda d: d["layers"].update({"a/b": {}}),
            "plan.json: layers['a/b']: expected a list, got an object",
        ),
    ],
)
def test_errors_name_place_cause_and_allowed_values(change: Callable[[dict[str, Any]], object], expected: str) -> None:
    assert message(change) == expected


def test_reports_a_wrong_version_first() -> None:
    assert "format dicompiler.plan/9" in message(lambda d: d.update(format="dicompiler.plan/9", layers=[], extra=1))


@pytest.mark.parametrize("name", ["plan", "platform", "run", "manifest", "artifact", "profile", "comparison", "front"])
def test_rejects_other_versions_with_a_remedy(name: str) -> None:
    family, _, version = load_schema(name)["$id"].partition("/")
    for other, remedy in (
        (1, load_schema(name).get("x-remedy", "write the file again")),
        (99, "install a newer dicompiler"),
    ):
        if other == int(version):
            continue
        with pytest.raises(DicompilerError) as caught:
            validate({"format": f"{family}/{other}"}, name, "file")
        expected = f"file: format {family}/{other} is not supported (this version reads {family}/{version}): {remedy}"
        assert str(caught.value) == expected


def test_reports_a_renamed_key_with_its_new_name() -> None:
    document = {
        "host": [{"name": "a", "memory": "1 GiB"}],
        "device": [{"name": "a", "rate": "1 GFLOP/s"}],
        "network": {"kind": "switch", "bandwidth": "1 Gbit/s", "message": "1 ms"},
    }
    with pytest.raises(DicompilerError) as caught:
        validate(document, "platform", "p.toml")
    assert str(caught.value) == "p.toml: network: unknown key 'message': it is now called 'message_overhead'"


def test_reports_a_misspelt_key_instead_of_the_missing_one() -> None:
    text = message(lambda d: part(d).update(devic=part(d).pop("device")))
    assert "unknown key 'devic' (did you mean 'device'?)" in text


def test_lists_the_values_of_an_enumeration() -> None:
    document = {
        "host": [{"name": "a", "memory": "1 GiB"}],
        "device": [{"name": "a", "rate": "1 GFLOP/s"}],
        "network": {"kind": "swich", "bandwidth": "1 Gbit/s"},
    }
    with pytest.raises(DicompilerError) as caught:
        validate(document, "platform", "p.toml")
    assert str(caught.value) == 'p.toml: network.kind: "swich" is not allowed (allowed: switch, shared, gateway)'


def test_omits_the_key_path_of_the_whole_document() -> None:
    with pytest.raises(DicompilerError, match=r"^plan.json: expected an object, got the list \[\]$"):
        validate([], "plan", "plan.json")


def test_shortens_long_values() -> None:
    assert len(message(lambda d: d.update(format="x" * 500))) < 200


def test_key_paths_quote_unusual_keys() -> None:
    assert format_key_path(["layers", "conv-1_a", 0, "region"]) == "layers.conv-1_a[0].region"
    assert format_key_path(["layers", "block/conv.1", 2]) == "layers['block/conv.1'][2]"
    assert format_key_path([]) == ""


def _properties(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "properties":
                yield from ((f"{path}.{name}", sub) for name, sub in value.items())
            yield from _properties(value, f"{path}.{key}")
    elif isinstance(node, list):
        for value in node:
            yield from _properties(value, path)


def names() -> list[str]:
    files = (resources.files("dicompiler.base") / "schemas").iterdir()
    return sorted(file.name.removesuffix(".schema.json") for file in files if file.name.endswith(".json"))


@pytest.mark.parametrize("name", names())
def test_every_schema_is_valid_and_describes_each_key(name: str) -> None:
    from jsonschema_rs import Draft202012Validator, meta

    document = load_schema(name)
    meta.validate(document)
    Draft202012Validator(document)
    described = document.get("$defs", {})
    silent = [
        path
        for path, sub in _properties(document, name)
        if "description" not in sub and "description" not in described.get(sub.get("$ref", "").split("/")[-1], {})
    ]
    assert silent == []


def test_reads_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(PLAN), encoding="utf-8")
    assert load_json(path) == PLAN


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"a": 1,\n "b": }', ":2:7: not JSON: "),
        (b'{"a": 1, "a": 2}', ": key 'a' appears twice in one object"),
        (b'{"a": NaN}', ": not JSON: NaN is not a JSON number"),
        (b'{"a": 1e999}', ": not JSON: the number 1e999 is too large"),
        (b"\xff\xfe", ": cannot be read: not UTF-8 text"),
        (b"[" * 100_000, ": its objects are nested too deeply: give a file that dicompiler wrote"),
    ],
)
def test_reports_invalid_json_with_its_position(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(DicompilerError) as caught:
        load_json(path)
    assert str(caught.value).startswith(f"{path}{expected}")


def test_reports_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(DicompilerError, match=r"nowhere\.json: no such file$"):
        load_json(tmp_path / "nowhere.json")
    with pytest.raises(DicompilerError, match="cannot be read: Is a directory"):
        load_json(tmp_path)
