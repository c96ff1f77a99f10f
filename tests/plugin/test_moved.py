"""A plugin written for module names of before the door is told what to import instead."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from dicompiler import plugin_api
from dicompiler.plugin.moved import remedy, renamed

DOOR = "; plugins import from one door now: from dicompiler.plugin_api import "
ANY = "; plugins import from dicompiler.plugin_api alone now: take from it what has the same purpose"


@pytest.mark.parametrize(
    ("module", "source", "told"),
    [
        ("old_a", "from dicompiler.problem import Problem, Strategy", DOOR + "Problem, Strategy"),
        ("old_b", "from dicompiler.target import Target  # a package now", DOOR + "Target"),
        ("old_c", "from dicompiler.plan import (\n    Plan,\n    load as read,\n)", DOOR + "Plan, load_plan"),
        ("old_d", "from dicompiler.tasks import make_task", DOOR + "share_task"),
        ("old_e", "import dicompiler.costs", ANY),
        ("old_f", "from dicompiler.blame import blamed", ANY),
        ("old_g", "import no_such_module", ""),
    ],
)
def test_the_error_names_the_door_and_the_names_there(
    module: str, source: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError) as caught:
        import_module(module)
    assert remedy(caught.value) == told


def test_another_error_has_no_remedy() -> None:
    assert remedy(ValueError("dicompiler.problem")) == ""


def test_every_name_that_is_told_is_one_of_the_door() -> None:
    assert {new for names in renamed().values() for new in names.values()} <= set(plugin_api.__all__)
