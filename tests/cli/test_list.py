"""`dicompiler list`: the built-in and installed items, as text and as JSON."""

from __future__ import annotations

import json
import re

import pytest
from support.commands import command

import dicompiler
from dicompiler import networks


class TestList:
    """`list` shows the built-in and installed items, as text and as JSON."""

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["passes", "strategies", "targets", "operators", "cost-models", "platforms"])
    def test_everything_has_a_summary_and_an_origin(self, kind: str) -> None:
        records = json.loads(command("list", kind, "--json").stdout)
        assert records == sorted(records, key=lambda record: record["name"])
        assert records
        for record in records:
            assert [*record] == ["name", "summary", "options", "distribution", "version", "plugin"]
            assert record["summary"]
            assert (record["distribution"], record["version"]) == ("dicompiler", dicompiler.__version__)
            assert all([*option] == ["name", "type", "default", "help"] for option in record["options"])

    def test_networks_are_listed_with_their_parameters(self) -> None:
        records = {record["name"]: record for record in json.loads(command("list", "networks", "--json").stdout)}
        assert records["yolo11n"]["parameters"] == networks.count_parameters("yolo11n")
        assert {"name": "size", "default": 640} in records["yolo11n"]["options"]
        assert [*records] == [*networks.NAMES, *(f"light/{name}" for name in networks.LIGHT_NAMES)]

    def test_options_of_an_entry_have_types(self) -> None:
        text = command("list", "cost-models", "profile").stdout
        assert re.search(r"^option +type +default +meaning$", text, re.MULTILINE)
        assert re.search(r"^file +str,… +\(required\) +profiles", text, re.MULTILINE)

    def test_bytes_do_not_depend_on_the_hash_seed(self) -> None:
        assert command("list", "operators", PYTHONHASHSEED="1").stdout == (
            command("list", "operators", PYTHONHASHSEED="2").stdout
        )
